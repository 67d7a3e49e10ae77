"""What the transport's tests use in place of an exchange, a client and an upstream server."""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager, suppress

from dnsproxy.transport.tcp import framed

PATIENCE = 20.0  # seconds until a test that waits for something has failed


def message(number, size=40):
    """A message that a header fits in, told apart by its ID."""
    return number.to_bytes(2, "big") + bytes(size - 2)


async def soon(awaitable):
    async with asyncio.timeout(PATIENCE):
        return await awaitable


async def until(condition):
    """Let the loop turn until something has come true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for knows nothing of tests
            await asyncio.sleep(0)


def reply_to(wire):
    """The same message with QR set."""
    return wire[:2] + bytes((wire[2] | 0x80,)) + wire[3:]


class Echo:
    """Answers every query at once; a query that starts with `!!` raises, one with `..` gets silence."""

    def __init__(self):
        self.asked = []

    def query(self, wire, source, sink, peer, now, *, stream):
        assert isinstance(now, float)
        self.asked.append((wire, source, stream))
        if wire.startswith(b"!!"):
            raise RuntimeError("made to fail")
        if wire.startswith(b"..") or len(wire) < 12:
            return None
        return sink, reply_to(wire), peer


class Later:
    """Keeps queries until the test releases them."""

    def __init__(self):
        self.waiting = []
        self.most = 0
        self.asked = 0

    def query(self, wire, source, sink, peer, now, *, stream):
        self.waiting.append((sink, wire, peer))
        self.asked += 1
        self.most = max(self.most, sum(other is sink for other, _, _ in self.waiting))
        return self, wire, peer

    def send(self, wire, peer):
        """Be the upstream that the query went to."""

    def release(self, index=0):
        sink, wire, peer = self.waiting.pop(index)
        sink.send(reply_to(wire), peer)


class Forwarder:
    """Sends every query on to one server under its own IDs, and every answer back."""

    def __init__(self, server):
        self.server = server
        self.answers = []
        self.losses = []
        self.strays = 0
        self.retry = False  # send what was lost again, over the same server
        self._count = 0

    def query(self, wire, source, sink, peer, now, *, stream):
        return self.forward(wire, sink, peer, stream=stream)

    def forward(self, wire, sink, peer, *, stream=False):
        self._count += 1
        channel = self.server.tcp if stream else self.server.udp[self._count % len(self.server.udp)]
        ident = self._count.to_bytes(2, "big")
        channel.pending[ident] = (wire, sink, peer)
        return channel.sink, ident + wire[2:], None

    def answer(self, channel, wire, now):
        if wire[2:4] == b"!!":
            raise RuntimeError("made to fail")
        query, sink, peer = channel.pending.pop(wire[:2], (None, None, None))
        if query is None:
            self.strays += 1
            return None
        self.answers.append(wire)
        return sink, query[:2] + wire[2:], peer

    def lost(self, channel, now):
        pending = list(channel.pending.values())
        channel.pending.clear()
        self.losses.append((channel, len(pending)))
        if self.retry:
            self.retry = False
            return [self.forward(*each, stream=channel.stream) for each in pending]
        return [(sink, b"lost" + query, peer) for query, sink, peer in pending]


class Inbox:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.got = []

    def send(self, wire, peer):
        self.got.append((wire, peer))


def one_port(host="127.0.0.1"):
    """A UDP and a TCP socket on one port that is free for both."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        datagrams, stream = (
            socket.socket(family, socket.SOCK_DGRAM),
            socket.socket(family, socket.SOCK_STREAM),
        )
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        datagrams.bind((host, 0))
        try:
            stream.bind(datagrams.getsockname())
        except OSError:  # some other connection has it
            datagrams.close()
            stream.close()
        else:
            return datagrams, stream


@contextmanager
def udp_client(port, host="127.0.0.1", source=None):
    """A connected, non-blocking UDP socket: it gets only what comes from the very address that it asks."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        sock.setblocking(False)
        if source:
            sock.bind((source, 0))
        sock.connect((host, port))
        yield sock


async def ask(sock, wire):
    sock.send(wire)
    return await soon(asyncio.get_running_loop().sock_recv(sock, 65_535))


class TcpClient:
    """One end of a DNS stream, on asyncio's own streams and with framing of its own."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port, source="127.0.0.1"):
        return cls(*await soon(asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))))

    def send(self, *wires):
        self.writer.write(b"".join(map(framed, wires)))

    async def receive(self):
        length = int.from_bytes(await soon(self.reader.readexactly(2)), "big")
        return await soon(self.reader.readexactly(length))

    async def ended(self):
        """Wait for the other side to close, nothing more being sent; a reset counts."""
        try:
            return await soon(self.reader.read()) == b""
        except ConnectionError:
            return True

    async def close(self):
        self.writer.close()
        with suppress(ConnectionError):
            await soon(self.writer.wait_closed())
