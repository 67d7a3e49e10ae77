"""Caches and policy in, elements out: what the sets lack, what they have too much, what counts.

Three things are kept here, and everything else is derived from them when it is needed:

    caches    what every endpoint has learned and what became zombies of it (cache/), fed by `observe`
    policy    what each name opens for each endpoint (rules/), swapped whole by `set_policy`
    applied   what the kernel has acknowledged, set by set: key -> name in the comment

*Wanted* is the first two multiplied out; nothing is counted up and down, so nothing can be counted wrong. It
is never written down: whether an element is wanted is asked of the caches by its address (`_claimant`), at
the moment in which it would be deleted; what is missing is found by a walk over the caches. Both are cut into
steps, between which answers go on arriving. One address may have 160,000 names, so that the question itself
takes several steps; an answer that brings the address meanwhile is noticed, and the element stays.

*Counting* is strict: an element counts from its acknowledgement until just before the request for its
deletion. A sign that somebody else changed a set puts all of `applied` in doubt: nothing counts until it is
acknowledged anew, or read back with no such sign between the question and the answer.

*Deleting* is not: what was in the set at any time and is not known to be gone is in `applied` or in
`doubted`, and both are looked through for what nothing wants, since deleting what is missing is no error.
So however often others change a set, what was revoked goes at the next walk. What a read has found counts
for this, however old it is.

*The hot path.* Most answers bring nothing new. For each Grants object and endpoint, `Grants.open` holds the
addresses whose every element is applied. An address is put in there by `observe` when it finds that so, and
taken out by whatever takes one of its elements out of `applied`; `_memo` says where to look for it. Taking
out too much is harmless: the next answer looks again.

*One answer* teaches no more than ADDRESSES, and what makes ELEMENTS elements: of its addresses the first
ones, which clients try first, of its CNAME targets the first ones. The rest is neither learned nor opened,
and counted in `cut`.
One address is always learned, whatever number of ports the operator opens for it.

A set of the user's may hold elements of the user's own. Of what is read back there only counts what was
claimed, key and comment, before we asked for it; all else is neither counted nor ever deleted. A claim lives
until the element is known to be gone, so a transaction of unknown outcome leaves nothing behind. Two things
make that known: the acknowledgement of its deletion, and a whole read of the set which began after the claim
and has been taken over to its end. A read that is overtaken by claims, or abandoned, ends none of them
(`reading`). Claims outlive us (`claims`, `restore`); our own sets need none, all in them is ours.

A hold waits for all that its answer opens, not only for what was lacking when it came: while the last of it
is being written, somebody may take away the first.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dnsproxy import addresses as ip
from dnsproxy import names
from dnsproxy.namemanager.elements import (
    VERSIONS,
    Element,
    SetSpec,
    TableId,
    address_of,
    comment,
    endpoint_set,
    key_suffix,
    named_set,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from dnsproxy.addresses import Network
    from dnsproxy.cache.gc import Caches
    from dnsproxy.cache.lookups import LookupCache
    from dnsproxy.cache.zombies import Gone, Zombies
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.rules.policy import Grant, Grants, Policy, View
    from dnsproxy.servers import Sink

STEP: Final = 200  # elements looked at in one step of a walk, two milliseconds
KEYS: Final = 2_000  # keys that one step compares, one to two milliseconds
ELEMENTS: Final = 4_096  # that one answer may ask for, three milliseconds
ADDRESSES: Final = 1_024  # that one answer may teach, three milliseconds
OPEN: Final = 100_000  # addresses in all of Grants.open, some 15 MB; beyond it, all are looked at anew
UNLEARNED: Final = 1_000  # addresses that are remembered as answered and not learned
TEMPLATES: Final = 512  # Grants objects whose slots one endpoint remembers; a policy forgets them, too

_new_tuple = tuple.__new__

Content: TypeAlias = "dict[SetSpec, dict[bytes, str]]"  # set -> key -> name
Slots: TypeAlias = "dict[tuple[SetSpec, bytes], None]"  # (set, what follows the address in the key), in order
Transaction: TypeAlias = "tuple[list[Element], list[Element]]"  # deletes, adds

_is_public = lru_cache(maxsize=1_024)(ip.is_public)  # asked thrice of a new one; 170 octets each


@dataclass(slots=True, eq=False)
class Hold:
    """An answer that waits until its elements are applied.

    `refusal` goes out instead of it where it must not be released; `since` and `deadline` are monotonic
    seconds. `done(wire, cause, held)` is told once what was sent and why: an empty cause means applied and
    released, `held` are the seconds it waited. `owner` is the key of the endpoint on whose turn it is.

    `judge` is asked when the policy has been swapped meanwhile: it returns the reply to send instead, or all
    that the answer opens now. Without it, a hold ends when the policy has lost one of its sets.

    The other fields belong to who keeps it.
    """

    elements: tuple[Element, ...]
    sink: Sink
    peer: Any
    since: float
    deadline: float
    refusal: bytes
    done: Callable[[bytes, str, float], None] | None = None
    owner: str = ""
    judge: Callable[[], bytes | tuple[Element, ...]] | None = None
    wire: bytes = b""
    policy: Policy | None = None  # by which it was judged last
    queued: bool = False
    at: int = 0  # elements before this were taken


class Place:
    """One endpoint as the policy sees it now: its cache, its zombies, its sets, and what its grants open."""

    __slots__ = ("_by_grants", "_table", "_widths", "cache", "key", "sets", "view", "zombies")

    def __init__(self, view: View, cache: LookupCache, zombies: Zombies, table: TableId) -> None:
        self.key = view.endpoint.key
        self.view = view
        self.cache = cache
        self.zombies = zombies
        self.sets = {
            (ports, version): endpoint_set(table, self.key, version, ports=ports)
            for ports in (False, True)
            for version in VERSIONS
        }
        self._table = table
        self._by_grants: dict[Grants, dict[tuple[int, tuple[int, ...] | None], Slots]] = {}
        self._widths: dict[Grants, int] = {}

    def holds(self, name: bytes, address: bytes) -> bool:
        """Tell whether a pair is in the cache or among the zombies."""
        return self.cache.holds(name, address) or self.zombies.holds(name, address)

    def names(self, address: bytes) -> list[bytes]:
        """Return the names of an address, those of zombies as well, in no order."""
        zombie = self.zombies.of(address)
        return [*self.cache.holders(address), *(zombie.names if zombie is not None else ())]

    def slots(self, grants: Grants, version: int, which: tuple[int, ...] | None = None) -> Slots:
        """Return what all grants open per address, or those at the places `which`; worked out once."""
        known = self._by_grants.get(grants)
        if known is None:
            if len(self._by_grants) >= TEMPLATES:
                self._by_grants.clear()
                self._widths.clear()
            known = self._by_grants[grants] = {}
        found = known.get((version, which))
        if found is None:
            chosen = grants.grants if which is None else [grants.grants[place] for place in which]
            found = known[version, which] = self._worked_out(chosen, version)
        return found

    def width(self, grants: Grants) -> int:
        """Return how many elements one address opens at most, whichever family it is of."""
        known = self._widths.get(grants)
        if known is None:
            known = self._widths[grants] = max(len(self.slots(grants, version)) for version in VERSIONS)
        return known

    def _worked_out(self, grants: Iterable[Grant], version: int) -> Slots:
        """Return the slots in the endpoint's sets and in those that rules name."""
        found: Slots = {}
        for grant in grants:
            spec = self.sets[grant.ports is not None, version]
            found.update(dict.fromkeys((spec, suffix) for suffix in _suffixes(grant)))
            named = (named_set(self._table, text, version) for text in grant.sets)
            found.update(dict.fromkeys((spec, b"") for spec in named if spec is not None))
        return found


class Plan:
    """Caches, policy and the acknowledged state of the sets.

    `table` is where our own sets are; `private` are the non-public ranges that may be learned everywhere.
    `epoch` grows with every doubt: what was asked of the kernel in an older one may be outdated. `applied`
    counts, `doubted` was there once and may be there still; no element is in both. `cut` counts addresses
    and CNAME targets that were left out of answers that would open too much, `cut_of` is the last such
    answer: the endpoint's key and the name. `unlearned` are the last addresses that nothing permitted to be
    learned, by endpoint and address: when, and of which name.
    """

    def __init__(
        self,
        policy: Policy,
        endpoints: EndpointTable,
        *,
        caches: Caches,
        table: TableId = ("inet", "dnsproxy"),
        private: tuple[Network, ...] = (),
    ) -> None:
        self.caches = caches
        self._global = caches.global_
        self.applied: Content = {}
        self.doubted: Content = {}
        self.epoch = 0
        self.cut = 0
        self.cut_of = ("", b"")
        self.unlearned: OrderedDict[tuple[str, bytes], tuple[float, bytes]] = OrderedDict()
        self.places: dict[str, Place] = {}
        self._claimed: dict[SetSpec, set[tuple[bytes, str]]] = {}
        self._left_over: dict[SetSpec, None] = {}  # sets of an earlier process, until they are read
        self._noting = False
        self._fresh: dict[SetSpec, set[tuple[bytes, str]]] = {}  # claims since `reading`
        self._written: dict[SetSpec, dict[bytes, str | None]] = {}  # names of elements since; None: deleted
        self._table = table
        self.private = private
        self._memo: dict[bytes, set[bytes] | list[set[bytes]]] = {}  # address -> those in Grants.open with it
        self._opened = 0  # entries in all of them
        self._open_sets: list[set[bytes]] = []
        self._judged: bytes | None = None  # the address in question, until an answer brings it
        self.set_policy(policy, endpoints)

    # -- policy ---------------------------------------------------------------------------------------------

    def set_policy(self, policy: Policy, endpoints: EndpointTable) -> None:
        """Swap policy and endpoints. Caches stay, but for those of endpoints that are gone."""
        self.policy = policy
        self._close_all()
        current = {endpoint.key: policy.view(endpoint) for endpoint in endpoints.endpoints}
        for key in self.places.keys() - current.keys():
            self.caches.drop(key)
        self.places = {key: self._place(key, view) for key, view in current.items()}
        self._owners = {spec: place for place in self.places.values() for spec in place.sets.values()}
        named = (named_set(self._table, text, each) for text in sorted(policy.sets) for each in VERSIONS)
        self._specs = dict.fromkeys([*self._owners, *(spec for spec in named if spec is not None)])

    def _place(self, key: str, view: View) -> Place:
        cache = self.caches.of(key)
        return Place(view, cache, self.caches.zombies[key], self._table)

    def specs(self) -> tuple[SetSpec, ...]:
        """Return every set that has to exist: all of every endpoint, and those that rules name.

        An endpoint has its four sets also while no rule fills them, so that firewall rules may name them
        whatever the policy says, and never change with it.
        """
        return tuple(self._specs)

    def sets(self) -> list[SetSpec]:
        """Return every set that may hold something of ours, also where no policy names it any more."""
        known = (self._specs, self.applied, self.doubted, self._left_over, self._claimed)
        return list(dict.fromkeys(spec for each in known for spec in each))

    def needs(self, elements: Iterable[Element]) -> bool:
        """Tell whether the policy still has all sets of these elements."""
        return all(element.spec in self._specs for element in elements)

    def permits(self, grants: Grants, address: bytes) -> bool:
        """Tell whether an address may be learned: a public one, or one in a range that something permits."""
        return self._permits_everywhere(address) or any(_covers(grant, address) for grant in grants.grants)

    def opens(
        self, key: str, owners: Iterable[tuple[Grants, bytes]], addresses: tuple[bytes, ...]
    ) -> Iterator[Element]:
        """Walk over what addresses open for an endpoint, on account of names with their grants."""
        place = self.places[key]
        for grants, name in owners:
            yield from self._elements(place, grants, name, self._learnable(grants, addresses))

    def _elements(
        self, place: Place, grants: Grants, name: bytes, addresses: tuple[bytes, ...]
    ) -> Iterator[Element]:
        """Walk over what addresses that were learned open."""
        if not grants.grants:
            return
        text = comment(names.to_text(name))
        for address in addresses:
            for spec, suffix in self._slots(place, grants, address):
                yield _new_tuple(Element, (spec, address + suffix, text))  # half the time of Element(...)

    def _slots(self, place: Place, grants: Grants, address: bytes) -> Slots:
        version = 4 if len(address) == 4 else 6
        if self._permits_everywhere(address):
            return place.slots(grants, version)
        covering = [at for at, grant in enumerate(grants.grants) if _covers(grant, address)]
        return place.slots(grants, version, tuple(covering))

    def _permits_everywhere(self, address: bytes) -> bool:
        return _is_public(address) or _inside(address, self.private)

    # -- learning -------------------------------------------------------------------------------------------

    def observe(
        self,
        view: View,
        grants: Grants,
        name: bytes,
        addresses: tuple[bytes, ...],
        ttl: int,
        now: float,
        cnames: tuple[bytes, ...] = (),
    ) -> tuple[Element, ...]:
        """Learn an answer; return nothing if all that it opens is applied, so that it may be released.

        Else return all that it opens and has to wait for, also what is applied now: that may be gone before
        the rest has come. The addresses are the name's, and also those of each CNAME target (`cnames`) that
        a rule matches which counts targets.
        """
        key = view.endpoint.key
        learners = self._learners(view, grants, name, cnames) if cnames else ((grants, name),)
        for theirs, _ in learners:
            opened = theirs.open.get(key)
            if opened is None or not opened.issuperset(addresses):
                break
        else:
            for _, each in learners:
                self._extend(key, each, addresses, ttl, now)
            return ()
        if (place := self.places.get(key)) is None:  # a reload removed the endpoint while it waited
            return ()
        owners, few = self._bounded(place, learners, addresses)
        found: list[Element] = []
        lacking = False
        for theirs, each in owners:
            learned = self._sight(place, theirs, each, few, ttl, now)
            opens = list(self._elements(place, theirs, each, learned))
            if any(element.key not in self.applied.get(element.spec, ()) for element in opens):
                lacking = True
            elif theirs.grants:
                self._open(key, theirs, learned)
            found += opens
        return tuple(found) if lacking else ()

    def _learners(
        self, view: View, grants: Grants, name: bytes, cnames: tuple[bytes, ...]
    ) -> Sequence[tuple[Grants, bytes]]:
        """Return the names that learn an answer's addresses, with their grants."""
        learners = [(grants, name)]
        for target in cnames:
            theirs = (view.verdicts.get(target) or view.verdict(target)).grants
            if theirs.cnames and target != name:
                learners.append((theirs, target))
        return learners

    def _bounded(
        self, place: Place, owners: Sequence[tuple[Grants, bytes]], addresses: tuple[bytes, ...]
    ) -> tuple[Sequence[tuple[Grants, bytes]], tuple[bytes, ...]]:
        """Leave out what would open more than one answer may."""
        widths = [place.width(grants) for grants, _ in owners]
        if sum(widths) * len(addresses) <= ELEMENTS and len(addresses) <= ADDRESSES:
            return owners, addresses
        kept = next((at for at in range(1, len(owners)) if sum(widths[: at + 1]) > ELEMENTS), len(owners))
        count = min(ADDRESSES, max(1, ELEMENTS // max(1, sum(widths[:kept]))))
        self.cut += max(0, len(addresses) - count) + len(owners) - kept
        self.cut_of = (place.key, owners[0][1])
        return owners[:kept], addresses[:count]

    def _extend(self, key: str, name: bytes, addresses: tuple[bytes, ...], ttl: int, now: float) -> None:
        cache = self.places[key].cache
        lookup = cache.lookup_of(ttl, now)  # the global cache has the same minimum
        cache.learn(name, addresses, lookup)
        self._global.learn(name, addresses, lookup)

    def _sight(
        self, place: Place, grants: Grants, name: bytes, addresses: tuple[bytes, ...], ttl: int, now: float
    ) -> tuple[bytes, ...]:
        """Judge each address; learn, and return, what may be learned."""
        learned = self._learnable(grants, addresses)
        if len(learned) < len(addresses):
            self._pass_over(place.key, name, set(addresses).difference(learned), now)
        if learned:
            self._extend(place.key, name, learned, ttl, now)
            if self._judged is not None and self._judged in learned:
                self._judged = None
        return learned

    def _pass_over(self, key: str, name: bytes, addresses: Iterable[bytes], now: float) -> None:
        """Note what is not learned, for people who ask why."""
        for address in addresses:
            self.unlearned.pop((key, address), None)
            self.unlearned[key, address] = (now, name)
            if len(self.unlearned) > UNLEARNED:
                self.unlearned.popitem(last=False)

    def _learnable(self, grants: Grants, addresses: tuple[bytes, ...]) -> tuple[bytes, ...]:
        if all(map(_is_public, addresses)):
            return addresses
        return tuple(address for address in addresses if self.permits(grants, address))

    def _open(self, key: str, grants: Grants, addresses: tuple[bytes, ...]) -> None:
        """Note that all that these addresses open is applied."""
        if self._opened >= OPEN:
            self._close_all()
        opened = grants.open.get(key)
        if opened is None:
            opened = grants.open[key] = set()
            self._open_sets.append(opened)
        for address in set(addresses).difference(opened):
            self._opened += 1
            opened.add(address)
            known = self._memo.get(address)
            if known is None:
                self._memo[address] = opened
            elif isinstance(known, list):
                known.append(opened)
            else:
                self._memo[address] = [known, opened]

    def _close(self, address: bytes) -> None:
        known = self._memo.pop(address, None)
        if known is None:
            return
        for opened in known if isinstance(known, list) else (known,):
            self._opened -= 1
            opened.discard(address)

    def _close_all(self) -> None:
        for opened in self._open_sets:
            opened.clear()
        self._memo = {}
        self._opened = 0

    # -- what the kernel has --------------------------------------------------------------------------------

    def lacking(self, elements: Iterable[Element]) -> list[Element]:
        """Return those of `elements` that do not count as applied."""
        applied = self.applied
        return [element for element in elements if element.key not in applied.get(element.spec, ())]

    def claim(self, adds: Iterable[Element]) -> None:
        """Note that elements are about to be asked for: in a set of the user's they will be ours."""
        for spec, key, name in adds:
            if not spec.ours:
                self._claimed.setdefault(spec, set()).add((key, name))
                if self._noting:
                    self._fresh.setdefault(spec, set()).add((key, name))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note what is written, from before sets are read back until `found` has taken all of them over.

        Reading takes time, and so does taking over: what is written meanwhile may not be in what was read.
        """
        self._noting = True
        try:
            yield
        finally:
            self._noting = False
            self._fresh, self._written = {}, {}

    def claims(self) -> Iterator[tuple[SetSpec, bytes, str]]:
        """Walk over what is ours in sets of the user's, as (set, key, name); it may change meanwhile."""
        for spec, pairs in list(self._claimed.items()):
            for key, name in list(pairs):
                yield spec, key, name

    def restore(self, claims: Iterable[tuple[SetSpec, bytes, str]], sets: Iterable[SetSpec]) -> None:
        """Take over what an earlier process left: its claims, and the sets that may hold something of it."""
        for spec, key, name in claims:
            self._claimed.setdefault(spec, set()).add((key, name))
        self._left_over.update(dict.fromkeys(sets))

    def acknowledged(
        self, deletes: Iterable[Element], adds: Iterable[Element], *, certain: bool = True
    ) -> None:
        """Take over a transaction that the kernel has applied. An element that was there keeps its name.

        It is not certain if a set may have been changed since: then nothing counts on account of it.
        """
        for element in deletes:
            self._withdraw(element.spec, element.key)
            self.doubted.get(element.spec, {}).pop(element.key, None)
            self._claimed.get(element.spec, set()).discard((element.key, element.name))
            if self._noting:
                self._written.setdefault(element.spec, {})[element.key] = None
        for spec, key, name in adds:
            if self._noting and self._written.setdefault(spec, {}).get(key) is None:
                self._written[spec][key] = name
            if certain:
                name = self.doubted.get(spec, {}).pop(key, name)  # noqa: PLW2901
                self.applied.setdefault(spec, {}).setdefault(key, name)
            elif key not in self.applied.get(spec, ()):
                self.doubted.setdefault(spec, {}).setdefault(key, name)

    def found(
        self, spec: SetSpec, content: dict[bytes, str], *, certain: bool = True
    ) -> Generator[None, None, tuple[int, int]]:
        """Take over a set as it was read back, in steps; return how many elements were missing and too many.

        `content` is kept. It is not certain if a set may have been changed since it was asked for: then it
        only tells what may be there. What was written since `reading` is taken to be as it was written.
        """
        whole = False
        try:
            counts = yield from self._found(spec, content, certain=certain)
            whole = True
        finally:
            if not whole:  # abandoned: what was not looked at may be gone
                self._close_all()
        return counts

    def _found(
        self, spec: SetSpec, content: dict[bytes, str], *, certain: bool
    ) -> Generator[None, None, tuple[int, int]]:
        self._left_over.pop(spec, None)
        self._overlay(spec, content)
        old = [self.doubted.pop(spec, {})]
        if certain:
            old.append(self.applied.pop(spec, {}))
        keeper = self.applied if certain else self.doubted
        if not spec.ours:
            return (yield from self._found_of_users(spec, content, old, keeper))
        keys = list(content)
        if content or spec in self._specs:
            keeper[spec] = content
        extra = 0
        for piece in _pieces(keys):
            live = self.applied.get(spec, {}) if not certain else {}
            extra += sum(not (key in live or any(key in each for each in old)) for key in piece)
            for key in piece:
                if key in live:
                    content.pop(key, None)
            yield
        missing = yield from self._missed(old, content, certain=certain)
        return missing, extra

    def _overlay(self, spec: SetSpec, content: dict[bytes, str]) -> None:
        """Bring what was read up to what was written since; an element that was there keeps its name."""
        for key, name in self._written.pop(spec, {}).items():
            if name is None:
                content.pop(key, None)
            else:
                content.setdefault(key, name)

    def _found_of_users(
        self, spec: SetSpec, content: dict[bytes, str], old: list[dict[bytes, str]], keeper: Content
    ) -> Generator[None, None, tuple[int, int]]:
        """Take over what is ours in a set of the user's. Abandoned, it has lost no claim."""
        claimed: set[tuple[bytes, str]] = self._claimed.setdefault(spec, set())  # itself: claims go on
        ours: set[tuple[bytes, str]] = set()
        missing = yield from self._missed(old, content, certain=True)
        while content:
            for _ in range(min(KEYS, len(content))):
                key, name = content.popitem()
                if (key, name) not in claimed:
                    self._withdraw(spec, key)  # we asked for it, but the user had it there
                    self._close(address_of(key))  # also where it counted before it was read
                    continue
                ours.add((key, name))
                if key not in self.applied.get(spec, ()):
                    keeper.setdefault(spec, {})[key] = name
            yield
        fresh = claimed & self._fresh.get(spec, set())  # whatever was read, these may have come since
        claimed &= ours | fresh
        if not claimed:
            self._claimed.pop(spec, None)
        if spec in self._specs:
            self.applied.setdefault(spec, {})
        return missing, 0

    def _missed(
        self, old: list[dict[bytes, str]], content: dict[bytes, str], *, certain: bool
    ) -> Generator[None, None, int]:
        """Count the keys that are not in `content`, and empty what they stood in; those are open no more."""
        missing = 0
        for each in old:
            while each:
                for _ in range(min(KEYS, len(each))):
                    key, _name = each.popitem()
                    if key not in content and not any(key in other for other in old):
                        missing += certain
                        self._close(address_of(key))
                yield
        return missing

    def forget(self, spec: SetSpec) -> None:
        """Take over that a set is gone, with all that was in it."""
        self._claimed.pop(spec, None)
        self._left_over.pop(spec, None)
        self.doubted.pop(spec, None)
        if self.applied.pop(spec, None):
            self._close_all()

    def doubt(self) -> None:
        """Let nothing count as applied until it is acknowledged anew or read back."""
        self.epoch += 1
        self._close_all()
        for spec, applied in self.applied.items():
            doubted = self.doubted.get(spec, {})
            fewer, more = sorted((applied, doubted), key=len)
            more.update(fewer)
            self.doubted[spec] = more
        self.applied = {}

    def in_doubt(self) -> int:
        """Return how many elements may be in the sets and do not count."""
        return sum(map(len, self.doubted.values()))

    def adopt(
        self, spec: SetSpec, content: Mapping[bytes, str], now: float, *, fresh: bool = False
    ) -> Generator[None, None, int]:
        """Learn from a set that outlived us what the policy still grants, in steps; return how many elements.

        The comment is the name. Only the sets of endpoints can say for whom; what a shared set holds is
        wanted again through them. What no cache knows becomes a zombie: its lease is unknown, and a
        connection may live. What is `fresh` another instance has just learned: it has the least lease.
        """
        place, adopted = self._owners.get(spec), 0
        if place is not None:
            for at, (key, text) in enumerate(content.items(), 1):
                adopted += self._adopt(place, spec, key, text, now, fresh=fresh)
                if at % STEP == 0:
                    yield
        return adopted

    def _adopt(self, place: Place, spec: SetSpec, key: bytes, text: str, now: float, *, fresh: bool) -> bool:
        name, address = _named(text), address_of(key)
        if name is None or not self._grants(place, name, address, (spec, key[len(address) :])):
            return False
        if place.holds(name, address):
            return True
        if fresh:
            place.cache.insert(name, (address,), 0, now)
            self._global.insert(name, (address,), 0, now)
        else:
            place.zombies.add(name, address, now)
        return True

    def _withdraw(self, spec: SetSpec, key: bytes) -> None:
        """Stop counting an element."""
        if self.applied.get(spec, {}).pop(key, None) is not None:
            self._close(address_of(key))

    # -- what it should have --------------------------------------------------------------------------------

    def wanted(self, into: Content) -> Iterator[None]:
        """Fill `into` with everything that caches and policy want, in bounded steps.

        Where several names want an element, the name that it has already stays.
        """
        for wish in self._wishes():
            if wish is None:
                yield
                continue
            spec, key, text = wish
            wanted = into.setdefault(spec, {})
            if wanted.setdefault(key, text) != text and self._known(spec, key) == text:
                wanted[key] = text

    def _wishes(self) -> Iterator[Element | None]:
        """Walk over all that is wanted, once for each name that wants it; None ends a step."""
        left = STEP
        for place, name, found in self._pairs():
            left -= 1
            grants = place.view.grants(name)
            text = comment(names.to_text(name)) if grants.grants else ""
            for address in found if grants.grants else ():
                for spec, suffix in self._slots(place, grants, address):
                    yield Element(spec, address + suffix, text)
                    left -= 1
                    if left <= 0:
                        yield None
                        left = STEP
            if left <= 0:
                yield None
                left = STEP

    def _pairs(self) -> Iterator[tuple[Place, bytes, tuple[bytes, ...]]]:
        """Walk over caches and zombies, in this order: what moves from one to the other is not missed."""
        for place in list(self.places.values()):
            for name in place.cache.walk():
                yield place, name, place.cache.addresses(name)
            for zombie in place.zombies:
                for name in list(zombie.names):
                    yield place, name, (zombie.address,)

    def changes(
        self, size: int, *, deletes: bool = True, without: frozenset[SetSpec] = frozenset()
    ) -> Iterator[Transaction]:
        """Yield, in steps, the transactions of at most `size` elements that make the sets what is wanted.

        Each has to be written before the next step. A step may have none. What is to be deleted counts no
        more, from the same instant in which nothing wanted it. Nothing is added to the sets `without`.
        """
        if deletes:
            yield from self.review(self._all_known(), size)
        adds: dict[tuple[SetSpec, bytes], Element] = {}
        for wish in self._wishes():
            if wish is not None:
                spec, key, _ = wish
                if key not in self.applied.get(spec, ()) and spec not in without:
                    adds.setdefault((spec, key), wish)
            if wish is None or len(adds) >= size:
                yield [], list(adds.values())
                adds = {}
        yield [], list(adds.values())

    def _all_known(self) -> Iterator[tuple[SetSpec, bytes]]:
        for content in (self.doubted, self.applied):  # what is given up goes from the second to the first
            for spec in list(content):
                for key in list(content.get(spec, ())):
                    yield spec, key

    def departed(
        self, removed: Mapping[str, Iterable[Gone]], into: dict[tuple[SetSpec, bytes], None]
    ) -> Generator[None, None, None]:
        """Add to `into`, in steps, the elements that may be there on account of pairs that are gone."""
        looked = 0
        for endpoint, pairs in removed.items():
            place = self.places.get(endpoint)
            if place is None:  # all of it went with the endpoint
                continue
            for pair in pairs:
                grants = place.view.grants(pair.name)
                for spec, suffix in self._slots(place, grants, pair.address):
                    key = pair.address + suffix
                    if self._known(spec, key) is not None:
                        into[spec, key] = None
                    looked += 1
                    if looked % STEP == 0:
                        yield

    def review(self, candidates: Iterable[tuple[SetSpec, bytes]], size: int) -> Iterator[Transaction]:
        """Yield, in steps as `changes` does, what deletes elements that nothing wants, or renames them."""
        deletes: list[Element] = []
        adds: list[Element] = []
        for looked, (spec, key) in enumerate(candidates, 1):
            if looked % STEP == 0 or len(deletes) + len(adds) >= size - 1:
                yield deletes, adds
                deletes, adds = [], []
            text = self._known(spec, key)
            if text is None:
                continue
            steps = self._claimant(spec, key, text)
            while (wanted := next(steps)) is _PAUSE:
                yield deletes, adds
                deletes, adds = [], []
            if wanted != text:
                self._give_up(spec, key)
                deletes.append(Element(spec, key, text))
                if wanted is not None:
                    adds.append(Element(spec, key, wanted))
        yield deletes, adds

    def _known(self, spec: SetSpec, key: bytes) -> str | None:
        """Return the name of an element that is there or may be there."""
        name = self.applied.get(spec, {}).get(key)
        return name if name is not None else self.doubted.get(spec, {}).get(key)

    def _give_up(self, spec: SetSpec, key: bytes) -> None:
        """Stop counting an element that is about to be deleted, and remember it until it is."""
        name = self._known(spec, key)
        self._withdraw(spec, key)
        if name is not None:
            self.doubted.setdefault(spec, {})[key] = name

    def _claimant(self, spec: SetSpec, key: bytes, text: str) -> Iterator[str | None]:
        """Yield _PAUSE between steps, then the name that an element is to have; None: nothing wants it.

        That is the name that it has, if this contributes, else any that does.
        """
        address = address_of(key)
        slot, places = (spec, key[len(address) :]), self._sharing(spec)
        if len(places) == 1 and len(known := places[0].names(address)) == 1:  # nearly all are so
            granted = self._grants(places[0], known[0], address, slot)
            yield comment(names.to_text(known[0])) if granted else None
            return
        name = _named(text)
        if name is not None and any(
            place.holds(name, address) and self._grants(place, name, address, slot) for place in places
        ):
            yield text
            return
        self._close(address)  # from here on, an answer that brings it comes by in _sight
        self._judged = address
        found: str | None = None
        pairs = ((place, each) for place in places for each in place.names(address))
        for looked, (holder, each) in enumerate(pairs, 1):
            if looked % STEP == 0:
                yield _PAUSE
            if holder.holds(each, address) and self._grants(holder, each, address, slot):
                other = comment(names.to_text(each))
                found = other if found is None or other == text else found
                if name is not None or found == text:
                    break
        if found is None and self._judged is None:  # an answer came between two steps
            found = text
        yield found

    def _sharing(self, spec: SetSpec) -> Sequence[Place]:
        """Return the endpoints that may have something in a set."""
        owner = self._owners.get(spec)
        if owner is not None:
            return (owner,)
        return list(self.places.values()) if spec in self._specs else ()

    def _grants(self, place: Place, name: bytes, address: bytes, slot: tuple[SetSpec, bytes]) -> bool:
        return slot in self._slots(place, place.view.grants(name), address)


_PAUSE: Final = "..."  # no name


@lru_cache(maxsize=1024)
def _named(text: str) -> bytes | None:
    """Return the name of a comment; None if it is none of ours, or cut."""
    try:
        name = names.from_text(text)
    except ValueError:
        return None
    return name if comment(names.to_text(name)) == text else None


def _pieces(keys: list[bytes]) -> Iterator[list[bytes]]:
    return (keys[at : at + KEYS] for at in range(0, len(keys), KEYS))


def _suffixes(grant: Grant) -> Iterable[bytes]:
    return (b"",) if grant.ports is None else (key_suffix(*port) for port in sorted(grant.ports))


def _covers(grant: Grant, address: bytes) -> bool:
    return _inside(address, grant.cidrs)


def _inside(address: bytes, networks: tuple[Network, ...]) -> bool:
    """Tell whether one of `networks` holds an address, or the address that it embeds."""
    if not networks:
        return False
    return ip.inside(address, networks) or ip.inside(ip.judged(address), networks)
