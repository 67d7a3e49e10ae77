"""Every query in flight: query bytes in, denial or forward out; answer bytes in, release or hold out.

The exchange decides and remembers; it owns no socket and no clock. Whoever feeds it gets back an
Action, "give these bytes to that sink", or None where the right thing is silence.

    client -> query()   not a query: silence; malformed: FORMERR; unknown client: REFUSED
                        policy says no: the denial, at once; nothing leaves this host
                        policy says yes: a Pending, sent on with an ID of our own
    server -> answer()  other socket, ID or question: dropped, the wait goes on
                        SERVFAIL or REFUSED: the next server is asked; the last such answer is passed on
                        addresses: given to the plan; elements not yet applied: into the waiting room
                        else: to the client, byte for byte but for the ID (and TC, where its size is smaller)
    timer  -> expire()  an attempt is over: the next server; the budget is over: SERVFAIL
    socket -> lost()    refused or closed: the next server at once

A Pending is known by every (channel, ID) it was sent under, so a late answer to an earlier attempt still
counts. First attempts all last equally long and so fall due in the order they were made: a queue. Later
ones are few: a heap. A Pending that is done is left in either and skipped when it comes up.

When the policy is swapped, what is in flight is judged again when its answer comes: an answer to a name
that has lost its permission is replaced by the denial, and teaches nothing.
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dnsproxy import message
from dnsproxy.errors import FormError
from dnsproxy.message import FORMERR, NOERROR, NXDOMAIN, REFUSED, SERVFAIL
from dnsproxy.namemanager.plan import Hold
from dnsproxy.servers import in_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.namemanager.elements import Element
    from dnsproxy.namemanager.plan import Plan
    from dnsproxy.rules.policy import Policy, Verdict, View
    from dnsproxy.servers import Action, Channel, Routes, Server, Sink

ASK_ANOTHER: Final = frozenset((SERVFAIL, REFUSED))
RESENDS: Final = 3  # a stream that answered and then closed may be reopened for a query this often
CHANNEL: Final = 32_768  # queries on one channel: half of all IDs, so that an unused one is soon found
CLIENTS: Final = 65_536  # remembered client addresses, per transport
ALIASES: Final = 10_000  # remembered CNAME targets
DENIALS: Final = {"nxdomain": NXDOMAIN, "refused": REFUSED}
ONE: Final = b"\x00\x01"
COUNTS: Final = (
    "queries", "malformed", "strangers", "denied", "forwarded", "limited",
    "answers", "strays", "broken", "retries", "timeouts", "failures", "held",
)  # fmt: skip
SMALLEST: Final = 512  # what every client takes over UDP, RFC 1035 section 2.3.4

Found: TypeAlias = tuple[tuple[bytes, ...], int | None, tuple[bytes, ...]]  # addresses, TTL, CNAME targets
NOTHING: Final[Found] = ((), None, ())

Trouble: TypeAlias = tuple[str, tuple[int, str]]  # its word in events, its Extended DNS Error
UNREACHABLE: Final[Trouble] = ("network", (message.NETWORK_ERROR, "no upstream server can be reached"))
UNUSABLE: Final[Trouble] = ("upstream", (message.NO_REACHABLE_AUTHORITY, "no usable answer from upstream"))
TIMED_OUT: Final[Trouble] = (
    "timeout",
    (message.NO_REACHABLE_AUTHORITY, "no upstream server answered in time"),
)
STRANGER: Final = (message.PROHIBITED, "unknown client")
CROWDED: Final = (message.OTHER, "too many queries in flight")
NOT_APPLIED: Final = (message.NOT_READY, "the firewall did not take the addresses")


@dataclass(slots=True, eq=False)
class Client:
    """One client address on one transport: its view of the policy and what it has in flight."""

    source: bytes
    stream: bool
    view: View | None  # None: a stranger
    flying: int = 0


@dataclass(slots=True, eq=False)
class Pending:
    """One query that was sent on and not yet answered."""

    wire: bytes
    end: int  # of the question, in wire
    name: bytes
    owner: bytes  # on whose account addresses are learned: the name, or the name that it is an alias of
    verdict: Verdict
    policy: Policy
    client: Client
    sink: Sink
    peer: Any
    servers: tuple[Server, ...]
    started: float
    retry_at: float
    deadline: float
    attempts: int = 0
    resends: int = 0
    sent: list[tuple[Channel, bytes]] = field(default_factory=list)
    spare: bytes | None = None  # an answer to fall back on
    done: bool = False


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
        events: deque[tuple[Any, ...]] | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`hold` is how long an answer may wait for the kernel; `alias_ttl` the least life of an alias."""
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
        self._first: deque[Pending] = deque()
        self._again: list[tuple[float, int, Pending]] = []
        self._serial = count()
        self.flying = 0
        self.counts = dict.fromkeys(COUNTS, 0)

    # -- what changes while running ---------------------------------------------------------------------

    def set_policy(self, policy: Policy, endpoints: EndpointTable) -> None:
        """Swap policy and endpoints; from here on nothing is judged by the old ones."""
        self._policy = policy
        self._endpoints = endpoints
        self._clients = ({}, {})
        self._aliases.clear()

    def set_routes(self, routes: Routes) -> None:
        """Swap the upstream servers; queries in flight keep theirs."""
        self._routes = routes

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
        if self.flying >= self._limit or client.flying >= self._client_limit:
            counts["limited"] += 1
            return sink, message.reply(wire, end, SERVFAIL, ede=CROWDED), peer
        counts["forwarded"] += 1
        servers = in_order(self._routes.of(name), now)
        pending = Pending(
            wire, end, name, owner, verdict, self._policy, client, sink, peer, servers,
            now, now + self._attempt, now + self._timeout,
        )  # fmt: skip
        client.flying += 1
        self.flying += 1
        self._first.append(pending)
        return self._send(pending, now)

    def _meet(self, source: bytes, *, stream: bool) -> Client:
        clients = self._clients[stream]
        if len(clients) >= CLIENTS:
            clients.clear()
        endpoint = self._endpoints.find(source)
        view = self._policy.view(endpoint, "TCP" if stream else "UDP") if endpoint is not None else None
        client = clients[source] = Client(source, stream, view)
        return client

    def _by_alias(self, view: View, name: bytes, verdict: Verdict, now: float) -> tuple[bytes, Verdict]:
        """Judge a CNAME target of a permitted answer on that name's account, while the answer lives."""
        expiry, owner = self._aliases.get((view.endpoint.key, name), (now, name))
        return (owner, view.verdict(owner)) if now < expiry else (name, verdict)

    def _denial(self, client: Client, wire: bytes, end: int) -> bytes:
        if client.view is None:
            return message.reply(wire, end, REFUSED, ede=STRANGER)
        endpoint = client.view.endpoint
        code = DENIALS[endpoint.deny or self._deny_code]
        ede = (message.BLOCKED, f"not allowed for {endpoint.key}")
        return message.reply(wire, end, code, soa_ttl=self._deny_ttl if code == NXDOMAIN else None, ede=ede)

    # -- on its way -------------------------------------------------------------------------------------

    def _send(self, pending: Pending, now: float) -> Action:
        """Send a query to the next server that has a channel, under an ID unused on that channel."""
        servers = pending.servers
        for _ in servers:
            server = servers[pending.attempts % len(servers)]
            pending.attempts += 1
            channel = server.channel(stream=pending.client.stream)
            if channel is not None and len(channel.pending) < CHANNEL:
                ident = self._ident(channel)
                channel.pending[ident] = pending
                pending.sent.append((channel, ident))
                return channel.sink, ident + pending.wire[2:], None
        return self._give_up(pending, UNREACHABLE, now)

    def _ident(self, channel: Channel) -> bytes:
        while True:
            if not self._idents:
                noise = self._entropy(4096)
                self._idents = [noise[at : at + 2] for at in range(0, 4096, 2)]
            ident = self._idents.pop()
            if ident not in channel.pending:
                return ident

    def _settle(self, pending: Pending) -> None:
        """Take a query out of every table; nothing that arrives later can find it."""
        for channel, ident in pending.sent:
            if channel.pending.get(ident) is pending:
                del channel.pending[ident]
        pending.done = True
        pending.client.flying -= 1
        self.flying -= 1

    def _give_up(self, pending: Pending, trouble: Trouble, now: float) -> Action:
        """End a query for trouble that is not the client's: with the best answer so far, or SERVFAIL."""
        self._settle(pending)
        self.counts["failures"] += 1
        cause, ede = trouble
        answer = pending.spare or message.reply(pending.wire, pending.end, SERVFAIL, ede=ede)
        self._report(pending, answer, NOTHING, "", cause, now, 0.0)
        return pending.sink, self._fitted(pending, answer), pending.peer

    # -- an answer comes back ---------------------------------------------------------------------------

    def answer(self, channel: Channel, wire: bytes, now: float) -> Action | None:
        """Judge one datagram or frame from upstream."""
        pending: Pending | None = channel.pending.get(wire[:2])
        if pending is None or not _fits(wire, pending):
            self.counts["strays"] += 1
            return None
        del channel.pending[wire[:2]]
        channel.answers += 1
        if channel.server.failures:
            channel.server.worked()
        code = wire[3] & 15
        if code in ASK_ANOTHER and pending.attempts < len(pending.servers):
            pending.spare = wire
            return self._elsewhere(pending, now)
        try:
            found = message.read_answer(wire, pending.end, pending.name) if code == NOERROR else NOTHING
            if self._strip and code == NOERROR:
                wire = self._stripped(pending, wire)
        except FormError:
            self.counts["broken"] += 1
            return self._elsewhere(pending, now)
        self._settle(pending)
        self.counts["answers"] += 1
        return self._release(pending, wire, found, channel, now)

    def _elsewhere(self, pending: Pending, now: float) -> Action:
        """Ask a server that was not asked yet, since this one has no usable answer, or end the query."""
        if pending.attempts < len(pending.servers):
            self.counts["retries"] += 1
            return self._send(pending, now)
        return self._give_up(pending, UNUSABLE, now)

    def _release(self, pending: Pending, wire: bytes, found: Found, channel: Channel, now: float) -> Action:
        """Let an answer go to its client, or to the waiting room while the kernel lacks an element."""
        if pending.policy is not self._policy and not self._still_allowed(pending):
            denial = self._denial(pending.client, pending.wire, pending.end)
            self._report(pending, denial, NOTHING, str(channel.server), "policy", now, 0.0)
            return pending.sink, denial, pending.peer
        elements = self._learn(pending, found, now) if found[0] else ()
        answer = self._fitted(pending, wire)
        if elements:
            return self._waiting, answer, self._held(pending, elements, found, channel, now)
        if self._events is not None:
            self._report(pending, answer, found, str(channel.server), "", now, 0.0)
        return pending.sink, answer, pending.peer

    def _still_allowed(self, pending: Pending) -> bool:
        """Judge a query again by the policy that has come into force meanwhile."""
        source, stream = pending.client.source, pending.client.stream
        client = pending.client = self._clients[stream].get(source) or self._meet(source, stream=stream)
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
        if len(answer) <= SMALLEST or pending.client.stream:
            return answer
        edns = message.edns(pending.wire, pending.end)
        if len(answer) <= (edns[0] if edns else SMALLEST):
            return answer
        return message.truncated(answer, pending.end, pending.wire)

    def _held(
        self,
        pending: Pending,
        elements: tuple[Element, ...],
        found: Found,
        channel: Channel,
        now: float,
    ) -> Hold:
        self.counts["held"] += 1
        refusal = message.reply(pending.wire, pending.end, SERVFAIL, ede=NOT_APPLIED)
        report = partial(self._ended, pending, found, str(channel.server), now)
        return Hold(elements, pending.sink, pending.peer, now, now + self._hold, refusal, report)

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
        return [self._overdue(pending, now) for pending in due if not pending.done]

    def _overdue(self, pending: Pending, now: float) -> Action:
        pending.sent[-1][0].server.failed(pending.retry_at - self._attempt, now)
        if now >= pending.deadline:
            self.counts["timeouts"] += 1
            return self._give_up(pending, TIMED_OUT, now)
        self.counts["retries"] += 1
        pending.retry_at = min(now + self._attempt, pending.deadline)
        heapq.heappush(self._again, (pending.retry_at, next(self._serial), pending))
        return self._send(pending, now)

    def lost(self, channel: Channel, now: float) -> list[Action]:
        """Send elsewhere what a socket or stream carried that failed."""
        orphans: list[Pending] = list(channel.pending.values())
        channel.pending.clear()
        served = channel.stream and channel.answers > 0  # it closed as servers do after a while or a number
        channel.answers = 0
        if orphans and not served:
            channel.server.failed(now, now)
        actions = (self._orphaned(pending, now, served=served) for pending in orphans)
        return [action for action in actions if action is not None]

    def _orphaned(self, pending: Pending, now: float, *, served: bool) -> Action | None:
        if served and pending.resends < RESENDS:
            pending.resends += 1
            pending.attempts -= 1
            return self._send(pending, now)
        if pending.attempts < len(pending.servers):
            self.counts["retries"] += 1
            return self._send(pending, now)
        if any(channel.pending.get(ident) is pending for channel, ident in pending.sent):
            return None  # an earlier attempt may still be answered
        return self._give_up(pending, UNREACHABLE, now)

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
    end = pending.end
    if len(wire) < end or not wire[2] & 0x80 or wire[4:6] != ONE:
        return False
    asked, answered = pending.wire[12:end], wire[12:end]
    return asked == answered or (asked.lower() == answered.lower() and asked[-4:] == answered[-4:])
