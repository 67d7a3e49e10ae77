"""Handing the listening sockets over to another instance of this program: an upgrade loses no query.

The instance that serves offers itself on a unix socket in the folder of its state. The one that is to
replace it connects there and goes through two steps, each one octet with one answer:

    PREPARE   The old one takes nothing out of the sets from here on, writes its state to disk, and answers
              with its listening sockets (SCM_RIGHTS, unix(7)). It goes on serving. The new one reads the
              state, reads the sets back, and gets ready.
    TAKE      The old one stops reading the sockets, writes what is new to disk, lets go of the folder, and
              answers. It finishes what it has in flight, and ends, which closes the connection. The new one
              reads what is new, and serves.

Both have the same sockets, not two that share a port: what the kernel has queued for one is queued for the
other, datagrams as well as connections that nobody has accepted yet. With SO_REUSEPORT each socket has a
queue of its own, and what waits in that of the old one is lost when it closes.

If the new one goes away before TAKE, or takes too long, the old one goes on as if nothing had been. If the
old one goes away, the new one has the sockets. The lock on the folder tells the new one which it was.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from dnsproxy.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

NAME: Final = "handover.sock"
PREPARE, TAKE = b"P", b"T"
PIECE: Final = 64  # descriptors in one message; the kernel takes 253
LIMIT: Final = 120.0  # seconds that the old one waits for TAKE; until then it takes nothing out of the sets
PATIENCE: Final = 30.0  # seconds that the new one waits for an answer: a large state takes a while to write


async def offer(
    folder: Path,
    prepare: Callable[[], Awaitable[Sequence[socket.socket]]],
    take: Callable[[], Awaitable[None]],
    resume: Callable[[], None],
) -> None:
    """Wait for an instance that takes over; once it has, wait to be cancelled, which tells it that we end.

    `prepare` returns the listening sockets, `take` lets go of everything; `resume` undoes `prepare` for a new
    instance that went away. The folder must be ours: a socket that is there already is a leftover.
    """
    loop = asyncio.get_running_loop()
    with _listening(folder) as listener:
        while True:
            await _readable(loop, listener)
            with listener.accept()[0] as peer:
                peer.setblocking(False)
                if await _hand_over(loop, peer, prepare, take):
                    await loop.create_future()
            resume()


async def _readable(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
    """Wait for a connection; `loop.sock_accept` would lose one that comes while it is cancelled."""
    calls = asyncio.Event()
    loop.add_reader(listener, calls.set)
    try:
        await calls.wait()
    finally:
        loop.remove_reader(listener)


async def _hand_over(
    loop: asyncio.AbstractEventLoop,
    peer: socket.socket,
    prepare: Callable[[], Awaitable[Sequence[socket.socket]]],
    take: Callable[[], Awaitable[None]],
) -> bool:
    """Go through both steps; False if the other side went away, or fell asleep, before the second."""
    with suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(LIMIT):
            if await loop.sock_recv(peer, 1) != PREPARE:
                return False
        _give(peer, await prepare())
        async with asyncio.timeout(LIMIT):
            if await loop.sock_recv(peer, 1) != TAKE:
                return False
        await take()
        with suppress(OSError):  # it has the sockets, whether it hears this or not
            await loop.sock_sendall(peer, TAKE)
        return True
    return False


@contextmanager
def _listening(folder: Path) -> Iterator[socket.socket]:
    with _address(folder) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with suppress(FileNotFoundError):
            os.unlink(address)  # noqa: PTH108 - an address, by way of a descriptor
        before = os.umask(0o177)
        try:
            listener.bind(address)
        finally:
            os.umask(before)
        listener.listen(1)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with suppress(FileNotFoundError):
                os.unlink(address)  # noqa: PTH108


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield the socket's address by way of a descriptor of its folder: an address holds 107 octets only."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)


def _give(peer: socket.socket, sockets: Sequence[socket.socket]) -> None:
    """Send sockets, a piece at a time, after their number. They are few, so the buffer takes them at once."""
    peer.send(len(sockets).to_bytes(2, "big"))
    descriptors = [each.fileno() for each in sockets]
    for at in range(0, len(descriptors), PIECE):
        socket.send_fds(peer, [PREPARE], descriptors[at : at + PIECE])


class Handover:
    """The side that takes over. Blocking: for a thread. Every method raises NetworkError."""

    def __init__(self, folder: Path) -> None:
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._peer.settimeout(PATIENCE)
        try:
            with _address(folder) as address:
                self._peer.connect(address)
        except OSError as error:
            self._peer.close()
            message = f"the instance that uses {folder} does not hand over ({error.strerror}); stop it first"
            raise NetworkError(message) from error

    def prepare(self) -> list[socket.socket]:
        """Return the listening sockets of the other instance, which goes on serving them."""
        sockets: list[socket.socket] = []
        with _told(), ExitStack() as undo:
            self._peer.sendall(PREPARE)
            count = int.from_bytes(_exactly(self._peer, 2), "big")
            while len(sockets) < count:
                data, descriptors, _, _ = socket.recv_fds(self._peer, 1, PIECE)
                found = [socket.socket(fileno=descriptor) for descriptor in descriptors]
                for each in found:
                    undo.callback(each.close)
                    each.setblocking(False)
                    each.set_inheritable(False)
                sockets += found
                if not data:
                    raise ConnectionError("it went away")
            undo.pop_all()
        return sockets

    def take(self) -> None:
        """Return when the other instance has stopped reading the sockets and has let go of its state.

        It may have gone away instead: then nobody reads them either.
        """
        with suppress(ConnectionError), _told():
            self._peer.sendall(TAKE)
            self._peer.recv(1)

    def wait(self) -> None:
        """Return when the other instance has ended, or does not within `PATIENCE`."""
        with suppress(OSError):
            self._peer.recv(1)

    def close(self) -> None:
        """Let go of the other instance; if it was not taken over, it goes on."""
        self._peer.close()


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = peer.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("it went away")
    return data


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise NetworkError(f"the other instance does not answer within {PATIENCE:g} s") from error
    except OSError as error:
        raise NetworkError(f"the other instance does not hand over: {error.strerror or error}") from error
