from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.addresses import from_text as address
from dnsproxy.endpoints import HOST_LABEL, Endpoint, EndpointTable, built_in_host, conflicts


def endpoint(name, *prefixes, **more):
    return Endpoint("default", name, {}, tuple(map(ip_network, prefixes)), **more)


def table(*endpoints, host_addresses=()):
    return EndpointTable(endpoints, built_in_host(), map(address, host_addresses))


def name_at(where, text):
    found = where.find(address(text))
    return found and found.name


def test_the_longest_prefix_wins():
    where = table(
        endpoint("wide", "10.0.0.0/8", "fd00::/8"),
        endpoint("narrow", "10.1.0.16/28"),
        endpoint("one", "10.1.0.17"),
    )
    assert name_at(where, "10.1.0.17") == "one"
    assert name_at(where, "10.1.0.18") == "narrow"
    assert name_at(where, "10.1.0.32") == "wide"
    assert name_at(where, "fd12::1") == "wide"


def test_a_stranger_is_nobody():
    where = table(endpoint("one", "10.0.0.1"))
    assert where.find(address("10.0.0.2")) is None
    assert where.find(address("::a00:1")) is None
    assert where.find(address("2001:db8::1")) is None


def test_one_endpoint_may_have_both_families():
    where = table(endpoint("both", "192.0.2.0/24", "2001:db8::/64"))
    assert name_at(where, "192.0.2.9") == name_at(where, "2001:db8::9") == "both"


def test_the_host_has_its_addresses_and_the_loopback_ranges():
    where = table(endpoint("pods", "10.0.0.0/8"), host_addresses=["10.0.0.1", "fe80::1"])
    assert [name_at(where, text) for text in ("10.0.0.1", "fe80::1", "127.0.0.1", "127.9.9.9", "::1")] == [
        "host"
    ] * 5
    assert name_at(where, "10.0.0.2") == "pods"


def test_an_endpoint_with_a_prefix_at_least_as_specific_takes_an_address_from_the_host():
    where = table(endpoint("one", "10.0.0.1"), endpoint("two", "127.0.0.2"), endpoint("net", "127.0.0.0/8"),
                  host_addresses=["10.0.0.1"])  # fmt: skip
    assert [name_at(where, text) for text in ("10.0.0.1", "127.0.0.2", "127.0.0.3")] == ["one", "two", "net"]


def test_other_addresses_of_the_host_leave_the_endpoints_as_they_are():
    first = table(endpoint("pods", "10.0.0.0/8"), host_addresses=["10.0.0.1"])
    second = first.with_host_addresses([address("10.0.0.7")])
    assert (name_at(second, "10.0.0.1"), name_at(second, "10.0.0.7")) == ("pods", "host")
    assert name_at(first, "10.0.0.7") == "pods"
    assert second.endpoints == first.endpoints
    assert second.host is first.host


def test_the_endpoints_include_the_host():
    where = table(endpoint("a", "10.0.0.1"))
    assert [each.key for each in where.endpoints] == ["default/host", "default/a"]
    assert where.host.labels == {HOST_LABEL: ""}
    assert not where.host.declared


def test_everything_may_belong_to_one_endpoint():
    where = table(endpoint("all", "0.0.0.0/0", "::/0"))
    assert name_at(where, "203.0.113.9") == name_at(where, "2001:db8::9") == "all"
    assert name_at(where, "127.0.0.1") == "host"


def test_two_endpoints_with_one_prefix_are_an_error_that_names_both():
    with pytest.raises(ValueError, match=r"default/a and default/b both claim the prefix 10\.0\.0\.0/24"):
        table(endpoint("a", "10.0.0.0/24"), endpoint("b", "10.0.0.0/24"))


def test_two_endpoints_with_one_name_are_an_error():
    with pytest.raises(ValueError, match="both claim the name default/a"):
        table(endpoint("a", "10.0.0.1"), endpoint("a", "10.0.0.2"))
    with pytest.raises(ValueError, match="both claim the name default/host"):
        table(endpoint("host", "10.0.0.1"))


def test_the_same_prefix_twice_in_one_endpoint_is_no_conflict():
    assert list(conflicts([endpoint("a", "10.0.0.1", "10.0.0.1/32")])) == []


_V4 = ["10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.128/25", "10.1.2.3/32", "0.0.0.0/0", "10.1.2.2/31"]
_PREFIXES = st.sampled_from([*_V4, "fd00::/8", "fd00::/64", "fd00::5/128"])


@given(
    st.sets(_PREFIXES, max_size=6),
    st.sampled_from(["10.1.2.3", "10.1.2.2", "10.1.2.200", "10.9.9.9", "192.0.2.1", "fd00::5", "fd00::6"]),
)
def test_finds_what_comparing_with_every_prefix_finds(prefixes, text):
    where = table(*(endpoint(f"e{number}", prefix) for number, prefix in enumerate(sorted(prefixes))))
    holding = [each for each in map(ip_network, prefixes) if ip_address(text) in each]
    expected = max(holding, key=lambda network: network.prefixlen, default=None)
    found = where.find(address(text))
    assert (found.prefixes[0] if found else None) == expected
