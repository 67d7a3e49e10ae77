"""Names, their addresses and their leases: one type for one endpoint's lookups and for everybody's.

Per pair of name and address there is exactly one `Lookup`, the one that lasts longest. Lookups have a
total order (expiry, then time of the lookup, then TTL), and taking the greater one of two is commutative
and associative: inserting or merging in any order gives the same cache. Where only so many addresses of
a name may stay, the greatest stay, which keeps that property.

Time never acts by itself. A read returns what is stored, also what has expired meanwhile; `collect` is
the only thing that ends leases, in steps of bounded size, and it tells what left.

*The schedule.* Every name stands in exactly one bucket, that of the second in which it wants to be looked
at: the one after its earliest lease ends, HORIZON seconds at most. Extending a lease leaves the schedule
alone, so that the common case, an answer that is known already, costs a few dict operations. When the
bucket comes due the name is looked at: what has expired leaves, and the name goes to the bucket of what
is then its earliest lease. So a bucket may be early, never late. Leases end with the second that their
expiry falls in.

*Bounds.* All of this is fed by packets. Above `addresses_per_name` a name is marked, and trimmed at the
next collection, the earliest leases first; above twice that it is trimmed at once. Above `max_names`, or
PAIRS_PER_NAME times as many pairs, the name whose schedule is nearest makes room for the new one. What
leaves in these ways, or by force, waits for the next `collect`, which reports it with the rest. The
waiting room has a bound too, and `pressing` tells when it is half full. In a full one those that have waited
longest make room, as they would among zombies; they are counted as `unreported`, and whoever mirrors the
cache must then read it again.

*Walks.* Many a task has to see all names and may hold up answers at no time. `walk` may be interrupted
anywhere: the names also stand in a list, the last of which takes the place of one that leaves, and the walk
goes from the end to the beginning. So whatever moves moves to where the walk has yet to come, or was.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from math import floor
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence

HORIZON: Final = 3600  # seconds; no name waits longer than this to be looked at, which bounds the buckets
UNLIMITED: Final = 4096  # addresses kept of one name where no limit is set: as many as one answer can hold
FEW: Final = 8  # addresses that are found one by one as fast as in a dict
PAIRS_PER_NAME: Final = 8  # pairs that a full cache holds for each of its names, on average
TRIES: Final = 8  # names whose schedule is brought up to date before one is evicted all the same

Cause: TypeAlias = Literal["ttl", "limit", "forced"]


class Lookup(NamedTuple):
    """One answer, as far as leases are concerned; shared by its addresses. The greater one counts.

    `expiry` and `looked_up` are monotonic seconds, `ttl` seconds, already raised to the minimum.
    """

    expiry: float
    looked_up: float
    ttl: int


class Record(NamedTuple):
    """One lookup of a name with the addresses that it still serves."""

    name: bytes
    lookup: Lookup
    addresses: tuple[bytes, ...]


class Removed(NamedTuple):
    """A pair that left, with its last lookup and the reason."""

    name: bytes
    address: bytes
    lookup: Lookup
    cause: Cause


class Collected(NamedTuple):
    """What one bounded step did.

    `removed` are the pairs that left since the last report; one that left before this step may have come
    back. `spent` is the work done in units of one pair looked at; `more` tells whether work is left.
    `unreported` counts the pairs that left without a report.
    """

    removed: list[Removed]
    spent: int
    more: bool
    unreported: int


class Reverse(dict[bytes, "bytes | set[bytes]"]):
    """A map to one value or several. A lone value, the common case, is held as it is, others in a set.

    160,000 names on one address cost one set operation each to remove.
    """

    __slots__ = ()

    def of(self, key: bytes) -> Collection[bytes]:
        """Return the values, in no order and not copied: not to be kept."""
        values = self.get(key, ())
        return (values,) if isinstance(values, bytes) else values

    def is_shared(self, key: bytes) -> bool:
        """Tell whether there is more than one value."""
        return isinstance(self.get(key), set)

    def link(self, key: bytes, value: bytes) -> None:
        """Add a value that the key may have already."""
        values = self.get(key)
        if values is None:
            self[key] = value
        elif isinstance(values, set):
            values.add(value)
        elif values != value:
            self[key] = {values, value}

    def unlink(self, key: bytes, value: bytes) -> None:
        """Remove a value that the key has."""
        values = self[key]
        if isinstance(values, bytes):
            del self[key]
            return
        values.discard(value)
        if len(values) == 1:
            self[key] = values.pop()


class _Bucket(dict[bytes, None]):
    """The names that want to be looked at in one second."""

    __slots__ = ("due",)

    def __init__(self, due: int) -> None:
        self.due = due


class _Held:
    """One name: its addresses and their lookups, the bucket that it stands in, and its place in the list.

    Nearly all names have a few addresses that come in one answer, and so one lookup for all of them. These
    are a tuple, the one that the answer was read into, in every cache that learns it; a dict would take
    200 octets more in each. Where lookups differ, `addresses` is a dict of them.
    """

    __slots__ = ("addresses", "bucket", "lookup", "name", "place")

    def __init__(self, name: bytes, bucket: _Bucket, place: int, lookup: Lookup) -> None:
        self.name = name
        self.bucket = bucket
        self.place = place
        self.lookup = lookup  # of all addresses, while they are a tuple
        self.addresses: tuple[bytes, ...] | dict[bytes, Lookup] = ()

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def due(self) -> int:
        """The second of the bucket."""
        return self.bucket.due

    def get(self, address: bytes) -> Lookup | None:
        """Return the lookup of an address."""
        known = self.addresses
        if isinstance(known, dict):
            return known.get(address)
        return self.lookup if address in known else None

    def items(self) -> Iterable[tuple[bytes, Lookup]]:
        """Return all addresses, each with its lookup."""
        known = self.addresses
        return known.items() if isinstance(known, dict) else [(each, self.lookup) for each in known]

    def values(self) -> Collection[Lookup]:
        """Return the lookups."""
        return self.addresses.values() if isinstance(self.addresses, dict) else (self.lookup,)

    def renew(self, addresses: Sequence[bytes], lookup: Lookup) -> bool:
        """Extend leases by a lookup; tell whether all its addresses are known, if not, some are extended."""
        known = self.addresses
        if isinstance(known, tuple):
            found = set(addresses)
            if found.difference(known):
                return False
            if not found or lookup <= self.lookup:
                return True
            if len(found) == len(known):  # all of them, in whatever order
                self.lookup = lookup
                return True
            known = self._apart()
        for address in addresses:
            former = known.get(address)
            if former is None:
                return False
            if former < lookup:
                known[address] = lookup
        return True

    def add(self, addresses: Sequence[bytes], lookup: Lookup) -> None:
        """Take addresses over, known ones as well; of two lookups the greater one counts."""
        known = self.addresses
        if not known and len(addresses) <= FEW:
            self.lookup = lookup
            self.addresses = tuple(addresses if len(set(addresses)) == len(addresses) else set(addresses))
            return  # tuple(a tuple) is that tuple
        known = self._apart()
        for address in addresses:
            former = known.get(address)
            if former is None or former < lookup:
                known[address] = lookup

    def set(self, address: bytes, lookup: Lookup) -> None:
        """Give an address that is here this lookup, be it greater or less."""
        if lookup != self.get(address):
            self._apart()[address] = lookup

    def pop(self, address: bytes) -> Lookup:
        """Remove an address that is here, and return its lookup."""
        if isinstance(self.addresses, dict):
            return self.addresses.pop(address)
        self.addresses = tuple(each for each in self.addresses if each != address)
        return self.lookup

    def _apart(self) -> dict[bytes, Lookup]:
        """Give each address a lookup of its own from here on."""
        if isinstance(self.addresses, tuple):
            self.addresses = dict.fromkeys(self.addresses, self.lookup)
        return self.addresses


_new_tuple = tuple.__new__


class LookupCache:
    """The lookups of one endpoint, or of all (`expires=False`: time removes nothing).

    `minimum_ttl` seconds; `addresses_per_name` 0 means that only the hard bound applies. `changed`, if not
    None, collects the names whose pairs have changed since somebody last emptied it; `overrun` says that some
    were lost from it. `extended` collects, beside it, the names whose leases were only made longer.
    """

    def __init__(
        self, minimum_ttl: int, addresses_per_name: int, max_names: int, *, expires: bool = True
    ) -> None:
        self.minimum_ttl = minimum_ttl
        self.max_names = max_names
        self.pairs = 0
        self.changed: set[bytes] | None = None
        self.extended: set[bytes] = set()
        self._last = Lookup(0.0, 0.0, 0)
        self.overrun = False
        self._limit = addresses_per_name or UNLIMITED
        self._marks = addresses_per_name > 0
        self._expires = expires
        self._forward: dict[bytes, _Held] = {}
        self._list: list[_Held] = []  # the values of _forward, in no order
        self._reverse = Reverse()
        self._buckets: dict[int, _Bucket] = {}
        self._seconds: list[int] = []  # a heap of exactly the keys of _buckets
        self._above: dict[bytes, None] = {}  # names seen above the limit since the last collection
        self._left: OrderedDict[tuple[bytes, bytes], Removed] = OrderedDict()  # by pair, the oldest first
        self._unreported = 0

    # Learning

    def insert(self, name: bytes, addresses: Sequence[bytes], ttl: int, now: float) -> tuple[bytes, ...]:
        """Learn an answer; return the addresses that are new for that name."""
        return self.learn(name, addresses, self.lookup_of(ttl, now))

    def lookup_of(self, ttl: int, now: float) -> Lookup:
        """Return the lookup that an answer with this TTL is; all that come in one batch may share it."""
        if ttl < self.minimum_ttl:
            ttl = self.minimum_ttl
        last = self._last
        if last.looked_up != now or last.ttl != ttl:
            last = self._last = _new_tuple(Lookup, (now + ttl, now, ttl))  # half the time of Lookup(...)
        return last

    def learn(self, name: bytes, addresses: Sequence[bytes], lookup: Lookup) -> tuple[bytes, ...]:
        """Learn what a lookup found; return the addresses that are new for that name."""
        held = self._forward.get(name)
        if held is None:
            return self._learn(name, addresses, lookup)
        if held.addresses == addresses:  # nearly always; a dict is no tuple
            if held.lookup < lookup:
                held.lookup = lookup
        elif not held.renew(addresses, lookup):
            return self._learn(name, addresses, lookup)
        if self.changed is not None:
            self.extended.add(held.name)
        return ()

    def load(self, records: Iterable[Record]) -> None:
        """Take over records as they are: no minimum TTL is applied to them again."""
        for record in records:
            self._learn(record.name, record.addresses, record.lookup)

    def merge(self, other: LookupCache) -> None:
        """Take over all that another cache holds."""
        self.load(other.records())

    def _learn(self, name: bytes, addresses: Sequence[bytes], lookup: Lookup) -> tuple[bytes, ...]:
        if not addresses:
            return ()
        self._make_room(name, len(addresses), lookup.looked_up)
        held = self._forward.get(name)
        due = _second_after(lookup.expiry, lookup.looked_up)
        if held is None:
            held = self._forward[name] = _Held(name, self._bucket(due), len(self._list), lookup)
            self._list.append(held)
            held.bucket[name] = None
        elif due < held.due:
            self._unschedule(held)
            self._schedule(held, due)
        known = held.addresses
        new = tuple(dict.fromkeys([each for each in addresses if each not in known]))
        for address in new:
            self._reverse.link(address, held.name)
        held.add(addresses, lookup)
        self.pairs += len(new)
        self._note(name)
        self._bound_addresses(held)
        return new

    # Reading: what is stored, expired or not

    def __len__(self) -> int:
        return len(self._forward)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._forward)

    def __contains__(self, name: bytes) -> bool:
        return name in self._forward

    def addresses(self, name: bytes) -> tuple[bytes, ...]:
        """Return the addresses of a name, in no order."""
        held = self._forward.get(name)
        return () if held is None else tuple(held.addresses)

    def lookup(self, name: bytes, address: bytes) -> Lookup | None:
        """Return the lookup of a pair."""
        held = self._forward.get(name)
        return None if held is None else held.get(address)

    def holds(self, name: bytes, address: bytes) -> bool:
        """Tell whether a pair is here."""
        held = self._forward.get(name)
        return held is not None and address in held.addresses

    def names(self, address: bytes) -> list[bytes]:
        """Return the names of an address, sorted."""
        return sorted(self.holders(address))

    def holders(self, address: bytes) -> Collection[bytes]:
        """Return the names of an address, in no order and not copied: not to be kept."""
        return self._reverse.of(address)

    def matching(self, predicate: Callable[[bytes], bool]) -> list[bytes]:
        """Return the names for which the predicate holds."""
        return [name for name in self._forward if predicate(name)]

    def unknown(self, names: set[bytes]) -> set[bytes]:
        """Return those of `names` that are not here."""
        return names.difference(self._forward)

    def items(self) -> Iterator[tuple[bytes, bytes, Lookup]]:
        """Walk over all pairs as (name, address, lookup)."""
        for name, held in self._forward.items():
            for address, lookup in held.items():
                yield name, address, lookup

    def walk(self) -> Iterator[bytes]:
        """Walk over the names, which may come and go meanwhile; one that stays comes once or more often."""
        at = len(self._list)
        while (at := min(at, len(self._list)) - 1) >= 0:
            yield self._list[at].name

    def records(self) -> Iterator[Record]:
        """Walk over all lookups, as `walk` does, each with all its addresses."""
        for name in self.walk():
            yield from self.records_of(name)

    def records_of(self, name: bytes) -> list[Record]:
        """Return the lookups of a name."""
        held = self._forward.get(name)
        shared: dict[Lookup, list[bytes]] = {}
        for address, lookup in () if held is None else held.items():
            shared.setdefault(lookup, []).append(address)
        return [Record(name, lookup, tuple(addresses)) for lookup, addresses in shared.items()]

    # Leaving

    def collect(self, now: float, budget: int) -> Collected:
        """Report what left since the last time, end leases, then trim names that have too many addresses.

        Does about `budget` units of work: it ends with the name that exhausts them.
        """
        removed = self._reported(budget)
        spent = len(removed)
        second = floor(now)
        while spent < budget and self._is_due(second):
            held = self._nearest()
            spent += 1 + len(held)
            removed += self._look(held, second)
        while spent < budget and self._above:
            found = self._forward[self._above.popitem()[0]]
            spent += len(found)
            removed += self._trim(found)
        more = bool(self._left or self._above) or self._is_due(second)
        return self._collected(removed, spent, more=more)

    def drain(self, budget: int) -> Collected:
        """Report what left, and force out everything else: for a cache that is given up."""
        removed = self._reported(budget)
        spent = len(removed)
        while spent < budget and self._forward:
            held = self._nearest()
            spent += 1 + len(held)
            removed += self._forget(held, "forced")
        return self._collected(removed, spent, more=bool(self._left or self._forward))

    def expire(self, before: float, names: Iterable[bytes]) -> list[bytes]:
        """Force out what was looked up before a time, of these names; return those that lost something."""
        return [name for name in names if name in self._forward and self._force(name, before)]

    def replace(
        self,
        name: bytes,
        addresses: Iterable[bytes],
        sources: Iterable[LookupCache],
        kept: Container[bytes] = (),
    ) -> list[bytes]:
        """Make these pairs what `sources` know of them; return the addresses that thereby left.

        No pair is introduced: an address that the name does not have here is passed over. One that no source
        knows stays as it is if it is among `kept`.
        """
        held = self._forward.get(name)
        if held is None:
            return []
        caches = [source._forward for source in sources]  # noqa: SLF001 (its own class)
        known = [found for cache in caches if (found := cache.get(name)) is not None]
        left = []
        for address in addresses:
            if address in held.addresses:
                lookups = [lookup for found in known if (lookup := found.get(address)) is not None]
                if lookups:
                    held.set(address, max(lookups))
                elif address not in kept:
                    self._remove(held, address)
                    left.append(address)
        self._note(name)
        self._bring_forward(held)
        return left

    def _force(self, name: bytes, before: float) -> bool:
        held = self._forward[name]
        old = [address for address, lookup in held.items() if lookup.looked_up < before]
        # Not fed by packets, and no more than the cache held: this needs no bound.
        for address in old:
            self._await(Removed(name, address, self._remove(held, address), "forced"))
        self._bring_forward(held)
        return bool(old)

    def _reported(self, budget: int) -> list[Removed]:
        return [self._left.popitem(last=False)[1] for _ in range(min(budget, len(self._left)))]

    def _collected(self, removed: list[Removed], spent: int, *, more: bool) -> Collected:
        unreported, self._unreported = self._unreported, 0
        return Collected(removed, spent, more, unreported)

    def _look(self, held: _Held, second: int) -> list[Removed]:
        """Take out what has expired; schedule the rest anew."""
        ended = [a for a, lookup in held.items() if lookup.expiry < second] if self._expires else []
        removed = [Removed(held.name, a, self._remove(held, a), "ttl") for a in ended]
        if held:
            self._schedule(held, max(_due(held, second), second + 1))
        else:
            self._discard(held)
        return removed

    def _trim(self, held: _Held) -> list[Removed]:
        """Take out the earliest leases above the limit."""
        ranked = sorted(
            sorted(held.addresses), key=dict(held.items()).__getitem__
        )  # the address decides between equal lookups
        surplus = ranked[: max(0, len(ranked) - self._limit)]
        return [Removed(held.name, a, self._remove(held, a), "limit") for a in surplus]

    def _forget(self, held: _Held, cause: Cause) -> list[Removed]:
        """Take out a name that stands in no bucket any more."""
        removed = [Removed(held.name, a, self._remove(held, a), cause) for a in list(held.addresses)]
        self._discard(held)
        return removed

    def _remove(self, held: _Held, address: bytes) -> Lookup:
        self.pairs -= 1
        self._reverse.unlink(address, held.name)
        self._note(held.name)
        return held.pop(address)

    def _discard(self, held: _Held) -> None:
        del self._forward[held.name]
        self.extended.discard(held.name)
        self._above.pop(held.name, None)
        last = self._list.pop()
        if last is not held:
            self._list[held.place] = last
            last.place = held.place

    def _note(self, name: bytes) -> None:
        if self.changed is None:
            return
        if len(self.changed) > 4 * self.max_names:
            self.changed.clear()
            self.overrun = True
        self.changed.add(name)

    # Bounds

    def _bound_addresses(self, held: _Held) -> None:
        if len(held) > 2 * self._limit:
            self._leave(self._trim(held))
        if len(held) > self._limit and self._marks:
            self._above[held.name] = None

    def _make_room(self, name: bytes, pairs: int, now: float) -> None:
        names = 1 + pairs  # no more than may come in: one insert is never long
        while names and self._forward and self._is_full(name, pairs):
            self._leave(self._forget(self._evictable(now), "limit"))
            names -= 1

    def _is_full(self, name: bytes, pairs: int) -> bool:
        if len(self._forward) >= self.max_names and name not in self._forward:
            return True
        return self.pairs + pairs > PAIRS_PER_NAME * self.max_names + 2 * self._limit

    def _evictable(self, now: float) -> _Held:
        """Take the name that is due first out of its bucket, extended leases taken into account."""
        for _ in range(TRIES):
            held = self._nearest()
            due = _due(held, now)
            if due <= held.due:
                return held
            self._schedule(held, due)
        return self._nearest()

    def _leave(self, removed: list[Removed]) -> None:
        for pair in removed:
            self._await(pair)
        surplus = min(len(removed), len(self._left) - self.max_names)  # what was forced out is never surplus
        for _ in range(surplus):
            self._left.popitem(last=False)
            self._unreported += 1

    def _await(self, pair: Removed) -> None:
        """Have a pair reported; one that waits already comes last again."""
        self._left[pair.name, pair.address] = pair
        self._left.move_to_end((pair.name, pair.address))

    def awaits(self, name: bytes, address: bytes) -> bool:
        """Tell whether a pair has left and is not reported yet."""
        return (name, address) in self._left

    @property
    def pressing(self) -> bool:
        """Whether so much waits to be reported that a collection should come early."""
        return 2 * len(self._left) > self.max_names

    # The schedule

    def _schedule(self, held: _Held, due: int) -> None:
        held.bucket = self._bucket(due)
        held.bucket[held.name] = None

    def _bucket(self, due: int) -> _Bucket:
        bucket = self._buckets.get(due)
        if bucket is None:
            bucket = self._buckets[due] = _Bucket(due)
            heappush(self._seconds, due)
        return bucket

    def _unschedule(self, held: _Held) -> None:
        del held.bucket[held.name]

    def _bring_forward(self, held: _Held) -> None:
        """After leases were shortened or removed: no bucket may be late, and no name may be empty."""
        if not held:
            self._unschedule(held)
            self._discard(held)
        elif (due := _due(held, held.due)) < held.due:
            self._unschedule(held)
            self._schedule(held, due)

    def _first_second(self) -> int | None:
        """Return the second of the first bucket that is not empty."""
        while self._seconds and not self._buckets[self._seconds[0]]:
            del self._buckets[heappop(self._seconds)]
        return self._seconds[0] if self._seconds else None

    def _is_due(self, second: int) -> bool:
        first = self._first_second()
        return first is not None and first <= second

    def _nearest(self) -> _Held:
        """Take a name out of the first bucket; there must be one."""
        first = self._first_second()
        assert first is not None, "a name without a bucket"
        return self._forward[self._buckets[first].popitem()[0]]


def _due(held: _Held, now: float) -> int:
    return _second_after(min(held.values()).expiry, now)


def _second_after(expiry: float, now: float) -> int:
    """Return the first whole second in which a lease is over, or the horizon if that comes first."""
    return floor(min(expiry, now + HORIZON)) + 1
