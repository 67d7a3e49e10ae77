from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dnsproxy import addresses
from dnsproxy.addresses import NON_PUBLIC, from_text, inside, is_public, judged, to_text, unmapped

pytestmark = pytest.mark.timeout(3600)  # the deep profile takes minutes

packed = st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16)

# Where we and Python's `is_global` differ on purpose. Python asks whether the registry says "globally
# reachable"; we ask whether a public service can have that address. Newer Pythons know more of these.
DELIBERATE = tuple(
    ip_network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments; Python lets anycast addresses in it pass
        "192.88.99.0/24",  # 6to4 relays, withdrawn
        "224.0.0.0/4",  # multicast is no service's address
        "ff00::/8",
        "::/96",  # IPv4-compatible, withdrawn: they would embed any IPv4 address
        "2001::/23",  # Teredo and other protocols; Python lets parts of it pass
        "2002::/16",  # 6to4: embeds any IPv4 address
        "fec0::/10",  # site-local, withdrawn and still routed inside sites
        "64:ff9b::/96",  # NAT64: judged by the address it embeds
        "64:ff9b:1::/48",  # NAT64 of a site
        "100:0:0:1::/64",  # the dummy prefix, RFC 9780
        "3fff::/20",  # documentation, RFC 9637
        "5f00::/16",  # segment routing, RFC 9602
        "::ffff:0:0/96",  # mapped: judged by the address it embeds
    )
)


def public(text):
    return is_public(from_text(text))


@pytest.mark.parametrize(
    "text",
    ["1.1.1.1", "93.184.216.34", "100.63.255.255", "172.32.0.0", "192.0.1.0", "198.17.255.255", "198.20.0.0",
     "223.255.255.255", "2606:4700::1111", "2001:200::", "2a00::1", "64:ff9b::1.1.1.1", "::ffff:1.1.1.1"],
)  # fmt: skip
def test_public_addresses(text):
    assert public(text)


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0", "10.0.0.0", "10.255.255.255", "100.64.0.0", "127.0.0.1", "169.254.169.254", "172.31.255.255",
     "192.168.1.1", "198.19.255.255", "224.0.0.251", "255.255.255.255", "::", "::1", "::10.0.0.1", "fe80::1",
     "fd00::1", "fec0::1", "ff02::fb", "2001:db8::1", "2002:a00:1::", "3fff::1", "100::1", "100:0:0:1::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(text):
    assert not public(text)


@pytest.mark.parametrize("inner", ["10.0.0.1", "127.0.0.1", "169.254.169.254", "192.168.0.1"])
@pytest.mark.parametrize("outer", ["::ffff:{}", "64:ff9b::{}"])
def test_an_address_that_embeds_a_private_one_is_judged_by_it(outer, inner):
    assert not is_public(ip_address(outer.format(inner)).packed)


def test_a_prefix_is_left_only_at_its_last_address():
    for network in NON_PUBLIC:
        assert not is_public(network.network_address.packed)
        assert not is_public(network.broadcast_address.packed)


@given(packed)
@example(bytes(4))
@example(b"\xff" * 4)
@example(bytes(16))
@example(b"\xff" * 16)
def test_public_means_inside_no_network_of_the_list(address):
    assert is_public(address) == (not inside(judged(address), NON_PUBLIC))


@given(st.sampled_from(NON_PUBLIC), st.sampled_from([-1, 0, 1]), st.booleans())
def test_public_means_inside_no_network_of_the_list_at_its_edges(network, step, last):
    edge = network.broadcast_address if last else network.network_address
    size = len(edge.packed)
    address = ((int(edge) + step) % (1 << 8 * size)).to_bytes(size, "big")
    assert is_public(address) == (not inside(judged(address), NON_PUBLIC))


@given(packed)
@example(from_text("192.0.0.9"))
@example(from_text("100.64.0.1"))
def test_public_agrees_with_python_outside_the_deliberate_differences(address):
    if not inside(address, DELIBERATE):
        assert is_public(address) == ip_address(address).is_global


@pytest.mark.parametrize("network", DELIBERATE, ids=str)
def test_the_deliberate_differences_are_never_wider_than_python(network):
    """In each of them we refuse, or judge by the embedded address."""
    address = network.network_address.packed
    assert not is_public(address) or judged(address) != address


@given(st.binary(min_size=4, max_size=4))
def test_a_mapped_address_is_the_address_itself(address):
    mapped = bytes(10) + b"\xff\xff" + address
    assert unmapped(mapped) == judged(mapped) == address
    assert from_text(str(IPv6Address(mapped))) == address


@given(packed)
def test_an_address_that_is_not_mapped_stays(address):
    if len(address) == 4 or IPv6Address(address).ipv4_mapped is None:
        assert unmapped(address) == address


@given(packed)
def test_text_and_back(address):
    assert ip_address(to_text(address)).packed == address
    assert from_text(to_text(address)) == unmapped(address)


def test_a_zone_is_no_part_of_an_address():
    assert from_text("fe80::1%eth0") == from_text("fe80::1")


@pytest.mark.parametrize("text", ["", "1.2.3", "1.2.3.4.5", "010.0.0.1", "example.com", ":::", "1.2.3.4/32"])
def test_what_is_no_address_is_a_value_error(text):
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 address"):
        from_text(text)


def test_an_address_with_a_port_is_written_as_people_write_it():
    assert addresses.with_port("192.0.2.1", 53) == "192.0.2.1:53"
    assert addresses.with_port("2001:db8::1", 53) == "[2001:db8::1]:53"


@given(packed, st.lists(st.sampled_from(NON_PUBLIC), max_size=4))
def test_inside_is_membership_of_one_network(address, networks):
    parsed = IPv4Address(address) if len(address) == 4 else IPv6Address(address)
    assert inside(address, tuple(networks)) == any(parsed in network for network in networks)


def test_families_do_not_mix():
    assert not inside(from_text("10.0.0.1"), (ip_network("::/0"),))
    assert not inside(from_text("2001:db8::1"), (ip_network("0.0.0.0/0"),))
    assert addresses.inside(from_text("10.0.0.1"), (ip_network("::/0"), ip_network("0.0.0.0/0")))
