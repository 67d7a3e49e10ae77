"""Every query in flight: query bytes in, denial or forward out; answer bytes in, release or hold out.

The exchange decides and remembers; it owns no socket and no clock. Whoever feeds it gets back an
Action, "give these bytes to that sink", or None where the right thing is silence.

    client -> query()   not a query: silence; malformed: FORMERR; unknown client: REFUSED
                        policy says no: the denial, at once; nothing leaves this host
                        policy says yes: a Pending, sent on with an ID of our own
    server -> answer()  other socket, ID or question: dropped, the wait goes on
                        SERVFAIL and the like: the next server is asked; the last such answer is passed on
                        addresses: given to the plan; elements not yet applied: into the waiting room
                        else: to the client, byte for byte but for the ID (and TC, where its size is smaller)
    timer  -> expire()  an attempt is over: the next server; the budget is over: SERVFAIL
    socket -> lost()    refused or closed: the next server at once
    end    -> stop()    SERVFAIL to all that wait

Of every query for which `query` names an Action, one reply comes, now or later; none comes after None.

A Pending is known by every (channel, ID) it was sent under, so a late answer to an earlier attempt still
counts. First attempts all last equally long and so fall due in the order they were made: a queue. Later
ones are few: a heap. A Pending that is done is left in either and skipped when it comes up; when most of
them are done, they are thrown out.

*Questions in flight.* Whoever cannot see our packets has to guess ID and port to forge an answer. If the
same question is in flight N times, each guess is N times as good, and whoever may ask can see to that: the
birthday attack of RFC 5452 section 5. So over UDP a query whose bytes are those of one in flight is not sent.
It follows that one, its leader. One copy is enough: a packet that gets lost is sent again by our own
attempts, not by the client's. A follower is a Pending like any other, on its own client's account: counted,
judged, stripped, learned, held, fitted and reported for itself when the leader's answer comes. Equal bytes
take part in equal attempts, so what ends a leader ends its followers, but for time: they came later, and
when the leader's time is over the first of them is sent on and leads. A follower needs no timer of its own.

Bytes can be varied at will (letter case, EDNS options) and still ask the same. So there may be VARIANTS of a
question in flight over UDP, and LEADERS of a name, the types that stubs ask for in one go; what comes beyond
them is asked over TCP, where nobody can forge without seeing. Queries over TCP are not joined.

When the policy is swapped, what is in flight is judged again when its answer comes: an answer to a name
that has lost its permission is replaced by the denial, and teaches nothing.

What teaches: records of class IN in answers with NOERROR. Of other response codes clients use no address
(RFC 1035 section 4.1.1; a chain that ends in NXDOMAIN has none, RFC 6604), and other classes have no
Internet addresses. Stripping asks for no code: what may not reach a client is taken out of every answer.
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from dnsproxy import message
from dnsproxy.errors import FormError
from dnsproxy.histogram import Histogram
from dnsproxy.message import FORMERR, NOERROR, NOTIMP, NXDOMAIN, REFUSED, SERVFAIL
from dnsproxy.namemanager.plan import Hold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.namemanager.elements import Element
    from dnsproxy.namemanager.plan import Plan
    from dnsproxy.rules.policy import Policy, Verdict, View
    from dnsproxy.servers import Action, Channel, Routes, Server, Sink

ASK_ANOTHER: Final = frozenset((FORMERR, SERVFAIL, NOTIMP, REFUSED))  # of the server more than of the name
RESENDS: Final = 3  # streams that answered others and closed, and brought a query no nearer to its answer
VARIANTS: Final = 4  # of one question in flight over UDP, which help a forger by two bits of some thirty
LEADERS: Final = 16  # of one name in flight over UDP
SLACK: Final = 1_024  # queries that are done and may lie about
SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)  # of upstream_seconds
CHANNEL: Final = 32_768  # queries on one channel: half of all IDs, so that an unused one is soon found
CLIENTS: Final = 65_536  # remembered client addresses, per transport
ALIASES: Final = 10_000  # remembered CNAME targets
DENIALS: Final = {"nxdomain": NXDOMAIN, "refused": REFUSED}
NONE, ONE = b"\x00\x00", b"\x00\x01"
COUNTS: Final = (
    "queries", "malformed", "strangers", "denied", "forwarded", "joined", "limited",
    "answers", "strays", "broken", "retries", "timeouts", "failures", "held",
)  # fmt: skip
HEADER: Final = 12  # octets
TC: Final = 0x02

Found: TypeAlias = tuple[tuple[bytes, ...], int | None, tuple[bytes, ...]]  # addresses, TTL, CNAME targets
NOTHING: Final[Found] = ((), None, ())

Trouble: TypeAlias = tuple[str, tuple[int, str]]  # its word in events, its Extended DNS Error
UNREACHABLE: Final[Trouble] = ("network", (message.NETWORK_ERROR, "no upstream server can be reached"))
UNUSABLE: Final[Trouble] = ("upstream", (message.NO_REACHABLE_AUTHORITY, "no usable answer from upstream"))
TIMED_OUT: Final[Trouble] = (
    "timeout",
    (message.NO_REACHABLE_AUTHORITY, "no upstream server answered in time"),
)
STOPPED: Final[Trouble] = ("stopping", (message.NOT_READY, "the proxy is being stopped"))
LIMIT: Final = "limit"
STRANGER: Final = (message.PROHIBITED, "unknown client")
CROWDED: Final = (message.OTHER, "too many queries in flight")
NOT_APPLIED: Final = (message.NOT_READY, "the firewall did not take the addresses")


class Events(Protocol):
    """What takes events: a ring, or whatever passes them on."""

    def append(self, event: tuple[Any, ...], /) -> None:
        """Take one event; never blocks, never raises."""


class Each:
    """A sink for several actions at once."""

    def send(self, wire: bytes, peer: Iterable[Action]) -> None:
        """Do them."""
        del wire
        for sink, each, to in peer:
            sink.send(each, to)


EACH: Final = Each()
LATER: Final[Action] = (EACH, b"", ())  # nothing now


@dataclass(slots=True, eq=False)
class Client:
    """One client address on one transport: its view of the policy and what it has in flight."""

    source: bytes
    stream: bool
    view: View | None  # None: a stranger
    era: object  # the time between two swaps in which this view is the right one
    flying: int = 0


@dataclass(slots=True, eq=False)
class Pending:
    """One query that was sent on, or follows one that was, and is not yet answered."""

    wire: bytes
    end: int  # of the question, in wire
    question: bytes  # wire[12:end]
    name: bytes
    owner: bytes  # on whose account addresses are learned: the name, or the name that it is an alias of
    verdict: Verdict
    client: Client
    sink: Sink
    peer: Any
    servers: tuple[Server, ...]
    stream: bool  # asked over TCP
    started: float
    retry_at: float
    sent: list[tuple[Channel, bytes]]
    attempts: int = 0
    resends: int = 0
    ahead: int = CHANNEL  # queries before it on a stream that closed
    spare: bytes | None = None  # an answer to fall back on
    done: bool = False
    followers: list[Pending] | None = None
    others: list[Pending] | None = None  # leaders of the same name, known to the first of them


class Exchange:
    """The life of every query, as decisions. Times are seconds on one monotonic clock."""

    def __init__(
        self,
        *,
        endpoints: EndpointTable,
        policy: Policy,
        routes: Routes,
        plan: Plan,
        waiting: Sink,
        timeout: float = 4.0,
        attempt: float = 1.0,
        hold: float = 0.1,
        deny: str = "nxdomain",
        deny_ttl: int = 5,
        strip: bool = False,
        queries: int = 16_384,
        queries_per_client: int = 8_192,
        alias_ttl: int = 3_600,
        events: Events | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`hold` is how long an answer may wait for the kernel; `alias_ttl` the least life of an alias.

        `upstream_seconds` counts usable answers from upstream by the time since the query came.
        """
        self._endpoints = endpoints
        self._policy = policy
        self._routes = routes
        self._plan = plan
        self._waiting = waiting
        self._timeout = timeout
        self._attempt = attempt
        self._hold = hold
        self._deny_code = deny
        self._deny_ttl = deny_ttl
        self._strip = strip
        self._limit = queries
        self._client_limit = queries_per_client
        self._alias_ttl = alias_ttl
        self._events = events
        self._entropy = entropy
        self._idents: list[bytes] = []
        self._clients: tuple[dict[bytes, Client], dict[bytes, Client]] = ({}, {})
        self._aliases: dict[tuple[str, bytes], tuple[float, bytes]] = {}
        self._era = object()
        self._asked: dict[bytes, Pending] = {}  # name -> the first leader
        self._first: deque[Pending] = deque()
        self._again: list[tuple[float, int, Pending]] = []
        self._serial = count()
        self.flying = 0
        self.counts = dict.fromkeys(COUNTS, 0)
        self.upstream_seconds = Histogram(SECONDS)

    # -- what changes while running ---------------------------------------------------------------------

    def set_policy(self, policy: Policy, endpoints: EndpointTable) -> None:
        """Swap policy and endpoints; from here on nothing is judged by the old ones."""
        self._policy = policy
        self._endpoints = endpoints
        self._era = object()
        self._clients = ({}, {})

    def set_denials(self, deny: str, deny_ttl: int, *, strip: bool) -> None:
        """Deny otherwise from here on, and strip answers or do not."""
        self._deny_code = deny
        self._deny_ttl = deny_ttl
        self._strip = strip

    def set_routes(self, routes: Routes) -> None:
        """Swap the upstream servers; queries in flight keep theirs, and nobody joins them any more."""
        self._routes = routes
        self._asked = {}

    def set_events(self, events: Events | None) -> None:
        """Record events from here on into something with `append`, or none at all."""
        self._events = events

    def aliases(self) -> list[tuple[str, bytes, float, bytes]]:
        """Return the CNAME targets that may be asked: endpoint, target, expiry, the name they stand for."""
        return [(*key, *value) for key, value in self._aliases.items()]

    def restore_aliases(self, aliases: Iterable[tuple[str, bytes, float, bytes]]) -> None:
        """Take over aliases that outlived us; what was learned since then is newer and stays."""
        for endpoint, target, expiry, owner in aliases:
            if (endpoint, target) not in self._aliases:
                self._remember(endpoint, owner, (target,), expiry)

    # -- a query comes in -------------------------------------------------------------------------------

    def query(
        self,
        wire: bytes,
        source: bytes,
        sink: Sink,
        peer: Any,  # noqa: ANN401 - the sink alone knows its peers
        now: float,
        *,
        stream: bool,
    ) -> Action | None:
        """Judge one message from the client at `source` (packed address) and say what to do with it."""
        counts = self.counts
        counts["queries"] += 1
        refusal = message.triage(wire)
        if refusal is not None:
            counts["malformed"] += 1
            return None if refusal < 0 else (sink, message.reply(wire, None, refusal), peer)
        try:
            name, end = message.read_query(wire)
        except FormError:
            counts["malformed"] += 1
            return sink, message.reply(wire, None, FORMERR), peer
        client = self._clients[stream].get(source) or self._meet(source, stream=stream)
        view = client.view
        if view is None:
            counts["strangers"] += 1
            self._record(client, name, wire, end, None, now)
            return sink, self._denial(client, wire, end), peer
        verdict = view.verdicts.get(name) or view.verdict(name)
        owner = name
        if not verdict.allowed and self._aliases:
            owner, verdict = self._by_alias(view, name, verdict, now)
        if self._events is not None:
            self._record(client, name, wire, end, verdict, now)
        if not verdict.allowed:
            counts["denied"] += 1
            return sink, self._denial(client, wire, end), peer
        pending = Pending(
            wire, end, wire[HEADER:end], name, owner, verdict, client, sink, peer,
            self._routes.of(name, now), stream, now, now + self._attempt, [],
        )  # fmt: skip
        if self.flying >= self._limit or client.flying >= self._client_limit:
            return self._turned_away(pending, now)
        client.flying += 1
        self.flying += 1
        first = pending if stream else self._asked.setdefault(name, pending)
        if first is not pending and self._joined(pending, first):
            counts["joined"] += 1
            return LATER
        counts["forwarded"] += 1
        self._first.append(pending)
        return self._send(pending, now)

    def _turned_away(self, pending: Pending, now: float) -> Action:
        self.counts["limited"] += 1
        answer = message.reply(pending.wire, pending.end, SERVFAIL, ede=CROWDED)
        self._report(pending, answer, NOTHING, "", LIMIT, now, 0.0)
        return pending.sink, answer, pending.peer

    def _meet(self, source: bytes, *, stream: bool) -> Client:
        clients = self._clients[stream]
        if len(clients) >= CLIENTS:
            clients.clear()
        endpoint = self._endpoints.find(source)
        view = self._policy.view(endpoint, "TCP" if stream else "UDP") if endpoint is not None else None
        client = clients[source] = Client(source, stream, view, self._era)
        return client

    def _by_alias(self, view: View, name: bytes, verdict: Verdict, now: float) -> tuple[bytes, Verdict]:
        """Judge a CNAME target of a permitted answer on that name's account, while the answer lives."""
        expiry, owner = self._aliases.get((view.endpoint.key, name), (now, name))
        theirs = view.verdict(owner)
        return (owner, theirs) if now < expiry and theirs.cnames else (name, verdict)

    def _denial(self, client: Client, wire: bytes, end: int) -> bytes:
        if client.view is None:
            return message.reply(wire, end, REFUSED, ede=STRANGER)
        endpoint = client.view.endpoint
        code = DENIALS[endpoint.deny or self._deny_code]
        ede = (message.BLOCKED, f"not allowed for {endpoint.key}")
        return message.reply(wire, end, code, soa_ttl=self._deny_ttl if code == NXDOMAIN else None, ede=ede)

    # -- on its way -------------------------------------------------------------------------------------

    def _joined(self, pending: Pending, first: Pending) -> bool:
        """Have a query follow one of the same bytes; else let it lead beside the others of its name.

        One that would be one too many of them is asked over TCP.
        """
        body, question = pending.wire[2:], pending.wire[pending.end - 4 : pending.end]
        variants = 0
        leaders = [first, *(first.others or ())]
        for leader in leaders:
            if leader.wire[2:] == body:
                leader.followers = leader.followers or []
                leader.followers.append(pending)
                return True
            variants += leader.wire[leader.end - 4 : leader.end] == question
        if variants < VARIANTS and len(leaders) < LEADERS:
            first.others = [*leaders[1:], pending]
        else:
            pending.stream = True
        return False

    def _leave(self, pending: Pending) -> None:
        """Let nobody join a query any more that led beside others."""
        first = self._asked.get(pending.name)
        if first is None or not first.others:
            return
        if first is pending:
            heir = self._asked[pending.name] = first.others.pop(0)
            heir.others = first.others
        elif pending in first.others:
            first.others.remove(pending)

    def _send(self, pending: Pending, now: float) -> Action:
        """Send a query to the next server that has a channel, under an ID unused on that channel."""
        servers = pending.servers
        for _ in servers:
            server = servers[pending.attempts % len(servers)]
            pending.attempts += 1
            channel = server.channel(stream=pending.stream)
            if channel is not None and len(channel.pending) < CHANNEL:
                ident = (self._idents or self._drawn()).pop()
                while ident in channel.pending:
                    ident = (self._idents or self._drawn()).pop()
                channel.pending[ident] = pending
                pending.sent.append((channel, ident))
                return channel.sink, ident + pending.wire[2:], None
        return self._give_up(pending, UNREACHABLE, now)

    def _drawn(self) -> list[bytes]:
        """Draw IDs in advance; a system call for each would cost more than all else here."""
        noise = self._entropy(4096)
        self._idents = [noise[at : at + 2] for at in range(0, 4096, 2)]
        return self._idents

    def _settle(self, pending: Pending) -> None:
        """Take a query and its followers out of every table; nothing that arrives later can find them."""
        for channel, ident in pending.sent:
            if channel.pending.get(ident) is pending:
                del channel.pending[ident]
        if self._asked.get(pending.name) is pending and not pending.others:
            del self._asked[pending.name]
        elif not pending.stream:
            self._leave(pending)
        pending.done = True
        pending.client.flying -= 1
        self.flying -= 1
        if pending.followers:
            for each in pending.followers:
                self._settle(each)

    def _give_up(self, pending: Pending, trouble: Trouble, now: float) -> Action:
        """End a query, and who follows it, for trouble that is not the client's."""
        self._settle(pending)
        if not pending.followers:
            return self._fail(pending, trouble, now)
        for each in pending.followers:
            each.spare = pending.spare
        return EACH, b"", [self._fail(each, trouble, now) for each in (pending, *pending.followers)]

    def _fail(self, pending: Pending, trouble: Trouble, now: float) -> Action:
        """Return the best answer so far, or SERVFAIL."""
        self.counts["failures"] += 1
        cause, ede = trouble
        answer = self._last_resort(pending) or message.reply(pending.wire, pending.end, SERVFAIL, ede=ede)
        self._report(pending, answer, NOTHING, "", cause, now, 0.0)
        return pending.sink, self._fitted(pending, answer), pending.peer

    def _last_resort(self, pending: Pending) -> bytes | None:
        """Return an answer that is better than none, as it may go out."""
        if pending.spare is None or not self._strip:
            return pending.spare
        try:
            return self._stripped(pending, pending.spare)
        except FormError:
            return None

    # -- an answer comes back ---------------------------------------------------------------------------

    def answer(self, channel: Channel, wire: bytes, now: float) -> Action | None:
        """Judge one datagram or frame from upstream."""
        ident = wire[:2]
        pending: Pending | None = channel.pending.get(ident)
        if pending is None or not (_fits(wire, pending) or _is_bare(wire)):
            self.counts["strays"] += 1
            return None
        channel.answers += 1
        if channel.server.failures:
            channel.server.worked()
        code = wire[3] & 15
        if code in ASK_ANOTHER:
            if wire[4:6] != ONE or len(wire) < pending.end:
                wire = message.reply(pending.wire, pending.end, code)
            if pending.attempts < len(pending.servers):
                pending.spare = wire
                del channel.pending[ident]
                return self._elsewhere(pending, now)
        try:
            found = message.read_answer(wire, pending.end, pending.name) if code == NOERROR else NOTHING
            action = self._release(pending, wire, found, channel, now)
        except FormError:
            if channel.stream or not wire[2] & TC:
                self.counts["broken"] += 1
                del channel.pending[ident]
                return self._elsewhere(pending, now)
            wire, found = message.truncated(wire, pending.end, pending.wire), NOTHING  # cut inside a record
            action = self._release(pending, wire, found, channel, now)
        self._settle(pending)
        self.counts["answers"] += 1
        self.upstream_seconds.observe(now - pending.started)
        if pending.followers:
            self.counts["answers"] += len(pending.followers)
            rest = [self._release_too(each, wire, found, channel, now) for each in pending.followers]
            return EACH, b"", [action, *rest]
        return action

    def _elsewhere(self, pending: Pending, now: float) -> Action:
        """Ask a server that was not asked yet, since this one has no usable answer, or end the query."""
        if pending.attempts < len(pending.servers):
            self.counts["retries"] += 1
            return self._send(pending, now)
        return self._give_up(pending, UNUSABLE, now)

    def _release(self, pending: Pending, wire: bytes, found: Found, channel: Channel, now: float) -> Action:
        """Let an answer go to its client, or to the waiting room while the kernel lacks an element.

        FormError, and nothing done, if it has to be stripped and does not hold together.
        """
        if pending.client.era is not self._era and not self._still_allowed(pending):
            denial = self._denial(pending.client, pending.wire, pending.end)
            self._report(pending, denial, NOTHING, str(channel.server), "policy", now, 0.0)
            return pending.sink, denial, pending.peer
        if self._strip:
            wire = self._stripped(pending, wire)
        elements = self._learn(pending, found, now) if found[0] else ()
        answer = self._fitted(pending, wire)
        if elements:
            return self._waiting, answer, self._held(pending, elements, wire, found, channel, now)
        if self._events is not None:
            self._report(pending, answer, found, str(channel.server), "", now, 0.0)
        return pending.sink, answer, pending.peer

    def _release_too(
        self, pending: Pending, wire: bytes, found: Found, channel: Channel, now: float
    ) -> Action:
        """Let a follower have the answer of its leader."""
        try:
            return self._release(pending, wire, found, channel, now)
        except FormError:
            return self._fail(pending, UNUSABLE, now)

    def _still_allowed(self, pending: Pending) -> bool:
        """Judge a query again by the policy that has come into force meanwhile."""
        before = pending.client
        source, stream = before.source, before.stream
        client = pending.client = self._clients[stream].get(source) or self._meet(source, stream=stream)
        if not pending.done:
            before.flying -= 1
            client.flying += 1
        if client.view is None:
            return False
        pending.verdict = client.view.verdict(pending.owner)
        return pending.verdict.allowed

    def _learn(self, pending: Pending, found: Found, now: float) -> tuple[Element, ...]:
        """Give the addresses to the plan; return the elements that the kernel does not have yet."""
        addresses, ttl, cnames = found
        view, verdict = pending.client.view, pending.verdict
        assert view is not None
        if verdict.cnames and cnames:
            self._remember(view.endpoint.key, pending.owner, cnames, now + max(ttl or 0, self._alias_ttl))
        return self._plan.observe(view, verdict.grants, pending.owner, addresses, ttl or 0, now, cnames)

    def _remember(self, endpoint: str, owner: bytes, cnames: tuple[bytes, ...], expiry: float) -> None:
        for target in cnames:
            self._aliases.pop((endpoint, target), None)
            if len(self._aliases) >= ALIASES:
                del self._aliases[next(iter(self._aliases))]
            self._aliases[endpoint, target] = (expiry, owner)

    def _stripped(self, pending: Pending, wire: bytes) -> bytes:
        """Return an answer without the addresses that may not be learned, wherever in it they stand."""
        refused = []

        def keep(address: bytes) -> bool:
            permitted = self._plan.permits(pending.verdict.grants, address)
            if not permitted:
                refused.append(address)
            return permitted

        stripped = message.strip(wire, pending.end, keep)
        if refused or stripped[6:12] != wire[6:12]:  # an SVCB record that nobody can read is left out as well
            return stripped
        return wire  # what needs no change goes out byte for byte

    def _fitted(self, pending: Pending, wire: bytes) -> bytes:
        """Return an answer under the client's ID, in the size that it announced (RFC 6891 section 6.2.3)."""
        answer = pending.wire[:2] + wire[2:]
        if len(answer) <= message.SMALLEST or pending.client.stream:
            return answer
        edns = message.edns(pending.wire, pending.end)
        if len(answer) <= (edns[0] if edns else message.SMALLEST):
            return answer
        return message.truncated(answer, pending.end, pending.wire)

    def _held(
        self,
        pending: Pending,
        elements: tuple[Element, ...],
        wire: bytes,
        found: Found,
        channel: Channel,
        now: float,
    ) -> Hold:
        self.counts["held"] += 1
        view = pending.client.view
        assert view is not None
        refusal = message.reply(pending.wire, pending.end, SERVFAIL, ede=NOT_APPLIED)
        report = partial(self._ended, pending, found, str(channel.server), now)
        judge = partial(self._judged_again, pending, wire, found, refusal, now)
        return Hold(
            elements, pending.sink, pending.peer, now, now + self._hold, refusal, report,
            owner=view.endpoint.key, judge=judge,
        )  # fmt: skip

    def _judged_again(
        self, pending: Pending, wire: bytes, found: Found, refusal: bytes, now: float
    ) -> bytes | tuple[Element, ...]:
        """Judge a held answer by the policy that is in force now: the reply instead of it, or what it opens.

        What would have to be stripped further is refused: the client may ask again.
        """
        if not self._still_allowed(pending):
            return self._denial(pending.client, pending.wire, pending.end)
        if self._strip and self._stripped(pending, wire) != wire:
            return refusal
        return self._learn(pending, found, now)

    def _ended(
        self, pending: Pending, found: Found, server: str, since: float, wire: bytes, cause: str, held: float
    ) -> None:
        """Record what a held answer came to; `cause` is empty when the kernel acknowledged in time."""
        self._report(pending, wire, found, server, cause, since, held)

    # -- time and trouble -------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Action]:
        """End attempts and queries whose time is over."""
        due = []
        while self._first and self._first[0].retry_at <= now:
            due.append(self._first.popleft())
        while self._again and self._again[0][0] <= now:
            due.append(heapq.heappop(self._again)[2])
        self._clear_away()
        return [self._overdue(pending, now) for pending in due if not pending.done]

    def _clear_away(self) -> None:
        """Forget the queries that are done where they are the most."""
        most = SLACK + 2 * self.flying
        if len(self._first) > most:
            self._first = deque(pending for pending in self._first if not pending.done)
        if len(self._again) > most:
            self._again = [entry for entry in self._again if not entry[2].done]
            heapq.heapify(self._again)

    def _overdue(self, pending: Pending, now: float) -> Action:
        pending.sent[-1][0].server.failed(pending.retry_at - self._attempt, now)
        if now >= pending.started + self._timeout:
            return self._timed_out(pending, now)
        self.counts["retries"] += 1
        self._schedule(pending, now)
        return self._send(pending, now)

    def _schedule(self, pending: Pending, now: float) -> None:
        pending.retry_at = min(now + self._attempt, pending.started + self._timeout)
        heapq.heappush(self._again, (pending.retry_at, next(self._serial), pending))

    def _timed_out(self, pending: Pending, now: float) -> Action:
        """End a query, and those of its followers whose time is over too; the next of them leads."""
        followers, over = pending.followers or [], now - self._timeout
        due = [each for each in followers if each.started <= over]  # in no order: heirs of others came late
        heirs = [each for each in followers if each.started > over]
        pending.followers = due
        self.counts["timeouts"] += 1 + len(due)
        action = self._give_up(pending, TIMED_OUT, now)
        return (EACH, b"", [action, *(self._start(each, now) for each in heirs)]) if heirs else action

    def _start(self, pending: Pending, now: float) -> Action:
        """Send a query on whose leader is gone, unless another that it may follow is there by now."""
        pending.servers = self._routes.of(pending.name, now)
        first = self._asked.setdefault(pending.name, pending)
        if first is not pending and self._joined(pending, first):
            return LATER
        self._schedule(pending, now)
        return self._send(pending, now)

    def lost(self, channel: Channel, now: float) -> list[Action]:
        """Send elsewhere what a socket or stream carried that failed."""
        orphans: list[Pending] = list(dict.fromkeys(channel.pending.values()))
        channel.pending.clear()
        served = channel.stream and channel.answers > 0  # it closed as servers do after a while or a number
        channel.answers = 0
        if orphans and not served:
            channel.server.failed(now, now)
        actions = (
            self._resent(pending, ahead, now) if served else self._orphaned(pending, now)
            for ahead, pending in enumerate(orphans)
        )
        return [action for action in actions if action is not None]

    def _resent(self, pending: Pending, ahead: int, now: float) -> Action | None:
        """Ask the same server again if `ahead`, the queries before this one, shows that its turn comes.

        A server may close after every few answers, and the last of many queries needs as many streams. It
        moves up with each of them, or has RESENDS in all without that: so there is an end to it.
        """
        pending.resends += ahead >= pending.ahead
        pending.ahead = ahead
        if pending.resends > RESENDS:
            return self._orphaned(pending, now)
        pending.attempts -= 1
        return self._send(pending, now)

    def _orphaned(self, pending: Pending, now: float) -> Action | None:
        if pending.attempts < len(pending.servers):
            self.counts["retries"] += 1
            return self._send(pending, now)
        if any(channel.pending.get(ident) is pending for channel, ident in pending.sent):
            return None  # an earlier attempt may still be answered
        return self._give_up(pending, UNREACHABLE, now)

    def stop(self, now: float) -> list[Action]:
        """End all that is in flight with the best answer so far, or SERVFAIL."""
        leaders = [*self._first, *(entry[2] for entry in self._again)]
        return [self._give_up(pending, STOPPED, now) for pending in leaders if not pending.done]

    # -- events -----------------------------------------------------------------------------------------

    def _record(
        self, client: Client, name: bytes, wire: bytes, end: int, verdict: Verdict | None, now: float
    ) -> None:
        if self._events is None:
            return
        endpoint = client.view.endpoint.key if client.view else ""
        qtype = message.qtype(wire, end)
        self._events.append(("request", now, endpoint, client.source, client.stream, name, qtype, verdict))

    def _report(
        self, pending: Pending, answer: bytes, found: Found, server: str, cause: str, now: float, held: float
    ) -> None:
        if self._events is None:
            return
        client = pending.client
        endpoint = client.view.endpoint.key if client.view else ""
        permits, grants = self._plan.permits, pending.verdict.grants
        private = tuple(address for address in found[0] if not permits(grants, address))
        self._events.append(
            ("response", now + held, endpoint, client.source, client.stream, pending.name,
             message.qtype(pending.wire, pending.end), answer[3] & 15, found[0], found[2], found[1],
             now - pending.started, held, server, cause, private)
        )  # fmt: skip


def _fits(wire: bytes, pending: Pending) -> bool:
    """Tell whether bytes are a response to the question that was asked, case aside (RFC 5452 section 9.1)."""
    asked, end = pending.question, pending.end
    if len(wire) < end or not wire[2] & 0x80 or wire[4:6] != ONE:
        return False
    if wire.startswith(asked, HEADER):
        return True
    answered = wire[HEADER:end]
    return asked.lower() == answered.lower() and asked[-4:] == answered[-4:]


def _is_bare(wire: bytes) -> bool:
    """Tell whether bytes are a response without a question, as servers send that could not read ours."""
    if len(wire) < HEADER or not wire[2] & 0x80 or wire[3] & 15 not in ASK_ANOTHER:
        return False
    return wire[4:6] == NONE or len(wire) == HEADER
