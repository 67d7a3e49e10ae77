"""A running proxy as far as the admin API sees it: the real core, sets that only pretend."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from fakes import FakeSets, Sent

from dnsproxy import addresses, names
from dnsproxy.admin.views import State
from dnsproxy.cache.gc import Caches, Collector
from dnsproxy.dyndns import documents, plan
from dnsproxy.dyndns.status import Event, View, status
from dnsproxy.errors import RightsError
from dnsproxy.events import Fan, Ring
from dnsproxy.exchange import Exchange
from dnsproxy.namemanager.manager import NameManager
from dnsproxy.namemanager.plan import Plan
from dnsproxy.namemanager.tracker import Tracker
from dnsproxy.rules.policy import load
from dnsproxy.servers import Routes, Server

AHEAD = 1_000_000_000.0
POLICY = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ci, namespace: default, labels: {app: ci}}
spec: {addresses: [10.1.0.5, "fd00::5"]}
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {addresses: [10.1.0.6], denyReply: refused}
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: ci, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: ci}}
  allow:
  - "*.example.com:443"
  - {name: git.example.net, ports: [22, 443/TCP], set: git, cidrs: [10.0.0.0/8]}
  resolve: ["*.corp.example"]
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: web, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: web}}
  allow: ["**.example.org"]
"""
CI, WEB, HOST = "default/ci", "shop/web", "default/host"


@dataclass
class Reading:
    """A look through a table of connections that is empty."""

    live: dict[str, set[bytes]] = field(default_factory=dict)
    entries: int = 17
    whole: bool = True
    untracked: frozenset[int] = frozenset()


DOMAIN = """
apiVersion: dyndns.contrib.strato.com/v1alpha1
kind: Domain
metadata: {name: www}
spec: {fqdn: www.example.de, ipAddress: 93.184.216.34, password: {env: SECRET}}
"""


class Records:
    """DynDNS as the API sees it: one record, with one event."""

    def __init__(self):
        (self.domain,) = documents.load([("domain.yaml", DOMAIN)]).domains
        self.events = [Event(0.0, "Warning", "DynDnsUpdateHalted", self.domain.title, "www.example.de", "no")]
        self.updates, self.checks = Counter({("www.example.de", "good"): 2}), Counter()
        self.refusal = None

    def views(self):
        view = View(self.domain, plan.State())
        return [(view, status(view, plan.Clock(0.0, 0.0, "")))]

    def problems(self):
        return ["Domain default/www: halted"]

    def force(self, name):
        return self.refusal

    resume = force


@dataclass
class World:
    """The state, what is behind it, and a clock that stands still."""

    text: str = POLICY
    now: float = 1000.0
    faults: dict[str, str] = field(default_factory=dict)
    listening: tuple[str, ...] = ("127.0.0.1:53",)
    reloads: int = 0
    reloaded_well: bool = True
    unreadable: str = ""

    def __post_init__(self) -> None:
        self.endpoints, self.policy = load([("policies.yaml", self.text)])
        self.caches = Caches(
            minimum_ttl=60, addresses_per_name=1000, names_per_endpoint=1_000_000, zombies_per_endpoint=1000
        )
        self.plan = Plan(self.policy, self.endpoints, caches=self.caches)
        self.sets = FakeSets()
        self.collector = Collector(self.caches)
        self.manager = NameManager(self.plan, self.sets, self.collector, clock=self.clock)
        self.server = Server("192.0.2.53")
        routes = Routes([self.server], {})
        self.exchange = Exchange(
            endpoints=self.endpoints, policy=self.policy, routes=routes, plan=self.plan, waiting=self.manager
        )
        self.tracker = Tracker(self.read, self.caches, lambda: self.endpoints, clock=self.clock)
        self.fan = Fan(self.exchange.set_events)
        self.out = Sent()
        self.domains = Records()
        self.state = State(
            plan=self.plan,
            manager=self.manager,
            exchange=self.exchange,
            collector=self.collector,
            sets=self.sets,
            events=self.fan,
            endpoints=lambda: self.endpoints,
            servers=lambda: routes,
            listening=lambda: self.listening,
            faults=lambda: self.faults,
            restored=lambda: True,
            reload=self.reload,
            reloaded=lambda: (self.reloaded_well, 999.0),
            tracker=self.tracker,
            store=lambda: {"age": 2.5, "batches": 3, "problem": None},
            domains=lambda: self.domains,
            clock=self.clock,
            wall=lambda: self.now + AHEAD,
            version="1.2.3",
            pid=4711,
        )

    def clock(self) -> float:
        return self.now

    async def reload(self) -> list[str]:
        self.reloads += 1
        return sorted(self.faults.values())

    async def read(self, owner) -> Reading:
        if self.unreadable:
            raise RightsError(self.unreadable)
        return Reading()

    def learn(self, key: str, name: str, *found: str, ttl: int = 300) -> None:
        """Let an endpoint have an answer."""
        view = self.policy.view(next(each for each in self.endpoints.endpoints if each.key == key))
        wire = names.from_text(name)
        packed = tuple(addresses.from_text(each) for each in found)
        self.plan.observe(view, view.grants(wire), wire, packed, ttl, self.now)

    def collect(self) -> None:
        """Do a round of collection."""
        while not self.collector.step(self.now).done:
            pass

    def ask(self, name: str, source: str = "10.1.0.5") -> None:
        """Let a client ask for the addresses (A) of a name."""
        wire = (
            b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + names.from_text(name) + b"\x00\x01\x00\x01"
        )
        self.exchange.query(wire, addresses.from_text(source), self.out, None, self.now, stream=False)

    @asynccontextmanager
    async def writing(self):
        """Run the manager: what was learned gets into the sets."""
        task = asyncio.ensure_future(self.manager.run())
        try:
            await asyncio.wait_for(self.manager.ready.wait(), 10)
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def rows(steps) -> list[dict]:
    """Return all rows of a listing."""
    return [row for step in steps for row in step]


__all__ = ["AHEAD", "CI", "HOST", "POLICY", "WEB", "Ring", "World", "rows"]
