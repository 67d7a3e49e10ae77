"""Garbage collection over all caches, in steps that never hold up answers.

A round visits the endpoints one after another. What has left an endpoint's cache becomes a zombie of that
endpoint; which zombies are given up, the endpoint's `Zombies` decide. The names that lost something are
noted. Then the pairs of those names in the global cache are made what the endpoints still know of them. So
the global cache is never fed by collection, only refreshed or shrunk: a pair that is in one endpoint's cache
alone stays there, a pair that two endpoints hold stays until the second loses it, and a pair that only a
zombie has stays as it is. Names that are in the global cache and at no endpoint go as well, whatever the
reason.

    endpoint's cache  --TTL, limits, force-->  zombies  --proof, limits, force-->  gone for good (told)
                                                                  |
                                      global cache: shrinks to what is still at some endpoint

Answers may arrive between any two steps. Nothing that a step has read is trusted by the next one except
which names to look at; what becomes of them is derived from the caches as they are then. So a pair that
is learned again in the middle of a round stays, and is not told as removed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from dnsproxy.cache.lookups import LookupCache
from dnsproxy.cache.zombies import Gone, Passes, Zombies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dnsproxy.cache.lookups import Collected

BUDGET: Final = 500  # units of work in one step, see `Collected.spent`: about 1 ms
PIECE: Final = 250  # units after which a step looks at its budget
AFFECTED: Final = 1000  # names that are noted before they are derived; more would take long to grow
GROUP: Final = 16  # addresses of a name that are derived together


class Caches:
    """The lookup caches and zombies of all endpoints, by `Endpoint.key`, and the global cache.

    `grace` and `unobserved` are seconds, see `Zombies`; `zombies_per_endpoint` 0 means that pairs go with
    their lease. The endpoints are the operator's, not the network's: their number needs no bound here.
    """

    def __init__(
        self,
        *,
        minimum_ttl: int,
        addresses_per_name: int,
        names_per_endpoint: int,
        zombies_per_endpoint: int = 0,
        grace: float = 0.0,
        unobserved: float = 3600.0,
    ) -> None:
        self.endpoints: dict[str, LookupCache] = {}
        self.zombies: dict[str, Zombies] = {}
        self.passes = Passes()
        self.dropped: deque[tuple[str, LookupCache, Zombies]] = deque()  # to be collected once more
        self._evicted = self._evicted_live = 0  # by endpoints that were dropped
        self.global_ = LookupCache(minimum_ttl, 0, names_per_endpoint, expires=False)
        self._bounds = (minimum_ttl, addresses_per_name, names_per_endpoint)
        self._lives = (zombies_per_endpoint, addresses_per_name, grace, unobserved, self.passes)

    def of(self, key: str) -> LookupCache:
        """Return the cache of an endpoint, made on first use together with its zombies."""
        cache = self.endpoints.get(key)
        if cache is None:
            cache = self.endpoints[key] = LookupCache(*self._bounds)
            self.zombies[key] = Zombies(*self._lives)
            self.global_.max_names += cache.max_names
        return cache

    def drop(self, key: str) -> None:
        """Give an endpoint up; the next round takes away what only that endpoint contributed."""
        cache = self.endpoints.pop(key, None)
        if cache is not None:
            zombies = self.zombies.pop(key)
            self.dropped.append((key, cache, zombies))
            self._evicted += zombies.evicted
            self._evicted_live += zombies.evicted_live
            self.global_.max_names -= cache.max_names

    def evicted(self) -> tuple[int, int]:
        """Return how many zombies limits have cost, dropped endpoints' as well: without connections, with."""
        every = self._evicted + sum(each.evicted for each in self.zombies.values())
        live = self._evicted_live + sum(each.evicted_live for each in self.zombies.values())
        return every - live, live

    @property
    def pressing(self) -> bool:
        """Whether a cache has so much to report that a collection should come early."""
        return any(cache.pressing for cache in self.endpoints.values())

    def expire(
        self,
        matches: Callable[[bytes], bool],
        now: float,
        keys: Iterable[str] | None = None,
        *,
        connections: bool = False,
    ) -> Iterator[int]:
        """Force out matching names, of some endpoints or of all, in steps; yields pairs forced out per step.

        Lookups made until now become zombies, which stay while a connection lives. Zombies put up until now
        go unless a connection may use them, with `connections` in any case. The next collection tells, and
        takes out of the global cache what is left at no endpoint; it should come at once.
        """
        for key in list(self.endpoints if keys is None else keys):
            if (cache := self.endpoints.get(key)) is not None:
                yield from self.zombies[key].expire(matches, now, connections=connections)
                yield from _expire_lookups(cache, matches, now)


def _expire_lookups(cache: LookupCache, matches: Callable[[bytes], bool], now: float) -> Iterator[int]:
    walk = cache.walk()
    while piece := list(islice(walk, PIECE)):
        for name in filter(matches, piece):
            before = cache.pairs
            if cache.expire(now, [name]):
                yield before - cache.pairs
        yield 0


@dataclass(slots=True)
class Step:
    """What one step changed.

    `removed` maps an endpoint's key to the pairs that are gone for good: no longer in its cache nor among
    its zombies; a pair of which the cause is "evicted live" had a connection, which the operator should know.
    `global_removed` are the (name, address) pairs that are no longer in the global cache. A pair may be told
    twice. `unreported` counts pairs that left without being told, because a flood of answers overran the
    bounds: whoever mirrors the caches must then derive everything anew. `done` ends the round.
    """

    removed: dict[str, list[Gone]] = field(default_factory=dict)
    global_removed: list[tuple[bytes, bytes]] = field(default_factory=list)
    unreported: int = 0
    done: bool = False


class Collector:
    """Rounds of collection, in steps. When a round is due is the caller's affair."""

    def __init__(self, caches: Caches) -> None:
        self.names_deleted = 0  # names that lost addresses at an endpoint, most of them counted once a round
        self._caches = caches
        self._now = 0.0
        self._step = Step()
        self._affected: dict[bytes, None] = {}  # names whose global pairs are to be derived anew
        self._suspect_all = False
        self._round: Iterator[int] | None = None

    def step(self, now: float, budget: int = BUDGET) -> Step:
        """Do about `budget` units of the running round, or of a new one."""
        self._now, self._step = now, Step()
        if self._round is None:
            self._round = self._work()
        for spent in self._round:
            budget -= spent
            if budget <= 0:
                return self._step
        self._round = None
        self._step.done = True
        return self._step

    def _work(self) -> Iterator[int]:
        """One round; yields the units spent wherever it may be interrupted."""
        for spent in self._visit():
            yield spent
            if len(self._affected) > AFFECTED:
                yield from self._derive_all()
        yield from self._derive_all()
        yield from self._collect_global()

    def _visit(self) -> Iterator[int]:
        """See what the endpoints have lost, and what is global and of no endpoint."""
        for key in list(self._caches.endpoints):
            yield from self._collect(key)
        while self._caches.dropped:
            yield from self._drain(*self._caches.dropped[0])
            self._caches.dropped.popleft()
        yield from self._sweep()

    # The endpoints

    def _collect(self, key: str) -> Iterator[int]:
        """Make zombies of what has left an endpoint's cache, then see which of all zombies are to go.

        If the endpoint is dropped meanwhile, `_drain` tells the rest.
        """
        cache, zombies = self._caches.endpoints.get(key), self._caches.zombies.get(key)
        if cache is None or zombies is None:
            return
        more = True
        while more:
            if zombies.overfull:
                yield from self._bury(key, cache, zombies)
            collected = cache.collect(self._now, PIECE)
            self._put_up(collected, cache, zombies)
            more = collected.more
            yield 1 + 2 * collected.spent
        yield from self._bury(key, cache, zombies)

    def _put_up(self, collected: Collected, cache: LookupCache, zombies: Zombies) -> None:
        self._note(pair.name for pair in collected.removed)
        for pair in collected.removed:
            if not cache.holds(pair.name, pair.address):
                zombies.add(pair.name, pair.address, self._now)
        self._forgive(collected.unreported)

    def _bury(self, key: str, cache: LookupCache, zombies: Zombies) -> Iterator[int]:
        for gone, spent in zombies.collect(self._now, cache):
            self._tell(key, gone)
            yield spent

    def _drain(self, key: str, cache: LookupCache, zombies: Zombies) -> Iterator[int]:
        """Tell all that a dropped endpoint had; it may have come back, and learned some of it again."""
        more = True
        while more:
            collected = cache.drain(PIECE)
            self._tell(key, [Gone(pair.name, pair.address, "dropped") for pair in collected.removed])
            self._forgive(collected.unreported)
            more = collected.more
            yield 1 + collected.spent
        for gone, spent in zombies.drain(self._now):
            self._tell(key, gone)
            yield spent

    def _tell(self, key: str, gone: list[Gone]) -> None:
        """Remember what to derive, and tell what the endpoint has neither in its cache nor as a zombie.

        Nor is told what has left the cache anew and waits to become a zombie: that is not gone for good.
        """
        self._note(pair.name for pair in gone)
        cache, zombies = self._caches.endpoints.get(key), self._caches.zombies.get(key)
        told = [
            pair
            for pair in gone
            if not (_holds(cache, pair.name, pair.address) or _holds(zombies, pair.name, pair.address))
            and not (cache is not None and cache.awaits(pair.name, pair.address))
        ]
        if told:
            self._step.removed.setdefault(key, []).extend(told)

    def _note(self, names: Iterable[bytes]) -> None:
        before = len(self._affected)
        self._affected.update(dict.fromkeys(names))
        self.names_deleted += len(self._affected) - before

    def _forgive(self, unreported: int) -> None:
        if unreported:
            self._step.unreported += unreported
            self._suspect_all = True

    # The global cache

    def _sweep(self) -> Iterator[int]:
        """Suspect the names that no endpoint has; all names, if an endpoint lost pairs without a report."""
        walk = self._caches.global_.walk()
        suspect_all, self._suspect_all = self._suspect_all, False
        while piece := set(islice(walk, PIECE)):
            spent = len(piece) * (1 + len(self._caches.endpoints) // 16)
            suspects = piece if suspect_all else self._orphans(piece)
            self._affected.update(dict.fromkeys(suspects))
            yield spent

    def _orphans(self, names: set[bytes]) -> set[bytes]:
        for cache in self._caches.endpoints.values():
            if names:
                names = cache.unknown(names)
        for zombies in self._caches.zombies.values():
            if names:
                names = zombies.unknown(names)
        return names

    def _derive_all(self) -> Iterator[int]:
        while self._affected:
            yield from self._derive(self._affected.popitem()[0])

    def _derive(self, name: bytes) -> Iterator[int]:
        """Make the pairs of an affected name what the endpoints know of them."""
        yield 3 + len(self._caches.endpoints) // 8
        addresses = self._caches.global_.addresses(name)
        for start in range(0, len(addresses), GROUP):
            piece = addresses[start : start + GROUP]
            left = self._caches.global_.replace(
                name, piece, self._caches.endpoints.values(), self._of_zombies(name, piece)
            )
            self._step.global_removed += [(name, address) for address in left]
            yield len(piece) * (2 + len(self._caches.endpoints) // 8)

    def _of_zombies(self, name: bytes, addresses: Iterable[bytes]) -> set[bytes]:
        """Return those of the addresses that a zombie has by this name."""
        known = [found for each in self._caches.zombies.values() if (found := each.addresses(name))]
        return {address for address in addresses if any(address in found for found in known)}

    def _collect_global(self) -> Iterator[int]:
        more = True
        while more:
            cache = self._caches.global_
            collected = cache.collect(self._now, PIECE)
            pairs = [(pair.name, pair.address) for pair in collected.removed]
            self._step.global_removed += [pair for pair in pairs if not _holds(cache, *pair)]
            self._step.unreported += collected.unreported
            more = collected.more
            yield 1 + collected.spent


def _holds(held: LookupCache | Zombies | None, name: bytes, address: bytes) -> bool:
    return held is not None and held.holds(name, address)
