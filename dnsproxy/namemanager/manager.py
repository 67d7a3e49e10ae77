"""The single writer: one task is the only code that changes sets, and no answer passes it unapplied.

The theory, since everything below follows from it.

*Acknowledged state.* What counts is what the kernel acknowledged, not what a cache has or what was sent. So
"already known" never lets an answer out while its write is still in flight. An element stops counting before
the request for its deletion goes out; who asks for it from then on waits, and it is added again in the next
batch. Both bookkeepings are the plan's; this file only decides the order in which they are called.

*Group commit.* Answers that must wait (holds) come into a waiting room, and what they lack into a queue.
While one batch is in flight the next one gathers; its size follows the load by itself, and no timer is
involved. There is no task per answer: a client that goes away cannot take a write with it. After each
transaction the room is looked through: who lacks nothing leaves, what the others lack is queued (again). So
what a waiter waits for is added even if its name has left the cache meanwhile; the next repair tidies up.

*Repair.* Start, reload, errors, changes by others and a slow timer all lead to one path: the sets are made to
exist, read back, compared with a walk over the caches, and the difference is written. Nothing depends on the
path having been right before. The repair is cut into steps; between two steps the batch that has gathered is
written, so answers do not wait for it.

*Doubt.* When somebody else has changed a table that we use, nothing counts any more until it is read back or
acknowledged anew (adding what is there is no error, and cheap). What was asked of the kernel before and
answered after is not believed either. Between repairs is a rest, four times as long as the last one took, so
that a busy neighbour costs no more than a fifth of our time. A flush need not wait for that: the next batch
meets the missing table, and a missing table or set is repaired at once, as is a policy that has changed.

*Failure.* A transaction that the kernel refuses is tried again in halves, down to the one set that is at
fault: a full set fails alone. That set is *failing*: visible, written apart from the others from then on, its
holds end at once. Anything else, missing rights or no answer at all, is nobody's fault in particular: the
state is "not enforcing" until a repair has gone through, which is tried after pauses that double. Meanwhile
each batch is tried all the same; what it gets written is written.

*Deadlines* do not depend on any of this. One timer of the event loop ends the holds whose time is over, also
while a transaction hangs: with SERVFAIL, or with the answer, as the operator chose. Each such end is counted.
"""

from __future__ import annotations

import asyncio
import time
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from dnsproxy.errors import Cause, DnsproxyError, SetError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from dnsproxy.cache.gc import Collector
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.namemanager.elements import Element, SetSpec
    from dnsproxy.namemanager.plan import Hold, Plan
    from dnsproxy.rules.policy import Policy

TRANSACTION: Final = 1000  # elements in one transaction, 4 ms in the kernel
WAITING: Final = 16_384  # holds in the room; as many queries may be in flight
QUEUE: Final = 100_000  # elements in the queue; what does not fit is found by the next repair
READS: Final = 32  # sets read back in one step
PATIENCE: Final = 5.0  # seconds until a call to the kernel counts as failed
PAUSE, LONGEST_PAUSE = 0.02, 10.0  # seconds after a failure; for repairs doubling
REST, RESTS = 0.1, 4  # the rest between repairs because of others: seconds at least, times the last repair

MISSING: Final = (Cause.TABLE_MISSING, Cause.SET_MISSING)

TIMEOUT, REFUSED, CROWDED, STOPPED = "hold timeout", "set refused", "hold limit", "stopping"

log = structlog.get_logger()


class Sets(Protocol):
    """The sets, wherever they are. Every call may raise SetError, RightsError, KernelError or OSError."""

    async def ensure(self, specs: Collection[SetSpec]) -> None:
        """Create what is missing of our tables and sets; check the shape of all."""

    async def read(self, spec: SetSpec) -> dict[bytes, str]:
        """Return key -> comment."""

    async def commit(self, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        """Delete, then add, in one transaction; missing and existing elements are no errors."""

    async def foreign_change(self) -> None:
        """Return when somebody else has changed a table that we use."""

    async def close(self) -> None:
        """Let go of everything; the sets stay. For who made the object, not for the NameManager."""


class NameManager:
    """The waiting room for answers, and the task that writes what they wait for.

    `release` says that a hold which cannot be applied ends with its answer and not with SERVFAIL. `clock` is
    that of the holds' times, in monotonic seconds.

    The public numbers only grow: `batches` transactions, `elements` written by them, `repairs`, `drift`
    elements that the sets had too many or too few of for a reason not ours, `holds`, `released` after
    acknowledgement, `timeouts`, `refused` holds ended for another reason, `failures` calls to the kernel
    that failed.
    """

    def __init__(
        self,
        plan: Plan,
        sets: Sets,
        collector: Collector,
        *,
        release: bool = False,
        repair_interval: float = 60.0,
        gc_interval: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batches = self.elements = self.repairs = self.drift = self.failures = 0
        self.holds = self.released = self.timeouts = self.refused = 0
        self.failing: dict[SetSpec, str] = {}
        self.problem: str | None = None  # why nothing is enforced
        self.ready = asyncio.Event()  # the first repair is done
        self._plan = plan
        self._sets = sets
        self._release_unapplied = release
        self._repair_interval = repair_interval
        self._gc_interval = gc_interval
        self._clock = clock
        self._collector = collector
        self._room: dict[Hold, None] = {}
        self._queue: dict[Element, None] = {}
        self._deadlines: list[tuple[float, int, Hold]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._serial = count()
        self._wake = asyncio.Event()
        self._repair_at = -inf
        self._collect_at = inf
        self._rested_at = -inf  # no repair before this, unless something is missing
        self._retry_at = -inf  # nor before this, because the last one failed
        self._repairs_aborted = 0  # in a row
        self._repairs_in_vain = 0  # in a row, that left a set failing
        self._unmade: frozenset[SetSpec] = frozenset()  # sets that the last repair could not make
        self._told: set[SetSpec] = set()  # failing sets that the log knows of

    # -- the waiting room -----------------------------------------------------------------------------------

    def send(self, wire: bytes, hold: Hold) -> None:
        """Keep an answer until its elements are applied or its time is over."""
        self.holds += 1
        hold.wire = wire
        self._room[hold] = None
        if len(self._room) > WAITING:
            self.refused += 1
            self._give_up(hold, CROWDED)
            return
        self._enqueue(hold.elements)
        heappush(self._deadlines, (hold.deadline, next(self._serial), hold))
        if self._timer is None or hold is self._deadlines[0][2]:
            self._arm(hold.deadline)
        self._wake.set()

    def _enqueue(self, elements: Iterable[Element]) -> None:
        if len(self._queue) < QUEUE:
            self._queue.update(dict.fromkeys(elements))
        else:
            self._repair_at = min(self._repair_at, self._clock())

    def _settle(self) -> None:
        """Let go who lacks nothing; queue what the others lack."""
        for hold in list(self._room):
            lacking = self._plan.lacking(hold.elements)
            if lacking:
                self._enqueue(lacking)
            else:
                self.released += 1
                self._end(hold, hold.wire, "")

    def _end(self, hold: Hold, wire: bytes, cause: str) -> None:
        del self._room[hold]
        hold.sink.send(wire, hold.peer)
        if hold.done is not None:
            hold.done(wire, cause, max(0.0, self._clock() - hold.since))

    def _give_up(self, hold: Hold, cause: str) -> None:
        self._end(hold, hold.wire if self._release_unapplied else hold.refusal, cause)

    def _give_up_all(self, holds: list[Hold], cause: str) -> None:
        self.refused += len(holds)
        for hold in holds:
            self._give_up(hold, cause)

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, deadline - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        """End the holds whose time is over; wait for the next."""
        self._timer = None
        now = self._clock()
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2] not in self._room):
            hold = heappop(deadlines)[2]
            if hold in self._room:
                self.timeouts += 1
                self._give_up(hold, TIMEOUT)
        if deadlines:
            self._arm(deadlines[0][0])

    # -- what others tell -----------------------------------------------------------------------------------

    def policy_changed(self, policy: Policy, endpoints: EndpointTable) -> None:
        """Swap the policy; the sets follow at once, also for names that are cached already."""
        plan = self._plan
        plan.set_policy(policy, endpoints)
        self._queue = {element: None for element in self._queue if plan.needs((element,))}
        self._give_up_all([hold for hold in self._room if not plan.needs(hold.elements)], REFUSED)
        self._repair_at = -inf
        self._wake.set()

    def foreign_change(self) -> None:
        """Somebody else has changed a table: trust nothing, and repair once the last repair is rested."""
        self._plan.doubt()
        self._repair_soon()
        self._wake.set()

    def _repair_soon(self) -> None:
        """Have a repair made as soon as the last one is rested from, or the pause after it is over."""
        self._repair_at = min(self._repair_at, max(self._rested_at, self._retry_at))

    def status(self) -> dict[str, Any]:
        """Return the state and the numbers, for people and for monitoring."""
        state = "not enforcing" if self.problem else "enforcing" if self.ready.is_set() else "starting"
        return {
            "state": state,
            "problem": self.problem,
            "failing": {str(spec): message for spec, message in self.failing.items()},
            "waiting": len(self._room),
            "queued": len(self._queue),
            "applied": sum(map(len, self._plan.applied.values())),
            "batches": self.batches,
            "elements": self.elements,
            "repairs": self.repairs,
            "drift": self.drift,
            "holds": self.holds,
            "released": self.released,
            "timeouts": self.timeouts,
            "refused": self.refused,
            "failures": self.failures,
        }

    # -- the writer -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Make the sets exist, learn from what they hold, and repair them; raises what prevents it.

        A single set that cannot be made or filled prevents nothing: it is failing, and the log says so.
        """
        await self._repair()

    async def run(self) -> None:
        """Write until cancelled; then refuse who still waits. The sets stay as they are."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(), name="foreign changes")
                await self._write_forever()
        finally:
            self._give_up_all(list(self._room), STOPPED)
            if self._timer is not None:
                self._timer.cancel()

    async def _watch(self) -> None:
        while True:
            try:
                await self._sets.foreign_change()
            except (DnsproxyError, OSError) as error:
                log.warning("cannot watch for changes of the sets by others", error=str(error))
                await asyncio.sleep(LONGEST_PAUSE)
            else:
                self.foreign_change()

    async def _write_forever(self) -> None:
        self._collect_at = self._clock() + self._gc_interval
        while True:
            await self._until_due()
            try:
                await self._turn()
            except (DnsproxyError, OSError) as error:  # TimeoutError is an OSError
                await asyncio.sleep(self._failed(error))

    async def _until_due(self) -> None:
        due = min(self._repair_at, self._collect_at)
        if not self._queue and due > self._clock():
            try:
                async with asyncio.timeout(due - self._clock()):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()

    async def _turn(self) -> None:
        """Do what is due: the repair first, since it may be what the holds wait for."""
        now = self._clock()
        if now >= self._repair_at:
            await self._repair()
        elif now >= self._collect_at:
            await self._collect()
        await self._write()

    async def _write(self) -> None:
        """Write what the holds lack: the batch that has gathered."""
        batch = self._plan.lacking(self._queue)
        self._queue = {}
        for apart in (False, True):
            elements = [element for element in batch if (element.spec in self.failing) is apart]
            for at in range(0, len(elements), TRANSACTION):
                await self._commit((), elements[at : at + TRANSACTION])
                self._settle()
        self._settle()

    async def _breathe(self) -> None:
        """Between two steps of something long: let the loop turn, and the holds pass."""
        await asyncio.sleep(0)
        if self._queue:
            await self._write()

    def _failed(self, error: Exception) -> float:
        """Note that something failed as a whole; return how long to wait before the next try."""
        self.failures += 1
        self._settle()
        missing = isinstance(error, SetError) and error.cause in MISSING
        if missing and not self._repairs_aborted:
            log.warning("sets are gone, repairing", error=str(error))
            self._repair_at = -inf
            return 0.0
        self._repair_soon()
        message = str(error) or f"no answer from the kernel within {PATIENCE:g} s"
        if message != self.problem:
            log.error("not enforcing, trying again", error=message)
            self.problem = message
        return PAUSE

    # -- transactions ---------------------------------------------------------------------------------------

    async def _commit(self, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        """Write one transaction; if it is refused, its halves, down to the set that is at fault."""
        try:
            await self._transact(deletes, adds)
        except SetError as error:
            specs = list(dict.fromkeys(element.spec for element in (*deletes, *adds)))
            if error.cause in MISSING and self.failing.keys().isdisjoint(specs):
                raise
            if len(specs) > 1:
                for half in _halves(specs):
                    await self._commit(_of(half, deletes), _of(half, adds))
            else:
                await self._commit_again(specs[0], deletes, adds, error)

    async def _commit_again(
        self, spec: SetSpec, deletes: Sequence[Element], adds: Sequence[Element], error: SetError
    ) -> None:
        """Try one set once more if the kernel did not say why; else give up on it for now."""
        if error.cause is Cause.OTHER:
            try:
                await self._transact(deletes, adds)
            except SetError as second:
                error = second
            else:
                return
        self._fail(spec, error)

    async def _transact(self, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        epoch = self._plan.epoch
        self._plan.claim(adds)
        async with asyncio.timeout(PATIENCE):
            await self._sets.commit(deletes, adds)
        self.batches += 1
        self.elements += len(deletes) + len(adds)
        if self._plan.epoch == epoch:  # else it may have been undone meanwhile
            self._plan.acknowledged(deletes, adds)

    def _fail(self, spec: SetSpec, error: SetError) -> None:
        """Give up on one set until the next repair, and on the holds that wait for it."""
        self.failures += 1
        self.failing[spec] = str(error)
        if spec not in self._told:
            self._told.add(spec)
            log.error("a set is not enforced", set=str(spec), error=str(error))
        waiting = [hold for hold in self._room if any(element.spec == spec for element in hold.elements)]
        self._give_up_all(waiting, REFUSED)

    # -- repair ---------------------------------------------------------------------------------------------

    async def _repair(self) -> None:
        """Make the sets what caches and policy want, whatever they were."""
        started = self._clock()
        self._repair_at = started + self._repair_interval
        self.repairs += 1
        try:
            whole = await self._repair_all()
        except (DnsproxyError, OSError):
            self._repairs_aborted += 1
            self._retry_at = self._clock() + _pause(self._repairs_aborted, LONGEST_PAUSE)
            raise
        if whole:
            self._repaired(started)

    async def _repair_all(self) -> bool:
        """Do all that a repair is; False if a new policy ended it early."""
        plan = self._plan
        policy, specs = plan.policy, plan.specs()
        self.failing = {}
        await self._ensure([spec for spec in specs if spec.ours])
        await self._ensure([spec for spec in specs if not spec.ours])
        self._unmade = frozenset(self.failing)
        await self._read_back({**plan.doubted, **plan.applied, **dict.fromkeys(specs)})
        return plan.policy is policy and await self._reconcile()

    def _repaired(self, started: float) -> None:
        """Note a whole repair, and when the next one may and must come."""
        for spec in self._told - self.failing.keys():
            log.info("a set is enforced again", set=str(spec))
        if self.problem is not None:
            log.info("enforcing again")
        self._told = set(self.failing)
        self.problem = None
        self.ready.set()
        now = self._clock()
        self._repairs_aborted, self._retry_at = 0, -inf
        self._rested_at = now + max(REST, RESTS * (now - started))
        self._repair_at = max(self._repair_at, self._rested_at)
        self._repairs_in_vain = self._repairs_in_vain + 1 if self.failing else 0
        if self.failing:
            self._repair_at = min(self._repair_at, now + _pause(self._repairs_in_vain, self._repair_interval))

    async def _ensure(self, specs: Sequence[SetSpec]) -> None:
        """Make sets exist; the ones that cannot be made are failing, the others are made."""
        if not specs:
            return
        try:
            async with asyncio.timeout(PATIENCE):
                await self._sets.ensure(specs)
        except SetError as error:
            if len(specs) > 1:
                for half in _halves(specs):
                    await self._ensure(half)
            else:
                self._plan.forget(specs[0])
                self._fail(specs[0], error)

    async def _read_back(self, specs: Iterable[SetSpec]) -> None:
        """Take over what the sets hold; at the start, learn from it as well."""
        plan, counting = self._plan, self.ready.is_set()
        missing = extra = 0
        left = [spec for spec in specs if spec not in self._unmade]
        while left:
            group, left = left[:READS], left[READS:]
            for spec, content in await self._read(group):
                if not counting:
                    plan.adopt(spec, content, self._clock())
                less, more = plan.found(spec, content)
                missing, extra = missing + less, extra + more
            await self._breathe()
        if counting and (missing or extra):
            self.drift += missing + extra
            log.warning("sets had been changed by others, repairing", missing=missing, extra=extra)

    async def _read(self, specs: Sequence[SetSpec]) -> list[tuple[SetSpec, dict[bytes, str]]]:
        """Read some sets; return those of which the content can be believed."""
        epoch = self._plan.epoch
        async with asyncio.timeout(PATIENCE):
            results = await asyncio.gather(*map(self._sets.read, specs), return_exceptions=True)
        contents = []
        for spec, result in zip(specs, results, strict=True):
            if isinstance(result, SetError) and result.cause in MISSING and spec not in self._plan.specs():
                self._plan.forget(spec)  # of an endpoint or rule that is gone
            elif isinstance(result, BaseException):
                raise result
            else:
                contents.append((spec, result))
        return contents if self._plan.epoch == epoch else []

    async def _reconcile(self) -> bool:
        """Walk over the caches and write the difference, in steps; False if a new policy ended that early."""
        plan, policy = self._plan, self._plan.policy
        wanted: dict[SetSpec, dict[bytes, str]] = {}
        with plan.watch():
            for _ in plan.wanted(wanted):
                await self._breathe()
                if plan.policy is not policy:
                    return False
            for spec in self._unmade:
                wanted.pop(spec, None)
            for deletes, adds in plan.changes(wanted, TRANSACTION):
                await self._commit(deletes, adds)
                self._settle()
                await self._breathe()
                if plan.policy is not policy:
                    return False
        return True

    async def _collect(self) -> None:
        """Let leases end, and take out of the sets what nothing wants any more."""
        self._collect_at = self._clock() + self._gc_interval
        left = False
        step = self._collector.step(self._clock())
        while not step.done:
            left = left or bool(step.removed or step.unreported)
            await self._breathe()
            step = self._collector.step(self._clock())
        if left or step.removed or step.unreported:
            await self._read_back([spec for spec in self._plan.applied if not spec.ours])
            await self._reconcile()


def _pause(times: int, longest: float) -> float:
    return min(longest, PAUSE * 2.0 ** min(times - 1, 16))


def _halves(specs: Sequence[SetSpec]) -> tuple[Sequence[SetSpec], Sequence[SetSpec]]:
    middle = len(specs) // 2
    return specs[:middle], specs[middle:]


def _of(specs: Sequence[SetSpec], elements: Iterable[Element]) -> list[Element]:
    kept = frozenset(specs)
    return [element for element in elements if element.spec in kept]
