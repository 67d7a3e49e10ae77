"""`dnsproxy cache`, `names`, `zombies`."""

from __future__ import annotations

import io
import json

import pytest

LOOKUP = {
    "endpoint-id": "default/ci",
    "source": "lookup",
    "fqdn": "a.test.",
    "ttl": 60,
    "lookup-time": "2026-12-01T01:02:03.000004Z",
    "expiration-time": "2026-12-01T02:02:03.000004Z",
    "ips": ["192.0.2.1", "2001:db8::1"],
    "connection": None,
}


def test_the_list_has_ciliums_columns(dnsproxy, daemon):
    shared = {**LOOKUP, "endpoint-id": "", "source": "global", "expiration-time": None}
    daemon.says("GET /v1/lookups", [LOOKUP, shared])
    code, out, err = dnsproxy("cache", "list", "-e", "ci", "-p", "*.test", "-s", "lookup", "--cidr", "::/0")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "Endpoint     Source   FQDN      TTL     ExpirationTime             IPs",
        "default/ci   lookup   a.test.   60      2026-12-01T02:02:03.000Z   192.0.2.1,2001:db8::1",
        "-            global   a.test.   60      -                          192.0.2.1,2001:db8::1",
    ]
    (asked,) = daemon.asked
    assert asked == "GET /v1/lookups?endpoint=ci&matchpattern=%2A.test&cidr=%3A%3A%2F0&source=lookup"


def test_no_entries_are_the_heading_alone(dnsproxy, daemon):
    daemon.says("GET /v1/lookups", [])
    code, out, _ = dnsproxy("cache", "list")
    assert (code, out.split()) == (0, ["Endpoint", "Source", "FQDN", "TTL", "ExpirationTime", "IPs"])


def test_json_is_the_rows(dnsproxy, daemon):
    daemon.says("GET /v1/lookups", [LOOKUP])
    assert json.loads(dnsproxy("cache", "list", "-o", "json")[1]) == [LOOKUP]


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_clean_shows_what_will_go_and_asks(dnsproxy, daemon, monkeypatch, answer, code):
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    daemon.says("DELETE /v1/lookups?matchpattern=%2A.test&dry-run=true", [LOOKUP])
    daemon.says("DELETE /v1/lookups?matchpattern=%2A.test", {"pairs": 2})
    found, out, _ = dnsproxy("cache", "clean", "-p", "*.test")
    assert found == code
    assert "default/ci   lookup   a.test." in out
    assert ("forgotten: 2 pairs of name and address" in out) == (code == 0)
    assert len(daemon.asked) == (2 if code == 0 else 1)


def test_clean_by_force_asks_nobody(dnsproxy, daemon):
    daemon.says("DELETE /v1/lookups", {"pairs": 1})
    code, out, _ = dnsproxy("cache", "clean", "-f", "-e", "ci")
    assert (code, out) == (0, "forgotten: 1 pair of name and address\n")
    assert daemon.asked == ["DELETE /v1/lookups?endpoint=ci&matchpattern=%2A"]


def test_cutting_connections_has_to_be_asked_for_and_is_shown(dnsproxy, daemon, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    kept = {**LOOKUP, "source": "connection", "ips": ["192.0.2.3"], "connection": "live"}
    what = "DELETE /v1/lookups?matchpattern=%2A&connections=true"
    daemon.says(f"{what}&dry-run=true", [LOOKUP, kept, {**kept, "fqdn": "b.test."}])
    daemon.says(what, {"pairs": 3})
    code, out, _ = dnsproxy("cache", "clean", "--cut-connections")
    assert code == 0
    assert "2026-12-01T02:02:03.000Z 192.0.2.3 live" in " ".join(out.split())
    assert "Connections to 1 address will be CUT." in out
    daemon.says("DELETE /v1/lookups?matchpattern=%2A&dry-run=true", [LOOKUP])
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    out = dnsproxy("cache", "clean")[1]
    assert "stay open while connections use them" in out
    assert "CUT" not in out


def test_nothing_to_forget_is_no_question(dnsproxy, daemon):
    daemon.says("DELETE /v1/lookups", [])
    assert dnsproxy("cache", "clean") == (
        0,
        "nothing to forget; --cut-connections takes zombies as well\n",
        "",
    )
    assert dnsproxy("cache", "clean", "--cut-connections")[:2] == (0, "nothing to forget\n")
    assert all("dry-run=true" in asked for asked in daemon.asked)


def test_addresses_of_several_names_are_marked(dnsproxy, daemon):
    other = {**LOOKUP, "fqdn": "b.test.", "ips": ["192.0.2.1"]}
    daemon.says("GET /v1/lookups", [LOOKUP, LOOKUP, other, {**other, "endpoint-id": "default/x"}])
    out = dnsproxy("cache", "list")[1]
    assert [line.split()[-1] for line in out.splitlines()[1:]] == [
        "192.0.2.1*,2001:db8::1",
        "192.0.2.1*,2001:db8::1",
        "192.0.2.1*",
        "192.0.2.1",
    ]


def test_names_are_selectors_and_in_json_what_cilium_prints(dnsproxy, daemon):
    whole = {"DNSPollNames": None, "FQDNPolicySelectors": []}
    daemon.says("GET /v1/names", whole)
    daemon.says("GET /v1/selectors", [{"selector": "*.test.", "names": 1, "ips": 2, "endpoints": 3}])
    assert dnsproxy("names")[1].splitlines()[1].split() == ["*.test.", "1", "2", "3"]
    assert json.loads(dnsproxy("names", "-o", "json")[1]) == whole


def test_zombies_say_how_many_names_are_not_shown(dnsproxy, daemon):
    row = {
        "endpoint-id": "default/ci",
        "ip": "192.0.2.1",
        "names": ["a.test."],
        "names-total": 3,
        "state": "live",
        "alive-at": LOOKUP["lookup-time"],
        "delete-pending-at": None,
        "expiration-time": None,
        "since-pass": 1,
        "seen-pass": 2,
    }
    daemon.says("GET /v1/zombies", [row])
    assert dnsproxy("zombies") == dnsproxy("zombies", "list")
    assert dnsproxy("zombies", "-o", "json", "-e", "ci") == dnsproxy(
        "zombies", "list", "-o", "json", "-e", "ci"
    )
    assert len(set(daemon.asked)) == 2
    line = dnsproxy("zombies")[1].splitlines()[1]
    assert line.startswith("default/ci   192.0.2.1   live    2026-12-01T01:02:03.000Z   -")
    assert line.endswith("a.test.,and 2 more")
