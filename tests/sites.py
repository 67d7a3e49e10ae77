"""A site for end-to-end tests: clients, a router that runs the real proxy, and the world behind it.

    client 10.1.0.5, fd00:1::5 --+
                                 +-- router: dnsproxy, nftables -- world 192.0.2.53: NSD, TCP servers
    other  10.2.0.5 -------------+

Every address of 198.51.100.0/22 and of 2001:db8:1::/64 is the world's own, so any name can have any of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import yaml

from dnsproxy.demo.lab import Lab, wait_for

PRIVATE = ["198.51.100.0/22", "2001:db8:1::/64"]
LEARNED = "ep.default.client.port4"

ENDPOINTS = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: client, labels: {app: test}}
spec: {addresses: [10.1.0.5, "fd00:1::5"]}
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: other, labels: {app: test}}
spec: {addresses: [10.2.0.5]}
"""

POLICY = """
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: test}
spec:
  endpointSelector: {matchLabels: {app: test}}
  allow: ["*.open.test:443/TCP"]
  resolve: ["*.lookup.test"]
"""

NSD = """
server:
{addresses}
  nsid: "ascii_{nsid}"
  ipv4-edns-size: 4096
  username: root
  zonesdir: "{directory}"
  database: ""
  pidfile: "{directory}/nsd.pid"
  xfrdfile: "{directory}/nsd.xfrd"
  zonelistfile: "{directory}/nsd.zones"
  server-count: 1
  tcp-count: 100
remote-control:
  control-enable: no
{zones}
"""


class Site:
    """The network and its processes; `write` and `start` before use."""

    def __init__(self, lab: Lab) -> None:
        self.directory = lab.directory
        self.client, self.other, self.router, self.world = map(
            lab.namespace, ("client", "other", "router", "world")
        )
        lab.link(self.client, self.router, ["10.1.0.5/24", "fd00:1::5/64"], ["10.1.0.1/24", "fd00:1::1/64"])
        lab.link(self.other, self.router, ["10.2.0.5/24"], ["10.2.0.1/24"])
        lab.link(
            self.world,
            self.router,
            ["192.0.2.53/24", "2001:db8:53::53/64"],
            ["192.0.2.1/24", "2001:db8:53::1/64"],
        )
        self.router.forward()
        for namespace, gateway in (
            (self.client, "10.1.0.1"),
            (self.other, "10.2.0.1"),
            (self.world, "192.0.2.1"),
        ):
            namespace.route("default", gateway)
        self.client.route("default", "fd00:1::1")
        self.world.route("default", "2001:db8:53::1")
        self.router.route("198.51.100.0/22", "192.0.2.53")
        self.router.route("2001:db8:1::/64", "2001:db8:53::53")
        self.world.run("ip", "route", "add", "local", "198.51.100.0/22", "dev", "lo")
        self.world.run("ip", "-6", "route", "add", "local", "2001:db8:1::/64", "dev", "lo")
        self.log = self.directory / "dnsproxy.log"
        self.config = self.directory / "dnsproxy.yaml"
        self.policies = self.directory / "policies"
        self.policies.mkdir()
        self.proxy = None

    def write(self, policy=POLICY, **settings):
        """Write settings, with any section changed, and policies."""
        base = {
            "listen": ["10.1.0.1:53", "10.2.0.1:53", "[fd00:1::1]:53"],
            "upstream": {"servers": ["192.0.2.53"]},
            "policy": {"directory": "policies", "private": PRIVATE},
            "log": {"format": "json"},
            "events": {"file": "events.jsonl"},
            "state": {"directory": "state"},
            "admin": {"socket": "admin.sock"},
            "sets": {"hold": 2.0},  # a busy machine must not look like a slow kernel
        }
        for section, changes in settings.items():
            base[section] = {**base.get(section, {}), **changes} if isinstance(changes, dict) else changes
        self.config.write_text(yaml.safe_dump(base))
        (self.policies / "endpoints.yaml").write_text(ENDPOINTS)
        (self.policies / "policy.yaml").write_text(policy)

    def dnsproxy(self, *arguments, check=True):
        """Run the command line in the router."""
        return self.router.run(sys.executable, "-m", "dnsproxy", *arguments, check=check, timeout=60)

    def start(self):
        """Start the proxy and wait until it serves."""
        self.proxy = self.router.popen(
            sys.executable, "-m", "dnsproxy", "run", "--config", str(self.config), log=self.log
        )
        self.await_log("ready")

    def start_with(self, sockets, *, wait=True):
        """Start the proxy with sockets passed to it, as systemd does."""
        moves = " ".join(f"{number}<&{sock.fileno()}" for number, sock in enumerate(sockets, 3))
        shell = (
            f'exec {moves}; LISTEN_PID=$$ LISTEN_FDS={len(sockets)} exec "$0" -m dnsproxy run --config "$1"'
        )
        self.log = self.directory / f"dnsproxy-{len(self.router.processes)}.log"
        command = ["bash", "-c", shell, sys.executable, str(self.config)]
        descriptors = [sock.fileno() for sock in sockets]
        self.proxy = self.router.popen(*command, log=self.log, pass_fds=descriptors)
        if wait:
            self.await_log("ready")

    def successor(self):
        """Start another instance that takes over; do not wait."""
        self.log = self.directory / "successor.log"
        arguments = ["run", "--take-over", "--config", str(self.config)]
        self.proxy = self.router.popen(sys.executable, "-m", "dnsproxy", *arguments, log=self.log)

    def stop(self):
        """Stop the proxy as systemd would, and return its exit code."""
        self.proxy.send_signal(signal.SIGTERM)
        return self.proxy.wait(20)

    def events_of_log(self):
        """The entries of the proxy's own log."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def await_log(self, event, count=1):
        """Wait until the log has said something `count` times; return the last such entry."""

        def said():
            found = [entry for entry in self.events_of_log() if event in entry["event"]]
            assert self.proxy.poll() is None, self.log.read_text()
            return found[count - 1] if len(found) >= count else None

        return wait_for(said, 20, f"{event!r} in the log")

    def admin(self, method, path):
        """Ask the proxy's admin API; return what it answers."""
        status, body = ask_admin(self.directory / "admin.sock", method, path)
        assert status == 200, body
        return body

    def look(self, passes=1):
        """Have the proxy look through the kernel's connections, now."""
        for _ in range(passes):
            self.admin("POST", "/v1/conntrack/pass")

    def zombies(self):
        """The zombies as the admin API lists them, by address."""
        return {row["ip"]: row for row in self.admin("GET", "/v1/zombies")}

    def kill(self):
        """End the proxy without a word, as a crash would."""
        self.proxy.kill()
        self.proxy.wait(20)

    def statistics(self):
        """The numbers that SIGUSR1 makes the proxy log."""
        before = sum(entry["event"] == "statistics" for entry in self.events_of_log())
        self.proxy.send_signal(signal.SIGUSR1)
        return self.await_log("statistics", before + 1)

    def template(self, kind="forward"):
        """Load one of our firewall templates."""
        rules = self.dnsproxy("template", kind, "--config", str(self.config)).stdout
        self.router.run("nft", "-f", "-", stdin=rules)

    def elements(self, name=LEARNED):
        """The text of one set of ours."""
        return self.router.run("nft", "list", "set", "inet", "dnsproxy", name).stdout

    def addresses(self, name=LEARNED):
        """The addresses in one set of ours."""
        return set(re.findall(r"(\S+) \. tcp \. 443", self.elements(name)))

    def nsd(self, zones, *addresses):
        """Serve zones (name -> records) by NSD in the world, by default on its own addresses; its process."""
        addresses = addresses or ("192.0.2.53", "2001:db8:53::53")
        directory = self.directory / f"nsd-{addresses[0]}"
        directory.mkdir(exist_ok=True)
        text = ""
        for name, records in zones.items():
            head = f"$ORIGIN {name}.\n$TTL 60\n@ SOA ns hostmaster 1 60 60 60 60\n@ NS ns\n"
            (directory / name).write_text(f"{head}ns A 192.0.2.53\n{records}\n")
            text += f'zone:\n  name: {name}\n  zonefile: "{directory / name}"\n'
        listed = "\n".join(f"  ip-address: {address}" for address in addresses)
        (directory / "nsd.conf").write_text(
            NSD.format(directory=directory, zones=text, addresses=listed, nsid=addresses[0])
        )
        process = self.world.popen("nsd", "-d", "-c", str(directory / "nsd.conf"))
        self.await_server(addresses[0], next(iter(zones)))
        return process

    def await_server(self, address, name):
        """Wait until a name server of the world answers for a name."""
        asked = ["dig", f"@{address}", "+tries=1", "+time=1", name, "SOA"]
        wait_for(lambda: self.world.run(*asked, check=False).returncode == 0, 20, f"a server on {address}")

    def serve(self, port=443):
        """Accept TCP connections to every address of the world; return the listening socket."""
        options = {"family": socket.AF_INET6, "dualstack_ipv6": True, "backlog": 1024}
        listener = self.world.call(lambda: socket.create_server(("::", port), **options))
        listener.setblocking(False)
        return listener


def ask_admin(path, method, target):
    """One request over a unix socket: (status, JSON)."""
    connection = HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    with closing(connection):
        connection.sock.settimeout(30)
        connection.sock.connect(str(path))
        connection.request(method, target)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@contextmanager
def site():
    """A site; everything of it is gone afterwards."""
    with Lab() as lab:
        yield Site(lab)


def open_connection(namespace, address, port=443, timeout=5.0):
    """A TCP connection made in a namespace; OSError where the firewall refuses it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def connect():
        sock = socket.socket(family)
        try:
            sock.settimeout(timeout)
            sock.connect((address, port))
        except OSError:
            sock.close()
            raise
        return sock

    return namespace.call(connect)


def numbered(count, first=0, *, version=4):
    """Records `n0 A 198.51.100.0` and so on: one address per name."""
    if version == 6:
        return "\n".join(f"n{number} AAAA 2001:db8:1::{number:x}" for number in range(first, first + count))
    return "\n".join(
        f"n{number} A 198.51.{100 + number // 256}.{number % 256}" for number in range(first, first + count)
    )


def unprivileged(*command):
    """A command without the right to change the network, as an argument vector."""
    return ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", *command]


def environment():
    """The environment of a command line run outside of any namespace."""
    return os.environ | {"PYTHONPATH": str(Path.cwd())}
