"""Reading files again while the proxy runs: settings, policies, upstream servers.

Three things start it: a signal or the admin API (everything), a policy file or folder that has changed, and a
resolv.conf that has changed. All texts are read and checked, in a thread since a long list takes a second,
before anything is swapped: all that is due comes into force, or nothing. With any fault what was in force
stays in force; the log says so, and `faults` until it is mended.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import CLOCK_MONOTONIC, clock_gettime_ns, monotonic
from typing import TYPE_CHECKING

import structlog

from dnsproxy import config as settings
from dnsproxy import files
from dnsproxy.errors import DocumentError
from dnsproxy.parts import load_documents
from dnsproxy.systemd import notify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dnsproxy.config import Config, PolicySection
    from dnsproxy.parts import Loaded, UpstreamSource
    from dnsproxy.servers import Routes

READ_AGAIN = {
    "policy": ("directory", "enforcement", "deny", "deny_ttl", "private", "strip_private"),
    "upstream": ("servers", "routes", "resolv_conf"),
}

log = structlog.get_logger("dnsproxy")


class Reloader:
    """The settings in force, and how they and what they name are read again.

    `enforce` and `ask` put a policy and upstream servers into force; they must not fail.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        upstream: UpstreamSource,
        enforce: Callable[[PolicySection, Loaded], None],
        ask: Callable[[Routes], None],
    ) -> None:
        self.config = config
        self.faults: dict[str, str] = {}  # in files that are not in force, by what was read
        self.succeeded = True  # the last one
        self.ended_at = monotonic()  # the last one; the first was the start
        self._path = path
        self._upstream = upstream
        self._enforce = enforce
        self._ask = ask
        self._due: set[str] = set()  # settings (with all they name), policies, upstreams
        self._told = asyncio.Event()
        self._one = asyncio.Lock()

    def tell(self, kind: str) -> None:
        """Have something read again soon: `settings`, `policies` or `upstreams`."""
        self._due.add(kind)
        self._told.set()

    async def now(self) -> list[str]:
        """Read everything again, and return the faults; none means that it is in force."""
        async with self._one:
            await self._announced(["settings"])
        return sorted(self.faults.values())

    async def run(self) -> None:
        """Do one reload after the other, so that the last that was told is the last that is done."""
        while True:
            await self._told.wait()
            self._told.clear()
            due, self._due = self._due, set()
            async with self._one:
                await self._announced(["settings"] if "settings" in due else sorted(due))

    async def follow(self, kind: str, seen: files.Signature) -> None:
        """Have `policies` or `upstreams` read again whenever their files change from what was `seen`."""
        async for _ in files.changes(partial(self._watched, kind), seen):
            self.tell(kind)

    def _watched(self, kind: str) -> list[Path]:
        return [self.config.policy.directory] if kind == "policies" else self._upstream.watched(self.config)

    async def _announced(self, kinds: list[str]) -> None:
        notify("RELOADING=1", f"MONOTONIC_USEC={clock_gettime_ns(CLOCK_MONOTONIC) // 1000}")
        for kind in kinds:
            await self._reload(kind)
        self.ended_at = monotonic()
        notify("READY=1")

    async def _reload(self, kind: str) -> None:
        """Read and check all that is due; then swap all of it, or keep all as it is."""
        try:
            config = await asyncio.to_thread(self._reread) if kind == "settings" else self.config
            loaded = await asyncio.to_thread(load_documents, config) if kind != "upstreams" else None
            routes = await asyncio.to_thread(self._upstream.routes, config) if kind != "policies" else None
        except DocumentError as error:
            self._keep(kind, error)
            return
        self.faults = {} if kind == "settings" else {k: v for k, v in self.faults.items() if k != kind}
        self.succeeded = True
        self.config = config
        if loaded is not None:
            self._enforce(config.policy, loaded)
        if routes is not None:
            self._ask(routes)

    def _keep(self, kind: str, error: DocumentError) -> None:
        self.faults[kind] = str(error)
        self.succeeded = False
        log.error("files have faults; what was in force stays in force", faults=str(error))

    def _reread(self) -> Config:
        """Return the running settings with what may change while running; name what may not."""
        wanted = settings.read(files.read_text(self._path), str(self._path))
        settings.check_loops(wanted, self._upstream.local)
        merged = _merged(self.config, wanted)
        if later := _differing(merged, wanted):
            log.warning("these settings take effect at the next start", settings=later)
        return merged


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
