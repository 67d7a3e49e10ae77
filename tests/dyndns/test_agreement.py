"""What answers amount to: examples of each rule, and properties of every course that a poll can take."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.addresses import from_text
from dnsproxy.dyndns.agreement import (
    BEHIND,
    Fault,
    Poll,
    Prefix,
    Standing,
    candidate,
    found,
    is_carriers,
    is_publishable,
    is_witness,
    merged,
)
from dnsproxy.dyndns.outcomes import Known, NotManaged, Unavailable, Wanted, Why

A, B, C = (from_text(text) for text in ("93.184.216.34", "8.8.8.8", "5.6.7.8"))
SIX = from_text("2a01:238:1:2:3:4:5:6")
CARRIER, PRIVATE = from_text("100.64.3.4"), from_text("192.168.178.2")


def poll(answers, *, known=None, quorum=2, length=4, wanted=None, allow=()):
    """Ask the sources of `answers` until there is an outcome; return the poll and the rounds of asking."""
    asked = Poll(length, wanted or Wanted(known=known), list(answers), quorum, allow)
    rounds = []
    while asked.outcome is None:
        batch = asked.ask()
        assert batch, "no outcome, and nobody left to ask"
        rounds.append(batch)
        for source in batch:
            asked.hear(source, answers[source])
    return asked, rounds


# --- one address


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.127.255.255", "127.0.0.1", "169.254.1.1", "172.16.0.1",
        "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1",
        "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
        "255.255.255.255", "::", "::1", "::2", "64:ff9b::1.2.3.4", "64:ff9b:1::1", "100::1", "2001::1",
        "2001:20::1", "2001:1ff::1", "2001:db8::1", "3fff::1", "2002::1", "fc00::1", "fd12::1", "fe80::1",
        "fec0::1", "ff02::1", "ff0e::1", "4000::1", "1fff::1", "5f00::1", "2a01:238:1:2::",
        "::ffff:192.168.1.1", "::ffff:100.64.0.1",
    ],
)  # fmt: skip
def test_not_publishable(text):
    assert not is_publishable(from_text(text))


@pytest.mark.parametrize(
    "text",
    [
        "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "172.15.0.1", "172.32.0.1",
        "192.0.1.1", "198.17.0.1", "198.20.0.1", "223.255.255.255", "::ffff:1.1.1.1",
        "2001:200::1", "2001:4860::8888", "2003::1", "2a01:238::1", "3ffe::1", "2000::1",
    ],
)  # fmt: skip
def test_publishable(text):
    assert is_publishable(from_text(text))


def test_a_lab_may_publish_what_it_permits_but_no_prefix():
    allow = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
    assert is_publishable(from_text("10.1.1.1"), allow)
    assert is_publishable(from_text("fd00::1"), allow)
    assert not is_publishable(from_text("fd00::"), allow)
    assert not is_publishable(from_text("192.168.1.1"), allow)


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), st.integers(0, 128))
def test_a_suffix_is_put_in_at_any_bit(address, suffix, bits):
    def text(packed):
        return f"{int(IPv6Address(packed)):0128b}"

    assert text(merged(address, suffix, bits)) == text(address)[:bits] + text(suffix)[bits:]


def test_a_suffix_by_hand():
    suffix = from_text("::a:b:c:d")
    assert merged(SIX, suffix, 64) == from_text("2a01:238:1:2:a:b:c:d")
    assert merged(from_text("2a01:238:1:2ff:3::"), from_text("::13:0:0:0:1"), 57) == from_text(
        "2a01:238:1:293::1"
    )


@pytest.mark.parametrize(
    ("answer", "length", "word"), [(SIX, 4, "no IPv4"), (A, 16, "no IPv6"), (Fault("down"), 4, "down")]
)
def test_an_answer_of_the_other_family_is_a_fault(answer, length, word):
    fault = candidate(answer, length, Wanted())
    assert isinstance(fault, Fault)
    assert word in fault.reason


def test_a_prefix_needs_a_suffix_that_fills_it():
    prefix, suffix = Prefix(from_text("2a01:238:1:100::"), 56), from_text("::2:0:0:0:9")
    assert "suffix" in candidate(prefix, 16, Wanted()).reason
    assert "/56" in candidate(prefix, 16, Wanted(suffix=suffix, prefix_length=64)).reason
    whole = candidate(prefix, 16, Wanted(suffix=suffix, prefix_length=56))
    assert whole == from_text("2a01:238:1:102::9")


@given(st.tuples(st.integers(99, 101), *[st.integers(0, 255)] * 3).map(bytes))
def test_the_carriers_range(address):
    assert is_carriers(address) == (IPv4Address(address) in IPv4Network("100.64.0.0/10"))


# --- polls by example


def test_two_that_agree_are_asked_at_once_and_suffice():
    asked, rounds = poll({"a": A, "b": A, "c": B})
    assert asked.outcome == Known(A, ("a", "b"))
    assert rounds == [("a", "b")]
    assert asked.behind == set()


def test_where_two_disagree_a_third_decides_and_the_odd_one_goes_behind():
    asked, rounds = poll({"a": A, "b": B, "c": B, "d": A})
    assert asked.outcome == Known(B, ("b", "c"))
    assert rounds == [("a", "b"), ("c",)]
    assert asked.behind == {"a"}


def test_who_fails_is_replaced_and_goes_behind():
    asked, rounds = poll({"a": Fault("down"), "b": A, "c": Fault("down"), "d": A})
    assert asked.outcome == Known(A, ("b", "d"))
    assert rounds == [("a", "b"), ("c",), ("d",)]
    assert asked.behind == {"a", "c"}


def test_one_answer_confirms_what_is_known_if_nobody_contradicts():
    asked, rounds = poll({"a": Fault("down"), "b": A, "c": A}, known=A)
    assert asked.outcome == Known(A, ("b",))
    assert len(rounds) == 1


def test_what_is_known_is_not_confirmed_while_somebody_may_contradict():
    asked = Poll(4, Wanted(known=A), ["a", "b", "c"], 2)
    assert asked.ask() == ("a", "b")
    asked.hear("a", A)
    assert asked.outcome is None
    asked.hear("b", B)
    assert asked.ask() == ("c",)


def test_a_stuck_source_does_not_hide_a_change():
    asked, _ = poll({"a": A, "b": B, "c": B}, known=A)
    assert asked.outcome == Known(B, ("b", "c"))
    asked, _ = poll({"a": A, "b": B, "c": Fault("down")}, known=A)
    assert asked.outcome.why is Why.DISAGREE


def test_one_answer_does_not_make_a_change():
    asked, _ = poll({"a": Fault("HTTP 503"), "b": B, "c": Fault("silent")}, known=A)
    assert asked.outcome.why is Why.DISAGREE
    assert all(word in asked.outcome.reason for word in ("b: 8.8.8.8", "HTTP 503", "2 sources", "IPv4"))
    assert asked.behind == {"a", "c"}


def test_a_quorum_of_one_asks_one():
    asked, rounds = poll({"a": B, "b": A}, known=A, quorum=1)
    assert (asked.outcome, rounds) == (Known(B, ("a",)), [("a",)])


def test_without_any_answer_it_failed_and_every_source_is_named():
    asked, _ = poll({"a": Fault("HTTP 503"), "b": SIX}, known=A)
    assert asked.outcome.why is Why.FAILED
    assert all(word in asked.outcome.reason for word in ("a: HTTP 503", "b: said 2a01:238:", "network"))


def test_no_sources_at_all():
    assert Poll(4, Wanted(), [], 2).outcome.why is Why.FAILED


def test_addresses_that_are_not_public_are_rejected():
    asked, _ = poll({"a": PRIVATE, "b": PRIVATE})
    assert asked.outcome.why is Why.REJECTED
    assert "192.168.178.2" in asked.outcome.reason
    asked, _ = poll({"a": PRIVATE, "b": PRIVATE}, allow=(ip_network("192.168.0.0/16"),))
    assert asked.outcome == Known(PRIVATE, ("a", "b"))


def test_a_prefix_for_an_address_is_rejected_with_advice():
    asked, _ = poll({"a": from_text("2a01:238:1:2::")}, length=16)
    assert asked.outcome.why is Why.REJECTED
    assert "suffix" in asked.outcome.reason


def test_answers_agree_as_they_would_be_published():
    wanted = Wanted(suffix=from_text("::1"), prefix_length=64)
    answers = {"a": from_text("2a01:238:1:2:aaaa::1"), "b": from_text("2a01:238:1:2:bbbb::2")}
    asked, _ = poll(answers, length=16, wanted=wanted)
    assert asked.outcome == Known(from_text("2a01:238:1:2::1"), ("a", "b"))


# --- the carrier's NAT


@pytest.mark.parametrize("witness", ["fritzbox", "igd:192.168.1.1", "interface:ppp0"])
def test_behind_a_carriers_nat_there_is_no_ipv4_to_publish(witness):
    asked, rounds = poll({"a": A, "b": A, witness: CARRIER}, known=A)
    assert asked.outcome.why is Why.REJECTED
    assert asked.cgnat
    assert all(word in asked.outcome.reason for word in (witness, "100.64.3.4", "CGNAT", "ipv6"))
    assert rounds[0][0] == witness


def test_a_router_with_another_address_than_all_others_see_is_a_sign_of_nat():
    asked, _ = poll({"fritzbox": B, "a": A, "b": A})
    assert (asked.outcome, asked.cgnat) == (Known(A, ("a", "b")), True)
    asked, _ = poll({"fritzbox": A, "a": A, "b": B})
    assert (asked.outcome, asked.cgnat) == (Known(A, ("fritzbox", "a")), False)


def test_a_router_behind_a_router_is_no_carrier():
    asked, _ = poll({"fritzbox": PRIVATE, "a": A, "b": A})
    assert (asked.outcome, asked.cgnat) == (Known(A, ("a", "b")), False)


def test_a_carriers_range_that_is_permitted_is_published():
    asked, _ = poll({"fritzbox": CARRIER, "a": CARRIER}, allow=(ip_network("100.64.0.0/10"),))
    assert (asked.outcome, asked.cgnat) == (Known(CARRIER, ("fritzbox", "a")), False)


def test_nothing_is_said_before_every_witness_is_heard():
    asked = Poll(4, Wanted(), ["a", "b", "fritzbox", "interface:ppp0"], 1)
    assert asked.ask() == ("fritzbox", "interface:ppp0")
    asked.hear("fritzbox", A)
    assert asked.outcome is None
    assert asked.ask() == ()
    asked.hear("interface:ppp0", CARRIER)
    assert asked.outcome.why is Why.REJECTED


# --- properties

names = st.sampled_from(["a", "b", "c", "d", "e", "fritzbox", "interface:eth0"])
answers = st.one_of(st.sampled_from([A, B, C, PRIVATE, CARRIER, SIX]), st.builds(Fault, st.just("down")))
courses = st.dictionaries(names, answers, min_size=1)


@given(courses, st.sampled_from([None, A, B, PRIVATE]), st.integers(1, 4), st.data())
def test_every_course_ends_and_asks_nobody_twice(course, known, quorum, data):
    asked = Poll(4, Wanted(known=known), list(course), quorum)
    out, all_asked = [], []
    while asked.outcome is None:
        batch = asked.ask()
        out += batch
        all_asked += batch
        assert out, "stuck"
        asked.hear(source := out.pop(data.draw(st.integers(0, len(out) - 1))), course[source])
    outcome = asked.outcome
    assert len(set(all_asked)) == len(all_asked)
    heard = {source: course[source] for source in all_asked if source not in out}
    if isinstance(outcome, Known):
        votes = {source for source, said in heard.items() if said == outcome.address}
        valid = {said for said in heard.values() if isinstance(said, bytes) and said in (A, B, C)}
        assert is_publishable(outcome.address)
        assert set(outcome.sources) == votes
        assert len(votes) >= quorum or (outcome.address == known and valid == {known})
        assert not any(is_witness(source) and said == CARRIER for source, said in heard.items())
        assert asked.behind == heard.keys() - votes
    else:
        assert set(all_asked) == set(course) or asked.cgnat
        assert outcome.reason
    assert asked.behind <= heard.keys()


@given(st.lists(st.sampled_from([A, None]), max_size=6), st.lists(answers, max_size=1), st.data())
def test_fewer_liars_than_the_quorum_get_nothing_in(honest, lies, data):
    """Honest sources say A or fail; the record holds B, or nothing yet."""
    said = [(f"h{at}", A if said else Fault("down")) for at, said in enumerate(honest)]
    said += [(f"l{at}", lie) for at, lie in enumerate(lies)]
    course = dict(data.draw(st.permutations(said)))
    asked, _ = poll(course, known=data.draw(st.sampled_from([None, B])))
    if isinstance(asked.outcome, Known):
        assert asked.outcome.address == A or (A not in honest and asked.outcome.address == B)
    if honest.count(A) >= 2:
        assert asked.outcome == Known(A, asked.outcome.sources)


# --- standing


def test_who_is_behind_is_asked_last_until_the_time_is_over():
    standing = Standing()
    asked, _ = poll({"a": Fault("down"), "b": A, "c": A})
    standing.settle(asked, now=100.0)
    assert standing.order("abc", 100.0) == ("b", "c", "a")
    assert standing.order("abc", 100.0 + BEHIND - 1) == ("b", "c", "a")
    assert standing.order("abc", 100.0 + BEHIND) == ("a", "b", "c")


def test_who_is_right_again_is_behind_no_longer():
    standing = Standing()
    standing.settle(poll({"a": Fault("down"), "b": Fault("down")})[0], now=0.0)
    standing.settle(poll({"b": A, "a": A})[0], now=10.0)
    assert standing.order("abc", 10.0) == ("a", "b", "c")


def test_the_longest_behind_is_asked_before_the_others():
    standing = Standing()
    standing.settle(poll({"b": Fault("down")})[0], now=0.0)
    standing.settle(poll({"a": Fault("down")})[0], now=10.0)
    assert standing.order("abc", 20.0) == ("c", "b", "a")


@given(st.lists(st.tuples(courses, st.floats(0, 1e5))), st.permutations("abcde"))
def test_nobody_is_lost_and_what_is_over_is_forgotten(rounds, order):
    standing, now = Standing(), 0.0
    for course, pause in rounds:
        now += pause
        standing.settle(poll(course)[0], now)
    assert sorted(standing.order(order, now)) == sorted(order)
    assert standing.order(order, now + BEHIND) == tuple(order)
    assert len(standing._until) <= 7


def test_a_family_that_is_not_managed_is_something_else_than_one_without_an_address():
    assert found(None) == NotManaged()
    assert isinstance(found(Poll(4, Wanted(), [], 2)), Unavailable)
