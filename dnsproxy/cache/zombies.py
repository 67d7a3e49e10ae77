"""Zombies: addresses whose lease is over, kept while a connection may still use them.

Every pair of name and address that leaves an endpoint's cache, for whatever reason, is *put up* here. One
zombie is one address, by all names that it was put up with. It is given up when its connection is over.

*Proof.* Nobody tells us that a connection has ended; there are only passes over the kernel's table of
connections, minutes apart. A pass that began before an address was put up proves nothing: it may have read
the place in question before the connection came, and ended between lease and zombie. One that began later
may have fallen between a closed connection and the next one to the same address. So two completed passes,
both begun after the address was last put up, must lie behind us, and the last one must not have seen it.
All this is decided by serials: a clock cannot tell which of two things was first. What is put up is alive as
of now; `grace` seconds after it was last seen alive or put up it may go, which lets clients come back.

*Siblings.* A client that keeps one address of a name will open its next connection to another one that the
same answer gave. So a zombie stays while any of its names has a zombie with a live connection. That is one
step and no chain: a sibling of a sibling is a stranger.

*Limits.* Of one name only `per_name` zombies stay, of one endpoint `maximum`. The first to go are those that
the last pass looked for in vain, longest idle first; then the new ones, which no whole pass has looked for;
then those that the pass before the last saw; last those that the last one saw, or the running one. Between
equals the one put up earlier goes, then the one with fewer names, then the lower address. The pairs have a
limit, too, NAMES for each zombie on average: a connection that never ends, to an address that serves ever
new names, would otherwise collect them all. Who has more than an equal share loses its oldest names.

*Rounds.* `collect` is one round, cut into steps. Between two steps passes mark, operators force, endpoints
go. The round decides on what it has seen, and before anything is given up its own connection is looked at
again: what has come alive meanwhile stays. A zombie's names are given up piece by piece, and what is left
of it between two pieces is a whole zombie: 160,000 names on one address make no step longer. A pair that is
in the cache again is no longer ours and leaves silently.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from dnsproxy.cache.lookups import Reverse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator

    from dnsproxy.cache.lookups import LookupCache

PIECE: Final = 250  # names or addresses that are dealt with in one go, well under a millisecond
NAMES: Final = 16  # pairs kept for each zombie of the maximum, on average
SLACK: Final = 250  # how far the limits may be exceeded between two rounds, besides twofold
COST: Final = 8  # units of work that one address takes to be given up, besides its names
REMEMBERED: Final = 1000  # addresses in `departed`
TOLD: Final = 8  # names of one address in `departed`

# Why a pair is gone: its connection is over; nobody could look, and its time is over; a limit; a limit, and
# the last pass had seen its connection; by force; its endpoint is gone; there are to be no zombies.
Cause: TypeAlias = Literal["idle", "unobserved", "limit", "evicted live", "forced", "dropped", "off"]
State: TypeAlias = Literal["idle", "new", "recent", "live"]

STATES: Final[tuple[State, ...]] = ("idle", "new", "recent", "live")  # in this order they are evicted


class Passes:
    """What is known of the passes over the kernel's table of connections; one object for all endpoints.

    `begun` and `completed` are the serials of the pass begun last and of the last completed one, 0 none;
    `previous` is that of the one completed before it. A pass that fails is begun and never completed.
    `started_at` is when the last completed one started, `next_at` an estimate for people, both in monotonic
    seconds. `observing` is False where the table cannot be read: zombies then live for a fixed time.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.completed = 0
        self.previous = 0
        self.started_at = -inf
        self.next_at: float | None = None
        self.observing = True

    def begin(self) -> int:
        """Begin a pass; return its serial."""
        self.begun += 1
        return self.begun

    def complete(self, serial: int, started_at: float, next_at: float | None = None) -> None:
        """Note that a pass has read the whole table, after all that it saw has been marked."""
        self.previous, self.completed = self.completed, serial
        self.started_at, self.next_at = started_at, next_at


class Zombie:
    """One address, by the names that it was put up with, oldest first."""

    __slots__ = ("address", "alive_at", "marked", "names", "pending_at", "since")

    def __init__(self, address: bytes) -> None:
        self.address = address
        self.names: dict[bytes, None] = {}
        self.alive_at = -inf  # when it was put up last, or the last pass that saw it began
        self.pending_at = -inf  # when it was put up last
        self.since = 0  # the pass begun last when it was put up last
        self.marked = 0  # the last pass that saw it, 0 none


class ZombieRecord(NamedTuple):
    """A zombie as it is stored; its times are monotonic seconds here, its names in their order."""

    address: bytes
    names: tuple[bytes, ...]
    alive_at: float
    pending_at: float


class Gone(NamedTuple):
    """A pair that is gone for good, and why."""

    name: bytes
    address: bytes
    cause: Cause


class Departed(NamedTuple):
    """What is remembered of an address that has gone: when, some of its names, why."""

    when: float
    names: tuple[bytes, ...]
    cause: Cause


Work: TypeAlias = "Iterator[tuple[list[Gone], int]]"  # per step: what is gone for good, units of work spent
Key: TypeAlias = tuple[int, float, float, int, bytes]  # the lower goes first; the address is its last part


class Zombies:
    """One endpoint's zombies. `grace` and `unobserved` are seconds; `maximum` 0 means that none stays.

    `pairs` are counted, and `alive` are the addresses of which the last round could not say that their
    connection is over; `evicted` counts addresses that a limit has cost, `evicted_live` those among them of
    which the last pass had seen a connection. `changed`, if not None, collects the addresses whose records
    have changed since somebody last emptied it; `overrun` says that some were lost from it.
    """

    def __init__(self, maximum: int, per_name: int, grace: float, unobserved: float, passes: Passes) -> None:
        self.passes = passes
        self.pairs = 0
        self.alive = 0
        self.evicted = 0
        self.evicted_live = 0
        self.changed: set[bytes] | None = None
        self.overrun = False
        self.departed: OrderedDict[bytes, Departed] = OrderedDict()
        self._maximum = maximum
        self._per_name = per_name
        self._grace = grace
        self._unobserved = unobserved
        self._zombies: dict[bytes, Zombie] = {}
        self._by_name = Reverse()  # name -> addresses
        self._left: list[Gone] = []  # forced out, to be told by the next round

    # Putting up

    def add(self, name: bytes, address: bytes, now: float) -> None:
        """Put a pair up: it is alive as of now, and only passes that begin after this say otherwise."""
        self._put_up(address, (name,), now, now)

    def load(self, records: Iterable[ZombieRecord]) -> None:
        """Take over records with their times; two passes from now on decide about them."""
        for record in records:
            self._put_up(record.address, record.names, record.alive_at, record.pending_at)

    def _put_up(self, address: bytes, names: Collection[bytes], alive_at: float, pending_at: float) -> None:
        if not names:
            return
        zombie = self._zombies.get(address)
        if zombie is None:
            zombie = self._zombies[address] = Zombie(address)
        for name in names:
            if name not in zombie.names:
                zombie.names[name] = None
                self._by_name.link(name, address)
                self.pairs += 1
        zombie.alive_at = max(zombie.alive_at, alive_at)
        zombie.pending_at = max(zombie.pending_at, pending_at)
        zombie.since = self.passes.begun
        self._note(address)

    def mark(self, serial: int, at: float, addresses: Container[bytes]) -> Iterator[None]:
        """Note, in steps, the addresses to which a pass, begun at `at`, saw this endpoint's connections."""
        for piece in _pieces(list(self._zombies)):
            for address in piece:
                zombie = self._zombies.get(address) if address in addresses else None
                if zombie is not None:
                    zombie.marked = max(zombie.marked, serial)
                    zombie.alive_at = max(zombie.alive_at, at)
                    self._note(address)
            yield

    # Reading

    def __len__(self) -> int:
        return len(self._zombies)

    def __iter__(self) -> Iterator[Zombie]:
        """Walk over all zombies; they may come and go meanwhile."""
        return iter(list(self._zombies.values()))

    def of(self, address: bytes) -> Zombie | None:
        """Return the zombie of an address."""
        return self._zombies.get(address)

    def addresses(self, name: bytes) -> Collection[bytes]:
        """Return the addresses of a name, in no order and not copied: not to be kept."""
        return self._by_name.of(name)

    def unknown(self, names: set[bytes]) -> set[bytes]:
        """Return those of `names` that no zombie has."""
        by_name = self._by_name  # not `difference`, which would walk over a subclass of dict
        return {name for name in names if name not in by_name}

    def holds(self, name: bytes, address: bytes) -> bool:
        """Tell whether a pair is here."""
        zombie = self._zombies.get(address)
        return zombie is not None and name in zombie.names

    def state(self, zombie: Zombie) -> State:
        """Return what the passes say of a zombie's connection; see STATES."""
        passes, seen = self.passes, zombie.marked
        if seen and seen >= passes.completed:
            return "live"
        if seen and seen >= passes.previous:
            return "recent"
        return "new" if zombie.since >= passes.completed else "idle"

    def busy(self, zombie: Zombie) -> bool:
        """Tell whether a connection may use a zombie, as far as anybody can see."""
        return not self.passes.observing or self.state(zombie) != "idle"

    def until(self, zombie: Zombie) -> float | None:
        """Return when it is decided next whether a zombie stays; it ends then where nobody can look."""
        return self.passes.next_at if self.passes.observing else _seen(zombie) + self._unobserved

    def record(self, address: bytes) -> ZombieRecord | None:
        """Return the record of an address."""
        zombie = self._zombies.get(address)
        return None if zombie is None else _record(zombie)

    def records(self) -> Iterator[ZombieRecord]:
        """Walk over all records; zombies may come and go meanwhile."""
        return (_record(zombie) for zombie in self if zombie.names)

    @property
    def overfull(self) -> bool:
        """Whether twice as much is here as may stay: a round must come before more is put up."""
        return len(self) > 2 * self._maximum + SLACK or self.pairs > 2 * NAMES * self._maximum + SLACK

    # Forcing

    def forget(self, name: bytes, address: bytes, now: float) -> bool:
        """Force one pair out, live or not; tell whether it was there."""
        zombie = self._zombies.get(address)
        if zombie is None or name not in zombie.names:
            return False
        self._take(zombie, name)
        self._remember(address, (name,), now, "forced")
        self._left.append(Gone(name, address, "forced"))  # no more than there were: needs no bound
        return True

    def expire(
        self, matches: Callable[[bytes], bool], now: float, *, connections: bool = False
    ) -> Iterator[int]:
        """Force out, in steps, matching names put up until `now`; yields pairs per step.

        An address that a connection may use is left alone, unless `connections` are to be cut as well.
        """
        for zombie in self:
            if zombie.pending_at <= now and (connections or not self.busy(zombie)):
                for piece in _pieces(list(zombie.names)):
                    yield sum(self.forget(name, zombie.address, now) for name in piece if matches(name))

    # A round

    def collect(self, now: float, cache: LookupCache) -> Work:
        """Do one round. `cache` is the endpoint's: what is in there again is not given up but forgotten."""
        living: set[bytes] = set()
        crowded: set[bytes] = set()
        yield from self._report()
        yield from self._look(now, cache, living, crowded)
        yield from self._bury(now, living)
        for name in sorted(crowded):
            yield from self._evict(self._by_name.of(name), self._per_name, now)
        yield from self._evict(self._zombies.keys(), self._maximum, now)
        yield from self._trim(now)
        self.alive = min(self.alive, len(self))  # a limit costs the idle ones first

    def drain(self, now: float) -> Work:
        """Give everything up, for an endpoint that is gone."""
        yield from self._report()
        for zombie in self:
            yield from self._give_up(zombie, "dropped", now, lambda: True)

    def _report(self) -> Work:
        while self._left:
            piece, self._left[-PIECE:] = self._left[-PIECE:], []
            yield piece, len(piece)

    def _look(self, now: float, cache: LookupCache, living: set[bytes], crowded: set[bytes]) -> Work:
        """Forget what the cache has; note the shared names that have a live connection or too many."""
        by_name, alive = self._by_name, 0
        for zombie in self:
            live = self._verdict(zombie, now) is None
            alive += live
            for piece in _pieces(list(zombie.names)):
                learned = cache.holders(zombie.address)
                for name in [name for name in piece if name in learned and name in zombie.names]:
                    self._take(zombie, name)
                shared = [name for name in piece if by_name.is_shared(name)]
                if live:
                    living.update(shared)
                if self._per_name:
                    crowded.update(name for name in shared if len(by_name.of(name)) > self._per_name)
                yield [], 1 + len(piece)
        self.alive = alive

    def _bury(self, now: float, living: set[bytes]) -> Work:
        """Give up those whose connection is over and whose names are not among the living."""
        for zombie in self:
            cause = self._verdict(zombie, now)
            pieces = _pieces(list(zombie.names)) if cause else ()
            for piece in pieces:
                if not living.isdisjoint(piece):
                    break
                yield [], len(piece)
            else:
                if cause:
                    yield from self._give_up(zombie, cause, now, partial(self._verdict, zombie, now))
            yield [], 1

    def _verdict(self, zombie: Zombie, now: float) -> Cause | None:
        """Return why a connection counts as over; None while it may live."""
        passes = self.passes
        idle = now - _seen(zombie)
        if self._maximum == 0:
            return "off"
        if not passes.observing:
            return "unobserved" if idle >= self._unobserved else None
        proven = passes.previous > zombie.since and zombie.marked < passes.completed
        return "idle" if proven and idle >= self._grace else None

    # Limits

    def _evict(self, pool: Collection[bytes], bound: int, now: float) -> Work:
        """Give up, of some addresses, those that go first, until no more than `bound` are left."""
        while len(pool) > bound:
            yield from self._evict_first(pool, len(pool) - bound, now)

    def _evict_first(self, pool: Collection[bytes], surplus: int, now: float) -> Work:
        """Rank the addresses and give up the first; stop early if a pass comes in between, for it counts."""
        serial = self.passes.completed
        heap: list[Key] = []
        for address in list(pool):
            if address in pool:
                heappush(heap, self._key(self._zombies[address]))
            yield [], 1
        while surplus > 0 and heap and serial == self.passes.completed:
            key = heappop(heap)
            if key[-1] not in pool:
                surplus -= 1
                continue
            zombie = self._zombies[key[-1]]
            if (current := self._key(zombie)) != key:  # marked, say: it goes later than it was ranked
                heappush(heap, current)
                yield [], 1
                continue
            surplus -= 1
            yield from self._evict_one(zombie, now)

    def _key(self, zombie: Zombie) -> Key:
        state = STATES.index(self.state(zombie))
        return state, zombie.alive_at, zombie.pending_at, len(zombie.names), zombie.address

    def _evict_one(self, zombie: Zombie, now: float) -> Work:
        since, state = zombie.since, self.state(zombie)
        self.evicted += 1
        self.evicted_live += state == "live"
        yield from self._give_up(
            zombie,
            "evicted live" if state == "live" else "limit",
            now,
            lambda: zombie.since == since and self.state(zombie) == state,
        )

    def _trim(self, now: float) -> Work:
        """Take the oldest names of those with more than an equal share, while there are too many pairs."""
        bound = NAMES * self._maximum
        share = bound // max(1, len(self))
        for zombie in self:
            surplus = min(len(zombie.names) - share, self.pairs - bound)
            for piece in _pieces(list(zombie.names)[: max(0, surplus)]):
                yield self._give_names_up(zombie, piece, now, "limit"), len(piece)
            yield [], 1

    # Giving up

    def _give_up(self, zombie: Zombie, cause: Cause, now: float, still: Callable[[], object]) -> Work:
        """Give an address up, a piece of its names at a time, as long as the reason holds."""
        while zombie.names and still():
            piece = [name for name, _ in zip(reversed(zombie.names), range(PIECE), strict=False)]
            yield self._give_names_up(zombie, piece, now, cause), COST + len(piece)

    def _give_names_up(self, zombie: Zombie, names: Iterable[bytes], now: float, cause: Cause) -> list[Gone]:
        gone = [name for name in names if name in zombie.names]
        for name in gone:
            self._take(zombie, name)
        self._remember(zombie.address, gone, now, cause)
        return [Gone(name, zombie.address, cause) for name in gone]

    def _take(self, zombie: Zombie, name: bytes) -> None:
        """Take one pair out; a zombie without names is none."""
        del zombie.names[name]
        self._by_name.unlink(name, zombie.address)
        self.pairs -= 1
        if not zombie.names:
            del self._zombies[zombie.address]
        self._note(zombie.address)

    def _remember(self, address: bytes, names: Iterable[bytes], now: float, cause: Cause) -> None:
        before = self.departed.pop(address, None)
        known = [*names, *(before.names if before else ())]
        self.departed[address] = Departed(now, tuple(dict.fromkeys(known))[:TOLD], cause)
        if len(self.departed) > REMEMBERED:
            self.departed.popitem(last=False)

    def _note(self, address: bytes) -> None:
        if self.changed is None:
            return
        if len(self.changed) > 4 * self._maximum + SLACK:
            self.changed.clear()
            self.overrun = True
        self.changed.add(address)


def _seen(zombie: Zombie) -> float:
    return max(zombie.alive_at, zombie.pending_at)


def _record(zombie: Zombie) -> ZombieRecord:
    return ZombieRecord(zombie.address, tuple(zombie.names), zombie.alive_at, zombie.pending_at)


def _pieces(items: list[bytes]) -> Iterator[list[bytes]]:
    return (items[at : at + PIECE] for at in range(0, len(items), PIECE))
