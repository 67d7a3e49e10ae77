"""The settings -> the objects that the proxy is made of, one function for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from dnsproxy import config as settings
from dnsproxy import files, names
from dnsproxy.cache.gc import Caches, Collector
from dnsproxy.demo import zone
from dnsproxy.errors import KernelError, RightsError
from dnsproxy.exchange import Exchange
from dnsproxy.namemanager.manager import NameManager
from dnsproxy.namemanager.nft import NftSets
from dnsproxy.namemanager.show import ShowSets
from dnsproxy.rules.policy import load
from dnsproxy.servers import Routes, Server
from dnsproxy.systemd import passed_sockets
from dnsproxy.transport.tcp import open_tcp
from dnsproxy.transport.udp import open_udp

if TYPE_CHECKING:
    import socket
    from contextlib import AsyncExitStack
    from pathlib import Path

    from dnsproxy.config import Config, SocketAddress
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.events import Ring
    from dnsproxy.namemanager.manager import Sets
    from dnsproxy.namemanager.plan import Plan
    from dnsproxy.rules.policy import Policy

log = structlog.get_logger("dnsproxy")


def load_policy(config: Config) -> tuple[EndpointTable, Policy]:
    """Read and check all policy files; DocumentError names every fault of every file."""
    texts = files.read_policies(config.policy.directory)
    return load(texts, enforcement=config.policy.enforcement)


def open_listeners(config: Config, stack: AsyncExitStack) -> list[socket.socket]:
    """Return bound sockets, a datagram and a stream one for each address, or those that systemd passed."""
    sockets = passed_sockets()
    if not sockets:
        for address, port in config.listen:
            for opened in (open_udp, open_tcp):
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
    )


def make_manager(config: Config, plan: Plan, sets: Sets, caches: Caches) -> NameManager:
    """Return the single writer of `sets`."""
    return NameManager(
        plan,
        sets,
        Collector(caches),
        release=config.sets.on_timeout == "release",
        repair_interval=config.sets.repair_interval,
        gc_interval=config.cache.gc_interval,
    )


def make_exchange(
    config: Config,
    plan: Plan,
    waiting: NameManager,
    endpoints: EndpointTable,
    policy: Policy,
    routes: Routes,
    events: Ring | None,
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
