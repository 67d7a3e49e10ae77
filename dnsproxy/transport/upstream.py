"""The sockets and streams over which upstream servers are asked.

For every server there are some connected UDP sockets, so that the kernel passes on only what comes from
that server's address and port, reports ICMP errors, and chose a random source port for each; and one stream,
opened when the first query needs it and again after it closed.

Sockets are replaced while in use. Someone who cannot see our packets has to guess source port and ID to
forge an answer (RFC 5452), and a port can be found from outside within a minute or so by counting ICMP
errors. A port that lives `ROTATE` seconds is gone by then, and one that hears too much of what we never asked
goes with the next tick. It also ends what is stuck: a socket keeps the source address it got when it was
connected, and a NAT box the mapping. A replaced socket takes no new query but listens until those in flight
on it are answered, or `DRAIN` seconds. A stream that brings too much of what we never asked is closed.

What cannot be opened is no error: there may be no route yet. It is tried again, with a growing pause.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from dnsproxy.errors import FormError, NetworkError
from dnsproxy.servers import Channel
from dnsproxy.transport.complaints import Complaints
from dnsproxy.transport.mmsg import CONNECTED, LARGEST, Receiver, Sender
from dnsproxy.transport.sockets import enlarge, resolve
from dnsproxy.transport.tcp import Frames, framed
from dnsproxy.transport.udp import SENDING, Datagrams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from dnsproxy.exchange import Exchange
    from dnsproxy.servers import Server

TICK: Final = 1.0  # seconds between two looks at what is to be replaced, closed or tried again
ROTATE: Final = 10.0
DRAIN: Final = 10.0
DRAINING: Final = 64  # replaced sockets that still listen, over all servers; above that nothing is replaced
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
CONNECT: Final = 2.0  # seconds for a TCP handshake
IDLE: Final = 10.0  # seconds until we close an unused stream; firewalls on the way forget it without a word
UNACKNOWLEDGED: Final = 5_000  # milliseconds until the kernel gives up a stream that nobody acknowledges
UNSENT: Final = 1024 * 1024  # octets that wait for a stream
STRAYS: Final = 100  # by so many what fits no query may outnumber the answers; late answers fit none either

COUNTS: Final = (
    *SENDING,
    "rotated",  # sockets replaced
    "unopened",  # sockets that could not be opened
    "flooded",  # streams closed for what they brought
    "errors",  # answers that raised an exception of ours
)

SO_MARK: Final = 36  # asm-generic/socket.h; Linux only, and so are we

# Says nothing about the server or the way to it.
_LOCAL: Final = (errno.ENOBUFS, errno.ENOMEM, errno.EMSGSIZE)

log = logging.getLogger(__name__)


def _open(server: Server, kind: socket.SocketKind, mark: int) -> tuple[socket.socket, tuple[object, ...]]:
    """Return an unconnected socket for a server, marked where we may, and the sockaddr to connect it to."""
    family, address = resolve(server.address, server.port, kind)
    sock = socket.socket(family, kind)
    sock.setblocking(False)
    if mark:
        with suppress(PermissionError):  # without CAP_NET_ADMIN; only redirected set-ups need the mark
            sock.setsockopt(socket.SOL_SOCKET, SO_MARK, mark)
    return sock, address


class _Judged:
    """A channel, and the exchange that is told what came over it."""

    def __init__(
        self, channel: Channel, exchange: Exchange, complaints: Complaints, counts: dict[str, int]
    ) -> None:
        self.channel = channel
        self.strays = 0  # so many more than answers
        self._exchange = exchange
        self._complaints = complaints
        self._counts = counts

    def came(self, wires: Iterable[bytes], now: float) -> None:
        """Give answers to the exchange and do what it says."""
        answer, channel = self._exchange.answer, self.channel
        for wire in wires:
            try:
                action = answer(channel, wire, now)
                if action is None:
                    self.strays += 1
                    continue
                if self.strays:
                    self.strays -= 1
                sink, reply, peer = action
                sink.send(reply, peer)
            except Exception as error:
                self._counts["errors"] += 1
                self._complaints.note(type(error).__name__, now, error)

    def lost(self, now: float) -> None:
        """Have the exchange send elsewhere what is in flight here."""
        if self.channel.pending:
            for sink, wire, peer in self._exchange.lost(self.channel, now):
                sink.send(wire, peer)


class UpstreamSocket(Datagrams):
    """One connected UDP socket to one server; a Sink without peers."""

    def __init__(
        self,
        sock: socket.socket,
        server: Server,
        exchange: Exchange,
        complaints: Complaints,
        receiver: Receiver,
        sender: Sender,
        loop: asyncio.AbstractEventLoop,
        counts: dict[str, int],
    ) -> None:
        """Use a connected, non-blocking socket."""
        self.channel = Channel(server, self, stream=False)
        self.failed = False  # the network refused something; a new socket may fare better
        self.opened = loop.time()
        self._judged = _Judged(self.channel, exchange, complaints, counts)
        super().__init__(sock, receiver, sender, loop, counts)

    def take(self, wires: Sequence[bytes], now: float) -> None:
        """Give the answers to the exchange."""
        self._judged.came(wires, now)

    def trouble(self, code: int) -> None:
        """Give up what is in flight if the network says that it will not be answered."""
        if code not in _LOCAL:
            self.failed = True
            self._judged.lost(self._loop.time())

    def stale(self, now: float) -> bool:
        """Tell whether it is time for another socket."""
        return self.failed or self._judged.strays >= STRAYS or (self.used and now - self.opened >= ROTATE)


class UpstreamStream(asyncio.Protocol):
    """The TCP connection to one server, opened by the first query that needs it; a Sink without peers."""

    def __init__(
        self,
        server: Server,
        exchange: Exchange,
        complaints: Complaints,
        loop: asyncio.AbstractEventLoop,
        mark: int,
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
        counts: dict[str, int],
    ) -> None:
        """`spawn` makes a task and holds it."""
        self.channel = Channel(server, self, stream=True)
        self._judged = _Judged(self.channel, exchange, complaints, counts)
        self._counts = counts
        self._server = server
        self._loop = loop
        self._mark = mark
        self._spawn = spawn
        self._frames = Frames()
        self._unsent = bytearray()  # waits for the connection
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._used = 0.0
        self._closed = False

    def send(self, wire: bytes, peer: None) -> None:
        """Write a query, or let it wait for the connection that it causes."""
        del peer
        frame = framed(wire)
        self._used = self._loop.time()
        transport = self._transport
        waiting = len(self._unsent) if transport is None else transport.get_write_buffer_size()
        if self._closed or waiting + len(frame) > UNSENT:
            self._counts["dropped"] += 1
            return
        self._counts["sent"] += 1
        if transport is not None:
            transport.write(frame)  # into the void if it is closing, and then it is lost like the rest
        else:
            self._unsent += frame
            if self._task is None:
                self._task = self._spawn(self._connect())

    def close(self) -> None:
        """Close for good."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    def close_unused(self, now: float) -> None:
        """Close until the next query if the last one is long ago and answered."""
        if self._transport is not None and not self.channel.pending and now - self._used >= IDLE:
            self._transport.close()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT):
                await self._handshake()
        except (OSError, NetworkError) as error:
            log.debug("upstream %s over TCP: %s", self._server, error)
            if self._task is asyncio.current_task():
                self._task = None
                self._fail()

    async def _handshake(self) -> None:
        sock, address = _open(self._server, socket.SOCK_STREAM, self._mark)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED)
            await self._loop.sock_connect(sock, address)
            await self._loop.create_connection(lambda: self, sock=sock)
        except BaseException:
            sock.close()
            raise

    def _fail(self) -> None:
        self._unsent.clear()  # all of it is pending, so the exchange has it too
        self._judged.lost(self._loop.time())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what waits."""
        self._transport = cast("asyncio.Transport", transport)
        self._task = None
        self._frames = Frames()
        self._judged.strays = 0
        self._transport.write(bytes(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        """Give the answers that are complete now to the exchange."""
        assert self._transport is not None
        self._frames.feed(data)
        try:
            self._judged.came(iter(self._frames.take, None), self._loop.time())
        except FormError:
            self._transport.abort()
        if self._judged.strays >= STRAYS:
            self._counts["flooded"] += 1
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Have what is in flight asked elsewhere; with nothing in flight the server merely tidied up."""
        del exc
        self._transport = None
        if not self._closed:
            self._fail()


class _Link:
    """Everything that we hold towards one server."""

    def __init__(self, stream: UpstreamStream, complaints: Complaints) -> None:
        self.sockets: list[UpstreamSocket] = []
        self.stream = stream
        self.complaints = complaints
        self.retry_at = 0.0
        self.pause = FIRST_PAUSE

    def lines(self) -> tuple[UpstreamSocket | UpstreamStream, ...]:
        """Return the sockets and the stream."""
        return (*self.sockets, self.stream)


_Draining: TypeAlias = tuple[float, UpstreamSocket | UpstreamStream]  # until when at most


class Upstreams:
    """Keeps the channels of all servers filled: `server.udp` with usable sockets, `server.tcp`."""

    def __init__(
        self,
        servers: Sequence[Server],
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
        sockets: int = 4,
        mark: int = 53,
    ) -> None:
        """Open `sockets` per server; `mark` is the firewall mark that exempts our packets, 0: none."""
        self._exchange = exchange
        self._loop = loop
        self._sockets = sockets
        self._mark = mark
        self._receiver = Receiver(LARGEST, CONNECTED)
        self._sender = Sender(CONNECTED)
        self._links: dict[Server, _Link] = {}
        self._draining: list[_Draining] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts = dict.fromkeys(COUNTS, 0)
        self.update(servers)
        self._timer = loop.call_later(TICK, self._tick)

    def update(self, servers: Iterable[Server]) -> None:
        """Serve exactly these servers: open what is new, let go of the rest once its queries are answered."""
        now = self._loop.time()
        wanted = dict.fromkeys(servers)
        for server in [server for server in self._links if server not in wanted]:
            link = self._links.pop(server)
            server.udp.clear()
            server.tcp = None
            self._draining += [(now + DRAIN, old) for old in link.lines()]
        for server in wanted:
            if server not in self._links:
                self._links[server] = self._link(server)
        self.maintain(now)

    def maintain(self, now: float) -> None:
        """Replace, open and close what is due; called once a second."""
        for server, link in self._links.items():
            self._rotate(server, link, now)
            self._fill(server, link, now)
            link.stream.close_unused(now)
        draining, self._draining = self._draining, []
        for until, old in draining:
            if old.channel.pending and now < until:
                self._draining.append((until, old))
            else:
                old.close()

    async def close(self) -> None:
        """Close everything; what is in flight stays unanswered."""
        self._timer.cancel()
        for server, link in self._links.items():
            server.udp.clear()
            server.tcp = None
            for line in link.lines():
                line.close()
        for _, old in self._draining:
            old.close()
        self._links.clear()
        self._draining.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK, self._tick)
        self.maintain(self._loop.time())

    def _link(self, server: Server) -> _Link:
        complaints = Complaints(f"upstream {server}")
        stream = UpstreamStream(
            server, self._exchange, complaints, self._loop, self._mark, self._spawn, self.counts
        )
        server.tcp = stream.channel
        return _Link(stream, complaints)

    def _spawn(self, connect: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(connect)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _fill(self, server: Server, link: _Link, now: float) -> None:
        """Open the sockets that are missing, unless that failed a moment ago."""
        if now < link.retry_at:
            return
        try:
            while len(link.sockets) < self._sockets:
                self._add(link, self._connected(server, link))
        except (OSError, NetworkError) as error:
            self.counts["unopened"] += 1
            if link.pause == FIRST_PAUSE:
                log.warning("upstream %s cannot be reached yet (%s); it is tried again", server, error)
            link.retry_at = now + link.pause
            link.pause = min(link.pause * 2, LONGEST_PAUSE)
        else:
            link.pause = FIRST_PAUSE

    def _rotate(self, server: Server, link: _Link, now: float) -> None:
        """Replace one socket that is stale. One a turn: the others follow, and they do not all go at once."""
        old = next((each for each in link.sockets if each.stale(now)), None)
        if old is None or len(self._draining) >= DRAINING:
            return
        try:
            new = self._connected(server, link)
        except (OSError, NetworkError):
            return  # the old one is better than none
        self._add(link, new)
        link.sockets.remove(old)
        server.udp.remove(old.channel)
        self._draining.append((now + DRAIN, old))
        self.counts["rotated"] += 1

    def _add(self, link: _Link, new: UpstreamSocket) -> None:
        link.sockets.append(new)
        new.channel.server.udp.append(new.channel)

    def _connected(self, server: Server, link: _Link) -> UpstreamSocket:
        sock, address = _open(server, socket.SOCK_DGRAM, self._mark)
        try:
            enlarge(sock)
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return UpstreamSocket(
            sock,
            server,
            self._exchange,
            link.complaints,
            self._receiver,
            self._sender,
            self._loop,
            self.counts,
        )
