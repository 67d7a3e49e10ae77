"""The composition root: builds every object, starts every task, and handles signals and reloads.

Nothing answers before everything stands: texts checked, addresses bound, the kernel's sets read back and
repaired. What fails on the way is one message and an exit code, and nothing is left half done.

One TaskGroup holds all tasks. A reload reads and checks all texts, in a thread since a long list takes a
second, before it swaps anything; with any fault the running policy stays, and the log says so.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from contextlib import AsyncExitStack, aclosing
from functools import partial
from socket import SOCK_DGRAM
from typing import TYPE_CHECKING, Any

import structlog

from dnsproxy import config as settings
from dnsproxy import files, host, logs, parts
from dnsproxy.events import EventWriter, Ring
from dnsproxy.namemanager.plan import Plan
from dnsproxy.reload import Reloader
from dnsproxy.servers import FAILURES
from dnsproxy.systemd import notify
from dnsproxy.transport.tcp import Streams, TcpListener
from dnsproxy.transport.udp import UdpListener
from dnsproxy.transport.upstream import Upstreams

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dnsproxy.addresses import Network
    from dnsproxy.config import Config
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.namemanager.manager import Sets
    from dnsproxy.parts import UpstreamSource
    from dnsproxy.rules.policy import Policy
    from dnsproxy.servers import Routes, Server

TICK = 0.05  # seconds between two looks at what is overdue
PATIENCE = 2.0  # seconds that a stop waits for queries in flight

log = structlog.get_logger("dnsproxy")


def run(config: Config, *, config_path: Path) -> int:
    """Run the proxy until it is told to stop; return the exit code."""
    logs.configure(config.log.level, config.log.format)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(
            number, signal.SIG_IGN
        )  # until there is something to reload or tell; the default is to die
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, config_path))
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Choose uvloop where it is installed. DNSPROXY_LOOP=asyncio leaves it aside, for comparison."""
    if os.environ.get("DNSPROXY_LOOP") == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop  # noqa: PLC0415 - an optional part
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop  # type: ignore[no-any-return]


async def _serve(config: Config, path: Path) -> None:
    async with AsyncExitStack() as stack:
        seen = {"policies": files.signature([config.policy.directory])}
        endpoints, policy = parts.load_policy(config)
        local_addresses = await stack.enter_async_context(aclosing(host.changes(log.warning)))
        local = await anext(local_addresses)
        settings.check_loops(config, local)
        listening = parts.open_listeners(config, stack)
        upstream = parts.UpstreamSource(local)
        await upstream.start(config, stack)
        seen["upstreams"] = files.signature(upstream.watched(config))
        sets = await parts.open_sets(config)
        stack.push_async_callback(sets.close)
        proxy = Proxy(config, path, sets, endpoints, policy, upstream, local)
        await proxy.run(listening, local_addresses, seen)


class Proxy:
    """The running proxy: what was built, and how it changes."""

    def __init__(
        self,
        config: Config,
        path: Path,
        sets: Sets,
        endpoints: EndpointTable,
        policy: Policy,
        upstream: UpstreamSource,
        local: frozenset[bytes],
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._endpoints = endpoints.with_host_addresses(local)
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._listeners: list[UdpListener | TcpListener] = []
        self._stop = asyncio.Event()
        routes = upstream.routes(config)
        self._ring = Ring() if config.events.file else None
        self._writer: EventWriter | None = None
        caches = self._caches = parts.make_caches(config)
        private = tuple(config.policy.private)
        plan = Plan(policy, self._endpoints, caches=caches, table=config.sets.table, private=private)
        self.manager = parts.make_manager(config, plan, sets, caches)
        self.exchange = parts.make_exchange(
            config, plan, self.manager, self._endpoints, policy, routes, self._ring
        )
        self.upstreams = Upstreams(
            tuple(routes), self.exchange, self._loop, config.upstream.sockets, config.upstream.mark
        )
        self._routes = routes
        self.reloader = Reloader(config, path, upstream, self._enforce, self._ask)

    async def run(
        self,
        sockets: list[socket.socket],
        local_addresses: AsyncIterator[frozenset[bytes]],
        seen: dict[str, files.Signature],
    ) -> None:
        """Serve until a signal says stop; then finish what is in flight."""
        self._handle_signals()
        if self._config.events.file is not None and self._ring is not None:
            self._writer = EventWriter(
                self._ring, self._config.events.file, rate=self._config.events.rate, say=log.warning
            )
        async with asyncio.TaskGroup() as tasks:
            steps = {
                "sets": self.manager.run(),
                "clock": self._keep_time(),
                "reload": self.reloader.run(),
                "policies": self.reloader.follow("policies", seen["policies"]),
                "upstreams": self.reloader.follow("upstreams", seen["upstreams"]),
                "addresses": self._follow_addresses(local_addresses),
                "health": self._watch_servers(),
            }
            running = [tasks.create_task(step, name=name) for name, step in steps.items()]
            await self._until_enforcing()
            await self._listen(sockets)
            _calm_collector()
            log.info("ready", listen=[str(address) for address in self._config.listen], **self._summary())
            self._note()
            notify("READY=1")
            await self._stop.wait()
            await self._wind_down()
            for task in running:
                task.cancel()
        await self._close()

    def _handle_signals(self) -> None:
        handlers: dict[int, Callable[[], object]] = {
            signal.SIGHUP: partial(self.reloader.tell, "settings"),
            signal.SIGUSR1: self._tell,
            signal.SIGUSR2: self._reopen,
            signal.SIGTERM: self._stop.set,
            signal.SIGINT: self._stop.set,
        }
        for number, handler in handlers.items():
            self._loop.add_signal_handler(number, handler)

    async def _until_enforcing(self) -> None:
        """Wait for the first repair; where the kernel refuses, start all the same, which fails closed."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self.manager.ready.wait()
        except TimeoutError:
            log.warning("the sets are not enforced yet; allowed names are answered SERVFAIL until they are")

    async def _listen(self, sockets: list[socket.socket]) -> None:
        limits = self._config.limits
        streams = Streams(
            connections=limits.tcp_connections,
            per_client=limits.tcp_connections_per_client,
            idle=limits.tcp_idle,
        )
        for sock in sockets:
            if sock.type == SOCK_DGRAM:
                self._listeners.append(UdpListener(sock, self.exchange, self._loop))
            else:
                listener = TcpListener(sock, self.exchange, self._loop, streams)
                await listener.start()
                self._listeners.append(listener)

    async def _wind_down(self) -> None:
        """Take no more queries, and answer those that were taken."""
        notify("STOPPING=1")
        for listener in self._listeners:
            listener.drain()
        until = self._loop.time() + PATIENCE
        while self.exchange.flying or self.manager.status()["waiting"]:
            await asyncio.sleep(TICK)
            if self._loop.time() > until:
                break

    async def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        await self.upstreams.close()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.stop)
        log.info("stopped; the sets stay as they are")

    # -- tasks ------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        """End what is overdue."""
        while True:
            await asyncio.sleep(TICK)
            for sink, wire, peer in self.exchange.expire(self._loop.time()):
                sink.send(wire, peer)

    async def _watch_servers(self) -> None:
        """Say once when a server stops answering, and once when it is back."""
        silent: set[Server] = set()
        while True:
            await asyncio.sleep(1.0)
            now = {server for server in self._routes if server.failures >= FAILURES}
            for server in now - silent:
                hint = "see that it runs and that this host can reach it; until it answers it is asked last"
                log.warning("upstream does not answer", server=str(server), hint=hint)
            for server in silent - now:
                log.info("upstream answers again", server=str(server))
            silent = now

    async def _follow_addresses(self, local_addresses: AsyncIterator[frozenset[bytes]]) -> None:
        async for local in local_addresses:
            self._upstream.local = local
            self._endpoints = self._endpoints.with_host_addresses(local)
            self.exchange.set_policy(self._policy, self._endpoints)

    # -- what is swapped --------------------------------------------------------------------------------

    def _enforce(self, endpoints: EndpointTable, policy: Policy) -> None:
        before, old = _governed(self._policy, self._endpoints), self._policy
        self._policy, self._endpoints = policy, endpoints.with_host_addresses(self._upstream.local)
        self.manager.policy_changed(policy, self._endpoints)
        self.exchange.set_policy(policy, self._endpoints)
        old.retire()
        log.info("policy in force", **self._summary())
        self._note()
        if changed := before ^ _governed(policy, self._endpoints):
            log.warning("load the firewall template again", changed=sorted({key for key, *_ in changed}))

    def _ask(self, routes: Routes) -> None:
        self._routes = routes
        self.upstreams.update(tuple(routes))
        self.exchange.set_routes(routes)
        log.info("upstreams in force", servers=[str(server) for server in routes])

    # -- what is told -----------------------------------------------------------------------------------

    def _summary(self) -> dict[str, Any]:
        return {"endpoints": len(self._endpoints.endpoints), "selectors": len(self._policy.selectors)}

    def _note(self) -> None:
        """Say what the policy documents ask for and do not get."""
        for note in self._policy.notes:
            log.info("note", note=str(note))

    def _tell(self) -> None:
        log.info(
            "statistics",
            queries=self.exchange.counts,
            sets=self.manager.status(),
            names=len(self._caches.global_),
            faults=sorted(self.reloader.faults.values()),
            **self._summary(),
        )

    def _reopen(self) -> None:
        if self._writer is not None:
            self._writer.reopen()


def _calm_collector() -> None:
    """Keep Python's collector of cycles from stopping the loop.

    A full pass walks every lease: 430 ms were measured at 200,000 pairs, and passes come with growth. What
    is kept for long here has no cycles, so full passes are as good as switched off; young objects are still
    looked at, some thousands at a time, a few milliseconds at most.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000_000)


def _governed(policy: Policy, endpoints: EndpointTable) -> set[tuple[str, bool, tuple[Network, ...]]]:
    """Return what the firewall templates are made from: who is restricted or not, and where."""
    return {(each.key, policy.restricts(each), each.prefixes) for each in endpoints.endpoints}
