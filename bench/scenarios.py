"""What is measured, one function per scenario.

    a  names that are known         b  every name seen for the first time     c  pools whose answers rotate
    d  names that are denied        e  10,000 patterns and 200 endpoints      f  known names, over TCP
    g  more names, elements, rules  h  many queries in flight, slow upstream  l  how long an answer takes

All contestants of a scenario take turns, each round in another order.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forwarders import FORWARDERS, OURS, Forwarder, Run
from latency import Delays, paced
from load import Demand, Load, ask, prime
from policies import documents
from world import DOMAIN, FRESH, KNOWN, PORT, UPSTREAM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from world import Workshop

POOLS = 50  # names whose answers rotate
SIZES = (1_000, 10_000, 100_000)
LARGEST = 1_000_000
RULES = (10, 1_000, 100_000)
FEW = 500  # names that are asked while ever more others have elements
OUTSTANDING = (1_000, 5_000)
SLOW = 200  # ms
REST = 6.0  # seconds, after which whatever was put off is done: our state store writes within five
PACE = 100  # queries per second
FAST_PACE = 1_000


@dataclass
class Results:
    """Everything measured: by scenario and then by contestant, a value per round."""

    loads: dict[str, dict[str, list[Load]]] = field(default_factory=dict)
    delays: dict[str, dict[str, list[Delays]]] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Resident megabytes of a forwarder after its start, and after it was asked for all names."""

    idle: float
    known: float


@dataclass
class Bench:
    """One run of the tool: who takes part, how often and how long."""

    workshop: Workshop
    only: Sequence[str]
    rounds: int
    seconds: float
    quick: bool
    results: Results = field(default_factory=Results)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print progress."""
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)

    def chosen(self, among: Callable[[Forwarder], bool] = bool) -> list[Forwarder]:
        """Return the contestants that are wanted, installed, and fit."""
        wanted = [one for one in FORWARDERS if not self.only or one.name in self.only]
        return [one for one in wanted if one.installed() and among(one)]

    def run(
        self,
        forwarder: Forwarder,
        delay: int | None = None,
        policy: str = "",
        settings: dict[str, object] | None = None,
    ) -> Run:
        """Return a contestant that is not started yet."""
        return Run(forwarder, self.workshop, delay, policy, settings or {})


@dataclass
class Entry:
    """One contestant of a scenario."""

    label: str
    run: Run
    demand: Demand
    expected: str = "NOERROR"


@contextmanager
def started(runs: Iterable[Run]) -> Iterator[None]:
    """Start contestants, and stop them afterwards."""
    with ExitStack() as stack:
        for run in runs:
            run.start()
            stack.callback(run.stop)
        yield


def take_turns(bench: Bench, scenario: str, entries: Sequence[Entry]) -> None:
    """Measure every entry once per round, after all have come to rest."""
    time.sleep(REST)
    for number in range(bench.rounds):
        first = number % max(len(entries), 1)
        for entry in (*entries[first:], *entries[:first]):
            note(bench, scenario, entry, ask(entry.run, entry.demand, bench.seconds))


def note(bench: Bench, scenario: str, entry: Entry, load: Load) -> None:
    """Keep one measurement, and say it."""
    bench.results.loads.setdefault(scenario, {}).setdefault(entry.label, []).append(load)
    failed = load.failed(entry.expected)
    faults = f", {failed} of {load.sent} not answered as expected: {load.codes}" if failed else ""
    bench.say(f"{scenario}  {entry.label:24} {load.cost:7.1f} us {load.rate:9,.0f}/s{faults}")


def known(bench: Bench) -> None:
    """Scenario a: Allowed names whose addresses are known, and the memory that they take."""
    queries = bench.workshop.numbered("n", KNOWN)
    entries = [Entry(one.name, bench.run(one), Demand(queries)) for one in bench.chosen()]
    with started(entry.run for entry in entries):
        idle = [entry.run.tree().resident() for entry in entries]
        for entry in entries:
            prime(entry.run, queries)
        take_turns(bench, "a", entries)
        for entry, before in zip(entries, idle, strict=True):
            bench.results.memory[entry.label] = Memory(before, entry.run.tree().resident())


def fresh(bench: Bench) -> None:
    """Scenario b: Every answer brings new addresses into a set: each time a new process with an empty set."""
    queries, few = bench.workshop.numbered("f", FRESH), bench.workshop.numbered("n", FEW)
    contestants = bench.chosen(lambda one: bool(one.sets) or one.name == "floor")
    for number in range(bench.rounds):
        first = number % max(len(contestants), 1)
        for one in (*contestants[first:], *contestants[:first]):
            entry = Entry(one.name, bench.run(one), Demand(queries, once=True))
            with started([entry.run]):
                prime(entry.run, few)
                note(bench, "b", entry, ask(entry.run, entry.demand, bench.seconds))


def rotating(bench: Bench) -> None:
    """Scenario c: Fifty names whose answers change every time."""
    queries = bench.workshop.numbered("p", POOLS)
    contestants = bench.chosen(lambda one: bool(one.sets) or one.name == "floor")
    entries = [Entry(one.name, bench.run(one, delay=0), Demand(queries)) for one in contestants]
    with started(entry.run for entry in entries):
        for entry in entries:
            ask(entry.run, entry.demand, bench.seconds)  # the pool has been seen, and the caches are full
        take_turns(bench, "c", entries)


def denied(bench: Bench) -> None:
    """Scenario d: Names that no rule allows, beside known ones."""
    if not bench.chosen(lambda one: one is OURS):
        return
    run = bench.run(OURS)
    others = bench.workshop.queries("denied", [f"n{number}.denied.example" for number in range(KNOWN)])
    known_names = bench.workshop.numbered("n", KNOWN)
    with started([run]):
        prime(run, known_names)
        entries = [
            Entry("known", run, Demand(known_names)),
            Entry("denied", run, Demand(others), "NXDOMAIN"),
        ]
        take_turns(bench, "d", entries)


def many_rules(bench: Bench) -> None:
    """Scenario e: 10,000 patterns that select 200 endpoints, beside one of each."""
    policies = {"one pattern": documents(), "10,000 patterns": documents(10_000, 200)}
    _under(bench, "e", policies)


def _under(bench: Bench, scenario: str, policies: dict[str, str]) -> None:
    """Measure known names under several policies."""
    if not bench.chosen(lambda one: one is OURS):
        return
    queries = bench.workshop.numbered("n", KNOWN)
    runs = {label: bench.run(OURS, policy=policy) for label, policy in policies.items()}
    with started(runs.values()):
        for run in runs.values():
            prime(run, queries)
        take_turns(bench, scenario, [Entry(label, run, Demand(queries)) for label, run in runs.items()])


def over_tcp(bench: Bench) -> None:
    """Scenario f: Known names over TCP."""
    queries = bench.workshop.numbered("n", KNOWN)
    contestants = bench.chosen(lambda one: one.tcp and (one is OURS or not one.sets))
    entries = [Entry(one.name, bench.run(one), Demand(queries, tcp=True)) for one in contestants]
    with started(entry.run for entry in entries):
        for entry in entries:
            prime(entry.run, queries)
        take_turns(bench, "f", entries)


def growing(bench: Bench) -> None:
    """Scenario g: The cost as names, elements and rules become more."""
    _under(bench, "g rules", {f"{count:,} rules": documents(count) for count in RULES})
    if not bench.chosen(lambda one: one is OURS):
        return
    sizes = SIZES if bench.quick else (*SIZES, LARGEST)
    settings: dict[str, object] = {"cache": {"names_per_endpoint": 2 * LARGEST}}
    runs = {size: bench.run(OURS, delay=0, settings=settings) for size in sizes}
    files = {size: bench.workshop.numbered("n", size) for size in sizes}
    few = bench.workshop.numbered("n", FEW)
    with started(runs.values()):
        for size, run in runs.items():
            idle = run.tree().resident()
            prime(run, files[size])
            bench.results.memory[f"{size:,} names"] = Memory(idle, run.tree().resident())
            bench.say(f"g  {size:,} names are known")
        take_turns(
            bench, "g names", [Entry(f"{n:,} names", run, Demand(files[n])) for n, run in runs.items()]
        )
        take_turns(
            bench, "g elements", [Entry(f"{2 * n:,} elements", run, Demand(few)) for n, run in runs.items()]
        )


def outstanding(bench: Bench) -> None:
    """Scenario h: Many queries in flight before a slow upstream: every one is answered, and rightly."""
    queries, unseen = bench.workshop.numbered("n", FEW), bench.workshop.numbered("f", KNOWN)
    for one in bench.chosen():
        run = bench.run(one, delay=SLOW)
        with started([run]):
            ask(run, Demand(queries, once=True), 30)
            for count in OUTSTANDING:
                entry = Entry(one.name, run, Demand(queries, outstanding=count))
                note(bench, f"h {count:,}", entry, ask(run, entry.demand, bench.seconds))
            if one.sets:
                entry = Entry(one.name, run, Demand(unseen, outstanding=OUTSTANDING[0], once=True))
                note(bench, f"h {OUTSTANDING[0]:,} first-seen", entry, ask(run, entry.demand, bench.seconds))


def waiting(bench: Bench) -> None:
    """Scenario l: How long an answer takes, at a steady pace: known names, then ones never seen."""
    names = [f"n{number}.{DOMAIN}" for number in range(int(PACE * bench.seconds))]
    runs = [bench.run(one) for one in bench.chosen()]
    with started(runs):
        for run in runs:
            prime(run, bench.workshop.queries("paced", names))
        time.sleep(REST)
        for _ in range(bench.rounds):
            _pace(bench, "known", runs, names, PACE)
        count = min(int(FAST_PACE * bench.seconds), FRESH // bench.rounds)
        for number in range(bench.rounds):
            for run in (run for run in runs if run.forwarder.sets or run.forwarder.name == "floor"):
                unseen = [f"f{at}.{DOMAIN}" for at in range(number * count, (number + 1) * count)]
                _pace(bench, "first", [run], unseen, FAST_PACE)


def _pace(bench: Bench, kind: str, runs: Sequence[Run], names: Sequence[str], rate: float) -> None:
    """Ask NSD itself as well, so that what a forwarder adds can be told."""
    places = {"NSD": (runs[0].world, UPSTREAM), **{run.forwarder.name: (run.world, PORT) for run in runs}}
    if kind == "first":
        del places["NSD"]  # has not more to do than for a known one
    delays = paced(list(places.values()), names, rate)
    for label, delay in zip(places, delays, strict=True):
        bench.results.delays.setdefault(kind, {}).setdefault(label, []).append(delay)
        missing = f", {delay.missing} not answered" if delay.missing else ""
        bench.say(f"l  {kind} {label:24} p50 {delay.p50:.3f} ms, p99 {delay.p99:.3f} ms{missing}")


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "a": known,
    "b": fresh,
    "c": rotating,
    "d": denied,
    "e": many_rules,
    "f": over_tcp,
    "g": growing,
    "h": outstanding,
    "l": waiting,
}
