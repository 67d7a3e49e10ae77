"""`dnsproxy why`."""

# ruff: noqa: ISC004 - lines of output that are longer than ours may be
from __future__ import annotations

import json

STAMP = "2026-12-01T01:02:03.000004Z"
RULE = {
    "policy": "EgressPolicy default/ci",
    "path": "spec.allow[0]",
    "text": "a.test.",
    "at": "ci.yaml:7",
    "kind": "connect",
    "ports": None,
    "sets": [],
    "cidrs": ["10.0.0.0/8"],
}
KNOWN = {
    "address": "192.0.2.1",
    "endpoints": [
        {
            "endpoint-id": "default/ci",
            "reason": "it is open.",
            "lookups-total": 3,
            "lookups": [
                {
                    "fqdn": "a.test.",
                    "ttl": 60,
                    "lookup-time": STAMP,
                    "expiration-time": STAMP,
                    "expired": True,
                    "rules": [RULE],
                }
            ],
            "zombie": {
                "state": "live",
                "alive-at": STAMP,
                "delete-pending-at": STAMP,
                "expiration-time": None,
                "names": ["a.test."],
            },
            "not-learned": {"fqdn": "c.test.", "at": STAMP},
            "elements": [{"set": "inet d s", "element": "192.0.2.1", "name": "a.test."}],
            "departed": {"at": STAMP, "names": ["b.test."], "cause": "idle"},
        }
    ],
    "shared": [{"set": "inet d github4", "element": "192.0.2.1", "name": "a.test."}],
    "global": ["a.test."],
}


def test_everything_that_keeps_an_address_is_told(dnsproxy, daemon):
    daemon.says("GET /v1/why/192.0.2.1", KNOWN)
    code, out, _ = dnsproxy("why", "192.0.2.1", "-e", "ci")
    assert (code, daemon.asked) == (0, ["GET /v1/why/192.0.2.1?endpoint=ci"])
    lines = [line.strip() for line in out.splitlines()]
    assert lines[:4] == [
        "192.0.2.1",
        "default/ci: it is open.",
        "name     a.test.  lease until 2026-12-01T01:02:03.000Z, which is over"
        "  (TTL 60, seen 2026-12-01T01:02:03.000Z)",
        "rule   ci.yaml:7: EgressPolicy default/ci: spec.allow[0]: a.test.: "
        "opens every port; also in 10.0.0.0/8",
    ]
    assert "and 2 more names" in lines
    assert (
        "answered 2026-12-01T01:02:03.000Z for c.test.: not learned, since it is a private address" in lines
    )
    assert "left     2026-12-01T01:02:03.000Z as b.test.: idle" in lines
    assert sum(line.startswith("element  inet d ") for line in lines) == 2
    assert json.loads(dnsproxy("why", "192.0.2.1", "-o", "json")[1]) == KNOWN


def test_an_address_that_nobody_knows_is_told_so(dnsproxy, daemon):
    daemon.says(
        "GET /v1/why/2001%3Adb8%3A%3A1",
        {key: [] for key in ("endpoints", "shared", "global")} | {"address": "2001:db8::1"},
    )
    code, out, _ = dnsproxy("why", "2001:db8::1")
    assert code == 0
    assert "no endpoint knows it" in out
