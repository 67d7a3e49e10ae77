"""Keeping DynDNS records, beside the proxy or alone.

Nothing that happens here touches DNS, and the reverse: whatever ends this task is logged, and it starts again
after a while. What it needs is imported when there is the first Domain document, since most have none.
"""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from dnsproxy import files, logs, parts
from dnsproxy.cache.store import Store
from dnsproxy.errors import DnsproxyError, DocumentError
from dnsproxy.systemd import notify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dnsproxy.cache.keeper import Keeper
    from dnsproxy.config import Config
    from dnsproxy.dyndns.documents import Domain
    from dnsproxy.dyndns.sync import Memory, Sync

RETRY: Final = 60.0  # seconds until what broke down starts again
LOST: Final = "the state on disk was lost: the first requests wait as long as two have to be apart"
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")

log = structlog.get_logger("dnsproxy")


class Domains:
    """The records that documents ask for. `sync` is what keeps them, None while there was never one."""

    def __init__(self, config: Config, memory: Memory | None) -> None:
        self.sync: Sync | None = None
        self._config = config
        self._memory = memory
        self._wanted: Sequence[Domain] = ()
        self._due = asyncio.Event()
        self._allowed = asyncio.Event()
        self._allowed.set()
        self._keeping: asyncio.Task[None] | None = None

    def update(self, domains: Sequence[Domain]) -> None:
        """Keep these from now on, and no others."""
        self._wanted = domains
        if domains:
            self._due.set()
        if self.sync is not None:
            self.sync.update(domains)

    def look_again(self) -> None:
        """Look for our addresses now: those of this host have changed."""
        if self.sync is not None:
            self.sync.look_again()

    async def pause(self) -> None:
        """Keep nothing until `resume`: another instance does. A request under way is given up."""
        self._allowed.clear()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    def resume(self) -> None:
        """Go on after `pause`."""
        self._allowed.set()

    async def run(self) -> None:
        """Keep the records until cancelled, whatever happens."""
        await self._due.wait()
        while True:
            await self._allowed.wait()
            async with asyncio.TaskGroup() as tasks:
                self._keeping = tasks.create_task(self._keep(), name="records")

    async def _keep(self) -> None:
        self.sync = _sync(self._config, self._memory)
        self.sync.update(self._wanted)
        try:
            await self.sync.run()
        except Exception as error:  # a fault of ours, which must not end the proxy
            log.exception("DynDNS broke down and starts again", error=str(error))
            await asyncio.sleep(RETRY)


def _sync(config: Config, memory: Memory | None) -> Sync:
    from dnsproxy.dyndns.detect import Detector  # noqa: PLC0415 - 10 MB that most do without
    from dnsproxy.dyndns.hook import Hook  # noqa: PLC0415
    from dnsproxy.dyndns.passwords import Passwords  # noqa: PLC0415
    from dnsproxy.dyndns.strato import Provider  # noqa: PLC0415
    from dnsproxy.dyndns.sync import Sync  # noqa: PLC0415

    section = config.dyndns
    hook = Hook(section.hook_command, section.hook_url) if section.hook_command or section.hook_url else None
    return Sync(Detector(), Provider(), Passwords().read, memory, hook=hook, boot=_boot())


def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


class Kept:
    """The memory of the records in the proxy's own state."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def load(self) -> Mapping[str, bytes]:
        """Return all values by key; DnsproxyError if nobody knows any more what was sent and when."""
        state = await self._keeper.load()
        if self._keeper.lost:
            raise DnsproxyError(LOST)
        return state.memo

    async def remember(self, key: str, value: bytes | None) -> None:
        """Keep a value; it is on disk when this returns. None forgets it."""
        await self._keeper.remember(key, value)


class Alone:
    """The memory of the records where no proxy runs: the same file, of which only their part is touched."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")

    async def load(self) -> Mapping[str, bytes]:
        """Return all values by key; DnsproxyError if nobody knows any more what was sent and when."""
        state = await self._call(self._store.load)
        if state.notes:
            raise DnsproxyError(LOST)
        return state.memo  # type: ignore[no-any-return]

    async def remember(self, key: str, value: bytes | None) -> None:
        """Keep a value; it is on disk when this returns. None forgets it."""
        await self._call(self._store.remember, key, value)

    async def close(self) -> None:
        """Let go of the file."""
        await self._call(self._store.close)
        self._thread.shutdown()

    async def _call(self, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - what it returns
        running = asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        return await asyncio.shield(running)


def run(config: Config) -> int:
    """Keep the records alone, until told to stop; return the exit code."""
    logs.configure(config.log.level, config.log.format)
    asyncio.run(_run(config))
    return 0


async def _run(config: Config) -> None:
    folder = config.policy.directory
    seen, found = files.signature([folder]), parts.load_domains(config)
    memory = await _memory(config)
    domains = Domains(config, memory)
    domains.update(found.domains)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(domains.run(), name="domains"),
            tasks.create_task(_follow(config, domains, seen), name="documents"),
        ]
        log.info("ready", domains=len(found.domains))
        notify("READY=1")
        await stop.wait()
        for task in running:
            task.cancel()
    if memory is not None:
        await memory.close()
    log.info("stopped; the records stay as they are")


async def _memory(config: Config) -> Alone | None:
    if config.state.directory is None:
        return None
    store = Store(config.state.directory)
    if not store.acquire():
        raise DnsproxyError(
            f"another instance is running with the state in {config.state.directory}, and keeps the records; "
            "stop that one, or set state.directory to another"
        )
    return Alone(store)


async def _follow(config: Config, domains: Domains, seen: files.Signature) -> None:
    async for _ in files.changes(lambda: [config.policy.directory], seen):
        try:
            found = await asyncio.to_thread(parts.load_domains, config)
        except DocumentError as error:
            log.error("documents have faults; what was in force stays in force", faults=str(error))  # noqa: TRY400
            if domains.sync is not None:
                domains.sync.invalid(str(error))
        else:
            domains.update(found.domains)
            log.info("documents in force", domains=len(found.domains))
