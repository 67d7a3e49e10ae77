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
import textwrap
import time
from typing import TYPE_CHECKING

from dnsproxy.demo.lab import Lab, as_root, require, wait_for
from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from dnsproxy.demo.lab import Namespace

INTRODUCTION = """\
A network of its own, which ends with this program; nothing outside of it is touched.

   ci     10.1.0.5, fd00:1::5 --+                    +-- names  192.0.2.53     the zone demo.test
                                +-- router: dnsproxy +-- web1   198.51.100.10 and .11, 2001:db8:1::10
   guest  10.2.0.5 -------------+   and nftables     +-- web2   203.0.113.10 and .66
"""

ZONE = """\
$ORIGIN demo.test.
$TTL 60
@       SOA   ns.demo.test. hostmaster.demo.test. ( 1 3600 600 86400 30 )
www     A     198.51.100.10
www     AAAA  2001:db8:1::10
rotate  A     203.0.113.10
secret  A     203.0.113.66
"""

SETTINGS = """\
listen: [10.1.0.1:53, 10.2.0.1:53]
upstream: {servers: [192.0.2.53]}
policy:
  directory: policies
  private: [198.51.100.0/24, 203.0.113.0/24, "2001:db8::/32"]   # reserved for documentation, public here
log: {format: text}
"""

POLICY = """\
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ci, labels: {app: build}}
spec: {addresses: [10.1.0.5, "fd00:1::5"]}
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: guest, labels: {app: build}}
spec: {addresses: [10.2.0.5]}
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: build}
spec:
  endpointSelector: {matchLabels: {app: build}}
  allow: [www.demo.test:80, rotate.demo.test:80]
"""

CI, GUEST = "10.1.0.5", "10.2.0.5"
REFUSED = 7  # curl: could not connect
_DNSPROXY = (sys.executable, "-m", "dnsproxy")


class Walk:
    """The network, and what is shown of it."""

    def __init__(self, lab: Lab) -> None:
        self.directory = lab.directory
        self.ci, self.guest, self.router = map(lab.namespace, ("ci", "guest", "router"))
        self.names, self.web1, self.web2 = map(lab.namespace, ("names", "web1", "web2"))
        self._steps = 0
        self._link(lab)

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

    def step(self, title: str) -> None:
        """Begin a step."""
        self._steps += 1
        _say("", bold(f"{self._steps}. {title}"))

    def run(self, ns: Namespace, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command line in a namespace, shown with all that it prints."""
        _say(f"   {ns.name}$ {bold(line)}")
        done = ns.run(*shlex.split(line), check=False)
        printed = (done.stdout + done.stderr).expandtabs(4)
        _say(*(f"   {each}" for each in printed.splitlines() if each.strip()))
        return done

    def expect(self, holds: object, what: str) -> None:
        """Say what was seen, if it holds; DnsproxyError otherwise."""
        if not holds:
            raise DnsproxyError(f"the demonstration failed at step {self._steps}: this does not hold: {what}")
        _say(_green(f"   \N{CHECK MARK} {what}"))

    def queries(self) -> str:
        """Return the queries that the name server has seen so far."""
        return (self.directory / "queries.log").read_text()


def main() -> int:
    """Show everything; return the exit code. Any user may, where the kernel lets users make namespaces."""
    as_root([*_DNSPROXY, "demo"])
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
    for step in (_start, _closed_before, _allowed, _denied, _other, _rotated, _sets):
        step(walk)


def _start(walk: Walk) -> None:
    walk.step("A name server, two web servers, and on the router our rules and the proxy")
    write(walk.directory / "demo.zone", ZONE)
    write(walk.directory / "policies" / "demo.yaml", POLICY)
    settings = write(walk.directory / "dnsproxy.yaml", SETTINGS)
    for web in (walk.web1, walk.web2):
        page = write(walk.directory / web.name / "index.html", f"hello from {web.name}\n")
        web.popen(sys.executable, "-m", "http.server", "--bind", "::", "--directory", str(page.parent), "80")
    zone = ("-m", "dnsproxy.demo.zone", str(walk.directory / "demo.zone"), "--listen", "192.0.2.53:53")
    walk.names.popen(sys.executable, *zone, log=walk.directory / "queries.log")
    _say(textwrap.indent(POLICY.rpartition("---\n")[2].rstrip(), "   | "))
    _say(f"   router$ {bold('dnsproxy template forward --config dnsproxy.yaml | nft -f -')}")
    rules = walk.router.run(*_DNSPROXY, "template", "forward", "--config", str(settings)).stdout
    walk.router.run("nft", "-f", "-", stdin=rules)
    _say(f"   router$ {bold('dnsproxy run --config dnsproxy.yaml')}")
    log = walk.directory / "dnsproxy.log"
    proxy = walk.router.popen(*_DNSPROXY, "run", "--config", str(settings), log=log)
    wait_for(lambda: re.search(r"\bready\b", log.read_text()) or proxy.poll() is not None, 20, "the proxy")
    if proxy.poll() is not None:
        raise DnsproxyError(f"the proxy ended with exit code {proxy.returncode}:\n{log.read_text()}")
    for web, address in ((walk.web1, "198.51.100.10"), (walk.web2, "203.0.113.10")):
        wait_for(lambda: walk.router.run("curl", "-s", address, check=False).stdout, what=web.name)  # noqa: B023 - used at once
    wait_for(lambda: "listening" in walk.queries(), what="the name server")
    walk.expect(proxy.poll() is None, "the proxy is ready, and the router itself reaches both web servers")


def _closed_before(walk: Walk) -> None:
    walk.step("Before anybody asks, every address is closed")
    done = walk.run(walk.ci, "curl -sS --max-time 5 http://198.51.100.10/")
    walk.expect(done.returncode == REFUSED, "ci is refused: no name that it may ask for has led there yet")


def _allowed(walk: Walk) -> None:
    walk.step("An allowed name resolves, and then connects, over both families")
    done = walk.run(walk.ci, "dig +short www.demo.test")
    walk.expect(done.stdout == "198.51.100.10\n", "the answer came when the kernel had the address")
    for option in ("-4", "-6"):
        done = walk.run(walk.ci, f"curl {option} -sS --max-time 5 http://www.demo.test/")
        walk.expect(done.stdout == "hello from web1\n", f"connected, with {option}")


def _denied(walk: Walk) -> None:
    walk.step("A name that is not allowed is denied at once, and nobody else hears of it")
    began = time.monotonic()
    done = walk.run(walk.ci, "dig +noall +comments +answer secret.demo.test")
    took = time.monotonic() - began
    walk.expect("status: NXDOMAIN" in done.stdout, "NXDOMAIN, with the reason where the client can take one")
    walk.expect(took < 1, f"within {took * 1000:.0f} ms, dig's own start included")
    walk.expect("secret" not in walk.queries(), "the name server, which knows this name, was not asked")
    done = walk.run(walk.ci, "dig +short +tries=1 +time=2 @192.0.2.53 secret.demo.test")
    walk.expect(
        done.returncode and "secret" not in walk.queries(), "and ci cannot ask it past the proxy either"
    )


def _other(walk: Walk) -> None:
    walk.step("What one client has learned opens nothing for another")
    done = walk.run(walk.guest, "curl -sS --max-time 5 http://198.51.100.10/")
    walk.expect(done.returncode == REFUSED, "guest may ask for the same names, but has not: refused")
    done = walk.run(walk.guest, "curl -sS --max-time 5 http://www.demo.test/")
    walk.expect(done.stdout == "hello from web1\n", "now it has")


def _rotated(walk: Walk) -> None:
    walk.step("A name whose address changes keeps working")
    done = walk.run(walk.ci, "curl -sS --max-time 5 http://rotate.demo.test/")
    walk.expect(done.stdout == "hello from web2\n", "the name leads to web2")
    write(
        walk.directory / "demo.zone",
        ZONE.replace("rotate  A     203.0.113.10", "rotate  A     198.51.100.11"),
    )
    done = walk.run(walk.ci, "dig +short rotate.demo.test")
    walk.expect(done.stdout == "198.51.100.11\n", "the zone has changed: another address")
    done = walk.run(walk.ci, "curl -sS --max-time 5 http://rotate.demo.test/")
    walk.expect(done.stdout == "hello from web1\n", "which is open, since ci has just asked for it")
    done = walk.run(walk.ci, "curl -sS --max-time 5 http://203.0.113.10/")
    walk.expect(done.stdout == "hello from web2\n", "and so is the old one, for who still remembers it")


def _sets(walk: Walk) -> None:
    walk.step("The sets explain themselves: each element says which name brought it")
    done = walk.run(walk.router, "nft list set inet dnsproxy ep.default.ci.port4")
    for address, name in (("198.51.100.10", "www"), ("203.0.113.10", "rotate"), ("198.51.100.11", "rotate")):
        wanted = rf'{re.escape(address)} \. tcp \. 80 comment "{name}\.demo\.test\."'
        walk.expect(re.search(wanted, done.stdout), f"{address} is there on account of {name}.demo.test")


def write(path: Path, text: str) -> Path:
    """Write a file as a whole, so that nobody reads half of it; return its path."""
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
    return path


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
