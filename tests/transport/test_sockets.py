from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dnsproxy.errors import NetworkError, RightsError
from dnsproxy.transport.sockets import BUFFER, bound, enlarge, resolve

DATAGRAM, STREAM = socket.SOCK_DGRAM, socket.SOCK_STREAM
both = pytest.mark.parametrize("kind", [DATAGRAM, STREAM], ids=["udp", "tcp"])


@both
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_a_socket_is_bound_where_it_was_asked_to(kind, host):
    with bound(host, 0, kind) as sock:
        assert sock.type == kind
        assert sock.getsockname()[0] == host
        assert not sock.getblocking()


@both
def test_both_wildcards_stand_side_by_side(kind):
    with bound("::", 0, kind) as six, bound("0.0.0.0", six.getsockname()[1], kind) as four:
        assert four.getsockname()[1] == six.getsockname()[1]


@both
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_occupied_port_names_the_suspects_and_the_way_to_find_out(kind, host):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind) as other:
        other.bind((host, 0))
        if kind == STREAM:
            other.listen()
        port = other.getsockname()[1]
        with pytest.raises(NetworkError) as caught:
            bound(host, port, kind)
    text = str(caught.value)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert text.startswith(f"{'UDP' if kind == DATAGRAM else 'TCP'} {where} is taken (EADDRINUSE)")
    assert "systemd-resolved" in text
    assert ("`ss -lunp`" if kind == DATAGRAM else "`ss -ltnp`") in text


@both
def test_an_address_of_another_host_is_said_to_be_one(kind):
    with pytest.raises(NetworkError, match=r"192\.0\.2\.1:5353 .*no such address; `ip address`"):
        bound("192.0.2.1", 5353, kind)


def test_what_is_no_address_is_said_to_be_none():
    with pytest.raises(NetworkError, match=r"localhost:53: .*IP address"):
        bound("localhost", 53, DATAGRAM)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes the rights of root away for a moment")
@both
def test_a_missing_right_names_the_capability(kind):
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 53:
        pytest.skip("every port is open to everybody here")
    os.seteuid(65_534)
    try:
        with pytest.raises(RightsError, match=r"127\.0\.0\.77:53 .*EACCES.*CAP_NET_BIND_SERVICE.*5353"):
            bound("127.0.0.77", 53, kind)
    finally:
        os.seteuid(0)


@both
def test_any_other_refusal_is_passed_on_in_one_sentence(kind):
    with pytest.raises(NetworkError, match=r"\[fe80::1\]:5353 cannot be bound \(EINVAL\): Invalid argument"):
        bound("fe80::1", 5353, kind)


def test_a_scope_is_resolved_to_its_interface():
    family, address = resolve("fe80::1%lo", 53, DATAGRAM)
    assert family == socket.AF_INET6
    assert address[3] == socket.if_nametoindex("lo")


def test_the_receive_buffer_grows_as_far_as_we_may():
    with socket.socket(socket.AF_INET, DATAGRAM) as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        enlarge(sock)
        after = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    limit = int(Path("/proc/sys/net/core/rmem_max").read_text())
    assert after >= min(BUFFER, 2 * limit) >= before
