"""The vocabulary of the set writer: which set, which key, on account of which name.

A set is one of three kinds. *Ours, per endpoint*: `ep.NAMESPACE.NAME.addr4` holds plain addresses,
`ep.NAMESPACE.NAME.port4` holds address . protocol . port (the same with 6). *Ours, named by a rule*:
`set: github` means `github4` and `github6`. *The user's*: `4#inet#fw4#github`, never created, and never
cleared of what we did not add.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dnsproxy.addresses import to_text

if TYPE_CHECKING:
    from collections.abc import Iterable

PROTOCOLS = {6: "tcp", 17: "udp", 132: "sctp"}  # IANA protocol numbers, as nft names them
VERSIONS = (4, 6)

MAX_COMMENT = 127  # octets; nft's own limit is 128 with the final NUL
_CUT = "..."  # never part of a name: a name has no empty label
_HEAD = 32  # octets kept of the beginning of a long name; the end says whose it is

TableId: TypeAlias = tuple[str, str]  # nftables family and name, such as ("inet", "dnsproxy")


class SetSpec(NamedTuple):
    """One nftables set: where it is, what its keys are, and whose it is.

    `family` is the nftables family of the table (inet, ip, ip6), `version` 4 or 6 that of the
    addresses; `ports` says whether the key is address . inet_proto . inet_service or an address alone.
    """

    family: str
    table: str
    name: str
    version: int
    ports: bool
    ours: bool

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"


class Element(NamedTuple):
    """One key of one set, and the name (text, as `comment` makes it) on whose account it is there.

    `key` is the kernel's own form: the packed address, for sets with ports followed by the protocol
    number and the port, each padded to four octets: `c0000201 06000000 01bb0000`.
    """

    spec: SetSpec
    key: bytes
    name: str


def endpoint_set(table: TableId, endpoint: str, version: int, *, ports: bool) -> SetSpec:
    """Return the set of one endpoint, given by its `namespace/name`."""
    namespace, _, name = endpoint.partition("/")
    kind = "port" if ports else "addr"
    return SetSpec(*table, f"ep.{namespace}.{name}.{kind}{version}", version, ports, ours=True)


def named_set(table: TableId, text: str, version: int) -> SetSpec | None:
    """Return the set that `text` in a rule means for one family of addresses; None: not for that family.

    A set of the user's form that is in our own table is ours all the same.
    """
    if "#" not in text:
        return SetSpec(*table, f"{text}{version}", version, ports=False, ours=True)
    number, family, theirs, name = text.split("#")
    if int(number) != version:
        return None
    return SetSpec(family, theirs, name, version, ports=False, ours=(family, theirs) == table)


def key_suffix(protocol: int, port: int) -> bytes:
    """Return what follows the address in the key of a set with ports."""
    return bytes((protocol, 0, 0, 0)) + port.to_bytes(2, "big") + b"\x00\x00"


def key_of(address: bytes, protocol: int, port: int) -> bytes:
    """Return the key of address . protocol . port as nf_tables lays out a concatenation."""
    return address + key_suffix(protocol, port)


def address_of(key: bytes) -> bytes:
    """Return the address in a key, with ports or without."""
    return key[:4] if len(key) in (4, 12) else key[:16]


def key_text(key: bytes) -> str:
    """Return a key as `nft` prints it, such as `192.0.2.1 . tcp . 443`."""
    address = address_of(key)
    size = len(address)
    if len(key) == size:
        return to_text(address)
    protocol, port = key[size], int.from_bytes(key[size + 4 : size + 6], "big")
    return f"{to_text(address)} . {PROTOCOLS.get(protocol, protocol)} . {port}"


def ports_text(ports: Iterable[tuple[int, int]]) -> list[str]:
    """Return (protocol, port) as people write them, ports in a row as a range: `80-82/tcp`, `443/udp`."""
    rows = groupby(enumerate(sorted(ports)), key=lambda each: (each[1][0], each[1][1] - each[0]))
    runs = [[pair for _, pair in row] for _, row in rows]
    return [port_text(protocol, first, last) for first, last, protocol in sorted(map(_run, runs))]


def _run(pairs: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Return first port, last port, protocol."""
    (protocol, first), (_, last) = pairs[0], pairs[-1]
    return first, last, protocol


def port_text(protocol: int, first: int, last: int) -> str:
    """Return a range of ports, such as `80-82/tcp`, or one port, such as `443/tcp`."""
    return f"{first}{'' if first == last else f'-{last}'}/{PROTOCOLS.get(protocol, protocol)}"


def comment(name: str) -> str:
    r"""Return the comment of an element that is there on account of `name`: at most 127 ASCII octets.

    A quotation mark (`\"` in the text of a name) becomes `\034`, which is the same name: nft knows no
    escapes in a comment, so the mark would end it and a saved ruleset would read the rest as rules.
    A longer name keeps its beginning and its end around `...`. A comment is its own comment.
    """
    if len(name) <= MAX_COMMENT and name.isascii() and '"' not in name:
        return name
    text = name.encode("ascii", "backslashreplace").decode("ascii")
    text = text.replace('\\"', "\\034").replace('"', "\\034")
    return text if len(text) <= MAX_COMMENT else text[:_HEAD] + _CUT + text[_HEAD + len(_CUT) - MAX_COMMENT :]
