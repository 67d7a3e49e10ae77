from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy import addresses as ip
from dnsproxy.cache import preload
from dnsproxy.cache.lookups import Lookup, Record
from dnsproxy.errors import DocumentError
from dnsproxy.names import from_text

ENTRY = {
    "endpoint-id": 42,
    "expiration-time": "2026-01-02T03:05:05.500Z",
    "fqdn": "www.Example.com.",
    "ips": ["192.0.2.1", "2001:db8::1", "::ffff:192.0.2.2"],
    "lookup-time": "2026-01-02T04:04:05.5+01:00",
    "source": "lookup",
    "ttl": 60,
}
MADE = 1_767_323_045.5  # date -u -d 2026-01-02T03:04:05Z +%s
WWW = from_text("www.example.com")


def problems(text):
    with pytest.raises(DocumentError) as caught:
        preload.parse(text, "cache.json")
    return [str(problem) for problem in caught.value.problems]


def test_an_entry_becomes_one_lookup_with_all_its_addresses():
    addresses = tuple(map(ip.from_text, ("192.0.2.1", "2001:db8::1", "192.0.2.2")))
    found = preload.parse(json.dumps([ENTRY]), "cache.json")
    assert found == [Record(WWW, Lookup(MADE + 60, MADE, 60), addresses)]


def test_ttl_and_addresses_may_be_missing_and_nanoseconds_are_cut():
    times = {"lookup-time": "2026-01-02T03:04:05.500000999Z", "expiration-time": "2026-01-02T03:04:05.5Z"}
    found = preload.parse(json.dumps([{"fqdn": "www.example.com.", **times}]), "cache.json")
    assert found == [Record(WWW, Lookup(MADE, MADE, 0), ())]


def test_an_empty_list_is_no_fault():
    assert preload.parse(" [ ]\n", "cache.json") == []


def test_each_lookup_goes_to_the_endpoints_that_grant_its_name_and_keeps_its_expiry():
    records = preload.parse(json.dumps([ENTRY, {**ENTRY, "fqdn": "other.example."}]), "cache.json")
    offset = MADE - 100.0
    granting = {WWW: ["default/a", "default/b"]}
    spread = list(preload.spread(records, lambda name: granting.get(name, []), offset, 130.0))
    assert [key for key, _ in spread] == ["default/a", "default/b"]
    assert {record for _, record in spread} == {Record(WWW, Lookup(160.0, 100.0, 60), records[0].addresses)}


def test_a_lookup_from_the_future_was_made_now_but_expires_when_the_file_says():
    records = preload.parse(json.dumps([ENTRY]), "cache.json")
    ((_, record),) = preload.spread(records, lambda _: ["default/a"], MADE - 100.0, 30.0)
    assert record.lookup == Lookup(160.0, 30.0, 60)


def test_every_fault_is_told_at_its_place():
    text = json.dumps([ENTRY, {**ENTRY, "ttl": "60"}, 7, {**ENTRY, "ips": ["192.0.2.1", "nine"]}], indent=2)
    lines = text.splitlines()
    ttl, seven = (next(n for n, line in enumerate(lines, 1) if what in line) for what in ('"60"', "  7,"))
    ips = [n for n, line in enumerate(lines, 1) if '"ips"' in line][-1]
    assert problems(text) == [
        f"cache.json:{ttl}:5: [1].ttl: expected a whole number, not '60'",
        f'cache.json:{seven}:3: [2]: expected an object such as {{"fqdn": ...}}, not 7',
        f"cache.json:{ips}:5: [3].ips[1]: expected an IP address, not 'nine'",
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fqdn", None, "required, but missing"),
        ("fqdn", "a..b.", "has an empty label"),
        ("ttl", -1, "expected seconds from 0"),
        ("ttl", True, "expected a whole number"),
        ("ips", "192.0.2.1", "expected a list"),
        ("ips", [1], "expected an IP address, not 1"),
        ("lookup-time", "yesterday", "expected a time such as"),
        ("lookup-time", "2026-01-02T03:04:05", "expected a time such as"),
        ("expiration-time", 5, "expected text"),
    ],
)
def test_a_value_of_the_wrong_kind_is_a_fault(key, value, message):
    (problem,) = problems(json.dumps([{**ENTRY, key: value}]))
    assert f"[0].{key}" in problem
    assert message in problem


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("", "1:1", "expected an array"),
        ("{}", "1:1", "expected an array"),
        ("[\n1 2]", "2:3", "expected , or ]"),
        ("[\n {", "2:3", "expecting property name"),
        ("[] []", "1:4", "something follows"),
        ("[" * 100_000, "1:1", "recursion"),
        ("[" + "9" * 5000 + "]", "1:1", "limit"),
    ],
)
def test_what_is_not_an_array_of_json_is_told_with_its_place(text, where, message):
    problem = problems(text)[-1]
    assert problem.startswith(f"cache.json:{where}: not JSON: ")
    assert message in problem


@given(st.text(alphabet='[]{}",: 019atfqdnips\\u-\n') | st.binary().map(lambda b: b.decode("latin-1")))
def test_any_text_is_read_or_refused(text):
    try:
        records = preload.parse(text, "cache.json")
    except DocumentError as error:
        lines = [problem.line for problem in error.problems]
    else:
        lines = [len(records) + 1]
    assert lines
    assert min(lines) >= 1
