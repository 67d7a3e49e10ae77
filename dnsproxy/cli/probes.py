"""What `dnsproxy doctor` looks at: sockets, /proc, other network namespaces, the `nft` command."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dnslib import EDNS0, QTYPE, RCODE, DNSError, DNSQuestion, DNSRecord

from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")

CAPABILITIES = {"CAP_NET_BIND_SERVICE": 10, "CAP_NET_ADMIN": 12}  # linux/capability.h
PROTOCOLS = {False: "UDP", True: "TCP"}
RESOLV_CONF = Path("/etc/resolv.conf")
PATIENCE = 2.0  # seconds for one answer; a resolver that looks everything up takes one

_CLONE_NEWNET = 0x40000000
_SO_MARK = getattr(socket, "SO_MARK", 36)
_EDE = 15  # the EDNS option (RFC 8914)
_OURS = {15, 18}  # extended errors Blocked and Prohibited, with which we refuse
_LISTEN = "0A"  # the state in /proc/net/tcp
_SET = re.compile(r"@[A-Za-z][-\w./]*").fullmatch


class Client(NamedTuple):
    """Somebody whose network namespace is looked at from inside."""

    title: str
    net: Path
    resolv_conf: Path


def client(netns: str | None, pid: int | None) -> Client | None:
    """Return the client that options name; DnsproxyError if it is not there."""
    if netns is not None:
        own = Path("/etc/netns", netns, "resolv.conf")  # what `ip netns exec` shows in place of the host's
        found = Client(f"namespace {netns}", Path("/run/netns", netns),
                       own if own.exists() else RESOLV_CONF)  # fmt: skip
    elif pid is not None:
        found = Client(
            f"process {pid}", Path(f"/proc/{pid}/ns/net"), Path(f"/proc/{pid}/root/etc/resolv.conf")
        )
    else:
        return None
    if not found.net.exists():
        raise DnsproxyError(f"there is no {found.title}: `ip netns list` and `ps` show what there is")
    return found


def inside(net: Path | None, function: Callable[[], T]) -> T:
    """Call a function in a network namespace: a socket made there stays there, whoever uses it."""
    if net is None:
        return function()
    with ThreadPoolExecutor(max_workers=1) as thread:  # a namespace belongs to a thread, which then ends
        return thread.submit(_entered, net, function).result()


def _entered(net: Path, function: Callable[[], T]) -> T:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12
    with net.open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise DnsproxyError(f"{net} cannot be entered: {os.strerror(ctypes.get_errno())}; it takes root")
    return function()


# -- asking a server


class Reply(NamedTuple):
    """What came back: the code as text, whether it is a refusal of this proxy, and after how long."""

    rcode: str
    ours: bool
    seconds: float


def ask(
    server: tuple[str, int], name: str, *, stream: bool, mark: int = 0, net: Path | None = None
) -> Reply | str:
    """Ask a server for a name; return its reply, or in words why there is none."""
    query = DNSRecord(q=DNSQuestion(name, QTYPE.NS), ar=[EDNS0(udp_len=1232)])
    query.header.id = int.from_bytes(os.urandom(2))
    began = time.monotonic()
    try:
        wire = _asked(server, query.pack(), stream=stream, mark=mark, net=net)
        reply = DNSRecord.parse(wire)
    except TimeoutError:
        return f"no answer within {PATIENCE:g} s"
    except OSError as error:
        return error.strerror or str(error)
    except DNSError:
        return "what came back is no DNS message"
    ours = any(option.code == _EDE and int.from_bytes(option.data[:2]) in _OURS for option in _options(reply))
    return Reply(str(RCODE.get(reply.header.rcode)), ours, time.monotonic() - began)


def _options(reply: Any) -> Iterator[Any]:  # noqa: ANN401 - dnslib has no types
    for record in reply.ar:
        if record.rtype == QTYPE.OPT:
            yield from record.rdata


def _asked(server: tuple[str, int], query: bytes, *, stream: bool, mark: int, net: Path | None) -> bytes:
    kind = socket.SOCK_STREAM if stream else socket.SOCK_DGRAM
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with inside(net, partial(socket.socket, family, kind)) as sock:
        sock.settimeout(PATIENCE)
        if mark:
            _mark(sock, mark)
        sock.connect(server)
        if not stream:
            sock.send(query)
            return _matching(sock, query[:2])
        sock.sendall(len(query).to_bytes(2) + query)
        return _exactly(sock, int.from_bytes(_exactly(sock, 2)))


def _mark(sock: socket.socket, mark: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MARK, mark)
    except PermissionError:
        return  # then a firewall that lets only marked queries out will say so by silence


def _matching(sock: socket.socket, identity: bytes) -> bytes:
    while True:
        wire = sock.recv(65_535)
        if wire[:2] == identity:
            return wire


def _exactly(sock: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        part = sock.recv(size - len(read))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed without an answer")
        read += part
    return read


# -- who holds a port


def bind_error(address: str, port: int, *, stream: bool) -> OSError | None:
    """Return what happens to a socket that is bound there and closed at once."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM) as sock:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if stream:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
    except OSError as error:
        return error
    return None


def holders(port: int, *, stream: bool) -> dict[int, str]:
    """Return the processes (ID -> command) that hold a port, as far as /proc shows them to this user."""
    inodes = {f"socket:[{inode}]" for table in ("", "6") for inode in _inodes(port, stream, table)}
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        if inodes and _has(process, inodes):
            found[int(process.name)] = _line(process / "comm")
    return found


def _inodes(port: int, stream: bool, table: str) -> Iterator[str]:
    try:
        lines = Path(f"/proc/net/{'tcp' if stream else 'udp'}{table}").read_text().splitlines()[1:]
    except OSError:
        return
    for words in map(str.split, lines):
        if int(words[1].rpartition(":")[2], 16) == port and (not stream or words[3] == _LISTEN):
            yield words[9]


def _has(process: Path, inodes: set[str]) -> bool:
    try:
        return any(str(entry.readlink()) in inodes for entry in (process / "fd").iterdir())
    except OSError:  # it has gone, or is not ours to see
        return False


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "?"


# -- rights


def capabilities(pid: int | str = "self") -> set[str] | None:
    """Return which of the rights that matter here a process has; None if that cannot be read."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    bits = int(status.partition("CapEff:")[2].split()[0], 16)
    return {name for name, bit in CAPABILITIES.items() if bits >> bit & 1}


def first_free_port() -> int:
    """Return the lowest port that may be bound without a right."""
    found = _line(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start"))
    return int(found) if found.isdigit() else 1024


# -- nft


def nft(*arguments: str, stdin: str = "") -> str:
    """Run `nft` and return what it prints; DnsproxyError with its first complaint."""
    tool = shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if tool is None:
        raise DnsproxyError("the command nft is not installed")
    done = subprocess.run([tool, *arguments], input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DnsproxyError(done.stderr.strip().partition("\n")[0] or "nft failed")
    return done.stdout


def rules() -> list[dict[str, Any]]:
    """Return all rules of this namespace, as nft describes them in JSON."""
    items = json.loads(nft("-j", "list", "ruleset"))["nftables"]
    return [item["rule"] for item in items if "rule" in item]


def named_sets(found: Iterable[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return (family, table, set) for every set that a rule names."""
    return {(rule["family"], rule["table"], name[1:]) for rule in found for name in _names(rule["expr"])}


def _names(value: object) -> Iterator[str]:
    if isinstance(value, str) and _SET(value):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _names(inner)


def redirects(found: Iterable[dict[str, Any]]) -> bool:
    """Tell whether some rule redirects to this host."""
    return any("redirect" in part for rule in found for part in rule["expr"] if isinstance(part, dict))
