from __future__ import annotations

from ipaddress import ip_network

import pytest
from pydantic import TypeAdapter, ValidationError

from dnsproxy.rules.fields import (
    CNAME_ANNOTATION,
    LoosePrefix,
    Metadata,
    NativePorts,
    PortRange,
    Prefix,
    Requirement,
    Selector,
    SetNames,
)

TCP, UDP, SCTP = 6, 17, 132


def accept(kind, value):
    return TypeAdapter(kind).validate_python(value)


def refuse(kind, value):
    """The one complaint about a value."""
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(value)
    (fault,) = refused.value.errors()
    return str(fault["ctx"]["error"]) if "ctx" in fault and "error" in fault["ctx"] else fault["msg"]


# --- ports of the short form


@pytest.mark.parametrize(
    ("value", "ranges"),
    [
        (443, [(TCP, 443, 443), (UDP, 443, 443)]), ("443", [(TCP, 443, 443), (UDP, 443, 443)]),
        ("443/TCP", [(TCP, 443, 443)]), ("53/udp", [(UDP, 53, 53)]), ("9/Sctp", [(SCTP, 9, 9)]),
        ("53/any", [(TCP, 53, 53), (UDP, 53, 53), (SCTP, 53, 53)]), ("8000-8010/TCP", [(TCP, 8000, 8010)]),
        ("1-256/TCP", [(TCP, 1, 256)]), ("65535/TCP", [(TCP, 65535, 65535)]), ("7-7/TCP", [(TCP, 7, 7)]),
    ],
)  # fmt: skip
def test_native_ports(value, ranges):
    assert accept(NativePorts, value) == tuple(PortRange(*each) for each in ranges)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "not within 1 to 65535"),
        (65536, "not within 1 to 65535"),
        ("99999999", "larger than 65535"),
        (-1, "is not a port"),
        ("443-442/TCP", "in rising order"),
        ("1-257/TCP", "more than 256 ports"),
        ("0443", "octal"),
        ("8000-08010", "octal"),
        ("443/ICMP", "the protocol 'ICMP': expected TCP, UDP, SCTP or ANY"),
        ("https", "is not a port: expected 443, 443/TCP or 8000-8010/TCP"),
        ("443/", "is not a port"),
        ("443 ", "is not a port"),
        (4.5, "expected 443, 443/TCP or 8000-8010/TCP"),
        ([443], "expected 443, 443/TCP or 8000-8010/TCP"),
        (True, "expected 443, 443/TCP or 8000-8010/TCP"),
        ("٤٤٣", "is not a port"),
        ("", "is not a port"),
    ],
)
def test_native_ports_that_are_refused(value, message):
    assert message in refuse(NativePorts, value)


# --- addresses


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("192.0.2.1", "192.0.2.1/32"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("fd00::5", "fd00::5/128"),
        ("FD00::/8", "fd00::/8"),
        ("::ffff:192.0.2.1", "192.0.2.1/32"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::/0", "::/0"),
    ],
)
def test_prefixes(text, network):
    assert accept(Prefix, text) == accept(LoosePrefix, text) == ip_network(network)


def test_bits_behind_a_prefix_are_refused_where_they_are_ours_and_cut_where_cilium_cuts_them():
    assert "write 10.1.0.16/28" in refuse(Prefix, "10.1.0.17/28")
    assert "write fd00::/64" in refuse(Prefix, "fd00::5/64")
    assert accept(LoosePrefix, "10.1.0.17/28") == ip_network("10.1.0.16/28")


@pytest.mark.parametrize(
    "text", ["example.com", "10.0.0.0/33", "10.0.0", "fe80::1%eth0", "fe80::%eth0/64", ""]
)
def test_what_is_no_prefix(text):
    assert "is not an address or prefix" in refuse(Prefix, text)
    assert "is not an address or prefix" in refuse(LoosePrefix, text)


def test_a_number_where_text_is_expected():
    assert "write it in quotes" in refuse(Prefix, 5)
    assert refuse(Prefix, None) == "expected text"


# --- sets


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("github", ("github",)),
        ("a-b_c.9", ("a-b_c.9",)),
        (["x", "4#inet#fw4#github"], ("x", "4#inet#fw4#github")),
        ("6#ip6#fw#s", ("6#ip6#fw#s",)),
        ("4#ip#fw#s", ("4#ip#fw#s",)),
        ([], ()),
    ],
)
def test_sets(value, names):
    assert accept(SetNames, value) == names


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("9lives", "no set's name"),
        ("a b", "no set's name"),
        ("", "no set's name"),
        ("a" * 101, "no set's name"),
        ("ep.default.ci.addr4", "the proxy's own"),
        ("4#inet#dnsproxy#ep.default.ci.addr4", "start with ep. are the proxy's own"),
        ("6#ip6#mine#ep.x", "start with ep. are the proxy's own"),
        ("5#inet#a#b", "expected 4#inet#TABLE#SET"),
        ("4#inet#fw4", "expected 4#inet#TABLE#SET"),
        ("4#inet#a#b#c", "expected 4#inet"),
        ("4#bridge#a#b", "inet, ip or ip6"),
        ("4#ip6#a#b", "a table of family ip6 holds no IPv4"),
        ("6#ip#a#b", "a table of family ip holds no IPv6"),
        ("4#inet#a;flush ruleset#b", "expected 4#inet"),
        (5, "the name of a set or a list"),
        ([5], "write it in quotes"),
        (["ok", "no way"], "'no way' is no set's name"),
    ],
)
def test_sets_that_are_refused(value, message):
    assert message in refuse(SetNames, value)


# --- metadata


def metadata(**keys):
    return Metadata.model_validate({"name": "x", **keys})


def test_what_an_api_server_writes_is_taken_and_not_looked_at():
    found = metadata(
        uid="5",
        creationTimestamp="2026-11-30T00:00:00Z",
        managedFields=[{}],
        resourceVersion="9",
        generation=1,
        finalizers=[],
        ownerReferences=[{}],
        selfLink="/x",
        generateName="x-",
    )
    assert found.name == "x"


@pytest.mark.parametrize("name", ["X", "a_b", "-a", "a-", "a..b", "", "a/b", "a" * 254])
def test_names_that_are_refused(name):
    assert "is no object's name" in refuse(Metadata, {"name": name})


@pytest.mark.parametrize("namespace", ["a.b", "A", "", "a" * 64])
def test_namespaces_that_are_refused(namespace):
    assert "is no namespace" in refuse(Metadata, {"name": "x", "namespace": namespace})


def test_the_annotation_for_cname_targets():
    assert metadata(annotations={CNAME_ANNOTATION: "true", "other/one": "x"}).cname_targets
    assert not metadata(annotations={CNAME_ANNOTATION: "false"}).cname_targets
    assert not metadata().cname_targets
    assert 'expected "true" or "false"' in refuse(
        Metadata, {"name": "x", "annotations": {CNAME_ANNOTATION: "yes"}}
    )
    assert CNAME_ANNOTATION in refuse(
        Metadata, {"name": "x", "annotations": {"dnsproxy/cname-target": "true"}}
    )


# --- selectors


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ({"key": "a", "operator": "In"}, "In needs at least one value"),
        ({"key": "a", "operator": "NotIn", "values": []}, "NotIn needs at least one value"),
        ({"key": "a", "operator": "Exists", "values": ["x"]}, "Exists takes no values"),
        ({"key": "a", "operator": "DoesNotExist", "values": ["x"]}, "DoesNotExist takes no values"),
        (
            {"key": "a", "operator": "Equals", "values": ["x"]},
            "Input should be 'In', 'NotIn', 'Exists' or 'DoesNotExist'",
        ),
    ],
)
def test_requirements_that_are_refused(requirement, message):
    assert refuse(Requirement, requirement) == message


def test_a_selector_is_its_requirements():
    found = accept(
        Selector, {"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "b", "operator": "Exists"}]}
    )
    assert [(each.key, each.operator, each.values) for each in found.requirements()] == [
        ("a", "In", ["1"]),
        ("b", "Exists", None),
    ]
    assert accept(Selector, {}).requirements() == []
