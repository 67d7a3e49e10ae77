"""The policy manual is run: its table, its documents, what they allow and what is said of wrong ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cilium_vectors import wire

from dnsproxy.errors import DocumentError
from dnsproxy.names import from_text
from dnsproxy.rules.documents import KINDS
from dnsproxy.rules.matcher import Matcher
from dnsproxy.rules.pattern import match_name, match_pattern
from dnsproxy.rules.policy import load

TEXT = (Path(__file__).parents[2] / "docs/policy.md").read_text()
BLOCK = re.compile(r"^```yaml\n(.*?)^```\n(.*?)(?=^```yaml|\Z)", re.DOTALL | re.MULTILINE)
EXAMPLES = [(match[1], match[2]) for match in BLOCK.finditer(TEXT)]
PROTOCOLS = {6: "tcp", 17: "udp", 132: "sctp"}


def table(text, *head):
    """The rows of the first table with these columns; [] if there is none."""
    lines = iter(text.splitlines())
    for line in lines:
        if cells(line) == list(head):
            next(lines)
            return [cells(row) for row in iter(lambda: next(lines, ""), "") if row.startswith("|")]
    return []


def cells(line):
    return (
        [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if line.startswith("|")
        else []
    )


WILDCARDS = table(TEXT, "kind", "text", "name", "matches", "because")


@pytest.mark.parametrize(("kind", "text", "name", "matches"), [row[:4] for row in WILDCARDS])
def test_the_wildcard_table(kind, text, name, matches):
    pattern = {"name": match_name, "pattern": match_pattern}[kind](text)
    assert pattern.matches(wire(name)) is {"yes": True, "no": False}[matches]
    assert bool(Matcher([pattern]).match(wire(name))) is pattern.matches(wire(name))


def test_the_wildcard_table_is_found_whole():
    assert len(WILDCARDS) == TEXT.count("\n| pattern | `") + TEXT.count("\n| name | `")
    assert {row[3] for row in WILDCARDS} == {"yes", "no"}


@pytest.mark.parametrize(("document", "rest"), EXAMPLES)
def test_a_document_does_what_the_manual_says(document, rest):
    refusal = re.match(r"\n```text\n(.*?)\n```\n", rest, re.DOTALL)
    if refusal:
        with pytest.raises(DocumentError) as refused:
            load([("policy.yaml", document)])
        assert str(refused.value) == refusal[1]
        return
    rows = table(rest, "who", "name", "may ask", "opens")
    assert rows
    endpoints, policy = load([("policy.yaml", document)])
    views = {endpoint.key: policy.view(endpoint) for endpoint in endpoints.endpoints}
    for who, name, may_ask, opens in rows:
        verdict = views[who].verdict(from_text(name))
        assert verdict.allowed is {"yes": True, "no": False}[may_ask]
        if verdict.allowed:
            assert opened(verdict.grants) == opens


def opened(grants):
    if any(grant.ports is None for grant in grants.grants):
        return "every port"
    ports = sorted({(port, protocol) for grant in grants.grants for protocol, port in grant.ports})
    return " ".join(f"{port}/{PROTOCOLS[protocol]}" for port, protocol in ports)


def test_every_kind_is_in_the_manual():
    rows = table(TEXT, "kind", "apiVersion", "what for")
    assert {kind: version for kind, version, _ in rows} == {
        kind: version for kind, (version, _) in KINDS.items()
    }


# --- the table of what we read differently

ENDPOINT = (
    "apiVersion: dnsproxy/v1\nkind: Endpoint\nmetadata: {name: e}\nspec: {addresses: [10.0.0.1]}\n---\n"
)


@pytest.mark.parametrize(
    "rule",
    [
        "egress: [{toFQDNs: [], toPorts: [{ports: [{port: '53'}]}]}]",
        "egress: [{toPorts: [{ports: [{port: '53'}], rules: {dns: []}}]}]",
        "egress: [{toEntities: [all], toPorts: []}]",
        "egress: [], ingress: [{}]",
        "egress: [{toEndpoints: [{}]}]",
    ],
)
def test_what_the_manual_says_is_denied_here(rule):
    head = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: x}\n"
    endpoints, policy = load([("f", f"{ENDPOINT}{head}spec: {{endpointSelector: {{}}, {rule}}}\n")])
    assert not policy.view(endpoints.endpoints[1]).verdict(from_text("a.test")).allowed
