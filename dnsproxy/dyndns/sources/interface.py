"""The addresses of one of this host's interfaces, from the kernel by netlink.

For a host that has its public address itself. Temporary addresses (RFC 8981) change daily and deprecated
ones die, so neither is taken, nor any that the kernel is not sure of yet. Of several that are left, one that
a person or DHCPv6 gave for good comes first, then the longest prefix, then the youngest: after a router has
lost its prefix without a word, the old one stays preferred for days.

pyroute2's sockets do not run on a uvloop loop, so a reading has a thread and a plain loop of its own.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyroute2 import AsyncIPRoute
from pyroute2.netlink import NetlinkError

from dnsproxy.addresses import from_text, is_public
from dnsproxy.dyndns.sources import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

FOREVER: Final = 0xFFFFFFFF  # a lifetime in IFA_CACHEINFO
# IFA_F_* of linux/if_addr.h. The bit of a temporary IPv6 address means "secondary" for an IPv4 one.
TEMPORARY: Final = 0x01
UNSURE: Final = 0x04 | 0x08 | 0x40  # optimistic, failed as a duplicate, tentative
DEPRECATED: Final = 0x20
_FOREIGN: Final = (b"\x7f", bytes((169, 254)), b"\xfe\x80", bytes(15) + b"\x01")  # loopback, link-local


class Entry(NamedTuple):
    """One address of an interface; `preferred` in seconds, `created` in ticks of the kernel."""

    address: bytes
    bits: int
    flags: int
    preferred: int
    created: int


async def ask(name: str, length: int) -> bytes:
    """Return the packed address of an interface that is best published."""
    loop = asyncio.get_running_loop()
    with _Thread() as thread:
        entries = await loop.run_in_executor(thread, _read, name)
    best = choose(entries, length)
    if best is None:
        raise SourceError("has no address of this family that lasts")
    return best


class _Thread(ThreadPoolExecutor):
    """A thread for one reading, for which nobody waits at the end."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="interface")

    def __exit__(self, *_: object) -> None:
        self.shutdown(wait=False)


def choose(entries: Iterable[Entry], length: int) -> bytes | None:
    """Return the address that is best published; one that is not public only if there is no other."""
    usable = [entry for entry in entries if len(entry.address) == length and _lasts(entry)]
    return max(usable, key=_rank).address if usable else None


def _lasts(entry: Entry) -> bool:
    passing = UNSURE | DEPRECATED | (TEMPORARY if len(entry.address) == 16 else 0)
    return not entry.flags & passing and entry.preferred > 0 and not entry.address.startswith(_FOREIGN)


def _rank(entry: Entry) -> tuple[bool, bool, bool, int, int, bytes]:
    secondary = len(entry.address) == 4 and bool(entry.flags & TEMPORARY)
    lasting = entry.preferred == FOREVER
    return is_public(entry.address), not secondary, lasting, entry.bits, entry.created, entry.address


def _read(name: str) -> list[Entry]:
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(_entries(name))


async def _entries(name: str) -> list[Entry]:
    try:
        index = socket.if_nametoindex(name)
        async with AsyncIPRoute() as route:
            messages = [message async for message in await route.get_addr()]
    except NetlinkError as error:
        raise SourceError(f"its addresses cannot be read: {error}") from None
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}") from None
    return [_entry(message) for message in messages if message["index"] == index]


def _entry(message: Any) -> Entry:  # noqa: ANN401 - pyroute2 has no types
    life = message.get_attr("IFA_CACHEINFO") or {}
    # our own end of a point-to-point link is IFA_LOCAL
    text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
    flags = message.get_attr("IFA_FLAGS")
    return Entry(
        from_text(text),
        message["prefixlen"],
        message["flags"] if flags is None else flags,
        life.get("ifa_preferred", FOREVER),
        life.get("cstamp", 0),
    )
