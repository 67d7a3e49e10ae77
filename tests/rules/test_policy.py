from __future__ import annotations

import gc
import random
import sys
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule_strategies import pattern_texts, plain_names

from dnsproxy.addresses import from_text as address
from dnsproxy.endpoints import HOST_LABEL
from dnsproxy.errors import DocumentError
from dnsproxy.names import from_labels, from_text
from dnsproxy.rules.pattern import match_pattern
from dnsproxy.rules.policy import Memory, load

TCP, UDP = 6, 17
DST1, DST2, DST3, DST4 = "192.0.2.1", "192.0.2.2", "2001:db8::3", "192.0.2.4"
ENDPOINTS = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ep1, labels: {app: ep1, group: both}}
spec: {addresses: [10.0.0.1]}
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ep3, labels: {app: ep3, group: both}}
spec: {addresses: [10.0.0.3], denyReply: refused}
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ep9, namespace: other, labels: {app: ep9}}
spec: {addresses: [10.0.0.9]}
"""


def cilium(name, spec, labels="{app: ep1}", kind="CiliumNetworkPolicy"):
    return f"""
apiVersion: cilium.io/v2
kind: {kind}
metadata: {{name: {name}}}
spec:
  endpointSelector: {{matchLabels: {labels}}}
{spec}"""


def native(name, spec, labels="{app: ep1}"):
    return f"""
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {{name: {name}}}
spec:
  endpointSelector: {{matchLabels: {labels}}}
{spec}"""


def dns(*patterns, peer="", port="53", protocol="ANY"):
    """An egress rule that lets names be asked."""
    entries = ", ".join(f'{{matchPattern: "{pattern}"}}' for pattern in patterns)
    ports = f'toPorts: [{{ports: [{{port: "{port}", protocol: {protocol}}}], rules: {{dns: [{entries}]}}}}]'
    return f"  - {{{peer}{', ' if peer else ''}{ports}}}\n"


def to(server):
    return f"toCIDR: ['{server}']"


class World:
    """Endpoints and a policy, asked in text."""

    def __init__(self, *documents, enforcement="default"):
        texts = [("endpoints.yaml", ENDPOINTS)] + [(f"p{n}.yaml", text) for n, text in enumerate(documents)]
        self.endpoints, self.policy = load(texts, enforcement=enforcement)

    def endpoint(self, name):
        return next(each for each in self.endpoints.endpoints if each.name == name)

    def view(self, endpoint="ep1", protocol="UDP", port=53, server=None):
        return self.policy.view(self.endpoint(endpoint), protocol, port, server and address(server))

    def verdict(self, name, *where, **more):
        return self.view(*where, **more).verdict(from_text(name))

    def allows(self, name, *where, **more):
        return self.verdict(name, *where, **more).allowed

    def notes(self):
        return [str(note) for note in self.policy.notes]


# --- which rule, and why


def test_a_verdict_names_the_rule_that_decided():
    world = World(cilium("web", "  egress:\n" + dns("*.example.com", "api.test")))
    verdict = world.verdict("www.example.com")
    assert verdict.allowed
    assert (
        verdict.rule.policy,
        verdict.rule.path,
        verdict.rule.text,
        verdict.rule.file,
        verdict.rule.line,
    ) == (
        "CiliumNetworkPolicy default/web",
        "spec.egress[0].toPorts[0].rules.dns[0]",
        "*.example.com",
        "p0.yaml",
        8,
    )
    assert verdict.reason == "a rule allows this name"
    refused = world.verdict("www.example.org")
    assert (refused.allowed, refused.rule, refused.reason) == (False, None, "no rule allows this name")


def test_the_first_of_two_equal_patterns_is_named():
    world = World(native("a", "  resolve: ['*.test', '*.TEST.']"))
    assert world.verdict("a.test").rule.path == "spec.resolve[0]"


def test_the_more_telling_rule_is_named_before_one_for_every_name():
    world = World(native("a", "  resolve: ['*', '*.test']"))
    assert world.verdict("a.test").rule.text == "*.test"
    assert world.verdict("a.example").rule.text == "*"


def test_one_line_of_our_own_lets_ask_and_connect():
    world = World(native("ci", "  allow: ['github.com:443/TCP']\n  resolve: ['*.corp.test']"))
    verdict = world.verdict("github.com")
    (grant,) = verdict.grants.grants
    assert (verdict.rule.path, verdict.rule.line, grant.ports) == ("spec.allow[0]", 7, {(TCP, 443)})
    assert grant.rule is verdict.rule
    assert world.verdict("a.corp.test").grants.grants == ()
    assert not world.allows("corp.test")


def test_a_rule_of_a_list_knows_its_place_in_the_whole():
    head = "apiVersion: dnsproxy/v1, kind: EgressPolicy, metadata: {name: x}"
    world = World(f"kind: List\nitems:\n- {{{head}, spec: {{endpointSelector: {{}}, allow: [a.test]}}}}\n")
    assert (world.verdict("a.test").rule.path, world.verdict("a.test").rule.line) == (
        "items[0].spec.allow[0]",
        3,
    )


# --- scenarios 21 to 39: who may ask what, of which server


def test_names_match_whatever_their_case():  # 21
    world = World(cilium("a", "  egress:\n" + dns("cilium.io")))
    assert world.allows("CILIUM.io.")
    assert World(cilium("a", "  egress:\n" + dns("Cilium.IO"))).allows("cilium.io")


def test_no_list_of_names_allows_every_name():  # 22
    world = World(cilium("a", '  egress:\n  - toPorts: [{ports: [{port: "53"}], rules: {}}]'))
    verdict = world.verdict("anything.test")
    assert (verdict.allowed, verdict.rule.path) == (True, "spec.egress[0].toPorts[0]")
    assert verdict.reason == "the port is allowed without DNS rules"


RULES = cilium(
    "one",
    "  egress:\n"
    + dns("*.ubuntu.com", "aws.amazon.com", peer=to(DST1), protocol="UDP")
    + dns("sub.ubuntu.com", peer=to(DST1), protocol="TCP")
    + dns("cilium.io", peer=to(DST2), protocol="UDP")
    + dns("example.com", port="54", protocol="UDP"),
)
RULES3 = cilium(
    "three",
    "  egress:\n"
    + dns("example.com", peer=to(DST1), protocol="UDP")
    + dns("example.com", peer=to(DST3), protocol="TCP")
    + f"  - {{{to(DST4)}, toPorts: [{{ports: [{{port: '53', protocol: UDP}}]}}]}}\n",
    "{app: ep3}",
)


@pytest.mark.parametrize(
    ("scenario", "endpoint", "protocol", "port", "server", "name", "allowed"),
    [
        (24, "ep1", "UDP", 53, DST1, "www.ubuntu.com", True),
        (24, "ep1", "UDP", 53, DST1, "aws.amazon.com", True),
        (25, "ep1", "TCP", 53, DST1, "sub.ubuntu.com", True),
        (25, "ep1", "TCP", 53, DST1, "www.ubuntu.com", False),
        (26, "ep1", "UDP", 54, DST1, "cilium.io", False),
        (26, "ep1", "UDP", 54, DST4, "cilium.io", False),
        (27, "ep1", "UDP", 53, DST2, "cilium.io", True),
        (28, "ep1", "UDP", 53, DST2, "aws.amazon.com", False),
        (28, "ep1", "UDP", 53, DST1, "cilium.io", False),
        (29, "ep1", "UDP", 54, DST1, "example.com", True),
        (29, "ep1", "TCP", 54, DST1, "example.com", False),
        (30, "ep3", "UDP", 53, DST1, "example.com", True),
        (30, "ep3", "UDP", 53, DST1, "aws.amazon.com", False),
        (31, "ep3", "UDP", 54, DST1, "example.com", False),
        (32, "ep3", "TCP", 53, DST3, "example.com", True),
        (32, "ep3", "TCP", 53, DST3, "amazon.com", False),
        (33, "ep3", "TCP", 53, DST4, "example.com", False),
        (34, "ep3", "UDP", 53, DST4, "anything.test", True),
    ],
)
def test_who_may_ask_what_of_which_server(scenario, endpoint, protocol, port, server, name, allowed):
    assert World(RULES, RULES3).allows(name, endpoint, protocol, port, server) is allowed


def test_without_a_server_the_peers_of_dns_rules_count_as_matching_and_a_note_says_so():
    world = World(RULES)
    assert world.allows("aws.amazon.com")
    assert world.allows("cilium.io")
    assert not world.allows("example.com")
    assert [note for note in world.notes() if "selects the DNS server; that is ours" in note] != []


def test_taking_rules_away_takes_their_names_away():  # 23, 35
    assert World(RULES).allows("cilium.io")
    assert not World(cilium("one", "  egress: [{}]")).allows("cilium.io")
    assert World().verdict("cilium.io").reason == "no policy selects this endpoint"


def test_patterns_are_kept_once_whoever_has_them():  # 36, 37
    texts = [
        cilium("a", "  egress:\n" + dns("a.test", "*.b.test")),
        cilium("b", "  egress:\n" + dns("*.B.test.", "A.test")),
    ]
    assert len(World(texts[0]).policy.index.ids) == 2
    assert len(World(*texts).policy.index.ids) == 2
    assert len(World(*texts, cilium("c", "  egress:\n" + dns("c.test"))).policy.index.ids) == 3
    assert World().policy.index.ids == {}


def test_one_wrong_pattern_refuses_the_whole_update():  # 38
    with pytest.raises(DocumentError):
        World(cilium("a", "  egress:\n" + dns("a.test", "[b].test")))


def test_the_final_dot_makes_no_difference():  # 39
    with_, without = (
        World(cilium("a", "  egress:\n" + dns(*names))).policy.index.ids
        for names in (("a.test.", "*.b.test."), ("a.test", "*.b.test"))
    )
    assert with_ == without


# --- scenarios 15 to 17: default deny off

SOFT = "  enableDefaultDeny: {egress: false}\n"


def test_default_deny_off_refuses_no_name():  # 15
    world = World(cilium("a", SOFT + "  egress:\n" + dns("a.test")))
    assert world.verdict("a.test").rule.path == "spec.egress[0].toPorts[0].rules.dns[0]"
    verdict = world.verdict("b.test")
    assert (verdict.allowed, verdict.rule.path) == (True, "spec.enableDefaultDeny")
    assert verdict.reason == "default deny is off for this rule"


def test_default_deny_off_for_one_server():  # 16
    world = World(
        cilium("a", SOFT + "  egress:\n" + dns("a.test", peer=to(DST1))),
        cilium("b", "  egress:\n" + dns("b.test")),
    )
    assert world.allows("x.test", server=DST1)
    assert not world.allows("x.test", server=DST2)
    assert world.allows("b.test", server=DST2)


def test_a_denial_stays_one_where_default_deny_is_off():  # 17
    world = World(cilium("a", SOFT + '  egressDeny: [{toPorts: [{ports: [{port: "53", protocol: UDP}]}]}]'))
    verdict = world.verdict("a.test")
    assert (verdict.allowed, verdict.rule.path, verdict.reason) == (
        False,
        "spec.egressDeny[0]",
        "egressDeny covers the DNS port",
    )
    assert world.verdict("a.test", protocol="TCP").reason.startswith("default deny is off in every policy")


def test_one_policy_with_default_deny_is_enough():
    soft = cilium("a", SOFT + "  egress:\n  - toFQDNs: [{matchName: a.test}]")
    assert World(soft).allows("x.test")
    assert not World(soft, cilium("b", "  egress: [{}]")).allows("x.test")


# --- enforcement modes


@pytest.mark.parametrize(
    ("documents", "default", "always"),
    [
        ([], "no policy selects this endpoint", "no policy selects this endpoint, and enforcement is always"),
        (
            [cilium("a", "  ingress: [{}]")],
            "no policy selects this endpoint",
            "no policy selects this endpoint, and",
        ),
        (
            [cilium("a", SOFT + "  egress: [{}]")],
            "default deny is off in every policy",
            "no rule lets this endpoint ask",
        ),
    ],
)
def test_enforcement_of_endpoints_that_nothing_restricts(documents, default, always):
    lenient = World(*documents).verdict("a.test")
    strict = World(*documents, enforcement="always").verdict("a.test")
    assert (lenient.allowed, strict.allowed) == (True, False)
    assert lenient.reason.startswith(default)
    assert strict.reason.startswith(always)
    assert lenient.rule is strict.rule is None


def test_which_endpoints_are_restricted():
    world = World(native("a", "  allow: [a.test]"), cilium("b", SOFT + "  egress: [{}]", "{app: ep3}"))
    strict = World(enforcement="always")
    assert [world.policy.restricts(world.endpoint(name)) for name in ("ep1", "ep3", "ep9", "host")] == [
        True, False, False, False,
    ]  # fmt: skip
    assert strict.policy.restricts(strict.endpoint("ep9"))


def test_the_statements_that_select_an_endpoint_come_in_the_order_of_the_documents():
    world = World(native("a", "  allow: [a.test]"), cilium("b", SOFT + "  egress: [{}]", "{app: ep3}"))
    found = {name: [each.place.file for each in world.policy.selecting(world.endpoint(name))]
             for name in ("ep1", "ep3", "host")}  # fmt: skip
    assert found == {"ep1": ["p0.yaml"], "ep3": ["p1.yaml"], "host": []}


@pytest.mark.parametrize(
    "spec",
    ["  egress: [{}]", "  egress:\n  - toFQDNs: [{matchName: a.test}]", "  ingress: [{}]\n  egress: []",
     "  egress:\n  - toFQDNs: []\n    toPorts: [{ports: [{port: '53'}]}]",
     "  egress:\n  - toEndpoints: []\n    toPorts: [{ports: [{port: '53'}]}]",
     "  egress:\n  - toPorts: [{ports: [{port: '53'}], rules: {dns: []}}]", "  egress:\n  - toPorts: []",
     "  egress:\n  - toEntities: [all]\n    toPorts: []", "  egressDeny: [{}]"],
)  # fmt: skip
def test_present_but_empty_is_deny_all(spec):
    assert not World(cilium("a", spec)).allows("a.test")


def test_our_own_empty_list_is_deny_all():
    assert not World(native("a", "  allow: []")).allows("a.test")
    assert not World(native("a", "  resolve: []")).allows("a.test")


# --- how rules of several policies merge (2.8)

PLAIN = "  - toPorts: [{ports: [{port: '53'}]}]\n"
WIDE = "  - toEntities: [all]\n"
RANGE = "  - toPorts: [{ports: [{port: '1', endPort: 99}]}]\n"
PORT0 = "  - toPorts: [{ports: [{port: '0'}]}]\n"


def test_names_of_all_policies_are_united():
    world = World(
        cilium("a", "  egress:\n" + dns("a.test")),
        native("b", "  resolve: [b.test]"),
        native("c", "  allow: [c.test]"),
    )
    assert all(world.allows(name) for name in ("a.test", "b.test", "c.test"))
    assert not world.allows("d.test")


def test_a_plain_permission_of_the_port_lets_every_name_pass():
    world = World(cilium("a", "  egress:\n" + dns("a.test") + PLAIN))
    assert world.verdict("x.test").reason == "the port is allowed without DNS rules"
    assert World(native("a", "  resolve: [a.test]"), cilium("b", "  egress:\n" + PLAIN)).allows("x.test")


@pytest.mark.parametrize("wide", [WIDE, RANGE, PORT0])
def test_a_wider_permission_does_not_widen_a_list_of_names(wide):
    assert not World(cilium("a", "  egress:\n" + dns("a.test") + wide)).allows("x.test")
    assert not World(native("a", "  resolve: [a.test]"), cilium("b", "  egress:\n" + wide)).allows("x.test")
    assert World(cilium("a", "  egress:\n" + wide)).allows("x.test")


def test_a_permission_for_one_server_counts_at_that_server():
    spec = "  egress:\n" + dns("a.test", peer=to(DST1)) + f"  - {{{to(DST2)}}}\n"
    world = World(cilium("a", spec))
    assert world.allows("x.test", server=DST2)
    assert not world.allows("x.test", server=DST1)
    assert not world.allows("x.test", server=DST4)


def test_peers_without_ports_say_nothing_about_our_own_server():
    world = World(cilium("a", "  egress:\n  - toEndpoints: [{}]\n  - toCIDR: [192.0.2.0/24]\n"))
    assert world.verdict("x.test").reason == "no rule lets this endpoint ask on port 53/UDP"
    assert World(cilium("a", "  egress:\n  - toCIDR: [0.0.0.0/0]\n")).allows("x.test")


def test_only_cidrs_are_compared_with_a_given_server():
    text = cilium("a", "  egress:\n" + dns("a.test", peer="toEntities: [world]"))
    assert World(text).allows("a.test")
    assert not World(text).allows("a.test", server=DST1)
    excepted = cilium(
        "a", "  egress:\n" + dns("a.test", peer="toCIDRSet: [{cidr: 192.0.2.0/24, except: [192.0.2.2/32]}]")
    )
    assert World(excepted).allows("a.test", server=DST1)
    assert not World(excepted).allows("a.test", server=DST2)


@pytest.mark.parametrize("ports", ["{port: '53'}", "{port: '50', endPort: 60}", "{port: '0', protocol: UDP}"])
def test_a_denial_of_the_port_wins(ports):
    deny = cilium("b", f"  egressDeny: [{{toPorts: [{{ports: [{ports}]}}]}}]")
    world = World(native("a", "  allow: ['*']"), deny)
    assert world.verdict("a.test").rule.policy == "CiliumNetworkPolicy default/b"
    assert world.allows("a.test", port=5353) is (ports != "{port: '0', protocol: UDP}")


def test_a_denial_of_peers_holds_for_a_given_server_only():
    world = World(native("a", "  allow: ['*']"), cilium("b", f"  egressDeny: [{{{to(DST1)}}}]"))
    assert world.allows("a.test")
    assert world.allows("a.test", server=DST2)
    assert not world.allows("a.test", server=DST1)


def test_our_own_policies_hold_at_every_port():
    world = World(native("a", "  resolve: [a.test]"))
    for protocol, port, server in (("TCP", 53, None), ("UDP", 5353, DST1)):
        assert world.allows("a.test", protocol=protocol, port=port, server=server)
        assert not world.allows("b.test", protocol=protocol, port=port, server=server)


# --- the two meanings of `*` (1.5)

ODD = from_labels([b"bad name", b"test"])


@pytest.mark.parametrize("stars", ["*", "*.", "***"])
def test_every_name_may_be_asked_whatever_its_bytes_but_not_every_name_connects(stars):
    text = cilium("a", "  egress:\n" + dns(stars) + f'  - toFQDNs: [{{matchPattern: "{stars}"}}]\n')
    view = World(text).view()
    assert view.verdict(ODD).allowed
    assert view.grants(ODD).grants == ()
    assert [grant.rule.text for grant in view.grants(from_text("a.test")).grants] == [stars]
    assert len(view.grants(b"\x00").grants) == 1


def test_no_other_star_matches_odd_bytes():
    view = World(cilium("a", "  egress:\n" + dns("*.test", "**.test"))).view()
    assert not view.verdict(ODD).allowed


# --- what answers open


def test_toFQDNs_alone_may_connect_but_not_ask():  # noqa: N802 - Cilium's word
    world = World(cilium("a", "  egress:\n  - toFQDNs: [{matchName: a.test}, {matchPattern: '**.b.test'}]\n"))
    assert not world.allows("a.test")
    assert len(world.view().grants(from_text("a.test")).grants) == 1
    lint = [note for note in world.notes() if "may connect but may not ask" in note]
    assert [note.split(": default/ep1 may")[0] for note in lint] == [
        "p0.yaml:8:15: spec.egress[0].toFQDNs[0]",
        "p0.yaml:8:36: spec.egress[0].toFQDNs[1]",
    ]
    assert "no DNS rule allows x.x.b.test. add one" in lint[1]


@pytest.mark.parametrize(
    ("asked", "connects", "noted"),
    [
        (["a.test"], "a.test", False),
        (["*.test"], "a.test", False),
        (["*"], "*", False),
        (["**.test"], "*.test", False),
        (["*.test"], "**.test", True),
        (["a*.test"], "*.test", True),
        (["b.test"], "a.test", True),
        (["a.test"], "*", True),
    ],
)
def test_connecting_without_asking_is_noted(asked, connects, noted):
    rule = f'  - toFQDNs: [{{matchPattern: "{connects}"}}]\n'
    same = World(cilium("a", "  egress:\n" + dns(*asked) + rule))
    other = World(cilium("a", "  egress:\n" + dns(*asked)), cilium("b", "  egress:\n" + rule))
    for world in (same, other):
        assert any("may connect but may not ask" in note for note in world.notes()) is noted


def test_names_that_may_be_asked_on_another_port_only_are_noted():
    rules = dns("a.test", port="54") + "  - toFQDNs: [{matchName: a.test}]\n"
    assert any("may not ask" in note for note in World(cilium("a", "  egress:\n" + rules)).notes())


def test_connecting_without_asking_is_noted_once_for_each_rule():
    world = World(cilium("a", "  egress:\n  - toFQDNs: [{matchName: a.test}]\n", "{group: both}"),
                  native("b", "  allow: [b.test]", "{app: ep3}"))  # fmt: skip
    assert len([note for note in world.notes() if "may not ask" in note]) == 1


def test_every_matching_connect_rule_grants():
    world = World(
        native(
            "a",
            "  allow: ['*.test:443/TCP', {pattern: '**.test', ports: [80/TCP], set: w}, 'a.test:22/TCP',"
            " b.test]",
        )
    )
    grants = world.verdict("a.test").grants.grants
    assert [grant.ports for grant in grants] == [{(TCP, 443)}, {(TCP, 80)}, {(TCP, 22)}]
    assert [grant.sets for grant in grants] == [(), ("w",), ()]
    assert world.verdict("b.test").grants.grants[-1].ports is None
    assert world.policy.sets == {"w"}


def test_the_same_pattern_twice_grants_twice():
    world = World(
        native("a", "  allow: ['a.test:1/TCP', 'A.test.:2/TCP']"), native("b", "  allow: ['a.test:3/TCP']")
    )
    assert [grant.ports for grant in world.verdict("a.test").grants.grants] == [
        {(TCP, 1)},
        {(TCP, 2)},
        {(TCP, 3)},
    ]


def test_grants_are_one_object_for_all_names_and_endpoints_with_the_same_rules():
    world = World(native("a", "  allow: ['*.test:443', x.test]", "{group: both}"))
    first = world.verdict("a.test").grants
    assert world.verdict("b.test").grants is first
    assert world.verdict("b.test", "ep3").grants is first
    assert world.verdict("b.test", protocol="TCP").grants is first
    assert world.verdict("x.test").grants is not first
    assert world.verdict("none.example").grants is world.verdict("other.example").grants


def test_groups_do_not_share_grants():
    world = World(
        native("a", "  allow: ['*.test']", "{group: both}"), native("b", "  resolve: [x]", "{app: ep3}")
    )
    assert world.verdict("a.test").grants is not world.verdict("a.test", "ep3").grants
    assert world.verdict("none.example").grants is not world.verdict("none.example", "ep3").grants


def test_whether_cname_targets_count():
    world = World(
        native(
            "a",
            "  allow: [{name: a.test, cnames: true}, b.test]\n  resolve: [{name: x.c.test, cnames: true}]",
        )
    )
    assert [
        (world.verdict(name).cnames, world.verdict(name).grants.cnames)
        for name in ("a.test", "b.test", "x.c.test")
    ] == [
        (True, True),
        (False, False),
        (True, False),
    ]


def test_denied_ports_are_not_opened():
    allow = native("a", "  allow: [{name: a.test, ports: [22/TCP, 443/TCP]}, 'b.test:22/TCP', c.test]")
    deny = cilium("b", '  egressDeny: [{toPorts: [{ports: [{port: "22", protocol: TCP}]}]}]')
    world = World(allow, deny)
    assert [grant.ports for grant in world.verdict("a.test").grants.grants] == [{(TCP, 443)}]
    assert world.verdict("b.test").grants.grants == ()
    assert [grant.ports for grant in world.verdict("c.test").grants.grants] == [None]
    peers = cilium("d", f"  egressDeny: [{{{to(DST1)}}}]")
    assert len(World(allow, peers).verdict("b.test").grants.grants) == 1
    everything = cilium("c", "  egressDeny: [{toEntities: [all]}]")
    assert World(allow, everything).view().grants(from_text("c.test")).grants == ()


def test_selectors_are_canonical():
    world = World(
        native("a", "  allow: [Cilium.io, cilium.io., '***.X']\n  resolve: [asked.test]"),
        cilium("b", "  egress:\n  - toFQDNs: [{matchName: cilium.io}, {matchPattern: '*.'}]"),
    )
    assert world.policy.selectors == {"cilium.io.", "**.x.", "*"}


# --- who is selected


def test_policies_count_for_the_endpoints_that_they_select():
    world = World(native("a", "  resolve: [a.test]"), native("b", "  resolve: [b.test]", "{group: both}"))
    assert [world.allows(name, "ep1") for name in ("a.test", "b.test")] == [True, True]
    assert [world.allows(name, "ep3") for name in ("a.test", "b.test")] == [False, True]
    assert world.verdict("a.test", "ep9").reason == "no policy selects this endpoint"
    assert world.verdict("a.test", "host").reason == "no policy selects this endpoint"


def test_a_clusterwide_policy_counts_in_every_namespace():
    world = World(cilium("a", "  egress: [{}]", "{}", "CiliumClusterwideNetworkPolicy"))
    assert [world.allows("a.test", name) for name in ("ep1", "ep3", "ep9", "host")] == [
        False,
        False,
        False,
        True,
    ]


def test_the_host_once_it_is_declared():
    head = "apiVersion: dnsproxy/v1\nkind: Endpoint\n"
    declared = head + "metadata: {name: host, labels: {app: edge}}\nspec: {denyReply: refused}\n"
    world = World(declared, native("a", "  resolve: [a.test]", "{app: edge}"))
    host = world.endpoints.host
    assert (dict(host.labels), host.deny, host.declared) == ({"app": "edge", HOST_LABEL: ""}, "refused", True)
    assert world.endpoints.find(address("127.0.0.1")) is host
    assert [world.allows(name, "host") for name in ("a.test", "b.test")] == [True, False]


def test_a_policy_that_selects_nobody_is_noted():
    (note,) = World(native("a", "  allow: []", "{app: typo}")).notes()
    assert note.startswith(
        "p0.yaml:6:3: spec: selects no endpoint in the namespace default; the host counts only"
    )
    assert World(native("a", "  allow: []")).notes() == []


def test_an_endpoint_of_another_table_has_no_view():
    world, other = World(), World()
    with pytest.raises(KeyError):
        world.policy.view(other.endpoint("ep1"))


def test_endpoints_keep_their_views_when_the_host_moves():
    world = World(native("a", "  resolve: [a.test]"))
    moved = world.endpoints.with_host_addresses([address("192.0.2.7")])
    assert world.policy.view(moved.find(address("10.0.0.1"))) is world.view()


# --- loading


def problems(*texts):
    with pytest.raises(DocumentError) as refused:
        load([(f"t{number}.yaml", text) for number, text in enumerate(texts)])
    return [str(problem) for problem in refused.value.problems]


def test_every_fault_of_every_file_is_told_at_once():
    found = problems(
        ENDPOINTS.replace("10.0.0.3", "10.0.0.1"), "a: [", "kind: Pod", native("a", "  allow: ['a b', ',']")
    )
    assert [line.split(": ")[0] for line in found] == [
        "t1.yaml:2:1",
        "t2.yaml:1:7",
        "t3.yaml:7:11",
        "t3.yaml:7:18",
        "t0.yaml:10:20",
    ]


def test_two_endpoints_with_one_prefix_are_an_error_that_names_both():
    (found,) = problems(ENDPOINTS.replace("10.0.0.9", "10.0.0.1"))
    assert found.startswith("t0.yaml:15:20: spec.addresses[0]: default/ep1 (t0.yaml:2) and other/ep9")
    assert found.endswith(" both claim the prefix 10.0.0.1/32")


def test_two_endpoints_with_one_name_are_an_error():
    host = "apiVersion: dnsproxy/v1\nkind: Endpoint\nmetadata: {name: host}\nspec: {}\n"
    assert "both claim the name default/ep1" in problems(ENDPOINTS, ENDPOINTS)[0]
    assert "both claim the name default/host" in problems(host, host)[0]


def test_two_policies_with_one_name_are_an_error():
    (found,) = problems(native("a", "  allow: []"), native("a", "  allow: ['*']"))
    assert found.startswith("t1.yaml:4:18: metadata.name: EgressPolicy default/a stands already at t0.yaml:2")
    World(native("a", "  allow: []"), cilium("a", "  egress: [{}]"))


def test_nothing_at_all_is_a_policy():
    endpoints, policy = load([])
    assert [endpoint.key for endpoint in endpoints.endpoints] == ["default/host"]
    assert policy.view(endpoints.host).verdict(from_text("a.test")).allowed
    assert policy.notes == []


def test_notes_of_all_kinds_are_collected_in_order():
    others = "apiVersion: v1\nkind: Secret\n"
    notes = World(
        cilium("a", "  ingress: [{}]\n  egress:\n  - toFQDNs: [{matchName: a.test}]"), others
    ).notes()
    assert [note.split(": ", 2)[2][:30] for note in notes] == [
        "not enforced here: only egress",
        "default/ep1 may connect but ma",
    ]


# --- what is remembered


def test_verdicts_are_remembered():
    view = World(native("a", "  allow: ['*.test']")).view()
    name = from_text("a.test")
    verdict = view.verdict(name)
    assert view.verdicts == {name: verdict}
    assert view.verdict(name) is verdict


def test_views_are_remembered():
    world = World()
    assert world.view() is world.view()
    assert world.view() is not world.view(protocol="TCP")
    assert world.view(server=DST1) is not world.view()


def test_all_that_packets_make_a_policy_remember_has_one_bound():
    world = World(native("a", "  allow: ['*a*.test', '*b*.test', '*c*.test', '*d*.test']", "{group: both}"))
    memory = world.policy.memory
    memory.limit = 50
    views = [world.view(endpoint, protocol) for endpoint in ("ep1", "ep3") for protocol in ("UDP", "TCP")]
    before = views[0].verdict(from_text("a.test"))
    choose = random.Random(5)
    for number in range(500):
        name = from_text("".join(choose.choices("abcd", k=3)) + f"{number}.test")
        assert choose.choice(views).verdict(name).allowed
        assert world.view("ep1", server=f"192.0.2.{number % 250}").verdict(name).allowed
        assert memory.count <= 50
        assert sum(map(len, memory._filled)) == memory.count
        assert sum(len(view.verdicts) for view in views) <= 50
    made = [scope._made for scope in world.policy._scopes.values() if scope._made]
    made += [group._made for group in world.policy._groups.values() if group._made]
    assert made != []
    assert all(any(each is filled for filled in memory._filled) for each in made)
    assert views[0].verdicts == {} or len(views[0].verdicts) < 50
    assert before.allowed
    kept = [each for each in gc.get_objects() if isinstance(each, type(before))]
    assert len(kept) <= 500


def test_memory_forgets_all_dicts_together():
    memory = Memory(3)
    first, second = {}, {}
    memory.put(first, 1, "a")
    memory.put(second, 1, "b")
    memory.put(second, 2, "c")
    assert memory.put(second, 3, "d") == "d"
    assert (first, second, memory.count) == ({}, {3: "d"}, 1)


def test_the_default_bound_is_a_hundred_thousand():
    assert World().policy.memory.limit == 100_000


# --- against a plain reference


@given(
    st.lists(st.tuples(st.booleans(), st.lists(pattern_texts(), max_size=4)), max_size=4),
    st.lists(plain_names(), min_size=1, max_size=5),
)
def test_a_name_may_be_asked_if_a_pattern_of_a_selecting_policy_matches_it(policies, names):
    labels = {True: "{group: both}", False: "{app: ep3}"}
    documents = [
        native(f"p{number}", "  resolve: " + str(texts), labels[both])
        for number, (both, texts) in enumerate(policies)
    ]
    world = World(*documents)
    for endpoint, mine in (
        ("ep1", [texts for both, texts in policies if both]),
        ("ep3", [texts for _, texts in policies]),
    ):
        for name in names:
            allowed = not mine or any(match_pattern(text).matches(name) for texts in mine for text in texts)
            assert world.view(endpoint).verdict(name).allowed is allowed


def test_a_retired_policy_goes_with_its_last_user_without_a_collection():
    endpoints, policy = load([("p.yaml", ENDPOINTS + "---" + native("a", "  allow: [a.test]"))])
    view = policy.view(endpoints.endpoints[0])
    assert view.verdict(from_text("a.test")) is view.verdict(from_text("a.test"))
    gone = weakref.ref(policy), weakref.ref(policy.index)
    policy.retire()
    assert view.verdict(from_text("a.test")).reason
    assert view.verdicts == {}
    gc.disable()
    try:
        del policy, view
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


# What a verdict costs


def instructions(call):
    """How many instructions of the interpreter a call takes."""
    counted, former = [], sys.gettrace()

    def trace(frame, event, _):
        frame.f_trace_opcodes = True
        if event == "opcode":
            counted.append(event)
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(former)
    return len(counted)


FORMS = ["name{}.example.com", "*.zone{}.example.net", "**.deep{}.example.org", "pre*{}.example.info"]


@pytest.mark.parametrize("form", FORMS)
def test_a_verdict_takes_as_many_instructions_whatever_the_number_of_rules(form):
    def costs(rules):
        allowed = [form.format(number) for number in range(1000, 1000 + rules)]
        entries = "".join(f'  - "{each}:443/TCP"\n' for each in allowed)
        view = World(native("many", f"  allow:\n{entries}")).view()
        allowed_name = from_text(allowed[7].replace("**", "a.b").replace("*", "x"))
        denied_name = from_text("other.example.com")
        first = [instructions(lambda name=name: view.verdict(name)) for name in (allowed_name, denied_name)]
        again = [instructions(lambda name=name: view.verdict(name)) for name in (allowed_name, denied_name)]
        assert view.verdict(allowed_name).allowed
        assert not view.verdict(denied_name).allowed
        return first, again

    few, many = costs(10), costs(1_000)
    assert few == many
    assert 0 < max(many[1]) < min(many[0])
