"""The addresses of this host, and each change of them, from the kernel by netlink.

The sockets live on a thread of their own with a plain loop, so that a host with thousands of addresses
holds nobody up, and what they find is handed over to the caller's loop. A burst of events is one
reading; a reading happens from time to time anyway, so that a lost event does no lasting harm.

There is one request and one kind of answer (rtnetlink(7)), so there is no library for them: pyroute2 takes
11 MB of every process that imports it.

Whatever goes wrong, new sockets are opened and everything is read again: at once when events came faster
than they were read (ENOBUFS), after a pause otherwise. What is wrong is told once until a reading succeeds.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from dnsproxy import addresses
from dnsproxy.namemanager import netlink

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from types import TracebackType

Addresses: TypeAlias = frozenset[bytes]

LOOPBACK: Addresses = frozenset(map(addresses.from_text, ("127.0.0.1", "::1")))
SETTLE = 0.1  # seconds in which further events join the same reading
RECHECK = 60.0  # seconds after which the addresses are read without an event
PAUSE = 10.0  # seconds until another try after an error
PATIENCE = 2.0  # seconds that an end waits for the thread, which holds nothing that matters

BUFFER = 1 << 20  # octets of events; the kernel allows less without CAP_NET_ADMIN

_GET_ADDRESSES, _NEW_ADDRESS = 22, 20  # RTM_GETADDR, RTM_NEWADDR; linux/rtnetlink.h
_GROUPS = 0x10 | 0x100  # the bit masks RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR
_ADDRESS, _LOCAL = 1, 2  # IFA_ADDRESS, IFA_LOCAL; linux/if_addr.h
_ATTRIBUTES = 8  # octets of struct ifaddrmsg, which come before them
_DATAGRAM = 1 << 16


async def changes(say: Callable[[str], None]) -> AsyncGenerator[Addresses, None]:
    """Yield the packed addresses of this host, now and after each change, until closed.

    Where netlink may not be used, `say` is told so and the loopback addresses are all there is until it may.
    """
    home = asyncio.get_running_loop()
    found: asyncio.Queue[Addresses | Exception] = asyncio.Queue()
    stopped: Future[None] = Future()

    def report(item: Addresses | Exception) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed: nobody is left to tell
            home.call_soon_threadsafe(found.put_nowait, item)

    thread = threading.Thread(target=_run, args=(report, stopped), name="addresses", daemon=True)
    thread.start()
    known: Addresses | None = None
    try:
        while True:
            item = await found.get()
            if isinstance(item, Exception):
                say(_lost(item, known))
                item = known or LOOPBACK
            if item != known:
                known = item
                yield item
    finally:
        with suppress(InvalidStateError):
            stopped.set_result(None)
        thread.join(PATIENCE)


def _lost(error: Exception, known: Addresses | None) -> str:
    kept = (
        "only loopback addresses count as this host" if known is None else "the last known ones stay in use"
    )
    return (
        f"the addresses of this host cannot be read ({error}); {kept}. "
        "Allow AF_NETLINK sockets, or give an Endpoint document with this host's addresses"
    )


def _run(report: Callable[[Addresses | Exception], None], stopped: Future[None]) -> None:
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(_keep_following(report, stopped))


async def _keep_following(report: Callable[[Addresses | Exception], None], stopped: Future[None]) -> None:
    stop = asyncio.wrap_future(stopped)
    told = False  # that something is wrong

    def found(addresses: Addresses) -> None:
        nonlocal told
        told = False
        report(addresses)

    while not stop.done():
        pause = PAUSE
        try:
            await _follow(found, stop)
        except* Exception as group:
            error = _first(group)
            if isinstance(error, OSError) and error.errno == errno.ENOBUFS:
                pause = SETTLE
            elif not told:
                told = True
                report(error)
        await asyncio.wait([stop], timeout=pause)


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error: Exception | BaseExceptionGroup[Exception] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Route:
    """A netlink socket for addresses; with `groups`, for events. All methods raise OSError."""

    def __init__(self, groups: int = 0) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self._socket.bind((0, groups))
        self._sequence = 0

    def __enter__(self) -> Route:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    async def event(self) -> None:
        """Wait for events."""
        await asyncio.get_running_loop().sock_recv(self._socket, _DATAGRAM)

    async def addresses(self) -> Addresses:
        """Return all addresses of this host."""
        self._sequence += 1
        request = netlink.Request(_GET_ADDRESSES, netlink.DUMP, None, bytes(_ATTRIBUTES - 4))
        self._socket.send(netlink.message(request, self._sequence))
        found: set[bytes] = set()
        while True:
            datagram = await asyncio.get_running_loop().sock_recv(self._socket, _DATAGRAM)
            for message in netlink.messages(datagram):
                if message.sequence != self._sequence:
                    continue  # of a reading that was given up
                if message.kind in (netlink.DONE, netlink.ERROR):
                    if number := netlink.error_number(message):
                        raise OSError(number, os.strerror(number))
                    return frozenset(found)
                if message.kind == _NEW_ADDRESS:
                    found.add(_local(message))


async def _follow(report: Callable[[Addresses], None], stop: asyncio.Future[None]) -> None:
    changed = asyncio.Event()
    with Route() as route, Route(_GROUPS) as events:
        async with asyncio.TaskGroup() as tasks:
            steps = (_listen(events, changed), _report(route, changed, report))
            running = [tasks.create_task(step) for step in steps]
            await asyncio.wait([stop])
            for task in running:
                task.cancel()


async def _listen(events: Route, changed: asyncio.Event) -> None:
    while True:
        await events.event()
        changed.set()


async def _report(route: Route, changed: asyncio.Event, report: Callable[[Addresses], None]) -> None:
    while True:
        changed.clear()
        report(await route.addresses())
        with suppress(TimeoutError):
            async with asyncio.timeout(RECHECK):  # not wait_for, which may swallow a cancellation (3.11)
                await changed.wait()
            await asyncio.sleep(SETTLE)


def _local(message: netlink.Message) -> bytes:
    """Return our own end of an address message: on a point-to-point link IFA_ADDRESS is the other end."""
    found = netlink.attributes(message.body, _ATTRIBUTES)
    return addresses.unmapped(found.get(_LOCAL) or found[_ADDRESS])


def read() -> Addresses:
    """Return the packed addresses of this host once, outside any event loop; loopback if that is denied."""
    found: list[Addresses | Exception] = []
    stopped: Future[None] = Future()

    def report(item: Addresses | Exception) -> None:
        found.append(item)
        with suppress(InvalidStateError):
            stopped.set_result(None)

    _run(report, stopped)
    first = found[0]
    return LOOPBACK if isinstance(first, Exception) else first
