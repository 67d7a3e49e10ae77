from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy import names
from dnsproxy.namemanager import commands
from dnsproxy.namemanager.elements import Element, SetSpec, key_of

PLAIN = SetSpec("inet", "dnsproxy", "github4", 4, ports=False, ours=True)
PORTS = SetSpec("inet", "dnsproxy", "ep.default.ci.port6", 6, ports=True, ours=True)
ADDRESS = bytes((192, 0, 2, 1))

labels = st.lists(st.binary(min_size=1, max_size=63), min_size=1, max_size=4)


def test_a_table_and_its_sets_are_declared_as_nft_does():
    assert commands.add_table(PLAIN) == "nft add table inet dnsproxy"
    assert commands.add_set(PLAIN) == "nft add set inet dnsproxy github4 '{ type ipv4_addr; }'"
    assert commands.add_set(PORTS) == (
        "nft add set inet dnsproxy ep.default.ci.port6 '{ type ipv6_addr . inet_proto . inet_service; }'"
    )


def test_elements_are_written_with_their_names_as_comments():
    elements = [
        Element(PLAIN, ADDRESS, "github.com."),
        Element(PLAIN, bytes((192, 0, 2, 2)), "it's.example."),
    ]
    command = commands.add_elements(PLAIN, elements)
    assert shlex.split(command)[:6] == ["nft", "add", "element", "inet", "dnsproxy", "github4"]
    assert shlex.split(command)[6:] == [
        '{ 192.0.2.1 comment "github.com.", 192.0.2.2 comment "it\'s.example." }'
    ]


def test_elements_are_deleted_by_their_keys():
    key = key_of(bytes(15) + b"\1", 6, 443)
    assert commands.delete_elements(PORTS, [Element(PORTS, key, "a.example.")]) == (
        "nft delete element inet dnsproxy ep.default.ci.port6 '{ ::1 . tcp . 443 }'"
    )


@pytest.mark.parametrize("length", [1, 126, 127])
def test_a_comment_is_the_name_as_long_as_nft_takes_it(length):
    assert commands.comment("x" * length) == "x" * length


def test_a_longer_name_keeps_its_beginning_and_its_end():
    name = ".".join(["begin" + "x" * 50, "y" * 60, "z" * 60, "example", "com"]) + "."
    cut = commands.comment(name)
    assert len(cut) == 127
    head, tail = cut.split("...")
    assert name.startswith(head)
    assert name.endswith(tail)
    assert tail.endswith("zzz.example.com.")


def test_a_quotation_mark_cannot_end_a_comment():
    name = names.to_text(names.from_labels([b'a"; flush ruleset; "', b"example"]))
    assert commands.comment(name) == r"a\034\;\032flush\032ruleset\;\032\034.example."


@given(labels)
def test_any_name_makes_a_comment_that_nft_can_print_and_read(parts):
    text = commands.comment(names.to_text(names.from_labels(parts)))
    assert 0 < len(text) <= 127
    assert text.isascii()
    assert text.isprintable()
    assert '"' not in text
