"""What the state on disk lacks of the caches, as rows; and rows back into the caches.

*Taking.* Caches and zombies note in their sets `changed` what is different since it was last taken: a name,
an address. `Journal.take` empties these sets in bounded steps into a `Batch`, which has for each of them the
rows that stand for it now, or none. Names of which an answer has only made the leases longer are the most by
far, and the least urgent: they stand in `extended`, which only a batch of that kind takes. What is small
(aliases, claims, sets) is compared whole with what was taken last. Answers arrive between two steps; each
name is taken as it is at that moment, and what changes later is in the next batch. A pair whose lease ends
leaves the cache *before* it is a zombie, so lookups are taken before zombies: it is in one batch or the
other, at worst in both.

All of an endpoint is taken anew, while what the file has of it goes, if it is new, if it lost track of its
changes, and in a batch that is `whole`: that one stands for everything, so it makes the file right whatever
that was before. The first one of every process is whole. A batch that could not be written is given back,
and all that it holds counts as changed again.

*Times.* Inside the program times are monotonic seconds, on disk seconds of the wall clock, which may have
been set in the meantime. `offset` is wall clock minus monotonic clock, always of the moment of the
conversion. So a lookup that comes from the future (the clock was set back) is taken to have been made just
now, and every lease ends after its TTL at the latest, counted from the lookup. Otherwise it would last longer
by the difference, for years if need be. Where the clock was set forward, leases end early; but what has
expired is loaded all the same and becomes a zombie at the first collection, so no clock cuts a connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from dnsproxy.cache.lookups import Lookup, LookupCache, Record
from dnsproxy.cache.zombies import ZombieRecord
from dnsproxy.namemanager.elements import SetSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dnsproxy.cache.gc import Caches
    from dnsproxy.cache.zombies import Zombies

PIECE: Final = 300  # rows made or loaded in one step, one to two milliseconds
OCTETS: Final = 256  # of joined addresses or names that count like one row
ALIAS_LIFE: Final = 86_400.0  # seconds that an alias is remembered at most, whatever the clock did

Row: TypeAlias = tuple[Any, ...]  # text, octets and numbers, as SQLite keeps them
Alias: TypeAlias = tuple[str, bytes, float, bytes]  # endpoint's key, CNAME target, expiry, owner
Claim: TypeAlias = tuple[SetSpec, bytes, str]  # what is ours in a set of the user's: set, key, name
_T = TypeVar("_T")

# How many of the first columns of a table say which rows are replaced together.
KEYS: Final = {"lookups": 2, "zombies": 2, "aliases": 2, "claims": 8, "sets": 6}


@dataclass(slots=True)
class Changes:
    """What becomes of one table: all rows of these endpoints go, and of each key these are the rows now."""

    cleared: list[str] = field(default_factory=list)
    rows: dict[Row, list[Row]] = field(default_factory=dict)
    former: set[Any] | None = None  # what had been taken before, where that is compared


def _tables() -> dict[str, Changes]:
    return {table: Changes() for table in KEYS}


@dataclass(slots=True)
class Batch:
    """What is written in one transaction, table by table; `whole`: instead of all that there was.

    `extended`: names of which only the leases are longer are in it as well.

    lookups: endpoint, name, expiry, looked_up, ttl, addresses
    zombies: endpoint, address, alive_at, pending_at, names
    aliases: endpoint, target, expiry, owner
    claims: the six fields of the set, key, name
    sets: the six fields of the set

    Times are seconds of the wall clock. `addresses` are packed, each after an octet with its length;
    `names` are wire names, which end by themselves.
    """

    whole: bool = False
    extended: bool = True
    tables: dict[str, Changes] = field(default_factory=_tables)

    def __bool__(self) -> bool:
        """Tell whether there is anything to write."""
        return self.whole or any(each.cleared or each.rows for each in self.tables.values())


@dataclass(slots=True)
class State:
    """What was read: the rows of each table as in a Batch, and the values under free keys.

    `notes` are for a person: what was the matter with the file, and what became of it.
    """

    tables: dict[str, list[Row]] = field(default_factory=dict)
    memo: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Journal:
    """Watches all caches, takes what has changed, and takes it again if it was given back.

    `aliases`, `claims` and `sets` return what there is now. They are walked in steps: what they return must
    bear changes meanwhile. `sets` are those that may hold something of ours.
    """

    def __init__(
        self,
        caches: Caches,
        *,
        aliases: Callable[[], Iterable[Alias]] = tuple,
        claims: Callable[[], Iterable[Claim]] = tuple,
        sets: Callable[[], Iterable[SetSpec]] = tuple,
    ) -> None:
        self._caches = caches
        self._watched: dict[str, dict[str, Any]] = {"lookups": {}, "zombies": {}}  # by table, then endpoint
        self._cleared: dict[str, list[str]] = {"lookups": [], "zombies": []}  # endpoints whose rows must go
        self._taken: dict[str, set[Any]] = {"aliases": set(), "claims": set(), "sets": set()}
        self._aliases = aliases
        self._claims = claims
        self._sets = sets

    def take(self, batch: Batch, offset: float) -> Iterator[None]:
        """Fill an empty batch in bounded steps. If it is not walked to its end, give the batch back."""
        self._follow(batch)
        yield from self._take(batch, "lookups", partial(_lookup_rows, offset))
        yield from self._take(batch, "zombies", partial(_zombie_rows, offset))
        yield from self._compare(batch, "aliases", self._aliases(), partial(_alias_row, offset))
        yield from self._compare(batch, "claims", self._claims(), _claim_row)
        yield from self._compare(batch, "sets", self._sets(), _set_row)

    def give_back(self, batch: Batch) -> None:
        """Count what a batch holds as changed again, since it was not written."""
        for table, watched in self._watched.items():
            changes = batch.tables[table]
            self._cleared[table] += changes.cleared
            for key, what in changes.rows:
                if key in watched:
                    watched[key].changed.add(what)
        for table in self._taken:
            former = batch.tables[table].former
            if former is not None:
                self._taken[table] = former

    def _follow(self, batch: Batch) -> None:
        """Watch what is new, forget what is gone or was replaced, and see what is to be taken anew."""
        for table, current in (("lookups", self._caches.endpoints), ("zombies", self._caches.zombies)):
            watched, cleared = self._watched[table], self._cleared[table]
            for key in [key for key, known in watched.items() if current.get(key) is not known]:
                watched.pop(key).changed = None
                cleared.append(key)
            for key, found in current.items():
                if batch.whole or key not in watched or found.overrun:
                    found.changed, found.overrun = set(), False
                    cleared.append(key)
                watched[key] = found
            batch.tables[table].cleared, self._cleared[table] = list(dict.fromkeys(cleared)), []
        if batch.whole:
            self._taken = {table: set() for table in self._taken}

    def _take(
        self, batch: Batch, table: str, rows_of: Callable[[str, Any, bytes], list[Row]]
    ) -> Iterator[None]:
        changes, spent = batch.tables[table], 0
        for key, watched in list(self._watched[table].items()):
            for what in _due(watched, anew=key in changes.cleared, extended=batch.extended):
                rows = changes.rows[key, what] = rows_of(key, watched, what)
                spent += 1 + sum(1 + len(row[-1]) // OCTETS for row in rows)
                if spent >= PIECE:
                    spent = 0
                    yield

    def _compare(
        self, batch: Batch, table: str, found: Iterable[Any], row_of: Callable[[Any], Row]
    ) -> Iterator[None]:
        """Take what is not as it was taken last. All of it is looked at, so it has to be little."""
        changes, former = batch.tables[table], self._taken[table]
        seen = set()
        for count, each in enumerate(found, 1):
            seen.add(each)
            if each not in former:
                row = row_of(each)
                changes.rows[row[: KEYS[table]]] = [row]
            if count % PIECE == 0:
                yield
        for each in former - seen:
            changes.rows.setdefault(row_of(each)[: KEYS[table]], [])
        changes.former, self._taken[table] = former, seen


# Caches to rows


def _due(watched: LookupCache | Zombies, *, anew: bool, extended: bool) -> Iterator[bytes]:
    """Walk over what is to be taken, while things change: all, then what has changed, up to that moment."""
    if anew:
        yield from watched.walk() if isinstance(watched, LookupCache) else (each.address for each in watched)
    if watched.changed is not None:
        yield from _emptied(watched.changed)
    if extended and isinstance(watched, LookupCache):
        yield from _emptied(watched.extended)


def _emptied(waiting: set[bytes]) -> Iterator[bytes]:
    """Take out what is in a set up to that moment, unless all of it goes meanwhile."""
    for _ in range(len(waiting)):
        if not waiting:  # overrun, and the next batch takes all anew; or the names have left the cache
            break
        yield waiting.pop()
    if not waiting:
        waiting.clear()  # `pop` leaves its memory as large as it was at most, megabytes maybe


def _lookup_rows(offset: float, key: str, cache: LookupCache, name: bytes) -> list[Row]:
    return [
        (key, name, lookup.expiry + offset, lookup.looked_up + offset, lookup.ttl, _joined(addresses))
        for _, lookup, addresses in cache.records_of(name)
    ]


def _zombie_rows(offset: float, key: str, zombies: Zombies, address: bytes) -> list[Row]:
    found = zombies.record(address)
    if found is None:
        return []
    times = (found.alive_at + offset, found.pending_at + offset)
    return [(key, address, *times, b"".join(found.names))]


def _alias_row(offset: float, alias: Alias) -> Row:
    endpoint, target, expiry, owner = alias
    return (endpoint, target, expiry + offset, owner)


def _set_row(spec: SetSpec) -> Row:
    return (spec.family, spec.table, spec.name, spec.version, int(spec.ports), int(spec.ours))


def _claim_row(claim: Claim) -> Row:
    spec, key, name = claim
    return (*_set_row(spec), key, name)


_SIZES: Final = {4: b"\x04", 16: b"\x10"}


def _joined(addresses: Iterable[bytes]) -> bytes:
    return b"".join([_SIZES[len(address)] + address for address in addresses])


# Rows to caches


def restore(state: State, caches: Caches, offset: float, now: float) -> Iterator[None]:
    """Load lookups and zombies in bounded steps; rows of endpoints that are not there are passed over.

    Loading twice is harmless, and so is loading what another instance wrote meanwhile over what was learned
    here: of each pair the longer lease counts.
    """
    yield from load(caches, lookups(state, offset, now))
    found = _zombies(state, offset, now)
    while piece := list(islice(found, PIECE)):
        for key, zombies in _by_endpoint(piece):
            if key in caches.zombies:
                caches.zombies[key].load(zombies)
        yield


def load(caches: Caches, found: Iterable[tuple[str, Record]]) -> Iterator[None]:
    """Load lookups of endpoints, and into the global cache, in bounded steps."""
    pairs = iter(found)
    while piece := list(islice(pairs, PIECE)):
        for key, records in _by_endpoint(piece):
            if key in caches.endpoints:
                caches.endpoints[key].load(records)
                caches.global_.load(records)
        yield


def lookups(state: State, offset: float, now: float) -> Iterator[tuple[str, Record]]:
    """Walk over lookups with the keys of their endpoints, their times made possible ones."""
    for key, name, expiry, looked_up, ttl, addresses in state.tables.get("lookups", ()):
        made = min(looked_up - offset, now)
        ends = min(expiry - offset, made + ttl)
        # The name is copied: nothing that stays may lie among the rows, so that all their memory goes back.
        yield key, Record(bytes(memoryview(name)), Lookup(ends, made, ttl), _addresses(addresses))


def aliases(state: State, offset: float, now: float) -> Iterator[Alias]:
    """Walk over aliases, their times made possible ones."""
    for endpoint, target, expiry, owner in state.tables.get("aliases", ()):
        yield endpoint, target, min(expiry - offset, now + ALIAS_LIFE), owner


def claims(state: State) -> Iterator[Claim]:
    """Walk over what is ours in sets of the user's."""
    return ((_set(row), row[6], row[7]) for row in state.tables.get("claims", ()))


def sets(state: State) -> Iterator[SetSpec]:
    """Walk over the sets that may hold something of ours."""
    return map(_set, state.tables.get("sets", ()))


def _zombies(state: State, offset: float, now: float) -> Iterator[tuple[str, ZombieRecord]]:
    for key, address, alive_at, pending_at, names in state.tables.get("zombies", ()):
        times = (min(alive_at - offset, now), min(pending_at - offset, now))
        yield key, ZombieRecord(address, _names(names), *times)


def _by_endpoint(pairs: list[tuple[str, _T]]) -> Iterator[tuple[str, list[_T]]]:
    for key, group in groupby(pairs, key=itemgetter(0)):
        yield key, [found for _, found in group]


def _set(row: Row) -> SetSpec:
    family, table, name, version, ports, ours = row[:6]
    return SetSpec(family, table, name, version, bool(ports), bool(ours))


def _addresses(joined: bytes) -> tuple[bytes, ...]:
    found, at = [], 0
    while at < len(joined):
        end = at + 1 + joined[at]
        found.append(joined[at + 1 : end])
        at = end
    return tuple(found)


def _names(joined: bytes) -> tuple[bytes, ...]:
    found, start, at = [], 0, 0
    while at < len(joined):
        length = joined[at]
        at += 1 + length
        if not length:
            found.append(joined[start:at])
            start = at
    return tuple(found)
