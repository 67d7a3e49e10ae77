import os
import socket
import subprocess
import sys

import pytest

from dnsproxy.systemd import notify, passed_sockets, watchdog_interval


def test_nothing_is_passed_to_a_process_that_was_not_meant():
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "2"}
    assert passed_sockets(environment) == []
    assert environment == {}


CHILD = """
import os
os.environ["LISTEN_PID"] = str(os.getpid())
from dnsproxy.systemd import passed_sockets
print([sock.getsockname() for sock in passed_sockets()], "LISTEN_FDS" in os.environ)
"""


def test_passed_sockets_are_taken_once():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        shell = f'exec 3<&{sock.fileno()}; exec "$0" -c "$1"'
        done = subprocess.run(
            ["/bin/bash", "-c", shell, sys.executable, CHILD],
            env={**os.environ, "LISTEN_FDS": "1"},
            pass_fds=[sock.fileno()],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == f"[{sock.getsockname()}] False"


@pytest.mark.parametrize("abstract", [False, True])
def test_states_reach_the_service_manager(tmp_path, abstract):
    path = f"@dnsproxy-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + path[1:] if abstract else path)
        notify("READY=1", "STATUS=fine", environment={"NOTIFY_SOCKET": path})
        assert manager.recv(100) == b"READY=1\nSTATUS=fine"


def test_without_a_service_manager_nobody_is_told():
    notify("READY=1", environment={})


@pytest.mark.parametrize("process", ["", str(os.getpid())])
def test_the_watchdog_is_fed_twice_as_often_as_it_looks(process):
    assert watchdog_interval({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": process}) == 15.0


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": ""},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "soon"},
    ],
)
def test_without_a_watchdog_nobody_is_to_be_fed(environment):
    assert watchdog_interval(environment) is None
