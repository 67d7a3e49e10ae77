"""The vocabulary of the set writer: which set, which key, on account of which name.

A set is one of three kinds. *Ours, per endpoint*: `ep.NAMESPACE.NAME.addr4` holds plain addresses,
`ep.NAMESPACE.NAME.port4` holds address . protocol . port (the same with 6). *Ours, named by a rule*:
`set: github` means `github4` and `github6`. *The user's*: `4#inet#fw4#github`, never created, and never
cleared of what we did not add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dnsproxy.addresses import to_text

PROTOCOLS = {6: "tcp", 17: "udp", 132: "sctp"}  # IANA protocol numbers, as nft names them


@dataclass(frozen=True, slots=True)
class SetSpec:
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
    """One key of one set, and the name (text) on whose account it is there.

    `key` is the kernel's own form: the packed address, for sets with ports followed by the protocol
    number and the port, each padded to four octets: `c0000201 06000000 01bb0000`.
    """

    spec: SetSpec
    key: bytes
    name: str


def key_of(address: bytes, protocol: int, port: int) -> bytes:
    """Return the key of address . protocol . port as nf_tables lays out a concatenation."""
    return address + bytes((protocol, 0, 0, 0)) + port.to_bytes(2, "big") + b"\x00\x00"


def key_text(key: bytes) -> str:
    """Return a key as `nft` prints it, such as `192.0.2.1 . tcp . 443`."""
    size = 4 if len(key) in (4, 12) else 16
    address = to_text(key[:size])
    if len(key) == size:
        return address
    protocol, port = key[size], int.from_bytes(key[size + 4 : size + 6], "big")
    return f"{address} . {PROTOCOLS.get(protocol, protocol)} . {port}"
