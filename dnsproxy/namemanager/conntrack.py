"""Which addresses carry live connections: one pass over the kernel's table of connections (conntrack).

A netlink socket of our own, since a general decoder takes 90 times as long (docs/design/netlink.md). Layout
and numbers are those of linux/netfilter/nfnetlink.h and nfnetlink_conntrack.h. A request is a header, four
octets (family, version, resource ID) and attributes; without a family it lists the connections of all. Each
is a message of its own:

    CTA_TUPLE_ORIG, CTA_TUPLE_REPLY    the first packet's addresses and ports, and those of the answer to it
      CTA_TUPLE_IP                     source (1: v4, 3: v6) and destination (2: v4, 4: v6)
    CTA_PROTOINFO                      only where the protocol has a state
      CTA_PROTOINFO_TCP                its state (1)
    CTA_ID, CTA_ZONE                   what tells two connections with the same tuple apart

*Whose connection.* The source of the original tuple is who opened it, before our host's masquerading. Who
only accepted one is not asked: else a server on the internet could keep its address in a set by connecting
to us. *To where.* The destination of the original tuple is what the client asked for, the source of the reply
is where NAT sent it. Rules see one or the other, depending on their hook, so both count.

*What is live.* Every entry of whatever protocol, except for TCP in TIME_WAIT and CLOSE. Cilium counts these
too. But there both sides have said that nothing more comes, and the entry lingers for up to two minutes,
while an address is to go two passes after its last connection has ended. A connection that is only being
opened (SYN_SENT) counts: its first packet was let through.

*When silence proves something.* The kernel tracks packets of a family only where a rule in this network
namespace needs it, and an empty table looks the same either way. So each pass first sends itself one
datagram over loopback in both families: a family of which the table then has nothing is not tracked.

*Not in anybody's way.* A pass runs in a thread beside the event loop, which cannot run while we compute: the
interpreter would make it wait for 5 ms each time. So we read small datagrams and sleep after each one.
Reading a socket alone is no such pause: it frees the interpreter for some microseconds, and mostly we are
the first to take it again.

*Changes during a pass* are seen or not. The kernel walks its table by hash and skips nothing that stays; it
may show an entry twice. Where it knows that it skipped something it marks the dump as interrupted, and we
repeat it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from dnsproxy.addresses import unmapped
from dnsproxy.errors import KernelError, RightsError
from dnsproxy.namemanager.netlink import ACK, DONE, DUMP, ERROR, REQUEST, attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    Owner: TypeAlias = Callable[[bytes], str | None]

_T = TypeVar("_T")

DATAGRAM: Final = 16_384  # octets, some sixty connections; the kernel fits its datagrams to what is asked for
PAUSE: Final = 0.0001  # seconds after each datagram
DUMPS: Final = 3  # attempts to read what was interrupted

_NETLINK_NETFILTER, _SOL_NETLINK, _NETLINK_CAP_ACK = 12, 270, 10  # linux/netlink.h
_INTERRUPTED = 0x10  # NLM_F_DUMP_INTR
_NEW, _GET, _DELETE = 0x100, 0x101, 0x102  # subsystem NFNL_SUBSYS_CTNETLINK (1), IPCTNL_MSG_CT_*
_ORIGINAL, _REPLY, _PROTOCOL, _ID, _ZONE = 1, 2, 4, 12, 18
_TCP_CLOSED = (b"\x07", b"\x08")  # TIME_WAIT, CLOSE

_HEADER = Struct("=IHHIIBBH")
_HEAD = Struct("=IHH")
_ATTRIBUTE = Struct("=HH")
_NUMBER = Struct("=i")
_FAMILIES = {0: socket.AF_UNSPEC, 4: socket.AF_INET, 16: socket.AF_INET6}  # by the octets of an address

_NO_RIGHTS = (
    "reading the kernel's connections needs CAP_NET_ADMIN: run as root, or under systemd with"
    " AmbientCapabilities=CAP_NET_ADMIN"
)
_NO_CONNTRACK = (
    "this kernel cannot list its connections: load the module with `modprobe nf_conntrack_netlink`,"
    " or use a kernel that has it (CONFIG_NF_CT_NETLINK)"
)
_MALFORMED = "the kernel's list of connections is not laid out as expected, so nothing of it can be trusted"
_LOST = "the kernel could not hand over its whole list of connections"


class Reading(NamedTuple):
    """What one pass saw.

    `live` maps an endpoint's key to the destinations of its live connections, as packed addresses; `entries`
    counts all connections. `whole`: nothing was skipped. `untracked` are the octets (4, 16) of the addresses
    of families that this host has, but whose packets are not tracked.
    """

    live: dict[str, set[bytes]]
    entries: int
    whole: bool
    untracked: frozenset[int]


class Entry(NamedTuple):
    """One connection: to where it was opened, where NAT sent it, and all that the kernel says of it."""

    destination: bytes
    reached: bytes
    body: bytes


async def read(owner: Owner) -> Reading:
    """Pass over all connections of this network namespace.

    `owner` tells the endpoint of a packed address, is called in another thread and once per address. Raises
    RightsError, KernelError.
    """
    return await _in_thread(_read, owner)


async def forget(revoked: Mapping[str, Collection[bytes]], owner: Owner) -> int:
    """Delete the entries of connections from endpoints to addresses that are no longer theirs.

    `revoked` maps an endpoint's key to packed addresses. The next packet of such a connection then counts as
    that of a new one, which rules refuse. Returns how many entries went. Raises RightsError, KernelError.
    """
    return await _in_thread(_forget, revoked, owner)


# --- In the thread ---


async def _in_thread(job: Callable[..., _T], *arguments: object) -> _T:
    """Run a job, which gives up soon when nobody waits for it any more."""
    abandoned = threading.Event()
    try:
        return await asyncio.to_thread(job, *arguments, abandoned)
    finally:
        abandoned.set()


def _read(owner: Owner, abandoned: threading.Event) -> Reading:
    expected = _show_ourselves()
    live: dict[str, set[bytes]] = {}
    for _ in range(DUMPS):
        table = _Pass(owner, abandoned)
        for key, entry in table.owned():
            if not closed(entry.body):
                live.setdefault(key, set()).update((entry.destination, entry.reached))
        if table.whole:
            break
    return Reading(live, table.entries, table.whole, expected - table.octets)


def _forget(revoked: Mapping[str, Collection[bytes]], owner: Owner, abandoned: threading.Event) -> int:
    condemned = [
        entry
        for key, entry in _Pass(owner, abandoned).owned()
        if not {entry.destination, entry.reached}.isdisjoint(revoked.get(key, ()))
    ]
    with _socket() as sock:
        return sum(_delete(sock, entry) for entry in condemned)


class _Pass:
    """One walk over the table: whose the connections are, and what the table was like."""

    def __init__(self, owner: Owner, abandoned: threading.Event) -> None:
        self.entries = 0
        self.octets: set[int] = set()  # of the addresses in the table
        self.whole = True
        self._owner = owner
        self._abandoned = abandoned
        self._keys: dict[bytes, str | None] = {}

    def owned(self) -> Iterator[tuple[str, Entry]]:
        """Yield endpoint's key and connection of all that endpoints opened."""
        for kind, flags, body in _dump(self._abandoned):
            if flags & _INTERRUPTED:
                self.whole = False
            if kind != _NEW:
                continue
            source, destination = addresses(body, _ORIGINAL)
            if source not in self._keys:
                self._keys[source] = self._owner(unmapped(source))
                self.octets.add(len(source))
            self.entries += 1
            key = self._keys[source]
            if key is not None:
                yield key, Entry(unmapped(destination), unmapped(addresses(body, _REPLY)[0]), body)


# --- Bytes. Whatever they are, nothing but KernelError comes of it ---


def messages(datagram: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, flags and body of each message; a body begins after the sixteen octets of the header."""
    at, end = 0, len(datagram)
    while at < end:
        length, kind, flags = _HEAD.unpack_from(datagram, at) if end - at >= 16 else (0, 0, 0)
        if not 16 <= length <= end - at:
            raise KernelError(_MALFORMED)
        yield kind, flags, datagram[at + 16 : at + length]
        at += length + 3 & ~3


def find(value: bytes, kind: int, at: int = 0) -> bytes | None:
    """Return the attribute of a kind in a value, from `at` on; None if it is not there.

    It ends where it has found, for speed: the addresses stand at the beginning.
    """
    end = len(value)
    while at < end:
        length, found = _ATTRIBUTE.unpack_from(value, at) if end - at >= 4 else (0, 0)
        if not 4 <= length <= end - at:
            raise KernelError(_MALFORMED)
        if found & 0x3FFF == kind:  # without the marks "nested" and "network order"
            return value[at + 4 : at + length]
        at += length + 3 & ~3
    return None


def addresses(body: bytes, which: int) -> tuple[bytes, bytes]:
    """Return source and destination of one of the two tuples of a connection."""
    value = find(find(body, which, 4) or b"", 1) or b""
    for first, octets in ((1, 4), (3, 16)):
        source, destination = find(value, first), find(value, first + 1)
        if source and destination and len(source) == len(destination) == octets:
            return source, destination
    raise KernelError(_MALFORMED)


def closed(body: bytes) -> bool:
    """Tell whether TCP has closed a connection."""
    return find(find(find(body, _PROTOCOL, 4) or b"", 1) or b"", 1) in _TCP_CLOSED


def error_number(body: bytes) -> int:
    """Return the errno in the body of an ERROR or DONE, 0 for none."""
    if len(body) < 4:
        raise KernelError(_MALFORMED)
    return -int(_NUMBER.unpack_from(body)[0])


def request(kind: int, flags: int, octets: int, body: bytes = b"") -> bytes:
    """Return a request about the connections of a family, given by the octets of its addresses; 0: of all."""
    return _HEADER.pack(20 + len(body), kind, flags | REQUEST, 0, 0, _FAMILIES[octets], 0, 0) + body


# --- Sockets ---


def _show_ourselves() -> frozenset[int]:
    """Send a datagram to ourselves in each family; return the octets of the addresses of those we have."""
    had = set()
    for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((loopback, 0))
            had.add(len(socket.inet_pton(family, loopback)))
            sock.sendto(b"", sock.getsockname())
    return frozenset(had)


def _socket() -> socket.socket:
    """Return a netlink socket. The kernel has answered a request before `send` returns: no call waits."""
    try:
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_NETFILTER)
    except OSError as error:
        raise KernelError(f"{_NO_CONNTRACK} (netlink socket: {error.strerror})") from None
    made.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)  # an error does not repeat the request
    return made


def _dump(abandoned: threading.Event) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, flags and body of each message of the list of all connections, the last one's too."""
    with _socket() as sock:
        sock.send(request(_GET, DUMP, 0))
        while True:
            for kind, flags, body in messages(_received(sock)):
                if kind in (DONE, ERROR):
                    _check(error_number(body))
                yield kind, flags, body
                if kind == DONE:
                    return
            time.sleep(PAUSE)
            if abandoned.is_set():
                raise KernelError("nobody waits for the list of connections any more")


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(DATAGRAM)
    except OSError as error:  # ENOBUFS: no memory for the next part; EAGAIN: the list breaks off
        raise KernelError(f"{_LOST} ({error.strerror})") from None


def _delete(sock: socket.socket, entry: Entry) -> bool:
    """Delete exactly this connection; tell whether it was still there.

    Never without its tuple: for the kernel that would mean all connections.
    """
    parts = [(kind, find(entry.body, kind, 4)) for kind in (_ORIGINAL, _ZONE, _ID)]
    exactly = b"".join(attribute(kind, value) for kind, value in parts if value)
    sock.send(request(_DELETE, ACK, len(addresses(entry.body, _ORIGINAL)[0]), exactly))
    numbers = [error_number(body) for _, _, body in messages(_received(sock))]
    if numbers not in ([0], [errno.ENOENT]):
        raise KernelError(f"the kernel did not forget a connection ({', '.join(map(os.strerror, numbers))})")
    return numbers == [0]


def _check(number: int) -> None:
    """Raise what the kernel's errno about the list means."""
    if number == errno.EPERM:
        raise RightsError(_NO_RIGHTS)
    if number in (errno.EINVAL, errno.EOPNOTSUPP):  # the subsystem is unknown
        raise KernelError(_NO_CONNTRACK)
    if number:
        raise KernelError(f"{_LOST} ({os.strerror(number)})")
