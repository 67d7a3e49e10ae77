from __future__ import annotations

import asyncio
from ipaddress import ip_network

import dns.message
import dns.rdatatype
import pytest

from dnsproxy import names
from dnsproxy.endpoints import Endpoint, EndpointTable, built_in_host
from dnsproxy.rules.policy import load
from dnsproxy.warmup import WarmUp, address_of, query, targets

ONE = b"\x0a\x01\x00\x05"
NAME = names.from_text("git.example")

DOCUMENTS = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ci, labels: {app: ci}}
spec: {addresses: [10.1.0.5]}
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: ci}
spec:
  endpointSelector: {matchLabels: {app: ci}}
  allow: ["git.example:443", "*.wild.example"]
  resolve: ["asked.example"]
"""


class Upstream:
    """Answers in place of the exchange: with `flags` in the fourth octet and TC where it says so."""

    def __init__(self, *, code=0, truncates=False):
        self.asked = []
        self.code = code
        self.truncates = truncates
        self.enough = asyncio.Event()

    def query(self, wire, source, sink, peer, now, *, stream):
        self.asked.append((source, wire, stream))
        third = 0x82 if self.truncates and not stream else 0x80
        if len(self.asked) >= 4:
            self.enough.set()
        return sink, wire[:2] + bytes((third, self.code)) + wire[4:], peer


def table(*endpoints):
    return EndpointTable(endpoints, built_in_host())


def endpoint(name, *prefixes):
    return Endpoint("default", name, {}, tuple(map(ip_network, prefixes)))


def test_a_query_is_one_that_others_can_read():
    message = dns.message.from_wire(query(7, NAME, 28))
    assert message.id == 7
    assert message.question[0].name.to_text() == "git.example."
    assert message.question[0].rdtype == dns.rdatatype.AAAA
    assert message.payload == 1232
    assert message.flags == 0x0100


def test_only_exact_names_that_may_be_asked_and_connected_to_are_looked_up():
    endpoints, policy = load([("policy.yaml", DOCUMENTS)], enforcement="default")
    assert list(targets(policy, endpoints)) == [(ONE, NAME)]


def test_an_endpoint_asks_from_an_address_that_is_its_own():
    inner, outer = endpoint("inner", "10.1.0.0/31"), endpoint("outer", "10.1.0.0/24")
    found = table(inner, outer)
    assert address_of(outer, found) == b"\x0a\x01\x00\x02"
    assert address_of(inner, found) == b"\x0a\x01\x00\x00"
    assert address_of(found.host, found) == b"\x7f\x00\x00\x01"


def test_an_endpoint_without_an_address_of_its_own_is_left_out():
    whole, half, other = (
        endpoint("whole", "10.1.0.0/31"),
        endpoint("half", "10.1.0.0/32"),
        endpoint("other", "10.1.0.1/32"),
    )
    assert address_of(whole, table(whole, half, other)) is None


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        (0, {"asked": 4, "answered": 4, "failed": 0}),
        (2, {"asked": 4, "answered": 0, "failed": 4}),
    ],
)
async def test_a_round_asks_for_both_families_and_counts_what_comes_of_it(code, counts):
    upstream = Upstream(code=code)
    warm = WarmUp(upstream, lambda: [(ONE, NAME), (ONE, names.from_text("b.example"))], 3600.0)
    task = asyncio.create_task(warm.run())
    await upstream.enough.wait()
    task.cancel()
    kinds = [(wire[12:-15], wire[-14]) for _, wire, _ in upstream.asked]
    assert kinds == [
        (NAME, 1),
        (NAME, 28),
        (names.from_text("b.example"), 1),
        (names.from_text("b.example"), 28),
    ]
    assert warm.counts == counts


async def test_a_truncated_answer_is_asked_for_again_over_tcp():
    upstream = Upstream(truncates=True)
    warm = WarmUp(upstream, lambda: [(ONE, NAME)], 3600.0)
    task = asyncio.create_task(warm.run())
    await upstream.enough.wait()
    task.cancel()
    assert [stream for *_, stream in upstream.asked] == [False, True, False, True]
    assert warm.counts == {"asked": 4, "answered": 2, "failed": 0}
