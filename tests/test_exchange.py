"""The exchange on real policy, plan and caches; the world is a few lists of what was sent where."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import make_plan

from dnsproxy.addresses import from_text as address
from dnsproxy.exchange import LEADERS, RESENDS, VARIANTS, Exchange
from dnsproxy.namemanager.elements import key_suffix
from dnsproxy.namemanager.plan import Hold
from dnsproxy.names import from_text
from dnsproxy.rules.policy import load
from dnsproxy.servers import FAILURES, Channel, Routes, Server

DOCUMENTS = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ci, labels: {app: ci}}
spec: {addresses: [192.0.2.10, "2001:db8::10"]}
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: strict, labels: {app: ci}}
spec: {addresses: [192.0.2.20], denyReply: refused}
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: ci}
spec:
  endpointSelector: {matchLabels: {app: ci}}
  allow:
  - {name: www.example.com, ports: [443]}
  - {name: alias.example.com, ports: [443], cnames: true}
  - {name: inside.example.com, ports: [443], cidrs: [10.0.0.0/8]}
  resolve: ["*.lookup.test"]
"""
NARROWER = DOCUMENTS.replace("www.example.com", "other.example.com")
OTHER = """---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: other}
spec:
  endpointSelector: {matchLabels: {app: other}}
  allow:
  - {name: www.example.com, ports: [443]}
  - {name: inside.example.com, ports: [443]}
"""
APART = ("{name: strict, labels: {app: ci}}", "{name: strict, labels: {app: other}}")
CI, STRICT, STRANGER = address("192.0.2.10"), address("192.0.2.20"), address("192.0.2.99")


class Sent(list):
    """A sink that remembers what it was given."""

    def send(self, wire, peer):
        self.append((wire, peer))


class Line:
    """The sink of an upstream channel: what is sent goes into the log of all channels, in order."""

    def __init__(self, log):
        self.log = log
        self.channel = None

    def send(self, wire, peer):
        assert peer is None
        self.log.append((self.channel, dns.message.from_wire(wire)))


class World:
    """One exchange with two upstream servers of two sockets and a stream each."""

    def __init__(self, servers=2, documents=DOCUMENTS, **settings):
        self.endpoints, self.policy = load([("policies.yaml", documents)], enforcement="default")
        self.plan = make_plan(self.endpoints, self.policy)
        self.client, self.waiting, self.events = Sent(), Sent(), []
        self.servers = [Server(f"198.51.100.{number + 1}") for number in range(servers)]
        self.log = []
        for server in self.servers:
            server.udp = [self.channel(server, stream=False) for _ in range(2)]
            server.tcp = self.channel(server, stream=True)
        self.exchange = Exchange(
            endpoints=self.endpoints, policy=self.policy, routes=Routes(self.servers, {}), plan=self.plan,
            waiting=self.waiting, events=self.events, **settings,
        )  # fmt: skip

    def channel(self, server, *, stream):
        line = Line(self.log)
        line.channel = Channel(server, line, stream=stream)
        return line.channel

    def ask(self, text, qtype="A", source=CI, now=100.0, *, stream=False, **options):
        query = dns.message.make_query(text, qtype, **options)
        self.act(self.exchange.query(query.to_wire(), source, self.client, "peer", now, stream=stream))
        return query

    def act(self, action):
        if action is not None:
            sink, wire, peer = action
            sink.send(wire, peer)

    def tick(self, now):
        for action in self.exchange.expire(now):
            self.act(action)

    def swap(self, documents):
        """Reload the policy."""
        endpoints, policy = load([("policies.yaml", documents)], enforcement="default")
        self.plan.set_policy(policy, endpoints)
        self.exchange.set_policy(policy, endpoints)

    def upstream(self, server=0, *, stream=False):
        """Every (channel, message) that went to a server, in the order of sending."""
        return [
            (channel, query)
            for channel, query in self.log
            if channel.server is self.servers[server] and channel.stream is stream
        ]

    def answer(self, records, server=0, rcode=0, now=100.1, *, stream=False, edit=lambda wire: wire):
        channel, query = self.upstream(server, stream=stream)[-1]
        response = dns.message.make_response(query)
        response.set_rcode(rcode)
        response.answer = [dns.rrset.from_text(*record) for record in records]
        self.act(self.exchange.answer(channel, edit(response.to_wire(max_size=65_535)), now))

    def replies(self):
        return [dns.message.from_wire(wire) for wire, _ in self.client]

    def acknowledge(self):
        """Play the writer: apply what is waited for and let the answers go."""
        for wire, hold in self.waiting:
            self.plan.acknowledged((), hold.elements)
            hold.sink.send(wire, hold.peer)
        self.waiting.clear()


WWW = [("www.example.com.", 60, "IN", "A", "93.184.216.34")]


def test_an_allowed_query_goes_upstream_under_an_id_of_our_own_and_nothing_else_changes():
    world = World(entropy=lambda size: b"\xab\xcd" * (size // 2))
    query = world.ask("WwW.example.com", use_edns=0, payload=4096, want_dnssec=True)
    [(_, sent)] = world.upstream()
    assert sent.id == 0xABCD
    assert sent.to_wire()[2:] == query.to_wire()[2:]


def test_an_answer_is_held_until_its_elements_are_applied_and_then_comes_byte_for_byte():
    world = World()
    query = world.ask("www.example.com")
    world.answer(WWW)
    assert world.client == []
    [(wire, hold)] = world.waiting
    assert isinstance(hold, Hold)
    assert {element.spec.name for element in hold.elements} == {"ep.default.ci.port4"}
    world.acknowledge()
    [(reply, peer)] = world.client
    assert peer == "peer"
    assert reply == wire
    assert dns.message.from_wire(reply).id == query.id
    assert dns.message.from_wire(reply).answer[0].to_text() == "www.example.com. 60 IN A 93.184.216.34"


def test_a_known_address_is_released_at_once():
    world = World()
    world.ask("www.example.com")
    world.answer(WWW)
    world.acknowledge()
    world.ask("www.example.com", now=101.0)
    world.answer(WWW, now=101.1)
    assert world.waiting == []
    assert len(world.client) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("qtype", ["A", "AAAA", "TXT", "PTR", "HTTPS", "ANY", "TYPE65400"])
def test_a_denied_name_causes_no_upstream_packet_for_any_type(qtype, stream):
    world = World()
    world.ask("denied.example.net", qtype, stream=stream)
    [reply] = world.replies()
    assert reply.rcode() == dns.rcode.NXDOMAIN
    assert reply.authority[0].rdtype == dns.rdatatype.SOA
    assert world.log == []


def test_a_denial_is_refused_where_the_endpoint_says_so():
    world = World()
    world.ask("denied.example.net", source=STRICT)
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.REFUSED]


def test_a_denial_tells_the_reason_to_a_client_with_opt():
    world = World()
    world.ask("denied.example.net", use_edns=0)
    [reply] = world.replies()
    [option] = reply.options
    assert "default/ci" in option.text


def test_an_unknown_client_is_refused_and_teaches_nothing():
    world = World()
    world.ask("www.example.com", source=STRANGER)
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.REFUSED]
    assert world.upstream() == []
    assert world.exchange.flying == 0


def _wrong_id(wire):
    return bytes((wire[0] ^ 1, *wire[1:]))


def _wrong_type(wire):
    at = wire.index(b"\x03com\x00") + 5
    return wire[:at] + b"\x00\x1c" + wire[at + 2 :]


def _query_bit(wire):
    return wire[:2] + bytes((wire[2] & 0x7F,)) + wire[3:]


@pytest.mark.parametrize("edit", [_wrong_id, _wrong_type, _query_bit, lambda wire: wire[:12], lambda _: b""])
def test_what_is_not_the_answer_is_dropped_and_the_wait_goes_on(edit):
    world = World()
    world.ask("www.example.com")
    world.answer(WWW, edit=edit)
    assert (world.client, world.waiting, world.exchange.counts["strays"]) == ([], [], 1)
    world.answer(WWW)
    assert len(world.waiting) == 1


def test_an_answer_on_another_socket_is_dropped():
    world = World()
    world.ask("www.example.com")
    [(channel, query)] = world.upstream()
    [other] = [other for other in world.servers[0].udp if other is not channel]
    response = dns.message.make_response(query)
    assert world.exchange.answer(other, response.to_wire(), 100.1) is None
    assert world.exchange.counts["strays"] == 1


def test_an_answer_that_changes_the_case_of_the_question_is_the_answer():
    world = World()
    world.ask("www.example.com")
    world.answer([], edit=lambda wire: wire.replace(b"\x03www", b"\x03WWW"))
    assert len(world.client) == 1


def test_an_answer_counts_once():
    world = World()
    world.ask("a.lookup.test")
    world.answer([])
    world.answer([])
    assert len(world.client) == 1


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED])
def test_a_servfail_or_refused_goes_to_the_next_server_and_the_last_is_passed_on(rcode):
    world = World()
    query = world.ask("www.example.com")
    world.answer([], rcode=rcode)
    assert world.client == []
    world.answer([], server=1, rcode=rcode)
    assert [(reply.id, reply.rcode()) for reply in world.replies()] == [(query.id, rcode)]


def test_nxdomain_is_final():
    world = World()
    world.ask("www.example.com")
    world.answer([], rcode=dns.rcode.NXDOMAIN)
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.NXDOMAIN]
    assert world.upstream(1) == []


def test_a_silent_server_is_followed_by_the_next_and_both_may_answer():
    world = World(attempt=1.0)
    world.ask("www.example.com")
    assert world.exchange.expire(100.9) == []
    for action in world.exchange.expire(101.0):
        world.act(action)
    assert len(world.upstream(1)) == 1
    world.answer(WWW, server=0, now=101.2)
    assert len(world.waiting) == 1
    world.answer(WWW, server=1, now=101.3)
    assert world.exchange.counts["strays"] == 1


def test_one_budget_over_all_servers_then_servfail_and_nothing_is_left_behind():
    world = World(attempt=1.0, timeout=3.5)
    query = world.ask("www.example.com", use_edns=0)
    for tick in range(101, 106):
        for action in world.exchange.expire(float(tick)):
            world.act(action)
    [reply] = world.replies()
    assert (reply.id, reply.rcode()) == (query.id, dns.rcode.SERVFAIL)
    assert len(world.upstream(0)) + len(world.upstream(1)) == 4
    assert world.exchange.flying == 0
    assert not any(channel.pending for server in world.servers for channel in server.udp)


def test_a_servfail_heard_earlier_is_passed_on_when_the_others_stay_silent():
    world = World(attempt=1.0, timeout=2.0)
    world.ask("www.example.com")
    world.answer(
        [], rcode=dns.rcode.SERVFAIL, edit=lambda wire: wire[:3] + bytes((wire[3] | 0x20,)) + wire[4:]
    )
    for tick in (101.0, 102.0):
        for action in world.exchange.expire(tick):
            world.act(action)
    [(reply, _)] = world.client
    assert reply[3] & 0x20, "the upstream's own bytes, not ours"


def test_a_server_that_fails_often_is_asked_last():
    world = World(attempt=1.0)
    for number in range(FAILURES):
        world.ask(f"n{number}.lookup.test")
    for action in world.exchange.expire(101.0):
        world.act(action)
    before = len(world.upstream(0))
    world.ask("www.example.com", now=101.0)
    assert len(world.upstream(0)) == before


def test_a_refused_socket_sends_its_queries_to_the_next_server_at_once():
    world = World()
    world.ask("www.example.com")
    [(channel, _)] = world.upstream()
    for action in world.exchange.lost(channel, 100.0):
        world.act(action)
    assert len(world.upstream(1)) == 1
    [(channel, _)] = world.upstream(1)
    for action in world.exchange.lost(channel, 100.0):
        world.act(action)
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.SERVFAIL]


def test_a_stream_that_served_and_closed_is_opened_again_for_what_was_waiting():
    world = World(servers=1)
    world.ask("one.lookup.test", stream=True)
    world.answer([], stream=True)
    world.ask("two.lookup.test", stream=True)
    for action in world.exchange.lost(world.servers[0].tcp, 100.2):
        world.act(action)
    assert len(world.upstream(stream=True)) == 3
    assert world.servers[0].failures == 0
    world.answer([], stream=True)
    assert len(world.client) == 2


def test_without_any_socket_the_answer_is_servfail():
    world = World()
    for server in world.servers:
        server.udp = []
    world.ask("www.example.com")
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.SERVFAIL]
    assert world.exchange.flying == 0


def test_queries_in_flight_are_bounded_for_one_client_and_for_all():
    world = World(queries=3, queries_per_client=2)
    for number in range(3):
        world.ask(f"n{number}.lookup.test")
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.SERVFAIL]
    for number in range(2):
        world.ask(f"n{number}.lookup.test", source=STRICT)
    assert world.exchange.flying == 3
    assert world.exchange.counts["limited"] == 2


def test_a_client_gets_no_more_than_it_announced():
    many = [("a.lookup.test.", 60, "IN", "TXT", *(f'"{letter * 200}"' for letter in "abcd"))]
    world = World()
    world.ask("a.lookup.test", "TXT")
    world.answer(many)
    world.ask("a.lookup.test", "TXT", use_edns=0, payload=1232)
    world.answer(many)
    world.ask("a.lookup.test", "TXT", stream=True)
    world.answer(many, stream=True)
    cut, whole, streamed = world.replies()
    assert cut.flags & dns.flags.TC
    assert (cut.answer, len(whole.answer), len(streamed.answer)) == ([], 1, 1)


def test_only_addresses_on_the_chain_of_the_question_are_learned():
    world = World()
    world.ask("www.example.com")
    world.answer([*WWW, ("evil.example.net.", 60, "IN", "A", "93.184.216.99")])
    [(_, hold)] = world.waiting
    assert {element.key[:4] for element in hold.elements} == {address("93.184.216.34")}


def test_a_private_address_is_learned_only_where_a_rule_permits_it():
    world = World()
    world.ask("www.example.com")
    world.answer([("www.example.com.", 60, "IN", "A", "10.1.2.3")])
    assert len(world.client) == 1, "passed unchanged, learned not at all"
    assert world.events[-1][-1] == (address("10.1.2.3"),), "and the query log says so"
    world.ask("inside.example.com")
    world.answer([("inside.example.com.", 60, "IN", "A", "10.1.2.3")])
    [(_, hold)] = world.waiting
    assert {element.key[:4] for element in hold.elements} == {address("10.1.2.3")}


def test_private_addresses_are_stripped_where_the_setting_says_so():
    world = World(strip=True)
    world.ask("www.example.com")
    world.answer([("www.example.com.", 60, "IN", "A", "10.1.2.3", "93.184.216.34")])
    world.acknowledge()
    [reply] = world.replies()
    assert [rrset.to_text() for rrset in reply.answer] == ["www.example.com. 60 IN A 93.184.216.34"]


def test_a_private_address_is_stripped_off_the_chain_and_in_other_sections_too():
    world = World(strip=True)
    world.ask("www.example.com")

    def edit(wire):
        answer = dns.message.from_wire(wire)
        answer.additional.append(dns.rrset.from_text("ns.test.", 60, "IN", "A", "10.0.0.2"))
        return answer.to_wire()

    world.answer([*WWW, ("other.test.", 60, "IN", "A", "10.0.0.1")], edit=edit)
    world.acknowledge()
    [reply] = world.replies()
    assert [rrset.to_text() for rrset in reply.answer] == ["www.example.com. 60 IN A 93.184.216.34"]
    assert reply.additional == []


def test_with_stripping_on_an_answer_that_needs_none_is_byte_for_byte():
    world = World(strip=True)
    world.ask("www.example.com")
    sent = []
    world.answer(WWW, edit=lambda wire: sent.append(wire) or wire)
    world.acknowledge()
    [(reply, _)] = world.client
    assert reply[2:] == sent[0][2:]


@pytest.mark.parametrize("strip", [False, True])
def test_a_broken_answer_ends_with_the_next_server_or_servfail_and_is_never_lost(strip):
    world = World(strip=strip)
    world.ask("www.example.com")
    world.answer(WWW, edit=lambda wire: wire[:-1])
    world.answer(WWW, server=1, edit=lambda wire: wire[:-1])
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.SERVFAIL]
    assert world.exchange.flying == 0


def test_a_broken_additional_section_does_not_lose_a_stripped_answer():
    world = World(servers=1, strip=True)
    world.ask("www.example.com")
    world.answer(WWW, edit=lambda wire: wire[:11] + b"\x01" + wire[12:] + b"\x00\x00")
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.SERVFAIL]
    assert world.exchange.flying == 0


def test_an_alias_belongs_to_the_endpoint_that_has_it():
    world = World()
    world.ask("alias.example.com")
    world.answer([
        ("alias.example.com.", 60, "IN", "CNAME", "cdn.example.net."),
        ("cdn.example.net.", 60, "IN", "A", "93.184.216.34"),
    ])  # fmt: skip
    world.acknowledge()
    world.ask("cdn.example.net", source=STRICT)
    assert world.replies()[-1].rcode() == dns.rcode.REFUSED


def test_what_clients_make_us_remember_is_bounded(monkeypatch):
    monkeypatch.setattr("dnsproxy.exchange.CLIENTS", 10)
    monkeypatch.setattr("dnsproxy.exchange.ALIASES", 10)
    world = World()
    for number in range(40):
        world.ask("denied.example.net", source=bytes((203, 0, 113, number)))
        world.ask("alias.example.com")
        world.answer([
            ("alias.example.com.", 60, "IN", "CNAME", f"cdn{number}.example.net."),
            (f"cdn{number}.example.net.", 60, "IN", "A", "93.184.216.34"),
        ])  # fmt: skip
        world.acknowledge()
    assert len(world.exchange._clients[False]) <= 10
    assert len(world.exchange._aliases) <= 10


def test_a_cname_target_may_be_asked_where_the_rule_says_so_while_the_answer_lives():
    chain = [
        ("alias.example.com.", 60, "IN", "CNAME", "cdn.example.net."),
        ("cdn.example.net.", 60, "IN", "A", "93.184.216.34"),
    ]
    world = World(alias_ttl=100)
    world.ask("cdn.example.net")
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.NXDOMAIN]
    world.ask("alias.example.com", now=200.0)
    world.answer(chain, now=200.0)
    world.acknowledge()
    world.ask("cdn.example.net", now=250.0)
    world.answer([("cdn.example.net.", 60, "IN", "A", "93.184.216.35")], now=250.0)
    [(_, hold)] = world.waiting
    assert {element.name for element in hold.elements} == {"alias.example.com."}
    world.ask("cdn.example.net", now=400.0)
    assert world.replies()[-1].rcode() == dns.rcode.NXDOMAIN


def test_a_policy_swap_judges_what_is_in_flight_again():
    world = World()
    world.ask("www.example.com")
    endpoints, policy = load([("policies.yaml", NARROWER)], enforcement="default")
    world.plan.set_policy(policy, endpoints)
    world.exchange.set_policy(policy, endpoints)
    world.answer(WWW)
    assert world.waiting == []
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.NXDOMAIN]
    assert list(world.plan.caches.of("default/ci").items()) == []


def test_a_held_answer_says_whose_it_is_and_is_judged_again_by_a_new_policy():
    world = World()
    world.ask("www.example.com")
    world.answer(WWW)
    [(_, hold)] = world.waiting
    assert hold.owner == "default/ci"
    world.swap(DOCUMENTS.replace("ports: [443]", "ports: [8443]"))
    opened = hold.judge()
    assert {key_suffix(6, 8443), key_suffix(17, 8443)} <= {element.key[4:] for element in opened}
    world.swap(NARROWER)
    assert dns.message.from_wire(hold.judge()).rcode() == dns.rcode.NXDOMAIN
    assert world.exchange.flying == 0


def test_a_held_answer_of_a_client_that_became_a_stranger_is_refused():
    world = World()
    world.ask("www.example.com")
    world.answer(WWW)
    [(_, hold)] = world.waiting
    world.swap(DOCUMENTS.replace("192.0.2.10,", "192.0.2.11,"))
    assert dns.message.from_wire(hold.judge()).rcode() == dns.rcode.REFUSED


def test_a_held_answer_that_a_new_policy_would_strip_is_not_released():
    world = World(strip=True)
    world.ask("inside.example.com")
    world.answer([("inside.example.com.", 60, "IN", "A", "10.1.2.3")])
    [(_, hold)] = world.waiting
    assert hold.judge()
    assert isinstance(hold.judge(), tuple)
    world.swap(DOCUMENTS.replace(", cidrs: [10.0.0.0/8]", ""))
    assert hold.judge() == hold.refusal


def test_events_tell_request_verdict_and_response():
    world = World()
    world.ask("www.example.com")
    world.answer(WWW, now=100.25)
    [(_, hold)] = world.waiting
    hold.done(hold.refusal, "hold timeout", 0.003)
    world.ask("denied.example.net", now=101.0)
    request, response, denied = world.events
    assert request[:7] == ("request", 100.0, "default/ci", CI, False, from_text("www.example.com"), 1)
    assert request[7].allowed
    assert request[7].rule.text
    assert response[7:12] == (dns.rcode.SERVFAIL, (address("93.184.216.34"),), (), 60, 0.25)
    assert response[12:] == (0.003, "198.51.100.1:53", "hold timeout", ())
    assert not denied[7].allowed


@given(st.binary(max_size=80))
def test_any_bytes_from_a_client_get_a_reply_or_silence(data):
    world = World()
    action = world.exchange.query(data, CI, world.client, "peer", 1.0, stream=False)
    assert action is None or action[0] is world.client or action[1][2:] == data[2:]


@given(st.binary(max_size=120))
def test_any_bytes_from_upstream_are_dropped_or_end_the_query(data):
    world = World(servers=1)
    world.ask("www.example.com")
    [(channel, sent)] = world.upstream()
    action = world.exchange.answer(channel, sent.id.to_bytes(2, "big") + data, 100.1)
    assert action is None or action[0] in (world.client, world.waiting)


def test_a_channel_that_is_full_is_no_channel(monkeypatch):
    monkeypatch.setattr("dnsproxy.exchange.CHANNEL", 1)
    world = World(servers=1)
    for number in range(40):
        world.ask(f"n{number}.lookup.test")
    assert len(world.log) == 2
    assert {reply.rcode() for reply in world.replies()} == {dns.rcode.SERVFAIL}


def test_with_stripping_on_a_service_record_that_nobody_can_read_does_not_go_out():
    world = World(strip=True)
    world.ask("www.example.com", "HTTPS")
    broken = b"\xc0\x0c\x00\x41\x00\x01\x00\x00\x00\x3c\x00\x03\x00\x01\x05"
    world.answer([], edit=lambda wire: wire[:7] + b"\x01" + wire[8:] + broken)
    [reply] = world.replies()
    assert (reply.rcode(), reply.answer) == (dns.rcode.NOERROR, [])


# -- equal questions in flight ----------------------------------------------------------------------------


def test_equal_questions_in_flight_leave_the_host_once_and_each_gets_the_answer_under_its_own_id():
    world = World()
    queries = [world.ask("a.lookup.test") for _ in range(50)]
    assert len(world.log) == 1
    assert world.exchange.flying == 50
    world.answer([("a.lookup.test.", 60, "IN", "TXT", '"x"')])
    assert [reply.id for reply in world.replies()] == [query.id for query in queries]
    assert all(reply.answer for reply in world.replies())
    assert world.exchange.flying == 0
    counts = world.exchange.counts
    assert (counts["forwarded"], counts["joined"], counts["answers"]) == (1, 49, 50)


def test_after_its_answer_a_question_is_sent_anew():
    world = World()
    for _ in range(2):
        world.ask("a.lookup.test")
        world.ask("a.lookup.test")
        world.answer([])
    assert len(world.log) == 2


def test_a_joined_query_has_an_action_as_every_query_has_that_will_be_answered():
    world = World()
    wire = world.ask("a.lookup.test").to_wire()
    sink, reply, peer = world.exchange.query(wire, CI, world.client, "peer", 100.0, stream=False)
    sink.send(reply, peer)
    assert (world.client, len(world.log)) == ([], 1)


def test_one_endpoints_question_opens_nothing_for_another_that_joined_it():
    world = World()
    world.ask("www.example.com")
    world.ask("www.example.com", source=STRICT)
    world.answer(WWW)
    assert [{element.spec.name for element in hold.elements} for _, hold in world.waiting] == [
        {"ep.default.ci.port4"},
        {"ep.default.strict.port4"},
    ]
    assert world.client == []
    world.acknowledge()
    assert len(world.client) == 2
    assert {key for key in ("default/ci", "default/strict") if len(world.plan.caches.of(key))} == {
        "default/ci",
        "default/strict",
    }


def test_a_denied_name_joins_nothing():
    world = World()
    world.ask("www.example.com")
    world.ask("www.example.com", source=STRANGER)
    world.answer(WWW)
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.REFUSED]
    assert len(world.waiting) == 1


def test_every_follower_is_stripped_by_its_own_rules():
    world = World(strip=True, documents=DOCUMENTS.replace(*APART) + OTHER)
    inside = [("inside.example.com.", 60, "IN", "A", "10.1.2.3")]
    for source in (CI, STRICT):
        world.ask("inside.example.com", source=source)
    world.answer(inside)
    world.acknowledge()
    assert sorted(len(reply.answer) for reply in world.replies()) == [0, 1]


def test_followers_are_reported_one_by_one():
    world = World()
    world.ask("a.lookup.test")
    world.ask("a.lookup.test", source=STRICT, now=100.05)
    world.answer([], now=100.25)
    responses = [event for event in world.events if event[0] == "response"]
    assert [(event[2], event[3], round(event[11], 3)) for event in responses] == [
        ("default/ci", CI, 0.25),
        ("default/strict", STRICT, 0.2),
    ]


def test_followers_count_for_the_limits():
    world = World(queries=5, queries_per_client=3)
    for _ in range(4):
        world.ask("a.lookup.test")
    assert world.exchange.counts["limited"] == 1
    for _ in range(3):
        world.ask("a.lookup.test", source=STRICT)
    assert world.exchange.counts["limited"] == 2
    assert world.exchange.flying == 5


@pytest.mark.parametrize("qtype", ["AAAA", "HTTPS"])
def test_only_equal_questions_join(qtype):
    world = World()
    world.ask("a.lookup.test", "A")
    world.ask("a.lookup.test", qtype)
    world.ask("a.lookup.test", "A", use_edns=0)
    world.ask("a.lookup.test", "A", flags=dns.flags.RD | dns.flags.CD)
    world.ask("a.lookup.test", "A", stream=True)
    world.ask("b.lookup.test", "A")
    assert len(world.log) == 6


def test_over_tcp_nothing_joins():
    world = World()
    for _ in range(3):
        world.ask("a.lookup.test", stream=True)
    assert len(world.upstream(stream=True)) == 3


def test_a_question_in_many_guises_goes_over_tcp_from_the_fifth_on():
    world = World(servers=1)
    guises = [f"{first}{second}{third}.lookup.test" for first in "aA" for second in "bB" for third in "cC"]
    queries = [world.ask(guise) for guise in guises]
    assert (len(world.upstream()), len(world.upstream(stream=True))) == (VARIANTS, len(guises) - VARIANTS)
    for channel, query in world.log[:]:
        world.act(world.exchange.answer(channel, dns.message.make_response(query).to_wire(), 100.1))
    assert sorted(reply.id for reply in world.replies()) == sorted(query.id for query in queries)
    assert world.exchange.flying == 0
    world.ask(guises[-1])
    assert len(world.upstream()) == VARIANTS + 1


def test_what_went_over_tcp_for_that_is_still_fitted_to_a_client_over_udp():
    world = World(servers=1)
    for payload in range(VARIANTS + 1):
        world.ask("a.lookup.test", "TXT", use_edns=0, payload=600 + payload)
    many = [("a.lookup.test.", 60, "IN", "TXT", *(f'"{letter * 200}"' for letter in "abcd"))]
    world.answer(many, stream=True)
    [cut] = world.replies()
    assert cut.flags & dns.flags.TC


def test_the_types_of_a_name_in_flight_over_udp_are_bounded_too():
    world = World(servers=1)
    for number in range(40):
        world.ask("a.lookup.test", f"TYPE{1000 + number}")
    assert (len(world.upstream()), len(world.upstream(stream=True))) == (LEADERS, 40 - LEADERS)


def test_leaders_of_a_name_may_end_in_any_order_and_the_others_are_still_joined():
    for order in permutations(("A", "AAAA", "HTTPS")):
        world = World(servers=1)
        for qtype in ("A", "AAAA", "HTTPS"):
            world.ask("a.lookup.test", qtype)
        sent = {dns.rdatatype.to_text(query.question[0].rdtype): (line, query) for line, query in world.log}
        for at, qtype in enumerate(order, 1):
            channel, query = sent[qtype]
            world.act(world.exchange.answer(channel, dns.message.make_response(query).to_wire(), 100.1))
            for left in order[at:]:
                world.ask("a.lookup.test", left)
        assert len(world.log) == 3
        assert world.exchange._asked == {}
        assert world.exchange.flying == 0


def test_when_a_leaders_time_is_over_the_first_follower_leads_and_the_others_follow_it():
    world = World(servers=1, attempt=1.0, timeout=4.0)
    first = world.ask("a.lookup.test", now=100.0)
    world.ask("a.lookup.test", now=103.5)
    world.ask("a.lookup.test", now=103.6)
    for tick in (101.0, 102.0, 103.0):
        world.tick(tick)
    before = len(world.log)
    world.tick(104.0)
    assert [(reply.id, reply.rcode()) for reply in world.replies()] == [(first.id, dns.rcode.SERVFAIL)]
    assert len(world.log) == before + 1
    assert world.exchange.counts["timeouts"] == 1
    world.tick(104.9)
    assert len(world.log) == before + 1, "an attempt is as long for it as for any"
    world.answer([], now=104.95)
    assert len(world.client) == 3
    assert world.exchange.flying == 0
    world.tick(110.0)
    assert len(world.client) == 3


def test_heirs_of_one_leader_that_join_another_lose_nobody_however_late_they_came():
    """The servers are swapped in between, so that two leaders ask the same; none of them answers."""
    world = World(servers=1)
    world.ask("www.example.com", id=1, now=100.0)
    world.ask("www.example.com", id=2, now=101.0)  # follows
    world.exchange.set_routes(Routes(world.servers, {}))
    world.ask("www.example.com", id=3, now=102.0)  # leads as well
    world.ask("www.example.com", id=4, now=103.0)  # follows the second, before the heir of the first does
    for tick in range(1, 200):
        world.tick(100.0 + tick / 10)
    assert sorted(reply.id for reply in world.replies()) == [1, 2, 3, 4]
    assert world.exchange.flying == 0


def test_followers_that_came_with_their_leader_time_out_with_it():
    world = World(servers=1, attempt=1.0, timeout=2.0)
    for _ in range(3):
        world.ask("a.lookup.test")
    world.tick(101.0)
    world.tick(102.0)
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.SERVFAIL] * 3
    assert len(world.log) == 2
    assert world.exchange.counts["timeouts"] == 3
    assert world.exchange.flying == 0


def test_retries_are_the_leaders_alone():
    world = World(attempt=1.0)
    for _ in range(10):
        world.ask("a.lookup.test")
    world.tick(101.0)
    assert (len(world.upstream(0)), len(world.upstream(1))) == (1, 1)
    world.answer([], server=1, now=101.1)
    assert len(world.client) == 10


def test_followers_fail_with_their_leader_each_under_its_own_id():
    world = World()
    queries = [world.ask("a.lookup.test") for _ in range(3)]
    world.answer([], rcode=dns.rcode.REFUSED)
    [(channel, _)] = world.upstream(1)
    for action in world.exchange.lost(channel, 100.2):
        world.act(action)
    assert [(reply.id, reply.rcode()) for reply in world.replies()] == [
        (query.id, dns.rcode.REFUSED) for query in queries
    ]
    assert world.exchange.flying == 0


def test_a_policy_swap_judges_leader_and_follower_each_by_itself():
    world = World()
    world.ask("www.example.com")
    world.ask("www.example.com", source=STRICT)
    world.swap(NARROWER.replace(*APART) + OTHER)
    world.answer(WWW)
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.NXDOMAIN]
    [(_, hold)] = world.waiting
    assert {element.spec.name for element in hold.elements} == {"ep.default.strict.port4"}
    assert world.exchange.flying == 0
    assert all(client.flying == 0 for clients in world.exchange._clients for client in clients.values())


def test_other_servers_are_asked_for_a_question_that_the_former_ones_have_in_flight():
    world = World()
    world.ask("a.lookup.test")
    world.exchange.set_routes(Routes(world.servers[1:], {}))
    world.ask("a.lookup.test")
    world.ask("a.lookup.test")
    assert (len(world.upstream(0)), len(world.upstream(1))) == (1, 1)
    world.answer([], server=0)
    assert len(world.client) == 1
    world.answer([], server=1)
    assert len(world.client) == 3


@st.composite
def steps(draw):
    ask = st.tuples(
        st.just("ask"), st.sampled_from("ab"), st.sampled_from(["A", "TXT"]), st.booleans(),
        st.sampled_from([None, 600, 601, 602, 603, 604]),
    )  # fmt: skip
    answer = st.tuples(st.just("answer"), st.integers(0, 30), st.sampled_from([0, 2, 3, 4]))
    other = st.tuples(st.sampled_from(["tick", "lost", "swap", "routes"]), st.integers(0, 5))
    return draw(st.lists(st.one_of(ask, ask, answer, other), max_size=60))


@given(steps())
def test_whatever_happens_each_query_gets_one_reply_and_few_guises_of_a_question_are_in_flight(script):
    world = World(attempt=1.0, timeout=2.5)
    now, asked = 100.0, []
    for step, *rest in script:
        if step == "ask":
            label, qtype, stream, payload = rest
            edns = {"use_edns": 0, "payload": payload} if payload else {}
            asked.append(world.ask(f"{label}.lookup.test", qtype, now=now, stream=stream, **edns).id)
        elif step == "answer" and rest[0] < len(world.log):
            channel, query = world.log[rest[0]]
            response = dns.message.make_response(query)
            response.set_rcode(rest[1])
            world.act(world.exchange.answer(channel, response.to_wire(), now))
        elif step == "tick":
            now += rest[0] / 4
            world.tick(now)
        elif step == "lost":
            server = world.servers[rest[0] % 2]
            for action in world.exchange.lost([*server.udp, server.tcp][rest[0] // 2], now):
                world.act(action)
        elif step == "swap":
            world.swap(DOCUMENTS)
        elif step == "routes":
            world.exchange.set_routes(Routes(world.servers[:: 1 - rest[0] % 2 * 2], {}))
        assert len(world.client) + world.exchange.flying == len(asked)
        if not any(step == "routes" for step, *_ in script):
            assert _most_guises(world) <= VARIANTS
    for action in world.exchange.stop(now):
        world.act(action)
    assert sorted(reply.id for reply in world.replies()) == sorted(asked)
    assert (world.exchange.flying, world.exchange._asked) == (0, {})
    assert not any(channel.pending for each in world.servers for channel in (*each.udp, each.tcp))
    assert all(client.flying == 0 for clients in world.exchange._clients for client in clients.values())


def _most_guises(world):
    """Return how many queries in flight over UDP ask the same, at most; no two have the same bytes."""
    channels = [channel for server in world.servers for channel in server.udp]
    flying = {each for channel in channels for each in channel.pending.values()}
    assert len({each.wire[2:] for each in flying}) == len(flying)
    return max(
        Counter((each.name, each.wire[each.end - 4 : each.end]) for each in flying).values(), default=0
    )


# -- servers that answer oddly ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rcode", [dns.rcode.FORMERR, dns.rcode.SERVFAIL, dns.rcode.NOTIMP, dns.rcode.REFUSED]
)
@pytest.mark.parametrize("bare", [lambda wire: wire[:4] + bytes(8), lambda wire: wire[:12]])
def test_an_error_without_a_question_is_an_answer_and_gets_the_question_back(rcode, bare):
    world = World()
    query = world.ask("WWW.example.com")
    world.answer([], rcode=rcode, edit=bare)
    assert len(world.upstream(1)) == 1
    world.answer([], server=1, rcode=rcode, edit=bare)
    [reply] = world.replies()
    assert (reply.id, reply.rcode(), reply.question) == (query.id, rcode, query.question)
    assert world.exchange.counts["strays"] == 0


@pytest.mark.parametrize("rcode", [dns.rcode.NOERROR, dns.rcode.NXDOMAIN])
def test_no_other_answer_goes_without_a_question(rcode):
    world = World()
    world.ask("www.example.com")
    world.answer([], rcode=rcode, edit=lambda wire: wire[:4] + bytes(8))
    assert (world.client, world.exchange.counts["strays"]) == ([], 1)


def test_an_error_without_a_question_is_remembered_with_it():
    world = World(attempt=1.0, timeout=2.0)
    query = world.ask("www.example.com")
    world.answer([], rcode=dns.rcode.NOTIMP, edit=lambda wire: wire[:12])
    world.tick(101.0)
    world.tick(102.0)
    [reply] = world.replies()
    assert (reply.rcode(), reply.question) == (dns.rcode.NOTIMP, query.question)


@pytest.mark.parametrize("strip", [False, True])
def test_an_answer_cut_inside_a_record_sends_the_client_to_tcp_and_teaches_nothing(strip):
    world = World(strip=strip)
    query = world.ask("www.example.com", use_edns=0)
    world.ask("www.example.com", use_edns=0)
    world.answer(WWW, edit=lambda wire: wire[:2] + bytes((wire[2] | 2,)) + wire[3:-14])  # 11 are the OPT
    cut, also = world.replies()
    assert (cut.id, cut.answer, cut.question) == (query.id, [], query.question)
    assert cut.flags & also.flags & dns.flags.TC
    assert len(world.plan.caches.of("default/ci")) == 0
    assert world.exchange.counts["broken"] == 0


def test_over_tcp_nothing_is_cut_and_such_an_answer_is_broken():
    world = World(servers=1)
    world.ask("www.example.com", stream=True)
    world.answer(WWW, stream=True, edit=lambda wire: wire[:2] + bytes((wire[2] | 2,)) + wire[3:-3])
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.SERVFAIL]


def _close(world, answered, now=100.2):
    """Have the stream answer some of what it carries, and close; return how many queries it carried."""
    stream = world.servers[0].tcp
    carried = [dns.message.from_wire(ident + each.wire[2:]) for ident, each in stream.pending.items()]
    for query in answered(carried):
        world.act(world.exchange.answer(stream, dns.message.make_response(query).to_wire(), now))
    for action in world.exchange.lost(stream, now):
        world.act(action)
    return len(carried)


def test_a_stream_that_closes_after_every_answer_loses_no_query():
    world = World(servers=1)
    for number in range(20):
        world.ask(f"n{number}.lookup.test", stream=True)
    while world.exchange.flying:
        assert _close(world, lambda carried: carried[:1])
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.NOERROR] * 20
    assert world.exchange.counts["failures"] == 0


def test_a_query_that_streams_bring_no_nearer_to_its_answer_is_given_up():
    world = World(servers=1)
    first = world.ask("first.lookup.test", stream=True)
    for number in range(RESENDS + 2):
        assert first.id not in {reply.id for reply in world.replies()}
        world.ask(f"n{number}.lookup.test", stream=True)
        _close(world, lambda carried: carried[-1:])
    assert (world.replies()[-1].id, world.replies()[-1].rcode()) == (first.id, dns.rcode.SERVFAIL)
    assert world.exchange.flying == 0


def test_a_query_sent_twice_over_a_stream_that_closes_is_sent_again_once():
    world = World(servers=1, attempt=1.0)
    world.ask("slow.lookup.test", stream=True)
    world.tick(101.0)
    world.ask("quick.lookup.test", now=101.0, stream=True)
    world.answer([], stream=True, now=101.1)
    before = len(world.log)
    for action in world.exchange.lost(world.servers[0].tcp, 101.2):
        world.act(action)
    assert (before, len(world.log)) == (3, 4)


# -- classes and response codes ---------------------------------------------------------------------------


def _in_class(number):
    def edit(wire):
        """Put every A record of the answer into another class."""
        return wire.replace(b"\xc0\x0c\x00\x01\x00\x01", b"\xc0\x0c\x00\x01\x00" + bytes((number,)))

    return edit


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("number", [3, 4, 254])
def test_addresses_of_another_class_are_neither_learned_nor_stripped(number, strip):
    world = World(strip=strip)
    world.ask("www.example.com")
    private = [("www.example.com.", 60, "IN", "A", "10.1.2.3", "93.184.216.34")]
    sent = []
    world.answer(private, edit=lambda wire: sent.append(_in_class(number)(wire)) or sent[0])
    [(reply, _)] = world.client
    assert reply[2:] == sent[0][2:]
    assert len(world.plan.caches.of("default/ci")) == 0


@pytest.mark.parametrize("rcode", range(1, 11))
def test_what_is_to_be_stripped_is_stripped_whatever_the_response_code_and_nothing_is_learned(rcode):
    world = World(servers=1, strip=True)
    world.ask("www.example.com")
    world.answer([("www.example.com.", 60, "IN", "A", "10.1.2.3", "93.184.216.34")], rcode=rcode)
    [reply] = world.replies()
    assert reply.rcode() == rcode
    assert [rrset.to_text() for rrset in reply.answer] == ["www.example.com. 60 IN A 93.184.216.34"]
    assert len(world.plan.caches.of("default/ci")) == 0


def test_an_answer_to_fall_back_on_is_stripped_too():
    world = World(strip=True, attempt=1.0, timeout=2.0)
    world.ask("www.example.com")
    world.answer([("www.example.com.", 60, "IN", "A", "10.1.2.3")], rcode=dns.rcode.SERVFAIL)
    world.tick(101.0)
    world.tick(102.0)
    [reply] = world.replies()
    assert (reply.rcode(), reply.answer) == (dns.rcode.SERVFAIL, [])


def test_an_answer_to_fall_back_on_that_cannot_be_stripped_is_not_fallen_back_on():
    world = World(strip=True, attempt=1.0, timeout=2.0)
    world.ask("www.example.com")
    world.answer(WWW, rcode=dns.rcode.REFUSED, edit=lambda wire: wire[:-1])
    world.tick(101.0)
    world.tick(102.0)
    assert [(reply.rcode(), reply.answer) for reply in world.replies()] == [(dns.rcode.SERVFAIL, [])]


# -- memory, the end, and what others ask for --------------------------------------------------------------


def test_queries_that_are_done_do_not_pile_up_behind_one_that_is_not(monkeypatch):
    monkeypatch.setattr("dnsproxy.exchange.SLACK", 10)
    world = World(attempt=1.0, timeout=4.0)
    world.ask("stuck.lookup.test")
    for number in range(500):
        world.ask(f"n{number}.lookup.test")
        world.answer([])
        world.tick(100.5)
    assert len(world.exchange._first) <= 10 + 2 + 1
    world.tick(101.0)
    assert len(world.upstream(1)) == 1, "the one that is not done is still seen to"


def test_nor_do_those_that_were_asked_again(monkeypatch):
    monkeypatch.setattr("dnsproxy.exchange.SLACK", 10)
    world = World(servers=1, attempt=1.0, timeout=4.0)
    for number in range(100):
        world.ask(f"n{number}.lookup.test", now=100.0)
    world.tick(101.0)
    for channel, query in world.log[100:199]:
        world.act(world.exchange.answer(channel, dns.message.make_response(query).to_wire(), 101.1))
    world.tick(101.2)
    assert len(world.exchange._again) == 1
    world.tick(102.0)
    assert len(world.log) == 201, "the one that is not done is still seen to"


def test_a_stop_ends_all_that_is_in_flight():
    world = World(attempt=1.0, timeout=4.0)
    asked = [world.ask("a.lookup.test", now=100.0).id for _ in range(3)]
    asked.append(world.ask("b.lookup.test", now=100.0, stream=True).id)
    world.tick(101.0)
    asked.append(world.ask("c.lookup.test", now=101.0, use_edns=0).id)
    for action in world.exchange.stop(101.5):
        world.act(action)
    assert sorted(reply.id for reply in world.replies()) == sorted(asked)
    assert {reply.rcode() for reply in world.replies()} == {dns.rcode.SERVFAIL}
    assert world.exchange.flying == 0
    assert world.exchange.stop(101.6) == []
    world.answer([])
    assert len(world.client) == len(asked), "a late answer is nobody's"


def test_upstream_seconds_count_each_usable_answer_once():
    world = World()
    for _ in range(3):
        world.ask("a.lookup.test")
    world.answer([], now=100.25)
    world.ask("b.lookup.test")
    world.answer([], rcode=dns.rcode.SERVFAIL, now=100.1)
    assert (sum(world.exchange.upstream_seconds.counts), world.exchange.upstream_seconds.sum) == (1, 0.25)


def test_a_limited_query_has_a_response_event_like_others():
    world = World(queries=1)
    world.ask("a.lookup.test")
    world.ask("b.lookup.test", source=STRICT)
    assert [(event[0], event[5]) for event in world.events[1:]] == [
        ("request", from_text("b.lookup.test")),
        ("response", from_text("b.lookup.test")),
    ]
    assert world.events[-1][2:4] == ("default/strict", STRICT)
    assert (world.events[-1][7], world.events[-1][14]) == (dns.rcode.SERVFAIL, "limit")


def test_events_can_be_switched_off_and_on():
    world = World()
    world.exchange.set_events(None)
    world.ask("a.lookup.test")
    world.answer([])
    world.ask("denied.example.net")
    assert world.events == []
    later = []
    world.exchange.set_events(later)
    world.ask("a.lookup.test")
    world.answer([])
    assert [event[0] for event in later] == ["request", "response"]


ALIAS = [
    ("alias.example.com.", 60, "IN", "CNAME", "cdn.example.net."),
    ("cdn.example.net.", 60, "IN", "A", "93.184.216.34"),
]


def _world_with_an_alias():
    world = World(alias_ttl=100)
    world.ask("alias.example.com")
    world.answer(ALIAS, now=100.0)
    world.acknowledge()
    return world


def test_aliases_outlive_the_process():
    [alias] = _world_with_an_alias().exchange.aliases()
    assert alias == ("default/ci", from_text("cdn.example.net"), 200.0, from_text("alias.example.com"))
    later = World()
    later.exchange.restore_aliases([alias])
    later.ask("cdn.example.net", now=150.0)
    assert len(later.log) == 1
    later.ask("cdn.example.net", now=250.0)
    assert [reply.rcode() for reply in later.replies()] == [dns.rcode.NXDOMAIN]


def test_a_restored_alias_gives_way_to_one_that_was_learned_since():
    world = _world_with_an_alias()
    fresh = world.exchange.aliases()
    world.exchange.restore_aliases([("default/ci", from_text("cdn.example.net"), 1.0, from_text("x.test"))])
    assert world.exchange.aliases() == fresh


@pytest.mark.parametrize("swapped", [", cnames: true", "alias.example.com"])
def test_an_alias_is_judged_by_the_policy_of_now(swapped):
    world = _world_with_an_alias()
    world.swap(DOCUMENTS)
    world.ask("cdn.example.net", now=150.0)
    assert len(world.log) == 2, "a reload that changes nothing about it leaves it"
    world.swap(DOCUMENTS.replace(swapped, "" if "cnames" in swapped else "other.example.com"))
    world.ask("cdn.example.net", "AAAA", now=150.0)
    assert world.replies()[-1].rcode() == dns.rcode.NXDOMAIN
    assert len(world.log) == 2


def test_other_addresses_of_this_host_have_what_is_in_flight_judged_again():
    world = World()
    world.ask("www.example.com")
    moved, _ = load(
        [("policies.yaml", DOCUMENTS.replace("192.0.2.10,", "192.0.2.11,"))], enforcement="default"
    )
    world.exchange.set_policy(world.policy, moved)
    world.answer(WWW)
    assert [reply.rcode() for reply in world.replies()] == [dns.rcode.REFUSED]
