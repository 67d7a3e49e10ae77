"""The composition root: builds every object, starts every task, and handles signals.

Nothing answers before everything stands: texts checked, addresses bound, the state read, the kernel's sets
read back and repaired. What fails on the way is one message and an exit code, and nothing is left half done.

One TaskGroup holds all tasks. Where another instance hands over to this one (see handover.py), it goes on
serving until all of the above is done here; nothing leaves a set before it has ended.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from contextlib import AsyncExitStack, aclosing
from functools import partial
from hashlib import sha256
from socket import SOCK_DGRAM
from typing import TYPE_CHECKING, Any

import structlog

from dnsproxy import __version__, files, handover, host, logs, memory, parts
from dnsproxy import config as settings
from dnsproxy.admin.server import read_token, serve
from dnsproxy.admin.views import State as Shown
from dnsproxy.cache import journal
from dnsproxy.cache.gc import Collector
from dnsproxy.cache.journal import State
from dnsproxy.cache.keeper import Keeper
from dnsproxy.domains import Domains, Kept
from dnsproxy.errors import DnsproxyError, NetworkError
from dnsproxy.events import EventWriter, Fan, Ring
from dnsproxy.reload import Reloader
from dnsproxy.servers import FAILURES
from dnsproxy.systemd import notify, watchdog_interval
from dnsproxy.transport.tcp import Streams, TcpListener
from dnsproxy.transport.udp import UdpListener
from dnsproxy.transport.upstream import Upstreams
from dnsproxy.warmup import WarmUp, targets

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from pathlib import Path

    from dnsproxy.addresses import Network
    from dnsproxy.cache.store import Store
    from dnsproxy.config import Config, PolicySection
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.handover import Handover
    from dnsproxy.namemanager.manager import Sets
    from dnsproxy.parts import Loaded, UpstreamSource
    from dnsproxy.rules.policy import Policy
    from dnsproxy.servers import Routes, Server
    from dnsproxy.warmup import Target

TICK = 0.05  # seconds between two looks at what is overdue
PATIENCE = 2.0  # seconds that a stop waits for queries in flight
RETRY = 10.0  # seconds until something that does not hinder answers is tried again
PRELOADED = "preload"  # the key under which the state remembers the digest of what was preloaded

log = structlog.get_logger("dnsproxy")


def run(config: Config, *, config_path: Path, take_over: bool = False) -> int:
    """Run the proxy until it is told to stop; return the exit code."""
    logs.configure(config.log.level, config.log.format)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Until there is something to reload or tell; the default is to die.
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, config_path, take_over=take_over))
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


async def _serve(config: Config, path: Path, *, take_over: bool) -> None:
    async with AsyncExitStack() as stack:
        seen = {"policies": files.signature([config.policy.directory])}
        loaded = await asyncio.to_thread(parts.load_documents, config)
        local_addresses = await stack.enter_async_context(aclosing(host.changes(log.warning)))
        local = await anext(local_addresses)
        settings.check_loops(config, local)
        token = read_token(config.admin.token_file) if config.admin.token_file else b""
        store, former = await parts.open_store(config, stack, take_over=take_over)
        handed = await asyncio.to_thread(former.prepare) if former else []
        listening = parts.open_listeners(config, handed, stack)
        upstream = parts.UpstreamSource(local)
        await upstream.start(config, stack)
        seen["upstreams"] = files.signature(upstream.watched(config))
        sets = await parts.open_sets(config)
        stack.push_async_callback(sets.close)
        proxy = Proxy(config, path, sets, loaded, upstream, store, token)
        await proxy.run(listening, local_addresses, seen, former)


class Proxy:
    """The running proxy: what was built, and how it changes."""

    def __init__(
        self,
        config: Config,
        path: Path,
        sets: Sets,
        loaded: Loaded,
        upstream: UpstreamSource,
        store: Store | None,
        token: bytes,
    ) -> None:
        self._config = config
        self._store = store
        self._token = token
        self._upstream = upstream
        self._endpoints = loaded.endpoints.with_host_addresses(upstream.local)
        self._policy = policy = loaded.policy
        self._notes = loaded.notes
        self._loop = asyncio.get_running_loop()
        self._listeners: list[UdpListener | TcpListener] = []
        self._paused = False  # another instance reads the sockets
        self._alone = True  # no former instance may still put something into the sets
        self._stop = asyncio.Event()
        self._restored = False
        self._routes = upstream.routes(config)
        self._caches = parts.make_caches(config)
        self.plan = parts.make_plan(config, policy, self._endpoints, self._caches)
        self.collector = Collector(self._caches)
        self.manager = parts.make_manager(config, self.plan, sets, self.collector)
        self.exchange = parts.make_exchange(
            config, self.plan, self.manager, self._endpoints, policy, self._routes
        )
        self.upstreams = Upstreams(
            tuple(self._routes), self.exchange, self._loop, config.upstream.sockets, config.upstream.mark
        )
        self.tracker = parts.make_tracker(config, self._caches, lambda: self._endpoints)
        self._journal = journal.Journal(
            self._caches, aliases=self.exchange.aliases, claims=self.plan.claims, sets=self.plan.sets
        )
        self.keeper = Keeper(self._journal, store) if store else None
        self.domains = Domains(config, Kept(self.keeper) if self.keeper else None)
        self.domains.update(loaded.domains)
        self.reloader = Reloader(config, path, upstream, self._enforce, self._ask)
        self._ring = Ring() if config.events.file else None
        self._writer: EventWriter | None = None
        self._fan = Fan(self.exchange.set_events, self._ring)
        self._administration = AsyncExitStack()
        self._shown = self._show(sets)

    def _show(self, sets: Sets) -> Shown:
        """Return what the admin API looks at."""
        return Shown(
            plan=self.plan,
            manager=self.manager,
            exchange=self.exchange,
            collector=self.collector,
            sets=sets,
            endpoints=lambda: self._endpoints,
            servers=lambda: self._routes,
            events=self._fan,
            tracker=self.tracker,
            store=lambda: self.keeper.status() if self.keeper else None,
            faults=lambda: self.reloader.faults,
            listening=lambda: [str(address) for address in self._config.listen],
            reload=self.reloader.now,
            reloaded=lambda: (self.reloader.succeeded, self.reloader.ended_at),
            restored=lambda: self._restored,
            domains=lambda: self.domains.sync,
            clock=self._loop.time,
            wall=time.time,
            version=__version__,
            pid=os.getpid(),
        )

    # -- from start to end ------------------------------------------------------------------------------

    async def run(
        self,
        sockets: list[socket.socket],
        local_addresses: AsyncIterator[frozenset[bytes]],
        seen: dict[str, files.Signature],
        former: Handover | None,
    ) -> None:
        """Serve until a signal, or another instance, says stop; then finish what is in flight."""
        self._handle_signals()
        self._write_events()
        _calm_collector()
        await self._remember(former)
        self._restored = True
        self._alone = self.manager.deletes = former is None
        async with asyncio.TaskGroup() as tasks:
            steps = {
                "sets": self.manager.run(),
                "clock": self._keep_time(),
                "reload": self.reloader.run(),
                "policies": self.reloader.follow("policies", seen["policies"]),
                "upstreams": self.reloader.follow("upstreams", seen["upstreams"]),
                "addresses": self._follow_addresses(local_addresses),
                "health": self._watch_servers(),
                "watchdog": self._reassure(),
            }
            running = [tasks.create_task(step, name=name) for name, step in steps.items()]
            await self._until_enforcing()
            if former is None:
                await self._administer(replace=False)
            else:
                await self._take(former)
            await self._listen(sockets)
            if former is not None:
                former.confirm(sockets)
            running += [tasks.create_task(step, name=name) for name, step in self._later(sockets, former)]
            _calm_collector()
            log.info("ready", listen=[str(address) for address in self._config.listen], **self._summary())
            self._note()
            notify("READY=1")
            await self._stop.wait()
            await self._wind_down()
            for task in running:
                task.cancel()
        await self._close()

    def _later(
        self, sockets: list[socket.socket], former: Handover | None
    ) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """Yield the tasks that begin when queries are answered."""
        yield "connections", self.tracker.run()
        yield "domains", self.domains.run()
        if self.keeper is not None and self._config.state.directory is not None:
            yield "state", self.keeper.run()
            yield "handover", self._offer(self._config.state.directory, sockets)
        if former is not None:
            yield "former", self._outlive(former)
            yield "administration", self._administer_at_last()
        if self._config.warm_up.interval is not None:
            yield "warm-up", WarmUp(self.exchange, self._targets, self._config.warm_up.interval).run()

    def _targets(self) -> Iterator[Target]:
        return targets(self._policy, self._endpoints)

    def _write_events(self) -> None:
        file = self._config.events.file
        if file is not None and self._ring is not None:
            self._writer = EventWriter(self._ring, file, rate=self._config.events.rate, say=log.warning)

    async def _remember(self, former: Handover | None) -> None:
        """Learn what is on disk; keep none of the rows."""
        state = await self._restore()
        if former is None:
            await self._preload(state)

    async def _restore(self) -> State:
        """Learn what the last process knew, and return it as it was read. Twice is harmless."""
        if self.keeper is None:
            return State()
        state, now = await self.keeper.load(), self._loop.time()
        offset = time.time() - now
        for note in state.notes:
            log.warning("the state on disk", note=note)
        for _ in journal.restore(state, self._caches, offset, now):
            await asyncio.sleep(0)
        self.exchange.restore_aliases(journal.aliases(state, offset, now))
        self.plan.restore(journal.claims(state), journal.sets(state))
        return state

    async def _preload(self, state: State) -> None:
        """Learn another program's cache, once for each content of the file."""
        path = self._config.state.preload
        if path is None:
            return
        text, now = await asyncio.to_thread(files.read_text, path), self._loop.time()
        digest = sha256(text.encode()).digest()
        if state.memo.get(PRELOADED) == digest:
            return
        found = parts.preloaded(text, str(path), self._policy, self._endpoints, time.time() - now, now)
        for _ in journal.load(self._caches, found):
            await asyncio.sleep(0)
        if self.keeper is not None:
            try:
                await self.keeper.remember(PRELOADED, digest)
            except DnsproxyError as error:  # a full disk: it is learned once more at the next start
                log.warning("what was preloaded cannot be noted", error=str(error))

    async def _take(self, former: Handover) -> None:
        """Have the other instance stop reading our sockets, and learn what it has learned meanwhile."""
        await asyncio.to_thread(former.take)
        if self._store is None or not await asyncio.to_thread(parts.acquired, self._store):
            raise NetworkError("the former instance did not wait for this one any longer; it goes on")
        await self._restore()

    async def _outlive(self, former: Handover) -> None:
        """Take nothing out of the sets while the other instance may still put something in."""
        await asyncio.to_thread(former.wait)
        try:
            await self.manager.resync()
        except (DnsproxyError, OSError) as error:  # the writer repairs it, and says so
            log.info("the sets could not be read back at once", error=str(error))
        self._alone = self.manager.deletes = True
        log.info("took over from the former instance")

    async def _offer(self, folder: Path, sockets: list[socket.socket]) -> None:
        """Hand over to another instance that asks for it."""

        async def prepare() -> list[socket.socket]:
            self.manager.deletes = False
            if self.keeper is not None:
                await self.keeper.flush()
            return sockets

        async def take() -> None:
            log.info("another instance takes over")
            await self._administration.aclose()
            self._paused = True
            for listener in self._listeners:
                listener.pause()
            await self.domains.pause()
            if self.keeper is not None:
                await self.keeper.release()

        async def resume() -> None:
            self.manager.deletes = self._alone
            if self.keeper is not None:
                await self.keeper.resume()
            if self._paused:
                self._paused = False
                log.warning("the other instance did not take over; serving again")
                await self._listen([sock.dup() for sock in sockets])
                self.domains.resume()
                await self._tries_to_administer()

        try:
            await handover.offer(folder, prepare, take, resume, self._stop.set)
        except OSError as error:
            reason = error.strerror or str(error)
            log.warning("no other instance can take over from this one", folder=str(folder), error=reason)

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
            owner=self._owner,
        )
        for sock in sockets:
            if sock.type == SOCK_DGRAM:
                self._listeners.append(UdpListener(sock, self.exchange, self._loop))
            else:
                listener = TcpListener(sock, self.exchange, self._loop, streams)
                await listener.start()
                self._listeners.append(listener)

    def _owner(self, address: bytes) -> str | None:
        endpoint = self._endpoints.find(address)
        return None if endpoint is None else endpoint.key

    async def _administer_at_last(self) -> None:
        """Administer once the former instance has let go; whatever is in the way, names are answered."""
        while not await self._tries_to_administer():  # noqa: ASYNC110 - nobody tells when it can be had
            await asyncio.sleep(RETRY)

    async def _tries_to_administer(self) -> bool:
        try:
            await self._administer(replace=True)
        except DnsproxyError as error:
            log.warning("the admin API or metrics cannot be served; tried again", error=str(error))
            return False
        return True

    async def _administer(self, *, replace: bool) -> None:
        """Answer to the admin API, metrics and health checks; `replace` what another instance left."""
        admin, metrics = self._config.admin, self._config.metrics
        served = serve(
            self._shown,
            path=admin.socket,
            listen=admin.listen,
            token=self._token,
            metrics=metrics.listen,
            per_endpoint=metrics.per_endpoint,
            replace=replace,
        )
        await self._administration.enter_async_context(served)

    async def _wind_down(self) -> None:
        """Take no more queries, and answer those that were taken."""
        notify("STOPPING=1")
        await self._administration.aclose()
        for listener in self._listeners:
            listener.pause()
        for _ in range(round(PATIENCE / TICK)):
            if not self._busy():
                break
            await asyncio.sleep(TICK)
        for sink, wire, peer in self.exchange.stop(self._loop.time()):
            sink.send(wire, peer)

    def _busy(self) -> bool:
        """Tell whether somebody has an answer to get, or to fetch."""
        streams = (each for each in self._listeners if isinstance(each, TcpListener))
        waiting = self.exchange.flying or self.manager.status()["waiting"]
        return bool(waiting) or any(each.connections for each in streams)

    async def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        await self.upstreams.close()
        if self.keeper is not None:
            await self.keeper.close()
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

    async def _reassure(self) -> None:
        """Tell systemd's watchdog that the loop turns, if it wants to know."""
        interval = watchdog_interval()
        while interval is not None:
            notify("WATCHDOG=1")
            await asyncio.sleep(interval)

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
            self.domains.look_again()

    # -- what is swapped --------------------------------------------------------------------------------

    def _enforce(self, section: PolicySection, loaded: Loaded) -> None:
        before, old = _governed(self._policy, self._endpoints), self._policy
        policy, endpoints = loaded.policy, loaded.endpoints
        self._notes = loaded.notes
        self._policy, self._endpoints = policy, endpoints.with_host_addresses(self._upstream.local)
        self.plan.private = tuple(section.private)
        self.exchange.set_denials(section.deny, section.deny_ttl, strip=section.strip_private)
        self.manager.policy_changed(policy, self._endpoints)
        self.exchange.set_policy(policy, self._endpoints)
        old.retire()
        self.domains.update(loaded.domains)
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
        for note in self._notes:
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
    memory.trim()
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000_000)


def _governed(policy: Policy, endpoints: EndpointTable) -> set[tuple[str, bool, tuple[Network, ...]]]:
    """Return what the firewall templates are made from: who is restricted or not, and where."""
    return {(each.key, policy.restricts(each), each.prefixes) for each in endpoints.endpoints}
