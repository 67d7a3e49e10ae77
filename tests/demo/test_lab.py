"""The lab: real namespaces, and that nothing of them survives."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dnsproxy.demo.lab import Lab, as_root, require, wait_for
from dnsproxy.errors import DnsproxyError

kernel = pytest.mark.kernel

SURVIVOR = """
import time
from dnsproxy.demo.lab import Lab
with Lab() as lab:
    left, right = lab.namespace("left"), lab.namespace("right")
    lab.link(left, right, ["10.1.0.2/24"], ["10.1.0.1/24"])
    left.popen("sh", "-c", "sleep 1000 & setsid sh -c 'trap \\"\\" TERM; sleep 1000 & wait' & wait")
    print(lab.directory, left.inode, right.inode, flush=True)
    time.sleep(1000)
"""


def inhabitants(inode: int) -> list[int]:
    """The processes in a network namespace."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "ns/net").stat().st_ino == inode:
                found.append(int(process.name))
    return found


@contextlib.contextmanager
def survivor():
    """A process with a lab; killed at the end if the test has not done it."""
    with subprocess.Popen(
        [sys.executable, "-c", SURVIVOR], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as script:
        try:
            yield script
        finally:
            script.kill()


def connected(ns, address):
    with contextlib.closing(ns.call(lambda: socket.create_connection((address, 80), 5))) as client:
        return client.getpeername()[0]


@kernel
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives(end):
    with survivor() as script:
        directory, *inodes = script.stdout.readline().split()
        left, right = map(int, inodes)
        wait_for(lambda: len(inhabitants(left)) == 5, what="a holder, two shells and two sleeps")
        assert inhabitants(right)
        script.send_signal(end)
        script.wait(10)
    wait_for(lambda: not inhabitants(left) and not inhabitants(right), what="the end of all processes")
    wait_for(lambda: not Path(directory).exists(), what="the end of the directory")


@kernel
def test_an_exception_ends_everything_before_it_leaves():
    with contextlib.suppress(ZeroDivisionError), Lab() as lab:
        ns = lab.namespace("only")
        process = ns.popen("sleep", "1000")
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGTERM
    assert not inhabitants(ns.inode)
    assert not lab.directory.exists()


@kernel
def test_a_router_between_two_networks_carries_both_families():
    with Lab() as lab:
        client, router, server = map(lab.namespace, ("client", "router", "server"))
        lab.link(client, router, ["10.1.0.2/24", "fd00:1::2/64"], ["10.1.0.1/24", "fd00:1::1/64"])
        lab.link(server, router, ["10.2.0.2/24", "fd00:2::2/64"], ["10.2.0.1/24", "fd00:2::1/64"])
        for ns, net in ((client, 1), (server, 2)):
            ns.route("default", f"10.{net}.0.1")
            ns.route("default", f"fd00:{net}::1")
        router.forward()
        listener = server.call(
            lambda: socket.create_server(("::", 80), family=socket.AF_INET6, dualstack_ipv6=True)
        )
        with listener:
            assert connected(client, "10.2.0.2") == "10.2.0.2"
            assert connected(client, "fd00:2::2") == "fd00:2::2"


@kernel
def test_a_namespace_sees_its_own_resolver_only():
    with Lab() as lab:
        first, second = lab.namespace("first"), lab.namespace("second")
        first.resolver("10.1.0.1", "fd00:1::1")
        own = first.run("cat", "/etc/resolv.conf").stdout
        assert own.splitlines()[:2] == ["nameserver 10.1.0.1", "nameserver fd00:1::1"]
        assert second.run("cat", "/etc/resolv.conf").stdout == Path("/etc/resolv.conf").read_text()


@kernel
def test_commands_keep_the_working_directory_and_failures_say_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Lab() as lab:
        ns = lab.namespace("only")
        assert ns.run("pwd").stdout == f"{tmp_path}\n"
        with pytest.raises(
            DnsproxyError, match="only: ip link set nowhere up: exit code 1: Cannot find device"
        ):
            ns.run("ip", "link", "set", "nowhere", "up")
        with pytest.raises(DnsproxyError, match=r"not finished after 0.1 s"):
            ns.run("sleep", "1000", timeout=0.1)
        assert ns.run("sh", "-c", "echo out; exit 3", check=False).returncode == 3


@kernel
def test_what_a_process_prints_goes_to_its_log():
    with Lab() as lab:
        ns = lab.namespace("only")
        ns.popen("sh", "-c", "echo first; echo >&2 second").wait()
        assert (lab.directory / "only-0.log").read_text() == "first\nsecond\n"


@kernel
def test_a_user_without_rights_becomes_root_of_a_namespace_or_learns_why_not():
    """uid 1000 of a user namespace has no rights, but still owns root's files: it can run the interpreter."""
    script = (
        "import sys\n"
        "from dnsproxy.demo.lab import Lab, as_root\n"
        "as_root([sys.executable, *sys.argv])\n"
        "with Lab() as lab: print(lab.namespace('only').run('ip', '-br', 'address').stdout)\n"
    )
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"]
    allowed = subprocess.run([*user, "unshare", "--user", "--map-root-user", "--net", "true"], check=False)
    with Lab() as lab:
        path = lab.directory / "script.py"
        path.write_text(script)
        environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
        command = [*user, sys.executable, str(path)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=60
        )
    if allowed.returncode:
        assert "needs root, or a kernel that lets users make namespaces" in done.stderr
    else:
        assert done.stderr == ""
        assert done.stdout.split()[:3] == ["lo", "UNKNOWN", "127.0.0.1/8"]


def test_root_stays_what_it_is():
    if os.geteuid() == 0:
        as_root(["false"])
    assert os.geteuid() in (0, os.getuid())


def test_missing_programs_are_named_with_their_packages():
    with pytest.raises(
        DnsproxyError, match="not installed: no-such-program; on Debian: apt install no-such-program"
    ):
        require("sh", "no-such-program")
    require("sh")


def test_waiting_ends():
    assert wait_for(lambda: "found", timeout=0) == "found"
    with pytest.raises(DnsproxyError, match=r"waited 0.02 s in vain for rain"):
        wait_for(lambda: None, timeout=0.02, what="rain")
