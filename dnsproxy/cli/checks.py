"""The checks of `dnsproxy doctor`, one after the other: each yields what it found, and what to do about it.

A check that cannot be made without something (settings that are faulty, a right, a tool) says so as a
warning; what is found wrong is a failure.
"""

from __future__ import annotations

import errno
import os
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dnsproxy import addresses
from dnsproxy.cli import check, inputs, probes
from dnsproxy.cli.options import DEFAULT_CONFIG
from dnsproxy.cli.output import counted
from dnsproxy.errors import DnsproxyError, DocumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from dnsproxy.cli.client import Admin
    from dnsproxy.config import Config, SocketAddress
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.errors import Problem
    from dnsproxy.rules.policy import Policy

OK, WARN, FAIL = "ok", "warn", "fail"
DNS_PORT = 53
STUBS = {"127.0.0.53": "the stub of systemd-resolved", "127.0.0.11": "Docker's resolver"}


class Finding(NamedTuple):
    """What a check found, and where it is not well: what to do."""

    result: str
    message: str
    hint: str = ""


@dataclass
class Case:
    """What is looked at, filled by the first checks for those after them."""

    config: Path
    admin: Callable[[], Admin]
    client: probes.Client | None = None
    settings: Config | None = None
    endpoints: EndpointTable | None = None
    policy: Policy | None = None
    status: dict[str, Any] | None = None
    rules: list[dict[str, Any]] = field(default_factory=list)


def settings(case: Case) -> Iterator[Finding]:
    """Check settings and policies."""
    try:
        case.settings = inputs.settings(case.config)
        faults, _ = check.checked_settings(case.settings)
        texts = inputs.texts([case.settings.policy.directory])
        case.endpoints, case.policy = inputs.load(texts, case.settings)
    except DocumentError as error:
        yield from map(_fault, error.problems)
        return
    yield from map(_fault, faults)
    if not faults:
        files, there = len(texts), len(case.endpoints.endpoints)
        yield Finding(
            OK, f"{counted(files, 'file', 'files')} of policies for {counted(there, 'endpoint', 'endpoints')}"
        )


def _fault(problem: Problem) -> Finding:
    return Finding(FAIL, str(problem), "mend it and see `dnsproxy check`")


def daemon(case: Case) -> Iterator[Finding]:
    """See whether somebody answers at the admin socket, and enforces."""
    try:
        admin = case.admin()
        case.status = admin.get("/v1/status")
    except DnsproxyError as error:
        yield Finding(FAIL, str(error), "see whether it runs: `systemctl status dnsproxy`, or start it")
        return
    found = case.status
    if found["state"] == "enforcing":
        yield Finding(OK, f"process {found['pid']} answers at {admin.path} and enforces")
    elif found["state"] == "shown, not enforced":
        hint = "to enforce them, set `sets: {backend: nft}` and give it CAP_NET_ADMIN"
        yield Finding(
            WARN, f"process {found['pid']} answers at {admin.path}; sets are shown, not enforced", hint
        )
    else:
        yield Finding(
            FAIL, f"process {found['pid']} is {found['state']}: {found['problem'] or 'see its log'}"
        )
    for kind, fault in found["faults"].items():
        yield Finding(FAIL, f"{kind} are not those in force: {fault}", "mend them; they are read at once")


def rights(case: Case) -> Iterator[Finding]:
    """See whether the daemon, or else this user, may change sets and bind its ports."""
    pid = case.status["pid"] if case.status else "self"
    has = probes.capabilities(pid)
    who = f"process {pid}" if case.status else f"user {os.geteuid()}"
    if has is None:
        yield Finding(WARN, f"the rights of {who} cannot be read", "run the doctor as root")
        return
    for right in probes.CAPABILITIES:
        if right in has or not _needed(case, right):
            continue
        hint = (
            f"grant it: `AmbientCapabilities={right}` in the unit, --cap-add for a container, or run as root"
        )
        yield Finding(FAIL if case.status else WARN, f"{who} lacks {right}", hint)
    if all(right in has or not _needed(case, right) for right in probes.CAPABILITIES):
        yield Finding(OK, f"{who} may change sets and bind its ports")


def _needed(case: Case, right: str) -> bool:
    if case.settings is None:
        return True
    if right == "CAP_NET_ADMIN":
        return case.settings.sets.backend == "nft"
    return any(listener.port < probes.first_free_port() for listener in case.settings.listen)


def ports(case: Case) -> Iterator[Finding]:
    """See whether the addresses to listen on are free, or held by the daemon."""
    if case.settings is None:
        return
    wanted = [
        (f"{protocol} {listener}", listener, stream)
        for listener in case.settings.listen
        for stream, protocol in probes.PROTOCOLS.items()
    ]
    others = {"admin": case.settings.admin.listen, "metrics": case.settings.metrics.listen}
    wanted += [
        (f"TCP {listener} ({key}.listen)", listener, True) for key, listener in others.items() if listener
    ]
    for where, listener, stream in wanted:
        error = probes.bind_error(*listener, stream=stream)
        yield _port(case, where, error, listener, stream=stream)


def _port(case: Case, where: str, error: OSError | None, listener: SocketAddress, *, stream: bool) -> Finding:
    if error is None and case.status:
        return Finding(
            FAIL, f"{where} is free although a daemon runs", "restart it, to listen as the settings say"
        )
    if error is None:
        return Finding(OK, f"{where} is free")
    if error.errno == errno.EADDRINUSE:
        return _taken(case, where, probes.holders(listener.port, stream=stream))
    if error.errno in (errno.EACCES, errno.EPERM):
        return Finding(WARN, f"{where} may not be bound by user {os.geteuid()}", "run the doctor as root")
    hint = "`ip address` lists this host's addresses; see `listen` in the settings"
    return Finding(FAIL, f"{where} cannot be bound: {error.strerror}", hint)


def _taken(case: Case, where: str, held: Mapping[int, str]) -> Finding:
    who = ", ".join(f"{command} ({pid})" for pid, command in held.items())
    if case.status and (case.status["pid"] in held or not held):
        return Finding(OK, f"{where} is held by the daemon")
    if not held:
        return Finding(
            WARN, f"{where} is taken by a process that this user may not see", "run the doctor as root"
        )
    return Finding(FAIL, f"{where} is taken by {who}", "stop that one, or listen on another address or port")


def kernel(_: Case) -> Iterator[Finding]:
    """See whether sets of our shapes with comments could be made."""
    text = """
        table inet dnsproxy-doctor {
            set plain { type ipv6_addr; elements = { 2001:db8::1 comment "x.test." } }
            set ports { type ipv4_addr . inet_proto . inet_service; elements = { 192.0.2.1 . tcp . 53 } }
        }"""
    try:
        probes.nft("--check", "--file", "-", stdin=text)
    except DnsproxyError as error:
        if os.geteuid():
            yield Finding(WARN, f"nftables cannot be tried: {error}", "run the doctor as root")
        else:
            yield Finding(FAIL, f"nftables does not do what is needed: {error}",
                          "install nftables, and a kernel from 5.6 on with nf_tables")  # fmt: skip
    else:
        yield Finding(OK, "nftables has sets of addresses and ports, with comments")


def conntrack(case: Case) -> Iterator[Finding]:
    """See whether the kernel's connections can be read, which keeps addresses under live ones."""
    if case.status and case.status["conntrack"]["observing"]:
        yield Finding(OK, "the daemon reads the kernel's connections")
        return
    import asyncio  # noqa: PLC0415

    from dnsproxy.namemanager.conntrack import read  # noqa: PLC0415

    hint = "without them an address is kept for `zombies.unobserved` seconds after its lease, and no longer"
    try:
        reading = asyncio.run(read(lambda _: None))
    except DnsproxyError as error:
        yield Finding(WARN, str(error), hint)
        return
    for octets in sorted(reading.untracked):
        yield Finding(
            WARN, f"no rule makes the kernel track connections of IPv{4 if octets == 4 else 6}", hint
        )
    if not reading.untracked:
        yield Finding(OK, f"the kernel's connections can be read; there are {reading.entries}")


def template(case: Case) -> Iterator[Finding]:
    """See whether rules name the sets of every endpoint that a policy restricts."""
    if case.settings is None or case.endpoints is None or case.policy is None:
        return
    try:
        case.rules = probes.rules()
    except DnsproxyError as error:
        yield Finding(WARN, f"rules cannot be listed: {error}", "run the doctor as root, with nft installed")
        return
    named = probes.named_sets(case.rules)
    restricted = [each for each in case.endpoints.endpoints if case.policy.restricts(each)]
    free = [each.key for each in restricted if not _named(each.key, case.settings, named)]
    for key in free:
        which = "output" if key == case.endpoints.host.key else "forward"
        hint = f"`dnsproxy template {which}{_option(case)} | nft -f -` loads such rules"
        yield Finding(
            FAIL, f"no firewall rule names the sets of {key}: nothing restricts its connections", hint
        )
    if not free:
        yield Finding(
            OK, f"firewall rules name the sets of {counted(len(restricted), 'endpoint', 'endpoints')}"
        )


def _option(case: Case) -> str:
    """Return what names the settings on a command line, where these are not the default ones."""
    return "" if case.config == DEFAULT_CONFIG else f" --config {shlex.quote(str(case.config))}"


def _named(endpoint: str, given: Config, named: set[tuple[str, str, str]]) -> bool:
    from dnsproxy.namemanager.elements import VERSIONS, endpoint_set  # noqa: PLC0415

    specs = [endpoint_set(given.sets.table, endpoint, version, ports=ports)
             for version in VERSIONS for ports in (False, True)]  # fmt: skip
    return any((spec.family, spec.table, spec.name) in named for spec in specs)


def resolver(case: Case) -> Iterator[Finding]:
    """See whether the resolv.conf of the client names us."""
    if case.settings is None:
        return
    path = case.client.resolv_conf if case.client else probes.RESOLV_CONF
    whose = case.client.title if case.client else "this host"
    try:
        lines = [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError as error:
        yield Finding(WARN, f"{path} of {whose} cannot be read: {error.strerror}")
        return
    servers = [words[1] for words in lines if words[:1] == ["nameserver"] and len(words) > 1]
    if not servers:
        yield Finding(WARN, f"{path} of {whose} names no server, so 127.0.0.1 is asked")
    for server in servers:
        yield _server(case, f"{path} of {whose}", server)


def _server(case: Case, where: str, server: str) -> Finding:
    if _is_us(case, server):
        return Finding(OK, f"{where} names {server}, which is this proxy")
    if probes.redirects(case.rules):
        return Finding(OK, f"{where} names {server}; a rule redirects DNS to this host")
    known = f" ({STUBS[server]})" if server in STUBS else ""
    hint = f"{_our_address(case)}, or load `dnsproxy template redirect`"
    return Finding(
        FAIL if case.client else WARN, f"{where} names {server}{known}, which is not this proxy", hint
    )


def _is_us(case: Case, server: str) -> bool:
    """Tell whether a nameserver line leads to a listener of ours; loopback of elsewhere does not."""
    from dnsproxy import config, host  # noqa: PLC0415

    try:
        address = addresses.unmapped(addresses.from_text(server.partition("%")[0]))
    except ValueError:
        return False
    asked = config.SocketAddress(addresses.to_text(address), DNS_PORT)
    if case.client and (asked.address.startswith("127.") or asked.address == "::1"):
        return False
    return bool(case.settings and config.loops(case.settings.listen, [asked], host.read()))


def _our_address(case: Case) -> str:
    there = [each for each in case.settings.listen if each.port == DNS_PORT] if case.settings else []
    if not there:
        return f"listen on port {DNS_PORT}, the only one that a resolv.conf knows"
    found = next((each.address for each in there if not each.is_wildcard), "ADDRESS-OF-THIS-HOST")
    return f"write `nameserver {found}` there"


def upstream(case: Case) -> Iterator[Finding]:
    """Ask every upstream server, over UDP and TCP."""
    if case.settings is None:
        return
    for server in _upstreams(case.settings):
        for stream, protocol in probes.PROTOCOLS.items():
            reply = probes.ask(server, ".", stream=stream, mark=case.settings.upstream.mark)
            yield _answered(f"{server} over {protocol}", reply, stream=stream)


def _answered(where: str, reply: probes.Reply | str, *, stream: bool) -> Finding:
    if isinstance(reply, str):
        hint = (
            "long answers need TCP; a firewall on the way?"
            if stream
            else "does it run, and is there a route to it?"
        )
        return Finding(FAIL, f"upstream {where}: {reply}", hint)
    if reply.ours:
        return Finding(FAIL, f"upstream {where} is this proxy itself", "name the server behind it")
    if reply.rcode not in ("NOERROR", "NXDOMAIN"):
        return Finding(
            WARN,
            f"upstream {where} answers {reply.rcode}",
            "it may not serve this host: see its access rules",
        )
    return Finding(OK, f"upstream {where} answers in {reply.seconds * 1000:.0f} ms")


def _upstreams(given: Config) -> list[SocketAddress]:
    from dnsproxy import files  # noqa: PLC0415
    from dnsproxy.config import upstreams_of  # noqa: PLC0415

    if given.upstream.zone is not None:
        return []
    path, servers = given.upstream.resolv_conf, list(given.upstream.servers)
    if not servers and path is not None:
        servers, _ = upstreams_of(given, files.read_text(path), str(path), inputs.local_addresses(given))
    routed = (server for group in given.upstream.routes.values() for server in group)
    return list(dict.fromkeys([*servers, *routed]))


def bypass(case: Case) -> Iterator[Finding]:
    """See whether the client can ask the upstream servers itself."""
    if case.settings is None or case.endpoints is None or case.policy is None:
        return
    if case.client is None and not case.policy.restricts(case.endpoints.host):
        hint = "name a client (--netns, --pid) to see whether it can go around the proxy"
        yield Finding(OK, "this host itself is not restricted", hint)
        return
    whose = case.client.title if case.client else "this host"
    net = case.client.net if case.client else None
    name = f"dnsproxy-doctor-{os.urandom(4).hex()}.invalid"
    for server in _upstreams(case.settings):
        for stream, protocol in probes.PROTOCOLS.items():
            reply = probes.ask(server, name, stream=stream, net=net)
            yield _bypassed(f"{server} over {protocol}", whose, reply)


def _bypassed(where: str, whose: str, reply: probes.Reply | str) -> Finding:
    if isinstance(reply, str):
        return Finding(OK, f"{whose} cannot ask {where}: {reply}")
    if reply.ours:
        return Finding(OK, f"{whose} is answered by this proxy when it asks {where}")
    hint = "load `dnsproxy template forward` (or output, for this host), or redirect"
    return Finding(FAIL, f"{whose} can ask {where} itself, around the proxy", hint)


CHECKS: dict[str, Callable[[Case], Iterator[Finding]]] = {
    "settings": settings,
    "daemon": daemon,
    "rights": rights,
    "ports": ports,
    "kernel": kernel,
    "conntrack": conntrack,
    "template": template,
    "resolver": resolver,
    "upstream": upstream,
    "bypass": bypass,
}


def examine(case: Case) -> Iterator[tuple[str, Finding]]:
    """Make all checks, in an order in which each has what it needs; yield their names and findings."""
    for name, make in CHECKS.items():
        try:
            for found in make(case):
                yield name, found
        except DnsproxyError as error:
            yield name, Finding(FAIL, str(error))
        if name == "settings" and case.settings is None:
            yield name, Finding(WARN, "what depends on the settings is left out below")
