"""Who is measured: the settings and the command of each, and the proof that it does its work.

A contestant forwards every query: whoever has a cache runs without one, and NSD's counter has to agree. Those
that fill sets have to have the address of their first answer in the kernel. Otherwise nothing is measured.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from measure import Tree
from policies import documents
from world import DOMAIN, PORT, UPSTREAM, World

from dnsproxy.demo.lab import wait_for
from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from world import Workshop

_PROBES = 3  # queries for one name that all have to reach the upstream
_TABLE = "bench"
_SET = "learned"


@dataclass(frozen=True)
class Forwarder:
    """One contestant; `command` writes its settings into the folder of a run and returns what to start."""

    name: str
    title: str
    command: Callable[[Run], list[str]]
    program: str = ""  # that has to be installed
    sets: str = ""  # for those that fill sets: what has to be done before the answer leaves
    tcp: bool = True
    loop: str = ""  # a choice of event loop, for ourselves

    def installed(self) -> bool:
        """Tell whether it can run here."""
        return not self.program or shutil.which(self.program) is not None


@dataclass
class Run:
    """One contestant at work in a world of its own, which `start` makes and `stop` removes.

    Its upstream is NSD, or, with a `delay` in milliseconds, upstream.c.
    """

    forwarder: Forwarder
    workshop: Workshop
    delay: int | None = None
    policy: str = ""
    settings: dict[str, object] = field(default_factory=dict)

    world: World = field(init=False)
    process: subprocess.Popen[str] = field(init=False)

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self.world.directory

    def start(self) -> None:
        """Start it, wait until it answers, and have it prove what it does; or leave nothing behind."""
        self.world = World(self.workshop, self.delay)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        if self.forwarder.sets and self.forwarder.program:
            made = f"add table inet {_TABLE}; add set inet {_TABLE} {_SET} {{ type ipv4_addr; }}"
            self.world.namespace.run("nft", made)
        command = self.forwarder.command(self)
        if self.forwarder.loop:
            command = ["env", f"DNSPROXY_LOOP={self.forwarder.loop}", *command]
        self.process = self.world.namespace.popen(*command, log=self._log)
        wait_for(self._answers, 120, f"{self.forwarder.title} to answer; its log is {self._log}")
        self._prove()

    def tree(self) -> Tree:
        """Return its processes."""
        return Tree(self.process.pid)

    def stop(self) -> None:
        """End it and its world."""
        self.world.close()

    @property
    def _log(self) -> Path:
        return self.directory / "log"

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            said = self._log.read_text()[-800:]
            raise DnsproxyError(f"{self.forwarder.title} ended with {self.process.returncode}: {said}")
        return bool(self.world.answers(PORT, f"n0.{DOMAIN}"))

    def _prove(self) -> None:
        before = self.world.queries_at_nsd() if self.world.counts else 0
        answers = [self.world.answers(PORT, f"n1.{DOMAIN}") for _ in range(_PROBES)]
        if self.world.counts and self.world.queries_at_nsd() - before < _PROBES:
            raise DnsproxyError(f"{self.forwarder.title} answers from a cache: NSD did not see every query")
        if not self.forwarder.sets:
            return
        listed = self.world.namespace.run("nft", "list", "table", "inet", _TABLE).stdout
        if not all(address in listed for address in answers[0]):
            raise DnsproxyError(f"{self.forwarder.title} has put no address into its set")


def _floor(run: Run) -> list[str]:
    single = ["single"] if run.forwarder.name == "floor1" else []
    return [run.workshop.program("floor"), str(PORT), str(UPSTREAM), *single]


def _dnsproxy(run: Run) -> list[str]:
    (run.directory / "policies").mkdir()
    (run.directory / "policies" / "bench.yaml").write_text(run.policy or documents())
    settings = {
        "listen": [f"127.0.0.1:{PORT}"],
        "upstream": {"servers": [f"127.0.0.1:{UPSTREAM}"]},
        "policy": {"directory": "policies"},
        "state": {"directory": "state"},
        "admin": {"socket": "admin.sock"},
        "sets": {"table": f"inet {_TABLE}"},
        **run.settings,
    }
    path = run.directory / "dnsproxy.yaml"
    path.write_text(yaml.safe_dump(settings))
    script = Path(sys.executable).with_name("dnsproxy")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "dnsproxy"]
    return [*program, "run", "--config", str(path)]


def _dnsmasq(run: Run) -> list[str]:
    settings = f"""
port={PORT}
listen-address=127.0.0.1
bind-interfaces
user=root
pid-file=
no-resolv
no-hosts
cache-size=0
dns-forward-max=10000
server=127.0.0.1#{UPSTREAM}
"""
    if run.forwarder.sets:
        settings += f"nftset=/{DOMAIN}/4#inet#{_TABLE}#{_SET}\n"
    return ["dnsmasq", "--keep-in-foreground", f"--conf-file={_written(run, settings)}"]


def _smartdns(run: Run) -> list[str]:
    settings = f"""
bind 127.0.0.1:{PORT}
bind-tcp 127.0.0.1:{PORT}
server 127.0.0.1:{UPSTREAM}
cache-size 0
speed-check-mode none
prefetch-domain no
serve-expired no
dualstack-ip-selection no
log-level fatal
log-file {run.directory}/smartdns.log
"""
    if run.forwarder.sets:
        settings += f"nftset /{DOMAIN}/#4:inet#{_TABLE}#{_SET}\n"
    return ["smartdns", "-f", "-c", _written(run, settings), "-p", str(run.directory / "pid")]


def _dnsdist(run: Run) -> list[str]:
    settings = f"""
setLocal("127.0.0.1:{PORT}")
setSecurityPollSuffix("")
setMaxUDPOutstanding(65535)
newServer({{address="127.0.0.1:{UPSTREAM}", checkName="n0.{DOMAIN}."}}):setUp()
"""
    return ["dnsdist", "--supervised", "--disable-syslog", "-C", _written(run, settings)]


def _unbound(run: Run) -> list[str]:
    settings = f"""
server:
  interface: 127.0.0.1@{PORT}
  access-control: 127.0.0.0/8 allow
  do-daemonize: no
  use-syslog: no
  username: ""
  chroot: ""
  directory: "{run.directory}"
  pidfile: "{run.directory}/pid"
  module-config: "iterator"
  do-not-query-localhost: no
  num-threads: 1
  outgoing-range: 8192
  num-queries-per-thread: 8192
  so-rcvbuf: 4m
  so-sndbuf: 4m
  incoming-num-tcp: 200
forward-zone:
  name: "."
  forward-addr: 127.0.0.1@{UPSTREAM}
  forward-no-cache: yes
remote-control:
  control-enable: no
"""
    return ["unbound", "-d", "-c", _written(run, settings)]


def _written(run: Run, settings: str) -> str:
    path = run.directory / f"{run.forwarder.program}.conf"
    path.write_text(settings)
    return str(path)


# Seen with strace, and by asking for another name when the table was gone: the answer leaves all the same.
_CALLED = "the write; its outcome is not read"
_HELD = "the kernel has acknowledged the write"
_LOOP = "uvloop" if find_spec("uvloop") else "stock asyncio"  # as `dnsproxy run` chooses

FORWARDERS = (
    Forwarder("dnsproxy", f"dnsproxy, {_LOOP}", _dnsproxy, sets=_HELD),
    Forwarder("dnsproxy-asyncio", "dnsproxy, stock asyncio", _dnsproxy, sets=_HELD, loop="asyncio"),
    Forwarder("floor", "C floor, 64 a call", _floor, tcp=False),
    Forwarder("floor1", "C floor, one a call", _floor, tcp=False),
    Forwarder("dnsdist", "dnsdist", _dnsdist, "dnsdist"),
    Forwarder("smartdns", "SmartDNS", _smartdns, "smartdns"),
    Forwarder("dnsmasq", "dnsmasq", _dnsmasq, "dnsmasq"),
    Forwarder("unbound", "Unbound, forwarding", _unbound, "unbound"),
    Forwarder("smartdns-nft", "SmartDNS with nftset", _smartdns, "smartdns", sets=_CALLED),
    Forwarder("dnsmasq-nft", "dnsmasq with nftset", _dnsmasq, "dnsmasq", sets=_CALLED),
)
OURS = FORWARDERS[0]
