"""Zombies: addresses whose lease is over, kept while a connection may still use them.

*Work in progress: the signatures stand, the bodies follow.*
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dnsproxy.cache.lookups import LookupCache

# Why a pair is gone: its connection is over; nobody could look for `unobserved` seconds; it was evicted;
# it was evicted although the last pass saw its connection; by force; with its endpoint; zombies are off.
Cause: TypeAlias = Literal["idle", "unobserved", "limit", "evicted live", "forced", "dropped", "off"]
State: TypeAlias = Literal["idle", "new", "recent", "live"]  # in this order they are evicted


class Passes:
    """What is known of the passes over the kernel's connection table; one object for all endpoints.

    `begun` and `completed` are the serials of the pass begun last and of the last completed one, 0 none;
    `previous` is that of the one completed before it. `started_at` is when the last completed one started,
    `next_at` an estimate for people, both monotonic seconds. `observing` is False where the table cannot be
    read: zombies then live for a fixed time. A pass that fails is begun and never completed.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.completed = 0
        self.previous = 0
        self.started_at = float("-inf")
        self.next_at: float | None = None
        self.observing = True

    def begin(self) -> int:
        """Begin a pass; return its serial."""
        self.begun += 1
        return self.begun

    def complete(self, serial: int, started_at: float, next_at: float | None = None) -> None:
        """Note that a pass has seen the whole table, after all that it saw is marked."""
        self.previous, self.completed = self.completed, serial
        self.started_at, self.next_at = started_at, next_at


class Zombie:
    """One address, by the names that it left the cache with, oldest first."""

    __slots__ = ("address", "alive_at", "marked", "names", "pending_at", "since")

    address: bytes
    names: dict[bytes, None]
    alive_at: float  # when it was last put up, or seen by a pass: that pass's start
    pending_at: float  # when it was last put up
    since: int  # the pass begun last when it was last put up
    marked: int  # the pass that saw it last, 0 none


class ZombieRecord(NamedTuple):
    """A zombie as the store keeps it; times are monotonic seconds here."""

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
    """What is remembered of an address that is gone: when, some of its names, why."""

    when: float
    names: tuple[bytes, ...]
    cause: Cause


class Zombies:
    """One endpoint's zombies. `grace` and `unobserved` are seconds, `maximum` 0 switches zombies off.

    `evicted` counts addresses that went because of a limit, `evicted_live` those among them whose connection
    the last pass had seen. `changed`, if not None, collects the addresses whose record is another one since
    the set was last emptied; `overrun` says that it lost some, and that all must be written anew.
    """

    def __init__(self, maximum: int, per_name: int, grace: float, unobserved: float, passes: Passes) -> None:
        self.passes = passes
        self.pairs = 0
        self.evicted = 0
        self.evicted_live = 0
        self.changed: set[bytes] | None = None
        self.overrun = False
        self.departed: OrderedDict[bytes, Departed]

    def add(self, name: bytes, address: bytes, now: float) -> None:
        """Put a pair up: it is alive as of now, and only passes that begin from now on can say otherwise."""
        raise NotImplementedError

    def load(self, records: Iterable[ZombieRecord]) -> None:
        """Take over records with their times; two passes from now on decide about them."""
        raise NotImplementedError

    def mark(self, serial: int, at: float, addresses: Collection[bytes]) -> Iterator[None]:
        """Note, in bounded steps, the addresses that a pass, begun at `at`, saw connections to."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Zombie]:
        """Walk over all zombies; they may come and go meanwhile."""
        raise NotImplementedError

    def of(self, address: bytes) -> Zombie | None:
        """Return the zombie of an address."""
        raise NotImplementedError

    def addresses(self, name: bytes) -> Collection[bytes]:
        """Return the addresses of a name, in no order and not copied: not to be kept."""
        raise NotImplementedError

    def unknown(self, names: set[bytes]) -> set[bytes]:
        """Return those of `names` that no zombie has."""
        raise NotImplementedError

    def state(self, zombie: Zombie) -> State:
        """Return what the passes say of a zombie's connection."""
        raise NotImplementedError

    def records(self) -> Iterator[ZombieRecord]:
        """Walk over all records; zombies may come and go meanwhile."""
        raise NotImplementedError

    def record(self, address: bytes) -> ZombieRecord | None:
        """Return the record of an address."""
        raise NotImplementedError

    def forget(self, name: bytes, address: bytes) -> bool:
        """Force one pair out, live or not; tell whether it was there."""
        raise NotImplementedError

    def expire(self, before: float, matches: Callable[[bytes], bool]) -> Iterator[int]:
        """Force out matching names put up until `before`, live or not; yields pairs per bounded step."""
        raise NotImplementedError

    def collect(self, now: float, cache: LookupCache) -> Iterator[tuple[list[Gone], int]]:
        """Do one round in steps; each yields what is gone for good and the units of work spent."""
        raise NotImplementedError

    def drain(self) -> Iterator[tuple[list[Gone], int]]:
        """Give everything up, in steps: for an endpoint that is gone."""
        raise NotImplementedError
