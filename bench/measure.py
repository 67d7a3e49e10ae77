"""What processes cost: CPU time and resident memory of a process and all its descendants, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Tree:
    """A process and whatever it has started."""

    root: int

    def pids(self) -> list[int]:
        """Return all processes of the tree that run now."""
        found = [self.root]
        for pid in found:
            found += _children(pid)
        return found

    def cpu(self) -> float:
        """Return the seconds of CPU, user and system, that the tree has used.

        The descendants that have ended and were waited for count, so it never shrinks.
        """
        return sum(map(_cpu, self.pids()))

    def resident(self) -> float:
        """Return the resident megabytes: of one process VmRSS, of several their proportional shares (PSS)."""
        pids = self.pids()
        if len(pids) == 1:
            return _field(Path(f"/proc/{pids[0]}/status"), "VmRSS:")
        return sum(_field(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") for pid in pids)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue  # a thread that has just ended
    return found


def _cpu(pid: int) -> float:
    """User and system time of a process with the threads and children it has waited for (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # ended meanwhile; its parent counts it from now on
    return sum(map(int, fields[11:15])) * _TICK


def _field(path: Path, key: str) -> float:
    for line in path.read_text().splitlines():
        if line.startswith(key):
            return (
                int(line.split()[1]) / 1000
            )  # the kernel's kB are 1,024 octets; the table says MB = 1,000 kB
    return 0.0
