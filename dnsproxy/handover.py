"""Handing the listening sockets over to another instance of this program: an upgrade loses no query.

The instance that serves offers itself on a unix socket in the folder of its state. The one that is to
replace it connects there and goes through these steps, one octet each, the first two with an answer:

    PREPARE   The old one takes nothing out of the sets from here on, writes its state to disk, and answers
              with its listening sockets (SCM_RIGHTS, unix(7)). It goes on serving. The new one reads the
              state, reads the sets back, and gets ready.
    TAKE      The old one stops reading the sockets, writes what is new to disk, lets go of the folder, and
              answers. The new one reads what is new, serves, and confirms that.
    CONFIRM   The old one finishes what it has in flight, and ends, which closes the connection. Only then
              the new one takes anything out of the sets.

Both have the same sockets, not two that share a port: what the kernel has queued for one is queued for the
other, datagrams as well as connections that nobody has accepted yet. With SO_REUSEPORT each socket has a
queue of its own, and what waits in that of the old one is lost when it closes.

If the new one goes away before it has confirmed, or takes too long, the old one goes on, reading the sockets
again if need be. If the old one goes away, the new one has the sockets. The lock on the folder tells the new
one which of the two it was.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from dnsproxy.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

NAME: Final = "handover.sock"
PREPARE, TAKE, CONFIRM = b"P", b"T", b"C"
STARTING: Final = 5.0  # seconds in which an instance that has just begun may come to offer itself
PIECE: Final = 64  # descriptors in one message; the kernel takes 253
LIMIT: Final = 120.0  # seconds that the old one waits for a step; meanwhile it takes nothing out of the sets
PATIENCE: Final = 30.0  # seconds that the new one waits for an answer: a large state takes a while to write


async def offer(
    folder: Path,
    prepare: Callable[[], Awaitable[Sequence[socket.socket]]],
    take: Callable[[], Awaitable[None]],
    resume: Callable[[], Awaitable[None]],
    done: Callable[[], None],
) -> None:
    """Wait for an instance that takes over; once it serves, wait to be cancelled, which tells it that we end.

    `prepare` returns the listening sockets, `take` stops reading them and lets go of everything; `resume`
    undoes both for a new instance that went away; `done` is told once the new one serves. The folder must be
    ours: a socket that is there is a leftover. OSError if none can be made there.
    """
    loop = asyncio.get_running_loop()
    with _listening(folder) as listener:
        while True:
            await _readable(loop, listener)
            with listener.accept()[0] as peer:
                peer.setblocking(False)
                if await _hand_over(loop, peer, prepare, take):
                    done()
                    await loop.create_future()
            await resume()


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
    """Go through the steps; False if the other side went away, or fell asleep, before the last."""
    with suppress(OSError):  # TimeoutError is one
        if not await _says(loop, peer, PREPARE):
            return False
        _give(peer, await prepare())
        if not await _says(loop, peer, TAKE):
            return False
        await take()
        await loop.sock_sendall(peer, TAKE)
        return await _says(loop, peer, CONFIRM)
    return False


async def _says(loop: asyncio.AbstractEventLoop, peer: socket.socket, word: bytes) -> bool:
    async with asyncio.timeout(LIMIT):
        return await loop.sock_recv(peer, 1) == word


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
        ours = os.stat(address).st_ino  # noqa: PTH116
        listener.listen(1)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with suppress(FileNotFoundError):
                if os.stat(address).st_ino == ours:  # noqa: PTH116 - else it is our successor's by now
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
        self._sockets: list[socket.socket] = []
        until = time.monotonic() + STARTING
        while True:
            try:
                self._peer = _connected(folder)
            except OSError as error:
                if time.monotonic() > until:
                    message = f"the instance that uses {folder} does not hand over"
                    raise NetworkError(f"{message} ({error.strerror}); stop it first") from error
                time.sleep(0.02)
            else:
                return

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
        self._sockets = sockets
        return sockets

    def take(self) -> None:
        """Return when the other instance has stopped reading the sockets and has let go of its state.

        It may have gone away instead: then nobody reads them either.
        """
        with _told(), suppress(ConnectionError):
            self._peer.sendall(TAKE)
            self._peer.recv(1)

    def confirm(self, serving: Sequence[socket.socket]) -> None:
        """Tell the other instance that its sockets are read again; those that are not any more are closed."""
        for sock in self._sockets:
            if sock not in serving:
                sock.close()
        with suppress(OSError):
            self._peer.sendall(CONFIRM)

    def wait(self) -> None:
        """Return when the other instance has ended, or does not within `PATIENCE`."""
        with suppress(OSError):
            self._peer.recv(1)

    def close(self) -> None:
        """Let go of the other instance; if it was not taken over, it goes on."""
        self._peer.close()


def _connected(folder: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(PATIENCE)
    try:
        with _address(folder) as address:
            peer.connect(address)
    except OSError:
        peer.close()
        raise
    return peer


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
