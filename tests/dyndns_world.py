"""What stands in for the world of DynDNS: a provider, an address that changes, a disk, on virtual time."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from fakes import VirtualLoop, run_virtual

from dnsproxy import addresses
from dnsproxy.dyndns import documents
from dnsproxy.dyndns.outcomes import Code, Found, Known, NotManaged, Reply, Unavailable, Why
from dnsproxy.dyndns.plan import RULES, Kind
from dnsproxy.dyndns.sync import Sync
from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

V4, OTHER, THIRD, V6 = "93.184.216.34", "93.184.216.35", "93.184.216.36", "2a01:238:1::1"
PASSWORD = "hunter2-geheim"


def domain(name: str = "www", *, password: str = PASSWORD, **spec: object) -> documents.Domain:
    """A record `NAME.example.de` whose password is in a Secret."""
    fields = {"fqdn": f"{name}.example.de", "password": "{name: s}"} | spec
    lines = "".join(f"  {key}: {value}\n" for key, value in fields.items())
    text = (
        f"apiVersion: v1\nkind: Secret\nmetadata: {{name: s}}\nstringData: {{password: '{password}'}}\n"
        f"---\napiVersion: {documents.GROUP}/v1alpha1\nkind: Domain\n"
        f"metadata: {{name: {name}}}\nspec:\n{lines}"
    )
    (found,) = documents.load([("d.yaml", text)]).domains
    return found


def packed(text: str) -> bytes:
    return addresses.from_text(text)


@dataclass
class Home:
    """Where we are: our addresses by family, None where they cannot be found out now."""

    ipv4: str | None = V4
    ipv6: str | None = None
    why: Why = Why.FAILED
    searches: int = 0
    known: list[tuple[bytes | None, bytes | None]] = field(default_factory=list)
    stuck: set[str] = field(default_factory=set)

    async def find(self, search):
        self.searches += 1
        self.known.append((search.ipv4 and search.ipv4.known, search.ipv6 and search.ipv6.known))
        await asyncio.sleep(0.5)
        return Found(self._one(search.ipv4, self.ipv4), self._one(search.ipv6, self.ipv6))

    def _one(self, wanted, text):
        if wanted is None:
            return NotManaged()
        return Known(packed(text), ("echo",)) if text else Unavailable(self.why, "no source answered")


@dataclass
class Provider:
    """Plays STRATO. `replies` are given first, in order; without one it does what `out` says, or acts."""

    clock: object = None
    replies: list = field(default_factory=list)
    records: dict[str, tuple[str, ...]] = field(default_factory=dict)
    requests: list[tuple[float, str, str]] = field(default_factory=list)
    passwords: dict[str, str] = field(default_factory=dict)  # host -> the right one, if it is not any
    out: Code | None = None  # the trouble that it has at the moment
    deaf: set[str] = field(default_factory=set)  # hosts whose requests hang for ever
    delay: float = 0.5  # seconds until it acts
    late: float = 0.0  # seconds from then until it answers
    told: dict[str, str] = field(default_factory=dict)  # what it has accepted and said so
    unsure: set[str] = field(default_factory=set)  # hosts whose client cannot know what we hold
    useless: list[tuple[float, str]] = field(default_factory=list)  # requests for what is held, and told

    async def publish(self, request):
        host = request.hostname
        self.requests.append((self.clock(), host, request.myip))
        if request.myip == self.told.get(host) and host not in self.unsure:
            self.useless.append((self.clock(), request.myip))
        before = host in self.unsure
        self.unsure.add(host)
        if host in self.deaf:
            await asyncio.Event().wait()
        await asyncio.sleep(self.delay)
        reply = self._reply(request)
        await asyncio.sleep(self.late)
        if isinstance(reply, Exception):
            raise reply
        if RULES[reply.code].certain and not before:
            self.unsure.discard(host)
        if RULES[reply.code].kind is Kind.SUCCESS:
            self.told[host] = request.myip
            self.unsure.discard(host)
        return reply

    def _reply(self, request):
        reply = self.replies.pop(0) if self.replies else self.out
        if isinstance(reply, Code):
            reply = Reply(reply, reply.value)
        right = self.passwords.get(request.hostname)
        if right is not None and request.password.reveal().decode() != right and reply is None:
            reply = Reply(Code.BADAUTH, "badauth")
        return reply or self._act(request)

    def _act(self, request):
        wanted = tuple(request.myip.split(","))
        changed = self.records.get(request.hostname) != wanted
        self.records[request.hostname] = wanted
        code = Code.GOOD if changed else Code.NOCHG
        return Reply(code, f"{code.value} {request.myip}", stored=request.addresses)


@dataclass
class Disk:
    """A memory that outlives the process; `broken` refuses, `delay` is what a write takes."""

    rows: dict[str, bytes] = field(default_factory=dict)
    broken: bool = False
    delay: float = 0.001
    writes: Counter = field(default_factory=Counter)

    async def load(self):
        self._check()
        return dict(self.rows)

    async def remember(self, key, value):
        await asyncio.sleep(self.delay)
        self._check()
        self.writes[key] += 1
        self.rows[key] = value
        if value is None:
            del self.rows[key]

    def _check(self):
        if self.broken:
            raise DnsproxyError("disk full")


@dataclass
class World:
    """All of it, and the process that may be killed."""

    home: Home = field(default_factory=Home)
    provider: Provider = field(default_factory=Provider)
    disk: Disk | None = field(default_factory=Disk)
    wall_ahead: float = 1.7e9
    boot: str = "boot"
    keys: dict[str, object] = field(default_factory=dict)  # of places: Password or Missing
    hooks: list = field(default_factory=list)
    sync: Sync | None = None
    events: list = field(default_factory=list)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def password(self, place):
        return self.keys[place.name]

    def start(self, *domains, chance=lambda: 0.0, hook=None) -> asyncio.Task:
        self.provider.clock = self.now
        self.sync = Sync(
            self.home,
            self.provider,
            self.password,
            self.disk,
            hook=hook,
            clock=self.now,
            wall=lambda: self.now() + self.wall_ahead,
            boot=self.boot,
            chance=chance,
        )
        self.sync.events = self.events
        self.sync.update(domains)
        return asyncio.get_running_loop().create_task(self.sync.run())

    @asynccontextmanager
    async def running(self, *domains, **more) -> AsyncIterator[Sync]:
        task = self.start(*domains, **more)
        await asyncio.sleep(0)
        try:
            yield self.sync
        finally:
            await kill(task)

    def times(self, hostname: str = "www.example.de") -> list[float]:
        return [at for at, host, _ in self.provider.requests if host == hostname]

    def sent(self) -> list[str]:
        return [myip for _, _, myip in self.provider.requests]

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events]

    def status(self, hostname: str = "www.example.de"):
        return next(shown for view, shown in self.sync.views() if view.domain.hostname == hostname)


async def kill(task: asyncio.Task) -> None:
    """End a process: nothing it had not written is kept."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def minutes(count: float) -> None:
    await asyncio.sleep(60 * count)


class LongLoop(VirtualLoop):
    """Virtual time beyond half a year, where a float of seconds has no nanoseconds any more."""

    def __init__(self) -> None:
        super().__init__()
        self._clock_resolution = 1e-6


def run_long(main) -> None:
    with asyncio.Runner(loop_factory=LongLoop) as runner:
        runner.run(main)


def virtual(test):
    """Run a test that is a coroutine function on virtual time."""

    def run(**arguments):
        run_virtual(test(**arguments))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = inspect.signature(test)
    return run


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
