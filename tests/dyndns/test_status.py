from __future__ import annotations

from dataclasses import replace

import pytest
from dyndns_world import PASSWORD, V4, V6, domain, packed

from dnsproxy.dyndns import plan
from dnsproxy.dyndns.outcomes import Code, Found, Known, NotManaged, Reply, Unavailable, Why
from dnsproxy.dyndns.plan import Clock, Phase, State, Target
from dnsproxy.dyndns.status import COLUMNS, WIDE, Event, View, advice, cells, document, status, trouble

CLOCK = Clock(1000.0, 1_000_001_000.0, "boot")  # the wall clock is a thousand million ahead
TARGET = Target("https://x.example/", "www.example.de", "me", (V4, V6))


def settled(code: Code = Code.GOOD, text: str = "", at: float = 900.0) -> State:
    return plan.settle(plan.begin(State(), at - 1), TARGET, Reply(code, text), at, "f")


def shown(state: State, phase: Phase = Phase.IN_SYNC, **more):
    more = {"last_loop": 950.0} | more
    return status(View(domain(), state, phase, **more), CLOCK)


def test_a_record_in_sync():
    found = Found(Known(packed(V4), ("echo a", "echo b")), Known(packed(V6), ("interface",)), cgnat=True)
    status_ = shown(settled(), next_run=1300.0, found=found)
    assert status_.model_dump(by_alias=True, exclude_none=True) == {
        "enabled": True,
        "ipAddress": V4,
        "mode": "Dynamic",
        "lastLoop": "2001-09-09T02:02:30.000000Z",
        "lastResult": True,
        "phase": "in-sync",
        "ipv4": V4,
        "ipv6": V6,
        "lastAttempt": "2001-09-09T02:01:39.000000Z",
        "lastSuccess": "2001-09-09T02:01:40.000000Z",
        "lastChange": "2001-09-09T02:01:40.000000Z",
        "lastCode": "good",
        "nextRun": "2001-09-09T02:08:20.000000Z",
        "consecutiveFailures": 0,
        "sources": ["echo a", "echo b", "interface"],
        "cgnat": True,
    }


def test_a_record_that_nobody_has_looked_at_has_no_result():
    status_ = shown(State(), Phase.PENDING, last_loop=None)
    assert (status_.last_result, status_.last_loop, status_.message) == (None, None, None)


def test_a_halted_record_says_what_to_do():
    status_ = shown(settled(Code.NOTFQDN, "notfqdn"), Phase.HALTED)
    assert (status_.held_reason, status_.held_until, status_.last_result) == ("notfqdn", None, False)
    assert "DynDNS is not enabled" in status_.message


def test_a_hold_that_is_over_is_not_shown():
    held = settled(Code.ABUSE, "abuse", at=900.0)
    assert shown(held, Phase.HELD).held_until == "2001-09-09T03:01:40.000000Z"
    later = Clock(CLOCK.now + 3600, CLOCK.wall + 3600, "boot")
    assert status(View(domain(), held, Phase.HELD), later).held_until is None


def test_a_disabled_record_has_no_result():
    assert shown(settled(), Phase.DISABLED).last_result is None


def test_a_problem_comes_before_what_was_answered():
    status_ = shown(settled(), Phase.IN_SYNC, problem="no source answered")
    assert (status_.message, status_.last_result) == ("no source answered", False)


def test_no_time_is_too_far_to_be_shown():
    endless = replace(domain(), interval=60.0 * (2**31 - 1))
    view = View(endless, State(), next_run=endless.interval)
    assert status(view, CLOCK).next_run.startswith("6084")
    assert status(replace(view, next_run=1e15), CLOCK).next_run.startswith("9999")
    assert status(replace(view, next_run=-1e15), CLOCK).next_run.startswith("1970")


def test_the_columns_of_a_list():
    row = document(domain(), shown(settled()))
    assert [each.title for each in COLUMNS] == [
        "Fqdn", "IP Address", "Mode", "Successful", "Last Run", "Enabled",
    ]  # fmt: skip
    assert cells(row) == ["www.example.de", V4, "Dynamic", "true", "2001-09-09T02:02:30.000000Z", "true"]
    assert cells(row, WIDE)[6:8] == [V6, "in-sync"]
    assert cells(document(domain(), shown(State(), last_loop=None)))[1:5] == ["", "Dynamic", "", ""]


def test_a_document_has_no_password():
    assert PASSWORD not in repr(document(domain(), shown(settled())))


@pytest.mark.parametrize("code", Code)
def test_every_answer_reads_as_a_sentence(code):
    assert advice(code, "said so").startswith("said so")
    assert advice(code, "").startswith(code.value)


def test_trouble_is_what_is_unavailable():
    lost = Unavailable(Why.DISAGREE, "two of two differ")
    assert trouble(Found(Known(packed(V4)), lost)) is lost
    assert trouble(Found(Known(packed(V4)), NotManaged())) is None


def test_an_event_is_a_row():
    row = Event(0.25, "Warning", "DynDnsUpdateFailed", "Domain default/www", "www.example.de", "911").row()
    assert row["at"] == "1970-01-01T00:00:00.250000Z"
    assert row["source"] == "contrib.strato.com/strato-dyndns-ctrl"
