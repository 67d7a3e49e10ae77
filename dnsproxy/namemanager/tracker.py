"""When to look which connections live: passes over the kernel's table, as often as it pays.

A pass is begun (its serial goes up), read in a thread, marked endpoint by endpoint in bounded steps, and only
then completed: until all that it saw is marked, nobody may take a missing mark for the end of a connection.
A pass that failed, saw only part of the table, or was overtaken by another table of endpoints marks what it
saw and completes nothing. Neither does one that cannot have seen what matters, because the kernel does not
track a family of which there are zombies.

While there are no zombies there is no pass. When the first appear one comes at once, others after an
interval that adapts as Cilium's does: if the last pass found more than a quarter of the zombies without a
connection it shrinks by that share, by 90 % at most; if less than 5 %, it grows by half; if none, it stays.
Cilium's bounds are 10 s and 12 h; with ours nobody waits half a day. A rest is ten times as long as the pass
before it at least, so a huge table costs no more than a tenth of our time.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dnsproxy.cache.gc import Caches
    from dnsproxy.endpoints import EndpointTable

POLL: Final = 1.0  # seconds between two looks for the first zombie
PIECE: Final = 1000  # zombies per turn of the loop
MANY, FEW, MOST = 0.25, 0.05, 0.9  # shares of zombies without a connection
SLOWER: Final = 1.5
RESTS: Final = 10  # the rest between two passes, in times of what the last one took

_FAMILIES = {4: "IPv4", 16: "IPv6"}

log = structlog.get_logger()


class Reading(Protocol):
    """What one pass saw; see conntrack.py."""

    @property
    def live(self) -> Mapping[str, set[bytes]]: ...  # noqa: D102
    @property
    def entries(self) -> int: ...  # noqa: D102
    @property
    def whole(self) -> bool: ...  # noqa: D102
    @property
    def untracked(self) -> frozenset[int]: ...  # noqa: D102


class Tracker:
    """The passes. `shortest` and `longest` bound the seconds between two; `clock` is that of the caches.

    `read` passes over the table: it is given what tells the key of an address's endpoint, to be called in any
    thread, and raises DnsproxyError or OSError where it cannot. `endpoints` gives the table of now.

    `failures` counts passes that completed nothing, `seconds` and `entries` are those of the last one read,
    `idle` is the share of zombies to which the last completed one saw no connection; `problem` says why
    connections are not observed, None if they are.
    """

    def __init__(
        self,
        read: Callable[[Callable[[bytes], str | None]], Awaitable[Reading]],
        caches: Caches,
        endpoints: Callable[[], EndpointTable],
        *,
        shortest: float = 30.0,
        longest: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures = self.entries = 0
        self.seconds = self.idle = 0.0
        self.problem: str | None = None
        self._read = read
        self._caches = caches
        self._passes = caches.passes
        self._endpoints = endpoints
        self._bounds = (shortest, longest)
        self._clock = clock
        self._interval = shortest
        self._one_at_a_time = asyncio.Lock()

    async def run(self) -> None:
        """Pass, for ever. The first pass is at once, so that missing rights are said at the start."""
        while True:
            await self.pass_now()
            while (left := self._left()) > 0:  # noqa: ASYNC110 -- zombies come without an event
                await asyncio.sleep(left)

    async def pass_now(self) -> bool:
        """Pass, after the one that may be under way; tell whether it completed. All it saw is marked then."""
        async with self._one_at_a_time:
            serial, started, table = self._passes.begin(), self._clock(), self._endpoints()
            try:
                reading = await self._read(partial(_key, table))
            except (DnsproxyError, OSError) as error:
                return self._failed(str(error))
            self.seconds, self.entries = self._clock() - started, reading.entries
            zombies, seen, octets = await self._mark(serial, started, reading.live)
            if problem := _problem(reading, octets):
                return self._failed(problem)
            if self._endpoints() is not table:
                return self._failed(None)
            return self._completed(serial, started, (zombies - seen) / zombies if zombies else 0.0)

    def _left(self) -> float:
        """Return the seconds until the next pass, or until the next look for a zombie."""
        if not any(self._caches.zombies.values()):
            self._interval, self._passes.next_at = self._bounds[0], None
            return POLL
        return 0.0 if self._passes.next_at is None else self._passes.next_at - self._clock()

    async def _mark(
        self, serial: int, started: float, live: Mapping[str, set[bytes]]
    ) -> tuple[int, int, set[int]]:
        """Mark what a pass saw; return the zombies, those seen, and the octets of their addresses."""
        total, seen, octets = 0, 0, set()
        for key, zombies in list(self._caches.zombies.items()):
            for _ in zombies.mark(serial, started, live.get(key, ())):
                await asyncio.sleep(0)
            for zombie in zombies:
                total += 1
                seen += zombie.marked >= serial
                octets.add(len(zombie.address))
                if not total % PIECE:
                    await asyncio.sleep(0)
        return total, seen, octets

    def _completed(self, serial: int, started: float, idle: float) -> bool:
        self.idle = idle
        self._interval = adapted(self._interval, idle, *self._bounds)
        self._passes.complete(serial, started, self._next_at())
        self._passes.observing = True
        if self.problem is not None:
            log.info("connections are observed again")
            self.problem = None
        return True

    def _failed(self, problem: str | None) -> bool:
        """Note that a pass completed nothing: for a reason that may last, or (None) by chance."""
        self.failures += 1
        self._passes.next_at = self._next_at()
        if problem is not None:
            self._passes.observing = False
            if self.problem is None:
                log.warning("connections are not observed: addresses stay for a fixed time", reason=problem)
            self.problem = problem
        return False

    def _next_at(self) -> float:
        return self._clock() + max(self._interval, RESTS * self.seconds)


def adapted(interval: float, idle: float, shortest: float, longest: float) -> float:
    """Return the next interval, where a pass found this share of the zombies without a connection."""
    if idle > MANY:
        interval *= 1 - min(idle, MOST)
    elif 0 < idle < FEW:
        interval *= SLOWER
    return min(max(interval, shortest), longest)


def _key(table: EndpointTable, address: bytes) -> str | None:
    endpoint = table.find(address)
    return None if endpoint is None else endpoint.key


def _problem(reading: Reading, octets: set[int]) -> str | None:
    """Say why a pass cannot have seen the connections to addresses of these lengths."""
    if not reading.whole:
        return "the kernel's list of connections changes faster than it can be read"
    blind = " and ".join(_FAMILIES[each] for each in sorted(reading.untracked & octets))
    if not blind:
        return None
    return (
        f"the kernel does not track {blind} connections in this network namespace, as no rule asks for it"
        " (or one exempts loopback, where this is tried): add one like `ct state established,related accept`"
    )
