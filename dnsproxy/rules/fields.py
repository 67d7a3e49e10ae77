"""The small parts that all documents are made of: names, ports, prefixes, sets, metadata, selectors.

Each text is read here once, into what it means; what it cannot mean is a sentence to a person.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import ip_interface, ip_network
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import AfterValidator, ConfigDict, PlainValidator, model_validator
from pydantic.alias_generators import to_camel

from dnsproxy.addresses import Network
from dnsproxy.rules.pattern import Pattern, match_name, match_pattern
from dnsproxy.yamldoc import FaultError, Model

CNAME_ANNOTATION = "dnsproxy/cname-targets"
PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}  # IANA protocol numbers
MAX_RANGE = 256  # ports of one range that is written out, one set element each


class PortRange(NamedTuple):
    """Ports `first` to `last` (both included) of one IANA protocol."""

    protocol: int
    first: int
    last: int


EVERY_PORT = tuple(PortRange(number, 0, 65535) for number in PROTOCOLS.values())


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("expected text" + (": write it in quotes" if isinstance(value, int | float) else ""))


def _name(value: object) -> Pattern:
    return match_name(_text(value))


def _pattern(value: object) -> Pattern:
    return match_pattern(_text(value))


# --- addresses


def _prefix(value: object) -> Network:
    text = _text(value)
    network = _loose_prefix(text)
    if "/" in text and ip_interface(text).network.network_address != ip_interface(text).ip:
        raise ValueError(f"{text!r} has bits behind its prefix: write {network}")
    return network


def _loose_prefix(value: object) -> Network:
    text = _text(value)
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        network = None
    if network is None or "%" in text:
        raise ValueError(f"{text!r} is not an address or prefix such as 192.0.2.1, 10.1.0.0/16 or fd00::/8")
    return _unmapped(network)


def _unmapped(network: Network) -> Network:
    """Return the IPv4 prefix that an IPv4-mapped one stands for."""
    mapped = network.network_address.ipv4_mapped if network.version == 6 else None
    return network if mapped is None else ip_network((mapped, network.prefixlen - 96))


# --- names of things

_OBJECT_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?").fullmatch
_SET_NAME = re.compile(r"[A-Za-z][-A-Za-z0-9_.]{0,99}").fullmatch
_USER_SET = re.compile(r"([46])#(inet|ip|ip6)(?:#[A-Za-z_][-A-Za-z0-9_.]{0,199}){2}").fullmatch


def _object_name(text: str) -> str:
    if not _OBJECT_NAME(text) or ".." in text or len(text) > 253:
        raise ValueError(f"{text!r} is no object's name: lower-case letters, digits, '-' and '.'")
    return text


def _namespace(text: str) -> str:
    if not _OBJECT_NAME(text) or "." in text or len(text) > 63:
        raise ValueError(f"{text!r} is no namespace: lower-case letters, digits and '-', at most 63")
    return text


def _set(text: str) -> str:
    if "#" not in text:
        if not _SET_NAME(text) or text.startswith("ep."):
            raise ValueError(
                f"{text!r} is no set's name: a letter, then letters, digits, '-', '_' and '.';"
                " names that start with ep. are the proxy's own"
            )
        return text
    found = _USER_SET(text)
    if found and text.rpartition("#")[2].startswith("ep."):
        raise ValueError(
            f"{text!r}: sets whose names start with ep. are the proxy's own, one endpoint's each;"
            " name a set of yours"
        )
    if not found:
        raise ValueError(f"{text!r} is no set of yours: expected 4#inet#TABLE#SET (4 or 6; inet, ip or ip6)")
    if found.group(1, 2) in (("4", "ip6"), ("6", "ip")):
        raise ValueError(f"{text!r}: a table of family {found[2]} holds no IPv{found[1]} addresses")
    return text


def _sets(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_set(value),)
    if isinstance(value, list):
        return tuple(_item(place, item) for place, item in enumerate(value))
    raise ValueError("expected the name of a set or a list of them")


def _item(place: int, item: object) -> str:
    try:
        return _set(_text(item))
    except ValueError as error:
        raise FaultError(str(error), place) from None


# --- ports

_A_PORT = "443, 443/TCP or 8000-8010/TCP"
_PORTS = re.compile(r"(\d+)(?:-(\d+))?(?:/(\w+))?", re.ASCII).fullmatch
_NATIVE_PROTOCOLS = {"": (6, 17), "ANY": tuple(PROTOCOLS.values())} | {
    name: (number,) for name, number in PROTOCOLS.items()
}


def _native_ports(value: object) -> tuple[PortRange, ...]:
    if isinstance(value, int | str) and not isinstance(value, bool):
        return _ports_of(str(value))
    raise ValueError(f"expected {_A_PORT}")


@lru_cache(1024)
def _ports_of(text: str) -> tuple[PortRange, ...]:
    """Return what 443, 443/TCP or 8000-8010/udp opens; without a protocol TCP and UDP."""
    found = _PORTS(text)
    if not found:
        raise ValueError(f"{text!r} is not a port: expected {_A_PORT}")
    first, last = decimal(found[1]), decimal(found[2] or found[1])
    numbers = _NATIVE_PROTOCOLS.get((found[3] or "").upper())
    if numbers is None:
        raise ValueError(f"{text!r} has the protocol {found[3]!r}: expected TCP, UDP, SCTP or ANY")
    if not 1 <= first <= last <= 65535:
        raise ValueError(f"{text!r} is not within 1 to 65535, in rising order; no ports mean every port")
    if last - first >= MAX_RANGE:
        raise ValueError(f"{text!r} is more than {MAX_RANGE} ports: leave the ports out to mean every port")
    return tuple(PortRange(number, first, last) for number in numbers)


def decimal(text: str) -> int:
    """Return a port number; ValueError where Cilium would read an octal one, or where it is far too large."""
    if len(text) > 1 and text.startswith("0"):
        raise ValueError(
            f"the port {text!r} starts with a zero, which Cilium reads as octal: write it decimal"
        )
    if len(text) > 5:
        raise ValueError(f"the port {text[:20]!r} is larger than 65535")
    return int(text)


ObjectName: TypeAlias = Annotated[str, AfterValidator(_object_name)]
Namespace: TypeAlias = Annotated[str, AfterValidator(_namespace)]
Name: TypeAlias = Annotated[Pattern, PlainValidator(_name)]
NamePattern: TypeAlias = Annotated[Pattern, PlainValidator(_pattern)]
Prefix: TypeAlias = Annotated[Network, PlainValidator(_prefix)]
LoosePrefix: TypeAlias = Annotated[Network, PlainValidator(_loose_prefix)]
NativePorts: TypeAlias = Annotated[tuple[PortRange, ...], PlainValidator(_native_ports)]
SetNames: TypeAlias = Annotated[tuple[str, ...], PlainValidator(_sets)]


# --- what all documents share


class CamelModel(Model):
    """A model whose keys are written in camel case."""

    model_config = ConfigDict(alias_generator=to_camel)


class Metadata(CamelModel):
    """Who an object is. What only a Kubernetes API server writes is taken and not looked at."""

    name: ObjectName
    namespace: Namespace | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    uid: Any = None
    creation_timestamp: Any = None
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: Any = None
    resource_version: Any = None
    generation: Any = None
    generate_name: Any = None
    managed_fields: Any = None
    owner_references: Any = None
    finalizers: Any = None
    self_link: Any = None

    @model_validator(mode="after")
    def _our_annotations(self) -> Self:
        for key, value in (self.annotations or {}).items():
            if key == CNAME_ANNOTATION and value not in ("true", "false"):
                raise FaultError('expected "true" or "false"', "annotations", key)
            if key.startswith("dnsproxy/") and key != CNAME_ANNOTATION:
                raise FaultError(f"unknown annotation; known here: {CNAME_ANNOTATION}", "annotations", key)
        return self

    @property
    def cname_targets(self) -> bool:
        """Tell whether CNAME targets count as matched names in this object's rules."""
        return (self.annotations or {}).get(CNAME_ANNOTATION) == "true"


class KubernetesObject(CamelModel):
    """The head of every object."""

    api_version: str
    kind: str
    metadata: Metadata

    @property
    def namespace(self) -> str:
        """The namespace, `default` where none is written."""
        return self.metadata.namespace or "default"


class Requirement(CamelModel):
    """One entry of matchExpressions."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] | None = None

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        if self.operator in ("In", "NotIn") and not self.values:
            raise FaultError(f"{self.operator} needs at least one value", "values")
        if self.operator in ("Exists", "DoesNotExist") and self.values:
            raise FaultError(f"{self.operator} takes no values", "values")
        return self


class Selector(CamelModel):
    """A label selector; an empty one selects everything in its scope."""

    match_labels: dict[str, str] | None = None
    match_expressions: list[Requirement] | None = None

    def requirements(self) -> list[Requirement]:
        """Return all that must hold, matchLabels included."""
        labels = (self.match_labels or {}).items()
        equal = [Requirement.model_construct(key=key, operator="In", values=[value]) for key, value in labels]
        return equal + (self.match_expressions or [])
