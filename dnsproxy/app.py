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
from time import CLOCK_MONOTONIC, clock_gettime_ns
from typing import TYPE_CHECKING, Any

import structlog

from dnsproxy import config as settings
from dnsproxy import files, host, logs, names
from dnsproxy.cache.gc import Caches, Collector
from dnsproxy.demo import zone
from dnsproxy.errors import DocumentError, KernelError, RightsError
from dnsproxy.events import EventWriter, Ring
from dnsproxy.exchange import Exchange
from dnsproxy.namemanager.manager import NameManager
from dnsproxy.namemanager.nft import NftSets
from dnsproxy.namemanager.plan import Plan
from dnsproxy.namemanager.show import ShowSets
from dnsproxy.rules.policy import load
from dnsproxy.servers import FAILURES, Routes, Server
from dnsproxy.systemd import notify, passed_sockets
from dnsproxy.transport.tcp import Streams, TcpListener, open_tcp
from dnsproxy.transport.udp import UdpListener, open_udp
from dnsproxy.transport.upstream import Upstreams

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dnsproxy.addresses import Network
    from dnsproxy.config import Config, SocketAddress
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.namemanager.manager import Sets
    from dnsproxy.rules.policy import Policy

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
        endpoints, policy = load_policy(config)
        local_addresses = await stack.enter_async_context(aclosing(host.changes(log.warning)))
        local = await anext(local_addresses)
        settings.check_loops(config, local)
        listening = _open_listeners(config, stack)
        upstream = UpstreamSource(local)
        await upstream.start(config, stack)
        seen["upstreams"] = files.signature(upstream.watched(config))
        sets = await _open_sets(config)
        stack.push_async_callback(sets.close)
        proxy = Proxy(config, path, sets, endpoints, policy, upstream, local)
        await proxy.run(listening, local_addresses, seen)


def load_policy(config: Config) -> tuple[EndpointTable, Policy]:
    """Read and check all policy files; DocumentError names every fault of every file."""
    texts = files.read_policies(config.policy.directory)
    return load(texts, enforcement=config.policy.enforcement)


def _open_listeners(config: Config, stack: AsyncExitStack) -> list[socket.socket]:
    """Return bound sockets, a datagram and a stream one for each address, or those that systemd passed."""
    sockets = passed_sockets()
    if not sockets:
        for address, port in config.listen:
            for opened in (open_udp, open_tcp):
                sockets.append(opened(address, port))
                stack.callback(sockets[-1].close)
    return sockets


async def _open_sets(config: Config) -> Sets:
    """Return the backend; with `auto`, the one that the rights allow."""
    if config.sets.backend != "show":
        try:
            return await _kernel_sets()
        except (RightsError, KernelError) as error:
            if config.sets.backend == "nft":
                raise
            log.warning("set changes are shown, not made", reason=str(error))
    return ShowSets(_show)


async def _kernel_sets() -> NftSets:
    """Return the kernel's sets, with the right to change them proven."""
    sets = NftSets()
    try:
        await sets.ensure(())
    except (RightsError, KernelError):
        await sets.close()
        raise
    return sets


def _show(command: str) -> None:
    print(command, flush=True)


def _caches(config: Config) -> Caches:
    return Caches(
        minimum_ttl=config.cache.minimum_ttl,
        addresses_per_name=config.cache.addresses_per_name,
        names_per_endpoint=config.cache.names_per_endpoint,
    )


def _manager(config: Config, plan: Plan, sets: Sets, caches: Caches) -> NameManager:
    return NameManager(
        plan,
        sets,
        Collector(caches),
        release=config.sets.on_timeout == "release",
        repair_interval=config.sets.repair_interval,
        gc_interval=config.cache.gc_interval,
    )


def _exchange(
    config: Config,
    plan: Plan,
    waiting: NameManager,
    endpoints: EndpointTable,
    policy: Policy,
    routes: Routes,
    events: Ring | None,
) -> Exchange:
    return Exchange(
        endpoints=endpoints,
        policy=policy,
        routes=routes,
        plan=plan,
        waiting=waiting,
        timeout=config.upstream.timeout,
        attempt=config.upstream.attempt,
        hold=config.sets.hold,
        deny=config.policy.deny,
        deny_ttl=config.policy.deny_ttl,
        strip=config.policy.strip_private,
        queries=config.limits.queries,
        queries_per_client=config.limits.queries_per_client,
        alias_ttl=config.cache.minimum_ttl,
        events=events,
    )


class UpstreamSource:
    """Where the upstream servers are read from: the settings, a resolv.conf, or a zone served right here."""

    def __init__(self, local: frozenset[bytes]) -> None:
        self.local = local
        self._known: dict[SocketAddress, Server] = {}
        self._zone: SocketAddress | None = None

    async def start(self, config: Config, stack: AsyncExitStack) -> None:
        """Start the built-in zone server, where the settings ask for one."""
        path = config.upstream.zone
        if path is not None:
            port, server = await zone.serve(path, "127.0.0.1", 0, log.warning)
            stack.callback(server.close)
            self._zone = settings.SocketAddress("127.0.0.1", port)

    def watched(self, config: Config) -> list[Path]:
        """Return the file that is followed, if one is."""
        path = config.upstream.resolv_conf
        return [path] if path is not None and self._zone is None and not config.upstream.servers else []

    def routes(self, config: Config) -> Routes:
        """Return the servers as the settings and files say now; DocumentError if there is none."""
        default = [self._zone] if self._zone else list(config.upstream.servers) or self._from_file(config)
        routes = {names.from_text(suffix): servers for suffix, servers in config.upstream.routes.items()}
        wanted = dict.fromkeys([*default, *(server for servers in routes.values() for server in servers)])
        self._known = {address: self._known.get(address) or Server(*address) for address in wanted}
        return Routes(
            [self._known[address] for address in default],
            {suffix: [self._known[address] for address in servers] for suffix, servers in routes.items()},
        )

    def _from_file(self, config: Config) -> list[SocketAddress]:
        path = config.upstream.resolv_conf
        if path is None:
            return []
        servers, notes = settings.upstreams_of(config, files.read_text(path), str(path), self.local)
        for note in notes:
            log.warning("resolv.conf", note=str(note))
        return servers


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
        self._path = path
        self._upstream = upstream
        self._endpoints = endpoints.with_host_addresses(local)
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._listeners: list[UdpListener | TcpListener] = []
        self._due: set[str] = (
            set()
        )  # what is to be read again: settings (with all they name), policies, upstreams
        self._told = asyncio.Event()
        self._faults: dict[str, str] = {}  # in files that are not in force, by what was read
        self._stop = asyncio.Event()
        routes = upstream.routes(config)
        self._ring = Ring() if config.events.file else None
        self._writer: EventWriter | None = None
        caches = self._caches = _caches(config)
        private = tuple(config.policy.private)
        plan = Plan(policy, self._endpoints, caches=caches, table=config.sets.table, private=private)
        self.manager = _manager(config, plan, sets, caches)
        self.exchange = _exchange(config, plan, self.manager, self._endpoints, policy, routes, self._ring)
        self.upstreams = Upstreams(
            tuple(routes), self.exchange, self._loop, config.upstream.sockets, config.upstream.mark
        )
        self._routes = routes

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
                "reload": self._reload_when_told(),
                "policies": self._follow("policies", seen, lambda: [self._config.policy.directory]),
                "upstreams": self._follow("upstreams", seen, lambda: self._upstream.watched(self._config)),
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
            signal.SIGHUP: partial(self._read_again, "settings"),
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

    async def _follow(
        self, kind: str, seen: dict[str, files.Signature], paths: Callable[[], list[Path]]
    ) -> None:
        async for _ in files.changes(paths, seen[kind]):
            self._read_again(kind)

    async def _follow_addresses(self, local_addresses: AsyncIterator[frozenset[bytes]]) -> None:
        async for local in local_addresses:
            self._upstream.local = local
            self._endpoints = self._endpoints.with_host_addresses(local)
            self.exchange.set_policy(self._policy, self._endpoints)

    # -- reload -----------------------------------------------------------------------------------------

    def _read_again(self, kind: str) -> None:
        self._due.add(kind)
        self._told.set()

    async def _reload_when_told(self) -> None:
        """Do one reload after the other, so that the last that was told is the last that is done."""
        while True:
            await self._told.wait()
            self._told.clear()
            due, self._due = self._due, set()
            notify("RELOADING=1", f"MONOTONIC_USEC={clock_gettime_ns(CLOCK_MONOTONIC) // 1000}")
            for kind in ["settings"] if "settings" in due else sorted(due):
                await self._reload(kind)
            notify("READY=1")

    async def _reload(self, kind: str) -> None:
        """Read and check all that is due; then swap all of it, or keep all as it is."""
        try:
            config = self._reread_settings() if kind == "settings" else self._config
            policy = await asyncio.to_thread(load_policy, config) if kind != "upstreams" else None
            routes = self._upstream.routes(config) if kind != "policies" else None
        except DocumentError as error:
            self._keep(kind, error)
            return
        self._faults = {} if kind == "settings" else {k: v for k, v in self._faults.items() if k != kind}
        self._config = config
        if policy is not None:
            self._enforce(*policy)
        if routes is not None:
            self._ask(routes)

    def _keep(self, kind: str, error: DocumentError) -> None:
        self._faults[kind] = str(error)
        log.error("files have faults; what was in force stays in force", faults=str(error))

    def _reread_settings(self) -> Config:
        """Return the running settings with what may change while running; name what may not."""
        wanted = settings.read(files.read_text(self._path), str(self._path))
        settings.check_loops(wanted, self._upstream.local)
        merged = _merged(self._config, wanted)
        if later := _differing(merged, wanted):
            log.warning("these settings take effect at the next start", settings=later)
        return merged

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
            faults=sorted(self._faults.values()),
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


READ_AGAIN = {"policy": ("directory", "enforcement"), "upstream": ("servers", "routes", "resolv_conf")}


def _merged(running: Config, wanted: Config) -> Config:
    """Return the running settings with those of the wanted ones that a reload puts into force."""
    changes = {
        section: getattr(running, section).model_copy(
            update={key: getattr(getattr(wanted, section), key) for key in keys}
        )
        for section, keys in READ_AGAIN.items()
    }
    return running.model_copy(update=changes)


def _differing(one: Config, other: Config) -> list[str]:
    """Name the keys, such as `limits.queries`, in which two settings differ."""
    found = []
    for section in type(one).model_fields:
        left, right = getattr(one, section), getattr(other, section)
        keys = getattr(type(left), "model_fields", None)
        if keys is None:
            found += [section] if left != right else []
        else:
            found += [f"{section}.{key}" for key in keys if getattr(left, key) != getattr(right, key)]
    return found


def _governed(policy: Policy, endpoints: EndpointTable) -> set[tuple[str, bool, tuple[Network, ...]]]:
    """Return what the firewall templates are made from: who is restricted or not, and where."""
    return {(each.key, policy.restricts(each), each.prefixes) for each in endpoints.endpoints}
