"""What stands in for the world in tests: a kernel with latencies and neighbours, sinks, a clock that leaps.

The fakes are strict where the real thing is: a transaction applies whole or not at all, an element that is
there keeps its comment, a set that is not there is an error.
"""

from __future__ import annotations

import asyncio
import selectors
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dnsproxy.cache.gc import Caches, Collector
from dnsproxy.errors import Cause, RightsError, SetError
from dnsproxy.namemanager.manager import NameManager
from dnsproxy.namemanager.plan import Hold, Plan
from dnsproxy.names import from_text
from dnsproxy.rules.policy import load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence

    from dnsproxy.namemanager.elements import Element, SetSpec

T = TypeVar("T")
_wire = lru_cache(from_text)


class DeadlockError(Exception):
    """Nothing is scheduled and nothing is ready: the test would wait for ever."""


class _LeapingSelector(selectors.SelectSelector):
    """Instead of waiting, moves the clock forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which an hour passes in a millisecond. Not for sockets or threads."""

    def __init__(self) -> None:
        self._leaping = _LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def until(holds: Callable[[], bool], step: float = 0.0) -> None:
    """Let the loop turn until something holds."""
    while not holds():  # noqa: ASYNC110 - what a test waits for does not always have an event
        await asyncio.sleep(step)


class Sent(list):
    """A sink that remembers what it was given, as (wire, peer)."""

    def send(self, wire: bytes, peer: Any) -> None:
        self.append((wire, peer))


@dataclass
class CallSink:
    """A sink that passes on what it is given."""

    call: Callable[[bytes, Any], None]

    def send(self, wire: bytes, peer: Any) -> None:
        self.call(wire, peer)


async def at_once() -> None:
    """Return after the loop has turned: the shortest that a real call takes."""
    await asyncio.sleep(0)


@dataclass
class FakeSets:
    """Sets in a kernel that others use as well.

    `delay` is awaited before and after a transaction takes effect. `trouble` may return an error for a
    transaction, raised before it takes effect; `late_trouble` one that is raised although it has.
    """

    delay: Callable[[], Awaitable[None]] = at_once
    trouble: Callable[[Sequence[Element], Sequence[Element]], Exception | None] = lambda deletes, adds: None
    late_trouble: Callable[[], Exception | None] = lambda: None
    kernel: dict[SetSpec, dict[bytes, str]] = field(default_factory=dict)
    enforces: bool = True
    sizes: dict[SetSpec, int] = field(default_factory=dict)
    unfit: dict[SetSpec, SetError] = field(default_factory=dict)
    rights: bool = True
    stuck: asyncio.Event | None = None  # set: calls wait for it
    transactions: list[tuple[tuple[Element, ...], tuple[Element, ...]]] = field(default_factory=list)
    reads: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    # What the NameManager wants

    async def ensure(self, specs: Collection[SetSpec]) -> None:
        await self._pass()
        for spec in specs:
            if spec in self.unfit:
                raise self.unfit[spec]
            if not spec.ours and spec not in self.kernel:
                raise SetError(Cause.SET_MISSING, f"there is no set {spec}")
        for spec in specs:
            self.kernel.setdefault(spec, {})

    async def read(self, spec: SetSpec) -> dict[bytes, str]:
        await self._pass()
        content = dict(self._set(spec))
        self.reads += 1
        await self.delay()
        return content

    async def commit(self, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        assert deletes or adds, "an empty transaction"
        await self._pass()
        if (error := self.trouble(deletes, adds)) is not None:
            raise error
        self._apply(deletes, adds)
        self.transactions.append((tuple(deletes), tuple(adds)))
        await self.delay()
        if (error := self.late_trouble()) is not None:
            raise error

    async def foreign_change(self) -> None:
        await self.changed.wait()
        self.changed.clear()

    async def close(self) -> None:
        """Nothing to close."""

    async def _pass(self) -> None:
        if self.stuck is not None:
            await self.stuck.wait()
        await self.delay()
        if not self.rights:
            raise RightsError("changing nftables sets needs CAP_NET_ADMIN")

    def _set(self, spec: SetSpec) -> dict[bytes, str]:
        if not any((spec.family, spec.table) == (each.family, each.table) for each in self.kernel):
            raise SetError(Cause.TABLE_MISSING, f"there is no table {spec.family} {spec.table}")
        if spec not in self.kernel:
            raise SetError(Cause.SET_MISSING, f"there is no set {spec}")
        return self.kernel[spec]

    def _apply(self, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        after = {element.spec: dict(self._set(element.spec)) for element in (*deletes, *adds)}
        for element in deletes:
            after[element.spec].pop(element.key, None)
        for element in adds:
            after[element.spec].setdefault(element.key, element.name)
            if len(after[element.spec]) > self.sizes.get(element.spec, 1 << 30):
                raise SetError(Cause.FULL, f"set {element.spec} is full")
        self.kernel.update(after)

    # What others do

    def flush(self) -> None:
        """`nft flush ruleset`, as far as our own tables go."""
        self.kernel = {spec: content for spec, content in self.kernel.items() if not spec.ours}
        self.changed.set()

    def remove(self, spec: SetSpec, key: bytes) -> None:
        """`nft delete element`."""
        self.kernel[spec].pop(key, None)
        self.changed.set()

    def add(self, spec: SetSpec, key: bytes, text: str = "") -> None:
        """`nft add element`."""
        self.kernel[spec].setdefault(key, text)
        self.changed.set()

    def has(self, elements: Collection[Element]) -> bool:
        """Tell whether the kernel has all of these elements."""
        return all(element.key in self.kernel.get(element.spec, ()) for element in elements)


class Answer(NamedTuple):
    """One answer that left: what it said, when, whether it had waited, whether the kernel was ready."""

    wire: bytes
    at: float
    held: bool
    applied: bool


ZOMBIES = ("zombies_per_endpoint", "grace", "unobserved")  # off, unless a test sets them


class Writer:
    """A NameManager on fake sets, with real policy, caches and plan.

    `answers` is everything that left, by the number that `ask` returned. Each answer is checked against the
    kernel at the moment in which it leaves.
    """

    def __init__(
        self, text: str, sets: FakeSets | None = None, *, hold: float = 0.1, **settings: Any
    ) -> None:
        bounds = {"minimum_ttl": 60, "addresses_per_name": 1000, "names_per_endpoint": 100_000}
        bounds |= {key: settings.pop(key) for key in (*bounds, *ZOMBIES) if key in settings}
        self.sets = sets or FakeSets()
        self.endpoints, self.policy = load([("policies.yaml", text)], enforcement="default")
        self.caches = Caches(**bounds)
        self.plan = Plan(self.policy, self.endpoints, caches=self.caches)
        self.clock = asyncio.get_running_loop().time
        self.manager = NameManager(self.plan, self.sets, Collector(self.caches), clock=self.clock, **settings)
        self.hold = hold
        self.answers: dict[int, Answer] = {}
        self.ends: dict[int, tuple[str, float]] = {}
        self.asked = 0

    def view(self, who: str = "ci") -> Any:
        return self.policy.view(next(each for each in self.endpoints.endpoints if each.name == who))

    def elements(self, text: str, *addresses: bytes, who: str = "ci") -> list[Element]:
        """Return everything that an answer opens."""
        view = self.view(who)
        grants = view.grants(_wire(text))
        return list(self.plan.opens(view.endpoint.key, [(grants, _wire(text))], addresses))

    def ask(self, text: str, *addresses: bytes, who: str = "ci", ttl: int = 0) -> int:
        """Play the exchange: an answer has come, and is released or held; return its number."""
        self.asked += 1
        number, view, name = self.asked, self.view(who), _wire(text)
        opens = self.elements(text, *addresses, who=who)
        now = self.clock()
        lacking = self.plan.observe(view, view.verdict(name).grants, name, addresses, ttl, now)

        def leave(wire: bytes, held: bool) -> None:
            assert number not in self.answers, "answered twice"
            self.answers[number] = Answer(wire, self.clock(), held, self.sets.has(opens))

        def done(wire: bytes, cause: str, held: float) -> None:
            self.ends[number] = (cause, held)

        if lacking:
            sink = CallSink(lambda wire, peer: leave(wire, True))
            hold = Hold(lacking, sink, "peer", now, now + self.hold, b"refusal", done)
            hold.owner = view.endpoint.key
            hold.judge = lambda: self.judge(who, name, addresses, ttl)
            self.manager.send(b"answer", hold)
        else:
            leave(b"answer", False)
        return number

    def judge(self, who: str, name: bytes, addresses: tuple[bytes, ...], ttl: int) -> Any:
        """Play the exchange once more: what an answer opens after a reload, or the denial."""
        endpoint = next((each for each in self.endpoints.endpoints if each.name == who), None)
        if endpoint is None:
            return b"denial"
        view = self.policy.view(endpoint)
        verdict = view.verdict(name)
        if not verdict.allowed:
            return b"denial"
        return self.plan.observe(view, verdict.grants, name, addresses, ttl, self.clock())

    def swap(self, text: str) -> None:
        """Reload."""
        self.endpoints, self.policy = load([("policies.yaml", text)], enforcement="default")
        self.manager.policy_changed(self.policy, self.endpoints)

    def wanted(self) -> dict[SetSpec, dict[bytes, str]]:
        """Return what caches and policy want, without empty sets."""
        found: dict[SetSpec, dict[bytes, str]] = {}
        for _ in self.plan.wanted(found):
            pass
        return {spec: content for spec, content in found.items() if content}

    def wanted_of_ours(self) -> dict[SetSpec, dict[bytes, str]]:
        """Return what caches and policy want in our own sets."""
        return {spec: content for spec, content in self.wanted().items() if spec.ours}

    def in_kernel(self) -> dict[SetSpec, dict[bytes, str]]:
        """Return what our sets hold, without empty ones."""
        return {spec: content for spec, content in self.sets.kernel.items() if content and spec.ours}

    def unapplied(self) -> list[int]:
        """Return the answers that were released although the kernel was not ready for them."""
        return [n for n, each in self.answers.items() if each.wire == b"answer" and not each.applied]

    @asynccontextmanager
    async def running(self, *, start: bool = True) -> AsyncIterator[Writer]:
        """Start, run until the end of the block, and stop."""
        task = asyncio.ensure_future(self.manager.run())
        try:
            if start:
                await self.manager.ready.wait()
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
