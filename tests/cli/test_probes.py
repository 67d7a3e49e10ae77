"""What the doctor looks at, on loopback."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from dnslib import EDNS0, DNSRecord, EDNSOption

from dnsproxy.cli import probes
from dnsproxy.errors import DnsproxyError


@pytest.fixture
def server():
    """One answer over UDP, with this extended error or none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        threads = []

        def answering(ede):
            def answer():
                wire, peer = sock.recvfrom(512)
                reply = DNSRecord.parse(wire).reply()
                reply.header.rcode = 3
                if ede is not None:
                    reply.add_ar(EDNS0(opts=[EDNSOption(15, ede.to_bytes(2))]))
                sock.sendto(b"??" + b"x" * 20, peer)  # somebody else's: it is waited on
                sock.sendto(reply.pack(), peer)

            threads.append(threading.Thread(target=answer))
            threads[0].start()
            return sock.getsockname()

        yield answering
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(("ede", "ours"), [(15, True), (18, True), (23, False), (None, False)])
def test_a_refusal_of_this_proxy_is_told_by_its_extended_error(server, ede, ours):
    reply = probes.ask(server(ede), "x.invalid", stream=False)
    assert (reply.rcode, reply.ours) == ("NXDOMAIN", ours)


def test_nobody_there_is_said_in_words():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        place = sock.getsockname()
    assert probes.ask(place, ".", stream=True) == "Connection refused"
    assert probes.ask(place, ".", stream=False) == "Connection refused"


@pytest.mark.parametrize("stream", [False, True])
def test_who_holds_a_port_is_found(stream):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        if stream:
            sock.listen()
        assert os.getpid() in probes.holders(port, stream=stream)
        assert probes.bind_error("127.0.0.1", port, stream=stream).strerror == "Address already in use"
    assert probes.holders(port, stream=stream) == {}
    assert probes.bind_error("127.0.0.1", port, stream=stream) is None


def test_rights_are_read_from_the_process():
    assert probes.capabilities() <= set(probes.CAPABILITIES)
    assert probes.capabilities(2**30) is None
    assert 0 <= probes.first_free_port() <= 65536


def test_sets_and_redirects_in_rules_are_found():
    match = {"op": "==", "left": {"payload": {}}, "right": "@ep.default.ci.addr4"}
    rules = [{"family": "inet", "table": "t", "expr": [{"match": match}, {"accept": None}]}]
    assert probes.named_sets(rules) == {("inet", "t", "ep.default.ci.addr4")}
    assert not probes.redirects(rules)
    assert probes.redirects([{"family": "inet", "table": "t", "expr": [{"redirect": {"port": 53}}]}])


def test_a_missing_tool_is_said(monkeypatch):
    monkeypatch.setattr(probes.shutil, "which", lambda *_, **__: None)
    with pytest.raises(DnsproxyError, match="nft is not installed"):
        probes.rules()


def test_a_client_is_a_namespace_or_a_process():
    found = probes.client(None, os.getpid())
    assert str(found.resolv_conf) == f"/proc/{os.getpid()}/root/etc/resolv.conf"
    assert probes.inside(None, lambda: 5) == 5
    assert probes.client(None, None) is None
