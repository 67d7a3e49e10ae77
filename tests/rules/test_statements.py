from __future__ import annotations

from ipaddress import ip_network

import pytest

from dnsproxy.addresses import from_text as address
from dnsproxy.endpoints import HOST_LABEL, Endpoint, built_in_host
from dnsproxy.rules.documents import read
from dnsproxy.rules.fields import EVERY_PORT, PortRange, Requirement
from dnsproxy.rules.statements import ANYONE, NOBODY, UNKNOWN, Peers, Reach, holds, labels_of, statements
from dnsproxy.yamldoc import parse

TCP, UDP, SCTP = 6, 17, 132
HOST = built_in_host()


def made(text):
    """The statements of a text, and what its notes say."""
    objects = [each for document in parse(text, "f") for each in read(document)[0]]
    stated, notes = statements(objects)
    return stated, [str(note).removeprefix("f:") for note in notes]


def cilium(rule, kind="CiliumNetworkPolicy", subject="endpointSelector: {}", metadata="{name: x}"):
    head = f"apiVersion: cilium.io/v2\nkind: {kind}\nmetadata: {metadata}\n"
    return head + f"spec: {{{subject}, {rule}}}\n"


def native(spec, selector="{}"):
    head = "apiVersion: dnsproxy/v1\nkind: EgressPolicy\nmetadata: {name: x}\n"
    return head + f"spec: {{endpointSelector: {selector}, {spec}}}\n"


def one(text):
    """The only statement of a text."""
    ((statement,), _) = made(text)
    return statement


def notes(rule, **more):
    """What the notes on one rule of a Cilium document say, each without its line and column."""
    return [note.split(": ", 1)[1] for note in made(cilium(rule, **more))[1]]


# --- peers and ports

TEN = ip_network("10.0.0.0/8")
ALL = ip_network("0.0.0.0/0")


@pytest.mark.parametrize(
    ("peers", "ours", "inside", "outside"),
    [
        (ANYONE, True, True, True),
        (NOBODY, False, False, False),
        (UNKNOWN, None, False, False),
        (Peers(networks=((TEN, ()),)), None, True, False),
        (Peers(networks=((TEN, (ip_network("10.1.0.0/16"),)),)), None, False, False),
        (Peers(networks=((TEN, (ip_network("10.2.0.0/16"),)),)), None, True, False),
        (Peers(networks=((ALL, ()),)), True, True, True),
        (Peers(networks=((ALL, (TEN,)),)), None, False, True),
    ],
)
def test_what_peers_cover(peers, ours, inside, outside):
    assert peers.covers(None) is ours
    assert peers.covers(address("10.1.0.53")) is inside
    assert peers.covers(address("192.0.2.53")) is outside


def test_an_address_of_the_other_family_is_outside():
    assert Peers(networks=((TEN, ()),)).covers(address("fd00::53")) is False


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ("", ANYONE),
        ("toEndpoints: [{}]", UNKNOWN),
        ("toEntities: [world]", UNKNOWN),
        ("toEntities: [world, all]", ANYONE),
        ("toServices: [{}]", UNKNOWN),
        ("toNodes: [{}]", UNKNOWN),
        ("toGroups: [{}]", UNKNOWN),
        ("toFQDNs: [{matchName: a}]", UNKNOWN),
        ("toEndpoints: []", NOBODY),
        ("toFQDNs: []", NOBODY),
        ("toCIDR: []", NOBODY),
        ("toCIDR: [10.0.0.0/8]", Peers(networks=((TEN, ()),))),
        ("toCIDRSet: [{cidr: 10.0.0.0/8}, {cidrGroupRef: x}]", Peers(networks=((TEN, ()),), opaque=True)),
        ("toCIDRSet: [{cidr: 0.0.0.0/0, except: [10.0.0.0/8]}]", Peers(networks=((ALL, (TEN,)),))),
        ("toEndpoints: [], toCIDR: [10.0.0.0/8]", Peers(networks=((TEN, ()),))),
    ],
)
def test_peers_of_a_dns_rule(peers, expected):
    rest = 'toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchName: a}]}}]'
    (asking,) = one(cilium(f"egress: [{{{peers + ', ' if peers else ''}{rest}}}]")).askings
    assert asking.peers == expected


@pytest.mark.parametrize(
    ("entry", "protocol", "port", "reach"),
    [
        ('{port: "53", protocol: UDP}', UDP, 53, Reach.EXACT),
        ('{port: "53", protocol: UDP}', TCP, 53, Reach.NONE),
        ('{port: "53"}', TCP, 53, Reach.EXACT),
        ('{port: "54"}', UDP, 53, Reach.NONE),
        ('{port: "50", endPort: 60}', UDP, 53, Reach.WIDE),
        ('{port: "0"}', UDP, 53, Reach.WIDE),
        ('{port: "53", endPort: 53}', UDP, 53, Reach.EXACT),
        ('{port: "dns"}', UDP, 53, Reach.NONE),
    ],
)
def test_reach_of_a_permission_without_dns_rules(entry, protocol, port, reach):
    (asking,) = one(cilium(f"egress: [{{toPorts: [{{ports: [{entry}]}}]}}]")).askings
    assert asking.reach(protocol, port) is reach
    assert asking.names is None


def test_a_rule_without_ports_reaches_every_port_widely():
    (asking,) = one(cilium("egress: [{toEntities: [all]}]")).askings
    assert (asking.reach(UDP, 53), asking.names) == (Reach.WIDE, None)


def test_our_own_policy_reaches_whichever_port():
    (asking,) = one(native("resolve: [x.test]")).askings
    assert asking.reach(UDP, 5353) is asking.reach(TCP, 53) is Reach.EXACT


# --- what may be asked


@pytest.mark.parametrize(
    "rule",
    [
        "{}",
        "{toFQDNs: [{matchName: a}]}",
        '{toFQDNs: [{matchName: a}], toPorts: [{ports: [{port: "53"}]}]}',
        '{toFQDNs: [], toPorts: [{ports: [{port: "53"}]}]}',
        "{icmps: [{}]}",
        "{toEntities: [all], icmps: [{}]}",
        '{toPorts: [{ports: [{port: "53", protocol: TCP}], rules: {http: [{}]}}]}',
        "{toPorts: []}",
        '{toPorts: [{ports: [{port: "53"}], serverNames: [a]}]}',
        '{toPorts: [{ports: [{port: "53"}]}], authentication: {mode: required}}',
        "{toEntities: [all], authentication: {mode: test-always-fail}}",
    ],
)
def test_what_lets_nothing_be_asked(rule):
    assert one(cilium(f"egress: [{rule}]")).askings == []


def test_names_and_their_rules():
    text = cilium(
        'egress: [{toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchName: A.test}, {matchName: b},'
        ' {matchPattern: "*"}]}}]}]'
    )
    (asking,) = one(text).askings
    first, _, last = (rule for _, rule in asking.names)
    assert (first.policy, first.path, first.text) == (
        "CiliumNetworkPolicy default/x",
        "spec.egress[0].toPorts[0].rules.dns[0]",
        "A.test",
    )
    assert (first.file, first.line, first.column, first.cnames) == ("f", 4, 88, False)
    assert asking.everything is last


def test_an_empty_list_of_dns_rules_allows_no_name():
    (asking,) = one(cilium('egress: [{toPorts: [{ports: [{port: "53"}], rules: {dns: []}}]}]')).askings
    assert (asking.names, asking.everything) == ((), None)


def test_no_list_of_dns_rules_restricts_nothing():
    (asking,) = one(cilium('egress: [{toPorts: [{ports: [{port: "53"}], rules: {}}]}]')).askings
    assert asking.names is None
    assert asking.everything.path == "spec.egress[0].toPorts[0]"


def test_default_deny_off_adds_everything_to_lists_of_names():
    names = 'egress: [{toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchName: a}]}}]}]'
    rule = f"{names}, enableDefaultDeny: {{egress: false}}"
    statement = one(cilium(rule))
    (asking,) = statement.askings
    assert not statement.default_deny
    assert (asking.everything.path, asking.everything.text) == ("spec.enableDefaultDeny", "*")
    assert len(asking.names) == 1


def test_default_deny_off_leaves_a_permission_without_names_as_it_is():
    rule = 'egress: [{toPorts: [{ports: [{port: "53"}]}]}], enableDefaultDeny: {egress: false}'
    (asking,) = one(cilium(rule)).askings
    assert asking.everything.path == "spec.egress[0].toPorts[0]"
    assert asking.reason == "the port is allowed without DNS rules"


def test_our_own_names_may_be_asked_and_connected_to():
    statement = one(native("allow: ['a.test:443/TCP', b.test], resolve: [c.test]"))
    (asking,) = statement.askings
    assert [(pattern.text, rule.path) for pattern, rule in asking.names] == [
        ("a.test.", "spec.allow[0]"),
        ("b.test.", "spec.allow[1]"),
        ("c.test.", "spec.resolve[0]"),
    ]
    assert [(pattern.text, grant.ports) for pattern, grant in statement.connects] == [
        ("a.test.", {(TCP, 443)}), ("b.test.", None),
    ]  # fmt: skip


# --- what is opened


def opened(rule, rest="toFQDNs: [{matchName: a}]"):
    """The ports that one toFQDNs rule opens; `closed` if it opens none."""
    connects = one(cilium(f"egress: [{{{rest}, {rule}}}]")).connects
    return connects[0][1].ports if connects else "closed"


@pytest.mark.parametrize(
    ("rule", "ports"),
    [
        ("toPorts: null", None),
        ('toPorts: [{ports: [{port: "443", protocol: TCP}]}]', {(TCP, 443)}),
        ('toPorts: [{ports: [{port: "443"}]}]', {(TCP, 443), (UDP, 443), (SCTP, 443)}),
        (
            'toPorts: [{ports: [{port: "1", protocol: TCP}]}, {ports: [{port: "2", protocol: UDP}]}]',
            {(TCP, 1), (UDP, 2)},
        ),
        ('toPorts: [{ports: [{port: "1", endPort: 3, protocol: TCP}]}]', {(TCP, 1), (TCP, 2), (TCP, 3)}),
        ('toPorts: [{ports: [{port: "0"}]}]', None),
        ('toPorts: [{ports: [{port: "53", protocol: UDP}], rules: {dns: [{matchName: b}]}}]', {(UDP, 53)}),
        ('toPorts: [{ports: [{port: "1", protocol: TCP}, {port: http, protocol: TCP}]}]', {(TCP, 1)}),
        ('toPorts: [{ports: [{port: "0", protocol: TCP}]}]', "closed"),
        ('toPorts: [{ports: [{port: "1", endPort: 257, protocol: TCP}]}]', "closed"),
        (
            'toPorts: [{ports: [{port: "1", endPort: 256, protocol: TCP}]}]',
            {(TCP, port) for port in range(1, 257)},
        ),
        ("toPorts: []", "closed"),
        ("toPorts: [{ports: []}]", "closed"),
        ("toPorts: [{}]", "closed"),
        ("icmps: [{}]", "closed"),
        ('toPorts: [{ports: [{port: "8", protocol: ICMP}]}]', "closed"),
        ('toPorts: [{ports: [{port: "80", protocol: TCP}], rules: {http: [{}]}}]', "closed"),
        ('toPorts: [{ports: [{port: "443", protocol: TCP}], serverNames: [a]}]', "closed"),
        ("authentication: {mode: required}", "closed"),
        ("authentication: {mode: disabled}", None),
    ],
)
def test_what_the_addresses_of_names_open(rule, ports):
    assert opened(rule) == ports


def test_no_name_no_grant():
    assert opened('toPorts: [{ports: [{port: "443"}]}]', "toFQDNs: []") == "closed"


def test_sets_and_cidrs_of_our_own_entries():
    ((_, grant),) = one(native("allow: [{name: a, set: [x, y], cidrs: [10.0.0.0/8], cnames: true}]")).connects
    assert (grant.sets, grant.cidrs, grant.rule.cnames) == (("x", "y"), (TEN,), True)


def test_an_empty_list_of_ports_may_be_asked_but_opens_nothing():
    statement = one(native("allow: [{name: a, ports: []}]"))
    assert statement.connects == []
    assert len(statement.askings[0].names) == 1


def test_the_annotation_makes_cname_targets_count():
    asks = '{toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchName: a}]}}]}'
    rule = f"egress: [{{toFQDNs: [{{matchName: a}}]}}, {asks}]"
    statement = one(cilium(rule, metadata='{name: x, annotations: {dnsproxy/cname-targets: "true"}}'))
    assert statement.connects[0][1].rule.cnames
    assert statement.askings[0].names[0][1].cnames


# --- what is denied


@pytest.mark.parametrize(
    ("rule", "ports", "sure"),
    [
        ('{toPorts: [{ports: [{port: "53", protocol: UDP}]}]}', [PortRange(UDP, 53, 53)], True),
        ("{toEntities: [all]}", list(EVERY_PORT), True),
        ("{toEntities: [all], toPorts: []}", list(EVERY_PORT), True),
        ("{toCIDR: [10.0.0.0/8]}", list(EVERY_PORT), False),
        ("{toCIDR: [0.0.0.0/0]}", list(EVERY_PORT), True),
        ("{toEndpoints: []}", list(EVERY_PORT), False),
    ],
)
def test_denials(rule, ports, sure):
    (denial,) = one(cilium(f"egressDeny: [{rule}]")).denials
    assert (list(denial.ports), denial.sure) == (ports, sure)


@pytest.mark.parametrize("rule", ["{}", "{icmps: [{}]}"])
def test_what_denies_nothing(rule):
    assert one(cilium(f"egressDeny: [{rule}]")).denials == []


# --- which rules are statements


@pytest.mark.parametrize(
    ("rule", "default_deny"),
    [
        ("egress: [{}]", True),
        ("egressDeny: [{}]", True),
        ("ingress: [{}], egress: []", True),
        ("ingress: [{}]", None),
        ("egress: [{}], enableDefaultDeny: {egress: false}", False),
        ("egress: [{}], enableDefaultDeny: {}", True),
        ("egress: [{}], enableDefaultDeny: {ingress: false}", True),
        ("ingress: [{}], enableDefaultDeny: {egress: true}", True),
        ("ingress: [{}], enableDefaultDeny: {egress: false}", None),
    ],
)
def test_default_deny(rule, default_deny):
    stated, _ = made(cilium(rule))
    assert [statement.default_deny for statement in stated] == (
        [] if default_deny is None else [default_deny]
    )


def test_every_rule_of_specs_is_a_statement():
    text = cilium("egress: [{}]") + "specs:\n- {endpointSelector: {}, egress: [{}]}\n"
    assert [statement.place.path for statement in made(text)[0]] == ["spec", "specs[0]"]


# --- labels


def endpoint(labels, namespace="default"):
    return Endpoint(namespace, "e", labels, ())


def requirement(key, operator, *values):
    return Requirement(key=key, operator=operator, values=list(values) or None)


@pytest.mark.parametrize(
    ("key", "matches"),
    [
        ("app", True),
        ("k8s:app", True),
        ("any:app", True),
        ("container:app", False),
        ("reserved:app", False),
        ("tier", True),
        ("container:tier", True),
        ("any:tier", True),
        ("k8s:tier", False),
        ("k8s:a.b/c", True),
        ("nothing", False),
        ("io.kubernetes.pod.namespace", True),
        ("k8s:io.kubernetes.pod.namespace", True),
    ],
)
def test_keys_with_and_without_a_source(key, matches):
    labels = labels_of(endpoint({"app": "ci", "container:tier": "x", "k8s:a.b/c": "d"}))
    assert holds(requirement(key, "Exists"), labels) is matches
    assert holds(requirement(key, "DoesNotExist"), labels) is not matches


@pytest.mark.parametrize(
    ("found", "result"),
    [
        (requirement("app", "In", "a", "ci"), True), (requirement("app", "In", "a"), False),
        (requirement("app", "NotIn", "a"), True), (requirement("app", "NotIn", "a", "ci"), False),
        (requirement("gone", "NotIn", "a"), True), (requirement("gone", "In", "a"), False),
        (requirement("io.kubernetes.pod.namespace", "In", "prod"), True),
        (requirement("io.kubernetes.pod.namespace", "In", "fake"), False),
    ],
)  # fmt: skip
def test_operators(found, result):
    labels = labels_of(endpoint({"app": "ci", "k8s:io.kubernetes.pod.namespace": "fake"}, "prod"))
    assert holds(found, labels) is result


def test_a_key_of_two_sources_has_both_values():
    labels = labels_of(endpoint({"k8s:app": "a", "container:app": "b"}))
    assert holds(requirement("app", "In", "a"), labels)
    assert holds(requirement("app", "In", "b"), labels)
    assert not holds(requirement("k8s:app", "In", "b"), labels)


# --- which endpoints are selected


def selects(text, who):
    return one(text).selects(who, labels_of(who), HOST)


CLUSTERWIDE = "CiliumClusterwideNetworkPolicy"


def test_a_namespaced_policy_is_about_its_namespace():
    text = cilium("egress: [{}]", metadata="{name: x, namespace: prod}")
    assert selects(text, endpoint({}, "prod"))
    assert not selects(text, endpoint({}, "default"))
    assert selects(native("allow: []"), endpoint({}, "default"))
    assert not selects(native("allow: []"), endpoint({}, "prod"))


def test_a_namespace_among_the_labels_of_a_namespaced_policy_is_overridden_with_a_note():
    text = cilium(
        "egress: [{}]",
        subject="endpointSelector: {matchLabels: {k8s:io.kubernetes.pod.namespace: prod, app: a}}",
    )
    assert selects(text, endpoint({"app": "a"}, "default"))
    assert not selects(text, endpoint({"app": "a"}, "prod"))
    (note,) = made(text)[1]
    assert "ignored: this policy is about its own namespace, default" in note
    assert made(text.replace("prod", "default"))[1] == []


def test_a_clusterwide_policy_is_about_every_namespace_or_the_one_of_its_labels():
    everywhere = cilium("egress: [{}]", CLUSTERWIDE)
    assert selects(everywhere, endpoint({}, "a"))
    one_ = cilium(
        "egress: [{}]",
        CLUSTERWIDE,
        "endpointSelector: {matchLabels: {k8s:io.kubernetes.pod.namespace: prod}}",
    )
    assert selects(one_, endpoint({}, "prod"))
    assert not selects(one_, endpoint({}, "a"))


def test_all_requirements_must_hold():
    text = native(
        "allow: []", "{matchLabels: {a: '1', b: '2'}, matchExpressions: [{key: c, operator: Exists}]}"
    )
    assert selects(text, endpoint({"a": "1", "b": "2", "c": ""}))
    assert not selects(text, endpoint({"a": "1", "b": "2"}))
    assert not selects(text, endpoint({"a": "1", "b": "3", "c": ""}))


def test_the_host_is_selected_by_its_label_or_once_it_is_declared():
    assert not selects(native("allow: []"), HOST)
    assert not selects(cilium("egress: [{}]", CLUSTERWIDE), HOST)
    assert not selects(native("allow: []", "{matchExpressions: [{key: app, operator: DoesNotExist}]}"), HOST)
    assert selects(native("allow: []", "{matchLabels: {reserved:host: ''}}"), HOST)
    assert selects(native("allow: []", "{matchExpressions: [{key: reserved:host, operator: Exists}]}"), HOST)
    assert not selects(
        native("allow: []", "{matchExpressions: [{key: reserved:host, operator: DoesNotExist}]}"), HOST
    )
    declared = Endpoint("default", "host", {HOST_LABEL: "", "app": "x"}, ())
    assert one(native("allow: []")).selects(declared, labels_of(declared), declared)


def test_a_node_selector_is_about_the_host_only():
    text = cilium("egress: [{}]", CLUSTERWIDE, "nodeSelector: {}")
    assert selects(text, HOST)
    assert not selects(text, endpoint({}))
    assert not selects(cilium("egress: [{}]", CLUSTERWIDE, "nodeSelector: {matchLabels: {a: b}}"), HOST)


@pytest.mark.parametrize(
    ("selector", "label"),
    [
        ("{}", None),
        ("{matchLabels: {a: b}}", ("a", "b")),
        (
            "{matchExpressions: [{key: a, operator: In, values: [b, c]}]}",
            None,
        ),
        ("{matchExpressions: [{key: a, operator: NotIn, values: [b]}]}", None),
    ],
)
def test_a_label_that_every_selected_endpoint_has(selector, label):
    assert one(native("allow: []", selector)).one_label() == label


# --- notes

NAMED = "egress: [{toFQDNs: [{matchName: a}], "
DNS_53 = 'ports: [{port: "53", protocol: ANY}]'


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("ingress: [{}], egress: [{}]", ["spec.ingress: not enforced here: only egress is"]),
        *(
            (
                f"egress: [{{}}], enableDefaultDeny: {{ingress: {switch}}}",
                ["spec.enableDefaultDeny.ingress: not enforced here: only egress is"],
            )
            for switch in ("true", "false")
        ),
        ("egress: [{}], enableDefaultDeny: {egress: true}", []),
        (
            "ingressDeny: [{}], log: {value: x}, egress: [{}]",
            ["spec.ingressDeny: not enforced", "spec.log: not enforced"],
        ),
        (
            "egress: [{toCIDR: [10.0.0.0/8]}]",
            ["spec.egress[0].toCIDR: not enforced here: connections open to names only"],
        ),
        ("egress: [{toEntities: [world]}]", ["spec.egress[0].toEntities: not enforced here: connections"]),
        (
            'egress: [{toPorts: [{ports: [{port: "443"}]}]}]',
            ["spec.egress[0].toPorts: not enforced here: connections"],
        ),
        ("egress: [{icmps: [{}]}]", ["spec.egress[0].icmps: not enforced here: ICMP"]),
        ("egress: [{toFQDNs: [{matchName: a}], icmps: [{}]}]", ["spec.egress[0].icmps: not enforced here"]),
        (
            f"egress: [{{toEndpoints: [{{}}], toPorts: [{{{DNS_53}, rules: {{dns: [{{matchName: a}}]}}}}]}}]",
            ["spec.egress[0].toEndpoints: not enforced here: it selects the DNS server; that is ours"],
        ),
        (
            f"egress: [{{toEndpoints: [{{}}], toPorts: [{{{DNS_53}}}]}}]",
            ["spec.egress[0].toEndpoints: not enforced here: it selects the DNS server"],
        ),
        (
            f"egress: [{{toEndpoints: [{{}}], toPorts: [{{{DNS_53}}}, {{ports: [{{port: '1'}}]}}]}}]",
            [
                "spec.egress[0].toEndpoints: not enforced here: it selects the DNS",
                "spec.egress[0].toEndpoints: not enforced here: conn",
            ],
        ),
        (f"egress: [{{toEntities: [all], toPorts: [{{{DNS_53}}}]}}]", []),
        (f"egress: [{{toPorts: [{{{DNS_53}, rules: {{dns: [{{matchName: a}}]}}}}]}}]", []),
        ("egress: [{toFQDNs: [{matchName: a}]}]", []),
        ("egress: [{}]", []),
        (
            "egress: [{toFQDNs: [{matchName: a}], toPorts: [{ports: [{port: http}]}]}]",
            ["spec.egress[0].toPorts[0].ports[0].port: not enforced here: a named port"],
        ),
        (
            "egress: [{toPorts: [{ports: [{port: dns}], rules: {dns: [{matchName: a}]}}]}]",
            ["spec.egress[0].toPorts[0].ports[0].port: not enforced here: a named port"],
        ),
        (
            'egress: [{toFQDNs: [{matchName: a}], toPorts: [{ports: [{port: "0", protocol: TCP}]}]}]',
            ["spec.egress[0].toPorts[0].ports[0]: not enforced here: more than 256 ports"],
        ),
        (
            'egress: [{toFQDNs: [{matchName: a}], toPorts: [{ports: [{port: "1", endPort: 300}]}]}]',
            ["spec.egress[0].toPorts[0].ports[0]: not enforced here: more than 256 ports"],
        ),
        ('egress: [{toFQDNs: [{matchName: a}], toPorts: [{ports: [{port: "0"}]}]}]', []),
        (
            'egress: [{toFQDNs: [{matchName: a}], toPorts: [{ports: [{port: "8", protocol: ICMP}]}]}]',
            ["spec.egress[0].toPorts[0].ports[0].protocol: not enforced here: this protocol has no ports"],
        ),
        (
            NAMED + 'toPorts: [{ports: [{port: "1", protocol: TCP}], rules: {http: [{}]}}]}]',
            ["spec.egress[0].toPorts[0].rules.http: not enforced here: it cannot be checked, so these"],
        ),
        (
            NAMED + 'toPorts: [{ports: [{port: "1"}], serverNames: [a], listener: {a: b}}]}]',
            [
                "spec.egress[0].toPorts[0].serverNames: not enforced",
                "spec.egress[0].toPorts[0].listener: not enforced",
            ],
        ),
        (
            "egress: [{toFQDNs: [{matchName: a}], authentication: {mode: required}}]",
            ["spec.egress[0].authentication: not enforced here: it cannot be checked"],
        ),
        (
            "egress: [{toFQDNs: [], toPorts: []}]",
            [
                "spec.egress[0].toFQDNs: an empty list: it selects nothing",
                "spec.egress[0].toPorts: an empty list",
            ],
        ),
        ("egressDeny: [{}]", ["spec.egressDeny[0]: neither peers nor ports: it denies nothing"]),
        ("egressDeny: [{icmps: [{}]}]", ["spec.egressDeny[0].icmps: not enforced here: ICMP"]),
        (
            "egressDeny: [{toCIDR: [10.0.0.0/8]}]",
            ["spec.egressDeny[0].toCIDR: not enforced here: deny these peers in the firewall"],
        ),
        (
            'egressDeny: [{toPorts: [{ports: [{port: "22"}]}]}]',
            ["spec.egressDeny[0]: not enforced here: against rules that open"],
        ),
        (
            "egressDeny: [{toPorts: [{ports: [{port: ssh}]}]}]",
            [
                "spec.egressDeny[0].toPorts[0].ports[0].port: not enforced here: a named",
                "spec.egressDeny[0]: not enforced here: against",
            ],
        ),
        ("egressDeny: [{toEntities: [all]}]", []),
    ],
)
def test_what_is_not_enforced_is_noted(rule, expected):
    found = notes(rule)
    assert [note[: len(start)] for note, start in zip(found, expected, strict=True)] == expected


def test_notes_know_their_place():
    (note,) = made(cilium("egress: [{}], ingress: [{}]"))[1]
    assert note.startswith("4:53: spec.ingress: not enforced here")
