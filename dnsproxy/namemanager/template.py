"""Ready nftables rules that use our sets: for a routed host, for the host itself, for redirecting DNS.

Each is a text for `nft -f`. Rules can only name sets of their own table, so everything is in ours; a text
declares the sets that it names exactly as the writer creates them (no flags), so that either may come first.
Loading a text replaces its chains, in one transaction, and touches neither sets nor their elements: load it
again whenever the endpoints change, with nothing learned lost and no moment without rules.

What the rules decide is a question of the endpoint alone: its source prefixes lead to its own chain,
where a destination in one of its sets is accepted and all else is refused. There is one `vmap` per
prefix length, the longest first, which is how endpoints are found everywhere else too.
"""

from __future__ import annotations

from ipaddress import collapse_addresses, ip_address
from itertools import chain, groupby
from typing import TYPE_CHECKING

from dnsproxy.errors import DnsproxyError
from dnsproxy.namemanager.elements import VERSIONS, SetSpec, TableId, endpoint_set

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from dnsproxy.addresses import Network
    from dnsproxy.endpoints import Endpoint, EndpointTable

TABLE: TableId = ("inet", "dnsproxy")

_KEYS = {False: "ipv{}_addr", True: "ipv{}_addr . inet_proto . inet_service"}
_MATCHES = {False: "{} daddr", True: "{} daddr . meta l4proto . th dport"}
_ESTABLISHED = "ct state established,related accept"
_FAMILIES = {4: "ip", 6: "ip6"}

_FORWARD = """\
Egress by name on a routed host: where an endpoint may connect to is what it was allowed to ask for.

Governs what is forwarded from the endpoints' addresses; everybody else's traffic passes untouched, and so
does what comes in from outside. DNS to this host itself is input and not affected; DNS to anybody else,
and DNS over TLS (853), is refused like everything that nobody learned. An accept here is not the last word:
chains of other tables still see the packet.

Established connections pass first: an address that leaves a set closes nothing that is open."""

_OUTPUT = """\
Egress by name for this host itself: where its programs may connect to is what they were allowed to ask for.

Connections to this host are not affected, nor are the replies on them: an SSH session stays. Rules for what
the host needs without a name (DHCP, NTP, a mirror by address) have their place below."""

_REDIRECT = """\
All DNS of the endpoints and of this host comes to the proxy, whichever server it was sent to.

Port 53 over UDP and TCP, IPv4 and IPv6. The proxy's own queries have a mark and pass, so it must run with
`upstream: {{mark: {mark}}}`. A redirected query arrives at the address of the interface it came in by, one of
this host's programs at 127.0.0.1 or ::1: the proxy has to listen on port {port} of all of these, and an input
filter has to let that port in."""

_ONCE_MORE = """\
Made by `dnsproxy template {name}`. Load it with `nft -f FILE` (at boot: include it in /etc/nftables.conf),
before or after the daemon starts, and make and load it again when Endpoint documents change or a policy
selects other endpoints. Loading replaces these chains and keeps the sets as they are."""

_HOST_NEEDS = """\
# Here is the place for what the host needs without a name:
#   udp sport 68 udp dport 67 accept             DHCP
#   udp sport 546 udp dport 547 accept           DHCP for IPv6
#   ip daddr 192.0.2.123 udp dport 123 accept    NTP from a server given by address
#   ip daddr 10.0.0.0/8 tcp dport 22 accept      SSH from here to machines given by address""".splitlines()

_NEIGHBOURS = (
    "nd-router-solicit, nd-neighbor-solicit, nd-neighbor-advert, mld-listener-report, mld2-listener-report"
)


def forward(endpoints: EndpointTable, governed: Collection[str], *, table: TableId = TABLE) -> str:
    """Return the rules for traffic that this host forwards from the endpoints.

    `governed` are the keys of the endpoints that a policy selects; the others pass, and the text says so.
    """
    routed = _routed(endpoints)
    hook = "type filter hook forward priority filter; policy accept;"
    chains = {"forward": [hook, _ESTABLISHED, *_jumps(routed)]}
    chains |= {_chain_of(endpoint): _decide(endpoint, governed, table) for endpoint in routed}
    return _text("forward", _FORWARD, table, _sets(routed, governed, table), chains)


def output(
    endpoints: EndpointTable, governed: Collection[str], *, table: TableId = TABLE, mark: int = 53
) -> str:
    """Return the rules for what this host itself sends; the proxy's own queries have `mark` (0: none)."""
    host = endpoints.host
    rules = [
        "type filter hook output priority filter; policy accept;",
        _ESTABLISHED,
        'fib daddr type local accept comment "to itself, as redirected DNS is too"',
        *([f'meta mark {mark} accept comment "the queries of dnsproxy"'] if mark else []),
        f'icmpv6 type {{ {_NEIGHBOURS} }} accept comment "IPv6 does not work without"',
        *_HOST_NEEDS,
        f"jump {_chain_of(host)}",
    ]
    chains = {"output": rules, _chain_of(host): _decide(host, governed, table)}
    return _text("output", _OUTPUT, table, _sets([host], governed, table), chains)


def redirect(endpoints: EndpointTable, *, port: int, table: TableId = TABLE, mark: int = 53) -> str:
    """Return the rules that bring all DNS of the endpoints and of this host to `port` of this host.

    Without a mark (0) the proxy's own queries would come back to it, so that needs one.
    """
    if not mark:
        raise DnsproxyError(
            "redirecting DNS takes a mark on the proxy's own queries, or they come back to it: "
            "set `upstream: {mark: 53}`"
        )
    to_us = f"meta l4proto {{ tcp, udp }} th dport 53 redirect to :{port}"
    sources = _by_family(chain.from_iterable(endpoint.prefixes for endpoint in _routed(endpoints)))
    clients = [f"{family} saddr {_braces(map(_prefix, found))} {to_us}" for family, found in sources]
    chains = {
        "redirect.prerouting": ["type nat hook prerouting priority dstnat; policy accept;", *clients],
        "redirect.output": [
            "type nat hook output priority -100; policy accept;",
            f'meta mark {mark} accept comment "the queries of dnsproxy"',
            to_us,
        ],
    }
    return _text("redirect", _REDIRECT.format(mark=mark, port=port), table, [], chains)


def uncovered(endpoints: EndpointTable, listen: Iterable[tuple[str, int]], port: int) -> Iterator[str]:
    """Yield a sentence for everybody whose redirected queries come to where the proxy does not listen.

    `listen` are addresses in text and ports. Of an endpoint it is not known by which interface it comes in,
    so any address of its family that is not loopback passes for the right one.
    """
    there = [ip_address(address) for address, each in listen if each == port]
    for version, word in ((4, "0.0.0.0"), (6, "[::]")):
        found = [address for address in there if address.version == version]
        wildcard = any(address.is_unspecified for address in found)
        advice = f"nobody answers there; listen on {word}:{port}"
        if not wildcard and not any(address.is_loopback for address in found):
            loopback = "127.0.0.1" if version == 4 else "[::1]"
            yield f"queries of this host over IPv{version} are redirected to {loopback}:{port}: {advice}"
        routed = any(prefix.version == version for each in _routed(endpoints) for prefix in each.prefixes)
        if routed and not wildcard and all(address.is_loopback for address in found):
            yield f"queries of endpoints over IPv{version} are redirected to port {port} of here: {advice}"


def _routed(endpoints: EndpointTable) -> list[Endpoint]:
    return [endpoint for endpoint in endpoints.endpoints if endpoint is not endpoints.host]


def _chain_of(endpoint: Endpoint) -> str:
    return f"ep.{endpoint.namespace}.{endpoint.name}"


def _specs(endpoint: Endpoint, table: TableId) -> list[SetSpec]:
    """Return the sets of an endpoint: plain addresses and those with ports, of both families."""
    return [
        endpoint_set(table, endpoint.key, version, ports=ports)
        for ports in (False, True)
        for version in VERSIONS
    ]


def _sets(endpoints: Iterable[Endpoint], governed: Collection[str], table: TableId) -> list[SetSpec]:
    return [spec for endpoint in endpoints if endpoint.key in governed for spec in _specs(endpoint, table)]


def _decide(endpoint: Endpoint, governed: Collection[str], table: TableId) -> list[str]:
    """Return the rules of one endpoint's chain: what it learned, or everything if no policy selects it."""
    if endpoint.key not in governed:
        return ['counter accept comment "no policy selects this endpoint, so it is not restricted"']
    learned = [
        f"{_MATCHES[spec.ports].format(_FAMILIES[spec.version])} @{spec.name} accept"
        for spec in _specs(endpoint, table)
    ]
    refused = 'comment "no allowed name has led here"'
    return [
        *learned,
        f"meta l4proto tcp counter reject with tcp reset {refused}",
        f"counter reject with icmpx admin-prohibited {refused}",
    ]


def _jumps(endpoints: Iterable[Endpoint]) -> Iterator[str]:
    """Yield the rules that lead from source addresses to chains, the longest prefixes first."""
    targets = {prefix: _chain_of(endpoint) for endpoint in endpoints for prefix in endpoint.prefixes}
    longest_first = sorted(
        targets, key=lambda prefix: (prefix.version, -prefix.prefixlen, prefix.network_address)
    )
    for (version, _), found in groupby(longest_first, key=lambda prefix: (prefix.version, prefix.prefixlen)):
        pairs = [f"{_prefix(prefix)} : jump {targets[prefix]}" for prefix in found]
        yield f"{_FAMILIES[version]} saddr vmap {_braces(pairs)}"


def _by_family(prefixes: Iterable[Network]) -> list[tuple[str, list[Network]]]:
    """Return (nft's word, prefixes without overlaps) for each family that occurs."""
    found = list(prefixes)
    split = (
        (word, [each for each in found if each.version == version]) for version, word in _FAMILIES.items()
    )
    return [(word, list(collapse_addresses(some))) for word, some in split if some]  # type: ignore[type-var]


def _prefix(prefix: Network) -> str:
    return str(prefix.network_address if prefix.prefixlen == prefix.max_prefixlen else prefix)


def _braces(parts: Iterable[str]) -> str:
    return f"{{ {', '.join(parts)} }}"


def _text(
    name: str, what: str, table: TableId, sets: Sequence[SetSpec], chains: Mapping[str, Sequence[str]]
) -> str:
    """Return a file for `nft -f`: its chains emptied if they are there, then sets and chains."""
    if table[0] != "inet":
        raise DnsproxyError(
            f"the templates need a table for both address families, {' '.join(table)} is for one: "
            "set `sets: {table: inet NAME}`, or write rules of your own around the sets"
        )
    head = [f"# {line}".rstrip() for line in f"{what}\n\n{_ONCE_MORE.format(name=name)}".splitlines()]
    bare = [
        _block(f"chain {title}", [line for line in rules[:1] if "hook" in line])
        for title, rules in chains.items()
    ]
    flush = [f"flush chain {' '.join(table)} {title}" for title in chains]
    declared = [
        _block(f"set {spec.name}", [f"type {_KEYS[spec.ports].format(spec.version)}"]) for spec in sets
    ]
    full = [_block(f"chain {title}", rules) for title, rules in chains.items()]
    lines = [*_table(table, bare), *flush, "", *_table(table, declared + full)]
    return "\n".join(["#!/usr/sbin/nft -f", *head, "", *lines, ""])


def _table(table: TableId, blocks: Iterable[list[str]]) -> list[str]:
    return _block(f"table {' '.join(table)}", chain.from_iterable(blocks))


def _block(title: str, lines: Iterable[str]) -> list[str]:
    return [f"{title} {{", *(f"\t{line}" for line in lines), "}"]
