"""Upstream servers as the core sees them: who is asked, in which order, and over what.

A name belongs to the route with the longest matching suffix, else to the default servers. The servers
of a route are asked in their written order. A server that fails `FAILURES` times in a row steps behind the
others for a while that doubles up to a minute; when the while is over, *one* query tries it again, and the
others wait for how that one fares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from dnsproxy.addresses import with_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FAILURES = 3  # a lost packet or two is the network; three in a row are the server
FIRST_PAUSE = 1.0  # seconds
LONGEST_PAUSE = 60.0
SHIFT = 4  # two to this power queries go over one socket in a row, so that a batch stays a batch


class Sink(Protocol):
    """Something that bytes can be given to: a listener, a stream, an upstream socket, a waiting room.

    `send` never blocks and never raises; it may queue and flush at the end of the loop's turn.
    """

    def send(self, wire: bytes, peer: Any) -> None:  # noqa: ANN401 - the sink alone knows its peers
        """Take one message for `peer`."""


Action: TypeAlias = tuple[Sink, bytes, Any]  # give these bytes to this sink, for this peer of it


class Server:
    """One upstream server; the edge keeps `udp` and `tcp` filled with usable channels."""

    def __init__(self, address: str, port: int = 53) -> None:
        self.address = address
        self.port = port
        self.udp: list[Channel] = []
        self.tcp: Channel | None = None
        self.failures = 0
        self.retry_at = 0.0
        self._stepped_at = 0.0  # when it last stepped behind the others
        self._turn = 0

    def __str__(self) -> str:
        return with_port(self.address, self.port)

    def channel(self, *, stream: bool) -> Channel | None:
        """Return the channel for the next query, or None while there is no usable one."""
        if stream:
            return self.tcp
        if not self.udp:
            return None
        self._turn += 1
        return self.udp[(self._turn >> SHIFT) % len(self.udp)]

    def worked(self) -> None:
        """Note an answer."""
        self.failures = 0
        self.retry_at = 0.0

    def failed(self, asked: float, now: float) -> None:
        """Note a query that got no answer, or a refusal by the network.

        `asked` is when it was sent: what was in flight when the server stepped back is no further failure.
        """
        if asked < self._stepped_at:
            return
        self.failures += 1
        if self.failures >= FAILURES:
            self._stepped_at = now
            self.retry_at = now + self._pause()

    def claim(self, now: float) -> bool:
        """Tell whether this server may be asked now; after a pause only the first caller may."""
        if self.failures < FAILURES:
            return True
        if now < self.retry_at:
            return False
        self.retry_at = now + self._pause()
        return True

    def _pause(self) -> float:
        doublings = min(self.failures - FAILURES, 6)
        return min(FIRST_PAUSE * 2.0**doublings, LONGEST_PAUSE)


class Channel:
    """One upstream socket or stream, with the queries in flight on it by their two-octet IDs."""

    __slots__ = ("answers", "pending", "server", "sink", "stream")

    def __init__(self, server: Server, sink: Sink, *, stream: bool) -> None:
        self.server = server
        self.sink = sink
        self.stream = stream
        self.pending: dict[bytes, Any] = {}  # what the exchange knows of each
        self.answers = 0


class Routes:
    """Which servers answer for which name; swapped whole when the servers change."""

    def __init__(self, default: Sequence[Server], routes: Mapping[bytes, Sequence[Server]]) -> None:
        self._default = tuple(default)
        self._routes = {suffix: tuple(servers) for suffix, servers in routes.items()}

    def __iter__(self) -> Iterator[Server]:
        """Yield every server once."""
        return iter(dict.fromkeys(server for group in self._groups() for server in group))

    def of(self, name: bytes, now: float) -> tuple[Server, ...]:
        """Return the servers for a name, as they are to be asked now: the longest suffix wins."""
        servers = self._written(name) if self._routes else self._default
        return servers if servers and servers[0].failures < FAILURES else in_order(servers, now)

    def _written(self, name: bytes) -> tuple[Server, ...]:
        at = 0
        while (found := self._routes.get(name[at:])) is None and name[at]:
            at += 1 + name[at]
        return self._default if found is None else found

    def _groups(self) -> Iterator[tuple[Server, ...]]:
        yield self._default
        yield from self._routes.values()


def in_order(servers: tuple[Server, ...], now: float) -> tuple[Server, ...]:
    """Return the servers as they are to be asked: those in a pause step behind the others."""
    ready = [server for server in servers if server.claim(now)]
    return (*ready, *(server for server in servers if server not in ready))
