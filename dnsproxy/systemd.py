"""What systemd and a service tell each other: sockets that are passed in, and states that are passed out.

sd_listen_fds(3), sd_notify(3), sd_watchdog_enabled(3): nothing where systemd did not start the service.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

FIRST = 3  # the descriptor of the first passed socket, sd_listen_fds(3)


def passed_sockets(environment: MutableMapping[str, str] = os.environ) -> list[socket.socket]:
    """Return the sockets passed to this process, once: the variables are taken out of the environment."""
    process, number = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if process != str(os.getpid()):
        return []
    sockets = [socket.socket(fileno=descriptor) for descriptor in range(FIRST, FIRST + int(number))]
    for passed in sockets:
        passed.setblocking(False)
        passed.set_inheritable(False)
    return sockets


def notify(*states: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Tell the service manager, such as `READY=1`."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto("\n".join(states).encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_interval(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds between two `WATCHDOG=1`, half of what the manager waits; None: it expects none."""
    process, microseconds = environment.get("WATCHDOG_PID", ""), environment.get("WATCHDOG_USEC", "")
    if process not in ("", str(os.getpid())) or not microseconds.isdecimal():
        return None
    return int(microseconds) / 2_000_000 or None
