from __future__ import annotations

import asyncio
import errno
import random
import socket
from contextlib import asynccontextmanager, contextmanager

import pytest
from transport_fakes import Echo, Later, ask, message, reply_to, soon, udp_client, until

from dnsproxy.errors import NetworkError
from dnsproxy.transport.mmsg import BATCH, CONNECTED, LARGEST, Receiver, Sender
from dnsproxy.transport.sockets import LARGEST_QUERY
from dnsproxy.transport.udp import COUNTS, QUEUE, ROUNDS, SENDING, Datagrams, UdpListener, open_udp

FOUR, SIX = bytes((127, 0, 0, 1)), bytes(15) + b"\x01"


@contextmanager
def listening(exchange, host="127.0.0.1", sock=None):
    listener = UdpListener(sock or open_udp(host, 0), exchange, asyncio.get_running_loop())
    try:
        yield listener, listener._sock.getsockname()[1]
    finally:
        listener.close()


def local(asked):
    return "::1" if ":" in asked else "127.0.0.1"


def dual_stack():
    sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("::", 0))
    return sock


@pytest.mark.parametrize(
    ("host", "asked", "source"),
    [
        ("127.0.0.1", "127.0.0.1", FOUR),
        ("::1", "::1", SIX),
        ("0.0.0.0", "127.0.0.1", FOUR),
        ("0.0.0.0", "127.0.0.2", FOUR),
        ("::", "::1", SIX),
    ],
)
async def test_a_client_gets_its_answer_from_the_address_it_asked(host, asked, source):
    exchange = Echo()
    with listening(exchange, host) as (_, port), udp_client(port, asked, local(asked)) as client:
        assert await ask(client, message(1)) == reply_to(message(1))
    assert exchange.asked == [(message(1), source, False)]


@pytest.mark.parametrize(("asked", "source"), [("127.0.0.1", FOUR), ("127.0.0.2", FOUR), ("::1", SIX)])
async def test_a_dual_stack_socket_serves_both_families(asked, source):
    exchange = Echo()
    with listening(exchange, sock=dual_stack()) as (_, port), udp_client(port, asked, local(asked)) as client:
        assert await ask(client, message(2)) == reply_to(message(2))
    assert exchange.asked == [(message(2), source, False)]


async def test_both_wildcards_serve_their_family_on_one_port():
    exchange = Echo()
    with (
        listening(exchange, "::") as (_, port),
        listening(exchange, sock=open_udp("0.0.0.0", port)),
        udp_client(port, "127.0.0.1") as four,
        udp_client(port, "::1") as six,
    ):
        assert await ask(four, message(4)) == reply_to(message(4))
        assert await ask(six, message(6)) == reply_to(message(6))
    assert [len(source) for _, source, _ in exchange.asked] == [4, 16]


async def test_a_burst_of_many_batches_is_answered_to_the_last():
    queries = [message(number) for number in range(10 * BATCH + 7)]
    with listening(Echo()) as (listener, port), udp_client(port) as client:
        for query in queries:
            client.send(query)
        loop = asyncio.get_running_loop()
        answers = [await soon(loop.sock_recv(client, 65_535)) for _ in queries]
        assert answers == [reply_to(query) for query in queries]
        assert listener.counts == {**dict.fromkeys(COUNTS, 0), "sent": len(queries)}


async def test_one_turn_takes_a_bounded_number():
    exchange = Later()
    with listening(exchange) as (listener, port), udp_client(port) as client:
        for number in range(ROUNDS * BATCH + 100):
            client.send(message(number))
        listener._readable()
        assert exchange.asked == ROUNDS * BATCH
        listener._readable()
        assert exchange.asked == ROUNDS * BATCH + 100


async def test_answers_of_one_turn_leave_in_one_flush_and_to_the_right_clients():
    exchange = Later()
    with listening(exchange) as (listener, port), udp_client(port) as one, udp_client(port) as other:
        for number in range(100):
            (one, other)[number % 2].send(message(number))
        await until(lambda: len(exchange.waiting) == 100)
        random.Random(1).shuffle(exchange.waiting)
        for _ in range(100):
            exchange.release()
        assert listener.counts["sent"] == 0
        loop = asyncio.get_running_loop()
        for client, parity in ((one, 0), (other, 1)):
            got = {(await soon(loop.sock_recv(client, 100)))[:2] for _ in range(50)}
            assert got == {message(number)[:2] for number in range(parity, 100, 2)}


async def test_garbage_and_exceptions_stop_nothing(caplog):
    exchange, noise = Echo(), random.Random(2)
    with listening(exchange) as (listener, port), udp_client(port) as client:
        sent = [
            b"",
            b"\x00",
            b"!!" + bytes(40),
            b"..",
            bytes(LARGEST_QUERY),
            bytes(LARGEST_QUERY + 1),
            bytes(65_507),
        ]
        sent += [b"!!" + noise.randbytes(noise.randrange(200)) for _ in range(300)]
        for wire in sent:
            client.send(wire)
        await until(lambda: len(exchange.asked) == len(sent))
        client.send(message(9))
        loop = asyncio.get_running_loop()
        while (await soon(loop.sock_recv(client, 65_535)))[:2] != message(9)[:2]:
            pass
        assert listener.counts["errors"] == 301
        assert listener.counts["oversize"] == 2
    assert [wire for wire, _, _ in exchange.asked[4:7]] == [bytes(LARGEST_QUERY), b"", b""]
    assert len(caplog.records) == 1


async def test_an_exception_costs_only_its_own_datagram():
    with listening(Echo()) as (listener, _):
        peer = b"\x02\x00\x30\x39" + FOUR + bytes(8)
        batch = [(b"!!" + bytes(30), peer), (message(1), peer), (b"!!" + bytes(30), peer), (message(2), peer)]
        listener.ask(batch, 1.0)
        assert listener.counts["errors"] == 2
        assert listener._wires == [reply_to(message(1)), reply_to(message(2))]


async def test_port_0_is_dropped():
    exchange = Echo()
    with listening(exchange) as (listener, _):
        listener.ask([(message(1), b"\x02\x00\x00\x00" + FOUR + bytes(8))], 1.0)
        assert listener.counts["portless"] == 1
        assert exchange.asked == []
        assert listener._wires == []


async def test_an_open_udp_socket_has_its_errors_from_one_place():
    with open_udp("127.0.0.1", 0) as sock, pytest.raises(NetworkError, match=r"UDP 127\.0\.0\.1.*ss -lunp"):
        open_udp(*sock.getsockname())


async def test_a_pause_stops_the_questions_and_lets_answers_leave_and_others_read_on():
    exchange, loop = Later(), asyncio.get_running_loop()
    with listening(exchange) as (listener, port), udp_client(port) as client:
        client.send(message(1))
        await until(lambda: exchange.waiting)
        client.send(message(2))
        listener.pause()
        listener._readable()  # as if the loop had seen it readable in the same turn
        exchange.release()
        assert await soon(loop.sock_recv(client, 100)) == reply_to(message(1))
        assert exchange.asked == 1
        with listening(Echo(), sock=listener._sock.dup()):
            assert await soon(loop.sock_recv(client, 100)) == reply_to(message(2))
            listener.close()
            assert await ask(client, message(3)) == reply_to(message(3))


async def test_a_listener_keeps_4096_datagrams_for_its_successor():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # passed in by somebody who enlarged nothing
    sock.bind(("127.0.0.1", 0))
    with listening(Later(), sock=sock) as (listener, port), udp_client(port) as client:
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < 4_096 * 768:
            pytest.skip("needs CAP_NET_ADMIN or a larger net.core.rmem_max")
        listener.pause()
        for number in range(4_096):
            client.send(message(number))
        successor = Later()
        with listening(successor, sock=sock.dup()):
            await until(lambda: successor.asked == 4_096)


async def test_closing_sends_what_is_queued_and_ignores_what_comes_after():
    exchange = Later()
    with listening(exchange) as (listener, port), udp_client(port) as client:
        for number in (1, 2):
            client.send(message(number))
        await until(lambda: len(exchange.waiting) == 2)
        exchange.release()
        listener.close()
        exchange.release()
        listener.close()
        assert client.recv(100) == reply_to(message(1))
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            client.recv(100)


class Quiet(Datagrams):
    """Datagrams that keep what arrives and what went wrong."""

    def __init__(self, sock, sender=None, receiver=None):
        self.got = []
        self.codes = []
        loop = asyncio.get_running_loop()
        counts = dict.fromkeys(SENDING, 0)
        super().__init__(
            sock, receiver or Receiver(LARGEST, CONNECTED), sender or Sender(CONNECTED), loop, counts
        )

    def take(self, wires, now):
        self.got += wires

    def trouble(self, code):
        self.codes.append(code)
        if self.codes == [errno.EMSGSIZE, errno.EMSGSIZE]:
            self.send(b"sent from inside", None)


@asynccontextmanager
async def unix_pair():
    """A pair whose buffer really fills up, which loopback UDP's does not."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.setblocking(False)
    other.setblocking(False)
    quiet = Quiet(one)
    try:
        yield quiet, other
    finally:
        quiet.close()
        other.close()


async def test_a_full_buffer_delays_and_loses_nothing():
    sent = [b"%d" % number for number in range(1_000)]
    async with unix_pair() as (quiet, other):
        for wire in sent:
            quiet.send(wire, None)
        await until(lambda: quiet._blocked)
        for wire in (b"late", b"later"):
            quiet.send(wire, None)
        loop = asyncio.get_running_loop()
        assert [await soon(loop.sock_recv(other, 100)) for _ in range(1_002)] == [*sent, b"late", b"later"]
        await until(lambda: not quiet._blocked)
        assert not loop.remove_writer(quiet._fd)  # none is left to turn the loop for nothing
        quiet.send(b"and on", None)
        assert await soon(loop.sock_recv(other, 100)) == b"and on"
        assert quiet.counts == {"sent": 1_003, "dropped": 0, "refused": 0}


async def test_what_waits_is_bounded():
    async with unix_pair() as (quiet, other):
        quiet.send(b"0", None)
        await until(lambda: quiet.counts["sent"] == 1)
        while not quiet._blocked:
            quiet.send(b"1", None)
            await asyncio.sleep(0)
        for _ in range(QUEUE + 10):
            quiet.send(b"2", None)
        assert len(quiet._wires) == len(quiet._peers) == QUEUE
        assert quiet.counts["dropped"] == 10 + 1  # one was already waiting
        assert other.recv(100) == b"0"


async def test_a_refused_datagram_costs_only_itself():
    with udp_pair() as (one, other):
        quiet = Quiet(one)
        for wire in (b"before", bytes(LARGEST), b"between", bytes(LARGEST), b"after"):
            quiet.send(wire, None)
        loop = asyncio.get_running_loop()
        got = [await soon(loop.sock_recv(other, 100)) for _ in range(4)]
        assert got == [b"before", b"between", b"after", b"sent from inside"]
        assert quiet.codes == [errno.EMSGSIZE] * 2
        assert quiet.counts["refused"] == 2
        quiet.close()


@contextmanager
def udp_pair():
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other,
    ):
        for sock in (one, other):
            sock.setblocking(False)
            sock.bind(("127.0.0.1", 0))
        one.connect(other.getsockname())
        other.connect(one.getsockname())
        yield one, other


class Scripted:
    """A sender that fails as it is told, then sends."""

    def __init__(self, *script):
        self.script = list(script)
        self.real = Sender(CONNECTED)

    def send(self, fd, wires, peers):
        if self.script:
            result = self.script.pop(0)
            if isinstance(result, Exception):
                raise result
            return result
        return self.real.send(fd, wires, peers)


@pytest.mark.parametrize(
    "code", [errno.EPERM, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ENOBUFS, errno.ENETUNREACH]
)
async def test_errors_of_the_network_pass_by(code):
    with udp_pair() as (one, other):
        quiet = Quiet(one, Scripted(-code))
        quiet.send(b"lost", None)
        quiet.send(b"kept", None)
        assert await soon(asyncio.get_running_loop().sock_recv(other, 100)) == b"kept"
        assert quiet.codes == [code]
        quiet.close()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
async def test_a_send_that_has_to_wait_is_made_again(code):
    with udp_pair() as (one, other):
        quiet = Quiet(one, Scripted(-code, -code))
        quiet.send(b"kept", None)
        assert await soon(asyncio.get_running_loop().sock_recv(other, 100)) == b"kept"
        assert quiet.codes == []
        quiet.close()


async def test_an_error_of_ours_while_sending_does_not_wedge_the_queue():
    seen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))
    with udp_pair() as (one, other):
        quiet = Quiet(one, Scripted(ValueError("ours")))
        quiet.send(b"lost", None)
        await until(lambda: seen)
        quiet.send(b"kept", None)
        assert await soon(asyncio.get_running_loop().sock_recv(other, 100)) == b"kept"
        quiet.close()
    assert [str(error) for error in seen] == ["ours"]


async def test_what_a_socket_reports_goes_to_trouble_and_it_serves_on():
    with udp_pair() as (one, other):
        quiet = Quiet(one)
        address = other.getsockname()
        other.close()
        quiet.send(b"nobody there", None)
        await until(lambda: quiet.codes)
        assert quiet.codes == [errno.ECONNREFUSED]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as back:
            back.bind(address)
            back.sendto(b"here again", one.getsockname())
            await until(lambda: quiet.got)
            assert quiet.got == [b"here again"]
            quiet.close()
