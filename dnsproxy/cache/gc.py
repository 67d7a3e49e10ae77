"""Garbage collection over all caches, in steps that never hold up answers.

A round visits the endpoints' caches one after another and notes which names lost something. Then it
makes the pairs of those names in the global cache what the endpoints still know of them. So the global
cache is never fed by collection, only refreshed or shrunk: a pair that is in one endpoint's cache alone
stays there, a pair that two endpoints hold stays until the second loses it. Names that are in the global
cache and in no endpoint's go as well, whatever the reason.

Answers may arrive between any two steps. Nothing that a step has read is trusted by the next one except
which names to look at; what becomes of them is derived from the caches as they are then. So a pair that
is learned again in the middle of a round stays, and is not told as removed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dnsproxy.cache.lookups import LookupCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dnsproxy.cache.lookups import Collected, Removed

BUDGET: Final = 1000  # units of work in one step, see `Collected.spent`: 1 to 2 ms
PIECE: Final = 250  # units after which a step looks at its budget
GROUP: Final = 16  # addresses of a name that are derived together


class Caches:
    """The lookup caches of all endpoints, by `Endpoint.key`, and the global one.

    The endpoints are the operator's, not the network's: their number needs no bound here.
    """

    def __init__(self, *, minimum_ttl: int, addresses_per_name: int, names_per_endpoint: int) -> None:
        self.endpoints: dict[str, LookupCache] = {}
        self.dropped: deque[tuple[str, LookupCache]] = deque()  # endpoints removed, to be collected once more
        self.global_ = LookupCache(minimum_ttl, 0, names_per_endpoint, expires=False)
        self._bounds = (minimum_ttl, addresses_per_name, names_per_endpoint)

    def of(self, key: str) -> LookupCache:
        """Return the cache of an endpoint, made on first use."""
        cache = self.endpoints.get(key)
        if cache is None:
            cache = self.endpoints[key] = LookupCache(*self._bounds)
            self.global_.max_names += cache.max_names
        return cache

    def drop(self, key: str) -> None:
        """Give an endpoint's cache up; the next round takes away what only that endpoint contributed."""
        cache = self.endpoints.pop(key, None)
        if cache is not None:
            self.dropped.append((key, cache))
            self.global_.max_names -= cache.max_names


@dataclass(slots=True)
class Step:
    """What one step changed.

    `removed` maps an endpoint's key to the pairs that are no longer in its cache; `global_removed` are
    the (name, address) pairs that are no longer in the global cache. A pair may be told twice. `unreported`
    counts pairs that left without being told, because a flood of answers overran the bounds: whoever
    mirrors the caches must then derive everything anew. `done` ends the round.
    """

    removed: dict[str, list[Removed]] = field(default_factory=dict)
    global_removed: list[tuple[bytes, bytes]] = field(default_factory=list)
    unreported: int = 0
    done: bool = False


class Collector:
    """Rounds of collection, in steps. When a round is due is the caller's affair."""

    def __init__(self, caches: Caches) -> None:
        self.names_deleted = 0  # names that lost addresses in an endpoint's cache, counted once a round
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
        for key in list(self._caches.endpoints):
            yield from self._collect(key)
        while self._caches.dropped:
            yield self._drain(*self._caches.dropped[0])
        yield from self._sweep(list(self._caches.global_))
        while self._affected:
            yield from self._derive(self._affected.popitem()[0])
        yield from self._collect_global()

    # The endpoints

    def _collect(self, key: str) -> Iterator[int]:
        more = True
        while more and (cache := self._caches.endpoints.get(key)) is not None:
            collected = cache.collect(self._now, PIECE)
            self._note(key, collected)
            more = collected.more
            yield 1 + collected.spent

    def _drain(self, key: str, cache: LookupCache) -> int:
        collected = cache.drain(PIECE)
        self._note(key, collected)
        if not collected.more:
            self._caches.dropped.popleft()
        return 1 + collected.spent

    def _note(self, key: str, collected: Collected) -> None:
        """Remember what to derive, and tell what is gone from the endpoint."""
        self._affected.update(dict.fromkeys(pair.name for pair in collected.removed))
        current = self._caches.endpoints.get(key)
        gone = [pair for pair in collected.removed if not _holds(current, pair.name, pair.address)]
        # The seam for zombies: an endpoint's `gone` become its zombies here, and what its zombies give
        # up is what is told instead; the live ones join `_derive`'s sources as one more cache.
        if gone:
            self._step.removed.setdefault(key, []).extend(gone)
        self._forgive(collected.unreported)

    def _forgive(self, unreported: int) -> None:
        if unreported:
            self._step.unreported += unreported
            self._suspect_all = True

    # The global cache

    def _sweep(self, names: list[bytes]) -> Iterator[int]:
        """Suspect the names that no endpoint has; all names, if an endpoint lost pairs without a report."""
        self.names_deleted += len(self._affected)
        while names:
            piece = set(names[-PIECE:])
            del names[-PIECE:]
            suspects = piece if self._suspect_all else self._orphans(piece)
            self._affected.update(dict.fromkeys(suspects))
            yield len(piece) * (1 + len(self._caches.endpoints) // 16)
        self._suspect_all = False

    def _orphans(self, names: set[bytes]) -> set[bytes]:
        for cache in self._caches.endpoints.values():
            if names:
                names = cache.unknown(names)
        return names

    def _derive(self, name: bytes) -> Iterator[int]:
        """Make the pairs of an affected name what the endpoints know of them."""
        yield 1 + len(self._caches.endpoints) // 8
        addresses = self._caches.global_.addresses(name)
        for start in range(0, len(addresses), GROUP):
            piece = addresses[start : start + GROUP]
            left = self._caches.global_.replace(name, piece, self._caches.endpoints.values())
            self._step.global_removed += [(name, address) for address in left]
            yield len(piece) * (1 + len(self._caches.endpoints) // 8)

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


def _holds(cache: LookupCache | None, name: bytes, address: bytes) -> bool:
    return cache is not None and cache.lookup(name, address) is not None
