"""The settings -> the objects that the proxy is made of, one function for each."""

from __future__ import annotations

import asyncio
import time
from socket import SOCK_DGRAM, SOCK_STREAM
from typing import TYPE_CHECKING, NamedTuple

import structlog

from dnsproxy import config as settings
from dnsproxy import files, names
from dnsproxy.cache import preload
from dnsproxy.cache.gc import Caches
from dnsproxy.cache.store import Store
from dnsproxy.dyndns import documents
from dnsproxy.errors import DocumentError, KernelError, NetworkError, RightsError
from dnsproxy.exchange import Exchange
from dnsproxy.handover import Handover
from dnsproxy.namemanager import conntrack
from dnsproxy.namemanager.manager import NameManager
from dnsproxy.namemanager.nft import NftSets
from dnsproxy.namemanager.plan import Plan
from dnsproxy.namemanager.show import ShowSets
from dnsproxy.namemanager.tracker import Tracker
from dnsproxy.rules.policy import load
from dnsproxy.servers import Routes, Server
from dnsproxy.systemd import passed_sockets
from dnsproxy.transport.tcp import open_tcp
from dnsproxy.transport.udp import open_udp

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AsyncExitStack
    from pathlib import Path

    from dnsproxy.cache.gc import Collector
    from dnsproxy.cache.lookups import Record
    from dnsproxy.config import Config, SocketAddress
    from dnsproxy.dyndns.documents import Domain
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.errors import Problem
    from dnsproxy.namemanager.manager import Sets
    from dnsproxy.rules.policy import Policy

log = structlog.get_logger("dnsproxy")


class Loaded(NamedTuple):
    """What the documents say: for the proxy, and for DynDNS."""

    endpoints: EndpointTable
    policy: Policy
    domains: tuple[Domain, ...]
    notes: tuple[Problem, ...]


def load_documents(config: Config) -> Loaded:
    """Read and check all documents; DocumentError names every fault of every file."""
    texts = files.read_policies(config.policy.directory)
    faults: list[Problem] = []
    try:
        endpoints, policy = load(texts, enforcement=config.policy.enforcement)
    except DocumentError as error:
        faults += error.problems
    try:
        found = documents.load(texts)
    except DocumentError as error:
        raise DocumentError([*faults, *error.problems]) from None
    if faults:
        raise DocumentError(faults)
    return Loaded(endpoints, policy, found.domains, (*policy.notes, *found.notes))


def load_domains(config: Config) -> documents.Documents:
    """Read and check the documents of DynDNS alone."""
    return documents.load(files.read_policies(config.policy.directory))


async def open_store(
    config: Config, stack: AsyncExitStack, *, take_over: bool
) -> tuple[Store | None, Handover | None]:
    """Return the state on disk, and the other side of a handover if another instance has it still."""
    folder = config.state.directory
    if folder is None:
        if take_over:
            message = "is null: an instance is found, and takes over, by way of this folder"
            raise DocumentError([config.problem(("state", "directory"), message)])
        return None, None
    store = Store(folder)
    if store.acquire():
        return store, None
    if not take_over:
        raise NetworkError(
            f"another instance is running with the state in {folder}: `dnsproxy run --take-over` replaces it "
            "without losing a query; to run beside it, set state.directory to another"
        )
    former = await asyncio.to_thread(Handover, folder)
    stack.callback(former.close)
    return store, former


def open_listeners(
    config: Config, handed: Sequence[socket.socket], stack: AsyncExitStack
) -> list[socket.socket]:
    """Return bound sockets, a datagram and a stream one for each address.

    They come from systemd, or from the instance that this one replaces as far as it has them.
    """
    for sock in handed:
        stack.callback(sock.close)
    if sockets := passed_sockets():
        return sockets
    former = {(sock.type, *sock.getsockname()[:2]): sock for sock in handed}
    for address, port in config.listen:
        for kind, opened in ((SOCK_DGRAM, open_udp), (SOCK_STREAM, open_tcp)):
            if (taken := former.get((kind, address, port))) is not None:
                sockets.append(taken)
            else:
                sockets.append(opened(address, port))
                stack.callback(sockets[-1].close)
    return sockets


async def open_sets(config: Config) -> Sets:
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


def make_caches(config: Config) -> Caches:
    """Return empty caches."""
    return Caches(
        minimum_ttl=config.cache.minimum_ttl,
        addresses_per_name=config.cache.addresses_per_name,
        names_per_endpoint=config.cache.names_per_endpoint,
        zombies_per_endpoint=config.zombies.per_endpoint,
        grace=config.zombies.grace,
        unobserved=config.zombies.unobserved,
    )


def make_plan(config: Config, policy: Policy, endpoints: EndpointTable, caches: Caches) -> Plan:
    """Return what turns caches and policy into elements."""
    private = tuple(config.policy.private)
    return Plan(policy, endpoints, caches=caches, table=config.sets.table, private=private)


def make_manager(config: Config, plan: Plan, sets: Sets, collector: Collector) -> NameManager:
    """Return the single writer of `sets`."""
    return NameManager(
        plan,
        sets,
        collector,
        release=config.sets.on_timeout == "release",
        repair_interval=config.sets.repair_interval,
        gc_interval=config.cache.gc_interval,
    )


def make_tracker(config: Config, caches: Caches, endpoints: Callable[[], EndpointTable]) -> Tracker:
    """Return what looks for the connections of zombies."""
    times = config.conntrack
    return Tracker(conntrack.read, caches, endpoints, shortest=times.shortest, longest=times.longest)


def make_exchange(
    config: Config,
    plan: Plan,
    waiting: NameManager,
    endpoints: EndpointTable,
    policy: Policy,
    routes: Routes,
) -> Exchange:
    """Return the exchange; answers wait in `waiting`."""
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
    )


def acquired(store: Store) -> bool:
    """Take the lock of a store that another process is letting go of; blocking, for a second at most."""
    until = time.monotonic() + 1.0
    while not (taken := store.acquire()) and time.monotonic() < until:
        time.sleep(0.01)
    return taken


def preloaded(
    text: str, file: str, policy: Policy, endpoints: EndpointTable, offset: float, now: float
) -> Iterator[tuple[str, Record]]:
    """Return the lookups in a preload file, each for the key of an endpoint whose policy grants the name.

    `offset` is wall clock minus monotonic clock, `now` the latter. DocumentError names the file's faults.
    """

    def granting(name: bytes) -> Iterator[str]:
        return (each.key for each in endpoints.endpoints if policy.view(each).grants(name).grants)

    return preload.spread(preload.parse(text, file), granting, offset, now)


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
            from dnsproxy.demo import zone  # noqa: PLC0415 - few have a zone

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
