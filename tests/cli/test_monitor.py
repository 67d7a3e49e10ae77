"""`dnsproxy monitor`."""

# ruff: noqa: ISC004 - lines of output that are longer than ours may be
from __future__ import annotations

import json

import yaml

HEAD = {
    "ts": "2026-12-01T01:02:03.004005Z",
    "endpoint": "default/ci",
    "client": "10.1.0.5",
    "protocol": "udp",
    "name": "a.test.",
    "qtype": "A",
}
REQUEST = HEAD | {"type": "request", "verdict": "denied", "reason": "no rule allows this name", "rule": None}
RESPONSE = HEAD | {
    "type": "response",
    "rcode": "NOERROR",
    "addresses": ["192.0.2.1"],
    "cnames": ["b.test."],
    "ttl": 60,
    "upstream_ms": 1.25,
    "hold_ms": 0.5,
    "server": "192.0.2.53:53",
    "cause": "",
    "not_learned": [],
}
FAILED = RESPONSE | {
    "rcode": "SERVFAIL",
    "addresses": [],
    "cnames": [],
    "ttl": None,
    "cause": "no answer",
    "server": "",
    "not_learned": ["10.0.0.1"],
}
EVENTS = [
    REQUEST,
    REQUEST | {"verdict": "allowed", "endpoint": ""},
    RESPONSE,
    FAILED,
    {"ts": HEAD["ts"], "type": "dropped", "count": 9},
]


def test_a_line_for_people_has_the_words_in_ciliums_order(dnsproxy, daemon):
    daemon.says("GET /v1/events", "".join(f"{json.dumps(event)}\n" for event in EVENTS))
    code, out, _ = dnsproxy("monitor", "-e", "ci", "--name", "*.test", "--verdict", "denied")
    assert code == 0
    assert out.splitlines() == [
        "01:02:03.004 -> Request dns from default/ci (10.1.0.5 udp) verdict Denied (no rule allows this name)"
        " DNS proxy: a.test. A",
        "01:02:03.004 -> Request dns from unknown (10.1.0.5 udp) verdict Allowed DNS proxy: a.test. A",
        "01:02:03.004 <- Response dns to default/ci (10.1.0.5 udp) from 192.0.2.53:53 verdict Forwarded"
        " DNS proxy: a.test. A TTL: 60 Answer: '192.0.2.1' CNAMEs: b.test. (1.2 ms, held 0.5 ms)",
        "01:02:03.004 <- Response dns to default/ci (10.1.0.5 udp) verdict Error (no answer)"
        " DNS proxy: a.test. A RCode: SERVFAIL not learned: 10.0.0.1 (1.2 ms, held 0.5 ms)",
        "01:02:03.004 -- 9 events are missing here: they came faster than they were read",
    ]
    assert daemon.asked == ["GET /v1/events?endpoint=ci&name=%2A.test&verdict=denied"]


def test_json_is_the_events(dnsproxy, daemon):
    daemon.says("GET /v1/events", "".join(f"{json.dumps(event)}\n" for event in EVENTS))
    assert [json.loads(line) for line in dnsproxy("monitor", "-o", "json")[1].splitlines()] == EVENTS


def test_yaml_is_one_document_for_each_event(dnsproxy, daemon):
    daemon.says("GET /v1/events", "".join(f"{json.dumps(event)}\n" for event in EVENTS))
    out = dnsproxy("monitor", "-o", "yaml")[1]
    assert list(yaml.safe_load_all(out)) == EVENTS
    assert out.startswith("---\n")
