"""A network in a box: network namespaces, links and processes that nothing of survives us.

    with Lab() as lab:
        client, router = lab.namespace("client"), lab.namespace("router")
        lab.link(client, router, ["10.1.0.2/24", "fd00:1::2/64"], ["10.1.0.1/24", "fd00:1::1/64"])
        client.route("default", "10.1.0.1")
        router.forward()
        client.run("ping", "-c1", "10.1.0.1")

Each namespace belongs to a holder process (`holder.py`), not to a file under /run/netns: it lives as long as
this process and no longer, whichever way this process ends. Each has a mount namespace too, so that
it can have a resolv.conf of its own. Needs root, or a user namespace (`as_root`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dnsproxy.demo import holder
from dnsproxy.errors import DnsproxyError, RightsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

T = TypeVar("T")

PACKAGES = {
    "curl": "curl",
    "dig": "bind9-dnsutils",
    "ip": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}  # program -> its Debian package
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_GRACE = 3.0  # seconds between SIGTERM and SIGKILL for a process of the lab
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))  # a user's own lacks the last two


def wait_for(predicate: Callable[[], T], timeout: float = 5.0, what: str = "a condition") -> T:
    """Poll until `predicate` returns something true, and return that; DnsproxyError after `timeout` s."""
    deadline = time.monotonic() + timeout
    while not (found := predicate()):
        if time.monotonic() > deadline:
            raise DnsproxyError(f"waited {timeout:g} s in vain for {what}")
        time.sleep(0.01)
    return found


def require(*programs: str) -> None:
    """Raise DnsproxyError naming the packages of all programs that are not installed."""
    missing = [program for program in programs if not shutil.which(program, path=_PATH)]
    if missing:
        packages = " ".join(sorted({PACKAGES.get(program, program) for program in missing}))
        raise DnsproxyError(f"not installed: {', '.join(missing)}; on Debian: apt install {packages}")


def as_root(command: Sequence[str]) -> None:
    """Return if we are root; otherwise replace this process by `command` as root of a new user namespace.

    Raises RightsError where the kernel does not let users make namespaces.
    """
    if os.geteuid() == 0:
        return
    require("unshare")
    wrapped = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--"]
    tried = subprocess.run(
        [*wrapped, "true"], env=_environment(), capture_output=True, text=True, check=False
    )
    if tried.returncode:
        raise RightsError(
            "needs root, or a kernel that lets users make namespaces, and this one does not "
            f"({tried.stderr.strip()}). Run it with sudo, or see the sysctls user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns"
        )
    os.execvpe(wrapped[0], [*wrapped, *command], _environment())


def _environment() -> dict[str, str]:
    return os.environ | {"PATH": _PATH}


class Namespace:
    """One network namespace: where commands run and sockets are made.

    Made by `Lab.namespace`. `pid` is the holder, `inode` the number that the kernel gives the namespace.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.processes: list[subprocess.Popen[str]] = []
        self._holder = _hold(name, directory)
        self.pid = self._holder.pid
        self.inode = Path(f"/proc/{self.pid}/ns/net").stat().st_ino

    def enter(self, *command: str) -> list[str]:
        """Return the argument vector that runs `command` here, in the working directory of now."""
        namespaces = f"/proc/{self.pid}/ns"
        entering = [f"--net={namespaces}/net", f"--mount={namespaces}/mnt", f"--wdns={Path.cwd()}"]
        return ["nsenter", *entering, "--", *command]

    def run(
        self, *command: str, check: bool = True, timeout: float = 15.0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end, return what it said; DnsproxyError if it fails and `check`."""
        try:
            done = subprocess.run(
                self.enter(*command), env=_environment(), input=stdin, capture_output=True, text=True,
                timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DnsproxyError(
                f"{self.name}: {' '.join(command)}: not finished after {timeout:g} s"
            ) from error
        if check and done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise DnsproxyError(f"{self.name}: {' '.join(command)}: exit code {done.returncode}: {said}")
        return done

    def popen(
        self, *command: str, log: Path | None = None, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[str]:
        """Start a command here that the lab ends at its own end.

        What it prints goes to `log`, by default NAMESPACE-COUNT.log in the lab's directory. Not hit by a
        Ctrl-C meant for us, so that it ends in order.
        """
        log = log or self.directory / f"{self.name}-{len(self.processes)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self.enter(*command), env=_environment(), text=True, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=pass_fds,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` in a thread of its own that is inside the network namespace, and return its result.

        A socket made there stays there, whoever uses it: `ns.call(lambda: socket.create_connection(...))`.
        """
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(self._inside, function).result()

    def _inside(self, function: Callable[[], T]) -> T:
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12
        with Path(f"/proc/{self.pid}/ns/net").open() as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise DnsproxyError(f"{self.name}: cannot enter: {os.strerror(ctypes.get_errno())}")
        return function()

    def sysctl(self, key: str, value: int) -> None:
        """Set a network setting of this namespace, such as `net.ipv4.ip_forward`."""
        path = Path("/proc/sys", *key.split("."))
        self.call(lambda: path.write_text(f"{value}\n"))

    def forward(self) -> None:
        """Make a router of it, for both families."""
        self.sysctl("net.ipv4.ip_forward", 1)
        self.sysctl("net.ipv6.conf.all.forwarding", 1)

    def route(self, destination: str, via: str) -> None:
        """Add a route; the family is that of `via`, so `default` works for both."""
        self.run("ip", "-6" if ":" in via else "-4", "route", "add", destination, "via", via)

    def address(self, interface: str, *addresses: str) -> None:
        """Add addresses with their prefix lengths to an interface; they are usable at once."""
        flags = {address: ["nodad"] if ":" in address else [] for address in addresses}
        self.batch(" ".join(["address add", text, "dev", interface, *flags[text]]) for text in addresses)

    def batch(self, lines: Iterable[str]) -> None:
        """Run several `ip` commands as one process."""
        self.run("ip", "-batch", "-", stdin="\n".join(lines))

    def resolver(self, *servers: str) -> None:
        """Give the namespace a resolv.conf of its own that names these servers, and nothing beside it.

        Without the `hosts` line of our own a host whose libc asks systemd-resolved would do so here too,
        by a socket in the file system, past every network namespace.
        """
        lines = [f"nameserver {server}" for server in servers]
        self._mount("/etc/resolv.conf", "\n".join([*lines, "options timeout:2 attempts:2", ""]))
        if Path("/etc/nsswitch.conf").exists():
            self._mount("/etc/nsswitch.conf", "hosts: files dns\n")

    def _mount(self, target: str, text: str) -> None:
        source = self.directory / f"{self.name}-{Path(target).name}"
        source.write_text(text)
        source.chmod(0o644)
        self.run("mount", "--bind", str(source), target)

    def close(self) -> None:
        """End what runs here: first by SIGTERM, then, by closing the holder's input, whatever is left."""
        for process in reversed(self.processes):
            _end(process)
        self._holder.communicate()


def _hold(name: str, directory: Path) -> subprocess.Popen[str]:
    """Start a holder and return it when its namespace exists."""
    script = [sys.executable, "-I", "-S", holder.__file__, str(directory)]
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", "--", *script], env=_environment(), text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        said = process.communicate()[1].strip()
        raise RightsError(
            f"cannot make the network namespace {name} ({said}): it takes CAP_SYS_ADMIN and CAP_NET_ADMIN; "
            "run as root, in a container with --privileged"
        )
    return process


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Lab:
    """The namespaces of one experiment, by name, and a directory that is removed with them."""

    def __init__(self) -> None:
        require("unshare", "nsenter", "ip")
        self.directory = Path(tempfile.mkdtemp(prefix="dnsproxy-lab-"))
        self.namespaces: dict[str, Namespace] = {}

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def namespace(self, name: str) -> Namespace:
        """Make a namespace with its loopback interface up and duplicate address detection off."""
        made = self.namespaces[name] = Namespace(name, self.directory)
        for key in ("all", "default"):
            made.sysctl(f"net.ipv6.conf.{key}.accept_dad", 0)
        made.run("ip", "link", "set", "lo", "up")
        return made

    def link(
        self, left: Namespace, right: Namespace, to_left: Sequence[str], to_right: Sequence[str]
    ) -> None:
        """Join two namespaces by a cable, with the addresses (`192.0.2.1/24`) of either end.

        The interface in each is named after the other, which is what `ip` and `nft` then show.
        """
        left.run(
            "ip",
            "link",
            "add",
            right.name,
            "type",
            "veth",
            "peer",
            "name",
            left.name,
            "netns",
            str(right.pid),
        )
        left.run("ip", "link", "set", right.name, "up")
        right.run("ip", "link", "set", left.name, "up")
        left.address(right.name, *to_left)  # after both ends are up: otherwise IPv6 stays deaf for a second
        right.address(left.name, *to_right)

    def close(self) -> None:
        """End every process of the lab and remove its namespaces and its directory."""
        for namespace in reversed(self.namespaces.values()):
            namespace.close()
        self.namespaces.clear()
        shutil.rmtree(self.directory, ignore_errors=True)
