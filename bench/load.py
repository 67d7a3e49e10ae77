"""Asking as much as is answered: dnsperf with so many queries in flight, and what they cost."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from world import CLIENT, PORT

from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from pathlib import Path

    from forwarders import Run

SOCKETS = 8  # that ask; with SO_REUSEPORT the kernel spreads them over several listeners


@dataclass(frozen=True)
class Load:
    """What came of one run of dnsperf; `cpu` seconds are those of the forwarder."""

    sent: int
    completed: int
    codes: dict[str, int]
    seconds: float
    cpu: float

    @property
    def cost(self) -> float:
        """CPU microseconds per answered query."""
        return self.cpu / max(self.completed, 1) * 1e6

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.completed / self.seconds

    def failed(self, expected: str = "NOERROR") -> int:
        """Return how many queries got no answer, or another one than expected."""
        return self.sent - self.codes.get(expected, 0)


@dataclass(frozen=True)
class Demand:
    """What is asked: the questions of a file, `once` or again and again, with so many in flight."""

    queries: Path
    outstanding: int = 100
    tcp: bool = False
    once: bool = False


def ask(run: Run, demand: Demand, seconds: float) -> Load:
    """Ask for at most `seconds`."""
    transport = ["-m", "tcp"] if demand.tcp else ["-b", "2048"]  # kilobytes of socket buffers
    command = [
        "dnsperf", "-s", "127.0.0.1", "-p", str(PORT), "-a", CLIENT, "-d", str(demand.queries),
        "-l", f"{seconds:g}", *(["-n", "1"] if demand.once else []),
        "-q", str(demand.outstanding), "-c", str(SOCKETS), "-T", "1", *transport,
    ]  # fmt: skip
    tree = run.tree()
    before = tree.cpu()
    said = run.world.namespace.run(*command, timeout=seconds + 30).stdout
    return _read(said, tree.cpu() - before)


def prime(run: Run, queries: Path) -> None:
    """Ask every question of a file once."""
    ask(run, Demand(queries, once=True), 300)


def _read(said: str, cpu: float) -> Load:
    codes = re.search(r"Response codes:\s+(.*)", said)
    if not codes:
        raise DnsproxyError(f"dnsperf got no answer: {said[-500:]}")
    return Load(
        sent=int(_number(said, "Queries sent")),
        completed=int(_number(said, "Queries completed")),
        codes={code: int(count) for code, count in re.findall(r"([A-Z]+) (\d+) \(", codes[1])},
        seconds=_number(said, r"Run time \(s\)"),
        cpu=cpu,
    )


def _number(said: str, key: str) -> float:
    found = re.search(rf"{key}:\s+([\d.]+)", said)
    if not found:
        raise DnsproxyError(f"dnsperf did not say {key!r}: {said[-500:]}")
    return float(found[1])
