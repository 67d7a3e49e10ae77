"""Asking at a steady pace: how long each answer takes.

One loop asks all targets in turn, so that whatever else the machine does hits all of them alike. It waits for
no answer before it sends the next query, so a target that stalls shows every query that it kept waiting.
"""

from __future__ import annotations

import gc
import select
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from statistics import quantiles
from typing import TYPE_CHECKING

from world import CLIENT

from dnsproxy import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from world import World

_GRACE = 1.0  # seconds that the last answers may take


@dataclass(frozen=True)
class Delays:
    """Milliseconds of the middle and of the slowest hundredth of the answers, and how many are missing."""

    p50: float
    p99: float
    missing: int


@dataclass
class _Target:
    sock: socket.socket
    sent: dict[bytes, float] = field(default_factory=dict)
    taken: list[float] = field(default_factory=list)

    def ask(self, number: int, name: str) -> None:
        identity = (number & 0xFFFF).to_bytes(2, "big")
        wire = identity + b"\x01\x00\x00\x01" + bytes(6) + names.from_text(name) + b"\x00\x01\x00\x01"
        self.sent[identity] = time.perf_counter()
        self.sock.send(wire)

    def hear(self) -> None:
        now = time.perf_counter()
        since = self.sent.pop(self.sock.recv(4096)[:2], None)
        if since is not None:
            self.taken.append(now - since)

    def delays(self) -> Delays:
        hundredths = quantiles(self.taken, n=100)
        return Delays(hundredths[49] * 1e3, hundredths[98] * 1e3, len(self.sent))


def paced(places: Sequence[tuple[World, int]], questions: Sequence[str], rate: float) -> list[Delays]:
    """Ask every question at every place (a port in a world), each `rate` times a second.

    At most 65,536 questions, since they are told apart by their IDs.
    """
    targets = [_Target(world.namespace.call(partial(_socket, port))) for world, port in places]
    gc.disable()
    try:
        _ask_all(targets, questions, 1 / (rate * len(targets)))
    finally:
        gc.enable()
        for target in targets:
            target.sock.close()
    return [target.delays() for target in targets]


def _ask_all(targets: Sequence[_Target], questions: Sequence[str], interval: float) -> None:
    heard = {target.sock: target for target in targets}
    due = time.perf_counter()
    for number, name in enumerate(questions):
        for turn in range(len(targets)):
            _listen(heard, due)
            targets[(turn + number) % len(targets)].ask(number, name)
            due += interval
    _listen(heard, due + _GRACE)


def _listen(heard: dict[socket.socket, _Target], until: float) -> None:
    """Take answers until a time; select(2), since epoll's time-outs are whole milliseconds."""
    while (left := until - time.perf_counter()) > 0:
        for sock in select.select(heard, (), (), left)[0]:
            heard[sock].hear()


def _socket(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((CLIENT, 0))
    sock.connect(("127.0.0.1", port))
    return sock
