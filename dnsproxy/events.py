"""The query log: event tuples -> JSON lines, written by a thread of its own.

The exchange appends plain tuples to a `Ring` and never waits. Ten times a second the writer's thread
empties the ring, renders as many events as the rate allows, drops the rest, and says how many were dropped
in a line of its own. Whatever happens to the file (a full disk, a stalled pipe) happens to that thread: the
ring overflows, which is counted, and answers are as fast as before.

A line is one of

    {"ts", "type": "request", "endpoint", "client", "protocol", "name", "qtype", "verdict", "reason", "rule"}
    {"ts", "type": "response", "endpoint", "client", "protocol", "name", "qtype", "rcode", "addresses",
     "cnames", "ttl", "upstream_ms", "hold_ms", "server", "cause", "not_learned"}
    {"ts", "type": "dropped", "count"}

`ts` is RFC 3339 in UTC; `rule` is null or {"policy", "path", "text", "at": "file:line"}.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dnslib import QTYPE, RCODE

from dnsproxy import addresses, names
from dnsproxy.errors import DocumentError
from dnsproxy.files import unwritable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dnsproxy.rules.policy import Rule, Verdict

Event: TypeAlias = tuple[Any, ...]  # ("request", ...) or ("response", ...), as the exchange lays them out

STDOUT = Path("-")
RING = 65_536  # events; about 20 MB when full; over a second of 20,000 queries/s
PERIOD = 0.1  # seconds between two visits of the writer
PATIENCE = 1.0  # seconds that a stop waits for a writer whose file does not take the last lines

_TYPES: dict[int, str] = dict(QTYPE.forward)
_RCODES: dict[int, str] = dict(RCODE.forward)


_append = deque.append  # what `super()` would look up for every event


class Ring(deque[Event]):
    """A bounded queue of events that counts what was ever appended, so that losses can be derived."""

    __slots__ = ("appended",)

    def __init__(self, size: int = RING) -> None:
        super().__init__(maxlen=size)
        self.appended = 0

    def append(self, event: Event, /) -> None:
        """Take an event; the oldest one goes where there is no room."""
        _append(self, event)
        self.appended += 1


class Drain:
    """What is to be written of a ring: at most `rate` events a second, all others counted as lost.

    Lost is what was appended and neither waits nor was written; nobody counts losses one by one.
    """

    def __init__(self, ring: Ring, rate: int, now: float) -> None:
        self._ring = ring
        self._rate = rate
        self._allowance = float(rate)
        self._then = now
        self._written = 0
        self._reported = 0

    def take(self, now: float) -> list[Event]:
        """Empty the ring and return the events that may be written at `now` (seconds)."""
        self._allowance = min(self._rate, self._allowance + (now - self._then) * self._rate)
        self._then = now
        waiting = [self._ring.popleft() for _ in range(len(self._ring))]
        kept = waiting[: int(self._allowance)]
        self._allowance -= len(kept)
        return kept

    def lost(self, taken: int) -> int:
        """Return how many events were lost and not yet reported, while `taken` ones are in hand."""
        return max(0, self._ring.appended - len(self._ring) - self._written - self._reported - taken)

    def wrote(self, events: int, lost: int) -> None:
        """Note that so many events, and a report of so many lost ones, are in the file."""
        self._written += events
        self._reported += lost


def render(event: Event, ahead: float) -> str:
    """Return an event as one line of JSON."""
    return _RENDERERS[event[0]](ahead, *event[1:])


def _request(
    ahead: float,
    now: float,
    endpoint: str,
    source: bytes,
    stream: bool,
    name: bytes | None,
    qtype: int,
    verdict: Verdict | None,
) -> str:
    head = _head("request", now + ahead, endpoint, source, stream, name, qtype)
    if verdict is None:
        return f'{head},"verdict":"denied","reason":"unknown client","rule":null}}\n'
    decision = "allowed" if verdict.allowed else "denied"
    rule = "null" if verdict.rule is None else _rule(verdict.rule)
    return f'{head},"verdict":"{decision}","reason":{quoted(verdict.reason)},"rule":{rule}}}\n'


def _response(
    ahead: float,
    now: float,
    endpoint: str,
    source: bytes,
    stream: bool,
    name: bytes | None,
    qtype: int,
    rcode: int,
    learned: Iterable[bytes],
    cnames: Iterable[bytes],
    ttl: int | None,
    upstream: float,
    hold: float,
    server: str,
    cause: str,
    private: Iterable[bytes],
) -> str:
    head = _head("response", now + ahead, endpoint, source, stream, name, qtype)
    return (
        f'{head},"rcode":"{_RCODES.get(rcode) or f"RCODE{rcode}"}"'
        f',"addresses":[{",".join(map(_address, learned))}],"cnames":[{",".join(map(_name, cnames))}]'
        f',"ttl":{"null" if ttl is None else ttl}'
        f',"upstream_ms":{upstream * 1000:.3f},"hold_ms":{hold * 1000:.3f}'
        f',"server":{quoted(server)},"cause":{quoted(cause)}'
        f',"not_learned":[{",".join(map(_address, private))}]}}\n'
    )


_RENDERERS: dict[str, Callable[..., str]] = {"request": _request, "response": _response}


def _head(
    kind: str,
    wall: float,
    endpoint: str,
    source: bytes,
    stream: bool,
    name: bytes | None,
    qtype: int,
) -> str:
    return (
        f'{{"ts":"{_stamp(wall)}","type":"{kind}","endpoint":{quoted(endpoint)},"client":{_address(source)}'
        f',"protocol":"{"tcp" if stream else "udp"}","name":{"null" if name is None else _name(name)}'
        f',"qtype":"{_TYPES.get(qtype) or f"TYPE{qtype}"}"'
    )


def _stamp(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


@lru_cache(8192)
def _name(name: bytes) -> str:
    return quoted(names.to_text(name))


@lru_cache(8192)
def _address(address: bytes) -> str:
    return f'"{addresses.to_text(address)}"'


@lru_cache(8192)
def _rule(rule: Rule) -> str:
    return (
        f'{{"policy":{quoted(rule.policy)},"path":{quoted(rule.path)},"text":{quoted(rule.text)}'
        f',"at":{quoted(f"{rule.file}:{rule.line}")}}}'
    )


class EventWriter:
    """The thread that writes a ring's events to a file (`-`: standard output)."""

    def __init__(self, ring: Ring, file: Path, *, rate: int, say: Callable[[str], None]) -> None:
        """`say` is told, from the writer's thread and once per trouble, what keeps events from the file."""
        self._file = file
        self._say = say
        self._drain = Drain(ring, rate, time.monotonic())
        self._stopped = threading.Event()
        self._reopen = False
        self._healthy = True
        self._output = _opened(file)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def reopen(self) -> None:
        """Open the file again by its name at the next visit, for log rotation."""
        self._reopen = True

    def stop(self) -> None:
        """Write what there is and end; a file that does not take it is not waited for."""
        self._stopped.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD):
            self._visit()
        self._visit()

    def _visit(self) -> None:
        try:
            if self._reopen:
                self._reopen = False
                self._swap()
            self._write()
            self._healthy = True
        except (OSError, DocumentError) as error:
            if self._healthy:
                self._say(f"events are only counted until this is mended: {error}")
            self._healthy = False

    def _swap(self) -> None:
        old, self._output = self._output, _opened(self._file)
        if self._file != STDOUT:
            os.close(old)

    def _write(self) -> None:
        now = time.monotonic()
        ahead = time.time() - now
        events = self._drain.take(now)
        lost = self._drain.lost(len(events))
        lines = [render(event, ahead) for event in events]
        if lost:
            lines.append(f'{{"ts":"{_stamp(now + ahead)}","type":"dropped","count":{lost}}}\n')
        rest = "".join(lines).encode()
        while rest:
            rest = rest[os.write(self._output, rest) :]
        self._drain.wrote(len(events), lost)


def _opened(file: Path) -> int:
    """Return a descriptor to append to; others may not read it, since it tells who asked for what."""
    if file == STDOUT:
        return sys.stdout.fileno()
    try:
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise unwritable(file, error) from None
