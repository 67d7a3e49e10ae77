"""Caches and policy in, wanted elements out; what the kernel has acknowledged; and the difference.

Three things are kept here, and everything else is derived from them when it is needed:

    caches    what every endpoint has learned (cache/), fed by `observe`
    policy    what each name opens for each endpoint (rules/), swapped whole by `set_policy`
    applied   what the kernel has acknowledged, set by set: key -> name in the comment

*Wanted* is the first two multiplied out; nothing is counted up and down, so nothing can be counted wrong.
`wanted` walks over all caches in steps. `changes` compares the walk with `applied` and says what to write.
Between two steps answers go on arriving: what is observed during a walk is remembered as touched, and the
walk, which may have passed that place before, deletes none of it. What it leaves, the next walk takes.

`applied` is the truth about the past only as far as the kernel told it: an element counts from its
acknowledgement until just before the request for its deletion. A sign that somebody else changed a set puts
all of `applied` in doubt: nothing counts until it is acknowledged anew or read back.

*The hot path.* Most answers bring nothing new. For each Grants object and endpoint, `Grants.open` holds the
addresses whose every element is applied. An address is put in there by `observe` when it finds that so, and
taken out by whatever takes one of its elements out of `applied`; `_memo` says where to look for it. Taking
out too much is harmless: the next answer looks again.

A set of the user's may hold elements of the user's own. Of what is read back there only counts what was
claimed, key and comment, before we asked for it; all else is neither counted nor ever deleted. A claim lives
until the element is known to be gone, so a transaction of unknown outcome leaves nothing behind.

A hold waits for all that its answer opens, not only for what was lacking when it came: while the last of it
is being written, somebody may take away the first.
"""

from __future__ import annotations

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
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dnsproxy.addresses import Network
    from dnsproxy.cache.gc import Caches
    from dnsproxy.cache.lookups import LookupCache
    from dnsproxy.endpoints import Endpoint, EndpointTable
    from dnsproxy.rules.policy import Grant, Grants, Policy, View
    from dnsproxy.servers import Sink

STEP: Final = 500  # pairs looked at in one step of a walk, one to three milliseconds
OPEN: Final = 200_000  # addresses in all of Grants.open, some 30 MB; beyond it, all are looked at anew
TEMPLATES: Final = 512  # Grants objects whose slots one endpoint remembers; a policy forgets them, too

Content: TypeAlias = "Mapping[SetSpec, Mapping[bytes, str]]"  # set -> key -> name
Slots: TypeAlias = tuple[tuple[SetSpec, bytes], ...]  # (set, what follows the address in the key)

_is_public = lru_cache(maxsize=65_536)(ip.is_public)


@dataclass(slots=True, eq=False)
class Hold:
    """An answer that waits until its elements are applied.

    `refusal` goes out instead of it where it must not be released; `since` and `deadline` are monotonic
    seconds. `done(wire, cause, held)` is told once what was sent and why: an empty cause means applied and
    released, `held` are the seconds it waited. `wire` is filled in by who keeps it.
    """

    elements: tuple[Element, ...]
    sink: Sink
    peer: Any
    since: float
    deadline: float
    refusal: bytes
    done: Callable[[bytes, str, float], None] | None = None
    wire: bytes = b""


class _Place:
    """One endpoint as the policy sees it now: its cache, its sets, and what its grants open."""

    __slots__ = ("_by_grants", "_table", "cache", "key", "sets", "view")

    def __init__(self, view: View, cache: LookupCache, table: TableId) -> None:
        self.key = view.endpoint.key
        self.view = view
        self.cache = cache
        self.sets = {
            (ports, version): endpoint_set(table, self.key, version, ports=ports)
            for ports in (False, True)
            for version in VERSIONS
        }
        self._table = table
        self._by_grants: dict[Grants, dict[int, Slots]] = {}

    def slots_of(self, grants: Grants, version: int) -> Slots:
        """Return what all of `grants` open per address; worked out once."""
        known = self._by_grants.get(grants)
        if known is None:
            if len(self._by_grants) >= TEMPLATES:
                self._by_grants.clear()
            known = {version: self.slots(grants.grants, version) for version in VERSIONS}
            self._by_grants[grants] = known
        return known[version]

    def slots(self, grants: Iterable[Grant], version: int) -> Slots:
        """Return what some grants open per address, in the endpoint's sets and in those that rules name."""
        found: dict[tuple[SetSpec, bytes], None] = {}
        for grant in grants:
            spec = self.sets[grant.ports is not None, version]
            found.update(dict.fromkeys((spec, suffix) for suffix in _suffixes(grant)))
            named = (named_set(self._table, text, version) for text in grant.sets)
            found.update(dict.fromkeys((spec, b"") for spec in named if spec is not None))
        return tuple(found)


class Plan:
    """Caches, policy and the acknowledged state of the sets.

    `table` is where our own sets are; `private` are the non-public ranges that may be learned everywhere.
    `epoch` grows with every doubt: what was asked of the kernel in an older one may be outdated.
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
        self.applied: dict[SetSpec, dict[bytes, str]] = {}
        self.doubted: dict[SetSpec, dict[bytes, str]] = {}
        self.epoch = 0
        self._claimed: dict[SetSpec, set[tuple[bytes, str]]] = {}
        self._table = table
        self._private = private
        self._memo: dict[bytes, list[set[bytes]]] = {}  # address -> the sets in Grants.open that have it
        self._opened = 0  # entries in all of them
        self._touched: set[tuple[str, Grants, tuple[bytes, ...]]] | None = None
        self._spared: dict[SetSpec, set[bytes]] = {}
        self._places: dict[str, _Place] = {}
        self.set_policy(policy, endpoints)

    # -- policy ---------------------------------------------------------------------------------------------

    def set_policy(self, policy: Policy, endpoints: EndpointTable) -> None:
        """Swap policy and endpoints. Caches stay, but for those of endpoints that are gone."""
        self.policy = policy
        self._close_all()
        current = {endpoint.key: policy.view(endpoint) for endpoint in endpoints.endpoints}
        for key in self._places.keys() - current.keys():
            self.caches.drop(key)
        self._places = {key: _Place(view, self.caches.of(key), self._table) for key, view in current.items()}
        self._owners = {spec: place for place in self._places.values() for spec in place.sets.values()}
        named = (named_set(self._table, text, each) for text in sorted(policy.sets) for each in VERSIONS)
        self._specs = dict.fromkeys([*self._owners, *(spec for spec in named if spec is not None)])

    def specs(self) -> tuple[SetSpec, ...]:
        """Return every set that has to exist: all of every endpoint, and those that rules name.

        An endpoint has its four sets also while no rule fills them, so that firewall rules may name them
        whatever the policy says, and never change with it.
        """
        return tuple(self._specs)

    def needs(self, elements: Iterable[Element]) -> bool:
        """Tell whether the policy still has all sets of these elements."""
        return all(element.spec in self._specs for element in elements)

    def permits(self, grants: Grants, address: bytes) -> bool:
        """Tell whether an address may be learned: a public one, or one in a range that something permits."""
        return self._permits_everywhere(address) or any(_covers(grant, address) for grant in grants.grants)

    def elements_of(
        self, endpoint: Endpoint, grants: Grants, name: str, address: bytes
    ) -> tuple[Element, ...]:
        """Return what `grants` open for one address, on account of `name` (text)."""
        place = self._places[endpoint.key]
        slots = self._slots(place, grants, address)
        return tuple(Element(spec, address + suffix, name) for spec, suffix in slots)

    def _slots(self, place: _Place, grants: Grants, address: bytes) -> Slots:
        version = 4 if len(address) == 4 else 6
        if self._permits_everywhere(address):
            return place.slots_of(grants, version)
        return place.slots([grant for grant in grants.grants if _covers(grant, address)], version)

    def _permits_everywhere(self, address: bytes) -> bool:
        return _is_public(address) or _inside(address, self._private)

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
        applied = self._sight(key, grants, name, addresses, ttl, now)
        targets: list[tuple[Grants, bytes]] = []
        for target in cnames:
            theirs = (view.verdicts.get(target) or view.verdict(target)).grants
            if theirs.cnames and target != name:
                applied = self._sight(key, theirs, target, addresses, ttl, now) and applied
                targets.append((theirs, target))
        return () if applied else tuple(self._opened_by(key, [(grants, name), *targets], addresses))

    def _sight(
        self, key: str, grants: Grants, name: bytes, addresses: tuple[bytes, ...], ttl: int, now: float
    ) -> bool:
        """Extend or learn the leases of one name; tell whether all that they open is applied."""
        opened = grants.open.get(key)
        if opened is None or not opened.issuperset(addresses):
            return self._learn(key, grants, name, addresses, ttl, now)
        self._places[key].cache.insert(name, addresses, ttl, now)
        self._global.insert(name, addresses, ttl, now)
        if self._touched is not None:
            self._touched.add((key, grants, addresses))
        return True

    def _learn(
        self, key: str, grants: Grants, name: bytes, addresses: tuple[bytes, ...], ttl: int, now: float
    ) -> bool:
        """Judge each address, learn what may be learned; tell whether all that it opens is applied."""
        place = self._places.get(key)
        learned = self._learnable(grants, addresses)
        if place is None or not learned:  # no place: a reload removed the endpoint while it waited
            return True
        place.cache.insert(name, learned, ttl, now)
        self._global.insert(name, learned, ttl, now)
        if not grants.grants:
            return True
        if self._touched is not None:
            self._touched.add((key, grants, learned))
        return all(self._is_applied(place, grants, address) for address in learned)

    def _is_applied(self, place: _Place, grants: Grants, address: bytes) -> bool:
        """Tell whether all that an address opens is applied, and if so, note it as open."""
        for spec, suffix in self._slots(place, grants, address):
            if address + suffix not in self.applied.get(spec, ()):
                return False
        self._open(place.key, grants, address)
        return True

    def _opened_by(
        self, key: str, owners: Iterable[tuple[Grants, bytes]], addresses: tuple[bytes, ...]
    ) -> Iterator[Element]:
        for grants, name in owners:
            text = comment(names.to_text(name))
            for address in self._learnable(grants, addresses):
                for spec, suffix in self._slots(self._places[key], grants, address):
                    yield Element(spec, address + suffix, text)

    def _learnable(self, grants: Grants, addresses: tuple[bytes, ...]) -> tuple[bytes, ...]:
        if all(map(_is_public, addresses)):
            return addresses
        return tuple(address for address in addresses if self.permits(grants, address))

    def _open(self, key: str, grants: Grants, address: bytes) -> None:
        opened = grants.open.setdefault(key, set())
        if address not in opened:
            if self._opened >= OPEN:
                self._close_all()
            self._opened += 1
            opened.add(address)
            self._memo.setdefault(address, []).append(opened)

    def _close(self, address: bytes) -> None:
        for opened in self._memo.pop(address, ()):
            self._opened -= 1
            opened.discard(address)

    def _close_all(self) -> None:
        for opened_sets in self._memo.values():
            for opened in opened_sets:
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
        for element in adds:
            if not element.spec.ours:
                self._claimed.setdefault(element.spec, set()).add((element.key, element.name))

    def acknowledged(self, deletes: Iterable[Element], adds: Iterable[Element]) -> None:
        """Take over a transaction that the kernel has applied. An element that was there keeps its name."""
        for element in deletes:
            self._withdraw(element)
            self._claimed.get(element.spec, set()).discard((element.key, element.name))
        for element in adds:
            self.applied.setdefault(element.spec, {}).setdefault(element.key, element.name)

    def found(self, spec: SetSpec, content: Mapping[bytes, str]) -> tuple[int, int]:
        """Take over a set as it was read back; return (elements missing in it, elements nobody knew of)."""
        believed = self.doubted.pop(spec, {}) | self.applied.pop(spec, {})
        counted = dict(content)
        if not spec.ours:
            claimed = self._claimed.pop(spec, set())
            counted = {key: name for key, name in content.items() if (key, name) in claimed}
            self._claimed[spec] = set(counted.items())
        if self._memo:  # in doubt it is empty, and the sets may be large
            for key in believed.keys() - counted.keys():
                self._close(address_of(key))
        if counted or spec in self._specs:
            self.applied[spec] = counted
        missing = len(believed.keys() - content.keys())
        return missing, len(content.keys() - believed.keys()) if spec.ours else 0

    def forget(self, spec: SetSpec) -> None:
        """Take over that a set is gone, with all that was in it."""
        self._claimed.pop(spec, None)
        believed = self.doubted.pop(spec, {}) | self.applied.pop(spec, {})
        for key in believed:
            self._close(address_of(key))

    def doubt(self) -> None:
        """Let nothing count as applied until it is acknowledged anew or read back."""
        self.epoch += 1
        self._close_all()
        for spec, believed in self.applied.items():
            self.doubted.setdefault(spec, {}).update(believed)
        self.applied = {}

    def adopt(self, spec: SetSpec, content: Mapping[bytes, str], now: float) -> int:
        """Learn from a set that outlived us what the policy still grants; return the number of elements.

        The comment is the name. Only the sets of endpoints can say for whom; what a shared set holds is
        wanted again through them. State on disk, with leases and zombies, will be read before this.
        """
        place = self._owners.get(spec)
        if place is None:
            return 0
        return sum(self._adopt(place, spec, key, text, now) for key, text in content.items())

    def _adopt(self, place: _Place, spec: SetSpec, key: bytes, text: str, now: float) -> bool:
        try:
            name = names.from_text(text)
        except ValueError:
            return False
        address, grants = address_of(key), place.view.grants(name)
        slot = (spec, key[len(address) :])
        if comment(names.to_text(name)) != text or slot not in self._slots(place, grants, address):
            return False
        place.cache.insert(name, (address,), 0, now)
        self._global.insert(name, (address,), 0, now)
        return True

    def _withdraw(self, element: Element) -> bool:
        """Stop counting an element; tell whether it did count."""
        if self.applied.get(element.spec, {}).pop(element.key, None) is None:
            return False
        self._close(address_of(element.key))
        return True

    # -- what it should have --------------------------------------------------------------------------------

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Remember, from before a walk until its changes are written, what answers touch meanwhile."""
        self._touched, self._spared = set(), {}
        try:
            yield
        finally:
            self._touched, self._spared = None, {}

    def wanted(self, into: dict[SetSpec, dict[bytes, str]]) -> Iterator[None]:
        """Fill `into` with everything that caches and policy want, in bounded steps.

        Where several names want an element, the name that it has already stays.
        """
        left = STEP
        for place in self._places.values():
            for name in list(place.cache):
                found = place.cache.addresses(name)
                self._want(place, name, found, into)
                left -= 1 + len(found)
                if left <= 0:
                    self._spare()
                    yield
                    left = STEP

    def _want(
        self, place: _Place, name: bytes, found: Sequence[bytes], into: dict[SetSpec, dict[bytes, str]]
    ) -> None:
        grants = place.view.grants(name)
        if not grants.grants:
            return
        text = comment(names.to_text(name))
        for address in found:
            for spec, suffix in self._slots(place, grants, address):
                key = address + suffix
                wanted = into.setdefault(spec, {})
                if wanted.setdefault(key, text) != text and self.applied.get(spec, {}).get(key) == text:
                    wanted[key] = text

    def changes(self, wanted: Content, size: int) -> Iterator[tuple[list[Element], list[Element]]]:
        """Yield the transactions, as (deletes, adds) of at most `size` elements, that make `applied` wanted.

        What is to be deleted stops counting with its transaction, and is left out if it was touched.
        """
        for deletes, adds in self._differences(wanted, size):
            going, coming = self._released(deletes, adds)
            if going or coming:
                yield going, coming

    def _differences(self, wanted: Content, size: int) -> Iterator[tuple[list[Element], list[Element]]]:
        deletes: list[Element] = []
        adds: list[Element] = []
        for spec in {**wanted, **self.applied}:
            applied = dict(self.applied.get(spec, {}))
            for old, new in _pairs(spec, wanted.get(spec, {}), applied):
                deletes += old
                adds += new
                if len(deletes) + len(adds) >= size - 1:
                    yield deletes, adds
                    deletes, adds = [], []
        yield deletes, adds

    def _released(self, deletes: list[Element], adds: list[Element]) -> tuple[list[Element], list[Element]]:
        """Return what is still to be written of a transaction, its deletes counting no more."""
        self._spare()
        spared = self._spared
        going = [
            element
            for element in deletes
            if element.key not in spared.get(element.spec, ()) and self._withdraw(element)
        ]
        return going, self.lacking(adds)

    def _spare(self) -> None:
        """Work out which elements were touched since the last time."""
        if not self._touched:
            return
        touched, self._touched = self._touched, set()
        for key, grants, found in touched:
            if (place := self._places.get(key)) is None:
                continue
            for address in found:
                for spec, suffix in self._slots(place, grants, address):
                    self._spared.setdefault(spec, set()).add(address + suffix)


def diff(wanted: Content, applied: Content) -> tuple[list[Element], list[Element]]:
    """Return (deletes, adds) that make `applied` the same as `wanted`; to rename is to delete and add."""
    deletes: list[Element] = []
    adds: list[Element] = []
    for spec in {**wanted, **applied}:
        for old, new in _pairs(spec, wanted.get(spec, {}), applied.get(spec, {})):
            deletes += old
            adds += new
    return deletes, adds


def _pairs(
    spec: SetSpec, wanted: Mapping[bytes, str], applied: Mapping[bytes, str]
) -> Iterator[tuple[tuple[Element, ...], tuple[Element, ...]]]:
    """Yield per key of one set what to delete and what to add; deletes first, to make room."""
    for key, name in applied.items():
        if key not in wanted:
            yield (Element(spec, key, name),), ()
        elif wanted[key] != name:
            yield (Element(spec, key, name),), (Element(spec, key, wanted[key]),)
    for key, name in wanted.items():
        if key not in applied:
            yield (), (Element(spec, key, name),)


def _suffixes(grant: Grant) -> Iterable[bytes]:
    return (b"",) if grant.ports is None else (key_suffix(*port) for port in sorted(grant.ports))


def _covers(grant: Grant, address: bytes) -> bool:
    return _inside(address, grant.cidrs)


def _inside(address: bytes, networks: tuple[Network, ...]) -> bool:
    """Tell whether one of `networks` holds an address, or the address that it embeds."""
    if not networks:
        return False
    return ip.inside(address, networks) or ip.inside(ip.judged(address), networks)
