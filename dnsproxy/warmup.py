"""Looking up, before anybody asks, the exact names that policies let endpoints connect to.

The queries take the path of every other one: each goes in on behalf of an endpoint, is judged, forwarded, and
its answer learned for that endpoint alone. What is missing is a client: answers end here. A round is spread
over time, so that it is never a burst, and a name that fails keeps what it has until its lease is over; the
next round asks again. Nothing waits for a round.

A large answer comes truncated over UDP; its question is then asked once more over TCP.
"""

from __future__ import annotations

import asyncio
import time
from ipaddress import ip_network
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dnsproxy.addresses import Network
    from dnsproxy.endpoints import Endpoint, EndpointTable
    from dnsproxy.rules.policy import Policy
    from dnsproxy.servers import Action, Sink

PACE: Final = 0.02  # seconds between two queries at least
TYPES: Final = (1, 28)  # A, AAAA
SIZE: Final = 1232  # octets of an answer that fits every path, DNS flag day 2020
TRIES: Final = 256  # addresses of a prefix that are tried as the endpoint's, where others claim parts of it
TRUNCATED: Final = 0x02  # in the third octet of a message, RFC 1035 section 4.1.1

Target: TypeAlias = tuple[bytes, bytes]  # (packed client address, wire name)


class Asked(Protocol):
    """The exchange, as far as a client of it is concerned."""

    def query(
        self,
        wire: bytes,
        source: bytes,
        sink: Sink,
        peer: Any,  # noqa: ANN401 - the sink alone knows its peers
        now: float,
        *,
        stream: bool,
    ) -> Action | None:
        """Judge one message from the client at `source`, and say what to do with it."""


class WarmUp:
    """A client that asks for endpoints; a Sink for the answers. `interval` is in seconds."""

    def __init__(
        self,
        exchange: Asked,
        targets: Callable[[], Iterable[Target]],
        interval: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`targets` are read anew for each round, so that a new policy counts from the next one on."""
        self.counts = {"asked": 0, "answered": 0, "failed": 0}
        self._exchange = exchange
        self._targets = targets
        self._interval = interval
        self._clock = clock
        self._idents = count()

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            started = self._clock()
            for source, name in self._targets():
                for qtype in TYPES:
                    self._ask(source, query(next(self._idents), name, qtype), stream=False)
                    await asyncio.sleep(PACE)
            await asyncio.sleep(max(0.0, started + self._interval - self._clock()))

    def send(self, wire: bytes, peer: tuple[bytes, bytes, bool]) -> None:
        """Take an answer; `peer` is (source, question, whether over TCP)."""
        source, question, stream = peer
        if wire[2] & TRUNCATED and not stream:
            self._ask(source, question, stream=True)
            return
        self.counts["failed" if wire[3] & 15 else "answered"] += 1

    def _ask(self, source: bytes, wire: bytes, *, stream: bool) -> None:
        self.counts["asked"] += 1
        peer = (source, wire, stream)
        action = self._exchange.query(wire, source, self, peer, self._clock(), stream=stream)
        if action is not None:
            sink, reply, to = action
            sink.send(reply, to)


def query(ident: int, name: bytes, qtype: int) -> bytes:
    """Return a query for a wire name, with recursion desired and an OPT record (RFC 6891 section 6.1.2)."""
    header = (ident & 0xFFFF).to_bytes(2, "big") + b"\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01"
    opt = b"\x00\x00\x29" + SIZE.to_bytes(2, "big") + b"\x00\x00\x00\x00\x00\x00"
    return header + name + qtype.to_bytes(2, "big") + b"\x00\x01" + opt


def targets(policy: Policy, endpoints: EndpointTable) -> Iterator[Target]:
    """Yield what is to be looked up: every exact name of every endpoint that has an address."""
    for endpoint in endpoints.endpoints:
        source = address_of(endpoint, endpoints)
        if source is not None:
            yield from ((source, name) for name in policy.exact_names(endpoint))


def address_of(endpoint: Endpoint, endpoints: EndpointTable) -> bytes | None:
    """Return an address that is the endpoint's and nobody else's, near the start of one of its prefixes."""
    prefixes: tuple[Network, ...] = endpoint.prefixes or (ip_network("127.0.0.1"),)
    for prefix in prefixes:
        for step in range(min(TRIES, prefix.num_addresses)):
            address = (int(prefix.network_address) + step).to_bytes(prefix.max_prefixlen // 8)
            if endpoints.find(address) is endpoint:
                return address
    return None
