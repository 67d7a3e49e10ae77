"""Datagram sockets that cost little per datagram, and the one that clients ask.

A readable socket is emptied in batches: one system call, one look at the clock, then a few operations per
datagram. What is to be sent queues up and leaves in one call in the loop's next turn, when everything that
this turn produced for that socket is there.

Nothing that a packet or the network does ends a socket's service. An exception while handling a datagram
costs that datagram; an error of a send costs the datagram that met it; a full send buffer makes the rest
wait until the socket is writable, up to `QUEUE` datagrams.
"""

from __future__ import annotations

import errno
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from dnsproxy.addresses import unmapped, with_port
from dnsproxy.transport.complaints import Complaints
from dnsproxy.transport.mmsg import BATCH, Receiver, Sender, layout_of
from dnsproxy.transport.sockets import LARGEST_QUERY, bound, enlarge

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

    from dnsproxy.exchange import Exchange

ROUNDS: Final = 4  # batches per turn, then others get theirs; the socket is still readable if more is there
QUEUE: Final = 8_192  # datagrams that wait for one socket to be writable
SENDING: Final = (
    "sent",
    "dropped",  # not sent: the queue was full
    "refused",  # not sent: the kernel would not
)
COUNTS: Final = (
    *SENDING,
    "oversize",  # larger than any query
    "portless",  # came from port 0, which nobody can answer
    "errors",  # datagrams that raised an exception of ours
)
_LATER: Final = (-errno.EAGAIN, -errno.EINTR)


class Datagrams(ABC):
    """One UDP socket: batches in, batches out. It is a Sink; what arrives goes to `take`."""

    def __init__(
        self,
        sock: socket.socket,
        receiver: Receiver,
        sender: Sender,
        loop: asyncio.AbstractEventLoop,
        counts: dict[str, int],
    ) -> None:
        """Own a non-blocking socket; `receiver` and `sender` may serve others of its layout too.

        `counts` has at least the keys `SENDING`, and others may count there as well.
        """
        self._sock = sock
        self._fd = sock.fileno()
        self._receiver = receiver
        self._sender = sender
        self._loop = loop
        self._wires: list[bytes] = []
        self._peers: list[bytes] = []
        self._blocked = False
        self._paused = False
        self.counts = counts
        self.used = False  # something was sent
        loop.add_reader(self._fd, self._readable)

    @abstractmethod
    def take(self, wires: Sequence[bytes], now: float) -> None:
        """Handle the datagrams of one batch."""

    @abstractmethod
    def trouble(self, code: int) -> None:
        """Handle an errno that the socket reported, for a send or instead of a datagram."""

    def send(self, wire: bytes, peer: bytes) -> None:
        """Queue a datagram; the queue leaves in the loop's next turn."""
        wires = self._wires
        if not wires:
            self._loop.call_soon(self._flush)
        elif len(wires) >= QUEUE:
            self.counts["dropped"] += 1
            return
        wires.append(wire)
        self._peers.append(peer)

    def pause(self) -> None:
        """Receive nothing more; what is sent still leaves, and what waits is there for whoever reads next."""
        self._paused = True
        self._loop.remove_reader(self._fd)

    def close(self) -> None:
        """Send what is queued, as far as the kernel takes it now, and close the socket."""
        if self._fd < 0:
            return
        self._flush()
        self.pause()
        self._loop.remove_writer(self._fd)
        self._fd = -1
        self._blocked = False
        self._wires.clear()
        self._peers.clear()
        self._sock.close()

    def _readable(self) -> None:
        for _ in range(ROUNDS):
            if self._fd < 0 or self._paused:
                return
            try:
                wires = self._receiver.receive(self._fd)
            except OSError as error:
                self._loop.call_soon(self._watch)
                self.trouble(error.errno or 0)
                return
            self.take(wires, self._loop.time())
            if len(wires) < BATCH:
                return

    def _watch(self) -> None:
        """Watch the socket anew: uvloop forgets reader and writer of a descriptor that reported an error."""
        if self._fd >= 0 and not self._paused:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._loop.add_reader(self._fd, self._readable)
            if self._blocked:
                self._loop.add_writer(self._fd, self._flush)

    def _flush(self) -> None:
        """Send the queue; what `trouble` sends meanwhile waits for the next turn."""
        wires, peers = self._wires, self._peers
        self._wires, self._peers = [], []  # taken out first: whatever happens below, the next send schedules
        at = 0
        while at < len(wires) and self._fd >= 0:
            sent = self._sender.send(self._fd, wires[at : at + BATCH], peers[at : at + BATCH])
            if sent > 0:
                at += sent
                self.used = True
                self.counts["sent"] += sent
            elif sent in _LATER:
                self._wires[:0], self._peers[:0] = wires[at:], peers[at:]
                break
            else:
                at += 1
                self.counts["refused"] += 1
                self.trouble(-sent)
        self._await_room()

    def _await_room(self) -> None:
        """Watch for room in the send buffer exactly while something waits for it."""
        blocked = bool(self._wires) and self._fd >= 0
        if blocked is not self._blocked:
            self._blocked = blocked
            if blocked:
                self._loop.add_writer(self._fd, self._flush)
            else:
                self._loop.remove_writer(self._fd)


class UdpListener(Datagrams):
    """A socket that clients send queries to. Its peers are what `mmsg` calls so."""

    def __init__(self, sock: socket.socket, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> None:
        """Serve a bound, non-blocking socket of either family, dual-stack ones included."""
        enlarge(sock)
        layout = layout_of(sock)
        self._exchange = exchange
        self._address = layout.address
        self._wide = sock.family == socket.AF_INET6
        self._complaints = Complaints(f"UDP {with_port(*sock.getsockname()[:2])}")
        counts = dict.fromkeys(COUNTS, 0)
        super().__init__(sock, Receiver(LARGEST_QUERY, layout), Sender(layout), loop, counts)

    def take(self, wires: Sequence[bytes], now: float) -> None:
        """Ask the exchange about each datagram and do what it says."""
        self.counts["oversize"] = self._receiver.oversize
        self.ask(zip(wires, self._receiver.peers(len(wires)), strict=True), now)

    def ask(self, datagrams: Iterable[tuple[bytes, bytes]], now: float) -> None:
        """Ask the exchange about each (datagram, peer) and do what it says."""
        query, address, wide = self._exchange.query, self._address, self._wide
        for wire, peer in datagrams:
            if not (peer[2] or peer[3]):  # its port
                self.counts["portless"] += 1
                continue
            source = peer[address]
            try:
                action = query(wire, unmapped(source) if wide else source, self, peer, now, stream=False)
                if action is not None:
                    sink, reply, to = action
                    sink.send(reply, to)
            except Exception as error:
                self.counts["errors"] += 1
                self._complaints.note(type(error).__name__, now, error)

    def trouble(self, code: int) -> None:
        """Count it only: what the network says about one client's datagram is no concern of the others."""


def open_udp(host: str, port: int) -> socket.socket:
    """Return a socket for a UdpListener; NetworkError or RightsError where that cannot be."""
    return bound(host, port, socket.SOCK_DGRAM)
