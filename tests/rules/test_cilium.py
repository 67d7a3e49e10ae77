from __future__ import annotations

import pytest

from dnsproxy.errors import DocumentError
from dnsproxy.rules.cilium import MAX_PORTS
from dnsproxy.rules.documents import read
from dnsproxy.yamldoc import parse

DNS = '{ports: [{port: "53", protocol: ANY}], rules: {dns: [{matchPattern: "*"}]}}'
HEAD = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: x}\n"
HTTP = '{ports: [{port: "80", protocol: TCP}], rules: {http: [{method: GET}]}}'


def cilium(rule, kind="CiliumNetworkPolicy", subject="endpointSelector: {}", metadata="{name: x}"):
    """A document whose one rule is in flow style, so that every place is in line 4."""
    head = f"apiVersion: cilium.io/v2\nkind: {kind}\nmetadata: {metadata}\n"
    return head + f"spec: {{{subject}, {rule}}}\n"


def node(rule):
    return cilium(rule, "CiliumClusterwideNetworkPolicy", "nodeSelector: {}")


def egress(*rules):
    return cilium(f"egress: [{', '.join(rules)}]")


def fqdn(entry):
    return egress(f"{{toFQDNs: [{entry}]}}")


def ports(*entries, rest="toFQDNs: [{matchName: a.test}]"):
    return egress(f"{{{rest}, toPorts: [{{ports: [{', '.join(entries)}]}}]}}")


def model(text):
    """The one checked model of a text."""
    (document,) = parse(text, "f")
    return read(document)[0][0].model


def problem(text):
    """The one problem of a text."""
    with pytest.raises(DocumentError) as refused:
        model(text)
    (found,) = refused.value.problems
    return str(found)


# --- names (scenarios 6 and 7)


@pytest.mark.parametrize(
    "entry",
    ["matchName: cilium.io", "matchName: cilium.io.", "matchName: get-cilium.io", "matchName: a.b.cilium.io",
     "matchName: _tcp.cilium.io", 'matchPattern: "*.cilium.io"', 'matchPattern: "*"', 'matchPattern: "**.x"',
     "matchName: " + "a" * 255],
)  # fmt: skip
def test_names_that_are_accepted(entry):
    assert model(fqdn(f"{{{entry}}}")).spec.egress[0].to_fqdns


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{matchName: a, matchPattern: b}", "toFQDNs[0]: expected either matchName or matchPattern"),
        ("{}", "toFQDNs[0]: expected either matchName or matchPattern"),
        ('{matchName: ""}', "toFQDNs[0].matchName: a name is missing here"),
        ('{matchPattern: ""}', "toFQDNs[0].matchPattern: a name is missing here"),
        ('{matchName: "*.a"}', "toFQDNs[0].matchName: '*.a' has a '*'"),
        ('{matchName: "."}', "toFQDNs[0].matchName: the root name '.' alone is refused by Cilium's schema"),
        ("{matchPattern: a..b}", "toFQDNs[0].matchPattern: 'a..b' has an empty label"),
        ("{matchPattern: .a}", "toFQDNs[0].matchPattern: '.a' has an empty label"),
        ("{matchPattern: 'a b'}", "toFQDNs[0].matchPattern: 'a b' has ' '"),
        ("{matchPattern: '[a-z].x'}", "this is no regular expression"),
        ("{matchName: " + "a" * 256 + "}", "has 256 characters; a name has at most 255"),
        ("{matchname: a}", "toFQDNs[0].matchname: unknown key 'matchname': did you mean 'matchName'?"),
        ("cilium.io", "toFQDNs[0]: expected a mapping, found text"),
    ],
)
def test_names_that_are_refused(entry, expected):
    assert expected in str(problem_of_first(fqdn(entry)))
    as_rule = egress(f'{{toPorts: [{{ports: [{{port: "53"}}], rules: {{dns: [{entry}]}}}}]}}')
    assert expected.replace("toFQDNs", "dns") in str(problem_of_first(as_rule))


def problem_of_first(text):
    with pytest.raises(DocumentError) as refused:
        model(text)
    return refused.value.problems[0]


# --- ports


@pytest.mark.parametrize(
    ("entry", "ranges"),
    [
        ('{port: "443", protocol: TCP}', {(6, 443, 443)}),
        ('{port: "443", protocol: tcp}', {(6, 443, 443)}),
        ('{port: "443"}', {(6, 443, 443), (17, 443, 443), (132, 443, 443)}),
        ('{port: "443", protocol: ANY}', {(6, 443, 443), (17, 443, 443), (132, 443, 443)}),
        ('{port: "443", protocol: ""}', {(6, 443, 443), (17, 443, 443), (132, 443, 443)}),
        ('{port: "443", endPort: 445, protocol: UDP}', {(17, 443, 445)}),
        ('{port: "443", endPort: 443, protocol: UDP}', {(17, 443, 443)}),
        ('{port: "443", endPort: 80, protocol: UDP}', {(17, 443, 443)}),
        ('{port: "0", protocol: UDP}', {(17, 0, 65535)}),
        ('{port: "65535", protocol: UDP}', {(17, 65535, 65535)}),
        ('{port: "https", protocol: TCP}', set()),
        ('{port: "http-8080", endPort: 9, protocol: TCP}', set()),
        ('{port: "8", protocol: ICMP}', set()),
    ],
)
def test_ports(entry, ranges):
    (rule,) = model(ports(entry)).spec.egress
    assert set(rule.to_ports[0].ranges()) == ranges


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{port: 443}", "ports[0].port: expected text, found a number: write it in quotes"),
        ('{port: "0443"}', "ports[0].port: the port '0443' starts with a zero, which Cilium reads as octal"),
        ('{port: "65536"}', "ports[0].port: the port '65536' is larger than 65535"),
        ('{port: "999999999999"}', "ports[0].port: the port '999999999999' is larger than 65535"),
        ('{port: "-1"}', "ports[0].port: '-1' is neither a port number nor a service name"),
        ('{port: "a--b"}', "is neither a port number nor a service name"),
        ('{port: "a-"}', "is neither a port number nor a service name"),
        ('{port: "a_b"}', "is neither a port number nor a service name"),
        ('{port: "abcdefghijklmnop"}', "is neither a port number nor a service name"),
        ('{port: ""}', "is neither a port number nor a service name"),
        ('{port: "٤"}', "is neither a port number nor a service name"),
        ('{port: "1", protocol: QUIC}', "ports[0].protocol: unknown protocol 'QUIC'"),
        ('{port: "1", endPort: 65536}', "ports[0].endPort: expected 65535 or less"),
        ('{protocol: TCP}', "ports[0].port: required, but missing"),
    ],
)  # fmt: skip
def test_ports_that_are_refused(entry, expected):
    assert expected in problem(ports(entry))


def test_at_most_40_ports():
    entries = [f'{{port: "{number + 1}"}}' for number in range(MAX_PORTS + 1)]
    assert len(model(ports(*entries[:MAX_PORTS])).spec.egress[0].to_ports[0].ports) == MAX_PORTS
    assert "toPorts[0].ports: " in problem(ports(*entries))


# --- peers


@pytest.mark.parametrize(
    "members",
    [
        "toEndpoints: [{}]",
        "toCIDR: [10.0.0.0/8, 192.0.2.1]",
        "toEntities: [world, kube-apiserver]",
        "toNodes: [{}]",
        "toServices: [{k8sService: {serviceName: x}}]",
        "toGroups: [{aws: {}}]",
        "icmps: [{fields: [{type: 8}]}]",
        "toCIDRSet: [{cidr: 10.0.0.0/8, except: [10.1.0.0/16]}, {cidrGroupRef: x}, {cidrGroupSelector: {}}]",
        "toFQDNs: [{matchName: a}]",
        "toFQDNs: [{matchName: a}], icmps: []",
        "toEndpoints: [], toCIDR: [10.0.0.0/8]",
        "toEndpoints: null, toPorts: null",
        "authentication: {mode: required}",
    ],
)
def test_peers_that_are_accepted(members):
    assert model(egress(f"{{{members}}}"))


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ("toFQDNs: [{matchName: a}], toCIDR: [10.0.0.0/8]", "toCIDR and toFQDNs in one rule"),
        ("toEndpoints: [{}], toEntities: [world]", "toEndpoints and toEntities in one rule"),
        ("toCIDR: [10.0.0.0/8], toCIDRSet: [{cidr: 10.0.0.0/8}]", "toCIDR and toCIDRSet in one rule"),
        ("icmps: [{}], toPorts: [{ports: [{port: '1'}]}]", "egress[0].icmps: icmps and toPorts in one rule"),
        ("toCIDR: [10.0.0.0/33]", "toCIDR[0]: '10.0.0.0/33' is not an address or prefix"),
        ("toCIDRSet: [{except: []}]", "toCIDRSet[0]: expected exactly one of cidr, cidrGroupRef and"),
        ("toCIDRSet: [{cidr: 10.0.0.0/8, cidrGroupRef: x}]", "toCIDRSet[0]: expected exactly one of cidr"),
        (
            "toCIDRSet: [{cidr: 10.0.0.0/8, except: [11.0.0.0/16]}]",
            "except[0]: 11.0.0.0/16 is not inside 10.0.0.0/8",
        ),
        (
            "toCIDRSet: [{cidr: 10.0.0.0/8, except: ['fd00::/8']}]",
            "except[0]: fd00::/8 is not inside 10.0.0.0/8",
        ),
        ("toEntities: [everyone]", "toEntities[0]: expected 'all'"),
        ("toEndpoints: [{matchLabels: {a: 1}}]", "matchLabels.a: expected text, found a number"),
        ("toFQDN: [{matchName: a}]", "egress[0].toFQDN: unknown key 'toFQDN': did you mean 'toFQDNs'?"),
    ],
)
def test_peers_that_are_refused(members, expected):
    assert expected in problem(egress(f"{{{members}}}"))


# --- rules for requests (scenarios 8 to 14)


def test_dns_rules_need_ports():
    text = egress("{toPorts: [{rules: {dns: [{matchName: a}]}}]}")
    assert "toPorts[0]: DNS rules need ports" in problem(text)
    assert "DNS rules need ports" in problem(
        egress("{toPorts: [{ports: [], rules: {dns: [{matchName: a}]}}]}")
    )


def test_dns_rules_stand_under_egress_only():
    assert "ingress[0].toPorts[0].rules.dns: DNS rules stand under egress only" in problem(
        cilium(f"ingress: [{{toPorts: [{DNS}]}}]")
    )


@pytest.mark.parametrize("protocol", ["UDP", "ANY", "SCTP"])
def test_http_rules_need_tcp_and_dns_rules_do_not(protocol):
    assert "http rules need protocol TCP; only DNS rules do not" in problem(
        egress(f"{{toPorts: [{HTTP.replace('TCP', protocol)}]}}")
    )
    assert model(egress(f"{{toPorts: [{DNS.replace('ANY', protocol)}]}}"))
    assert model(egress(f"{{toPorts: [{HTTP}]}}"))


def test_dns_rules_take_no_range():
    text = '{toPorts: [{ports: [{port: "443", endPort: 445}], rules: {dns: [{matchName: a}]}}]}'
    assert "ports[0].endPort: DNS rules take single ports, no range" in problem(egress(text))
    named = '{toPorts: [{ports: [{port: "dns", endPort: 445}], rules: {dns: [{matchName: a}]}}]}'
    assert model(egress(named))


@pytest.mark.parametrize("rules", ["dns: [{matchName: a}]", "http: [{}]"])
def test_rules_for_requests_do_not_take_port_0(rules):
    text = f'{{toPorts: [{{ports: [{{port: "0", protocol: TCP}}], rules: {{{rules}}}}}]}}'
    assert "ports[0]: port 0 means every port" in problem(egress(text))


@pytest.mark.parametrize(
    "rules",
    ["dns: [{matchName: a}], http: [{}]", "http: [{}], kafka: [{}]", "kafka: [{}], l7proto: x, l7: [{}]"],
)
def test_one_kind_of_rules(rules):
    text = f'{{toPorts: [{{ports: [{{port: "53", protocol: TCP}}], rules: {{{rules}}}}}]}}'
    assert "rules: " in problem(egress(text))
    assert "a toPorts entry holds rules of one kind" in problem(egress(text))


@pytest.mark.parametrize(
    "rules", ["{}", "{dns: []}", "{dns: [], http: [{}]}", "{l7proto: x, l7: [{a: b}]}", "{kafka: [{}]}"]
)
def test_other_rules_are_accepted(rules):
    text = f'{{toPorts: [{{ports: [{{port: "53", protocol: TCP}}], rules: {rules}}}]}}'
    assert model(egress(text))


def test_a_policy_for_nodes_takes_dns_rules_on_egress_only():
    assert model(node(f"egress: [{{toPorts: [{DNS}]}}]"))
    assert "egress[0].toPorts[0].rules: a policy for nodes takes DNS rules only" in problem(
        node(f"egress: [{{toPorts: [{HTTP}]}}]")
    )
    assert "ingress[0].toPorts[0].rules: a policy for nodes takes no rules for requests" in problem(
        node(f"ingress: [{{toPorts: [{HTTP}]}}]")
    )
    assert model(cilium(f"egress: [{{toPorts: [{HTTP}]}}], ingress: [{{toPorts: [{HTTP}]}}]"))


# --- deny rules


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("{toFQDNs: [{matchName: a}]}", "egressDeny[0].toFQDNs: there is no denying by name"),
        (f"{{toPorts: [{DNS}]}}", "egressDeny[0].toPorts[0].rules: a deny rule takes ports only"),
        ("{toCIDR: [10.0.0.0/8], toEntities: [all]}", "toCIDR and toEntities in one rule"),
        ("{icmps: [{}], toPorts: [{ports: [{port: '1'}]}]}", "icmps and toPorts in one rule"),
    ],
)
def test_deny_rules_that_are_refused(rule, expected):
    assert expected in problem(cilium(f"egressDeny: [{rule}]"))


def test_a_deny_rule():
    assert model(
        cilium('egressDeny: [{toCIDR: [10.0.0.0/8], toPorts: [{ports: [{port: "1", endPort: 9}]}]}]')
    )


# --- whole policies


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (cilium("ingress: []"), "spec: at least one of ingress, ingressDeny, egress and egressDeny"),
        (cilium("egress: [], egressDeny: []"), "to deny all egress, write egress: [{}]"),
        (
            cilium("egress: [{}]", subject="description: x"),
            "spec: expected exactly one of endpointSelector and",
        ),
        (
            cilium(
                "egress: [{}]", "CiliumClusterwideNetworkPolicy", "endpointSelector: {}, nodeSelector: {}"
            ),
            "spec: expected exactly one of endpointSelector and nodeSelector",
        ),
        (cilium("egress: [{}]", subject="nodeSelector: {}"), "spec.nodeSelector: nodeSelector stands in a"),
        (
            HEAD,
            "f:1:1: spec or specs is required",
        ),
        (
            HEAD + "specs: []\n",
            "spec or specs is required",
        ),
        (
            cilium("egress: [{}], enableDefaultDeny: {egress: nein}"),
            "enableDefaultDeny.egress: expected true or false",
        ),
        (cilium("egres: [{}]"), "spec.egres: unknown key 'egres': did you mean 'egress'?"),
    ],
)
def test_policies_that_are_refused(text, expected):
    assert expected in str(problem_of_first(text))


def test_parts_that_are_not_about_names_are_accepted():
    rule = """
      ingress: [{fromEndpoints: [{matchLabels: {a: b}}], toPorts: [{ports: [{port: "80", protocol: TCP}],
        rules: {http: [{path: /}]}, terminatingTLS: {}, originatingTLS: {}, serverNames: [a],
        listener: {}}]}],
      ingressDeny: [{fromCIDRSet: [{cidr: 10.0.0.0/8}], icmps: [{}]}], egress: [{}],
      egressDeny: [{toNodes: [{}]}],
      enableDefaultDeny: {ingress: false, egress: true}, labels: [{key: a}], description: x, log: {value: y}
    """
    assert model(
        cilium(rule, metadata="{name: x, uid: 5, annotations: {a: b}}") + "status: {conditions: []}\n"
    )


def test_specs():
    text = (
        cilium("egress: [{}]")
        + "specs:\n- {endpointSelector: {}, egress: [{}]}\n- {endpointSelector: {}, ingress: [{}]}\n"
    )
    assert [path for path, _ in model(text).rules()] == [("spec",), ("specs", 0), ("specs", 1)]


def test_the_scope_of_a_policy():
    assert not model(cilium("egress: [{}]")).cluster_wide
    assert model(node("egress: [{}]")).cluster_wide
