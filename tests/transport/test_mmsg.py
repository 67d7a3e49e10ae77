from __future__ import annotations

import errno
import socket
import struct
import sys
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.transport import mmsg
from dnsproxy.transport.mmsg import BATCH, CONNECTED, LARGEST, Receiver, Sender, layout_of


@pytest.fixture
def udp():
    """Make bound, non-blocking UDP sockets that are closed in the end."""
    with ExitStack() as stack:

        def make(host, *, dual=False):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            sock.setblocking(False)
            sock.bind((host, 0))
            return sock

        yield make


@pytest.fixture
def pair(udp):
    one, other = udp("127.0.0.1"), udp("127.0.0.1")
    one.connect(other.getsockname())
    other.connect(one.getsockname())
    return one, other


def test_structures_have_the_sizes_that_c_gives_them():
    msghdr = "PIPNPNi0P"
    assert mmsg.ctypes.sizeof(mmsg._Iovec) == struct.calcsize("PN")
    assert mmsg.ctypes.sizeof(mmsg._Header) == struct.calcsize(msghdr)
    assert mmsg._Message.length.offset == struct.calcsize(msghdr)
    assert mmsg.ctypes.sizeof(mmsg._Message) == struct.calcsize(msghdr + "I0P")
    assert struct.calcsize(mmsg._LENGTH * 3) == 3 * mmsg.ctypes.sizeof(mmsg._Message)


def test_control_messages_have_the_size_of_one_pktinfo():
    assert mmsg._ANY_IPV4.control == socket.CMSG_SPACE(struct.calcsize("i4s4s"))
    assert mmsg._ANY_IPV6.control == socket.CMSG_SPACE(struct.calcsize("16sI"))


@pytest.mark.parametrize("count", [1, 2, BATCH - 1, BATCH])
def test_a_batch_arrives_whole_and_in_order(pair, count):
    wires = [bytes([at]) * (at * 17 % 900) for at in range(count)]
    assert Sender(CONNECTED).send(pair[0].fileno(), wires, ()) == count
    assert Receiver(LARGEST, CONNECTED).receive(pair[1].fileno()) == wires


def test_the_largest_datagrams_pass(pair):
    wires = [bytes([at]) * 65_507 for at in range(3)]
    assert Sender(CONNECTED).send(pair[0].fileno(), wires, ()) == 3
    assert Receiver(LARGEST, CONNECTED).receive(pair[1].fileno()) == wires


@given(st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=BATCH), min_size=1, max_size=4))
def test_memory_is_reused_without_a_trace(batches):
    sender, receiver = Sender(CONNECTED), Receiver(512, CONNECTED)
    one, other = _pair()
    with one, other:
        for wires in batches:
            assert sender.send(one.fileno(), wires, ()) == len(wires)
            assert receiver.receive(other.fileno()) == [wire if len(wire) <= 512 else b"" for wire in wires]


def _pair():
    one, other = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    one.bind(("127.0.0.1", 0))
    other.bind(("127.0.0.1", 0))
    one.connect(other.getsockname())
    return one, other


def test_more_than_a_batch_waits_for_the_next_call(pair):
    for at in range(BATCH + 3):
        pair[0].send(bytes([at]))
    receiver = Receiver(LARGEST, CONNECTED)
    assert len(receiver.receive(pair[1].fileno())) == BATCH
    assert receiver.receive(pair[1].fileno()) == [bytes([at]) for at in range(BATCH, BATCH + 3)]
    assert receiver.receive(pair[1].fileno()) == []


def test_a_datagram_over_the_limit_comes_back_empty_and_is_counted(pair):
    for wire in (b"before", bytes(4096), bytes(4097), bytes(60_000), b"after"):
        pair[0].send(wire)
    receiver = Receiver(4096, CONNECTED)
    assert receiver.receive(pair[1].fileno()) == [b"before", bytes(4096), b"", b"", b"after"]
    assert receiver.oversize == 2


def test_what_the_socket_reports_is_raised(udp):
    gone, sock = udp("127.0.0.1"), udp("127.0.0.1")
    sock.connect(gone.getsockname())
    gone.close()
    sock.send(b"anyone there?")
    with pytest.raises(ConnectionRefusedError) as caught:
        Receiver(LARGEST, CONNECTED).receive(sock.fileno())
    assert caught.value.errno == errno.ECONNREFUSED


def test_sending_stops_at_the_datagram_that_the_kernel_refuses(pair):
    sender, fd = Sender(CONNECTED), pair[0].fileno()
    too_large = bytes(LARGEST)
    assert sender.send(fd, [b"one", b"two", too_large, b"three"], ()) == 2
    assert sender.send(fd, [too_large, b"three"], ()) == -errno.EMSGSIZE
    assert sender.send(fd, [b"three"], ()) == 1
    assert Receiver(LARGEST, CONNECTED).receive(pair[1].fileno()) == [b"one", b"two", b"three"]


def test_a_closed_descriptor_is_an_error():
    assert Sender(CONNECTED).send(-1, [b"x"], ()) == -errno.EBADF
    with pytest.raises(OSError, match="Bad file"):
        Receiver(LARGEST, CONNECTED).receive(-1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_a_peer_is_the_sockaddr_of_the_sender_and_takes_the_reply_back(udp, host):
    server = udp(host)
    layout = layout_of(server)
    loopback = "::1" if ":" in host else "127.0.0.1"
    clients = [udp(loopback) for _ in range(BATCH)]
    for client in clients:
        client.connect((loopback, server.getsockname()[1]))
        client.send(b"ping")
    receiver, sender = Receiver(4096, layout), Sender(layout)
    wires = receiver.receive(server.fileno())
    peers = receiver.peers(len(wires))
    assert [int.from_bytes(peer[2:4], "big") for peer in peers] == [c.getsockname()[1] for c in clients]
    assert {peer[layout.address] for peer in peers} == {socket.inet_pton(server.family, loopback)}
    replies = [b"pong %d" % at for at in range(BATCH)]
    assert sender.send(server.fileno(), replies, peers) == BATCH
    assert [client.recv(100) for client in clients] == replies


@pytest.mark.parametrize(
    ("host", "dual", "asked"),
    [
        ("0.0.0.0", False, ["127.0.0.1", "127.0.0.2", "127.9.9.9"]),
        ("::", True, ["127.0.0.2", "127.0.0.1", "127.0.0.3"]),
        ("::", False, ["::1", "::1"]),
        ("::", True, ["::1", "127.0.0.2", "::1"]),
    ],
)
def test_a_wildcard_socket_replies_from_the_address_that_was_asked(udp, host, dual, asked):
    server = udp(host, dual=dual)
    layout = layout_of(server)
    receiver, sender = Receiver(4096, layout), Sender(layout)
    for _ in range(3):  # the memory is as good the third time
        clients = [udp("::1" if ":" in address else "127.0.0.1") for address in asked]
        for client, address in zip(clients, asked, strict=True):
            client.connect((address, server.getsockname()[1]))  # takes replies from there only
            client.send(address.encode())
        wires = receiver.receive(server.fileno())
        peers = receiver.peers(len(wires))
        assert sender.send(server.fileno(), wires, peers) == len(asked)
        assert [client.recv(100).decode() for client in clients] == asked


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_peer_names_no_interface(udp, host):
    server = udp(host)
    layout = layout_of(server)
    client = udp("::1" if ":" in host else "127.0.0.1")
    client.sendto(b"x", ("::1" if ":" in host else "127.0.0.1", server.getsockname()[1]))
    receiver = Receiver(4096, layout)
    receiver.receive(server.fileno())
    raw = bytes(receiver._memory.peers[: layout.peer])
    (peer,) = receiver.peers(1)
    at = layout.interface
    assert int.from_bytes(raw[at : at + 4], sys.byteorder) == socket.if_nametoindex("lo")
    assert peer[at : at + 4] == bytes(4)
    assert peer[:at] + peer[at + 4 :] == raw[:at] + raw[at + 4 :]
