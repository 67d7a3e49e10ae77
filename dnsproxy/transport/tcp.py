"""DNS over TCP (RFC 7766): framing, and the connections of clients.

Every message is preceded by its length in two octets (RFC 1035 section 4.2.2). A client may send many
queries without waiting, and answers leave in the order in which they come to be. What one client can make
us hold is bounded: connections, queries in flight per connection (above it, reading stops until half of
them are answered), answers that the client does not fetch (reading stops as well), and time without a
whole query or answer.

A client may close its side after its queries; what is in flight is still answered before we close ours.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, cast

from dnsproxy import addresses
from dnsproxy.errors import FormError
from dnsproxy.transport.complaints import Complaints
from dnsproxy.transport.sockets import bound, place

if TYPE_CHECKING:
    from dnsproxy.exchange import Exchange

BACKLOG: Final = 1_024
HEADER: Final = 12  # octets of a DNS header; no message is shorter
WRITE_BUFFER: Final = 64 * 1024  # octets of unfetched answers above which we stop reading queries


def framed(wire: bytes) -> bytes:
    """Return a message as it travels on a stream."""
    return len(wire).to_bytes(2, "big") + wire


class Frames:
    """The octets of a stream, however they were cut, as messages."""

    def __init__(self) -> None:
        self._octets = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what arrived."""
        self._octets += data

    def take(self) -> bytes | None:
        """Return the next whole message, or None; FormError for a length that no message has."""
        octets = self._octets
        if len(octets) < 2:
            return None
        end = 2 + int.from_bytes(octets[:2], "big")
        if end < 2 + HEADER:
            raise FormError(f"a message of {end - 2} octets in a stream, shorter than a DNS header")
        if len(octets) < end:
            return None
        wire = bytes(octets[2:end])
        del octets[:end]
        return wire


class Streams:
    """The open connections of all TCP listeners together, and the limits that hold for them."""

    def __init__(
        self, *, connections: int = 1_024, per_client: int = 64, in_flight: int = 128, idle: float = 30.0
    ) -> None:
        """`in_flight` counts queries of one connection; `idle` is in seconds."""
        self.in_flight = in_flight
        self.idle = idle
        self._connections = connections
        self._per_client = per_client
        self._clients: dict[bytes, int] = {}
        self.open = 0
        self.turned_away = 0

    def enter(self, client: bytes) -> bool:
        """Count a new connection of a client address in, unless that is one too many."""
        count = self._clients.get(client, 0)
        if self.open >= self._connections or count >= self._per_client:
            self.turned_away += 1
            return False
        self._clients[client] = count + 1
        self.open += 1
        return True

    def leave(self, client: bytes) -> None:
        """Count a connection out."""
        self.open -= 1
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]


class Connection(asyncio.Protocol):
    """One client's connection; a Sink for the answers to its queries, with no peers.

    Of every query for which the exchange names an action, exactly one answer must come back.
    """

    def __init__(self, listener: TcpListener) -> None:
        self._listener = listener
        self._exchange = listener.exchange
        self._streams = listener.streams
        self._loop = listener.loop
        self._frames = Frames()
        self._source: bytes | None = None
        self._in_flight = 0
        self._full = False  # of queries in flight
        self._choked = False  # by answers that the client does not fetch
        self._reading = True
        self._ended = False  # by the client, in its direction
        self._due = False
        self._active = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the client in, or not."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self._active = self._loop.time()
        self._timer = self._loop.call_later(self._streams.idle, self._check_idle)
        source = _source(self._transport)
        if source is None or not self._streams.enter(source):
            self._transport.abort()
            return
        self._source = source
        self._listener.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; answers to it are ignored from here on."""
        del exc  # how a client leaves is its own affair
        self._timer.cancel()
        if self._source is not None:
            self._streams.leave(self._source)
            self._listener.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Ask about the messages that are complete now."""
        self._frames.feed(data)
        self._pump()

    def eof_received(self) -> bool:
        """Keep our side open until everything is answered."""
        self._ended = True
        self._pump()
        return True

    def pause_writing(self) -> None:
        """Stop reading: the client does not fetch its answers."""
        self._choked = True
        self._steer()

    def resume_writing(self) -> None:
        """Go on where `pause_writing` stopped."""
        self._choked = False
        self._pump()

    def send(self, wire: bytes, peer: None) -> None:
        """Write an answer."""
        del peer
        self._in_flight -= 1
        if self._transport.is_closing():
            return
        self._active = self._loop.time()
        self._transport.write(framed(wire))
        if (self._full or self._ended) and not self._due:
            self._due = True
            self._loop.call_soon(self._pump)

    def drain(self) -> None:
        """Take no more queries, and close when those that were taken are answered."""
        if not self._ended:
            self._ended = True
            self._frames = Frames()
            self._transport.pause_reading()
        self._steer()

    def close(self) -> None:
        """Close at once."""
        self._transport.abort()

    def _pump(self) -> None:
        """Ask about whole messages until there are none or the connection has enough to do; then read on."""
        self._due = False
        if self._full and self._in_flight <= self._streams.in_flight // 2:
            self._full = False
        try:
            while self._source is not None and not (
                self._full or self._choked or self._transport.is_closing()
            ):
                wire = self._frames.take()
                if wire is None:
                    break
                self._ask(self._source, wire)
        except FormError:
            self._listener.malformed += 1
            self._transport.close()
        self._steer()

    def _ask(self, source: bytes, wire: bytes) -> None:
        self._active = now = self._loop.time()
        self._in_flight += 1
        try:
            action = self._exchange.query(wire, source, self, None, now, stream=True)
            if action is None:
                self._in_flight -= 1
            else:
                sink, reply, peer = action
                sink.send(reply, peer)
        except Exception as error:
            self._in_flight -= 1
            self._listener.complaints.note(type(error).__name__, now, error)
        self._full = self._in_flight >= self._streams.in_flight

    def _steer(self) -> None:
        """Read or do not, and close when a client that ended its side has all its answers."""
        if self._transport.is_closing():
            return
        busy = self._full or self._choked
        if self._ended:
            if self._in_flight <= 0 and not busy:
                self._transport.close()
        elif busy is self._reading:
            self._reading = not busy
            (self._transport.pause_reading if busy else self._transport.resume_reading)()

    def _check_idle(self) -> None:
        """Close a connection without a whole message for too long; one timer, re-armed when it fires."""
        left = self._active + self._streams.idle - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_idle)
        else:
            self._transport.abort()  # not close: that would wait for a client that does not fetch


def _source(transport: asyncio.Transport) -> bytes | None:
    """Return the packed address of the other side, None if it has left already."""
    peer = transport.get_extra_info("peername")
    return addresses.unmapped(addresses.from_text(peer[0])) if peer else None


class TcpListener:
    """A socket that clients connect to."""

    def __init__(
        self, sock: socket.socket, exchange: Exchange, loop: asyncio.AbstractEventLoop, streams: Streams
    ) -> None:
        """Own a bound socket; `start` serves it. `streams` is shared by all listeners."""
        self._sock = sock
        self._server: asyncio.Server | None = None
        self.exchange = exchange
        self.loop = loop
        self.streams = streams
        self.complaints = Complaints(f"TCP {place(*sock.getsockname()[:2])}")
        self.connections: set[Connection] = set()
        self.malformed = 0  # connections closed for a length that no message has

    @property
    def errors(self) -> int:
        """Queries that raised an exception of ours."""
        return self.complaints.total

    async def start(self) -> None:
        """Accept connections from here on."""
        self._server = await self.loop.create_server(
            lambda: Connection(self), sock=self._sock, backlog=BACKLOG
        )

    def drain(self) -> None:
        """Accept no more connections and no more queries; answer those that were taken."""
        if self._server is not None:
            self._server.close()
        self._sock.close()
        for connection in tuple(self.connections):
            connection.drain()

    def close(self) -> None:
        """Stop accepting, and drop the connections that are open."""
        self.drain()
        for connection in tuple(self.connections):
            connection.close()


def open_tcp(host: str, port: int) -> socket.socket:
    """Return a socket for a TcpListener; NetworkError or RightsError where that cannot be."""
    return bound(host, port, socket.SOCK_STREAM)
