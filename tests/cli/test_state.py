"""`dnsproxy reload`, `endpoints`, `sets`."""

from __future__ import annotations

import pytest

RULE = {
    "policy": "EgressPolicy default/ci",
    "path": "spec.allow[0]",
    "text": "a.test.",
    "at": "ci.yaml:7",
    "kind": "connect",
    "ports": ["443/tcp"],
    "sets": ["github"],
    "cidrs": [],
    "endpoints": 1,
}
ENDPOINT = {
    "endpoint-id": "default/ci",
    "labels": {"app": "ci", "x": ""},
    "addresses": ["10.1.0.5/32"],
    "deny": None,
    "restricted": True,
    "names": 1,
    "ips": 2,
    "zombies": 0,
    "evicted": 0,
}
VERIFIED = {
    "set": "inet dnsproxy ep.default.ci.addr4",
    "endpoint-id": "default/ci",
    "ours": True,
    "enforced": True,
    "kernel": 1,
    "applied": 1,
    "missing": 0,
    "extra": 0,
    "examples": [],
    "error": None,
}


def test_reload_says_what_is_in_force_or_what_is_faulty(dnsproxy, daemon):
    daemon.says("POST /v1/reload", {"reloaded": True, "faults": []})
    assert dnsproxy("reload")[:2] == (0, "in force: settings and policies as the files say now\n")
    daemon.says("POST /v1/reload", {"error": "nothing is changed", "faults": ["a:1:2: x"]}, status=422)
    assert dnsproxy("reload") == (3, "", "dnsproxy: nothing is changed:\na:1:2: x\n")


def test_endpoints_are_listed_and_shown_by_key_or_name(dnsproxy, daemon):
    daemon.says("GET /v1/endpoints", [ENDPOINT, ENDPOINT | {"endpoint-id": "test/lab"}])
    rules = [
        RULE | {"kind": "resolve", "ports": None},
        RULE | {"kind": "deny", "path": "spec.deny[0]"},
        RULE,
        RULE | {"kind": "resolve", "text": "*.corp."},
    ]
    daemon.says("GET /v1/endpoints/default/ci", ENDPOINT | {"rules": rules, "sets": ["a", "b"]})
    assert dnsproxy("endpoints", "list")[1].splitlines()[1].split() == [
        "default/ci",
        "yes",
        "1",
        "2",
        "0",
        "0",
        "10.1.0.5/32",
    ]
    for name in ("ci", "default/ci"):
        code, out, _ = dnsproxy("endpoints", "show", name)
        assert code == 0
        assert "labels        app=ci,x" in out
        assert (
            "allow a.test. 443/tcp; sets github EgressPolicy default/ci spec.allow[0] ci.yaml:7"
        ) in " ".join(out.split())
        kinds = [line.split()[0] for line in out.partition("Kind")[2].splitlines()[1:]]
        assert kinds == ["allow", "deny", "resolve"]
    code, _, err = dnsproxy("endpoints", "show", "none")
    assert code == 2
    assert "'none' is unknown; there are: default/ci, test/lab" in " ".join(err.split())


def test_sets_are_listed(dnsproxy, daemon):
    row = {
        "set": "inet d a",
        "endpoint-id": "",
        "ours": False,
        "enforced": True,
        "wanted": 3,
        "applied": 2,
        "missing": 1,
        "extra": 0,
        "failing": "set missing",
    }
    daemon.says("GET /v1/sets", [row])
    assert dnsproxy("sets", "list")[1].splitlines()[1].split(None, 7) == [
        "inet",
        "d",
        "a",
        "-",
        "3",
        "2",
        "1",
        "0       set missing",
    ]
    daemon.says("GET /v1/sets", [row | {"failing": None, "enforced": False}])
    assert dnsproxy("sets", "list")[1].splitlines()[1].endswith("   only shown: no such set exists")


def test_the_host_is_this_host(dnsproxy, daemon):
    daemon.says("GET /v1/endpoints", [ENDPOINT | {"labels": {"reserved:host": ""}, "addresses": []}])
    assert dnsproxy("endpoints", "list")[1].splitlines()[1].endswith("   this host")


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({}, 0, "-"),
        (
            {"missing": 1, "examples": [{"element": "192.0.2.1", "problem": "missing", "name": "a."}]},
            1,
            "missing 192.0.2.1",
        ),
        ({"extra": 1}, 1, "-"),
        ({"error": "set missing"}, 1, "set missing"),
    ],
)
def test_verify_is_a_test(dnsproxy, daemon, change, code, told):
    daemon.says("GET /v1/sets/verify", [VERIFIED | change])
    found, out, _ = dnsproxy("sets", "verify")
    assert found == code
    assert out.splitlines()[1].endswith(told)


def test_resync_says_what_it_repaired_or_why_not(dnsproxy, daemon):
    done = {"repaired": True, "problem": None, "drift": 3}
    daemon.says("POST /v1/sets/resync", done)
    assert dnsproxy("sets", "resync")[:2] == (0, "repaired: 3 elements differed\n")
    daemon.says("POST /v1/sets/resync", done | {"repaired": False, "problem": "no table"})
    assert dnsproxy("sets", "resync") == (1, "", "dnsproxy: not repaired: no table\n")
