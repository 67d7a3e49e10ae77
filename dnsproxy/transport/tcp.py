"""DNS over TCP (RFC 7766): framing, and the connections of clients.

Every message is preceded by its length in two octets (RFC 1035 section 4.2.2). A client may send many
queries without waiting, and answers leave in the order in which they come to be. What clients can make us
hold is bounded:

    connections        in all and per client; who counts as one client is told by `owner`. All strangers
                       together are one client, and they make room when every place is taken
    queries            their size as over UDP, and those in flight per connection: above that, reading stops
                       until half of them are answered
    answers            that the client does not fetch: above `CHOKED` octets reading stops, above `UNFETCHED`
                       the connection is reset, since what is in flight cannot be stopped
    time               without a whole query or answer
    turns              of the loop: a connection asks `SHARE` queries and waits for its turn behind the
                       others, `TURN` connections a turn; all that time UDP clients are served

A client may end its side after its queries; what is in flight is still answered before we close ours. Where
we are the one to end (`pause`, a length that no query has), our side is ended first, behind the last answer,
and what the client still sends is read and thrown away for a moment: closing over unread octets would make
the kernel send a reset, and a reset destroys answers on their way.

Connections are accepted here and not by asyncio's server: that one closes its socket when it stops, while
ours may belong to another process too; and without descriptors it logs and retries a thousand times over.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, cast

from dnsproxy import addresses
from dnsproxy.errors import FormError
from dnsproxy.transport.complaints import Complaints
from dnsproxy.transport.sockets import LARGEST_QUERY, bound

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dnsproxy.exchange import Exchange

BACKLOG: Final = 1_024
ACCEPTS: Final = 64  # connections accepted in one turn; the socket is still readable if there are more
REST: Final = 1.0  # seconds without accepting when the system has no room for a connection
HEADER: Final = 12  # octets of a DNS header; no message is shorter
LARGEST: Final = 65_535  # octets of a message
ROOM: Final = 16 * 1024  # octets read at once
CHOKED: Final = 64 * 1024
UNFETCHED: Final = 256 * 1024
SHARE: Final = 32  # queries of one connection in a row
TURN: Final = 4  # connections that go on in one turn of the loop: 128 queries, about two milliseconds
LINGER: Final = 1.0  # seconds in which a client may notice that we have ended our side
COUNTS: Final = (
    "accepted",
    "turned_away",  # one connection too many
    "evicted",  # idle, while another client needed the place
    "idle",
    "malformed",  # a length that no query has
    "unfetched",  # reset: the client does not fetch its answers
    "unaccepted",  # times that the system had no room for a connection
    "errors",  # queries that raised an exception of ours
)


def framed(wire: bytes) -> bytes:
    """Return a message as it travels on a stream."""
    return len(wire).to_bytes(2, "big") + wire


class Frames:
    """The octets of a stream, however they were cut, as messages."""

    def __init__(self, largest: int = LARGEST) -> None:
        """`largest` is the length in octets above which a message is refused."""
        self._octets = bytearray()
        self._largest = largest

    def feed(self, data: bytes | memoryview) -> None:
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
        if end > 2 + self._largest:
            raise FormError(f"a message of {end - 2} octets in a stream, more than {self._largest}")
        if len(octets) < end:
            return None
        wire = bytes(octets[2:end])
        del octets[:end]
        return wire


class Streams:
    """The open connections of all TCP listeners together, and the limits that hold for them."""

    def __init__(
        self,
        *,
        connections: int = 1_024,
        per_client: int = 64,
        in_flight: int = 128,
        idle: float = 30.0,
        owner: Callable[[bytes], str | None] | None = None,
    ) -> None:
        """`in_flight` counts queries of one connection; `idle` is in seconds.

        `owner` tells whose a packed address is, None for a stranger's; without it each is its own client.
        """
        self.in_flight = in_flight
        self.idle = idle
        self._connections = connections
        self._per_client = per_client
        self._owner = owner or bytes.hex
        self._waiting: deque[Connection] = deque()  # those that have more to ask than a turn allows
        self._clients: Counter[str | None] = Counter()
        self._owners: dict[Connection, str | None] = {}

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._owners)

    @property
    def crowded(self) -> bool:
        """Whether connections wait for their turn, so that who has something to ask waits behind them."""
        return bool(self._waiting)

    def wait(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Let a connection go on when its turn comes."""
        if not self._waiting:
            loop.call_soon(self._turn, loop)
        self._waiting.append(connection)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let some go on; the others in the loop's next turn, after everybody else had theirs."""
        waiting = self._waiting
        for _ in range(min(TURN, len(waiting))):
            waiting[0].go_on()
            waiting.popleft()
        if waiting:
            loop.call_soon(self._turn, loop)

    def enter(self, connection: Connection) -> bool:
        """Count a new connection in, unless that is one too many."""
        client = self._owner(connection.source)
        if self._clients[client] >= self._per_client:
            return False
        if self.open >= self._connections and not self._make_room(client):
            return False
        self._owners[connection] = client
        self._clients[client] += 1
        return True

    def leave(self, connection: Connection) -> None:
        """Count a connection out, once."""
        if connection in self._owners:
            client = self._owners.pop(connection)
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    def _make_room(self, client: str | None) -> bool:
        """Close the connection that is idle longest: a stranger's, or else, not for strangers, anybody's."""
        owners = self._owners
        idle = [each for each in owners if not each.busy and (owners[each] is None or client is not None)]
        if not idle:
            return False
        longest = min(idle, key=lambda each: (owners[each] is not None, each.active))
        longest.end("evicted")
        self.leave(longest)
        return True


class Connection(asyncio.BufferedProtocol):
    """One client's connection; a Sink for the answers to its queries, with no peers.

    Of every query for which the exchange names an action, exactly one answer must come back.
    """

    _transport: asyncio.Transport
    _timer: asyncio.TimerHandle

    def __init__(self, listener: TcpListener, source: bytes) -> None:
        """`source` is the packed, unmapped address of the client."""
        self.source = source
        self.active = listener.loop.time()  # when the last whole message passed
        self._listener = listener
        self._exchange = listener.exchange
        self._streams = listener.streams
        self._loop = listener.loop
        self._frames = Frames(LARGEST_QUERY)
        self._in_flight = 0
        self._made = False
        self._full = False  # of queries in flight
        self._choked = False  # by answers that the client does not fetch
        self._tired = False  # of asking in this turn of the loop; its next turn will come
        self._reading = True
        self._left = False  # by the client, in its direction
        self._ended = False  # no more queries are taken
        self._finished = False  # all is answered, and our side is ended
        self._due = False

    @property
    def busy(self) -> bool:
        """Tell whether a query is in flight, or the connection not yet made."""
        return self._in_flight > 0 or not self._made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock, or end what was ended before it began."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=CHOKED)
        self._timer = self._loop.call_later(self._streams.idle, self._check_idle)
        self._made = True
        self._steer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; answers to it are ignored from here on."""
        del exc  # how a client leaves is its own affair
        if self._made:
            self._timer.cancel()
        self._streams.leave(self)
        self._listener.connections.discard(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the listener's room: what is read is taken out before anybody else reads."""
        del sizehint
        return self._listener.room

    def buffer_updated(self, nbytes: int) -> None:
        """Ask about the messages that are complete now."""
        if not self._ended:
            self._frames.feed(memoryview(self._listener.room)[:nbytes])
            if self._streams.crowded:
                self._wait()
            else:
                self._pump()

    def eof_received(self) -> bool:
        """Keep our side open until everything is answered."""
        self._left = self._ended = True
        self._pump()
        return not self._finished

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
        frame = framed(wire)
        if self._transport.get_write_buffer_size() + len(frame) > UNFETCHED:
            self.end("unfetched")
            return
        self.active = self._loop.time()
        self._transport.write(frame)
        if (self._full or self._ended) and not self._due:
            self._due = True
            self._loop.call_soon(self._pump)

    def pause(self) -> None:
        """Take no more queries, and close when those that were read are answered."""
        self._ended = True
        if self._made:
            self._pump()

    def end(self, cause: str) -> None:
        """Reset the connection and count it under `cause`."""
        self._listener.counts[cause] += 1
        self._transport.abort()  # not close: that would wait for a client that does not fetch

    def close(self) -> None:
        """Close at once."""
        self._ended = True
        if self._made:
            self._transport.abort()

    def go_on(self) -> None:
        """Ask on, since it is this connection's turn."""
        self._tired = False
        self._pump()

    def _wait(self) -> None:
        if not self._tired:
            self._tired = True
            self._streams.wait(self, self._loop)
            self._steer()

    def _pump(self) -> None:
        """Ask about whole messages until there are none or the connection has enough to do; then read on."""
        self._due = False
        if self._tired:
            return
        left = SHARE
        if self._full and self._in_flight <= self._streams.in_flight // 2:
            self._full = False
        try:
            while not (self._full or self._choked or self._finished or self._transport.is_closing()):
                wire = self._frames.take()
                if wire is None:
                    break
                self._ask(wire)
                left -= 1
                if not left:
                    self._wait()
                    return
        except FormError:
            self._listener.counts["malformed"] += 1
            self._frames = Frames()
            self._ended = True
        self._steer()

    def _ask(self, wire: bytes) -> None:
        self.active = now = self._loop.time()
        self._in_flight += 1
        try:
            action = self._exchange.query(wire, self.source, self, None, now, stream=True)
            if action is None:
                self._in_flight -= 1
            else:
                sink, reply, peer = action
                sink.send(reply, peer)
        except Exception as error:
            self._in_flight -= 1
            self._listener.trouble(error)
        self._full = self._in_flight >= self._streams.in_flight

    def _steer(self) -> None:
        """Read or do not, and end our side when there is nothing more to answer."""
        if not self._made or self._finished or self._transport.is_closing():
            return
        busy = self._full or self._choked or self._tired
        if self._ended and self._in_flight <= 0 and not busy:
            self._finish()
        elif self._reading is busy and not self._left:
            self._reading = not busy
            (self._transport.pause_reading if busy else self._transport.resume_reading)()

    def _finish(self) -> None:
        """Close; where the client has not ended its side, wait a moment for it to do so."""
        self._finished = True
        self._timer.cancel()
        if self._left:
            self._transport.close()
            return
        self._transport.write_eof()
        self._timer = self._loop.call_later(LINGER, self.close)
        if not self._reading:
            self._transport.resume_reading()

    def _check_idle(self) -> None:
        """Close a connection without a whole message for too long; one timer, re-armed when it fires."""
        left = self.active + self._streams.idle - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_idle)
        else:
            self.end("idle")


class TcpListener:
    """A socket that clients connect to."""

    def __init__(
        self, sock: socket.socket, exchange: Exchange, loop: asyncio.AbstractEventLoop, streams: Streams
    ) -> None:
        """Own a bound socket; `start` serves it. `streams` is shared by all listeners."""
        self._sock = sock
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._complaints = Complaints(f"TCP {addresses.with_port(*sock.getsockname()[:2])}")
        self.exchange = exchange
        self.loop = loop
        self.streams = streams
        self.room = bytearray(ROOM)
        self.connections: set[Connection] = set()
        self.counts = dict.fromkeys(COUNTS, 0)

    async def start(self) -> None:
        """Accept connections from here on."""
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._watch()

    def pause(self) -> None:
        """Accept no more connections and no more queries; answer those that were taken.

        The socket stays as it is: who waits in its backlog is accepted by whoever else has it.
        """
        self._ignore()
        for connection in tuple(self.connections):
            connection.pause()

    def close(self) -> None:
        """Stop accepting, drop the connections that are open, and close the socket."""
        self._ignore()
        for connection in tuple(self.connections):
            connection.close()
        self._sock.close()

    def trouble(self, error: Exception) -> None:
        """Count an exception of ours, and say so."""
        self.counts["errors"] += 1
        self._complaints.note(type(error).__name__, self.loop.time(), error)

    def _watch(self) -> None:
        self._retry = None
        self.loop.add_reader(self._sock.fileno(), self._acceptable)

    def _ignore(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._sock.fileno() >= 0:
            self.loop.remove_reader(self._sock.fileno())

    def _acceptable(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # the client has left already
            except OSError as error:
                self._rest(error)
                return
            self._admit(sock, addresses.from_text(peer[0]))

    def _rest(self, error: OSError) -> None:
        """Let clients wait in the backlog for a moment: most likely there are no descriptors left."""
        self.counts["unaccepted"] += 1
        reason = os.strerror(error.errno or 0)
        self._complaints.note(f"no connection can be accepted: {reason}", self.loop.time())
        self._ignore()
        self._retry = self.loop.call_later(REST, self._watch)

    def _admit(self, sock: socket.socket, source: bytes) -> None:
        connection = Connection(self, source)
        if not self.streams.enter(connection):
            self.counts["turned_away"] += 1
            sock.close()
            return
        self.counts["accepted"] += 1
        self.connections.add(connection)
        sock.setblocking(False)
        self._spawn(self._serve(connection, sock))

    async def _serve(self, connection: Connection, sock: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: connection, sock)
        except OSError:  # the client has left already
            sock.close()
            connection.connection_lost(None)

    def _spawn(self, serve: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(serve)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def open_tcp(host: str, port: int) -> socket.socket:
    """Return a socket for a TcpListener; NetworkError or RightsError where that cannot be."""
    return bound(host, port, socket.SOCK_STREAM)
