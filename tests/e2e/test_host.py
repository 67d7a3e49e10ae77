"""The host itself: its own programs are asked to account for names too, and nobody asks past the proxy."""

from __future__ import annotations

import dns.message
import dns.query
import dns.rcode
import pytest
from sites import POLICY, numbered, open_connection, site

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

HOST = """
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: host, labels: {app: test}}
"""


@pytest.fixture(scope="module")
def place():
    with site() as made:
        made.nsd({"open.test": numbered(300), "closed.test": numbered(9)})
        made.write(policy=POLICY + HOST, listen=["0.0.0.0:5353", "[::]:5353"])
        for kind in ("forward", "output", "redirect"):
            made.template(kind)
        made.start()
        with made.serve():
            yield made


def ask(namespace, name, server, *, tcp):
    query = dns.message.make_query(name, "A")
    exchange = dns.query.tcp if tcp else dns.query.udp
    return namespace.call(lambda: exchange(query, server, timeout=5))


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("server", ["192.0.2.53", "192.0.2.200", "10.1.0.1", "2001:db8:53::53"])
def test_whatever_server_a_client_names_the_proxy_answers(place, server, tcp):
    assert ask(place.client, "n1.closed.test", server, tcp=tcp).rcode() == dns.rcode.NXDOMAIN
    assert ask(place.client, "n1.open.test", server, tcp=tcp).answer[0][0].address == "198.51.100.1"


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("server", ["192.0.2.53", "2001:db8:53::53", "127.0.0.1"])
def test_the_hosts_own_queries_come_to_the_proxy_and_the_proxys_own_go_out(place, server, tcp):
    assert ask(place.router, "n2.closed.test", server, tcp=tcp).rcode() == dns.rcode.NXDOMAIN
    assert ask(place.router, "n2.open.test", server, tcp=tcp).answer[0][0].address == "198.51.100.2"


def test_the_host_connects_only_to_what_it_has_asked_for(place):
    with pytest.raises(OSError, match=r"refused|prohibited|permitted"):
        open_connection(place.router, "198.51.100.77")
    ask(place.router, "n77.open.test", "127.0.0.1", tcp=False)
    open_connection(place.router, "198.51.100.77").close()
    with pytest.raises(OSError, match=r"refused|prohibited|route"):
        open_connection(place.client, "198.51.100.77")
    assert "198.51.100.77" in place.addresses("ep.default.host.port4")
