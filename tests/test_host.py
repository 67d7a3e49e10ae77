"""The host's addresses: from a real kernel in a network namespace, and where netlink is denied."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from textwrap import dedent

import pytest

from dnsproxy import host

# Denies AF_NETLINK as systemd's RestrictAddressFamilies does: socket() fails with EAFNOSUPPORT.
DENY_NETLINK = """
    import ctypes, platform, struct
    number = {"x86_64": 41, "aarch64": 198}[platform.machine()]
    program = [
        (0x20, 0, 0, 0), (0x15, 0, 3, number),         # the system call: socket?
        (0x20, 0, 0, 16), (0x15, 0, 1, 16),            # its first argument: AF_NETLINK?
        (0x06, 0, 0, 0x00050000 | 97),                 # EAFNOSUPPORT
        (0x06, 0, 0, 0x7FFF0000),                      # allow
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0             # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, filter, 0, 0) == 0        # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
"""

WATCH = """
    import asyncio, os
    from contextlib import aclosing
    from dnsproxy import addresses, host

    async def main():
        async with aclosing(host.changes(lambda text: print("SAY", text))) as found:
            async for seen in found:
                print(*sorted(map(addresses.to_text, seen)) or ["none"], flush=True)
                if not step():
                    return

    def run():
        if os.environ.get("DNSPROXY_LOOP") == "uvloop":
            import uvloop
            uvloop.run(main())
        else:
            asyncio.run(main())
"""


def run(script: str, *prefix: str) -> list[str]:
    """Run a script in a process of its own, warnings as errors, and return what it printed."""
    command = [*prefix, sys.executable, "-W", "error", "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.kernel
def test_each_change_of_the_addresses_is_seen():
    steps = """
        import subprocess
        changes = [
            "ip link set lo up",
            "ip address add 192.0.2.9/32 dev lo",
            "ip address add 2001:db8::9/128 dev lo",
            "ip address add 192.0.2.1 peer 192.0.2.2 dev lo",
            # an event that changes no address, and later one that does
            "ip address change 192.0.2.9/32 dev lo valid_lft 999 preferred_lft 999 && sleep 0.3 && "
            "ip address del 192.0.2.9/32 dev lo",
        ]
        def step():
            if changes:
                subprocess.Popen(changes.pop(0), shell=True)
                return True
        run()
    """
    assert run(dedent(WATCH) + dedent(steps), "unshare", "--net") == [
        "none",
        "127.0.0.1 ::1",
        "127.0.0.1 192.0.2.9 ::1",
        "127.0.0.1 192.0.2.9 2001:db8::9 ::1",
        "127.0.0.1 192.0.2.1 192.0.2.9 2001:db8::9 ::1",
        "127.0.0.1 192.0.2.1 2001:db8::9 ::1",
    ]


# Keeps the reader from reading while events pile up behind it, then waits for two more changes.
OVERRUN = """
    import asyncio, subprocess, threading
    from contextlib import aclosing
    from dnsproxy import addresses, host

    local, waiting, gate = host._local, threading.Event(), threading.Event()
    host.BUFFER = 1  # the kernel makes it a few events

    def slow(message):
        waiting.set()
        gate.wait()
        return local(message)

    def ip(*lines):
        subprocess.run(["ip", "-batch", "-"], input="\\n".join(lines), text=True, check=True)

    def burst():
        host._local = slow
        ip("address add 192.0.2.1/32 dev lo")
        waiting.wait()
        ip(*["address add 192.0.2.2/32 dev lo", "address del 192.0.2.2/32 dev lo"] * 300)
        ip("address add 192.0.2.3/32 dev lo")
        gate.set()

    async def seen(found, *wanted):
        while not set(map(addresses.from_text, wanted)) <= await anext(found):
            pass

    async def main():
        ip("link set lo up")
        async with aclosing(host.changes(lambda text: print("SAY", text))) as found:
            await seen(found)
            await asyncio.to_thread(burst)
            await seen(found, "192.0.2.1", "192.0.2.3")
            ip("address add 192.0.2.4/32 dev lo")
            await seen(found, "192.0.2.4")
        print("followed")

    asyncio.run(main())
"""


@pytest.mark.kernel
def test_events_that_come_faster_than_they_are_read_end_nothing():
    assert run(dedent(OVERRUN), "unshare", "--net") == ["followed"]


def test_any_error_is_said_once_and_tried_again_until_it_is_over(monkeypatch):
    tries, reported, stopped = [], [], Future()

    async def follow(report, stop):
        tries.append(None)
        if len(tries) in (3, 5):
            report(host.LOOPBACK)
        if len(tries) == 5:
            stopped.set_result(None)
        raise RuntimeError(f"try {len(tries)}")

    monkeypatch.setattr(host, "_follow", follow)
    monkeypatch.setattr(host, "PAUSE", 0.01)
    host._run(lambda item: reported.append(item if item == host.LOOPBACK else str(item)), stopped)
    assert reported[:4] == ["try 1", host.LOOPBACK, "try 3", host.LOOPBACK]


@pytest.mark.kernel
def test_one_reading_finds_both_families():
    script = "from dnsproxy import addresses, host; print(*sorted(map(addresses.to_text, host.read())))"
    up = f"ip link set lo up && ip address add 192.0.2.9/32 dev lo && exec {sys.executable} -c '{script}'"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", up], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "127.0.0.1 192.0.2.9 ::1\n"


def test_without_netlink_there_is_loopback_and_one_word_about_it():
    steps = """
        def step():
            return False
        run()
        print(host.read() == host.LOOPBACK)
    """
    printed = run(dedent(DENY_NETLINK) + dedent(WATCH) + dedent(steps))
    assert printed[1:] == ["127.0.0.1 ::1", "True"]
    assert printed[0].startswith("SAY the addresses of this host cannot be read ([Errno 97]")
    assert "only loopback addresses count as this host" in printed[0]
    assert "Allow AF_NETLINK" in printed[0]


class NoAddresses:
    """A netlink socket of a host without any."""

    async def addresses(self):
        return frozenset()


async def test_a_change_in_the_very_moment_of_the_end_ends_nothing_else():
    changed, reported = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(host._report(NoAddresses(), changed, lambda _: reported.set()))
    await reported.wait()
    await asyncio.sleep(0)
    changed.set()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=10)
    assert done
    assert task.cancelled()


async def test_closing_ends_the_thread():
    before = threading.active_count()
    found = host.changes(pytest.fail)
    assert await anext(found) >= host.LOOPBACK
    assert threading.active_count() == before + 1
    await found.aclose()
    assert threading.active_count() == before
