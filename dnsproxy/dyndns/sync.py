"""The tasks that keep records right: find the addresses, plan, publish, plan, sleep.

Each record has a task of its own, so one that hangs, is halted or breaks delays no other. A task does one
pass after the other; a changed document, `force`, `resume` and `look_again` wake it. What a pass decides
stands in `plan.py`; here is only the order of things:

    disabled?  password?  halted?  find  decide  note that a request is made  publish  note the answer

The note on disk comes before the request, and a request that could not be noted is made only when this
process has run for as long as two requests have to be apart: a process that dies and comes back all the time
can then neither forget nor repeat.

Events come on transitions; what was told last is part of what is stored, so that a restart repeats nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from base64 import b64encode
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias
from urllib.parse import quote

import structlog

from dnsproxy.dyndns import plan
from dnsproxy.dyndns.documents import Missing
from dnsproxy.dyndns.outcomes import Code, Found, Known, NotManaged, Password, Reply, Unavailable, Why
from dnsproxy.dyndns.plan import RULES, Clock, Kind, Phase, Publish, Rest, State, Target
from dnsproxy.dyndns.status import DomainStatus, Event, View, advice, status, trouble
from dnsproxy.errors import DnsproxyError
from dnsproxy.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from dnsproxy.dyndns.documents import Domain, Place
    from dnsproxy.dyndns.outcomes import Finding, Request, Search, Wanted

PATIENCE: Final = 120.0  # seconds for a search or a request; both have time-outs of their own, below this
SPREAD: Final = 2.0  # seconds between the first passes of two records
NAP: Final = 60.0  # seconds of a sleep after which the clocks are compared
LEAP: Final = 60.0  # seconds that the wall clock is ahead of us after a suspend
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
        found = [(view.domain.title, shown) for view, shown in self.views() if shown.last_result is False]
        return [f"{title}: {shown.phase}: {shown.message or 'no change yet'}" for title, shown in found]

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
        except DnsproxyError as error:
            self._complain(str(error))
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
        except DnsproxyError as error:
            self._complain(str(error))
            return
        self._rows = {key: row for key, row in loaded.items() if key.startswith(PREFIX)}
        self._loaded = True
        clock = self.now()
        for key, row in list(self._rows.items()):
            gone = key.removeprefix(PREFIX) not in self._wanted
            if gone and plan.is_outdated(plan.from_row(row, clock), clock.now):
                del self._rows[key]
                with suppress(DnsproxyError):
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


class Record:
    """One record and its task. `view` is all that is known of it."""

    def __init__(self, sync: Sync, view: View) -> None:
        self.view = view
        self._sync = sync
        self._stored = view.state
        self._wake = asyncio.Event()
        self._tries = 0  # searches that found nothing, in a row

    # -- from outside

    def wake(self) -> None:
        """Have a pass made now."""
        self._wake.set()

    def change(self, domain: Domain) -> None:
        """Take another document."""
        if domain != self.view.domain:
            self._show(domain=domain)
            self.wake()

    def force(self) -> str | None:
        """Have a request made though nothing differs; return why not."""
        if not self.view.domain.enabled:
            return "the record is disabled"
        state = plan.forced(self.view.state, self._sync.clock())
        if isinstance(state, str):
            return state
        self._show(state=state)
        self.wake()
        return None

    def resume(self) -> str | None:
        """End the hold; return why not."""
        if self.view.state.hold is None:
            return "the record is not held"
        self._resumed("resumed by hand")
        self.wake()
        return None

    # -- the task

    async def run(self, delay: float) -> None:
        """Make one pass after the other until cancelled, the first one after `delay` seconds."""
        upcoming = self._sync.clock() + delay
        while True:
            self._show(next_run=upcoming)
            await self._sleep(upcoming)
            self._wake.clear()
            try:
                upcoming = await self._pass()
            except Exception as error:  # a fault of ours in one record ends no other
                upcoming = self._broken(error)
            await self._store()

    async def _sleep(self, until: float) -> None:
        """Sleep until then, until woken, or until the wall clock says that the whole machine has slept."""
        ahead = self._ahead()
        while (left := until - self._sync.clock()) > 0 and not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, NAP)):
                    await self._wake.wait()
            if self._ahead() - ahead > LEAP:
                return

    def _ahead(self) -> float:
        clock = self._sync.now()
        return clock.wall - clock.now

    async def _pass(self) -> float:
        """Do what is to be done now, and return when to do so again."""
        domain, now = self.view.domain, self._sync.clock()
        self._show(last_loop=now)
        if not domain.enabled:
            return self._disabled(now)
        password = await self._password(domain)
        if isinstance(password, Missing):
            return self._without(password.reason, now)
        self._say("secret", "")
        fingerprint = f"{domain.fingerprint}.{password.fingerprint(domain.hostname)}"
        self._lift(fingerprint)
        hold = self.view.state.hold
        if hold is not None and hold.until is None:
            return self._rest(Rest(Phase.HALTED), domain)
        found = await self._find(domain)
        if self.view.domain is not domain:
            return self._sync.clock()  # what was looked for is not what is wanted now
        addresses = plan.addresses(found, self.view.state.accepted)
        if not addresses:
            return self._nowhere(found, domain)
        self._tries = 0
        target = Target(domain.endpoint, domain.hostname, domain.username, addresses)
        return await self._reach(target, domain, password, fingerprint)

    async def _reach(self, target: Target, domain: Domain, password: Password, fingerprint: str) -> float:
        self._say_change(target)
        decision = self._decide(target, domain)
        if isinstance(decision, Rest):
            if decision.phase is Phase.IN_SYNC:
                self._say_skipped(target)
            return self._rest(decision, domain)
        if (later := await self._noted()) is not None:
            return self._rest(Rest(Phase.SPACED, later), domain)
        reply = await self._publish(target.request(password), target.hostname, password)
        now = self._sync.clock()
        stop = domain.stop_on_abuse
        self._show(state=plan.settle(self.view.state, target, reply, now, fingerprint, stop_on_abuse=stop))
        self._say_reply(target, reply)
        after = self._decide(target, domain)
        return self._rest(after, domain) if isinstance(after, Rest) else now + plan.SPACING

    def _decide(self, target: Target, domain: Domain) -> Rest | Publish:
        return plan.decide(self.view.state, target, self._sync.clock(), domain.refresh)

    async def _noted(self) -> float | None:
        """Note on disk that a request is made now; return until when to wait if that cannot be done."""
        begun = plan.begin(self.view.state, self._sync.clock())
        safe = self._sync.started + plan.SPACING
        if await self._sync.remember(self.view.domain.hostname, begun):
            self._stored = begun
        elif self._sync.clock() < safe:
            return safe
        self._show(state=plan.begin(self.view.state, self._sync.clock()))  # the disk took its time
        return None

    # -- what the world is asked for

    async def _password(self, domain: Domain) -> Password | Missing:
        if isinstance(domain.password, Password | Missing):
            return domain.password
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._sync.passwords(domain.password)
        except TimeoutError:
            return Missing(f"{domain.password.kind} {domain.password.name}: could not be read in time")

    async def _find(self, domain: Domain) -> Found:
        """Return both families, the fixed one as it is written."""
        search, fixed = domain.search, {len(each.address): each for each in domain.fixed}
        found = Found(fixed.get(4, NotManaged()), fixed.get(16, NotManaged()))
        if search.ipv4 is not None or search.ipv6 is not None:
            looked = await self._search(self._informed(search))
            found = Found(fixed.get(4, looked.ipv4), fixed.get(16, looked.ipv6), looked.cgnat)
        for family, finding in (("ipv4", found.ipv4), ("ipv6", found.ipv6)):
            if not isinstance(finding, NotManaged):
                self._sync.checks[family, _result(finding)] += 1
        self._say_found(found)
        return found

    async def _search(self, search: Search) -> Found:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._sync.detector.find(search)
        except TimeoutError:
            late = Unavailable(Why.FAILED, f"no source answered within {PATIENCE:.0f} s")
            return Found(late if search.ipv4 else NotManaged(), late if search.ipv6 else NotManaged())

    def _informed(self, search: Search) -> Search:
        """Return the search with the addresses that were accepted last, which one answer confirms."""
        accepted = self.view.state.accepted
        known = {len(each): each for each in accepted.packed} if accepted else {}
        return replace(
            search, ipv4=_knowing(search.ipv4, known.get(4)), ipv6=_knowing(search.ipv6, known.get(16))
        )

    async def _publish(self, request: Request, hostname: str, password: Password) -> Reply:
        started = self._sync.clock()
        try:
            async with asyncio.timeout(PATIENCE):
                reply = await self._sync.publisher.publish(request)
        except TimeoutError:
            reply = Reply(Code.TIMEOUT, f"no answer within {PATIENCE:.0f} s")
        except Exception as error:  # it may have been sent: the answer is doubt, not silence
            reply = Reply(Code.UNKNOWN, f"{type(error).__name__}: {error}")
        self._sync.seconds.observe(self._sync.clock() - started)
        self._sync.updates[hostname, reply.code.value] += 1
        return replace(reply, text=redacted(reply.text, request.username, password))

    # -- ends of a pass

    def _disabled(self, now: float) -> float:
        if self.view.state.hold is not None:
            self._resumed("disabled")
        self._show(phase=Phase.DISABLED, problem="")
        return now + self.view.domain.interval

    def _without(self, reason: str, now: float) -> float:
        self._show(phase=Phase.NO_SECRET, problem=reason)
        self._say("secret", "missing", "SecretMissing", "Warning", reason)
        return now + self.view.domain.interval

    def _nowhere(self, found: Found, domain: Domain) -> float:
        self._tries += 1
        why = trouble(found)
        self._show(phase=Phase.NO_ADDRESS, problem=why.reason if why else "no address is managed")
        return plan.retry_check(self._tries, domain.interval, self._sync.clock())

    def _rest(self, rest: Rest, domain: Domain) -> float:
        found = self.view.found
        why = trouble(found) if found and rest.phase is not Phase.HALTED else None
        self._show(phase=rest.phase, problem=why.reason if why else "")
        return plan.next_check(rest, domain.interval, self._sync.clock(), self._sync.chance())

    def _broken(self, error: Exception) -> float:
        """Note a fault of ours; its text may be anything, so only its name is shown."""
        name = type(error).__name__
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}" if trace else ""
        log.error("a pass broke off; the record is tried again", record=self.view.domain.title,
                  error=name, where=where)  # fmt: skip
        self._show(problem=f"internal error ({name} in {where}): please report it")
        return self._sync.clock() + plan.SPACING

    # -- what is kept and told

    def _show(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]  # its own fields

    async def _store(self) -> None:
        if self.view.state != self._stored:
            state = self.view.state
            if await self._sync.remember(self.view.domain.hostname, state):
                self._stored = state

    def _lift(self, fingerprint: str) -> None:
        if plan.lifted(self.view.state, fingerprint) is not self.view.state:
            self._resumed("the document or the password has changed")

    def _resumed(self, why: str) -> None:
        self._show(state=plan.resumed(self.view.state))
        self._say("update", "")
        self._say("hold", "")
        self._tell("DynDnsUpdateResumed", "Normal", why)

    def _say_found(self, found: Found) -> None:
        self._show(found=found)
        why = trouble(found)
        if why is None:
            self._say("address", "")
        else:
            self._say("address", why.why.value, why.why.value, "Warning", why.reason)

    def _say_change(self, target: Target) -> None:
        accepted = self.view.state.accepted
        if accepted is None or accepted.addresses == target.addresses:
            self._say("change", "")
            return
        both = f"{', '.join(accepted.addresses)} -> {', '.join(target.addresses)}"
        self._say("change", both, "IpAddressChanged", "Normal", both)

    def _say_skipped(self, target: Target) -> None:
        text = f"updating skipped, {', '.join(target.addresses)} is up-to-date"
        self._say("skip", text, "DynDnsUpdateSkipped", "Normal", text)

    def _say_reply(self, target: Target, reply: Reply) -> None:
        if RULES[reply.code].kind is Kind.SUCCESS:
            self._say_success(target, reply)
            return
        state, sentence = self.view.state, advice(reply.code, self.view.state.text)
        self._say("update", reply.code.value, "DynDnsUpdateFailed", "Warning", sentence)
        if state.hold is not None and state.hold.until is None:
            halted = f"{sentence}; nothing is sent until the document or the password changes, or resume"
            self._say("hold", reply.code.value, "DynDnsUpdateHalted", "Warning", halted)
        elif state.hold is not None and state.hold.until is not None:
            minutes = (state.hold.until - state.hold.since) / 60
            delayed = f"{reply.code.value}: tried again after {minutes:.0f} minutes, later each time"
            self._say("hold", reply.code.value, "DynDnsUpdateDelayed", "Warning", delayed)

    def _say_success(self, target: Target, reply: Reply) -> None:
        self._say("update", "")
        self._say("hold", "")
        told = f"{', '.join(target.addresses)} ({reply.code.value})"
        self._tell("DynDnsUpdateCompleted", "Normal", told)
        if reply.stored and not set(reply.stored) & set(target.packed):
            self._tell(
                "DnsMismatch", "Warning", f"the provider says it stored others: {self.view.state.text}"
            )
        often = reply.code is Code.NOCHG and len(self.view.state.nochg) >= plan.NOCHG_MOST
        asks = "nochg three times within a day: does another program update this record, too?"
        self._say("nochg", "often" if often else "", "DynDnsUpdateDelayed", "Warning", asks)

    def _say(
        self,
        topic: str,
        key: str,
        reason: str = "",
        type_: Literal["Normal", "Warning"] = "Normal",
        message: str = "",
    ) -> None:
        """Tell something of a topic, unless it was the last that was told; an empty key ends the topic."""
        told = self.view.state.told
        if told.get(topic, "") == key:
            return
        rest = {each: value for each, value in told.items() if each != topic}
        self._show(state=replace(self.view.state, told=rest | ({topic: key} if key else {})))
        if key:
            self._tell(reason, type_, message)

    def _tell(self, reason: str, type_: Literal["Normal", "Warning"], message: str) -> None:
        domain, wall = self.view.domain, self._sync.now().wall
        self._sync.tell(Event(wall, type_, reason, domain.title, domain.fqdn, message))


def _knowing(wanted: Wanted | None, known: bytes | None) -> Wanted | None:
    return None if wanted is None else replace(wanted, known=known)


def _result(finding: Finding) -> str:
    return (
        "known"
        if isinstance(finding, Known)
        else finding.why.value
        if isinstance(finding, Unavailable)
        else ""
    )


def redacted(text: str, username: str, password: Password) -> str:
    """Return foreign text without the password, in whatever form a server may have sent it back."""
    octets = password.reveal()
    plain = octets.decode("utf-8", "replace")
    basic = b64encode(f"{username}:".encode() + octets).decode()
    for form in sorted(
        {plain, plain.strip(), quote(plain), quote(plain, safe=""), basic}, key=len, reverse=True
    ):
        if form:
            text = text.replace(form, "***")
    return text
