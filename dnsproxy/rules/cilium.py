"""Cilium's policies as models: `CiliumNetworkPolicy` and `CiliumClusterwideNetworkPolicy` (cilium.io/v2).

They are taken whole. A document that a cluster accepts is accepted, also the parts that are not enforced here
(`statements.py` reports those); one that a cluster refuses, by its schema or by the agent's own checks, is
refused with the reason. One reading of Cilium's is not followed: a port with a leading zero is an error here,
and an octal number there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from dnsproxy.rules.fields import (
    PROTOCOLS,
    CamelModel,
    KubernetesObject,
    LoosePrefix,
    Name,
    NamePattern,
    PortRange,
    Selector,
    decimal,
)
from dnsproxy.yamldoc import FaultError

if TYPE_CHECKING:
    from dnsproxy.addresses import Network
    from dnsproxy.rules.pattern import Pattern
    from dnsproxy.yamldoc import Path

MAX_PORTS = 40  # ports of one toPorts entry, Cilium's limit
OTHER_PROTOCOLS = ("ICMP", "ICMPV6", "IGMP", "VRRP")  # legal, but without ports to open


def _not_root(pattern: Pattern) -> Pattern:
    if pattern.text == ".":
        raise ValueError("the root name '.' alone is refused by Cilium's schema")
    return pattern


class DnsRule(CamelModel):
    """One entry of toFQDNs or of rules.dns."""

    match_name: Annotated[Name, AfterValidator(_not_root)] | None = None
    match_pattern: Annotated[NamePattern, AfterValidator(_not_root)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.match_name is None) == (self.match_pattern is None):
            raise ValueError("expected either matchName or matchPattern, not both or none")
        return self

    @property
    def names(self) -> Pattern:
        """The names that are meant."""
        return self.match_name or self.match_pattern  # type: ignore[return-value]  # one is there, checked above


_SERVICE_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*").fullmatch


class PortProtocol(CamelModel):
    """One port, range of ports, or named port, of one protocol or of all."""

    port: str
    end_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    protocol: str | None = None

    @model_validator(mode="after")
    def _legal(self) -> Self:
        known = (*PROTOCOLS, *OTHER_PROTOCOLS, "ANY", "")
        if (self.protocol or "").upper() not in known:
            raise FaultError(
                f"unknown protocol {self.protocol!r}: expected TCP, UDP, SCTP or ANY", "protocol"
            )
        try:
            self._check_port()
        except ValueError as error:
            raise FaultError(str(error), "port") from None
        return self

    def _check_port(self) -> None:
        if self.port.isascii() and self.port.isdigit():
            if decimal(self.port) > 65535:
                raise ValueError(f"the port {self.port!r} is larger than 65535")
        elif not _SERVICE_NAME(self.port) or len(self.port) > 15:
            raise ValueError(
                f"{self.port!r} is neither a port number nor a service name (15 letters, digits, '-')"
            )

    @property
    def number(self) -> int | None:
        """The number; None for a named port."""
        return int(self.port) if self.port.isdigit() else None

    @property
    def last(self) -> int | None:
        """The last port of the range; the port itself where there is none."""
        return self.number if self.number is None else max(self.number, self.end_port or 0)

    @property
    def protocols(self) -> tuple[int, ...]:
        """The IANA numbers of the protocols that have ports."""
        name = (self.protocol or "ANY").upper()
        return tuple(number for each, number in PROTOCOLS.items() if name in (each, "ANY"))

    def ranges(self) -> tuple[PortRange, ...]:
        """Return what is meant as ranges: all ports for port 0, nothing for a named port."""
        if self.number is None or self.last is None:
            return ()
        first, last = (self.number, self.last) if self.last else (0, 65535)
        return tuple(PortRange(protocol, first, last) for protocol in self.protocols)


class L7Rules(CamelModel):
    """Which requests may pass; at most one kind."""

    dns: list[DnsRule] | None = None
    http: list[Any] | None = None
    kafka: list[Any] | None = None
    l7proto: str | None = Field(None, alias="l7proto")
    l7: list[Any] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if len(self.kinds()) > 1:
            raise ValueError(
                f"{' and '.join(self.kinds())} together: a toPorts entry holds rules of one kind"
            )
        return self

    def kinds(self) -> list[str]:
        """Return the kinds of rules that are there."""
        found = [kind for kind in ("dns", "http", "kafka") if getattr(self, kind)]
        return found + ["l7"] * bool(self.l7proto or self.l7)


class Ports(CamelModel):
    """A list of ports."""

    ports: Annotated[list[PortProtocol], Field(max_length=MAX_PORTS)] | None = None

    def ranges(self) -> tuple[PortRange, ...]:
        """Return what all ports mean as ranges."""
        return tuple(each for port in self.ports or () for each in port.ranges())

    def narrowing(self) -> list[str]:
        """Return the keys that narrow these ports in ways that we cannot enforce."""
        return []


class PortDenyRule(Ports):
    """Ports of a deny rule."""

    @model_validator(mode="before")
    @classmethod
    def _ports_only(cls, value: Any) -> Any:  # noqa: ANN401 - any plain value
        if isinstance(value, dict) and "rules" in value:
            raise FaultError("a deny rule takes ports only, no rules for requests", "rules")
        return value


class PortRule(Ports):
    """Ports, and what may pass on them."""

    rules: L7Rules | None = None
    terminating_tls: Any = Field(None, alias="terminatingTLS")
    originating_tls: Any = Field(None, alias="originatingTLS")
    server_names: list[Any] | None = None
    listener: Any = None

    @model_validator(mode="after")
    def _ports_fit_rules(self) -> Self:
        kinds = self.kinds()
        if kinds == ["dns"] and not self.ports:
            raise ValueError('DNS rules need ports: for instance ports: [{port: "53", protocol: ANY}]')
        for place, port in enumerate(self.ports or ()):
            if kinds and port.number == 0 and not port.end_port:
                raise FaultError(
                    f"port 0 means every port, which {kinds[0]} rules do not take", "ports", place
                )
            if kinds == ["dns"] and port.number is not None and port.last != port.number:
                raise FaultError("DNS rules take single ports, no range", "ports", place, "endPort")
            if kinds and kinds != ["dns"] and (port.protocol or "").upper() != "TCP":
                raise FaultError(f"{kinds[0]} rules need protocol TCP; only DNS rules do not", "ports", place)
        return self

    def kinds(self) -> list[str]:
        """Return the kinds of rules for requests that are there."""
        return self.rules.kinds() if self.rules else []

    def narrowing(self) -> list[str]:
        """Return the keys that narrow these ports in ways that we cannot enforce."""
        names = "server_names", "listener", "terminating_tls", "originating_tls"
        keys = [str(type(self).model_fields[name].alias) for name in names if getattr(self, name)]
        return [f"rules.{kind}" for kind in self.kinds() if kind != "dns"] + keys


class CidrRule(CamelModel):
    """A prefix without some smaller ones, or a group of prefixes that only a cluster knows."""

    cidr: LoosePrefix | None = None
    cidr_group_ref: str | None = None
    cidr_group_selector: Any = None
    except_: list[LoosePrefix] | None = Field(None, alias="except")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [self.cidr, self.cidr_group_ref, self.cidr_group_selector]
        if sum(each is not None for each in given) != 1:
            raise ValueError("expected exactly one of cidr, cidrGroupRef and cidrGroupSelector")
        for place, network in enumerate(self.except_ or ()):
            if self.cidr is not None and not _inside(network, self.cidr):
                raise FaultError(f"{network} is not inside {self.cidr}", "except", place)
        return self


def _inside(network: Network, other: Network) -> bool:
    return network.version == other.version and network.subnet_of(other)  # type: ignore[arg-type]  # one family


Entity: TypeAlias = Literal[
    "all", "cluster", "health", "host", "ingress", "init", "kube-apiserver", "none", "remote-node",
    "unmanaged", "world", "world-ipv4", "world-ipv6",
]  # fmt: skip


class PeersModel(CamelModel):
    """The L3 members of a rule: at most one of them, with anything in it, says who is on the other side."""

    def peers(self) -> dict[str, list[Any]]:
        """Return the L3 members that are there, also empty ones, by key."""
        found = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name.startswith(("to_", "from_")) and name != "to_ports" and value is not None:
                found[str(field.alias)] = value
        return found

    @model_validator(mode="after")
    def _one_kind_of_peer(self) -> Self:
        filled = [key for key, value in self.peers().items() if value]
        if len(filled) > 1:
            raise FaultError(
                f"{' and '.join(filled)} in one rule: Cilium takes one kind of peer per rule; write two",
                filled[1],
            )
        if getattr(self, "icmps", None) and getattr(self, "to_ports", None):
            raise FaultError("icmps and toPorts in one rule: write two", "icmps")
        return self


class EgressPeers(PeersModel):
    """Who may be connected to."""

    to_endpoints: list[Selector] | None = None
    to_cidr: list[LoosePrefix] | None = Field(None, alias="toCIDR")
    to_cidr_set: list[CidrRule] | None = Field(None, alias="toCIDRSet")
    to_entities: list[Entity] | None = None
    to_services: list[dict[str, Any]] | None = None
    to_groups: list[dict[str, Any]] | None = None
    to_nodes: list[Selector] | None = None
    icmps: list[Any] | None = None


class EgressRule(EgressPeers):
    """What an endpoint may connect to and ask for."""

    to_fqdns: list[DnsRule] | None = Field(None, alias="toFQDNs")
    to_ports: list[PortRule] | None = None
    authentication: Any = None


class EgressDenyRule(EgressPeers):
    """What an endpoint may not connect to, whatever allows it."""

    to_ports: list[PortDenyRule] | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_names(cls, value: Any) -> Any:  # noqa: ANN401 - any plain value
        if isinstance(value, dict) and "toFQDNs" in value:
            raise FaultError("there is no denying by name: names that no rule allows are denied", "toFQDNs")
        return value


class IngressPeers(PeersModel):
    """Who may connect. Nothing of it is enforced here."""

    from_endpoints: list[Selector] | None = None
    from_cidr: list[LoosePrefix] | None = Field(None, alias="fromCIDR")
    from_cidr_set: list[CidrRule] | None = Field(None, alias="fromCIDRSet")
    from_entities: list[Entity] | None = None
    from_groups: list[dict[str, Any]] | None = None
    from_nodes: list[Selector] | None = None
    icmps: list[Any] | None = None


class IngressRule(IngressPeers):
    """What may connect to an endpoint."""

    to_ports: list[PortRule] | None = None
    authentication: Any = None

    @model_validator(mode="after")
    def _no_dns(self) -> Self:
        for place, entry in enumerate(self.to_ports or ()):
            if entry.kinds() == ["dns"]:
                raise FaultError("DNS rules stand under egress only", "toPorts", place, "rules", "dns")
        return self


class IngressDenyRule(IngressPeers):
    """What may not connect to an endpoint."""

    to_ports: list[PortDenyRule] | None = None


class DefaultDeny(CamelModel):
    """Whether being selected means that what is not allowed is denied."""

    ingress: bool | None = None
    egress: bool | None = None


class LogValue(CamelModel):
    """Text for Cilium's log."""

    value: str | None = None


class CiliumRule(CamelModel):
    """One rule: which endpoints or nodes, and what they may do."""

    endpoint_selector: Selector | None = None
    node_selector: Selector | None = None
    ingress: list[IngressRule] | None = None
    ingress_deny: list[IngressDenyRule] | None = None
    egress: list[EgressRule] | None = None
    egress_deny: list[EgressDenyRule] | None = None
    enable_default_deny: DefaultDeny | None = None
    labels: list[Any] | None = None
    description: str | None = None
    log: LogValue | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.endpoint_selector is None) == (self.node_selector is None):
            raise ValueError("expected exactly one of endpointSelector and nodeSelector")
        if not (self.ingress or self.ingress_deny or self.egress or self.egress_deny):
            raise ValueError(
                "at least one of ingress, ingressDeny, egress and egressDeny must hold a rule;"
                " to deny all egress, write egress: [{}]"
            )
        if self.node_selector is not None:
            self._check_node()
        return self

    def _check_node(self) -> None:
        for place, rule in enumerate(self.egress or ()):
            _check_requests(rule.to_ports, ("dns",), "egress", place)
        for place, rule_in in enumerate(self.ingress or ()):
            _check_requests(rule_in.to_ports, (), "ingress", place)


def _check_requests(entries: list[PortRule] | None, legal: tuple[str, ...], *path: str | int) -> None:
    for place, entry in enumerate(entries or ()):
        if not set(entry.kinds()) <= set(legal):
            only = "DNS rules only" if legal else "no rules for requests"
            raise FaultError(f"a policy for nodes takes {only} here", *path, "toPorts", place, "rules")


class CiliumNetworkPolicy(KubernetesObject):
    """Cilium's namespaced policy."""

    spec: CiliumRule | None = None
    specs: list[CiliumRule] | None = None
    status: Any = None

    @model_validator(mode="after")
    def _has_rules(self) -> Self:
        if self.spec is None and not self.specs:
            raise ValueError("spec or specs is required")
        for path, rule in self.rules():
            if rule.node_selector is not None and not self.cluster_wide:
                raise FaultError(
                    "nodeSelector stands in a CiliumClusterwideNetworkPolicy only", *path, "nodeSelector"
                )
        return self

    @property
    def cluster_wide(self) -> bool:
        """Tell whether the policy is for all namespaces."""
        return isinstance(self, CiliumClusterwideNetworkPolicy)

    def rules(self) -> list[tuple[Path, CiliumRule]]:
        """Return every rule with its path."""
        first: list[tuple[Path, CiliumRule]] = [(("spec",), self.spec)] if self.spec else []
        return first + [(("specs", place), rule) for place, rule in enumerate(self.specs or ())]


class CiliumClusterwideNetworkPolicy(CiliumNetworkPolicy):
    """Cilium's policy for all namespaces and for nodes."""
