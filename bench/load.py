"""Asking: dnsperf, with so many queries in flight."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies import CLIENT

from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from pathlib import Path

    from forwarders import Run

CLIENTS = 8  # sockets that ask; with SO_REUSEPORT the kernel spreads them over the listeners


@dataclass(frozen=True)
class Load:
    """What came of one run of dnsperf, and what it cost the forwarder."""

    sent: int
    completed: int
    lost: int
    codes: dict[str, int]
    seconds: float
    cpu: float

    @property
    def cost(self) -> float:
        """CPU microseconds per query."""
        return self.cpu / max(self.completed, 1) * 1e6

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.completed / self.seconds


def ask(
    run: Run,
    queries: Path,
    *,
    seconds: float = 0.0,
    outstanding: int = 100,
    tcp: bool = False,
    patience: int = 5,
) -> Load:
    """Ask all questions of a file again and again for `seconds`, or, without, each of them once."""
    limit = ["-l", f"{seconds:g}"] if seconds else ["-n", "1"]
    command = [
        "dnsperf", "-s", "127.0.0.1", "-p", str(run.port), "-a", CLIENT, "-d", str(queries), *limit,
        "-q", str(outstanding), "-c", str(CLIENTS), "-T", "1", "-t", str(patience),
        *(["-m", "tcp"] if tcp else ["-b", "2048"]),
    ]  # fmt: skip
    tree = run.tree()
    before = tree.cpu()
    said = run.world.namespace.run(*command, timeout=seconds + 120).stdout
    return _read(said, tree.cpu() - before)


def _read(said: str, cpu: float) -> Load:
    codes = re.search(r"Response codes:\s+(.*)", said)
    if not codes:
        raise DnsproxyError(f"dnsperf said nothing of answers: {said[-500:]}")
    return Load(
        sent=_number(said, "Queries sent"),
        completed=_number(said, "Queries completed"),
        lost=_number(said, "Queries lost"),
        codes={code: int(count) for code, count in re.findall(r"([A-Z]+) (\d+) \(", codes[1])},
        seconds=float(re.findall(r"Run time \(s\):\s+([\d.]+)", said)[0]),
        cpu=cpu,
    )


def _number(said: str, key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+)", said)
    return int(found[1]) if found else 0
