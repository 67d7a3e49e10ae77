"""IP addresses as packed bytes, four or sixteen of them in network order, and what may be learned.

The length is the family. An IPv4-mapped address (`::ffff:a.b.c.d`, RFC 4291 section 2.5.5.2) is the IPv4
address itself, since that is what travels. A NAT64 address (`64:ff9b::/96`, RFC 6052) stays as it is and
is judged by the IPv4 address that it embeds.
"""

from __future__ import annotations

from bisect import bisect_right
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    collapse_addresses,
    ip_address,
    ip_network,
)
from typing import TypeAlias, TypeVar

Network: TypeAlias = IPv4Network | IPv6Network
_N = TypeVar("_N", IPv4Network, IPv6Network)

_MAPPED = bytes(10) + b"\xff\xff"
_NAT64 = bytes.fromhex("0064ff9b") + bytes(8)

# Not publishable as the address of a public service: IANA's special-purpose registries (RFC 6890).
NON_PUBLIC: tuple[Network, ...] = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
        "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15",
        "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        "::/128", "::1/128", "::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23",
        "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10",
        "ff00::/8",
    )
)  # fmt: skip


def unmapped(address: bytes) -> bytes:
    """Return the IPv4 address inside an IPv4-mapped one, any other address as it is."""
    return address[12:] if len(address) == 16 and address.startswith(_MAPPED) else address


def judged(address: bytes) -> bytes:
    """Return the address by which `address` is judged: the embedded one, where it embeds one."""
    if len(address) == 16 and address.startswith((_MAPPED, _NAT64)):
        return address[12:]
    return address


def inside(address: bytes, networks: tuple[Network, ...]) -> bool:
    """Tell whether one of `networks` holds the address. The cost grows with their number."""
    parsed = _parsed(address)
    return any(parsed in network for network in networks)


def is_public(address: bytes) -> bool:
    """Tell whether an address can be that of a public service, judged by what it embeds."""
    address = judged(address)
    first, last = _NON_PUBLIC_RANGES[len(address)]
    at = bisect_right(first, address)
    return not at or address > last[at - 1]


def _ranges(networks: list[_N]) -> tuple[list[bytes], list[bytes]]:
    """Return the first and the last addresses of networks, without overlaps, in ascending order.

    Packed addresses of one family sort as their numbers do, so they need not become numbers.
    """
    merged = list(collapse_addresses(networks))
    first = [network.network_address.packed for network in merged]
    return first, [network.broadcast_address.packed for network in merged]


# By the length of an address.
_NON_PUBLIC_RANGES = {
    4: _ranges([network for network in NON_PUBLIC if isinstance(network, IPv4Network)]),
    16: _ranges([network for network in NON_PUBLIC if isinstance(network, IPv6Network)]),
}


def from_text(text: str) -> bytes:
    """Return the packed form of an address in text, a mapped one unmapped; ValueError for anything else.

    A zone, as in `fe80::1%eth0`, is no part of the address and left out.
    """
    return unmapped(ip_address(text).packed)


def to_text(address: bytes) -> str:
    """Return an address as text."""
    return str(_parsed(address))


def with_port(host: str, port: int) -> str:
    """Return an address in text and a port as people write them: `192.0.2.1:53`, `[2001:db8::1]:53`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parsed(address: bytes) -> IPv4Address | IPv6Address:
    return IPv4Address(address) if len(address) == 4 else IPv6Address(address)
