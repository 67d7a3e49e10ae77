"""The settings: one YAML text -> checked, plain values. Every message about a setting comes from here.

Only the door holds a `Config`; below it, everything is handed single values. Each key, its default and
why it has that default stand in `config/dnsproxy.yaml`, which a test compares with this file. Nothing here
opens a file: paths are only put into relation to the folder of the settings.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, PlainValidator, PrivateAttr, field_validator, model_validator

from dnsproxy import addresses, names, yamldoc
from dnsproxy.errors import DocumentError, Problem
from dnsproxy.yamldoc import FaultError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

DNS_PORT = 53
STDOUT = Path("-")

_Value = TypeVar("_Value")


class SocketAddress(NamedTuple):
    """An IP address (canonical text) and a port: where we listen, or a server that we ask."""

    address: str
    port: int

    @property
    def is_wildcard(self) -> bool:
        """Tell whether it means every address of its family."""
        return ip_address(self.address).is_unspecified

    def __str__(self) -> str:
        return addresses.with_port(self.address, self.port)


class TableName(NamedTuple):
    """An nftables table: its family (inet, ip, ip6) and its name."""

    family: str
    name: str

    def __str__(self) -> str:
        return f"{self.family} {self.name}"


def socket_address(text: str) -> SocketAddress:
    """Return what `192.0.2.1`, `192.0.2.1:53`, `2001:db8::1` or `[2001:db8::1]:53` means; else ValueError."""
    address, port = _split(text)
    if "%" in address:
        raise ValueError(f"{text!r} has a zone (%...), which is not supported; use an address without one")
    try:
        packed = addresses.unmapped(addresses.from_text(address))
    except ValueError:
        raise ValueError(
            f"{text!r} is not an IP address with an optional port, such as 192.0.2.1:53 or [2001:db8::1]:53"
        ) from None
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"{text!r} has the port {port!r}; expected 1 to 65535")
    return SocketAddress(addresses.to_text(packed), int(port))


def _split(text: str) -> tuple[str, str]:
    if text.startswith("[") and "]" in text:
        address, _, rest = text[1:].partition("]")
        return address, rest.removeprefix(":") if rest else str(DNS_PORT)
    if text.count(":") == 1:
        address, _, port = text.partition(":")
        return address, port
    return text, str(DNS_PORT)


def _server(text: str) -> SocketAddress:
    server = socket_address(text)
    if server.is_wildcard:
        raise ValueError(f"{text!r} means every address of this host, which is no server to ask")
    return server


def _loopback(text: str) -> SocketAddress:
    found = socket_address(text)
    if not ip_address(found.address).is_loopback:
        raise ValueError(f"{text!r} is no loopback address, such as 127.0.0.1:9353 or [::1]:9353")
    return found


def _suffix(text: str) -> str:
    if "*" in text:
        raise ValueError(
            f"{text!r} has a star; a route is for a domain and all below it: write the domain alone"
        )
    names.from_text(text)
    return text  # as written, since that is how the text is pointed at


def _table(text: str) -> TableName:
    family, _, name = text.partition(" ")
    plain = name.replace("_", "").replace("-", "")
    if (
        family not in ("inet", "ip", "ip6")
        or not plain.isascii()
        or not plain.isalnum()
        or not name[0].isalpha()
    ):
        raise ValueError(f"{text!r} is not a table as FAMILY NAME, such as 'inet dnsproxy' (inet, ip or ip6)")
    return TableName(family, name)


def _range(text: str) -> IPv4Network | IPv6Network:
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is not an address range, such as 10.0.0.0/8 or fd00::/8") from None
    if ip_network(text.partition("/")[0]).network_address != network.network_address:
        raise ValueError(f"{text!r} has bits set beyond its length; write {network}")
    return network


def _path(text: str) -> Path:
    if not text:
        raise ValueError("an empty path; expected the path of a file or directory")
    return Path(text)


def _from_text(read: Callable[[str], _Value], expected: str) -> PlainValidator:
    """Make a validator that takes text alone and reads it with `read`, whose ValueError is the message."""

    def check(value: object) -> _Value:
        if not isinstance(value, str):
            raise ValueError(f"expected {expected}, as text")  # noqa: TRY004 - pydantic reports ValueError only
        return read(value)

    return PlainValidator(check)


Listener = Annotated[SocketAddress, _from_text(socket_address, "an address and a port")]
Server = Annotated[SocketAddress, _from_text(_server, "an address and, if it is not 53, a port")]
Loopback = Annotated[SocketAddress, _from_text(_loopback, "a loopback address and a port")]
Suffix = Annotated[str, _from_text(_suffix, "a domain name")]
Range = Annotated[IPv4Network | IPv6Network, _from_text(_range, "an address range")]
Table = Annotated[TableName, _from_text(_table, "a table such as inet dnsproxy")]
FilePath = Annotated[Path, _from_text(_path, "a path")]

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class UpstreamSection(yamldoc.Model):
    """Who is asked: `zone`, else `servers`, else those in `resolv_conf`; `routes` before them."""

    servers: list[Server] = Field(default_factory=list)
    resolv_conf: FilePath | None = Path("/etc/resolv.conf")
    routes: dict[Suffix, Annotated[list[Server], Field(min_length=1)]] = Field(default_factory=dict)
    zone: FilePath | None = None
    timeout: Seconds = 4.0
    attempt: Seconds = 1.0
    sockets: Annotated[int, Field(ge=1, le=64)] = 4
    mark: Annotated[int, Field(ge=0, le=0xFFFF_FFFF)] = 53

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.zone is not None and (self.servers or self.routes):
            raise FaultError(
                "answers instead of real servers: leave it out, or `servers` and `routes`", "zone"
            )
        if self.zone is None and not self.servers and self.resolv_conf is None:
            raise FaultError("nobody is left to ask: set `servers`, or `zone`, or this", "resolv_conf")
        if len({names.from_text(suffix) for suffix in self.routes}) < len(self.routes):
            raise FaultError("two are for one domain (case and a final dot make no difference)", "routes")
        if self.attempt > self.timeout:
            raise FaultError(
                f"{self.attempt:g} s do not fit into the `timeout` of {self.timeout:g} s", "attempt"
            )
        return self


class PolicySection(yamldoc.Model):
    """Where the policies are, and what they mean where they are silent."""

    directory: FilePath = Path("policies.d")
    enforcement: Literal["default", "always"] = "default"
    deny: Literal["nxdomain", "refused"] = "nxdomain"
    deny_ttl: Annotated[int, Field(ge=0, le=3600)] = 5
    private: list[Range] = Field(default_factory=list)
    strip_private: bool = False


class CacheSection(yamldoc.Model):
    """How long and how many addresses are remembered."""

    minimum_ttl: Annotated[int, Field(ge=0, le=604_800)] = 3600
    addresses_per_name: Annotated[int, Field(ge=0)] = 1000
    names_per_endpoint: Count = 100_000
    gc_interval: Seconds = 60.0


class ZombiesSection(yamldoc.Model):
    """Addresses whose lease is over, and which live connections may still use."""

    per_endpoint: Annotated[int, Field(ge=0)] = 10_000
    grace: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 0.0
    unobserved: Seconds = 3600.0


class ConntrackSection(yamldoc.Model):
    """How often the kernel's connections are looked through for what zombies carry."""

    shortest: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] = 30.0
    longest: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] = 300.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.longest < self.shortest:
            raise FaultError(f"less than `shortest`, which is {self.shortest:g} s", "longest")
        return self


class StateSection(yamldoc.Model):
    """What outlives the process."""

    directory: FilePath | None = Path("/var/lib/dnsproxy")
    preload: FilePath | None = None


class AdminSection(yamldoc.Model):
    """Where the command line, and whoever else is allowed to, asks the running proxy."""

    socket: FilePath | None = Path("/run/dnsproxy/admin.sock")
    listen: Loopback | None = None
    token_file: FilePath | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.listen is not None and self.token_file is None:
            raise FaultError(
                "every user of this host can reach a port: set `token_file` to a file with a secret", "listen"
            )
        return self


class MetricsSection(yamldoc.Model):
    """Where Prometheus and health checks ask."""

    listen: Loopback | None = None
    per_endpoint: bool = False


class WarmUpSection(yamldoc.Model):
    """Looking names up before anybody asks."""

    interval: Annotated[float, Field(ge=5, le=86_400, allow_inf_nan=False)] | None = None


class DynDnsSection(yamldoc.Model):
    """Who is told when a DynDNS record has changed or is halted."""

    hook_command: list[str] = Field(default_factory=list)
    hook_url: str | None = None

    @field_validator("hook_url")
    @classmethod
    def _fetchable(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("https://", "http://")):
            raise ValueError(f"{url!r} is no URL such as https://hooks.example/changed")
        return url


class SetsSection(yamldoc.Model):
    """The nftables sets, and how long an answer waits for them."""

    backend: Literal["nft", "show", "auto"] = "nft"
    table: Table = TableName("inet", "dnsproxy")
    hold: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.1
    on_timeout: Literal["servfail", "release"] = "servfail"
    repair_interval: Seconds = 60.0


class LimitsSection(yamldoc.Model):
    """Bounds on what clients can make us hold."""

    queries: Count = 16_384
    queries_per_client: Count = 8_192
    tcp_connections: Count = 1024
    tcp_connections_per_client: Count = 64
    tcp_idle: Seconds = 30.0


class EventsSection(yamldoc.Model):
    """The query log as JSON lines."""

    file: FilePath | None = None
    rate: Annotated[int, Field(ge=1, le=1_000_000)] = 1000


class LogSection(yamldoc.Model):
    """The daemon's own log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = "auto"


class Config(yamldoc.Model):
    """All settings. `problem` says where in the text one of them stands."""

    listen: list[Listener] = Field(
        default_factory=lambda: [SocketAddress("127.0.0.1", DNS_PORT), SocketAddress("::1", DNS_PORT)],
        min_length=1,
    )
    upstream: UpstreamSection = UpstreamSection()
    policy: PolicySection = PolicySection()
    cache: CacheSection = CacheSection()
    zombies: ZombiesSection = ZombiesSection()
    conntrack: ConntrackSection = ConntrackSection()
    sets: SetsSection = SetsSection()
    limits: LimitsSection = LimitsSection()
    state: StateSection = StateSection()
    warm_up: WarmUpSection = WarmUpSection()
    dyndns: DynDnsSection = DynDnsSection()
    admin: AdminSection = AdminSection()
    metrics: MetricsSection = MetricsSection()
    events: EventsSection = EventsSection()
    log: LogSection = LogSection()

    _document: yamldoc.Document | None = PrivateAttr(default=None)

    @field_validator("listen")
    @classmethod
    def _once(cls, listen: list[SocketAddress]) -> list[SocketAddress]:
        if twice := [str(address) for address in set(listen) if listen.count(address) > 1]:
            raise ValueError(f"{', '.join(sorted(twice))} stands here twice; each address and port once")
        return listen

    def problem(self, path: yamldoc.Path, message: str) -> Problem:
        """Return a fault of the setting at `path`, such as `("upstream", "servers", 0)`."""
        if self._document is None:
            return Problem("the defaults", 0, 0, yamldoc.path_text(path), message)
        return self._document.problem(path, message)


def read(text: str, file: str) -> Config:
    """Return the settings in `text`, with relative paths taken from the folder of `file`.

    An empty text means all defaults. DocumentError names every fault.
    """
    documents = yamldoc.parse(text, file)
    if len(documents) > 1:
        raise DocumentError([documents[1].problem((), "a second document; settings are one document")])
    config = yamldoc.check(documents[0], Config) if documents else Config()
    config = _placed(config, Path(file).parent)
    config._document = documents[0] if documents else None  # noqa: SLF001 - this function is its constructor
    return config


def _placed(config: Config, folder: Path) -> Config:
    """Return the settings with every relative path taken from `folder`."""
    sections = {name: getattr(config, name) for name in Config.model_fields}
    return config.model_copy(
        update={
            name: section.model_copy(update=_placed_paths(section, folder))
            for name, section in sections.items()
            if isinstance(section, yamldoc.Model)
        }
    )


def _placed_paths(section: yamldoc.Model, folder: Path) -> dict[str, Path]:
    values = ((key, getattr(section, key)) for key in type(section).model_fields)
    return {key: folder / value for key, value in values if isinstance(value, Path) and value != STDOUT}


def loops(
    listen: Iterable[SocketAddress], servers: Iterable[SocketAddress], local: Collection[bytes]
) -> list[SocketAddress]:
    """Return those of `servers` that are ourselves: a listener of ours takes what is sent there.

    `local` are the packed addresses of this host, which a wildcard listener stands for: 0.0.0.0 for those
    of IPv4, :: for those of IPv6 alone, since our sockets of IPv6 take nothing else (IPV6_V6ONLY).
    """
    taken = list(listen)
    return [server for server in servers if any(_takes(listener, server, local) for listener in taken)]


def _takes(listener: SocketAddress, server: SocketAddress, local: Collection[bytes]) -> bool:
    if not listener.is_wildcard or listener.port != server.port:
        return listener == server
    address = ip_address(server.address)
    same_family = address.version == ip_address(listener.address).version
    return same_family and (address.packed in local or address.is_loopback)


def check_loops(config: Config, local: Collection[bytes]) -> None:
    """Raise DocumentError for every upstream in the settings that is one of our own listeners."""
    problems = [
        config.problem(path, f"{server} is this proxy itself (see `listen`); name the server behind it")
        for path, server in _upstreams(config)
        if loops(config.listen, [server], local)
    ]
    if problems:
        raise DocumentError(problems)


def _upstreams(config: Config) -> Iterator[tuple[yamldoc.Path, SocketAddress]]:
    for index, server in enumerate(config.upstream.servers):
        yield ("upstream", "servers", index), server
    for suffix, servers in config.upstream.routes.items():
        for index, server in enumerate(servers):
            yield ("upstream", "routes", suffix, index), server


def upstreams_of(
    config: Config, text: str, file: str, local: Collection[bytes]
) -> tuple[list[SocketAddress], list[Problem]]:
    """Return the servers of the resolv.conf `file` and what was left out, as `resolv_conf` does.

    DocumentError if nobody is left to ask: no server in the text, and no route in the settings.
    """
    servers, notes = resolv_conf(text, file, config.listen, local)
    if not servers and not config.upstream.routes:
        message = f"{file} names no server but ourselves; set `upstream.servers` to the servers to ask"
        raise DocumentError([config.problem(("upstream", "resolv_conf"), message), *notes])
    return servers, notes


def resolv_conf(
    text: str, file: str, listen: Iterable[SocketAddress], local: Collection[bytes]
) -> tuple[list[SocketAddress], list[Problem]]:
    """Return the servers of a resolv.conf (resolver(5)) in their order, and what was left out and why.

    All `nameserver` lines count, though the C library stops at three. Options and search lists are the
    business of the client that asks us. A line that names ourselves is left out: on a host whose programs
    were pointed at us, it is meant for them.
    """
    servers: list[SocketAddress] = []
    notes: list[Problem] = []
    listeners = list(listen)
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0] != "nameserver":
            continue
        server = _nameserver(words)
        if server is None:
            notes.append(
                Problem(file, number, 1, "", f"left out: {line.strip()!r} names no address we can ask")
            )
        elif loops(listeners, [server], local):
            notes.append(Problem(file, number, 1, "", f"left out: {server} is this proxy itself"))
        elif server not in servers:
            servers.append(server)
    return servers, notes


def _nameserver(words: list[str]) -> SocketAddress | None:
    try:
        return _server(f"[{words[1]}]")
    except (ValueError, IndexError):
        return None
