"""The running state as plain rows: what the admin API answers with.

A listing may be long, a million pairs, and answers must not wait for it. So every listing is a generator of
*steps*, each a list of rows (often an empty one) that took a bounded amount of work; whoever sends them lets
the loop turn between two. The state moves meanwhile: names come and go, a reload swaps the policy. A listing
is therefore not a snapshot. What it promises is that what was there all the time is in it; if other things
went meanwhile, it may be there twice.

Keys and their meaning stand in `schema.py`; a test holds the two against each other. Times in rows are text,
those of the state are monotonic seconds: `State.ahead` is the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dnsproxy import addresses, names, times
from dnsproxy.admin import domains
from dnsproxy.namemanager.elements import address_of, key_text, port_text, ports_text
from dnsproxy.servers import FAILURES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from dnsproxy.addresses import Network
    from dnsproxy.cache.gc import Collector
    from dnsproxy.cache.lookups import LookupCache, Record
    from dnsproxy.cache.zombies import Zombie, Zombies
    from dnsproxy.dyndns.sync import Sync
    from dnsproxy.endpoints import Endpoint, EndpointTable
    from dnsproxy.events import Fan
    from dnsproxy.exchange import Exchange
    from dnsproxy.namemanager.elements import Element, SetSpec
    from dnsproxy.namemanager.manager import NameManager, Sets
    from dnsproxy.namemanager.plan import Plan
    from dnsproxy.namemanager.tracker import Tracker
    from dnsproxy.rules.pattern import Pattern
    from dnsproxy.rules.policy import Grant, Rule
    from dnsproxy.rules.statements import Asking, Statement
    from dnsproxy.servers import Server

BUDGET: Final = 500  # units in one step, about a millisecond
SHOWN: Final = 10  # units that a row's name or address costs; one that is passed over costs 1
KEYS: Final = 4_000  # keys of a set compared in one step, less than a millisecond
WISHES: Final = 100  # elements of which it is worked out whether they are wanted, in one step
SHORT: Final = 100  # entries of a list inside a row; its length is told beside it
ENFORCING: Final = "enforcing"
ONLY_SHOWN: Final = "shown, not enforced"  # the state of sets that exist nowhere
EXAMPLES: Final = 10  # elements that a comparison names

Row: TypeAlias = dict[str, Any]
Steps: TypeAlias = "Generator[list[Row], None, None]"


@dataclass(slots=True, kw_only=True)
class State:
    """What there is to see: live objects, or callables that are asked each time.

    `reload` returns the faults that kept it from happening, none if it happened; `reloaded` tells whether the
    last one succeeded, and when it ended; `faults` are those of files that are not in force; `listening` the
    addresses that are served; `restored` tells that what the last process knew is back; `store` gives the
    state of what is written to disk; `domains` what keeps DynDNS records, if anything. `clock` is that of all
    in memory, `wall` gives seconds since 1970.
    """

    plan: Plan
    manager: NameManager
    exchange: Exchange
    collector: Collector
    tracker: Tracker
    sets: Sets
    events: Fan
    endpoints: Callable[[], EndpointTable]
    servers: Callable[[], Iterable[Server]]
    listening: Callable[[], Sequence[str]]
    faults: Callable[[], Mapping[str, str]]
    restored: Callable[[], bool]
    reload: Callable[[], Awaitable[Sequence[str]]]
    reloaded: Callable[[], tuple[bool, float]]
    store: Callable[[], Mapping[str, Any] | None]
    domains: Callable[[], Sync | None]
    clock: Callable[[], float]
    wall: Callable[[], float]
    version: str
    pid: int
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    def ahead(self) -> float:
        """Return what is to be added to a time in memory to make it one on the wall."""
        return self.wall() - self.clock()

    def keys(self, endpoint: str | None) -> list[str]:
        """Return the keys of all endpoints, or of the one that is meant."""
        return [endpoint] if endpoint is not None else list(self.plan.caches.endpoints)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which names and addresses a listing is about; None: all. `busy`: also what connections may use."""

    pattern: Pattern | None = None
    cidr: Network | None = None
    busy: bool = True

    def name(self, name: bytes) -> bool:
        """Tell whether a wire name is meant. `*` means every name, whatever its bytes."""
        return self.pattern is None or self.pattern.everything or self.pattern.matches(name)

    def address(self, address: bytes) -> bool:
        """Tell whether a packed address is meant."""
        if self.cidr is None:
            return True
        first, last = self.cidr.network_address.packed, self.cidr.broadcast_address.packed
        return len(address) == len(first) and first <= address <= last


EVERYTHING: Final = Chosen()


def _steps(units: Iterable[tuple[int, list[Row]]]) -> Steps:
    """Gather units of known cost into steps."""
    step: list[Row] = []
    left = BUDGET
    for cost, rows in units:
        step += rows
        left -= cost
        if left <= 0:
            yield step
            step, left = [], BUDGET
    yield step


def moment(at: float | None, ahead: float) -> str | None:
    """Return a time in memory as text; None for none and for never."""
    return None if at is None or not isfinite(at) else times.to_text(at + ahead)


# -- endpoints ----------------------------------------------------------------------------------------------


def endpoints(state: State) -> Steps:
    """List all endpoints."""
    return _steps((10 * SHOWN, [endpoint(state, each)]) for each in state.endpoints().endpoints)


def endpoint(state: State, each: Endpoint) -> Row:
    """Return one endpoint, with the numbers of what it has learned."""
    caches = state.plan.caches
    cache, zombies = caches.endpoints.get(each.key), caches.zombies.get(each.key)
    return {
        "endpoint-id": each.key,
        "labels": dict(each.labels),
        "addresses": [str(prefix) for prefix in each.prefixes],
        "deny": each.deny,
        "restricted": state.plan.policy.restricts(each),
        "names": 0 if cache is None else len(cache),
        "ips": 0 if cache is None else cache.pairs,
        "zombies": 0 if zombies is None else len(zombies),
        "evicted": 0 if zombies is None else zombies.evicted,
    }


def find(state: State, text: str) -> Endpoint | None:
    """Return the endpoint `namespace/name`, or the only one of a bare name."""
    found = [each for each in state.endpoints().endpoints if text in (each.key, each.name)]
    exact = [each for each in found if each.key == text]
    return exact[0] if exact else found[0] if len(found) == 1 else None


# -- lookups ------------------------------------------------------------------------------------------------


def lookups(state: State, chosen: Chosen, *, source: str | None = None, endpoint: str | None = None) -> Steps:
    """List what is in the caches; without a source, leases and then connections, endpoint by endpoint."""
    return _steps(_lookups(state, chosen, source, endpoint))


def _lookups(
    state: State, chosen: Chosen, source: str | None, endpoint: str | None
) -> Iterator[tuple[int, list[Row]]]:
    caches, ahead = state.plan.caches, state.ahead()
    if source == "global":
        yield from _leases("", source, caches.global_, chosen, ahead)
        return
    for key in state.keys(endpoint):
        if source != "connection" and (cache := caches.endpoints.get(key)) is not None:
            yield from _leases(key, "lookup", cache, chosen, ahead)
        if source != "lookup" and (zombies := caches.zombies.get(key)) is not None:
            yield from _connections(key, zombies, chosen, ahead)


def _leases(
    key: str, source: str, cache: LookupCache, chosen: Chosen, ahead: float
) -> Iterator[tuple[int, list[Row]]]:
    for name in cache.walk():
        if not chosen.name(name):
            yield 1, []
            continue
        text, records = names.to_text(name), cache.records_of(name)
        rows = [
            _lookup(key, source, text, record, ahead)
            for record in records
            if any(map(chosen.address, record.addresses))
        ]
        yield SHOWN * (1 + sum(len(record.addresses) for record in records)), rows


def _lookup(key: str, source: str, name: str, record: Record, ahead: float) -> Row:
    return {
        "endpoint-id": key,
        "source": source,
        "fqdn": name,
        "ttl": record.lookup.ttl,
        "lookup-time": moment(record.lookup.looked_up, ahead),
        "expiration-time": moment(record.lookup.expiry, ahead),
        "ips": [addresses.to_text(address) for address in record.addresses],
        "connection": None,
    }


def _connections(key: str, zombies: Zombies, chosen: Chosen, ahead: float) -> Iterator[tuple[int, list[Row]]]:
    for zombie in zombies:
        if not chosen.address(zombie.address) or (zombies.busy(zombie) and not chosen.busy):
            yield 1, []
            continue
        address, alive_at = addresses.to_text(zombie.address), moment(zombie.alive_at, ahead)
        until, seen = moment(zombies.until(zombie), ahead), seen_state(zombies, zombie)
        for name in list(zombie.names):
            if not chosen.name(name):
                yield 1, []
                continue
            row = {
                "endpoint-id": key,
                "source": "connection",
                "fqdn": names.to_text(name),
                "ttl": 0,
                "lookup-time": alive_at,
                "expiration-time": until,
                "ips": [address],
                "connection": seen,
            }
            yield 2 * SHOWN, [row]


def zombies(state: State, endpoint: str | None = None) -> Steps:
    """List the addresses that are kept for connections."""
    return _steps(_zombies(state, endpoint))


def _zombies(state: State, endpoint: str | None) -> Iterator[tuple[int, list[Row]]]:
    ahead = state.ahead()
    for key in state.keys(endpoint):
        if (found := state.plan.caches.zombies.get(key)) is not None:
            for each in found:
                row = zombie(key, found, each, ahead)
                yield SHOWN * (3 + len(row["names"])), [row]


def zombie(key: str, zombies: Zombies, each: Zombie, ahead: float) -> Row:
    """Return one address that is kept for connections."""
    return {
        "endpoint-id": key,
        "ip": addresses.to_text(each.address),
        "names": short(each.names),
        "names-total": len(each.names),
        "state": seen_state(zombies, each),
        "alive-at": moment(each.alive_at, ahead),
        "delete-pending-at": moment(each.pending_at, ahead),
        "expiration-time": moment(zombies.until(each), ahead),
        "since-pass": each.since,
        "seen-pass": each.marked,
    }


def seen_state(zombies: Zombies, each: Zombie) -> str:
    """Return what the passes say of a zombie's connection, if there are any passes."""
    return zombies.state(each) if zombies.passes.observing else "unobserved"


def short(wire: Iterable[bytes]) -> list[str]:
    """Return the first of some wire names as text."""
    return [names.to_text(name) for name, _ in zip(wire, range(SHORT), strict=False)]


# -- names that policy speaks of ----------------------------------------------------------------------------


def selectors_as_cilium(state: State) -> Steps:
    """List the selectors as `cilium-dbg fqdn names` does, with the expressions that define their meaning."""
    return _steps((2 * SHOWN, [_as_cilium(text)]) for text in sorted(state.plan.policy.selectors))


def _as_cilium(text: str) -> Row:
    name, pattern = ("", text) if "*" in text else (text, "")
    return {"selectorString": f"MatchName: {name}, MatchPattern: {pattern}", "regexString": expression(text)}


LABEL: Final = "[-a-zA-Z0-9_]"


def expression(text: str) -> str:
    """Return the regular expression by which Cilium defines a canonical selector."""
    if text == "*":
        return f"(^({LABEL}+[.])+$)|(^[.]$)"
    rest = text.removeprefix("**.")
    front = f"({LABEL}+([.]{LABEL}+){{0,}})[.]" if rest != text else ""
    return "^" + front + rest.replace(".", "[.]").replace("*", f"{LABEL}*") + "$"


def selectors(state: State) -> Steps:
    """List the selectors with how much of what was learned each of them matches."""
    policy = state.plan.policy
    found = {policy.index.ids[p]: p.text for p in policy.index.ids if p.text in policy.selectors}
    counts = {number: [0, 0, 0] for number in found}
    for cache in list(state.plan.caches.endpoints.values()):
        seen: set[int] = set()
        walk = cache.walk()
        while step := list(islice(walk, SHORT)):
            for name in step:
                for number in policy.index.match(name):
                    if number in counts:
                        seen.add(number)
                        counts[number][0] += 1
                        counts[number][1] += len(cache.addresses(name))
            yield []
        for number in seen:
            counts[number][2] += 1
    order = sorted(found, key=found.__getitem__)
    yield from _steps((SHOWN, [_selector(found[number], counts[number])]) for number in order)


def _selector(text: str, counts: list[int]) -> Row:
    return {"selector": text, **dict(zip(("names", "ips", "endpoints"), counts, strict=True))}


def pieces(whole: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    """Cut a sequence."""
    for at in range(0, len(whole), size):
        yield whole[at : at + size]


# -- policy -------------------------------------------------------------------------------------------------


def policy(state: State) -> Row:
    """Return what is in force, in numbers, with the notes on what of the documents is not."""
    current, table = state.plan.policy, state.endpoints()
    return {
        "enforcement": current.enforcement,
        "endpoints": len(table.endpoints),
        "restricted": sum(map(current.restricts, table.endpoints)),
        "selectors": len(current.selectors),
        "notes": [
            {"at": f"{note.file}:{note.line}:{note.column}", "path": note.path, "message": note.message}
            for note in current.notes
        ],
        "faults": dict(state.faults()),
    }


def rules(state: State, endpoint: str | None = None) -> Steps:
    """List the rules in force, those of one endpoint or of all."""
    current = state.plan.policy
    selecting: dict[Statement, int] = {}
    for each in state.endpoints().endpoints:
        if endpoint in (None, each.key):
            for statement in current.selecting(each):
                selecting[statement] = selecting.get(statement, 0) + 1
            yield []
    yield from _steps(
        (2 * SHOWN, [row]) for statement, count in selecting.items() for row in _rules(statement, count)
    )


def _rules(statement: Statement, endpoints: int) -> Iterator[Row]:
    for asking in statement.askings:
        for rule in _asked(asking):
            ports = None if asking.ports is None else [port_text(*each) for each in asking.ports]
            yield {**_rule(rule, "resolve"), "ports": ports, "endpoints": endpoints}
    for _, grant in statement.connects:
        yield {**granted(grant), "endpoints": endpoints}
    for denial in statement.denials:
        ports = [port_text(*each) for each in denial.ports]
        yield {**_rule(denial.rule, "deny"), "ports": ports, "endpoints": endpoints}


def _asked(asking: Asking) -> list[Rule]:
    named = [rule for _, rule in asking.names or ()]
    return named if asking.everything is None or asking.everything in named else [*named, asking.everything]


def _rule(rule: Rule, kind: str) -> Row:
    return {
        "policy": rule.policy,
        "path": rule.path,
        "text": rule.text,
        "at": f"{rule.file}:{rule.line}",
        "kind": kind,
        "ports": None,
        "sets": [],
        "cidrs": [],
    }


def granted(grant: Grant) -> Row:
    """Return one connect rule with what it opens."""
    ports = None if grant.ports is None else ports_text(grant.ports)
    cidrs = [str(network) for network in grant.cidrs]
    return {**_rule(grant.rule, "connect"), "ports": ports, "sets": list(grant.sets), "cidrs": cidrs}


# -- sets ---------------------------------------------------------------------------------------------------


def sets(state: State, endpoint: str | None = None) -> Steps:
    """List the sets: what caches and policy want in each, and what the kernel has acknowledged.

    What is wanted is counted, not gathered: it is what is applied, but for what nothing wants any more, and
    what is missing.
    """
    plan = state.plan
    missing: dict[SetSpec, set[bytes]] = {}
    for looked, wish in enumerate(_wishes(state, endpoint), 1):
        if wish is not None and wish.key not in plan.applied.get(wish.spec, ()):
            missing.setdefault(wish.spec, set()).add(wish.key)
        if looked % WISHES == 0:
            yield []
    for spec, owner in specs(state, endpoint):
        extra = 0
        for piece in pieces(list(plan.applied.get(spec, ())), WISHES):
            extra += sum(not _wants(state, owner, spec, key) for key in piece)
            yield []
        applied, lacking = len(plan.applied.get(spec, ())), len(missing.get(spec, ()))
        row = {
            **_set(spec, owner),
            "enforced": state.sets.enforces,
            "wanted": max(0, applied - extra) + lacking,
            "applied": applied,
            "missing": lacking,
            "extra": extra,
            "failing": state.manager.failing.get(spec),
        }
        yield [row]


def _wishes(state: State, endpoint: str | None) -> Iterator[Element | None]:
    """Walk over all that is wanted, once for each name that wants it; None for each name looked at."""
    plan = state.plan
    for key in state.keys(endpoint):
        if (place := plan.places.get(key)) is None:
            continue
        for name in place.cache.walk():
            yield None
            yield from plan.opens(key, [(place.view.grants(name), name)], place.cache.addresses(name))
        for each in place.zombies:
            for name in list(each.names):
                yield None
                yield from plan.opens(key, [(place.view.grants(name), name)], (each.address,))


def _wants(state: State, owner: str, spec: SetSpec, key: bytes) -> bool:
    """Tell whether a name of an endpoint still opens an element."""
    plan, address = state.plan, address_of(key)
    places = [plan.places[owner]] if owner in plan.places else plan.places.values()
    return any(
        (element.spec, element.key) == (spec, key)
        for place in places
        for name in place.names(address)
        for element in plan.opens(place.key, [(place.view.grants(name), name)], (address,))
    )


def specs(state: State, endpoint: str | None = None) -> list[tuple[SetSpec, str]]:
    """Return the sets that may hold something of ours, each with its endpoint, "" if shared."""
    owners = {spec: key for key, place in state.plan.places.items() for spec in place.sets.values()}
    found = ((spec, owners.get(spec, "")) for spec in state.plan.sets())
    return [(spec, owner) for spec, owner in found if endpoint in (None, owner)]


def _set(spec: SetSpec, owner: str) -> Row:
    return {"set": str(spec), "endpoint-id": owner, "ours": spec.ours}


class Difference:
    """How a set that was read back differs from what counts as applied.

    Elements are written while a set is being read. What seems to differ is therefore looked at once more in a
    second reading; what was only on its way is in order by then.
    """

    def __init__(self, spec: SetSpec) -> None:
        self.missing: list[bytes] = []
        self.extra: list[bytes] = []
        self._spec = spec

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra)

    def look(self, applied: Mapping[bytes, str], content: Mapping[bytes, str]) -> Iterator[None]:
        """Find what differs, in steps. In a set of the user's, what is theirs does not."""
        yield from self._look(list(applied), list(content) if self._spec.ours else [], applied, content)

    def confirm(self, applied: Mapping[bytes, str], content: Mapping[bytes, str]) -> Iterator[None]:
        """Drop what does not differ any more, in steps."""
        missing, extra, self.missing, self.extra = self.missing, self.extra, [], []
        yield from self._look(missing, extra, applied, content)

    def _look(
        self,
        missing: list[bytes],
        extra: list[bytes],
        applied: Mapping[bytes, str],
        content: Mapping[bytes, str],
    ) -> Iterator[None]:
        for piece in pieces(missing, KEYS):
            self.missing += [key for key in piece if key in applied and key not in content]
            yield
        for piece in pieces(extra, KEYS):
            self.extra += [key for key in piece if key in content and key not in applied]
            yield

    def row(self, owner: str, applied: Mapping[bytes, str], content: Mapping[bytes, str]) -> Row:
        """Return the row of a set that was read."""
        examples = [_example(key, "missing", applied.get(key, "")) for key in self.missing[:EXAMPLES]]
        left = EXAMPLES - len(examples)
        examples += [_example(key, "extra", content.get(key, "")) for key in self.extra[:left]]
        numbers = {"kernel": len(content), "applied": len(applied)}
        differing = {"missing": len(self.missing), "extra": len(self.extra)}
        return {**_set(self._spec, owner), **numbers, **differing, "examples": examples, "error": None}


def unread(spec: SetSpec, owner: str, applied: int, error: str) -> Row:
    """Return the row of a set that could not be read."""
    numbers = {"kernel": 0, "applied": applied, "missing": 0, "extra": 0}
    return {**_set(spec, owner), **numbers, "examples": [], "error": error}


def _example(key: bytes, problem: str, name: str) -> Row:
    return {"element": key_text(key), "problem": problem, "name": name}


# -- the whole ----------------------------------------------------------------------------------------------


def conntrack(state: State) -> Row:
    """Return what is known of the passes over the kernel's connections."""
    passes, tracker, ahead = state.plan.caches.passes, state.tracker, state.ahead()
    return {
        "observing": passes.observing,
        "problem": tracker.problem,
        "begun": passes.begun,
        "completed": passes.completed,
        "started-at": moment(passes.started_at, ahead),
        "next-at": moment(passes.next_at, ahead),
        "seconds": tracker.seconds,
        "entries": tracker.entries,
        "failures": tracker.failures,
    }


def of_sets(state: State) -> Row:
    """Return the manager's numbers; where sets are only shown, its state says so."""
    found: Row = state.manager.status()
    shown = not state.sets.enforces and found["state"] == ENFORCING
    return {**found, "state": ONLY_SHOWN} if shown else found


def status(state: State) -> Row:
    """Return the state in one row."""
    caches, manager = state.plan.caches, of_sets(state)
    succeeded, ended_at = state.reloaded()
    return {
        "version": state.version,
        "pid": state.pid,
        "state": manager["state"],
        "problem": manager["problem"],
        "started-at": moment(state.started_at, state.ahead()),
        "listen": list(state.listening()),
        "endpoints": len(state.endpoints().endpoints),
        "selectors": len(state.plan.policy.selectors),
        "names": sum(map(len, caches.endpoints.values())),
        "ips": sum(cache.pairs for cache in caches.endpoints.values()),
        "zombies": sum(map(len, caches.zombies.values())),
        "queries": dict(state.exchange.counts),
        "in-flight": state.exchange.flying,
        "sets": manager,
        "conntrack": conntrack(state),
        "store": state.store(),
        "upstreams": [
            {"server": str(server), "failures": server.failures, "usable": server.failures < FAILURES}
            for server in state.servers()
        ],
        "faults": dict(state.faults()),
        "reload": {"succeeded": succeeded, "at": moment(ended_at, state.ahead())},
        "domains": domains.summary(state.domains()),
        "events": {"recording": state.events.recording, "subscribers": len(state.events)},
    }


def failing(state: State) -> list[dict[str, str]]:
    """Return the parts that keep the proxy from being ready, each with the reason."""
    manager, servers = of_sets(state), list(state.servers())
    parts = {
        "listeners": "" if state.listening() else "no address is served yet",
        "restore": "" if state.restored() else "what the last process knew is still being read",
        "sets": _sets_fail(manager),
        "upstream": ""
        if any(server.failures < FAILURES for server in servers)
        else "no upstream server answers: " + ", ".join(map(str, servers)),
    }
    return [{"part": part, "reason": reason} for part, reason in parts.items() if reason]


def notes(state: State) -> list[str]:
    """Return what the operator should know although the proxy is ready."""
    shown = of_sets(state)["state"] == ONLY_SHOWN
    return ["sets are shown, not enforced: nothing in the kernel follows them"] if shown else []


def _sets_fail(manager: Mapping[str, Any]) -> str:
    """Return why names cannot be allowed; one set that fails must not take all names from everybody."""
    if manager["state"] in (ENFORCING, ONLY_SHOWN):
        return ""
    return manager["problem"] or "the sets are not read back yet"


def wanted(
    event: tuple[Any, ...], endpoint: str | None, pattern: Pattern | None, verdict: str | None
) -> bool:
    """Tell whether an event is among those that somebody asked to see (`exchange.py` lays them out)."""
    kind, key, name = event[0], event[2], event[5]
    if endpoint not in (None, key) or (pattern is not None and not Chosen(pattern).name(name or names.ROOT)):
        return False
    if verdict is None:
        return True
    if kind == "response":
        return verdict == ("failed" if event[14] else "allowed")
    return verdict == ("allowed" if event[7] is not None and event[7].allowed else "denied")
