"""Who is asking: a client's address -> its endpoint.

An endpoint is one client whose queries and connections are governed together. The host itself is the
endpoint `host`: it has every local address, also the loopback ranges, except where an endpoint of the
operator claims a prefix that is at least as specific.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dnsproxy.addresses import Network

HOST_LABEL = "reserved:host"
HOST_KEY = "default/host"
LOOPBACK: tuple[Network, ...] = (ip_network("127.0.0.0/8"), ip_network("::1/128"))


@dataclass(frozen=True, eq=False)
class Endpoint:
    """One client: who it is, which prefixes its queries come from, and how its denied queries are answered.

    `labels` have keys as written, with or without a source (`app`, `k8s:app`). `deny` is `nxdomain`,
    `refused` or None for the global setting. `declared` tells that an operator's document speaks of it, which
    only the built-in host can lack.
    """

    namespace: str
    name: str
    labels: Mapping[str, str]
    prefixes: tuple[Network, ...]
    deny: str | None = None
    declared: bool = True
    key: str = field(init=False)  # `namespace/name`, which no two endpoints share

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.namespace}/{self.name}")


def built_in_host() -> Endpoint:
    """Return the host as it is when no document speaks of it."""
    return Endpoint("default", "host", {HOST_LABEL: ""}, (), declared=False)


def conflicts(endpoints: Iterable[Endpoint]) -> Iterator[tuple[Endpoint, Endpoint, str]]:
    """Yield (first, second, what both claim) for every name or prefix that two endpoints claim."""
    owners: dict[str | Network, Endpoint] = {}
    for endpoint in endpoints:
        for claim in (endpoint.key, *endpoint.prefixes):
            owner = owners.setdefault(claim, endpoint)
            if owner is not endpoint:
                yield (
                    owner,
                    endpoint,
                    f"the prefix {claim}" if claim in endpoint.prefixes else f"the name {claim}",
                )


class EndpointTable:
    """All endpoints, found by address; the longest prefix wins."""

    def __init__(
        self, endpoints: Sequence[Endpoint], host: Endpoint, host_addresses: Iterable[bytes] = ()
    ) -> None:
        for first, second, claim in conflicts((host, *endpoints)):
            raise ValueError(f"{first.key} and {second.key} both claim {claim}")
        self.host = host
        self.endpoints: tuple[Endpoint, ...] = (host, *(each for each in endpoints if each is not host))
        self._levels = _levels(self.endpoints, host, frozenset(host_addresses))

    def find(self, address: bytes) -> Endpoint | None:
        """Return the endpoint of a packed, unmapped address; None for a stranger."""
        value = int.from_bytes(address)
        for shift, owners in self._levels[len(address)]:
            if (endpoint := owners.get(value >> shift)) is not None:
                return endpoint
        return None

    def with_host_addresses(self, addresses: Iterable[bytes]) -> EndpointTable:
        """Return the same endpoints with other addresses of the host."""
        return EndpointTable(self.endpoints[1:], self.host, addresses)


def _levels(
    endpoints: Iterable[Endpoint], host: Endpoint, host_addresses: Iterable[bytes]
) -> dict[int, list[tuple[int, dict[int, Endpoint]]]]:
    """Return, by length of address, (bits to shift away, prefix -> owner), the longest prefixes first."""
    levels: dict[int, dict[int, dict[int, Endpoint]]] = {4: {}, 16: {}}
    claims = [(host, ip_network(address)) for address in host_addresses] + [
        (host, network) for network in LOOPBACK
    ]
    claims += [(endpoint, network) for endpoint in endpoints for network in endpoint.prefixes]
    for endpoint, network in claims:  # the operator's claims come last and override
        shift = network.max_prefixlen - network.prefixlen
        owners = levels[network.max_prefixlen // 8].setdefault(shift, {})
        owners[int(network.network_address) >> shift] = endpoint
    return {size: sorted(found.items(), key=lambda level: level[0]) for size, found in levels.items()}
