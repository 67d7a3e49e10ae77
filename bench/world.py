"""Where the measurements happen: for each contestant a network namespace with nothing but loopback in it.

    127.0.0.1:5300   its own upstream: NSD with the zone bench.example, or upstream.c
    127.0.0.1:5310   the contestant
    127.0.0.7        who asks

So no contestant meets the rules, the sets or the connections of another. The zone has names to know, n0,
n1 ..., and fresh ones, f0, f1 ..., each with two addresses of no special range. What all share is in one
folder. A namespace goes with the process that made it, whichever way that ends (dnsproxy/demo/lab.py).
"""

from __future__ import annotations

import random
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
UPSTREAM = 5300
PORT = 5310
CLIENT = "127.0.0.7"
KNOWN = 20_000
FRESH = 100_000
DOMAIN = "bench.example"
_FIRST = int(IPv4Address("20.0.0.0"))

_NSD = """
server:
  ip-address: 127.0.0.1@{port}
  server-count: 1
  username: root
  zonesdir: "{shared}"
  database: ""
  pidfile: "{own}/nsd.pid"
  xfrdfile: "{own}/nsd.xfrd"
  xfrdir: "{own}"
  zonelistfile: "{own}/nsd.zones"
  rrl-ratelimit: 0
  tcp-count: 400
remote-control:
  control-enable: yes
  control-interface: "{own}/nsd.sock"
zone:
  name: {domain}
  zonefile: "{shared}/zone"
"""


class Workshop:
    """What all worlds share: the zone, the query files, and the programs of ours that are written in C."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for program in ("floor", "upstream"):
            self._compile(program)
        self._write_zone()

    def program(self, name: str) -> str:
        """Return where a program of ours is."""
        return str(self.directory / name)

    def queries(self, name: str, names: Iterable[str]) -> Path:
        """Write a query file of dnsperf: one question for an address per name."""
        path = self.directory / f"{name}.queries"
        path.write_text("".join(f"{asked} A\n" for asked in names))
        return path

    def numbered(self, letter: str, count: int) -> Path:
        """Write a query file of names such as n0 to n999, in an order without pattern."""
        names = [f"{letter}{number}.{DOMAIN}" for number in range(count)]
        random.Random(count).shuffle(names)
        return self.queries(f"{letter}{count}", names)

    def _compile(self, name: str) -> None:
        command = ["cc", "-O2", "-o", self.program(name), str(HERE / f"{name}.c")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise DnsproxyError("no C compiler here (cc); on Debian: apt install gcc libc6-dev") from error
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


class World:
    """A namespace with an upstream: NSD, or, with a delay in milliseconds, upstream.c."""

    def __init__(self, workshop: Workshop, delay: int | None = None) -> None:
        self.workshop = workshop
        self.counts = delay is None
        self._lab = Lab()
        self.directory = self._lab.directory
        try:
            self.namespace = self._lab.namespace("bench")
            self._start(delay)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it and everything in it."""
        self._lab.close()

    def answers(self, port: int, name: str) -> list[str]:
        """Return the addresses that a server here answers with; none if it does not answer."""
        asked = [
            "dig",
            "@127.0.0.1",
            "-b",
            CLIENT,
            "-p",
            str(port),
            "+tries=1",
            "+time=1",
            "+short",
            name,
            "A",
        ]
        done = self.namespace.run(*asked, check=False)
        return done.stdout.split() if done.returncode == 0 else []

    def queries_at_nsd(self) -> int:
        """Return how many queries NSD has seen."""
        said = self.namespace.run("nsd-control", "-c", str(self.directory / "nsd.conf"), "stats_noreset")
        found = re.search(r"^num\.queries=(\d+)", said.stdout, re.MULTILINE)
        if not found:
            raise DnsproxyError(f"nsd-control does not count queries: {said.stdout[:200]}")
        return int(found[1])

    def _start(self, delay: int | None) -> None:
        conf = self.directory / "nsd.conf"
        shared = self.workshop.directory
        conf.write_text(_NSD.format(own=self.directory, shared=shared, port=UPSTREAM, domain=DOMAIN))
        nsd = ["nsd", "-d", "-c", str(conf)]
        upstream = [self.workshop.program("upstream"), str(UPSTREAM), str(delay)]
        self.namespace.popen(*(nsd if delay is None else upstream))
        wait_for(lambda: self.answers(UPSTREAM, f"n0.{DOMAIN}"), 30, "the upstream to answer")
