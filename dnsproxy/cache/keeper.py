"""Writing the state behind: what has changed goes to disk every few seconds, and at once at the end.

Leases that were only made longer wait a little more: a busy name is asked for many times a second, and each
answer extends its lease. A lease that is too short on disk by so much costs nothing after a crash, since a
pair outlives its lease by the grace of zombies.

The batch is gathered on the loop, in steps between which answers pass, and written in a thread. One batch is
under way at a time. What could not be written counts as changed again and goes with the next batch, so a full
disk costs nothing but age; it is said once, and once more when it is over.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import structlog

from dnsproxy import memory
from dnsproxy.cache.journal import Batch
from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dnsproxy.cache.journal import State

PERIOD: Final = 5.0  # seconds between two batches: how old the state on disk may be
EXTENDED: Final = 30.0  # seconds between two batches with longer leases

_T = TypeVar("_T")

log = structlog.get_logger("dnsproxy")


class Journal(Protocol):
    """What has changed since it was last asked."""

    def take(self, batch: Batch, offset: float) -> Iterator[None]:
        """Fill a batch in bounded steps."""

    def give_back(self, batch: Batch) -> None:
        """Count what a batch holds as changed again."""


class Store(Protocol):
    """The state on disk. Blocking, for one thread; raises DnsproxyError."""

    whole_due: bool  # the next batch has to be a whole one

    def acquire(self) -> bool:
        """Take it, so that nobody else writes; tell whether that was possible."""

    def load(self) -> State:
        """Return what is there."""

    def write(self, batch: Batch) -> None:
        """Write a batch in one transaction."""

    def remember(self, key: str, value: bytes | None) -> None:
        """Keep a value under a key; None forgets it."""

    def close(self) -> None:
        """Let go of it."""


class Keeper:
    """The task that writes the state. `written_at` is when the last batch was gathered, None before that.

    Ages are seconds of the monotonic clock; `wall` gives those since 1970, for what is written.
    """

    def __init__(
        self,
        journal: Journal,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.written_at: float | None = None
        self.batches = 0
        self.problem: str | None = None
        self.lost = False  # what was on disk could not be read
        self._journal = journal
        self._store = store
        self._clock = clock
        self._wall = wall
        self._released = False
        self._extended_at = -EXTENDED
        self._one = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")

    async def load(self) -> State:
        """Return what is on disk."""
        state = await self._in_thread(self._store.load)
        self.lost = self.lost or bool(state.notes)
        return state

    async def remember(self, key: str, value: bytes | None) -> None:
        """Keep a value under a key for another start, now; None forgets it. DnsproxyError if that fails."""
        async with self._one:
            if self._released:
                raise DnsproxyError("the state is another instance's by now")
            await self._in_thread(self._store.remember, key, value)

    async def run(self) -> None:
        """Write every few seconds until cancelled."""
        while True:
            await self.flush(extended=self._clock() - self._extended_at >= EXTENDED)
            await asyncio.sleep(PERIOD)

    async def flush(self, *, extended: bool = True) -> bool:
        """Write what has changed until now; tell whether it is on disk."""
        async with self._one:
            if self._released:
                return False
            batch, started = Batch(whole=self._store.whole_due, extended=extended), self._clock()
            if extended:
                self._extended_at = started
            written = await self._written(batch)
            if written:
                self.written_at = started
            del batch
            await self._in_thread(memory.trim)
            return written

    async def release(self) -> None:
        """Write the rest, and let go of the store; nothing is written until `resume`."""
        await self.flush()
        async with self._one:
            self._released = True
            await self._in_thread(self._store.close)

    async def resume(self) -> None:
        """Take the store again, if nobody else has it by now, and write."""
        await self._in_thread(self._store.acquire)
        self._released = False

    async def close(self) -> None:
        """Write the rest, and let go of the store for good."""
        await self.release()
        self._thread.shutdown()

    def status(self) -> dict[str, Any]:
        """Return how old the state on disk is, in seconds, how often it was written, and what is wrong."""
        age = None if self.written_at is None else self._clock() - self.written_at
        return {"age": age, "batches": self.batches, "problem": self.problem}

    async def _written(self, batch: Batch) -> bool:
        done = False
        try:
            for _ in self._journal.take(batch, self._wall() - self._clock()):
                await asyncio.sleep(0)
            if batch:
                await self._in_thread(self._store.write, batch)
                self.batches += 1
            done = True
        except DnsproxyError as error:
            self._complain(str(error))
        else:
            self._relax()
        finally:
            if not done:  # also when cancelled: the last flush has it then
                self._journal.give_back(batch)
        return done

    async def _in_thread(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Run a blocking call to its end, whoever is cancelled meanwhile."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        return await asyncio.shield(running)

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            log.error("the state cannot be written; it is kept in memory and tried again", error=problem)
            self.problem = problem

    def _relax(self) -> None:
        if self.problem is not None:
            log.info("the state is written again")
            self.problem = None
