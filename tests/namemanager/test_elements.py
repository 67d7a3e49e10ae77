from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy import names
from dnsproxy.addresses import from_text
from dnsproxy.namemanager.elements import (
    SetSpec,
    address_of,
    comment,
    endpoint_set,
    key_of,
    key_text,
    named_set,
    ports_text,
)

OURS = ("inet", "dnsproxy")

labels = st.lists(st.binary(min_size=1, max_size=63), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("address", "text", "octets"),
    [
        ("192.0.2.1", "192.0.2.1 . tcp . 443", "c00002010600000001bb0000"),
        ("2001:db8::1", "2001:db8::1 . tcp . 443", "20010db80000000000000000000000010600000001bb0000"),
    ],
)
def test_a_key_with_ports_has_each_field_padded_to_four_octets(address, text, octets):
    key = key_of(from_text(address), 6, 443)
    assert key == bytes.fromhex(octets)
    assert key_text(key) == text
    assert address_of(key) == from_text(address)


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_a_plain_key_is_the_address(address):
    assert key_text(from_text(address)) == address
    assert address_of(from_text(address)) == from_text(address)


def test_a_protocol_without_a_name_is_a_number():
    assert key_text(key_of(from_text("192.0.2.1"), 250, 7)) == "192.0.2.1 . 250 . 7"


def test_the_sets_of_an_endpoint_bear_its_name():
    assert endpoint_set(OURS, "default/ci", 6, ports=True) == SetSpec(
        "inet", "dnsproxy", "ep.default.ci.port6", 6, ports=True, ours=True
    )
    assert endpoint_set(OURS, "default/ci", 4, ports=False).name == "ep.default.ci.addr4"


def test_a_set_named_by_a_rule_is_ours_or_the_users():
    assert named_set(OURS, "github", 4) == SetSpec("inet", "dnsproxy", "github4", 4, ports=False, ours=True)
    assert named_set(OURS, "6#inet#fw4#g", 6) == SetSpec("inet", "fw4", "g", 6, ports=False, ours=False)
    assert named_set(OURS, "6#inet#fw4#g", 4) is None
    assert named_set(OURS, "4#inet#dnsproxy#g", 4) == SetSpec(
        "inet", "dnsproxy", "g", 4, ports=False, ours=True
    )


@pytest.mark.parametrize("length", [1, 126, 127])
def test_a_comment_is_the_name_as_long_as_nft_takes_it(length):
    assert comment("x" * length) == "x" * length


def test_a_longer_name_keeps_its_beginning_and_its_end():
    name = ".".join(["begin" + "x" * 50, "y" * 60, "z" * 60, "example", "com"]) + "."
    cut = comment(name)
    assert len(cut) == 127
    head, tail = cut.split("...")
    assert name.startswith(head)
    assert name.endswith(tail)
    assert tail.endswith("zzz.example.com.")


def test_a_quotation_mark_cannot_end_a_comment():
    name = names.to_text(names.from_labels([b'a"; flush ruleset; "', b"example"]))
    assert comment(name) == r"a\034\;\032flush\032ruleset\;\032\034.example."


@given(labels)
def test_any_name_makes_a_comment_that_nft_can_print_and_read(parts):
    text = comment(names.to_text(names.from_labels(parts)))
    assert 0 < len(text) <= 127
    assert text.isascii()
    assert text.isprintable()
    assert '"' not in text
    assert comment(text) == text


def test_ports_are_written_as_ranges_in_their_order():
    ports = {(6, 443), (17, 443), (6, 80), (6, 81), (6, 82), (6, 22), (200, 5), (17, 444)}
    assert ports_text(ports) == ["5/200", "22/tcp", "80-82/tcp", "443/tcp", "443-444/udp"]
    assert ports_text(()) == []
