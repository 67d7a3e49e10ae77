"""`dnsproxy demo`: the product at work, step by step, in network namespaces of its own.

Every command that is shown is really run, and what it prints is what it printed. Every sentence with a tick
was checked before it is shown; the first that does not hold ends the demonstration with exit code 1.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import dnsproxy
from dnsproxy.demo.lab import Lab, as_root, require, wait_for
from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    import subprocess

    from dnsproxy.demo.lab import Namespace

INTRODUCTION = """\
A network of its own, which ends with this program; nothing outside of it is touched.

   ci     10.1.0.5, fd00:1::5 --+                    +-- names  192.0.2.53     the zone demo.test
                                +-- router: dnsproxy +-- web1   198.51.100.10 and .11, 2001:db8:1::10
   guest  10.2.0.5 -------------+   and nftables     +-- web2   203.0.113.10 and .66"""

CI, GUEST = "10.1.0.5", "10.2.0.5"
BEFORE, AFTER = "203.0.113.10", "198.51.100.11"  # the address of rotate.demo.test

ZONE = f"""\
$ORIGIN demo.test.
$TTL 60
@       SOA   ns.demo.test. hostmaster.demo.test. ( 1 3600 600 86400 30 )
www     A     198.51.100.10
www     AAAA  2001:db8:1::10
rotate  A     {BEFORE}
secret  A     203.0.113.66
"""

SETTINGS = """\
listen: [10.1.0.1:53, 10.2.0.1:53]
upstream: {servers: [192.0.2.53]}
policy:
  directory: policies
  private: [198.51.100.0/24, 203.0.113.0/24, "2001:db8::/32"]   # reserved for documentation, public here
state: {directory: null}
admin: {socket: null}
log: {format: text}
"""

ENDPOINTS = f"""\
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {{name: ci, labels: {{app: build}}}}
spec: {{addresses: [{CI}, "fd00:1::5"]}}
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {{name: guest, labels: {{app: build}}}}
spec: {{addresses: [{GUEST}]}}
"""

POLICY = """\
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: build}
spec:
  endpointSelector: {matchLabels: {app: build}}
  allow: [www.demo.test:80/TCP, rotate.demo.test:80/TCP]
"""

REFUSED = 7  # curl: could not connect


class Walk:
    """The network, and what is shown of it. What is shown runs in the lab's directory."""

    def __init__(self, lab: Lab) -> None:
        self.directory = lab.directory
        self.ci, self.guest, self.router = map(lab.namespace, ("ci", "guest", "router"))
        self.names, self.web1, self.web2 = map(lab.namespace, ("names", "web1", "web2"))
        self._steps = 0
        self._link(lab)
        self._write()

    def _link(self, lab: Lab) -> None:
        lab.link(self.ci, self.router, [f"{CI}/24", "fd00:1::5/64"], ["10.1.0.1/24", "fd00:1::1/64"])
        lab.link(self.guest, self.router, [f"{GUEST}/24"], ["10.2.0.1/24"])
        lab.link(self.names, self.router, ["192.0.2.53/24"], ["192.0.2.1/24"])
        web1 = ["198.51.100.10/24", "198.51.100.11/24", "2001:db8:1::10/64"]
        lab.link(self.web1, self.router, web1, ["198.51.100.1/24", "2001:db8:1::1/64"])
        lab.link(self.web2, self.router, ["203.0.113.10/24", "203.0.113.66/24"], ["203.0.113.1/24"])
        self.router.forward()
        for ns, gateways in {
            self.ci: ("10.1.0.1", "fd00:1::1"),
            self.guest: ("10.2.0.1",),
            self.names: ("192.0.2.1",),
            self.web1: ("198.51.100.1", "2001:db8:1::1"),
            self.web2: ("203.0.113.1",),
        }.items():
            for gateway in gateways:
                ns.route("default", gateway)
        self.ci.resolver("10.1.0.1")
        self.guest.resolver("10.2.0.1")

    def _write(self) -> None:
        package = shlex.quote(str(Path(dnsproxy.__file__).parent.parent))
        command = f'PYTHONPATH={package} exec {shlex.quote(sys.executable)} -m dnsproxy "$@"'
        for name, text in {
            "bin/dnsproxy": f"#!/bin/sh\n{command}\n",
            "demo.zone": ZONE,
            "dnsproxy.yaml": SETTINGS,
            "policies/build.yaml": POLICY,
            "policies/endpoints.yaml": ENDPOINTS,
            "web1/index.html": "hello from web1\n",
            "web2/index.html": "hello from web2\n",
        }.items():
            path = self.directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        (self.directory / "bin/dnsproxy").chmod(0o755)

    def step(self, title: str) -> None:
        """Begin a step."""
        self._steps += 1
        _say("", bold(f"{self._steps}. {title}"))

    def run(self, ns: Namespace, line: str) -> subprocess.CompletedProcess[str]:
        """Run a shell's line in a namespace, shown with all that it prints."""
        _say(f"   {ns.name}$ {bold(line)}")
        done = ns.run(*self._shell(line), check=False)
        printed = (done.stdout + done.stderr).expandtabs(4)
        _say(*(f"   {each}" for each in printed.splitlines() if each.strip()))
        return done

    def start(self, ns: Namespace, line: str, log: str) -> subprocess.Popen[str]:
        """Run a shell's line in the background, shown."""
        _say(f"   {ns.name}$ {bold(line)} &")
        return ns.popen(*self._shell(f"exec {line}"), log=self.directory / log)

    def _shell(self, line: str) -> tuple[str, ...]:
        return "sh", "-c", f'cd {shlex.quote(str(self.directory))} && PATH="$PWD/bin:$PATH" && {line}'

    def expect(self, holds: object, what: str) -> None:
        """Say what was seen, if it holds; DnsproxyError otherwise."""
        if not holds:
            raise DnsproxyError(f"the demonstration failed at step {self._steps}: this does not hold: {what}")
        _say(_green(f"   \N{CHECK MARK} {what}"))


def main() -> int:
    """Show everything; return the exit code. Any user may, where the kernel lets users make namespaces."""
    as_root([sys.executable, "-m", "dnsproxy", "demo"])
    require("unshare", "nsenter", "ip", "nft", "dig", "curl")
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        _say(INTRODUCTION)
        with Lab() as lab:
            _walk(Walk(lab))
    except KeyboardInterrupt:
        _say("", "Stopped. The network and everything in it is gone.")
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    _say("", "That was all. The network and everything in it is gone.")
    return 0


def _stop(number: int, frame: object) -> None:  # noqa: ARG001 - a signal handler's arguments
    sys.exit(128 + number)


def _walk(walk: Walk) -> None:
    _start_servers(walk)
    for step in (_start, _closed_before, _allowed, _denied, _other, _rotated, _sets):
        step(walk)


def _start_servers(walk: Walk) -> None:
    """Start the world around: a name server and two web servers, and wait until they answer."""
    zone = ["-m", "dnsproxy.demo.zone", str(walk.directory / "demo.zone"), "--listen", "192.0.2.53:53"]
    walk.names.popen(sys.executable, *zone, log=walk.directory / "queries.log")
    for web in (walk.web1, walk.web2):
        page = str(walk.directory / web.name)
        web.popen(sys.executable, "-m", "http.server", "--bind", "::", "--directory", page, "80")
    for line in ("curl -s 198.51.100.10", "curl -s 203.0.113.10", "dig @192.0.2.53 www.demo.test"):
        command = line.split()
        wait_for(lambda: walk.router.run(*command, check=False).returncode == 0, 20, line)  # noqa: B023 - called here


def _start(walk: Walk) -> None:
    walk.step("On the router: a policy, the rules, the proxy")
    walk.run(walk.router, "cat policies/build.yaml")
    walk.run(walk.router, "dnsproxy template forward --config dnsproxy.yaml | nft -f -")
    proxy = walk.start(walk.router, "dnsproxy run --config dnsproxy.yaml", "dnsproxy.log")
    log = walk.directory / "dnsproxy.log"
    wait_for(lambda: re.search(r"\bready\b", log.read_text()) or proxy.poll() is not None, 20, "the proxy")
    if proxy.poll() is not None:
        raise DnsproxyError(f"the proxy ended with exit code {proxy.returncode}:\n{log.read_text()}")
    rules = walk.router.run("nft", "list", "table", "inet", "dnsproxy").stdout
    walk.expect(f"{CI} : jump ep.default.ci" in rules, "the rules are in force and the proxy is ready")


def _closed_before(walk: Walk) -> None:
    walk.step("Before anybody asks, every address is closed")
    done = walk.run(walk.ci, "curl -sS http://198.51.100.10/")
    walk.expect(done.returncode == REFUSED, "ci is refused at once: no allowed name has led there yet")


def _allowed(walk: Walk) -> None:
    walk.step("An allowed name resolves, and then connects, over both families")
    done = walk.run(walk.ci, "dig +short www.demo.test")
    answer = done.stdout.strip()
    done = walk.run(walk.ci, f"curl -sS http://{answer}/")
    walk.expect(done.stdout == "hello from web1\n", "with the answer the way was open")
    done = walk.run(walk.ci, "curl -sS -6 http://www.demo.test/")
    walk.expect(done.stdout == "hello from web1\n", "for a program that looks up the name itself, too")


def _denied(walk: Walk) -> None:
    walk.step("A name that is not allowed is denied at once, and nobody else hears of it")
    began = time.monotonic()
    done = walk.run(walk.ci, "dig secret.demo.test | grep -E 'status|EDE'")
    took = time.monotonic() - began
    walk.expect(
        "status: NXDOMAIN" in done.stdout and took < 1,
        f"denied within {took * 1000:.0f} ms, the start of dig included",
    )
    done = walk.run(walk.ci, "dig +short +tries=1 @192.0.2.53 secret.demo.test")
    walk.expect("no servers could be reached" in done.stdout, "ci cannot ask past the proxy")
    done = walk.run(walk.names, "grep -c secret queries.log")
    walk.expect(done.stdout == "0\n", "so the name server, which has this name, was never asked for it")


def _other(walk: Walk) -> None:
    walk.step("What one client has learned opens nothing for another")
    done = walk.run(walk.guest, "curl -sS http://198.51.100.10/")
    walk.expect(done.returncode == REFUSED, "guest may ask for the same names, but has not: refused")
    done = walk.run(walk.guest, "curl -sS http://www.demo.test/")
    walk.expect(done.stdout == "hello from web1\n", "now it has")


def _rotated(walk: Walk) -> None:
    walk.step("A name whose address changes keeps working")
    done = walk.run(walk.ci, "curl -sS http://rotate.demo.test/")
    walk.expect(done.stdout == "hello from web2\n", "the name leads to web2")
    walk.run(walk.names, f"sed -i s/{BEFORE}/{AFTER}/ demo.zone")
    done = walk.run(walk.ci, "curl -sS http://rotate.demo.test/")
    walk.expect(done.stdout == "hello from web1\n", "now to web1, whose address is open since ci has asked")
    done = walk.run(walk.ci, f"curl -sS http://{BEFORE}/")
    walk.expect(done.stdout == "hello from web2\n", "and the old address, for who still remembers it")


def _sets(walk: Walk) -> None:
    walk.step("The sets explain themselves")
    done = walk.run(walk.router, "nft list set inet dnsproxy ep.default.ci.port4")
    brought = {"198.51.100.10": "www", BEFORE: "rotate", AFTER: "rotate"}
    holds = [
        f'{address} . tcp . 80 comment "{name}.demo.test."' in done.stdout
        for address, name in brought.items()
    ]
    walk.expect(all(holds), "each address that ci may connect to stands there with the name that brought it")


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def bold(text: str) -> str:
    """Return the text in bold, where there is a terminal."""
    return _styled("1", text)


def _green(text: str) -> str:
    return _styled("32", text)


def _styled(code: str, text: str) -> str:
    """Return the text as it is where there is no terminal, or where it wants no colours (no-color.org)."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if plain else f"\033[{code}m{text}\033[0m"
