"""Events: the lines, the bound, the losses, and a writer that nothing can hold up."""

from __future__ import annotations

import json
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from dnsproxy import addresses, names
from dnsproxy.errors import DocumentError
from dnsproxy.events import Drain, EventWriter, Fan, Ring, render, render_lost

CLIENT = addresses.from_text("10.1.0.5")
NAME = names.from_text("www.example.com")
AHEAD = 1_000_000_000.0


class Rule(SimpleNamespace):
    """A rule as far as a line shows it."""

    def __hash__(self):
        return id(self)


def verdict(*, allowed: bool, rule: object = None, reason: str = "default/ci spec.allow[0]"):
    return SimpleNamespace(allowed=allowed, rule=rule, reason=reason)


def request(name=NAME, judged=None, endpoint="default/ci", qtype=1, *, stream=False):
    return ("request", 0.25, endpoint, CLIENT, stream, name, qtype, judged)


def response(qtype=28, rcode=0, found=(), cnames=(), ttl=None, name=NAME, cause="", private=()):
    return (
        "response",
        0.5,
        "default/ci",
        CLIENT,
        True,
        name,
        qtype,
        rcode,
        found,
        cnames,
        ttl,
        0.0125,
        0.0004,
        "[::1]:53",
        cause,
        private,
    )


def line(event) -> dict:
    text = render(event, AHEAD)
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    return json.loads(text)


def test_a_request_names_the_rule_that_allowed_it():
    rule = Rule(
        policy="EgressPolicy default/ci", path="spec.allow[0]", text="*.example.com", file="p.yaml", line=7
    )
    assert line(request(judged=verdict(allowed=True, rule=rule, reason="allowed"))) == {
        "ts": "2001-09-09T01:46:40.250000Z",
        "type": "request",
        "endpoint": "default/ci",
        "client": "10.1.0.5",
        "protocol": "udp",
        "name": "www.example.com.",
        "qtype": "A",
        "verdict": "allowed",
        "reason": "allowed",
        "rule": {
            "policy": "EgressPolicy default/ci",
            "path": "spec.allow[0]",
            "text": "*.example.com",
            "at": "p.yaml:7",
        },
    }


def test_a_denial_without_a_rule_and_an_unknown_client():
    denied = line(request(judged=verdict(allowed=False, reason="no rule matches")))
    assert (denied["verdict"], denied["reason"], denied["rule"]) == ("denied", "no rule matches", None)
    stranger = line(request(endpoint="", stream=True))
    assert (stranger["verdict"], stranger["reason"], stranger["endpoint"]) == ("denied", "unknown client", "")
    assert stranger["protocol"] == "tcp"


def test_a_response_carries_what_was_learned_and_how_long_it_took():
    found = (addresses.from_text("2001:db8::5"), addresses.from_text("192.0.2.7"))
    alias = names.from_text("edge.example.net")
    shown = line(response(found=found, cnames=(alias,), ttl=30, private=found[1:]))
    assert shown == {
        "ts": "2001-09-09T01:46:40.500000Z",
        "type": "response",
        "endpoint": "default/ci",
        "client": "10.1.0.5",
        "protocol": "tcp",
        "name": "www.example.com.",
        "qtype": "AAAA",
        "rcode": "NOERROR",
        "addresses": ["2001:db8::5", "192.0.2.7"],
        "cnames": ["edge.example.net."],
        "ttl": 30,
        "upstream_ms": 12.5,
        "hold_ms": 0.4,
        "server": "[::1]:53",
        "cause": "",
        "not_learned": ["192.0.2.7"],
    }


@pytest.mark.parametrize(
    ("qtype", "rcode", "texts"), [(65, 3, ("HTTPS", "NXDOMAIN")), (65535, 4000, ("TYPE65535", "RCODE4000"))]
)
def test_codes_as_text_and_unknown_ones_by_number(qtype, rcode, texts):
    shown = line(response(qtype=qtype, rcode=rcode))
    assert (shown["qtype"], shown["rcode"]) == texts
    assert shown["ttl"] is None


@pytest.mark.parametrize(
    "label", [bytes(range(48)), bytes(range(48, 96)), b'"}\n{"', b"\\", b"\xff\x00\x1b[31m"]
)
def test_hostile_labels_stay_inside_their_field(label):
    wire = bytes((len(label),)) + label + b"\x00"
    shown = line(request(name=wire, judged=verdict(allowed=False, reason=label.decode("latin-1"))))
    assert shown["name"] == names.to_text(wire)
    assert shown["verdict"] == "denied"


# -- the bound ------------------------------------------------------------------------------------------


def test_the_ring_is_bounded_and_its_losses_are_known():
    ring = Ring(3)
    drain = Drain(ring, rate=100, now=0.0)
    for number in range(5):
        ring.append(("request", number))
    assert drain.take(0.0) == [("request", 2), ("request", 3), ("request", 4)]
    assert drain.lost(3) == 2


def test_the_rate_bounds_what_is_written_and_the_rest_is_lost_not_delayed():
    ring = Ring(100)
    drain = Drain(ring, rate=10, now=0.0)
    for number in range(15):
        ring.append((number,))
    assert drain.take(0.0) == [(number,) for number in range(10)]
    assert drain.lost(10) == 5
    drain.wrote(10, 5)
    ring.append(("soon",))
    assert drain.take(0.05) == []  # half an event's worth of allowance
    assert drain.lost(0) == 1
    drain.wrote(0, 1)
    ring.append(("later",))
    assert drain.take(0.15) == [("later",)]
    assert drain.lost(1) == 0


def test_a_quiet_hour_does_not_save_up_for_more_than_a_second():
    ring = Ring(1000)
    drain = Drain(ring, rate=10, now=0.0)
    ring.extend((number,) for number in range(1000))
    assert len(drain.take(3600.0)) == 10


def test_what_could_not_be_written_is_reported_later():
    ring = Ring(10)
    drain = Drain(ring, rate=10, now=0.0)
    ring.append((1,))
    assert drain.take(0.0) == [(1,)]  # and the write fails: no `wrote`
    ring.append((2,))
    assert drain.take(1.0) == [(2,)]
    assert drain.lost(1) == 1


# -- the writer -----------------------------------------------------------------------------------------


def lines_of(path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_events_reach_the_file_and_the_losses_with_them(tmp_path):
    ring = Ring()
    path = tmp_path / "events.jsonl"
    for _ in range(7):
        ring.append(request(judged=verdict(allowed=True)))
    writer = EventWriter(ring, path, rate=5, say=pytest.fail)
    writer.stop()
    shown = lines_of(path)
    assert [entry["type"] for entry in shown] == ["request"] * 5 + ["dropped"]
    assert shown[-1]["count"] == 2
    assert path.stat().st_mode & 0o007 == 0


def test_reopen_follows_the_name_after_a_rotation(tmp_path):
    ring = Ring()
    path, old = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    writer = EventWriter(ring, path, rate=100, say=pytest.fail)
    path.rename(old)
    writer.reopen()
    ring.append(response())
    writer.stop()
    assert [entry["type"] for entry in lines_of(path)] == ["response"]


def test_a_failed_reopen_keeps_the_old_file_and_says_so_once(tmp_path):
    ring = Ring()
    folder = tmp_path / "log"
    folder.mkdir()
    said: list[str] = []
    writer = EventWriter(ring, folder / "events.jsonl", rate=100, say=said.append)
    folder.rename(tmp_path / "moved")
    writer.reopen()
    writer.stop()
    assert len(said) == 1
    assert "cannot be written: No such file or directory" in said[0]
    assert (tmp_path / "moved" / "events.jsonl").exists()


def test_a_file_that_cannot_be_opened_is_a_fault_of_the_settings(tmp_path):
    with pytest.raises(DocumentError, match=r"nowhere/events: cannot be written: No such file"):
        EventWriter(Ring(), tmp_path / "nowhere" / "events", rate=1, say=pytest.fail)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said_once_and_the_losses_are_counted():
    said: list[str] = []
    told = threading.Event()
    ring = Ring()
    ring.append(response())

    def say(text: str) -> None:
        said.append(text)
        told.set()

    writer = EventWriter(ring, Path("/dev/full"), rate=100, say=say)
    assert told.wait(10)
    ring.append(response())
    writer.stop()
    assert said == ["events are only counted until this is mended: [Errno 28] No space left on device"]
    assert writer._drain.lost(0) == 2


def test_a_stalled_reader_holds_up_neither_the_ring_nor_the_stop(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ring = Ring(5000)
    said: list[str] = []
    try:
        writer = EventWriter(ring, pipe, rate=1_000_000, say=said.append)
        for _ in range(20_000):
            ring.append(response())
        writer.stop()  # the pipe took 64 KiB and nobody reads the rest
        assert len(ring) <= 5000
        assert ring.appended == 20_000
        assert writer._thread.is_alive()
    finally:
        os.close(reader)
        writer._thread.join(10)
    assert said == ["events are only counted until this is mended: [Errno 32] Broken pipe"]
    assert not writer._thread.is_alive()


def test_a_pipe_without_a_reader_holds_up_nothing_and_is_written_once_there_is_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    said: list[str] = []
    told = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    ring = Ring()
    writer = EventWriter(ring, pipe, rate=100, say=say)  # returns
    assert told.wait(10)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ring.append(response())
        writer.stop()
        shown = [json.loads(text) for text in os.read(reader, 65_536).splitlines()]
    finally:
        os.close(reader)
    assert [entry["type"] for entry in shown] == ["response"]
    assert len(said) == 1
    assert "nobody reads this pipe" in said[0]


def test_a_disk_that_fills_up_in_a_line_keeps_whole_lines_only(tmp_path):
    path = tmp_path / "events.jsonl"
    size = len(render(response(), AHEAD))
    told = threading.Event()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ring = Ring()
    for _ in range(5):
        ring.append(response())
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(2.5 * size), before[1]))
    try:
        writer = EventWriter(ring, path, rate=100, say=lambda text: told.set())
        assert told.wait(10)
        assert len(lines_of(path)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ring.append(response())
    writer.stop()
    shown = lines_of(path)
    assert [entry["type"] for entry in shown] == ["response"] * 3 + ["dropped"]
    assert shown[-1]["count"] == 3


def test_where_nothing_can_be_taken_back_the_next_line_starts_on_its_own(monkeypatch, tmp_path):
    """A pipe took half a line and then failed."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    ring = Ring()
    writer = EventWriter(ring, path, rate=100, say=lambda text: None)
    try:
        writer._stopped.set()
        writer._thread.join()
        real, taken = os.write, []

        def failing(output: int, text: bytes) -> int:
            if taken:
                raise OSError(5, "Input/output error")
            taken.append(real(output, text[:10]))
            return taken[0]

        ring.append(response())
        monkeypatch.setattr(os, "write", failing)
        writer._visit()
        monkeypatch.setattr(os, "write", real)
        ring.append(response())
        writer._visit()
        first, *rest = os.read(reader, 65_536).splitlines()
        assert len(first) == 10
        assert [json.loads(text)["type"] for text in rest] == ["response", "dropped"]
    finally:
        os.close(reader)


# -- who looks on ---------------------------------------------------------------------------------------


def test_nothing_is_recorded_while_nobody_wants_it():
    targets = []
    fan = Fan(targets.append)
    assert targets == [None]
    assert not fan.recording
    with fan.subscribe() as ring:
        assert fan.recording
        assert targets[-1] is ring
    assert targets[-1] is None
    assert not fan.recording


def test_the_file_and_everybody_who_looks_on_get_every_event():
    targets = []
    file = Ring()
    fan = Fan(targets.append, file)
    assert targets == [file]
    with fan.subscribe() as one, fan.subscribe() as other:
        assert len(fan) == 2
        targets[-1].append(request())
    targets[-1].append(response())
    assert (list(one), list(other), list(file)) == ([request()], [request()], [request(), response()])


def test_a_slow_reader_loses_the_oldest_and_knows_how_many():
    targets = []
    fan = Fan(targets.append, Ring())
    with fan.subscribe(2) as ring:
        for number in range(5):
            targets[-1].append((number,))
        assert list(ring) == [(3,), (4,)]
        assert ring.appended - len(ring) == 3
    assert json.loads(render_lost(3, AHEAD)) == {
        "ts": "2001-09-09T01:46:40.000000Z",
        "type": "dropped",
        "count": 3,
    }
