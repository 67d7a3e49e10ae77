"""Our public addresses: known, or unavailable and why.

Each family is found by itself and at the same time, so that one that fails does not hold up the other.
What a source says is kept for a moment, so that many records that ask together are one question to it.
Who is asked, and what the answers amount to, is decided in `agreement.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dnsproxy.dyndns import agreement
from dnsproxy.dyndns.agreement import Answer, Fault, Poll, Standing
from dnsproxy.dyndns.client import Limits
from dnsproxy.dyndns.outcomes import Found, Search, Wanted
from dnsproxy.dyndns.sources import SourceError, echo, interface, resolvers, router, textfile

if TYPE_CHECKING:
    from collections.abc import Mapping

FRESH: Final = 20.0  # seconds for which an answer serves other records; less than any pause between checks

# By the length of an address. Neighbours in the list are of different operators and, if possible, kinds.
BUILT_IN: Final[Mapping[int, tuple[str, ...]]] = {
    4: (
        "https://api4.ipify.org",
        "dns:opendns",
        "https://checkip.amazonaws.com",
        "dns:cloudflare",
        "https://v4.ident.me",
        "https://ip4.nnev.de",
    ),
    16: (
        "https://api6.ipify.org",
        "dns:opendns",
        "https://v6.ident.me",
        "dns:cloudflare",
        "https://ip6.nnev.de",
        "https://ipv6.icanhazip.com",
    ),
}


@dataclass(slots=True)
class _Heard:
    """What one source said last; the lock makes one question of many."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    answer: Answer | None = None
    at: float = 0.0


class Detector:
    """Finds addresses, for any number of records. It belongs to one event loop and needs no closing."""

    def __init__(
        self,
        limits: Limits = Limits(connect=5.0, total=10.0),  # noqa: B008 - immutable
        *,
        built_in: Mapping[int, tuple[str, ...]] = BUILT_IN,
        services: Mapping[str, resolvers.Service] = resolvers.SERVICES,
        cafile: str | None = None,
    ) -> None:
        self._limits, self._built_in, self._services, self._cafile = limits, built_in, services, cafile
        self._standing = {length: Standing() for length in agreement.FAMILIES}
        self._heard: dict[tuple[int, str], _Heard] = {}

    async def find(self, search: Search) -> Found:
        """Ask the sources for what is managed. It raises nothing for what the world does."""
        async with asyncio.TaskGroup() as tasks:
            ipv4 = tasks.create_task(self._poll(4, search.ipv4, search))
            ipv6 = tasks.create_task(self._poll(16, search.ipv6, search))
        poll = ipv4.result()
        return Found(
            agreement.found(poll), agreement.found(ipv6.result()), cgnat=poll is not None and poll.cgnat
        )

    async def _poll(self, length: int, wanted: Wanted | None, search: Search) -> Poll | None:
        if wanted is None:
            return None
        loop, standing = asyncio.get_running_loop(), self._standing[length]
        sources = standing.order(wanted.sources or self._built_in[length], loop.time())
        poll = Poll(length, wanted, sources, search.quorum, search.allow)
        await self._ask_all(poll, length)
        standing.settle(poll, loop.time())
        return poll

    async def _ask_all(self, poll: Poll, length: int) -> None:
        running: dict[asyncio.Task[Answer], str] = {}
        async with asyncio.TaskGroup() as tasks:
            while poll.outcome is None:
                for source in poll.ask():
                    running[tasks.create_task(self._answer(length, source))] = source
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    poll.hear(running.pop(task), task.result())
            for task in running:
                task.cancel()

    async def _answer(self, length: int, source: str) -> Answer:
        """Return what a source says, asking it only if it was not asked just now."""
        loop = asyncio.get_running_loop()
        heard = self._heard.setdefault((length, source), _Heard())
        async with heard.lock:
            if heard.answer is None or loop.time() - heard.at >= FRESH:
                heard.answer = await self._asked(length, source)
                heard.at = loop.time()
            return heard.answer

    async def _asked(self, length: int, source: str) -> Answer:
        try:
            async with asyncio.timeout(self._limits.total):
                return await self._ask(length, source)
        except TimeoutError:
            return Fault(f"no answer within {self._limits.total:g} s")
        except SourceError as error:
            return Fault(str(error))
        except OSError as error:
            return Fault(f"cannot be reached: {error.strerror or 'no network'}")

    async def _ask(self, length: int, source: str) -> bytes | agreement.Prefix:
        kind, _, where = source.partition(":")
        match kind:
            case "dns":
                return await resolvers.ask(self._services[where], length, self._limits.total)
            case "fritzbox" | "igd":
                return await router.ask(source, length, self._limits)
            case "interface":
                return await interface.ask(where, length)
            case "file":
                return await textfile.ask(where, length)
            case _:
                return await echo.ask(source, length, self._limits, self._cafile)
