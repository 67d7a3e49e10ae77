"""Where the measurements happen: one network namespace with nothing but loopback, and the servers in it.

    NSD           127.0.0.1:5300   the zone bench.example: names to know, n0, n1, ..., and fresh ones, f0, f1,
                                   ..., each with two addresses that belong to no special range
    upstream.c    127.0.0.1:5301   names without number, answers that change, answers that take their time

Everything ends with the process that made it, whichever way that ends (dnsproxy/demo/lab.py).
"""

from __future__ import annotations

import re
import subprocess
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING

from dnsproxy.demo.lab import Lab, wait_for
from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).parent
NSD_PORT = 5300
UPSTREAM_PORT = 5301
KNOWN = 20_000
FRESH = 100_000
DOMAIN = "bench.example"
_FIRST = int(IPv4Address("20.0.0.0"))

_NSD = """
server:
  ip-address: 127.0.0.1@{port}
  server-count: 1
  username: root
  zonesdir: "{directory}"
  database: ""
  pidfile: "{directory}/nsd.pid"
  xfrdfile: "{directory}/nsd.xfrd"
  xfrdir: "{directory}"
  zonelistfile: "{directory}/nsd.zones"
  rrl-ratelimit: 0
  tcp-count: 400
remote-control:
  control-enable: yes
  control-interface: "{directory}/nsd.sock"
zone:
  name: {domain}
  zonefile: "{directory}/zone"
"""


class World:
    """The namespace with NSD and the programs of this directory that are written in C."""

    def __init__(self, lab: Lab) -> None:
        self.directory = lab.directory
        self.namespace = lab.namespace("bench")
        for program in ("floor", "upstream"):
            self._compile(program)
        self._write_zone()
        self.nsd = self._start_nsd()

    def program(self, name: str) -> str:
        """Return where a program of ours is."""
        return str(self.directory / name)

    def queries(self, name: str, names: Iterable[str]) -> Path:
        """Write a query file of dnsperf: one question for an address per name."""
        path = self.directory / f"{name}.queries"
        path.write_text("".join(f"{asked} A\n" for asked in names))
        return path

    def upstream(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the server that makes its answers up."""
        process = self.namespace.popen(self.program("upstream"), str(UPSTREAM_PORT), *arguments)
        wait_for(lambda: self.answers(UPSTREAM_PORT, f"n0.{DOMAIN}"), 10, "the made-up server to answer")
        return process

    def answers(self, port: int, name: str) -> list[str]:
        """Return the addresses that a server here answers with; none if it does not answer."""
        asked = ["dig", "@127.0.0.1", "-p", str(port), "+tries=1", "+time=1", "+short", name, "A"]
        done = self.namespace.run(*asked, check=False)
        return done.stdout.split() if done.returncode == 0 else []

    def queries_at_nsd(self) -> int:
        """Return how many queries NSD has seen."""
        said = self.namespace.run("nsd-control", "-c", str(self.directory / "nsd.conf"), "stats_noreset")
        found = re.search(r"^num\.queries=(\d+)", said.stdout, re.MULTILINE)
        if not found:
            raise DnsproxyError(f"nsd-control does not count queries: {said.stdout[:200]}")
        return int(found[1])

    def _compile(self, name: str) -> None:
        command = ["cc", "-O2", "-o", self.program(name), str(HERE / f"{name}.c")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DnsproxyError(f"{name}.c does not compile: {done.stderr.strip()}")

    def _write_zone(self) -> None:
        head = f"$ORIGIN {DOMAIN}.\n$TTL 60\n@ SOA ns hostmaster 1 60 60 60 60\n@ NS ns\nns A 127.0.0.1\n"
        names = [f"n{number}" for number in range(KNOWN)] + [f"f{number}" for number in range(FRESH)]
        records = (
            f"{name} A {IPv4Address(_FIRST + 2 * at)}\n{name} A {IPv4Address(_FIRST + 2 * at + 1)}\n"
            for at, name in enumerate(names)
        )
        (self.directory / "zone").write_text(head + "".join(records))

    def _start_nsd(self) -> subprocess.Popen[str]:
        conf = self.directory / "nsd.conf"
        conf.write_text(_NSD.format(directory=self.directory, port=NSD_PORT, domain=DOMAIN))
        process = self.namespace.popen("nsd", "-d", "-c", str(conf))
        wait_for(lambda: self.answers(NSD_PORT, f"n0.{DOMAIN}"), 20, "NSD to answer")
        return process
