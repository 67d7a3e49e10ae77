from __future__ import annotations

import shlex

from dnsproxy.namemanager import commands
from dnsproxy.namemanager.elements import Element, SetSpec, key_of

PLAIN = SetSpec("inet", "dnsproxy", "github4", 4, ports=False, ours=True)
PORTS = SetSpec("inet", "dnsproxy", "ep.default.ci.port6", 6, ports=True, ours=True)
ADDRESS = bytes((192, 0, 2, 1))


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
