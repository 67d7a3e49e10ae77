"""What the documents say, in one shape for both kinds: which endpoints may ask for what and connect to what.

A statement is one rule of one document. It holds

*askings*   lists of names that may be asked, each for some ports of some DNS servers;
*connects*  patterns of names and what their addresses open;
*denials*   ports (and perhaps peers) that nothing may open.

Here it is also decided what of a Cilium document is enforced, and every part that is not gets a note.
Whatever narrows a permission in a way that we cannot check (HTTP rules, authentication, TLS names) closes it:
what a document does not say is never opened.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from dnsproxy.addresses import Network, inside
from dnsproxy.endpoints import HOST_LABEL, Endpoint
from dnsproxy.rules.cilium import CiliumNetworkPolicy, DefaultDeny
from dnsproxy.rules.documents import Allow, EgressPolicy
from dnsproxy.rules.fields import EVERY_PORT, MAX_RANGE, PortRange, Selector
from dnsproxy.yamldoc import path_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dnsproxy.errors import Problem
    from dnsproxy.rules.cilium import (
        CiliumRule,
        DnsRule,
        EgressDenyRule,
        EgressPeers,
        EgressRule,
        PortProtocol,
        PortRule,
        Ports,
    )
    from dnsproxy.rules.documents import Object
    from dnsproxy.rules.fields import Requirement
    from dnsproxy.rules.pattern import Pattern
    from dnsproxy.yamldoc import Path

NAMESPACE_LABEL = "io.kubernetes.pod.namespace"
DNS_PORT = 53

OpenPorts: TypeAlias = frozenset[tuple[int, int]]  # (IANA protocol, port)
Labels: TypeAlias = "Mapping[str, tuple[str, ...]]"  # every way to spell a key -> the values under it


@dataclass(frozen=True, slots=True)
class Rule:
    """A place in a document that can decide: `EgressPolicy default/ci`, `spec.allow[0]`, `*.example.com`."""

    policy: str
    path: str
    text: str
    file: str
    line: int
    cnames: bool
    column: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """What one connect rule opens for the addresses of a name that it matches.

    `ports` None means every port. `sets` are the sets that the rule names, `cidrs` the non-public ranges that
    may be learned on its account.
    """

    rule: Rule
    ports: OpenPorts | None
    sets: tuple[str, ...]
    cidrs: tuple[Network, ...]


@dataclass(frozen=True, slots=True)
class Peers:
    """Who a rule is about, as far as it can be compared with the address of a DNS server."""

    anyone: bool = False
    networks: tuple[tuple[Network, tuple[Network, ...]], ...] = ()  # (prefix, without these)
    opaque: bool = False  # peers that only a cluster knows

    def covers(self, server: bytes | None) -> bool | None:
        """Tell whether a DNS server is among the peers; None if that cannot be told.

        Without an address the server is ours, which no peer of a document speaks of.
        """
        if self.anyone:
            return True
        if server is None:
            whole = any(network.prefixlen == 0 and not without for network, without in self.networks)
            return True if whole else (None if self.networks or self.opaque else False)
        return any(
            inside(server, (network,)) and not inside(server, without) for network, without in self.networks
        )


ANYONE = Peers(anyone=True)
NOBODY = Peers()
UNKNOWN = Peers(opaque=True)


class Reach(Enum):
    """How an asking reaches a port: by its own entry, or under a wider one."""

    NONE = 0
    WIDE = 1
    EXACT = 2


@dataclass(frozen=True, slots=True, eq=False)
class Asking:
    """Names that may be asked.

    `ports` None means whichever port the query came to. `names` None means that names are not restricted:
    `everything` is then the rule that lets all pass. With names, `everything` is an entry `*` among them.
    """

    peers: Peers
    ports: tuple[PortRange, ...] | None
    names: tuple[tuple[Pattern, Rule], ...] | None
    everything: Rule | None
    reason: str = "the rule lets every name be asked"

    def reach(self, protocol: int, port: int) -> Reach:
        """Return how a query to `port` over `protocol` is reached."""
        if self.ports is None:
            return Reach.EXACT
        if any(each == (protocol, port, port) for each in self.ports):
            return Reach.EXACT
        return Reach.WIDE if covered(self.ports, protocol, port) else Reach.NONE


def covered(ranges: Iterable[PortRange], protocol: int, port: int) -> bool:
    """Tell whether one of the ranges holds a port."""
    return any(each.protocol == protocol and each.first <= port <= each.last for each in ranges)


@dataclass(frozen=True, slots=True, eq=False)
class Denial:
    """Ports that nothing may open; `sure` where it holds whoever the peer is."""

    rule: Rule
    ports: tuple[PortRange, ...]
    peers: Peers

    @property
    def sure(self) -> bool:
        """Tell whether the denial holds for every peer."""
        return self.peers.covers(None) is True


@dataclass(eq=False, slots=True)
class Statement:
    """One rule of one document, at a `place`; `namespace` None means all, `node` the host alone."""

    place: Problem
    namespace: str | None
    node: bool
    requirements: tuple[Requirement, ...]
    default_deny: bool = True
    askings: list[Asking] = field(default_factory=list)
    connects: list[tuple[Pattern, Grant]] = field(default_factory=list)
    denials: list[Denial] = field(default_factory=list)

    def selects(self, endpoint: Endpoint, labels: Labels, host: Endpoint) -> bool:
        """Tell whether the statement is about an endpoint, whose `labels_of` are given."""
        if self.node:
            return endpoint is host and self._holds(labels)
        if self.namespace not in (None, endpoint.namespace):
            return False
        if not endpoint.declared and all(each.key != HOST_LABEL for each in self.requirements):
            return False
        return self._holds(labels)

    def one_label(self) -> tuple[str, str] | None:
        """Return a label that every selected endpoint has, if there is one that must have this value."""
        single = (each for each in self.requirements if each.operator == "In" and len(each.values or ()) == 1)
        return next(((each.key, each.values[0]) for each in single if each.values), None)

    def _holds(self, labels: Labels) -> bool:
        return all(holds(each, labels) for each in self.requirements)


def labels_of(endpoint: Endpoint) -> Labels:
    """Return an endpoint's labels under every key that selects them: with source, with `any:`, with none."""
    found: dict[str, tuple[str, ...]] = {}
    own = {key: value for key, value in endpoint.labels.items() if key.rpartition(":")[2] != NAMESPACE_LABEL}
    for key, value in (own | {NAMESPACE_LABEL: endpoint.namespace}).items():
        source, _, bare = key.rpartition(":")
        for spelled in (bare, f"any:{bare}", f"{source or 'k8s'}:{bare}"):
            found[spelled] = (*found.get(spelled, ()), value)
    return found


def holds(requirement: Requirement, labels: Labels) -> bool:
    """Tell whether one requirement of a selector holds (Kubernetes: NotIn holds for a missing key)."""
    values = labels.get(requirement.key, ())
    match requirement.operator:
        case "In":
            return any(value in values for value in requirement.values or ())
        case "NotIn":
            return not any(value in values for value in requirement.values or ())
        case "Exists":
            return bool(values)
        case _:
            return not values


# --- our documents to statements


def statements(objects: Iterable[Object]) -> tuple[list[Statement], list[Problem]]:
    """Return what policies say, and notes on what of it is not enforced here."""
    notes: list[Problem] = []
    found: list[Statement] = []
    for source in objects:
        if isinstance(source.model, EgressPolicy):
            found.append(_native(_Reader(source, notes), source.model))
        elif isinstance(source.model, CiliumNetworkPolicy):
            found += _CiliumReader(source, notes).statements(source.model)
    return found, notes


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes rules and notes that know their place."""

    source: Object
    notes: list[Problem]

    def rule(self, path: Path, text: str, *, cnames: bool) -> Rule:
        found = self.source.document.problem(path, "")
        return Rule(self.source.title, found.path, text, found.file, found.line, cnames, found.column)

    def rules(self, path: Path, entries: Iterable[tuple[Pattern, bool]]) -> list[tuple[Pattern, Rule]]:
        """Return (pattern, rule) of each (pattern, cnames) of a list; the way to the list is walked once."""
        title, listed = self.source.title, self.source.document.part(*path)
        start, file = path_text(listed.at), listed.file
        found = []
        for place, (pattern, cnames) in enumerate(entries):
            line, column = listed.where((place,))
            rule = Rule(title, f"{start}[{place}]", pattern.written, file, line, cnames, column)
            found.append((pattern, rule))
        return found

    def note(self, path: Path, message: str) -> None:
        self.notes.append(self.source.document.problem(path, message))

    def unenforced(self, path: Path, message: str) -> None:
        self.note(path, f"not enforced here: {message}")


def _native(reader: _Reader, policy: EgressPolicy) -> Statement:
    spec = policy.spec
    place = reader.source.document.problem(("spec",), "")
    requirements = tuple(spec.endpoint_selector.requirements())
    statement = Statement(place, policy.namespace, node=False, requirements=requirements)
    names: list[tuple[Pattern, Rule]] = []
    if spec.allow:
        names += reader.rules(("spec", "allow"), ((each.names, each.cnames) for each in spec.allow))
        statement.connects = [
            (pattern, grant)
            for allow, (pattern, rule) in zip(spec.allow, names, strict=True)
            if (grant := _native_grant(allow, rule)) is not None
        ]
    if spec.resolve:
        names += reader.rules(("spec", "resolve"), ((each.names, each.cnames) for each in spec.resolve))
    statement.askings.append(_asking(ANYONE, None, names))
    return statement


def _native_grant(allow: Allow, rule: Rule) -> Grant | None:
    ports = None if allow.ports is None else written_out(tuple(chain.from_iterable(allow.ports)))
    return Grant(rule, ports, allow.sets, tuple(allow.cidrs or ())) if ports is None or ports else None


@lru_cache(1024)
def written_out(ranges: tuple[PortRange, ...]) -> OpenPorts:
    """Return every (protocol, port) of some ranges; one object for all rules with the same ports."""
    return frozenset((each.protocol, port) for each in ranges for port in range(each.first, each.last + 1))


def _asking(peers: Peers, ports: tuple[PortRange, ...] | None, names: list[tuple[Pattern, Rule]]) -> Asking:
    everything = next((rule for pattern, rule in names if pattern.everything), None)
    return Asking(peers, ports, tuple(names), everything)


# --- Cilium's documents to statements


class _CiliumReader(_Reader):
    """Reads one Cilium document."""

    __slots__ = ()

    def everything(self, path: Path) -> Rule:
        return self.rule(path, "*", cnames=self.source.model.metadata.cname_targets)

    def listed(self, path: Path, entries: list[DnsRule]) -> list[tuple[Pattern, Rule]]:
        cnames = self.source.model.metadata.cname_targets
        return self.rules(path, ((each.names, cnames) for each in entries))

    def statements(self, policy: CiliumNetworkPolicy) -> list[Statement]:
        """Return what its rules say about egress."""
        found = (self._statement(path, rule, policy) for path, rule in policy.rules())
        return [statement for statement in found if statement is not None]

    def _statement(self, path: Path, rule: CiliumRule, policy: CiliumNetworkPolicy) -> Statement | None:
        for key, value in (("ingress", rule.ingress), ("ingressDeny", rule.ingress_deny), ("log", rule.log)):
            if value:
                self.unenforced((*path, key), "only egress is" if key != "log" else "there is no such log")
        default = rule.enable_default_deny or DefaultDeny()
        if default.ingress is not None:
            self.unenforced((*path, "enableDefaultDeny", "ingress"), "only egress is")
        switch = default.egress
        if rule.egress is None and rule.egress_deny is None and not switch:
            return None
        namespace = None if policy.cluster_wide else policy.namespace
        selector = rule.endpoint_selector or rule.node_selector or Selector()
        requirements = self._requirements((*path, "endpointSelector", "matchLabels"), selector, namespace)
        node = rule.node_selector is not None
        spot = self.source.document.problem(path, "")
        statement = Statement(spot, namespace, node, requirements, default_deny=switch is not False)
        for place, allow in enumerate(rule.egress or ()):
            self._allow((*path, "egress", place), allow, statement)
        for place, deny in enumerate(rule.egress_deny or ()):
            self._deny((*path, "egressDeny", place), deny, statement)
        return statement

    def _requirements(self, path: Path, selector: Selector, namespace: str | None) -> tuple[Requirement, ...]:
        """Return what must hold; a namespaced policy is about its own namespace, whatever its labels say."""
        found = []
        for each in selector.requirements():
            if namespace is None or each.operator != "In" or each.key.rpartition(":")[2] != NAMESPACE_LABEL:
                found.append(each)
            elif each.values != [namespace]:
                self.note((*path, each.key), f"ignored: this policy is about its own namespace, {namespace}")
        return tuple(found)

    # What may be asked and connected to

    def _allow(self, path: Path, rule: EgressRule, statement: Statement) -> None:
        self._note_peers(path, rule)
        self._note_ports(path, rule.to_ports, wide=bool(rule.to_fqdns))
        if _needs_authentication(rule):
            self.unenforced((*path, "authentication"), "it cannot be checked, so this rule opens nothing")
            return
        peers = _peers(rule)
        for place, entry in enumerate(rule.to_ports or ()):
            asking = self._entry((*path, "toPorts", place), entry, peers, named=rule.to_fqdns is not None)
            if asking is not None:
                statement.askings.append(
                    asking if statement.default_deny else self._softened(path[:-2], asking)
                )
        if rule.to_ports is None and rule.icmps is None and rule.to_fqdns is None and rule.peers():
            reason = "a rule without ports allows everything to this server"
            statement.askings.append(Asking(peers, EVERY_PORT, None, self.everything(path), reason))
        ports = _open_ports(rule)
        if rule.to_fqdns and (ports is None or ports):
            names = self.listed((*path, "toFQDNs"), rule.to_fqdns)
            statement.connects += [(pattern, Grant(text, ports, (), ())) for pattern, text in names]

    def _entry(self, path: Path, entry: PortRule, peers: Peers, *, named: bool) -> Asking | None:
        """Return what one toPorts entry lets be asked."""
        if entry.narrowing():
            return None
        if entry.rules is not None and entry.rules.dns is not None:
            return _asking(peers, entry.ranges(), self.listed((*path, "rules", "dns"), entry.rules.dns))
        if named:  # ports of the names' addresses, not of a DNS server
            return None
        return Asking(
            peers, entry.ranges(), None, self.everything(path), "the port is allowed without DNS rules"
        )

    def _softened(self, path: Path, asking: Asking) -> Asking:
        """Return an asking of a rule whose default deny is off, with `*` added to its names."""
        if asking.names is None or asking.everything is not None:
            return asking
        everything = self.everything((*path, "enableDefaultDeny"))
        return replace(asking, everything=everything, reason="default deny is off for this rule")

    # What is denied

    def _deny(self, path: Path, rule: EgressDenyRule, statement: Statement) -> None:
        self._note_ports(path, rule.to_ports, wide=False)
        if rule.icmps:
            self.unenforced((*path, "icmps"), "ICMP is closed unless a rule opens every port of a name")
        elif not rule.to_ports and not rule.peers():
            self.note(path, "neither peers nor ports: it denies nothing")
        else:
            ports = tuple(each for entry in rule.to_ports or () for each in entry.ranges())
            denial = Denial(self.everything(path), ports if rule.to_ports else EVERY_PORT, _peers(rule))
            statement.denials.append(denial)
            if not denial.sure:
                key = next(iter(rule.peers()))
                self.unenforced(
                    (*path, key), "deny these peers in the firewall, before the rules for our sets"
                )
            elif set(denial.ports) != set(EVERY_PORT):
                self.unenforced(path, "against rules that open every port; it is against rules with ports")

    # Notes on what is not enforced

    def _note_peers(self, path: Path, rule: EgressRule) -> None:
        for key, value in (*rule.peers().items(), ("toPorts", rule.to_ports), ("icmps", rule.icmps)):
            if value == []:
                self.note((*path, key), "an empty list: it selects nothing")
        if rule.icmps:
            self.unenforced((*path, "icmps"), "ICMP is closed unless a rule opens every port of a name")
        filled = next((key for key, value in rule.peers().items() if value), None)
        entries = rule.to_ports or []
        if filled and any(map(_about_dns, entries)) and _peers(rule).covers(None) is None:
            self.unenforced(
                (*path, filled), "it selects the DNS server; that is ours, so it counts as matching"
            )
        if filled == "toFQDNs" or (not filled and not entries) or (entries and all(map(_only_dns, entries))):
            return
        self.unenforced(
            (*path, filled or "toPorts"), "connections open to names only; asking needs a DNS rule"
        )

    def _note_ports(self, path: Path, entries: Sequence[Ports] | None, *, wide: bool) -> None:
        """Note what ports cannot mean here; `wide` where each of them would be an element of a set."""
        for place, entry in enumerate(entries or ()):
            where = (*path, "toPorts", place)
            for key in entry.narrowing():
                self.unenforced((*where, *key.split(".")), "it cannot be checked, so these ports stay closed")
            for number, port in enumerate(entry.ports or ()):
                self._note_port((*where, "ports", number), port, wide=wide)

    def _note_port(self, path: Path, port: PortProtocol, *, wide: bool) -> None:
        if port.number is None:
            self.unenforced((*path, "port"), "a named port has a number in a cluster only")
        elif not port.ranges():
            self.unenforced((*path, "protocol"), "this protocol has no ports to open")
        elif wide and _open_port(port) == frozenset():
            self.unenforced(
                path, f"more than {MAX_RANGE} ports, and not all of all protocols: they stay closed"
            )


def _needs_authentication(rule: EgressRule) -> bool:
    mode = rule.authentication.get("mode") if isinstance(rule.authentication, dict) else rule.authentication
    return mode not in (None, "disabled")


def _open_ports(rule: EgressRule) -> OpenPorts | None:
    """Return what the addresses of names open; None for every port."""
    if rule.to_ports is None:
        return None if rule.icmps is None else frozenset()
    found: set[tuple[int, int]] = set()
    for port in (port for entry in rule.to_ports if not entry.narrowing() for port in entry.ports or ()):
        ports = _open_port(port)
        if ports is None:
            return None
        found |= ports
    return frozenset(found)


def _open_port(port: PortProtocol) -> OpenPorts | None:
    """Return what one entry of ports opens: nothing where that would be too many elements, None for all."""
    ranges = port.ranges()
    if set(ranges) == set(EVERY_PORT):
        return None
    return written_out(tuple(each for each in ranges if each.last - each.first < MAX_RANGE))


def _peers(rule: EgressPeers) -> Peers:
    given = rule.peers()
    key, value = next(((key, value) for key, value in given.items() if value), ("", []))
    if not given or (key == "toEntities" and "all" in value):
        return ANYONE
    if not value:
        return NOBODY
    if key == "toCIDR":
        return Peers(networks=tuple((network, ()) for network in value))
    if key == "toCIDRSet":
        known = tuple((each.cidr, tuple(each.except_ or ())) for each in value if each.cidr is not None)
        return Peers(networks=known, opaque=len(known) < len(value))
    return UNKNOWN


def _about_dns(entry: PortRule) -> bool:
    return _has_names(entry) or any(each[1:] == (DNS_PORT, DNS_PORT) for each in entry.ranges())


def _only_dns(entry: PortRule) -> bool:
    return _has_names(entry) or all(each[1:] == (DNS_PORT, DNS_PORT) for each in entry.ranges())


def _has_names(entry: PortRule) -> bool:
    return entry.rules is not None and entry.rules.dns is not None
