from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.addresses import from_text
from dnsproxy.dyndns import plan
from dnsproxy.dyndns.outcomes import Code, Found, Known, NotManaged, Reply, Unavailable, Why
from dnsproxy.dyndns.plan import RULES, SPACING, Clock, Hold, Kind, Phase, Publish, Rest, State, Target

A, B, V6 = "93.184.216.34", "93.184.216.35", "2a01:238:1::1"
HOUR, DAY = 3600.0, 86_400.0


def target(*addresses: str, **changes: str) -> Target:
    return replace(Target("https://x.example/", "www.example.de", "me", addresses or (A,)), **changes)


def accepted(*addresses: str, at: float = 0.0) -> State:
    return plan.settle(plan.begin(State(), at), target(*addresses), Reply(Code.GOOD), at, "f")


def after(state: State, code: Code, now: float, retry_after: float | None = None, to: Target | None = None):
    begun = plan.begin(state, now)
    return plan.settle(begun, to or target(B), Reply(code, code.value, retry_after), now, "f")


# --- the set to publish


def known(text: str) -> Known:
    return Known(from_text(text))


LOST = Unavailable(Why.FAILED, "no answer")


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "held", "addresses"),
    [
        (known(A), NotManaged(), (), (A,)),
        (NotManaged(), known(V6), (), (V6,)),
        (known(A), known(V6), (), (A, V6)),
        (known(B), LOST, (A, V6), (B, V6)),  # the other record is not to be deleted
        (LOST, known(V6), (A,), (A, V6)),
        (known(A), LOST, (), ()),  # never accepted, and there may be a record: no half of the set
        (Unavailable(Why.REJECTED, "CGNAT"), known(V6), (), (V6,)),  # there is none that could be published
        (LOST, LOST, (A, V6), ()),
        (LOST, NotManaged(), (A,), ()),
        (known(A), NotManaged(), (A, V6), (A,)),  # not managed any more
        (NotManaged(), NotManaged(), (A,), ()),
    ],
)
def test_the_whole_set_is_published_or_none(ipv4, ipv6, held, addresses):
    assert plan.addresses(Found(ipv4, ipv6), target(*held) if held else None) == addresses


# --- when


def test_only_what_differs_is_sent():
    state = accepted(A)
    assert plan.decide(state, target(A), 10_000.0) == Rest(Phase.IN_SYNC)
    for other in (target(B), target(A, V6), target(A, hostname="b.example.de"), target(A, username="you")):
        assert plan.decide(state, other, 10_000.0) == Publish(other)


def test_requests_are_apart_whatever_happened_between():
    for state in (accepted(A), after(accepted(A), Code.TIMEOUT, 0.0), plan.begin(State(), 0.0)):
        assert isinstance(plan.decide(state, target(B), SPACING - 1), Rest)
        assert plan.decide(state, target(B), SPACING) == Publish(target(B))


def test_an_address_that_goes_and_comes_back_costs_nothing():
    state = accepted(A)
    assert plan.decide(state, target(B), 100.0) == Rest(Phase.SPACED, SPACING)
    assert plan.decide(state, target(A), 300.0) == Rest(Phase.IN_SYNC)


def test_a_refresh_is_sent_when_it_is_due_and_not_after_too_many_nochg():
    state = accepted(A)
    assert plan.decide(state, target(A), 25 * DAY - 1, 25 * DAY) == Rest(Phase.IN_SYNC)
    assert plan.decide(state, target(A), 25 * DAY, 25 * DAY) == Publish(target(A))
    often = replace(state, nochg=(25 * DAY - 3,) * 3)
    assert plan.decide(often, target(A), 25 * DAY, 25 * DAY) == Rest(Phase.IN_SYNC)


# --- every word


FATAL = [code for code in Code if RULES[code].kind is Kind.FATAL]


def test_each_outcome_has_a_rule_and_each_failure_an_advice():
    assert set(RULES) == set(Code)
    assert all(rule.advice for rule in RULES.values() if rule.kind is not Kind.SUCCESS)
    assert {code.value for code in FATAL} == {
        "badauth", "!donator", "!yours", "!active", "notfqdn", "nohost", "numhost", "badsys", "badagent",
        "http-404",
    }  # fmt: skip


@pytest.mark.parametrize("code", [Code.GOOD, Code.NOCHG])
def test_success_is_what_was_sent(code):
    state = after(after(accepted(A), Code.DNSERR, 0.0), code, HOUR)
    assert state.accepted == target(B)
    assert (state.failures, state.strikes, state.hold, state.doubtful) == (0, 0, None, False)
    assert plan.decide(state, target(B), 10 * DAY) == Rest(Phase.IN_SYNC)


@pytest.mark.parametrize("code", FATAL)
def test_a_fatal_word_halts_until_something_changes(code):
    state = after(accepted(A), code, 0.0)
    assert state.accepted == target(A)
    assert plan.decide(state, target(B), 1000 * DAY) == Rest(Phase.HALTED)
    assert plan.decide(state, target(A, V6), 1000 * DAY) == Rest(Phase.HALTED)
    assert plan.lifted(state, "f") is state
    assert plan.decide(plan.lifted(state, "g"), target(B), DAY) == Publish(target(B))
    assert plan.decide(plan.resumed(state), target(B), 10.0) == Rest(Phase.SPACED, SPACING)


@pytest.mark.parametrize(
    ("code", "pauses"),
    [
        (Code.ABUSE, [1, 2, 4, 8, 16, 24, 24]),
        (Code.DNSERR, [0.5, 1, 2, 4, 6, 6]),
        (Code.NINE_ONE_ONE, [0.5, 1, 2, 4, 6, 6]),
        (Code.SERVER_ERROR, [0.5, 1, 2, 4, 6, 6]),
        (Code.TOO_MANY, [0.5, 1, 2, 4, 6, 6]),
        (Code.REDIRECT, [0.5, 1, 2, 4, 6, 6]),
        (Code.UNKNOWN, [1 / 12, 1 / 12, 1 / 12, 8 / 60, 16 / 60, 0.5, 0.5]),
        (Code.TIMEOUT, [1 / 12, 1 / 12, 1 / 12, 8 / 60, 16 / 60, 0.5, 0.5]),
        (Code.NETWORK, [1 / 12, 1 / 12, 1 / 12, 8 / 60, 16 / 60, 0.5, 0.5]),
        (Code.TLS, [1 / 12, 1 / 12, 1 / 12, 8 / 60, 16 / 60, 0.5, 0.5]),
    ],
)
def test_holds_double_up_to_the_longest(code, pauses):
    state, now = accepted(A), HOUR
    for hours in pauses:
        state = after(state, code, now)
        assert state.accepted == target(A)
        assert state.hold.until == pytest.approx(now + hours * HOUR)
        assert isinstance(plan.decide(state, target(B), state.hold.until - 1), Rest)
        assert plan.decide(state, target(B), state.hold.until) == Publish(target(B))
        now = state.hold.until
    assert after(after(state, Code.GOOD, now), code, now).hold.until == pytest.approx(now + pauses[0] * HOUR)


def test_another_kind_of_failure_begins_anew():
    state = after(after(accepted(A), Code.ABUSE, HOUR), Code.ABUSE, HOUR)
    assert after(state, Code.DNSERR, HOUR).hold.until == HOUR + 1800


@pytest.mark.parametrize(
    ("code", "asked", "pause"),
    [
        (Code.TOO_MANY, 900.0, 900.0),
        (Code.SERVER_ERROR, 10.0, SPACING),
        (Code.SERVER_ERROR, 1e12, DAY),
        (Code.SERVER_ERROR, -5.0, 1800.0),
        (Code.SERVER_ERROR, 0.0, 1800.0),
        (Code.NINE_ONE_ONE, 60.0, 1800.0),
        (Code.NINE_ONE_ONE, 7200.0, 7200.0),
        (Code.UNKNOWN, 4000.0, 4000.0),
    ],
)
def test_what_the_server_asks_for_is_heard_within_bounds(code, asked, pause):
    assert after(accepted(A), code, 0.0, asked).hold.until == pause


def test_abuse_may_stop_until_somebody_resumes():
    state = plan.begin(accepted(A), 0.0)
    state = plan.settle(state, target(B), Reply(Code.ABUSE), 0.0, "f", stop_on_abuse=True)
    assert plan.decide(state, target(B), 100 * DAY) == Rest(Phase.HALTED)


def test_abuse_is_probed_only_if_the_address_really_differs():
    state = after(accepted(A), Code.ABUSE, 0.0)
    assert plan.decide(state, target(A), 100 * DAY) == Rest(Phase.IN_SYNC)


# --- doubt


@pytest.mark.parametrize("code", [Code.TIMEOUT, Code.NETWORK, Code.UNKNOWN, Code.DNSERR, Code.SERVER_ERROR])
def test_after_an_outcome_that_nobody_knows_even_the_accepted_set_is_sent(code):
    state = after(accepted(A), code, 0.0)
    assert plan.decide(state, target(A), DAY) == Publish(target(A))
    assert plan.decide(after(state, Code.NOCHG, DAY, to=target(A)), target(A), 9 * DAY) == Rest(Phase.IN_SYNC)


def test_a_refusal_does_not_end_a_doubt():
    state = after(after(accepted(A), Code.TIMEOUT, 0.0), Code.ABUSE, HOUR)
    assert plan.decide(state, target(A), DAY) == Publish(target(A))


@pytest.mark.parametrize("code", [Code.ABUSE, Code.TLS, Code.TOO_MANY])
def test_after_a_refusal_the_accepted_set_is_not_sent(code):
    assert plan.decide(after(accepted(A), code, 0.0), target(A), DAY) == Rest(Phase.IN_SYNC)


def test_three_nochg_within_a_day_end_what_is_sent_without_a_difference():
    state = accepted(A)
    for hour in (1, 2, 3):
        state = after(state, Code.NOCHG, hour * HOUR, to=target(A))
    doubt = after(state, Code.TIMEOUT, 4 * HOUR)
    assert plan.decide(doubt, target(A), 10 * HOUR) == Rest(Phase.IN_SYNC)
    assert plan.decide(doubt, target(B), 10 * HOUR) == Publish(target(B))
    assert plan.decide(doubt, target(A), 26 * HOUR) == Publish(target(A))


# --- force


def test_force_sends_once_and_not_as_often_as_somebody_presses():
    state = plan.forced(accepted(A), HOUR)
    assert plan.decide(state, target(A), HOUR) == Publish(target(A))
    state = after(state, Code.NOCHG, HOUR, to=target(A))
    assert plan.decide(state, target(A), 2 * HOUR) == Rest(Phase.IN_SYNC)
    assert "forced less than an hour ago" in plan.forced(state, HOUR + 1)
    assert not isinstance(plan.forced(state, 2 * HOUR), str)


def test_force_does_not_break_a_hold_or_the_spacing():
    assert "resume it first" in plan.forced(after(accepted(A), Code.BADAUTH, 0.0), DAY)
    assert "resume it first" in plan.forced(after(accepted(A), Code.ABUSE, 0.0), 1.0)
    assert plan.decide(plan.forced(accepted(A), 1.0), target(A), 1.0) == Rest(Phase.SPACED, SPACING)


# --- looking again


def test_checks_come_within_the_interval_and_when_a_hold_ends():
    assert plan.next_check(Rest(Phase.IN_SYNC), 300.0, 1000.0, 0.0) == 1300.0
    assert plan.next_check(Rest(Phase.IN_SYNC), 300.0, 1000.0, 1.0) == 1270.0
    assert plan.next_check(Rest(Phase.SPACED, 1010.0), 300.0, 1000.0, 0.0) == 1010.0
    assert plan.next_check(Rest(Phase.HELD, 99_999.0), 300.0, 1000.0, 0.0) == 1300.0
    assert plan.next_check(Rest(Phase.IN_SYNC), 60.0 * (2**31 - 1), 0.0, 1.0) > 1e11


def test_after_searches_that_fail_checks_come_sooner_and_then_at_the_interval():
    delays = [plan.retry_check(tries, 300.0, 0.0) for tries in (1, 2, 3, 4, 5, 10_000)]
    assert delays == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0]


# --- rows

times = st.none() | st.floats(0, 5000)
targets = st.none() | st.sampled_from([target(A), target(V6), target(A, V6)])
holds = st.none() | st.builds(
    Hold, st.sampled_from(Code), st.floats(0, 5000), st.none() | st.floats(5001, 9000), st.text(max_size=9)
)
states = st.builds(
    State,
    accepted=targets,
    accepted_at=times,
    changed_at=times,
    attempt_at=times,
    pending=st.just(False),
    doubtful=st.booleans(),
    code=st.none() | st.sampled_from(Code),
    text=st.text(max_size=20),
    hold=holds,
    failures=st.integers(0, 9),
    strikes=st.integers(0, 9),
    nochg=st.lists(st.floats(1, 5000), max_size=3).map(tuple),
    force=st.booleans(),
    forced_at=times,
    told=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
)
THEN = Clock(5000.0, 1.7e9, "boot")


@given(states)
def test_a_row_is_the_state(state):
    restored = plan.from_row(plan.to_row(state, THEN), Clock(6000.0, 0.0, "boot"))
    if state.hold is None or state.hold.until is None:
        assert restored == state
    else:
        assert restored.hold.until == pytest.approx(state.hold.until)
        assert replace(restored, hold=None) == replace(state, hold=None)


@given(states, st.floats(0, 1e6), st.floats(-1e8, 1e8))
def test_no_clock_makes_a_wait_shorter_than_it_was_when_the_clock_was_set_back(state, now, leap):
    """After a boot the wall clock decides; set back, it makes what is left longer, and bounded."""
    restored = plan.from_row(plan.to_row(state, THEN), Clock(now, THEN.wall + leap, "other"))
    if state.attempt_at is not None:
        assert restored.attempt_at <= now
        if leap <= 0:
            age = THEN.now - state.attempt_at
            assert now - restored.attempt_at <= max(age + leap, 0.0) + 1e-3
    if state.hold is not None and state.hold.until is not None:
        length = state.hold.until - state.hold.since
        assert restored.hold.until - now <= length + 1e-3


def test_in_the_same_boot_the_wall_clock_does_not_matter():
    state = after(accepted(A), Code.ABUSE, 4000.0)
    restored = plan.from_row(plan.to_row(state, THEN), Clock(5100.0, 0.0, "boot"))
    assert restored.hold.until == state.hold.until
    assert restored.attempt_at == 4000.0


def test_a_hold_outlives_a_boot():
    state = after(accepted(A), Code.ABUSE, 4000.0)  # until 7600: 2600 seconds are left
    restored = plan.from_row(plan.to_row(state, THEN), Clock(50.0, THEN.wall + 600.0, "other"))
    assert restored.hold.until == pytest.approx(50.0 + 2000.0)


def test_who_dies_with_a_request_in_flight_wakes_up_in_doubt_and_waits():
    row = plan.to_row(plan.begin(accepted(A), 4000.0), THEN)
    restored = plan.from_row(row, Clock(5000.0, THEN.wall, "boot"))
    assert restored.doubtful
    assert plan.decide(restored, target(A), 5000.0) == Rest(Phase.SPACED, 5000.0 + SPACING)
    assert plan.decide(restored, target(A), 5000.0 + SPACING) == Publish(target(A))


@pytest.mark.parametrize(
    "row",
    [
        b"", b"{", b"[]", b"null", b"7", b"\xff", b'{"clock": [1]}',
        plan.to_row(accepted(A), THEN).replace(A.encode(), b"1.2.3"),
        plan.to_row(accepted(A), THEN).replace(b'"good"', b'"better"'),
        plan.to_row(accepted(A), THEN).replace(b'"text"', b'"taxt"'),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_counts_as_a_request_of_now(row):
    assert plan.from_row(row, THEN) == State(attempt_at=THEN.now)


def test_no_row_is_no_request():
    assert plan.from_row(None, THEN) == State()


def test_rows_of_hosts_that_are_gone_are_kept_for_a_week():
    assert plan.is_outdated(State(), 0.0)
    assert not plan.is_outdated(State(attempt_at=0.0), 7 * DAY)
    assert plan.is_outdated(State(attempt_at=0.0), 7 * DAY + 1)


def test_a_row_is_plain_json():
    row = json.loads(plan.to_row(after(accepted(A, V6), Code.DNSERR, 1.0), THEN))
    assert row["accepted"]["addresses"] == [A, V6]
    assert row["hold"]["code"] == "dnserr"
