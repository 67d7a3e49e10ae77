"""All the records that are kept: which they are, what they share, and what people ask of them.

Each record has a task of its own, so one that hangs, is halted or breaks delays no other; what such a task
does stands in `record.py`. A changed document, `force`, `resume` and `look_again` wake it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import structlog

from dnsproxy.dyndns import plan
from dnsproxy.dyndns.plan import Clock, Phase, State
from dnsproxy.dyndns.record import PATIENCE, Record
from dnsproxy.dyndns.status import DomainStatus, Event, View, status
from dnsproxy.errors import DnsproxyError
from dnsproxy.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from dnsproxy.dyndns.documents import Domain, Missing, Place
    from dnsproxy.dyndns.outcomes import Found, Password, Reply, Request, Search

SPREAD: Final = 2.0  # seconds between the first passes of two records
EVENTS: Final = 1000  # kept for those who look
PREFIX: Final = "dyndns/"  # of the keys in the memory
BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds of a request
HOOKED: Final = {"DynDnsUpdateCompleted", "DynDnsUpdateHalted"}

log = structlog.get_logger("dnsproxy")


class Detector(Protocol):
    """Finds our addresses (detect.py)."""

    async def find(self, search: Search) -> Found:
        """Return what is known of each family."""


class Publisher(Protocol):
    """Makes one update (strato.py)."""

    async def publish(self, request: Request) -> Reply:
        """Return what came of it."""


class Memory(Protocol):
    """Values that outlive the process. Both raise DnsproxyError."""

    async def load(self) -> Mapping[str, bytes]:
        """Return all values by key."""

    async def remember(self, key: str, value: bytes | None) -> None:
        """Keep a value; it is on disk when this returns. None forgets it."""


Passwords: TypeAlias = "Callable[[Place], Awaitable[Password | Missing]]"
Hook: TypeAlias = "Callable[[Event], Awaitable[None]]"


class UnknownDomainError(DnsproxyError):
    """A name under which there is no record."""


class Sync:
    """All records. `run` keeps them until cancelled; `update` says which they are.

    `clock` is monotonic, `wall` in seconds since 1970; `boot` names the boot to which `clock` belongs, empty
    if unknown. Without a `memory` every start waits as long as two requests have to be apart.

    `updates` counts replies by (host, code), `checks` findings by (family, result), `seconds` are those of
    requests, `events` the last ones.
    """

    def __init__(
        self,
        detector: Detector,
        publisher: Publisher,
        passwords: Passwords,
        memory: Memory | None,
        *,
        hook: Hook | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        boot: str = "",
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.detector = detector
        self.publisher = publisher
        self.passwords = passwords
        self.updates: Counter[tuple[str, str]] = Counter()
        self.checks: Counter[tuple[str, str]] = Counter()
        self.seconds = Histogram(BOUNDS)
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.clock = clock
        self.chance = chance
        self.started = clock()
        self.problem: str | None = None  # of the memory
        self._memory = memory
        self._wall = wall
        self._boot = boot
        self._hook = hook
        self._hooked: deque[Event] = deque(maxlen=EVENTS)
        self._hook_due = asyncio.Event()
        self._due = asyncio.Event()
        self._wanted: dict[str, Domain] = {}
        self._records: dict[str, Record] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rows: dict[str, bytes] = {}  # what is on disk, or should be
        self._loaded = False
        self._invalid = ""

    # -- from outside

    def update(self, domains: Iterable[Domain]) -> None:
        """Keep these records from now on, and no others."""
        self._invalid = ""
        self._wanted = {domain.hostname: domain for domain in domains}
        self._due.set()

    def invalid(self, message: str) -> None:
        """Say, once, that the documents have faults, so that those of before stay in force."""
        if message != self._invalid:
            self._invalid = message
            self.tell(Event(self._wall(), "Warning", "ConfigInvalid", "", "", message))

    def look_again(self) -> None:
        """Look for addresses now: there is reason to think that they have changed."""
        for record in self._records.values():
            record.wake()

    def force(self, name: str) -> str | None:
        """Have a record sent though nothing differs; return why not, None if it will be."""
        return self._record(name).force()

    def resume(self, name: str) -> str | None:
        """End the hold of a record; return why not, None if it is ended."""
        return self._record(name).resume()

    def views(self) -> list[tuple[View, DomainStatus]]:
        """Return what is known of each record, sorted by host name."""
        clock = self.now()
        return [(each.view, status(each.view, clock)) for _, each in sorted(self._records.items())]

    def problems(self) -> list[str]:
        """Return a sentence for each record that is not as it shall be."""
        return [
            f"{view.domain.title}: {view.phase.value}: {shown.message or 'see its events'}"
            for view, shown in self.views()
            if shown.last_result is False and view.phase is not Phase.SPACED
        ]

    async def run(self) -> None:
        """Keep the records until cancelled."""
        await self._load()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_hooks(), name="dyndns hooks")
            while True:
                self._due.clear()
                await self._reconcile(tasks)
                await self._due.wait()

    # -- for the records

    def now(self) -> Clock:
        """Return both clocks."""
        return Clock(self.clock(), self._wall(), self._boot)

    def tell(self, event: Event) -> None:
        """Publish an event."""
        self.events.append(event)
        level = log.warning if event.type == "Warning" else log.info
        level("dyndns", reason=event.reason, object=event.object, fqdn=event.fqdn, message=event.message)
        if self._hook is not None and event.reason in HOOKED:
            self._hooked.append(event)
            self._hook_due.set()

    async def remember(self, hostname: str, state: State) -> bool:
        """Store a state; tell whether it is on disk."""
        self._rows[PREFIX + hostname] = row = plan.to_row(state, self.now())
        if self._memory is None:
            return False
        try:
            await self._memory.remember(PREFIX + hostname, row)
        except Exception as error:  # whatever keeps it from the disk, the record goes on
            self._complain(str(error) or type(error).__name__)
            return False
        self.problem = None
        return True

    # -- inside

    def _record(self, name: str) -> Record:
        wanted = name.lower().removesuffix(".")
        for record in self._records.values():
            domain = record.view.domain
            names = (domain.hostname, domain.fqdn.lower(), domain.name, f"{domain.namespace}/{domain.name}")
            if wanted in names:
                return record
        known = ", ".join(sorted(self._records)) or "none"
        raise UnknownDomainError(f"{name!r} is no domain that is kept here; known: {known}")

    async def _load(self) -> None:
        if self._memory is None:
            return
        try:
            loaded = await self._memory.load()
        except Exception as error:
            self._complain(str(error) or type(error).__name__)
            return
        self._rows = {key: row for key, row in loaded.items() if key.startswith(PREFIX)}
        self._loaded = True
        clock = self.now()
        for key, row in list(self._rows.items()):
            gone = key.removeprefix(PREFIX) not in self._wanted
            if gone and plan.is_outdated(plan.from_row(row, clock), clock.now):
                del self._rows[key]
                with suppress(Exception):
                    await self._memory.remember(key, None)

    def _state(self, hostname: str) -> State:
        row = self._rows.get(PREFIX + hostname)
        if row is None and not self._loaded:  # nobody knows whether a request was made a moment ago
            return State(attempt_at=self.started)
        return plan.from_row(row, self.now())

    async def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        """Make the tasks those of the wanted records."""
        wanted = dict(self._wanted)
        gone = [self._tasks.pop(name) for name in list(self._tasks) if name not in wanted]
        for task in gone:
            task.cancel()
            log.info("a record is kept no longer; at the provider it stays as it is", task=task.get_name())
        if gone:
            await asyncio.wait(gone)
        self._records = {name: record for name, record in self._records.items() if name in wanted}
        delay = 0.0
        for hostname, domain in wanted.items():
            if hostname in self._records:
                self._records[hostname].change(domain)
                continue
            record = Record(self, View(domain, self._state(hostname)))
            self._records[hostname] = record
            task = tasks.create_task(record.run(min(delay, domain.interval)), name=f"dyndns {hostname}")
            self._tasks[hostname] = task
            delay += SPREAD

    async def _run_hooks(self) -> None:
        while True:
            await self._hook_due.wait()
            self._hook_due.clear()
            while self._hooked and self._hook is not None:
                event = self._hooked.popleft()
                try:
                    async with asyncio.timeout(PATIENCE):
                        await self._hook(event)
                except Exception as error:  # whatever a hook does, records are kept
                    log.warning(
                        "a hook failed", reason=event.reason, error=f"{type(error).__name__}: {error}"
                    )

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            log.error("the state of DynDNS cannot be kept; updates wait longer after a start", error=problem)
            self.problem = problem
