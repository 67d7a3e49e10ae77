"""`dnsproxy status`."""

from __future__ import annotations

import json

import pytest
from admin_world import World

from dnsproxy.admin import views

STATUS = json.loads(json.dumps(views.status(World(now=12.0).state)))
FINE = STATUS | {"state": "enforcing", "problem": None}


def told(dnsproxy, daemon, **change) -> tuple[int, dict[str, str]]:
    daemon.says("GET /v1/status", FINE | change)
    code, out, err = dnsproxy("status")
    assert err == ""
    return code, dict(line.split("   ", 1) for line in out.splitlines())


@pytest.mark.parametrize(
    ("change", "code", "first"),
    [
        ({}, 0, "ENFORCING: "),
        ({"state": "shown, not enforced"}, 0, "SHOWN, NOT ENFORCED: "),
        ({"state": "starting"}, 1, "STARTING: the sets are not read back yet"),
        ({"state": "not enforcing", "problem": "no right"}, 1, "NOT ENFORCING: no right"),
        ({"faults": {"policies": "a:1: x"}}, 1, "ENFORCING: "),
    ],
)
def test_code_and_first_line_tell_whether_all_is_well(dnsproxy, daemon, change, code, first):
    daemon.says("GET /v1/status", FINE | change)
    found, out, _ = dnsproxy("status")
    assert found == code
    assert out.splitlines()[0].split(None, 1)[1].startswith(first)
    assert json.loads(dnsproxy("status", "-o", "json")[1]) == FINE | change


def test_what_is_wrong_stands_out(dnsproxy, daemon):
    sets = FINE["sets"] | {"failing": {"inet d s": "full"}, "doubted": 3, "drift": 4}
    conntrack = FINE["conntrack"] | {"observing": False, "problem": "no right"}
    upstreams = [{"server": "192.0.2.53:53", "failures": 3, "usable": False}]
    store = {"age": 1.0, "batches": 1, "problem": "disk full"}
    reload = {"succeeded": False, "at": None}
    _, lines = told(
        dnsproxy, daemon, sets=sets, conntrack=conntrack, upstreams=upstreams, store=store, reload=reload
    )
    lines = {word: line.strip() for word, line in lines.items()}
    assert lines["FAULT"] == "set inet d s: full"
    assert lines["upstreams"] == "192.0.2.53:53 FAILING (3 failures)"
    assert lines["connections"].startswith("NOT OBSERVED (no right): ")
    assert lines["store"] == "FAILING: disk full"
    assert lines["reload"].startswith("FAILED")
    assert "3 IN DOUBT" in lines["sets"]
    assert "4 drift" in lines["sets"]


def test_it_fits_on_a_screen_and_has_no_raw_numbers(dnsproxy, daemon):
    conntrack = FINE["conntrack"] | {"completed": 2, "seconds": 0.0123456, "entries": 17}
    store = {"age": 2.51234, "batches": 1, "problem": None}
    queries = FINE["queries"] | {"queries": 7, "denied": 0, "strays": 2}
    _, lines = told(dnsproxy, daemon, conntrack=conntrack, store=store, queries=queries)
    lines = {word: line.strip() for word, line in lines.items()}
    assert len(lines) < 20
    assert lines["connections"].startswith("observed: 17 in 0.012 s, last look ")
    assert lines["store"] == "written 3 s ago"
    assert lines["queries"] == "7 queries, 0 denied, 0 answers, 2 strays, 0 in flight"
    assert lines["learned"].startswith("3 endpoints, ")
    _, lines = told(dnsproxy, daemon, store=None, sets=FINE["sets"] | {"state": "shown, not enforced"})
    assert lines["sets"].strip().startswith("0 elements shown")
    assert lines["store"].strip().startswith("none")
