"""How long addresses live: all of cache/ against a plain specification, which shares no code with it.

Two machines. The first does whole rounds of collection, and everything must be exactly as specified: what is
in the caches, what is a zombie with which times, what was told as gone and why. The second lets everything
happen between any two steps of a round, and checks what nobody may ever see: a connection that lost its
address, and a pair that vanished without a word.
"""

from __future__ import annotations

import os
from math import floor
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dnsproxy.cache import gc, zombies
from dnsproxy.cache.gc import Caches, Collector
from dnsproxy.names import from_text

DEEP = bool(os.environ.get("DNSPROXY_DEEP"))
A, B, C, D = map(from_text, ("a.example", "b.example", "c.example", "d.example"))
ONE, TWO, THREE, SIX = b"\xc0\x00\x02\x01", b"\xc0\x00\x02\x02", b"\xc0\x00\x02\x03", bytes(15) + b"\x06"

KEYS = st.sampled_from(("one", "two"))
NAMES = st.sampled_from((A, B, C, D))
ADDRESSES = st.sampled_from((ONE, TWO, THREE, SIX))
ANSWERS = st.lists(ADDRESSES, min_size=1, max_size=3).map(tuple)
TTLS = st.sampled_from((0, 2, 5, 90))
SECONDS = st.sampled_from((0.25, 1.0, 3.0, 100.0))
CONNECTIONS = st.sets(st.tuples(KEYS, ADDRESSES), max_size=4)

MINIMUM_TTL, MAXIMUM, UNOBSERVED = 1, 2, 50.0


# The specification


class Lease(NamedTuple):
    """How long a pair is in the cache; of two the one that ends later counts, then the later lookup."""

    ends: float
    asked: float


class Undead:
    """A zombie in the plainest words."""

    def __init__(self):
        self.names = set()
        self.put_up = None  # when last
        self.order = None  # how many things had happened when it was last put up
        self.alive = None  # when it was last known to be alive
        self.seen_by = []  # passes


class Pass:
    def __init__(self, order, began):
        self.order, self.began = order, began
        self.completed = False


class Specification:
    """Everything is looked up and counted anew whenever it is asked for."""

    def __init__(self, per_name, grace):
        self.per_name, self.grace = per_name, grace
        self.cache = {}  # (key, name, address) -> Lease
        self.waiting = set()  # pairs that have left the cache since the last collection
        self.undead = {}  # (key, address) -> Undead
        self.passes = []
        self.events = 0
        self.observing = True
        self.forced = set()
        self.dropped = set()

    # What happens

    def observe(self, key, name, answer, ttl, now):
        ttl = max(ttl, MINIMUM_TTL)
        for address in answer:
            lease = Lease(now + ttl, now)
            self.cache[key, name, address] = max(lease, self.cache.get((key, name, address), lease))
        if self.per_name and len(self.leases(key, name)) > 2 * self.per_name:
            self.shorten(key, name)

    def begin(self, now):
        self.events += 1
        self.passes.append(Pass(self.events, now))

    def see(self, key, address):
        if (key, address) in self.undead:
            self.undead[key, address].seen_by.append(self.passes[-1])
            self.undead[key, address].alive = max(self.undead[key, address].alive, self.passes[-1].began)

    def complete(self):
        self.passes[-1].completed = True

    def force(self, names, now):
        for (key, address), undead in list(self.undead.items()):
            if undead.put_up <= now:
                self.forced |= {(key, name, address, "forced") for name in undead.names & names}
                self.lay(key, address, undead.names & names)
        for (key, name, address), lease in list(self.cache.items()):
            if name in names and lease.asked < now:
                self.leave(key, name, address)

    def drop(self, key):
        gone = {pair for pair in (*self.cache, *self.waiting) if pair[0] == key}
        for place, undead in list(self.undead.items()):
            if place[0] == key:
                gone |= {(key, name, place[1]) for name in undead.names}
                del self.undead[place]
        self.dropped |= {(*pair, "dropped") for pair in gone}
        self.dropped |= {told for told in self.forced if told[0] == key}
        self.forced = {told for told in self.forced if told[0] != key}
        self.waiting = {pair for pair in self.waiting if pair[0] != key}
        self.cache = {pair: lease for pair, lease in self.cache.items() if pair[0] != key}

    def restart(self):
        """Only pairs, leases and times survive. The passes do not, and nobody has looked since."""
        self.passes = []
        self.events = 0
        self.waiting, self.forced, self.dropped = set(), set(), set()
        for undead in self.undead.values():
            undead.order, undead.seen_by = 0, []

    # The cache

    def leases(self, key, name):
        return sorted((lease, a) for (k, n, a), lease in self.cache.items() if (k, n) == (key, name))

    def leave(self, key, name, address):
        del self.cache[key, name, address]
        self.waiting.add((key, name, address))

    def shorten(self, key, name):
        leases = self.leases(key, name)
        for _, address in leases[: len(leases) - self.per_name]:
            self.leave(key, name, address)

    # A zombie

    def put_up(self, key, name, address, now):
        undead = self.undead.setdefault((key, address), Undead())
        undead.names.add(name)
        undead.put_up = undead.alive = now
        undead.order = self.events

    def lay(self, key, address, names):
        """Take names from a zombie; one without names is none."""
        self.undead[key, address].names -= names
        if not self.undead[key, address].names:
            del self.undead[key, address]

    def completed(self):
        return [each for each in self.passes if each.completed]

    def connected(self, undead, now):
        """Whether the zombie's own connection may be alive."""
        if not self.observing:
            return now - undead.alive < UNOBSERVED
        proofs = [each for each in self.completed() if each.order > undead.order]
        if len(proofs) < 2 or now - undead.alive < self.grace:
            return True
        return any(each.order >= self.completed()[-1].order for each in undead.seen_by)

    def rank(self, place):
        """The lowest is evicted first."""
        undead = self.undead[place]
        last, before = ([each.order for each in reversed(self.completed())] + [0, 0])[:2]
        seen = max([each.order for each in undead.seen_by], default=None)
        if seen is not None and seen >= last:
            state = 3
        elif seen is not None and seen >= before:
            state = 2
        elif undead.order >= last:
            state = 1
        else:
            state = 0
        return state, undead.alive, undead.put_up, len(undead.names), place[1]

    # A round

    def collect(self, now):
        """Return what is gone for good, and why."""
        told = set()
        for key in ("one", "two"):
            told |= self.collect_one(key, now)
        told |= {each for each in self.dropped if not self.has(*each[:3])}
        self.forced, self.dropped = set(), set()
        return told

    def has(self, key, name, address):
        undead = self.undead.get((key, address))
        return (key, name, address) in self.cache or (undead is not None and name in undead.names)

    def collect_one(self, key, now):
        for pair, lease in list(self.cache.items()):
            if pair[0] == key and lease.ends < floor(now):
                self.leave(*pair)
        if self.per_name:
            for name in {pair[1] for pair in self.cache if pair[0] == key}:
                self.shorten(key, name)
        for pair in [pair for pair in self.waiting if pair[0] == key]:
            self.waiting.discard(pair)
            if pair not in self.cache:
                self.put_up(*pair, now)
        forced = {told for told in self.forced if told[0] == key and not self.has(*told[:3])}
        for place, undead in list(self.undead.items()):
            if place[0] == key:
                self.lay(*place, {name for name in undead.names if (key, name, place[1]) in self.cache})
        return forced | self.bury(key, now) | self.evict_all(key)

    def bury(self, key, now):
        ours = {place: undead for place, undead in self.undead.items() if place[0] == key}
        living = set().union(*(undead.names for undead in ours.values() if self.connected(undead, now)))
        cause = "idle" if self.observing else "unobserved"
        dead = [
            p for p, undead in ours.items() if not self.connected(undead, now) and not undead.names & living
        ]
        return {told for place in dead for told in self.end(place, cause)}

    def evict_all(self, key):
        told = set()
        if self.per_name:
            for name in sorted((A, B, C, D)):
                pool = [
                    place for place, each in self.undead.items() if place[0] == key and name in each.names
                ]
                told |= self.evict(pool, self.per_name)
        return told | self.evict([place for place in self.undead if place[0] == key], MAXIMUM)

    def evict(self, pool, bound):
        first = sorted(pool, key=self.rank)[: max(0, len(pool) - bound)]
        told = set()
        for place in first:
            told |= self.end(place, "evicted live" if self.rank(place)[0] == 3 else "limit")
        return told

    def end(self, place, cause):
        return {(place[0], name, place[1], cause) for name in self.undead.pop(place).names}


# The machines


class Machine(RuleBasedStateMachine):
    """What both machines do to the real thing."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.patch = pytest.MonkeyPatch()
        for module in (gc, zombies):
            self.patch.setattr(module, "PIECE", 2)

    def teardown(self):
        self.patch.undo()

    def begin_with(self, per_name, grace):
        self.settings = {
            "minimum_ttl": MINIMUM_TTL,
            "addresses_per_name": per_name,
            "names_per_endpoint": 1000,
            "zombies_per_endpoint": MAXIMUM,
            "grace": grace,
            "unobserved": UNOBSERVED,
        }
        self.real = Caches(**self.settings)
        self.collector = Collector(self.real)
        for key in ("one", "two"):
            self.real.of(key)
        self.running = None  # the pass in progress: serial, start

    def learn(self, key, name, answer, ttl):
        self.real.of(key).insert(name, answer, ttl, self.now)
        self.real.global_.insert(name, answer, ttl, self.now)

    def mark(self, connections):
        serial, began = self.running
        for key, these in self.real.zombies.items():
            for _ in these.mark(serial, began, {address for k, address in connections if k == key}):
                pass

    def pairs(self):
        return {
            (key, name, address)
            for key, cache in self.real.endpoints.items()
            for name, address, _ in cache.items()
        }

    def undead(self):
        return {
            (key, name, zombie.address)
            for key, these in self.real.zombies.items()
            for zombie in these
            for name in zombie.names
        }

    def global_pairs(self):
        return {(name, address) for name, address, _ in self.real.global_.items()}


class LifetimeMachine(Machine):
    """Whole rounds; the real thing and the specification are the same all the time."""

    @initialize(per_name=st.sampled_from((0, 1, 2)), grace=st.sampled_from((0.0, 5.0)))
    def start(self, per_name, grace):
        self.begin_with(per_name, grace)
        self.plain = Specification(per_name, grace)

    @rule(key=KEYS, name=NAMES, answer=ANSWERS, ttl=TTLS)
    def observe(self, key, name, answer, ttl):
        self.learn(key, name, answer, ttl)
        self.plain.observe(key, name, answer, ttl, self.now)

    @rule(seconds=SECONDS)
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def begin(self):
        """Begin a pass; one that was running has failed."""
        self.running = self.real.passes.begin(), self.now
        self.plain.begin(self.now)

    @precondition(lambda self: self.running)
    @rule(connections=CONNECTIONS)
    def see(self, connections):
        self.mark(connections)
        for connection in connections:
            self.plain.see(*connection)

    @precondition(lambda self: self.running)
    @rule()
    def complete(self):
        self.real.passes.complete(*self.running)
        self.plain.complete()
        self.running = None

    @rule(connections=CONNECTIONS)
    def do_a_whole_pass(self, connections):
        self.begin()
        self.see(connections)
        self.complete()

    @rule(key=KEYS, name=NAMES, answer=ANSWERS)
    def learn_and_lose(self, key, name, answer):
        """The short way to zombies."""
        self.observe(key, name, answer, 0)
        self.wait(0.25)
        self.force({name})
        self.collect(5)

    @rule(observing=st.sampled_from((True, True, True, False)))
    def gain_or_lose_sight(self, observing):
        self.real.passes.observing = self.plain.observing = observing

    @rule(names=st.sets(NAMES))
    def force(self, names):
        for _ in self.real.expire(names.__contains__, self.now, connections=True):
            pass
        self.plain.force(names, self.now)

    @rule(key=KEYS)
    def drop(self, key):
        self.real.drop(key)
        self.real.of(key)
        self.plain.drop(key)

    @precondition(lambda self: self.plain.undead)
    @rule()
    def restart(self):
        """Dump and load through plain records, as the store does."""
        lookups = {key: list(cache.records()) for key, cache in self.real.endpoints.items()}
        undead = {key: list(these.records()) for key, these in self.real.zombies.items()}
        observing = self.real.passes.observing
        self.begin_with(self.plain.per_name, self.plain.grace)
        self.real.passes.observing = observing
        for key, records in lookups.items():
            self.real.endpoints[key].load(records)
            self.real.global_.load(records)
        for key, records in undead.items():
            self.real.zombies[key].load(records)
        self.plain.restart()

    @rule(budget=st.integers(1, 5))
    def collect(self, budget):
        global_before, told, done = self.global_pairs(), set(), False
        while not done:
            step = self.collector.step(self.now, budget)
            told |= {(key, *pair) for key, removed in step.removed.items() for pair in removed}
            assert (step.unreported, step.done) in [(0, False), (0, True)]
            done = step.done
        assert told == self.plain.collect(self.now)
        held = {pair[1:] for pair in self.pairs() | self.undead()}
        assert self.global_pairs() == global_before & held

    @invariant()
    def same(self):
        if not hasattr(self, "plain"):
            return
        real = {
            (key, name, address): (lookup.expiry, lookup.looked_up)
            for key, cache in self.real.endpoints.items()
            for name, address, lookup in cache.items()
        }
        assert real == self.plain.cache
        assert {
            (key, zombie.address): (set(zombie.names), zombie.pending_at, zombie.alive_at)
            for key, these in self.real.zombies.items()
            for zombie in these
        } == {place: (each.names, each.put_up, each.alive) for place, each in self.plain.undead.items()}


class ConnectionMachine(Machine):
    """Everything between any two steps. There are real connections, which passes see piece by piece.

    A connection begins while its pair is known, as connections do, and nothing but an operator's order, the
    end of its endpoint or a limit may take its address away. A mirror that is fed by what is told is right.
    """

    @initialize(grace=st.sampled_from((0.0, 5.0)))
    def start(self, grace):
        self.begin_with(0, grace)
        self.open = set()  # (key, address) with a connection
        self.unseen = set()  # of those, what the running pass has yet to look at
        self.excused = set()  # pairs that were taken away by order
        self.mirror = set()

    @rule(key=KEYS, name=NAMES, answer=ANSWERS, ttl=TTLS)
    def observe(self, key, name, answer, ttl):
        self.learn(key, name, answer, ttl)
        self.mirror |= {(key, name, address) for address in answer}

    @rule(seconds=SECONDS)
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.pairs())
    @rule(data=st.data())
    def connect(self, data):
        key, _, address = data.draw(st.sampled_from(sorted(self.pairs())))
        self.open.add((key, address))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data):
        self.open.discard(data.draw(st.sampled_from(sorted(self.open))))

    @rule()
    def begin(self):
        self.running = self.real.passes.begin(), self.now
        self.unread = {(key, address) for key in ("one", "two") for address in (ONE, TWO, THREE, SIX)}

    @precondition(lambda self: self.running)
    @rule(some=st.sets(st.tuples(KEYS, ADDRESSES)))
    def read_a_part_of_the_table(self, some):
        self.mark(self.open & self.unread & some)
        self.unread -= some

    @precondition(lambda self: self.running)
    @rule()
    def complete(self):
        self.mark(self.open & self.unread)
        self.real.passes.complete(*self.running)
        self.running = None

    @rule(names=st.sets(NAMES))
    def force(self, names):
        orders = self.real.expire(names.__contains__, self.now, connections=True)
        for _ in orders:
            pass
        self.excuse()

    @rule(key=KEYS)
    def drop(self, key):
        self.real.drop(key)
        self.real.of(key)
        self.excuse()

    def excuse(self):
        """An address that an order took is not missed; its connection is over."""
        known = {(key, address) for key, _, address in self.pairs() | self.undead() | self.awaited()}
        self.open &= known

    def awaited(self):
        """Pairs that wait in a cache to be put up: no longer read, not yet zombies."""
        return {
            (key, pair.name, pair.address)
            for key, cache in self.real.endpoints.items()
            for pair in cache._left.values()
        }

    @rule(budget=st.integers(1, 4))
    def do_a_step(self, budget):
        self.step(budget)

    def step(self, budget):
        step = self.collector.step(self.now, budget)
        for key, removed in step.removed.items():
            told = {(key, pair.name, pair.address) for pair in removed}
            assert not told & (self.pairs() | self.undead())
            self.mirror -= told
            limited = {pair.address for pair in removed if pair.cause in ("limit", "evicted live")}
            self.open -= {(key, address) for address in limited if self.real.zombies[key].of(address) is None}
        assert step.unreported == 0
        return step

    @rule(budget=st.integers(1, 4))
    def finish(self, budget):
        """The running round and another one make everything exact."""
        for _ in range(2):
            while not self.step(budget).done:
                pass
        held = self.pairs() | self.undead()
        assert self.mirror == held
        assert not self.pairs() & self.undead()
        assert self.global_pairs() <= {pair[1:] for pair in held}
        assert all(len(these) <= MAXIMUM for these in self.real.zombies.values())

    @rule()
    def close_all_and_look_twice(self):
        """Once the last connection is over and two passes have been, nothing but leases keeps a pair."""
        self.open = set()
        self.now += 1000.0
        self.finish(4)  # the leases end
        for _ in range(2):
            self.begin()
            self.complete()
        self.now += 10.0  # grace
        self.finish(4)
        assert self.mirror == set()
        assert self.global_pairs() == set()

    @invariant()
    def no_connection_is_cut(self):
        if hasattr(self, "open"):
            held = self.pairs() | self.undead() | self.awaited()
            assert self.open <= {(key, address) for key, _, address in held}
            assert held - self.awaited() <= self.mirror


LifetimeMachine.TestCase.settings = settings(max_examples=10_000 if DEEP else 100, stateful_step_count=40)
ConnectionMachine.TestCase.settings = settings(max_examples=10_000 if DEEP else 100, stateful_step_count=40)
test_addresses_live_exactly_as_specified = LifetimeMachine.TestCase
test_no_connection_loses_its_address_and_no_pair_vanishes_silently = ConnectionMachine.TestCase
