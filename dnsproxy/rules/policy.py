"""(endpoint, server, port, name) -> verdict, and what the answer's addresses open; swapped as a whole.

All distinct patterns of all documents stand in one `Matcher`, so a name is matched once, whoever asks. What
remains is to tell which of the matching patterns belong to the one who asks. Three steps keep that cheap:

*group*    endpoints that the same statements select are one group; grants are made per group.
*scope*    a group, seen at one port of one DNS server: which askings count there. Cilium's rules of
           precedence are here, and they do not depend on the name:
           1. a denial that covers the port and the server denies every name;
           2. askings whose ports name exactly this port count, and if any of them lists names, only they do:
              that is Cilium's redirect to its proxy. A plain permission of the port among them lets every
              name pass; one without ports, or with a range, does not;
           3. without any selecting statement, or with default deny off in all of them, everything is allowed.
*view*     a scope as one endpoint sees it, with the verdicts that it has been given so far.

What is remembered on account of packets counts against one limit; when it is reached, all of it is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from dnsproxy import names
from dnsproxy.endpoints import HOST_KEY, HOST_LABEL, Endpoint, EndpointTable, built_in_host, conflicts
from dnsproxy.errors import DocumentError, Problem
from dnsproxy.rules.documents import EndpointDocument, Object, read
from dnsproxy.rules.fields import EVERY_PORT, PROTOCOLS
from dnsproxy.rules.matcher import Matcher
from dnsproxy.rules.statements import (
    DNS_PORT,
    Asking,
    Denial,
    Grant,
    Reach,
    Rule,
    Statement,
    covered,
    labels_of,
    statements,
)
from dnsproxy.yamldoc import parse

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from dnsproxy.rules.pattern import Pattern

__all__ = ["Grant", "Grants", "Policy", "Rule", "Verdict", "View", "build", "load"]

REMEMBERED = (
    100_000  # verdicts, views and grants together; some 30 MB, and enough for all names of a busy host
)

Enforcement: TypeAlias = Literal["default", "always"]
Ids: TypeAlias = tuple[int, ...]  # patterns, by their place in the matcher
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Grants:
    """What names open that the same connect rules match, for one group of endpoints; one object for them all.

    `cnames` tells that a matching rule wants CNAME targets to count as matched. `open` belongs to the plan:
    by the key of an endpoint, the addresses all of whose elements the kernel has acknowledged.
    """

    grants: tuple[Grant, ...] = ()
    cnames: bool = False
    open: dict[str, set[bytes]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Verdict:
    """Whether a name may be asked, the rule that decided (or None), why, and what its addresses open."""

    allowed: bool
    rule: Rule | None
    reason: str
    grants: Grants
    cnames: bool


class Memory:
    """A limit on what many dicts remember together; beyond it, all of them are emptied."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self.limit = limit
        self.count = 0
        self._filled: list[dict[Any, Any]] = []

    def put(self, memo: dict[Any, T], key: object, value: T) -> T:
        """Remember one value in one of the dicts, and return it."""
        if self.count >= self.limit:
            self._empty()
        if not self.limit:
            return value
        if not memo:
            self._filled.append(memo)
        memo[key] = value
        self.count += 1
        return value

    def close(self) -> None:
        """Empty all dicts and remember nothing more."""
        self.limit = 0
        self._empty()

    def _empty(self) -> None:
        for filled in self._filled:
            filled.clear()
        self._filled.clear()
        self.count = 0


class _Index:
    """Every distinct pattern once, and under its id the rules that have it, by asking or statement."""

    def __init__(self, stated: Sequence[Statement]) -> None:
        self.ids: dict[Pattern, int] = {}
        self.asks: list[dict[Asking, Rule]] = []
        self.connects: list[dict[Statement, list[Grant]]] = []
        for statement in stated:
            for asking in statement.askings:
                for pattern, rule in asking.names or ():
                    if not pattern.everything:  # `*` here has no bounds, and is the asking's `everything`
                        self.asks[self._id(pattern)].setdefault(asking, rule)
            for pattern, grant in statement.connects:
                self.connects[self._id(pattern)].setdefault(statement, []).append(grant)
        self.match = Matcher(self.ids).match

    def _id(self, pattern: Pattern) -> int:
        found = self.ids.setdefault(pattern, len(self.asks))
        if found == len(self.asks):
            self.asks.append({})
            self.connects.append({})
        return found


def _common(owners: Mapping[Any, T], chosen: Mapping[Any, Any]) -> list[T]:
    """Return what the chosen ones own, in as many steps as the smaller side has."""
    if len(owners) <= len(chosen):
        return [value for owner, value in owners.items() if owner in chosen]
    return [owners[owner] for owner in chosen if owner in owners]


class _Group:
    """The endpoints that the same statements select."""

    def __init__(self, index: _Index, memory: Memory, chosen: Sequence[Statement]) -> None:
        self.statements = dict.fromkeys(chosen)
        self.empty = Grants()
        self._index = index
        self._memory = memory
        self._made: dict[Ids, Grants] = {}
        self._closed = tuple(each for statement in chosen for denial in statement.denials if denial.sure
                             for each in denial.ports)  # fmt: skip

    def grants(self, ids: Ids) -> Grants:
        """Return what the connect rules behind some patterns open, the same object for the same rules."""
        connects = self._index.connects
        found = [
            grant for each in ids for given in _common(connects[each], self.statements) for grant in given
        ]
        if not found:
            return self.empty
        key = tuple(map(id, found))
        return self._made.get(key) or self._memory.put(self._made, key, self._make(found))

    def _make(self, found: list[Grant]) -> Grants:
        kept = tuple(grant for each in found if (grant := self._without_closed(each)) is not None)
        return Grants(kept, any(grant.rule.cnames for grant in kept)) if kept else self.empty

    def _without_closed(self, grant: Grant) -> Grant | None:
        if not self._closed:
            return grant
        if grant.ports is None:  # all ports but some is more than a set can say; a note has said so
            return None if set(EVERY_PORT) <= set(self._closed) else grant
        ports = frozenset(port for port in grant.ports if not covered(self._closed, *port))
        return replace(grant, ports=ports) if ports else None


class _Scope:
    """What counts for a group at one port of one DNS server."""

    def __init__(self, policy: Policy, group: _Group, protocol: str, port: int, server: bytes | None) -> None:
        self._index = policy.index
        self._memory = policy.memory
        self._group = group
        self._made: dict[Ids, Verdict] = {}
        number = PROTOCOLS[protocol]
        self._denial = _denying(group.statements, number, port, server)
        self.askings = dict.fromkeys(_counting(group.statements, number, port, server))
        self._everything = next((each for each in self.askings if each.everything is not None), None)
        self._allowed, self._reason = policy.otherwise(group, self.askings, f"{port}/{protocol}")

    def decide(self, name: bytes) -> Verdict:
        """Return the verdict for a name, the same object for the same matching patterns."""
        ids = self._index.match(name)
        return self._made.get(ids) or self._memory.put(self._made, ids, self._make(ids))

    def _make(self, ids: Ids) -> Verdict:
        grants = self._group.grants(ids)
        if self._denial is not None:
            return Verdict(False, self._denial.rule, "egressDeny covers the DNS port", grants, cnames=False)
        rules = [rule for each in ids for rule in _common(self._index.asks[each], self.askings)]
        reason = "a rule allows this name"
        if self._everything is not None and self._everything.everything is not None:
            reason = reason if rules else self._everything.reason
            rules.append(self._everything.everything)
        if rules:
            return Verdict(True, rules[0], reason, grants, any(rule.cnames for rule in rules))
        return Verdict(self._allowed, None, self._reason, grants, cnames=False)

    def allows_all(self) -> bool:
        """Tell whether no name is refused."""
        return self._everything is not None or self._allowed

    def may_ask(self, ids: Ids) -> bool:
        """Tell whether one of some patterns may be asked."""
        return any(_common(self._index.asks[each], self.askings) for each in ids)


def _denying(stated: Iterable[Statement], protocol: int, port: int, server: bytes | None) -> Denial | None:
    for denial in (denial for statement in stated for denial in statement.denials):
        if covered(denial.ports, protocol, port) and denial.peers.covers(server) is True:
            return denial
    return None


def _counting(stated: Iterable[Statement], protocol: int, port: int, server: bytes | None) -> list[Asking]:
    """Return the askings that count for a query to this port of this server."""
    exact, wide = [], []
    for asking in (asking for statement in stated for asking in statement.askings):
        reach, covers = asking.reach(protocol, port), asking.peers.covers(server)
        if reach is Reach.EXACT and covers is not False:
            exact.append(asking)
        elif reach is Reach.WIDE and covers is True:
            wide.append(asking)
    return exact if any(asking.names is not None for asking in exact) else exact + wide


class View:
    """The policy as one endpoint meets it at one port of one DNS server."""

    __slots__ = ("_memory", "_scope", "endpoint", "verdicts")

    def __init__(self, endpoint: Endpoint, scope: _Scope, memory: Memory) -> None:
        self.endpoint = endpoint
        self.verdicts: dict[bytes, Verdict] = {}  # what `verdict` has said; may be emptied at any time
        self._scope = scope
        self._memory = memory

    def verdict(self, name: bytes) -> Verdict:
        """Return whether a wire name may be asked."""
        found = self.verdicts.get(name)
        return found or self._memory.put(self.verdicts, name, self._scope.decide(name))

    def grants(self, name: bytes) -> Grants:
        """Return what the addresses of a wire name open, whether or not it may be asked."""
        found = self.verdicts.get(name)  # none is remembered: a walk must not drive out those in use
        return (found or self._scope.decide(name)).grants


class Policy:
    """All statements over all endpoints. Immutable, but for what it remembers."""

    def __init__(
        self, stated: Sequence[Statement], endpoints: EndpointTable, enforcement: Enforcement
    ) -> None:
        self.index = _Index(stated)
        self.memory = Memory()
        self.enforcement = enforcement
        self.notes: list[Problem] = []
        self.selectors = frozenset(pattern.text for each in stated for pattern, _ in each.connects)
        self.sets = frozenset(name for each in stated for _, grant in each.connects for name in grant.sets)
        self._views: dict[tuple[Any, ...], View] = {}
        self._scopes: dict[tuple[Any, ...], _Scope] = {}
        self._groups = self._grouped(stated, endpoints)

    def _grouped(self, stated: Sequence[Statement], endpoints: EndpointTable) -> dict[Endpoint, _Group]:
        groups: dict[tuple[int, ...], _Group] = {}
        found = {}
        for endpoint, chosen in _selected(stated, endpoints).items():
            if (key := tuple(map(id, chosen))) not in groups:
                groups[key] = _Group(self.index, self.memory, chosen)
            found[endpoint] = groups[key]
        return found

    def view(
        self, endpoint: Endpoint, protocol: str = "UDP", port: int = DNS_PORT, server: bytes | None = None
    ) -> View:
        """Return the policy as `endpoint` meets it; without a `server` its queries go to ours."""
        key = (endpoint, protocol, port, server)
        if (view := self._views.get(key)) is None:
            view = View(endpoint, self._scope(self._groups[endpoint], *key[1:]), self.memory)
            self.memory.put(self._views, key, view)
        return view

    def _scope(self, group: _Group, protocol: str, port: int, server: bytes | None) -> _Scope:
        key = (group, protocol, port, server)
        if (scope := self._scopes.get(key)) is None:
            scope = self.memory.put(self._scopes, key, _Scope(self, *key))
        return scope

    def exact_names(self, endpoint: Endpoint) -> list[bytes]:
        """Return the wire names without a star that an endpoint may both ask for and connect to, sorted."""
        statements, view = self._groups[endpoint].statements, self.view(endpoint)
        patterns = {pattern for each in statements for pattern, _ in each.connects if "*" not in pattern.text}
        found = (names.from_text(pattern.text) for pattern in patterns)
        return sorted(name for name in found if view.verdict(name).allowed)

    def retire(self) -> None:
        """Forget everything, when another policy has come into force.

        What is remembered leads back to the memory that holds it. Emptied, the old policy goes with its last
        user, without a pass of Python's collector, which app.py keeps away from old objects.
        """
        self.memory.close()

    def selecting(self, endpoint: Endpoint) -> Iterable[Statement]:
        """Return the statements that select an endpoint, in the order of the documents."""
        return self._groups[endpoint].statements

    def restricts(self, endpoint: Endpoint) -> bool:
        """Tell whether an endpoint may connect to nothing but what rules allow (default deny)."""
        return self._restricted(self._groups[endpoint])

    def _restricted(self, group: _Group) -> bool:
        return self.enforcement == "always" or any(each.default_deny for each in group.statements)

    def otherwise(self, group: _Group, askings: Container[Asking], port: str) -> tuple[bool, str]:
        """Return what holds for a name that no rule allows: allowed or not, and why."""
        restricted = self._restricted(group)
        if not group.statements:
            always = ", and enforcement is always" if restricted else ""
            return not restricted, f"no policy selects this endpoint{always}"
        if not restricted:
            return True, "default deny is off in every policy that selects this endpoint"
        missing = "no rule allows this name" if askings else f"no rule lets this endpoint ask on port {port}"
        return False, missing

    def lint(self, stated: Sequence[Statement]) -> list[Problem]:
        """Return notes on statements that cannot do what was probably meant."""
        chosen = {statement for group in self._groups.values() for statement in group.statements}
        notes = [_selects_nobody(statement) for statement in stated if statement not in chosen]
        doubtful = {statement: self._doubtful(statement) for statement in chosen}
        noted: set[Rule] = set()
        for endpoint, group in self._groups.items():
            scope = self._scope(group, "UDP", DNS_PORT, None)
            for statement in () if scope.allows_all() else group.statements:
                for rule, name, ids in doubtful[statement]:
                    if rule not in noted and not scope.may_ask(ids):
                        noted.add(rule)
                        notes.append(_may_not_ask(endpoint, rule, name))
        return notes

    def _doubtful(self, statement: Statement) -> list[tuple[Rule, bytes, Ids]]:
        """Return the connect rules whose pattern the statement does not itself let be asked.

        With each comes a name that its pattern matches, and all patterns that match this name.
        """
        counting = _counting([statement], PROTOCOLS["UDP"], DNS_PORT, None)
        own = dict.fromkeys(asking for asking in counting if asking.names is not None)
        asks, ids = self.index.asks, self.index.ids
        others = [
            (pattern, grant) for pattern, grant in statement.connects if not _common(asks[ids[pattern]], own)
        ]
        names_ = ((grant.rule, _witness(pattern)) for pattern, grant in others)
        return [(rule, name, self.index.match(name)) for rule, name in names_]


def _witness(pattern: Pattern) -> bytes:
    """Return a name that a pattern matches."""
    front = [b"x", b"x"] if pattern.deep or pattern.everything else []
    return names.from_labels(front + [b"x".join(pieces) for pieces in pattern.labels])


def _may_not_ask(endpoint: Endpoint, rule: Rule, name: bytes) -> Problem:
    message = f"{endpoint.key} may connect but may not ask: no DNS rule allows {names.to_text(name)} add one"
    return Problem(rule.file, rule.line, rule.column, rule.path, message)


def _selects_nobody(statement: Statement) -> Problem:
    where = "" if statement.namespace is None else f" in the namespace {statement.namespace}"
    host = "the host counts only by reserved:host, or once an Endpoint document named host declares it"
    return replace(statement.place, message=f"selects no endpoint{where}; {host}")


def _selected(stated: Iterable[Statement], endpoints: EndpointTable) -> dict[Endpoint, list[Statement]]:
    """Return the statements that select each endpoint."""
    labels = {endpoint: labels_of(endpoint) for endpoint in endpoints.endpoints}
    having: dict[tuple[str, str], list[Endpoint]] = {}
    for endpoint, own in labels.items():
        for key, values in own.items():
            for value in values:
                having.setdefault((key, value), []).append(endpoint)
    found: dict[Endpoint, list[Statement]] = {endpoint: [] for endpoint in labels}
    for statement in stated:
        label = statement.one_label()
        for endpoint in having.get(label, ()) if label else labels:
            if statement.selects(endpoint, labels[endpoint], endpoints.host):
                found[endpoint].append(statement)
    return found


# --- documents to a policy


def build(
    documents: Iterable[Object], endpoints: EndpointTable, *, enforcement: Enforcement = "default"
) -> Policy:
    """Return the policy of checked documents; what is not enforced of them stands in its notes."""
    stated, notes = statements(documents)
    policy = Policy(stated, endpoints, enforcement)
    policy.notes += notes + policy.lint(stated)
    return policy


def load(
    texts: Iterable[tuple[str, str]], *, enforcement: Enforcement = "default"
) -> tuple[EndpointTable, Policy]:
    """Return the endpoints and the policy of some (file, text); DocumentError has every fault of all."""
    problems: list[Problem] = []
    notes: list[Problem] = []
    objects: list[Object] = []
    for file, text in texts:
        _read(file, text, objects, notes, problems)
    declared = {_endpoint(each.model): each for each in objects if isinstance(each.model, EndpointDocument)}
    problems += _claimed_twice(declared) + _named_twice(objects)
    if problems:
        raise DocumentError(problems)
    host = next((endpoint for endpoint in declared if endpoint.key == HOST_KEY), built_in_host())
    endpoints = EndpointTable([endpoint for endpoint in declared if endpoint is not host], host)
    policy = build(objects, endpoints, enforcement=enforcement)
    policy.notes[:0] = notes
    return endpoints, policy


def _read(file: str, text: str, objects: list[Object], notes: list[Problem], problems: list[Problem]) -> None:
    """Add what one text holds, and what is wrong with it."""
    try:
        documents = parse(text, file)
    except DocumentError as error:
        problems += error.problems
        return
    for document in documents:
        try:
            found, skipped = read(document)
        except DocumentError as error:
            problems += error.problems
        else:
            objects += found
            notes += skipped


def _endpoint(model: EndpointDocument) -> Endpoint:
    labels = dict(model.metadata.labels or {}) | ({HOST_LABEL: ""} if model.is_host else {})
    prefixes = tuple(model.spec.addresses or ())
    return Endpoint(model.namespace, model.metadata.name, labels, prefixes, model.spec.deny_reply)


def _claimed_twice(declared: Mapping[Endpoint, Object]) -> list[Problem]:
    return [
        declared[second].document.problem(
            _claimed_at(second, claim),
            f"{first.key} ({_place(declared[first])}) and {second.key} both claim {claim}",
        )
        for first, second, claim in conflicts(declared)
    ]


def _claimed_at(endpoint: Endpoint, claim: str) -> tuple[str | int, ...]:
    """Return where the document claims a name or a prefix: prefixes stand in the order of addresses."""
    places = {f"the prefix {prefix}": place for place, prefix in enumerate(endpoint.prefixes)}
    return ("spec", "addresses", places[claim]) if claim in places else ("metadata", "name")


def _named_twice(objects: Iterable[Object]) -> list[Problem]:
    """Return policies with the name of an earlier one: the two together would allow more than either."""
    problems = []
    first: dict[str, Object] = {}
    for each in objects:
        known = first.setdefault(each.title, each)
        if known is not each and not isinstance(each.model, EndpointDocument):
            message = (
                f"{each.title} stands already at {_place(known)}: name this one differently, or remove one"
            )
            problems.append(each.document.problem(("metadata", "name"), message))
    return problems


def _place(source: Object) -> str:
    line, _ = source.document.where(())
    return f"{source.document.file}:{line}"
