"""The addresses of an interface: which one is taken, and the real kernel in a network namespace."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from netns import network_namespace

from dnsproxy.addresses import from_text
from dnsproxy.dyndns.sources import SourceError, interface
from dnsproxy.dyndns.sources.interface import DEPRECATED, FOREVER, TEMPORARY, Entry, choose


def entry(text, flags=0, bits=64, preferred=3600, created=0):
    return Entry(from_text(text), bits, flags, preferred, created)


STABLE = entry("2a01:238:1::1")


@pytest.mark.parametrize(
    "other",
    [
        entry("2a01:238:1::2", TEMPORARY, created=9),
        entry("2a01:238:1::2", DEPRECATED, created=9),
        entry("2a01:238:1::2", 0x40, created=9),  # tentative
        entry("2a01:238:1::2", 0x08, created=9),  # a duplicate
        entry("2a01:238:1::2", 0x04, created=9),  # optimistic
        entry("2a01:238:1::2", preferred=0, created=9),
        entry("fd00::2", preferred=FOREVER, bits=128, created=9),
        entry("fe80::2", preferred=FOREVER, created=9),
        entry("::1", preferred=FOREVER, bits=128),
        entry("2a01:238:2::2", bits=48, created=9),
        entry("93.184.216.34"),
    ],
)
def test_what_is_passed_over(other):
    assert choose([other, STABLE], 16) == choose([STABLE, other], 16) == STABLE.address


@pytest.mark.parametrize(
    "better",
    [
        entry("2a01:238:2::2", preferred=FOREVER),
        entry("2a01:238:2::2", bits=128),
        entry("2a01:238:2::2", created=9),  # the router has a new prefix and has forgotten the old one
    ],
)
def test_what_is_taken_instead(better):
    assert choose([STABLE, better], 16) == choose([better, STABLE], 16) == better.address


def test_ipv4_prefers_the_first_address_of_the_interface():
    first, second = entry("93.184.216.34", bits=24), entry("93.184.216.35", TEMPORARY, bits=24, created=9)
    assert choose([second, first], 4) == first.address
    assert choose([second], 4) == second.address
    assert choose([entry("169.254.1.1"), entry("127.0.0.1")], 4) is None


def test_what_is_not_public_is_told_if_there_is_nothing_else():
    assert choose([entry("fd00::1")], 16) == from_text("fd00::1")
    assert choose([entry("100.64.1.1")], 4) == from_text("100.64.1.1")


@given(
    st.lists(
        st.builds(
            entry,
            st.sampled_from(["2a01:238:1::1", "2a01:238:1::2", "fd00::1", "93.184.216.34", "fe80::1"]),
            st.integers(0, 255),
            st.integers(0, 64),
            st.integers(0, 9),
        )
    ),
    st.data(),
)
def test_the_order_of_the_kernel_does_not_matter(entries, data):
    assert choose(entries, 16) == choose(data.draw(st.permutations(entries)), 16)


def ip(*commands):
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.mark.kernel
async def test_a_real_kernel_in_a_network_namespace():
    with network_namespace():
        ip("link add wan type veth peer name other", "link set wan up", "link set other up", "link set lo up")
        ip("address add 93.184.216.34/24 dev wan", "address add 93.184.216.35/24 dev wan")
        ip("address add 5.6.7.8 peer 5.6.7.9 dev lo")
        ip("address add fd00::1/64 dev wan nodad", "address add 2a01:238:1::1/64 dev wan nodad")
        ip("address add 2a01:238:2::1/64 dev wan nodad valid_lft 900 preferred_lft 0")
        assert await interface.ask("wan", 4) == from_text("93.184.216.34")
        assert await interface.ask("wan", 16) == from_text("2a01:238:1::1")
        assert await interface.ask("lo", 4) == from_text("5.6.7.8")  # our own end
        ip("address del 2a01:238:1::1/64 dev wan")
        assert await interface.ask("wan", 16) == from_text("fd00::1")
        ip("address flush dev wan")
        with pytest.raises(SourceError, match="no address of this family"):
            await interface.ask("wan", 4)


@pytest.mark.kernel
async def test_an_interface_that_is_not_there():
    with network_namespace(), pytest.raises(SourceError, match="cannot be read"):
        await interface.ask("ppp7", 4)
