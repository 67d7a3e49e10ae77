"""Who is measured: for each its settings, its command, and what it does before an answer leaves.

A contestant forwards every query: whoever has a cache runs without one, and a probe of NSD's counter proves
it. Those that fill sets are asked for a name first, and its addresses must then be in the kernel.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from measure import Tree
from policies import documents
from world import DOMAIN, NSD_PORT

from dnsproxy.demo.lab import wait_for
from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from world import World

_TABLE = "inet peers"


@dataclass(frozen=True)
class Forwarder:
    """One contestant. `command` writes its settings into a folder and returns the command that runs it."""

    name: str
    title: str
    program: str
    port: int
    command: Callable[[Run], list[str]]
    waits: str = ""  # for those that fill sets: what an answer waits for
    set_name: str = ""  # its own set, for others than us
    environment: tuple[tuple[str, str], ...] = ()

    def installed(self) -> bool:
        """Tell whether it can run here."""
        return (
            not self.program
            or shutil.which(self.program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is not None
        )


@dataclass
class Run:
    """One contestant at work in a world."""

    forwarder: Forwarder
    world: World
    directory: Path
    upstream: int = NSD_PORT
    policy: str = ""
    settings: dict[str, dict[str, object]] | None = None
    process: subprocess.Popen[str] | None = None

    @property
    def port(self) -> int:
        """The port on 127.0.0.1 where it listens."""
        return self.forwarder.port

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.directory.mkdir(exist_ok=True)
        command = self.forwarder.command(self)
        if self.forwarder.environment:
            command = ["env", *(f"{key}={value}" for key, value in self.forwarder.environment), *command]
        self.process = self.world.namespace.popen(*command, log=self.directory / "log")
        wait_for(self._answers, 60, f"{self.forwarder.title} to answer (its log: {self.directory / 'log'})")

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            said = (self.directory / "log").read_text()[-800:]
            raise DnsproxyError(f"{self.forwarder.title} ended with {self.process.returncode}: {said}")
        return bool(self.world.answers(self.port, f"n0.{DOMAIN}"))

    def tree(self) -> Tree:
        """Return its processes."""
        assert self.process is not None
        return Tree(self.process.pid)

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
            self.process = None


def _floor(run: Run) -> list[str]:
    single = ["single"] if run.forwarder.name == "floor1" else []
    return [run.world.program("floor"), str(run.port), str(run.upstream), *single]


def _dnsproxy(run: Run) -> list[str]:
    policies = run.directory / "policies"
    policies.mkdir(exist_ok=True)
    (policies / "bench.yaml").write_text(run.policy or documents())
    settings: dict[str, object] = {
        "listen": [f"127.0.0.1:{run.port}"],
        "upstream": {"servers": [f"127.0.0.1:{run.upstream}"]},
        "policy": {"directory": "policies"},
        "state": {"directory": "state"},
        "admin": {"socket": "admin.sock"},
        "sets": {"table": f"inet {run.forwarder.name}"},
        **(run.settings or {}),
    }
    path = run.directory / "dnsproxy.yaml"
    path.write_text(yaml.safe_dump(settings))
    script = Path(sys.executable).with_name("dnsproxy")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "dnsproxy"]
    return [*program, "run", "--config", str(path)]


FORWARDERS = (
    Forwarder("dnsproxy", "dnsproxy", "", 5310, _dnsproxy, waits="the kernel's acknowledgement"),
    Forwarder("floor", "C floor, 64 a call", "", 5311, _floor),
    Forwarder("floor1", "C floor, one a call", "", 5312, _floor),
)
