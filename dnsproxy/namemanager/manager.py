"""The single writer: one task is the only code that changes sets, and no answer passes it unapplied.

The theory, since everything below follows from it.

*Acknowledged state.* What counts is what the kernel acknowledged, not what a cache has or what was sent. So
"already known" never lets an answer out while its write is still in flight. An element stops counting before
the request for its deletion goes out; who asks for it from then on waits, and it is added again in the next
batch. Both bookkeepings are the plan's; this file only decides the order in which they are called.

*Group commit.* Answers that must wait (holds) come into a waiting room (room.py). While one transaction is in
flight the next one gathers; its size follows the load by itself, and no timer is involved. There is no task
per answer: a client that goes away cannot take a write with it. When the last of a hold's elements was
written, all of them are looked at: it leaves if all count, else it queues again. So what a waiter waits
for is added even if its name has left the cache meanwhile; the next repair tidies up.

*Repair.* Start, reload, errors, changes by others and a slow timer all lead to one path: the sets are made to
exist, read back, compared with what caches and policy want, and the difference is written. Nothing depends on
the path having been right before. The repair is cut into steps; between two steps a transaction of what has
gathered is written, so answers do not wait for it. After a swap of the policy the difference is written
before anything of ours is read, which may take long: what was revoked goes at once. A collection writes what
became of exactly the pairs that left.

*Swaps.* Holds that wait while the policy is swapped are judged again before they may go, and as soon as
possible: who lost its permission gets the refusal, who opens something else now waits for that.

*Doubt.* When somebody else has changed a table that we use, nothing counts any more until it is read back or
acknowledged anew (adding what is there is no error, and cheap). What was asked of the kernel before and
answered after is not believed either. Between repairs is a rest, four times as long as the last one took, so
that a busy neighbour costs no more than a fifth of our time. A flush need not wait for that: the next batch
meets the missing table, and a missing table or set is repaired at once, as is a policy that has changed.
Doubt holds up no deletion, see plan.py: what was revoked goes at the next repair or collection, however busy
the neighbour. Where doubt lasts longer than DOUBT seconds, the state and the log say so.

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
from contextlib import closing
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import structlog

from dnsproxy import addresses, names
from dnsproxy.errors import Cause, DnsproxyError, SetError
from dnsproxy.histogram import Histogram
from dnsproxy.namemanager.room import Room

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence

    from dnsproxy.cache.gc import Collector
    from dnsproxy.cache.zombies import Gone
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.namemanager.elements import Element, SetSpec
    from dnsproxy.namemanager.plan import Hold, Plan, Transaction
    from dnsproxy.rules.policy import Policy

    K = TypeVar("K")
    T = TypeVar("T")

TRANSACTION: Final = 1000  # elements in one transaction, 4 ms in the kernel
READS: Final = 32  # sets read back in one step
HOLDS: Final = 100  # that are ended or judged in one step, one to two milliseconds
TELLING: Final = 60.0  # seconds between two words about the same
GLANCE: Final = 1.0  # seconds between two looks at whether caches press for a collection
DOUBT: Final = 30.0  # seconds of doubt after which it is a problem
SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # bounds of hold times
PATIENCE: Final = 5.0  # seconds until a call to the kernel counts as failed
PAUSE, LONGEST_PAUSE = 0.02, 10.0  # seconds after a failure; for repairs doubling
REST, RESTS = 0.1, 4  # the rest between repairs because of others: seconds at least, times the last repair

MISSING: Final = (Cause.TABLE_MISSING, Cause.SET_MISSING)

TIMEOUT, REFUSED, CROWDED, STOPPED, DENIED = (
    "hold timeout", "set refused", "hold limit", "stopping", "policy"
)  # fmt: skip

log = structlog.get_logger()


class Sets(Protocol):
    """The sets, wherever they are. Every call may raise SetError, RightsError, KernelError or OSError."""

    enforces: bool  # False: changes are only shown

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
    that of the holds' times, in monotonic seconds. Without `deletes` nothing is collected, and nothing
    removed from a set: for as long as another instance still serves, or the caches are not restored.

    The public numbers only grow: `batches` transactions, `elements` written by them, `repairs`, `drift`
    elements that the sets had too many or too few of for a reason not ours, `holds`, `released` after
    acknowledgement, `timeouts`, `refused` holds ended for another reason, `failures` calls to the kernel
    that failed. `hold_seconds` counts all holds by the time that they waited.
    """

    def __init__(
        self,
        plan: Plan,
        sets: Sets,
        collector: Collector,
        *,
        release: bool = False,
        deletes: bool = True,
        repair_interval: float = 60.0,
        gc_interval: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batches = self.elements = self.repairs = self.drift = self.failures = 0
        self.holds = self.released = self.timeouts = self.refused = 0
        self.hold_seconds = Histogram(SECONDS)
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
        self._room = Room()
        self._deletes = deletes
        self._adopting = not deletes  # what is found and unknown may be another instance's, and becomes ours
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
        self._told_of_evicted: dict[str, float] = {}  # when, by endpoint
        self._told_of_cut = self._told_of_doubt = False
        self._doubted_since: float | None = None
        self._swapped = False  # since the last difference was written
        self._judge = False  # holds wait to be judged again
        self._resyncs: list[asyncio.Future[None]] = []  # who waits for a repair that begins from now on

    # -- the waiting room -----------------------------------------------------------------------------------

    def send(self, wire: bytes, hold: Hold) -> None:
        """Keep an answer until its elements are applied or its time is over."""
        self.holds += 1
        hold.wire, hold.policy = wire, self._plan.policy
        displaced = self._room.enter(hold)
        if displaced:
            self._repair_soon()  # it finds what was not written
        for each in displaced:
            self.refused += 1
            self._leave(each, each.wire if self._release_unapplied else each.refusal, CROWDED)
        self._wake.set()
        if hold not in self._room:
            return
        heappush(self._deadlines, (hold.deadline, next(self._serial), hold))
        if self._timer is None or hold is self._deadlines[0][2]:
            self._arm(hold.deadline)

    def _end(self, hold: Hold, wire: bytes, cause: str) -> None:
        self._room.leave(hold)
        self._leave(hold, wire, cause)

    def _leave(self, hold: Hold, wire: bytes, cause: str) -> None:
        held = max(0.0, self._clock() - hold.since)
        self.hold_seconds.observe(held)
        hold.sink.send(wire, hold.peer)
        if hold.done is not None:
            hold.done(wire, cause, held)

    def _give_up(self, hold: Hold, cause: str) -> None:
        self._end(hold, hold.wire if self._release_unapplied else hold.refusal, cause)

    def _refuse(self, hold: Hold, cause: str) -> None:
        self.refused += 1
        self._give_up(hold, cause)

    async def _settle(self, holds: Sequence[Hold]) -> list[Hold]:
        """Let go who lacks nothing; return the others."""
        left = []
        for at, hold in enumerate(holds, 1):
            if hold in self._room and not self._passed(hold):
                left.append(hold)
            if at % HOLDS == 0:
                await asyncio.sleep(0)
        return [hold for hold in left if hold in self._room]

    def _passed(self, hold: Hold) -> bool:
        """Tell whether a hold has ended now, if its policy is up to date by release."""
        if hold.policy is not self._plan.policy and self._judged(hold):
            return True
        if self._plan.lacking(hold.elements):
            return False
        self.released += 1
        self._end(hold, hold.wire, "")
        return True

    def _judged(self, hold: Hold) -> bool:
        """Judge a hold by the policy in force; tell whether that ended it."""
        hold.policy = self._plan.policy
        opens = hold.elements if hold.judge is None else hold.judge()
        if isinstance(opens, bytes):
            self.refused += 1
            self._end(hold, opens, DENIED)
        elif not self._plan.needs(opens):
            self._refuse(hold, REFUSED)
        else:
            self._room.change(hold, opens)
        return hold not in self._room

    async def _judge_all(self) -> None:
        """Judge who came before the policy was swapped."""
        self._judge = False
        for at, hold in enumerate(self._room, 1):
            if hold in self._room and hold.policy is not self._plan.policy:
                self._judged(hold)
            if at % HOLDS == 0:
                await asyncio.sleep(0)

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, deadline - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        """End some holds whose time is over; wait for the next."""
        self._timer = None
        now, left = self._clock(), HOLDS
        deadlines = self._deadlines
        while deadlines and left and (deadlines[0][0] <= now or deadlines[0][2] not in self._room):
            hold = heappop(deadlines)[2]
            if hold in self._room:
                left -= 1
                self.timeouts += 1
                self._give_up(hold, TIMEOUT)
        if deadlines:
            self._arm(deadlines[0][0])

    # -- what others tell -----------------------------------------------------------------------------------

    @property
    def deletes(self) -> bool:
        """Whether anything is collected and removed from sets; to allow it makes both due at once."""
        return self._deletes

    @deletes.setter
    def deletes(self, allowed: bool) -> None:
        self._deletes = allowed
        self._adopting = self._adopting or not allowed  # once more, too, when it is allowed again
        if allowed:
            self._repair_at = self._collect_at = -inf
            self._wake.set()

    def policy_changed(self, policy: Policy, endpoints: EndpointTable) -> None:
        """Swap the policy; sets and holds follow at once, also for names that are cached already."""
        self._plan.set_policy(policy, endpoints)
        self._swapped = self._judge = True
        self._repair_at = -inf
        self._wake.set()

    def foreign_change(self) -> None:
        """Somebody else has changed a table: trust nothing, and repair once the last repair is rested."""
        if self._doubted_since is None:
            self._doubted_since = self._clock()
        self._plan.doubt()
        self._repair_soon()
        self._wake.set()

    def collect_soon(self) -> None:
        """Have a collection made at once: something was forced out of the caches."""
        self._collect_at = -inf
        self._wake.set()

    async def resync(self) -> None:
        """Have everything read back and repaired from now on; raises what prevents it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resyncs.append(done)
        self._repair_at = -inf
        self._wake.set()
        await done

    def _repair_soon(self) -> None:
        """Have a repair made as soon as the last one is rested from, or the pause after it is over."""
        self._repair_at = min(self._repair_at, max(self._rested_at, self._retry_at))

    def _doubt(self) -> str | None:
        """Say what it means that others change sets all the time, if they do."""
        since = self._doubted_since
        if since is None or self._clock() - since < DOUBT:
            return None
        return (
            f"other programs have kept changing tables that we use for {self._clock() - since:.0f} s: what is"
            " in the sets cannot be read back in between; answers wait until their addresses are written anew"
        )

    def status(self) -> dict[str, Any]:
        """Return the state and the numbers, for people and for monitoring."""
        state = "not enforcing" if self.problem else "enforcing" if self.ready.is_set() else "starting"
        return {
            "state": state,
            "problem": self.problem or self._doubt(),
            "failing": {str(spec): message for spec, message in self.failing.items()},
            "waiting": len(self._room),
            "queued": self._room.queued,
            "applied": sum(map(len, self._plan.applied.values())),
            "doubted": self._plan.in_doubt(),
            "cut": self._plan.cut,
            "collecting": self._deletes,
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

    async def run(self) -> None:
        """Write until cancelled; then refuse who still waits. The sets stay as they are."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(), name="foreign changes")
                await self._write_forever()
        finally:
            for hold in self._room:
                self._refuse(hold, STOPPED)
            if self._timer is not None:
                self._timer.cancel()
            for done in self._resyncs:
                done.cancel()

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
        if not self._room.queued and not self._judge and self._due() > self._clock():
            try:
                async with asyncio.timeout(min(GLANCE, self._due() - self._clock())):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()

    def _due(self) -> float:
        return min(self._repair_at, self._collect_at) if self._deletes else self._repair_at

    async def _turn(self) -> None:
        """Do what is due: the repair first, since it may be what the holds wait for."""
        now = self._clock()
        self._tell(now)
        if self._judge:
            await self._judge_all()
        if now >= self._repair_at:
            await self._repair()
        elif self._deletes and (now >= self._collect_at or self._plan.caches.pressing):
            await self._collect()
        await self._write()

    def _tell(self, now: float) -> None:
        """Say once what goes on and is nobody's failure."""
        plan = self._plan
        if plan.cut and not self._told_of_cut:
            self._told_of_cut = True
            key, name = plan.cut_of
            log.warning(
                "an answer would open too many elements; its last addresses are not learned",
                endpoint=key,
                name=names.to_text(name),
                hint="open fewer ports for this name, or a range of addresses by a firewall rule",
            )
        in_doubt = self._doubted_since is not None and now - self._doubted_since >= DOUBT
        if in_doubt and not self._told_of_doubt:
            log.warning("sets are in doubt", problem=self._doubt())
        self._told_of_doubt = in_doubt

    async def _write(self) -> None:
        """Write one transaction of what the holds lack, what is failing apart; let go who lacks nothing."""
        elements, holds = self._room.take(TRANSACTION, self._plan.lacking)
        left: Sequence[Hold] = holds
        parts = [
            [element for element in elements if (element.spec in self.failing) is apart]
            for apart in (False, True)
        ]
        try:
            for part in parts:
                if part:
                    await self._commit((), part)
                left = await self._settle(left)
        except BaseException:
            self._room.put_back(left)
            raise
        for hold in left:
            if any(element.spec in self.failing for element in self._plan.lacking(hold.elements)):
                self._refuse(hold, REFUSED)
        self._room.put_back(left)

    async def _breathe(self) -> None:
        """Between two steps of something long: let the loop turn, and the holds pass."""
        await asyncio.sleep(0)
        if self._room.queued:
            await self._write()

    async def _stepwise(self, steps: Generator[None, None, T]) -> T:
        """Work in steps, breathing between them; return what they return. A failure abandons them at once."""
        with closing(steps):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
                await self._breathe()

    def _failed(self, error: Exception) -> float:
        """Note that something failed as a whole; return how long to wait before the next try."""
        self.failures += 1
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
            needed = self._plan.needs((*deletes, *adds))
            if error.cause in MISSING and needed and self.failing.keys().isdisjoint(specs):
                raise
            if len(specs) > 1:
                for half in _halves(specs):
                    await self._commit(_of(half, deletes), _of(half, adds))
            elif error.cause in MISSING and not needed:
                self._plan.forget(specs[0])  # of an endpoint or rule that is gone
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
        self._plan.acknowledged(deletes, adds, certain=self._plan.epoch == epoch)

    def _fail(self, spec: SetSpec, error: SetError) -> None:
        """Give up on one set until the next repair."""
        self.failures += 1
        self.failing[spec] = str(error)
        if spec not in self._told:
            self._told.add(spec)
            log.error("a set is not enforced", set=str(spec), error=str(error))

    # -- repair ---------------------------------------------------------------------------------------------

    async def _repair(self) -> None:
        """Make the sets what caches and policy want, whatever they were."""
        started = self._clock()
        self._repair_at = started + self._repair_interval
        self.repairs += 1
        waiting, self._resyncs = self._resyncs, []
        try:
            whole = await self._repair_all()
        except (DnsproxyError, OSError) as error:
            self._repairs_aborted += 1
            self._retry_at = self._clock() + _pause(self._repairs_aborted, LONGEST_PAUSE)
            for done in waiting:
                if not done.done():
                    done.set_exception(error)
            raise
        except BaseException:
            self._resyncs += waiting
            raise
        if whole:
            self._repaired(started)
            for done in waiting:
                if not done.done():
                    done.set_result(None)
        else:
            self._resyncs += waiting

    async def _repair_all(self) -> bool:
        """Do all that a repair is; False if a new policy ended it early."""
        plan = self._plan
        policy, specs = plan.policy, plan.specs()
        self.failing = {}
        await self._ensure([spec for spec in specs if spec.ours])
        await self._ensure([spec for spec in specs if not spec.ours])
        self._unmade = frozenset(self.failing)
        sets = plan.sets()
        if self._swapped and self.ready.is_set():
            await self._read_back([spec for spec in sets if not spec.ours])
            sets = [spec for spec in sets if spec.ours]
            if not await self._reconcile(policy):
                return False
        await self._read_back(sets)
        return await self._reconcile(policy)

    def _repaired(self, started: float) -> None:
        """Note a whole repair, and when the next one may and must come."""
        for spec in self._told.intersection(self._plan.specs()) - self.failing.keys():
            log.info("a set is enforced again", set=str(spec))
        if self.problem is not None:
            log.info("enforcing again")
        self._told = set(self.failing)
        self.problem = None
        if not self._plan.in_doubt():
            self._doubted_since = None
        self._adopting = self._adopting and not self._deletes
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
        counting = self.ready.is_set()
        missing = extra = 0
        left = [spec for spec in specs if spec not in self._unmade]
        while left:
            group, left = left[:READS], left[READS:]
            with self._plan.reading():
                for spec, content, epoch in await self._read(group):
                    if self._adopting or not counting:
                        adopting = self._plan.adopt(spec, content, self._clock(), fresh=counting)
                        await self._stepwise(adopting)
                    certain = self._plan.epoch == epoch
                    less, more = await self._stepwise(self._plan.found(spec, content, certain=certain))
                    missing, extra = missing + less, extra + more
            await self._breathe()
        if counting and (missing or extra):
            self.drift += missing + extra
            log.warning("sets had been changed by others, repairing", missing=missing, extra=extra)

    async def _read(self, specs: Sequence[SetSpec]) -> list[tuple[SetSpec, dict[bytes, str], int]]:
        """Read some sets; return with each content the epoch in which it is the truth, -1 for none."""
        async with asyncio.timeout(PATIENCE):
            results = await asyncio.gather(*map(self._read_one, specs), return_exceptions=True)
        contents = []
        for spec, result in zip(specs, results, strict=True):
            if isinstance(result, SetError) and result.cause in MISSING and spec not in self._plan.specs():
                self._plan.forget(spec)  # of an endpoint or rule that is gone
            elif isinstance(result, BaseException):
                raise result
            else:
                contents.append((spec, *result))
        return contents

    async def _read_one(self, spec: SetSpec) -> tuple[dict[bytes, str], int]:
        epoch = self._plan.epoch
        return await self._sets.read(spec), epoch

    async def _reconcile(self, policy: Policy) -> bool:
        """Write the difference in steps; False if a policy other than `policy` ended that early."""
        without = self._unmade
        changes = self._plan.changes(TRANSACTION, deletes=self._deletes, without=without)
        whole = await self._apply(changes, policy)
        self._swapped = self._swapped and not whole
        return whole

    async def _apply(self, changes: Iterator[Transaction], policy: Policy) -> bool:
        """Write transactions, each before the next is worked out."""
        if self._plan.policy is not policy:
            return False
        for deletes, adds in changes:
            if deletes or adds:
                await self._commit(deletes, adds)
            await self._breathe()
            if self._plan.policy is not policy:
                return False
        return True

    async def _collect(self) -> None:
        """Let leases end, and take out of the sets what became of the pairs that left."""
        self._collect_at = self._clock() + self._gc_interval
        plan, policy = self._plan, self._plan.policy
        gone: dict[tuple[SetSpec, bytes], None] = {}
        unreported, done = 0, False
        while not done:
            step = self._collector.step(self._clock())
            unreported, done = unreported + step.unreported, step.done
            self._tell_of_evicted(step.removed)
            await self._breathe()
            await self._stepwise(plan.departed(step.removed, gone))
        theirs = {spec for spec in plan.sets() if not spec.ours}
        if not unreported:
            theirs.intersection_update(spec for spec, _ in gone)
        await self._read_back(theirs)
        if unreported:
            await self._reconcile(policy)
        elif gone:
            await self._apply(plan.review(_emptied(gone), TRANSACTION), policy)

    def _tell_of_evicted(self, removed: Mapping[str, Sequence[Gone]]) -> None:
        """Name what a limit has cut off, for each endpoint once a minute at most."""
        now = self._clock()
        for key, pairs in removed.items():
            cut = [pair for pair in pairs if pair.cause == "evicted live"]
            if cut and now - self._told_of_evicted.get(key, -inf) >= TELLING:
                self._told_of_evicted[key] = now
                log.warning(
                    "addresses with live connections had to leave the sets",
                    endpoint=key,
                    name=names.to_text(cut[0].name),
                    address=addresses.to_text(cut[0].address),
                    others=len(cut) - 1,
                    hint="raise zombies.per_endpoint, or see what this endpoint connects to",
                )


def _emptied(some: dict[K, None]) -> Iterator[K]:
    """Walk over keys, letting go of each: to free a million at once would take long."""
    while some:
        yield some.popitem()[0]


def _pause(times: int, longest: float) -> float:
    return min(longest, PAUSE * 2.0 ** min(times - 1, 16))


def _halves(specs: Sequence[SetSpec]) -> tuple[Sequence[SetSpec], Sequence[SetSpec]]:
    middle = len(specs) // 2
    return specs[:middle], specs[middle:]


def _of(specs: Sequence[SetSpec], elements: Iterable[Element]) -> list[Element]:
    kept = frozenset(specs)
    return [element for element in elements if element.spec in kept]
