from __future__ import annotations

from ipaddress import ip_network

import pytest

from dnsproxy.errors import DocumentError
from dnsproxy.rules.documents import KINDS, read
from dnsproxy.yamldoc import parse


def models(text):
    """The checked models in a text."""
    return [each.model for document in parse(text, "f") for each in read(document)[0]]


def problems(text):
    with pytest.raises(DocumentError) as refused:
        models(text)
    return [str(problem) for problem in refused.value.problems]


def endpoint(spec, metadata="{name: ci}"):
    return f"apiVersion: dnsproxy/v1\nkind: Endpoint\nmetadata: {metadata}\nspec: {spec}\n"


def policy(spec, metadata="{name: ci}"):
    head = f"apiVersion: dnsproxy/v1\nkind: EgressPolicy\nmetadata: {metadata}\n"
    return head + f"spec: {{endpointSelector: {{}}, {spec}}}\n"


# --- Endpoint


def test_an_endpoint():
    (model,) = models(endpoint("{addresses: [10.1.0.5, 10.1.0.16/28, 'fd00::5'], denyReply: refused}"))
    assert (model.namespace, model.metadata.name, model.spec.deny_reply) == ("default", "ci", "refused")
    assert model.spec.addresses == [ip_network(text) for text in ("10.1.0.5", "10.1.0.16/28", "fd00::5")]


def test_the_host_needs_no_addresses():
    (model,) = models(endpoint("{denyReply: nxdomain}", "{name: host, labels: {role: edge}}"))
    assert model.is_host


@pytest.mark.parametrize(
    ("spec", "metadata", "expected"),
    [
        ("{}", "{name: ci}", "f:4:7: spec: addresses are required"),
        ("{addresses: []}", "{name: ci}", "f:4:7: spec: addresses are required"),
        ("{}", "{name: host, namespace: other}", "f:4:7: spec: addresses are required"),
        (
            "{addresses: [10.0.0.1]}",
            "{name: host}",
            "f:4:19: spec.addresses: the host's own addresses are known",
        ),
        (
            "{addresses: [10.0.0.1, x]}",
            "{name: ci}",
            "f:4:30: spec.addresses[1]: 'x' is not an address or prefix",
        ),
        (
            "{addresses: [10.0.0.1], denyReply: drop}",
            "{name: ci}",
            "f:4:42: spec.denyReply: expected 'nxdomain' or 'refused'",
        ),
        ("{addresses: [10.0.0.1]}", "{nme: ci}", "f:3:11: metadata.name: required, but missing"),
        (
            "{addresses: [10.0.0.1]}",
            "{name: " + "a" * 129 + "}",
            "f:3:18: metadata.name: an endpoint's name has at most 128",
        ),
        (
            "{address: [10.0.0.1]}",
            "{name: ci}",
            "f:4:8: spec.address: unknown key 'address': did you mean 'addresses'?",
        ),
    ],
)
def test_endpoints_that_are_refused(spec, metadata, expected):
    assert problems(endpoint(spec, metadata))[0].startswith(expected)


# --- EgressPolicy


def test_the_short_forms_and_the_long_ones_mean_the_same():
    short = "github.com, 'github.com:443', '*.x.test:8000-8010/TCP'"
    long = "{name: github.com}, {name: github.com, ports: ['443']}, "
    long += "{pattern: '*.x.test', ports: [8000-8010/TCP]}"
    one, other = (models(policy(f"allow: [{entries}]"))[0].spec.allow for entries in (short, long))
    assert one == other


def test_a_long_entry():
    (model,) = models(
        policy(
            "allow: [{name: git.corp.example, ports: [22, 443/TCP], cidrs: [10.0.0.0/8],"
            " set: [a, 4#inet#t#b], cnames: true}]"
        )
    )
    (entry,) = model.spec.allow
    assert (entry.names.text, entry.cnames, entry.sets) == ("git.corp.example.", True, ("a", "4#inet#t#b"))
    assert [[tuple(each) for each in group] for group in entry.ports] == [
        [(6, 22, 22), (17, 22, 22)],
        [(6, 443, 443)],
    ]
    assert entry.cidrs == [ip_network("10.0.0.0/8")]


def test_what_may_only_be_asked():
    (model,) = models(policy("resolve: ['*.corp.example', {name: x.test, cnames: true}]"))
    assert [(each.names.written, each.cnames) for each in model.spec.resolve] == [
        ("*.corp.example", False),
        ("x.test", True),
    ]
    assert model.spec.allow is None


def test_an_empty_list_is_something_said():
    assert models(policy("allow: []"))[0].spec.allow == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("allow: [], labels: {}", "f:4:41: spec.labels: unknown key 'labels'"),
        ("allow: ['https://x.test']", "[0]: 'https://x.test' is a URL: write the name alone, x.test"),
        ("allow: ['https://me@x.test:443/y']", "is a URL: write the name alone, x.test"),
        ("resolve: ['https://x.test']", "spec.resolve[0]: 'https://x.test' is a URL"),
        ("allow: [{name: 'https://x.test'}]", "spec.allow[0].name: 'https://x.test' is a URL"),
        ("allow: ['2001:db8::1']", "spec.allow[0]: '2001:db8::1' is an address, not a name"),
        ("allow: ['[2001:db8::1]:443']", "spec.allow[0]: '[2001:db8::1]:443' is an address, not a name"),
        ("allow: ['10.0.0.0/8']", "spec.allow[0]: '10.0.0.0/8' is an address, not a name"),
        ("resolve: ['2001:db8::/32']", "spec.resolve[0]: '2001:db8::/32' is an address, not a name"),
        ("allow: ['x.test:']", "'x.test:' has no port behind its colon: write x.test:443, or x.test"),
        ("allow: [{name: 'x.test:443'}]", "[0].name: 'x.test:443' is a name and a port: write the name"),
        ("allow: [{name: '*.x'}]", "spec.allow[0].name: '*.x' has a '*', and this is a plain name"),
        ("allow: ['a.*.x:443:1']", "spec.allow[0]: '443:1' is not a port"),
        ("allow: [x.test, '[ab].x']", "f:4:46: spec.allow[1]: '[ab].x' has '[', which no name has"),
        ("allow: [{name: a, pattern: b}]", "spec.allow[0]: expected either name or pattern"),
        ("allow: [{ports: [1]}]", "spec.allow[0]: expected either name or pattern"),
        ("allow: [192.0.2.1]", "spec.allow[0]: '192.0.2.1' is an address, not a name"),
        ("allow: ['192.0.2.1:443']", "spec.allow[0]: '192.0.2.1:443' is an address, not a name"),
        (
            "allow: [{name: a, ports: [1, 0443]}]",
            "spec.allow[0].ports[1]: the port '0443' starts with a zero",
        ),
        ("allow: [{name: a, ports: 443}]", "spec.allow[0].ports: expected a list, found a number"),
        ("allow: [{name: a, port: 443}]", "spec.allow[0].port: unknown key 'port': did you mean 'ports'?"),
        (
            "allow: [{name: a, cidrs: [10.0.0.1/8]}]",
            "spec.allow[0].cidrs[0]: '10.0.0.1/8' has bits behind its prefix",
        ),
        ("allow: [{name: a, set: [b, 'c d']}]", "spec.allow[0].set[1]: 'c d' is no set's name"),
        ("allow: [{name: a, set: 'c d'}]", "spec.allow[0].set: 'c d' is no set's name"),
        ("allow: [5]", "spec.allow[0]: expected a mapping, found a number"),
        ("allow: x", "spec.allow: expected a list, found text"),
        ("resolve: ['x:443']", "spec.resolve[0]: 'x:443' is a name and a port: write the name alone, x"),
        ("resolve: [{name: x, ports: [1]}]", "spec.resolve[0].ports: unknown key 'ports'"),
    ],
)
def test_policies_that_are_refused(spec, expected):
    assert expected in problems(policy(spec))[0]


def test_a_policy_says_who_and_what():
    text = "apiVersion: dnsproxy/v1\nkind: EgressPolicy\nmetadata: {name: x}\nspec: {%s}\n"
    assert "spec.endpointSelector: required" in problems(text % "allow: []")[0]
    assert "spec: allow or resolve is required" in problems(text % "endpointSelector: {}")[0]


# --- kinds


def test_a_kubernetes_list_is_written_out():
    item = "{apiVersion: dnsproxy/v1, kind: Endpoint, metadata: {name: %s}, spec: {addresses: [%s]}}"
    nested = f"{{apiVersion: v1, kind: List, items: [{item % ('b', '10.0.0.2')}]}}"
    text = f"apiVersion: v1\nkind: List\nitems:\n- {item % ('a', '10.0.0.1')}\n- {nested}\n"
    assert [model.metadata.name for model in models(text)] == ["a", "b"]
    (problem,) = problems(text.replace("10.0.0.2", "nowhere"))
    assert problem.startswith("f:5:")
    assert "items[1].items[0].spec.addresses[0]: 'nowhere'" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1", f"f:1:1: expected an object with apiVersion and kind; known here: {', '.join(KINDS)}"),
        ("[1]", "f:1:1: expected an object with apiVersion and kind"),
        ("kind: Pod", f"f:1:7: kind: unknown kind 'Pod'; known here: {', '.join(KINDS)}"),
        ("kind: [Pod]", "f:1:7: kind: unknown kind ['Pod']"),
        ("kind: Endpoint", "f:1:1: apiVersion: expected dnsproxy/v1 for the kind Endpoint"),
        ("kind: CiliumNetworkPolicy\napiVersion: cilium.io/v1", "f:2:13: apiVersion: expected cilium.io/v2"),
        ("kind: Secret\napiVersion: v2", "f:1:7: kind: unknown kind 'Secret'"),
        ("kind: PodList\nitems: 5", "f:2:8: items: a List holds its objects under items"),
        ("kind: List\nitems:\n- 5\n- kind: Pod\n", "f:3:3: items[0]: expected an object"),
    ],
)
def test_what_is_no_document_of_ours(text, expected):
    assert problems(text)[0].startswith(expected)


def test_every_fault_of_a_list_is_told():
    assert len(problems("kind: List\nitems:\n- 5\n- kind: Pod\n")) == 2


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: dyndns.contrib.strato.com/v1alpha1\nkind: Domain\n",
        "apiVersion: dyndns.contrib.strato.com/v2\nkind: Domian\n",
        "apiVersion: v1\nkind: Secret\nstringData: {a: b}\n",
    ],
)
def test_documents_of_dyndns_are_left_to_it(text):
    (document,) = parse(text, "f")
    assert read(document) == ([], [])


def test_titles():
    texts = (endpoint("{addresses: [10.0.0.1]}"), policy("allow: []", "{name: x, namespace: prod}"))
    titles = [each.title for text in texts for each in read(parse(text, "f")[0])[0]]
    assert titles == ["Endpoint default/ci", "EgressPolicy prod/x"]
