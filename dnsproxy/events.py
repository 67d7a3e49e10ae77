"""The query log: event tuples -> JSON lines, written by a thread of its own.

The exchange appends plain tuples to a `Ring` and never waits. Ten times a second the writer's thread
empties the ring, renders as many events as the rate allows, drops the rest, and says how many were dropped
in a line of its own. Whatever happens to the file (a full disk, a stalled pipe) happens to that thread: the
ring overflows, which is counted, and answers are as fast as before.

Whoever looks on live has a ring of their own (`Fan`), which they empty themselves; a slow reader loses
events and learns how many. While there is neither a file nor a reader, nothing is recorded.

A line is one of

    {"ts", "type": "request", "endpoint", "client", "protocol", "name", "qtype", "verdict", "reason", "rule"}
    {"ts", "type": "response", "endpoint", "client", "protocol", "name", "qtype", "rcode", "addresses",
     "cnames", "ttl", "upstream_ms", "hold_ms", "server", "cause", "not_learned"}
    {"ts", "type": "dropped", "count"}

`ts` is RFC 3339 in UTC; `rule` is null or {"policy", "path", "text", "at": "file:line"}. `cause` is empty if
the client got the upstream's answer, else

    network, upstream, timeout   no server could be reached, had a usable answer, or answered in time
    limit                        too many queries were in flight, of all clients or of this one
    policy                       the policy was swapped meanwhile, and denies the name now
    hold timeout, set refused    the kernel did not take the addresses in time, or not at all
    hold limit                   too many answers waited for the kernel
    stopping                     the proxy ended while the query was in flight or its answer waited
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dnslib import QTYPE, RCODE

from dnsproxy import addresses, names, times
from dnsproxy.errors import DocumentError
from dnsproxy.files import unwritable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dnsproxy.rules.policy import Rule, Verdict

Event: TypeAlias = tuple[Any, ...]  # ("request", ...) or ("response", ...), as the exchange lays them out

STDOUT = Path("-")
RING = 65_536  # events; about 20 MB when full; over a second of 20,000 queries/s
LOOKER = 8_192  # events that wait for one who looks on
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


class Fan:
    """Who wants events: the file's ring, if there is a file, and one ring for each who looks on.

    `record` is told to whom events go from now on, something with `append`, or None while nobody wants any.
    """

    def __init__(self, record: Callable[[Any], object], file: Ring | None = None) -> None:
        self._record = record
        self._file = file
        self._lookers: dict[int, Ring] = {}
        self._switch()

    def __len__(self) -> int:
        """Return how many look on."""
        return len(self._lookers)

    @property
    def recording(self) -> bool:
        """Tell whether anybody wants events."""
        return self._file is not None or bool(self._lookers)

    @contextmanager
    def subscribe(self, size: int = LOOKER) -> Iterator[Ring]:
        """Lend a ring that every event goes into as well; whoever takes it must empty it."""
        ring = Ring(size)
        self._lookers[id(ring)] = ring
        self._switch()
        try:
            yield ring
        finally:
            del self._lookers[id(ring)]
            self._switch()

    def _switch(self) -> None:
        rings = [*([] if self._file is None else [self._file]), *self._lookers.values()]
        self._record(_Copies(rings) if len(rings) > 1 else rings[0] if rings else None)


class _Copies:
    """Several rings as one to append to."""

    __slots__ = ("_rings",)

    def __init__(self, rings: list[Ring]) -> None:
        self._rings = rings

    def append(self, event: Event) -> None:
        for ring in self._rings:
            ring.append(event)


def render(event: Event, ahead: float) -> str:
    """Return an event as one line of JSON; `ahead` is what the wall clock is ahead of the event's."""
    kind, now, endpoint, source, stream, name, qtype, *rest = event
    return (
        f'{{"ts":"{times.to_text(now + ahead)}","type":"{kind}","endpoint":{quoted(endpoint)}'
        f',"client":{_address(source)},"protocol":"{"tcp" if stream else "udp"}"'
        f',"name":{"null" if name is None else _name(name)}'
        f',"qtype":"{_TYPES.get(qtype) or f"TYPE{qtype}"}"{_RENDERERS[kind](*rest)}}}\n'
    )


def render_lost(count: int, wall: float) -> str:
    """Return the line that says how many events are missing here."""
    return f'{{"ts":"{times.to_text(wall)}","type":"dropped","count":{count}}}\n'


def _request(verdict: Verdict | None) -> str:
    if verdict is None:
        return ',"verdict":"denied","reason":"unknown client","rule":null'
    decision = "allowed" if verdict.allowed else "denied"
    rule = "null" if verdict.rule is None else _rule(verdict.rule)
    return f',"verdict":"{decision}","reason":{quoted(verdict.reason)},"rule":{rule}'


def _response(
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
    return (
        f',"rcode":"{_RCODES.get(rcode) or f"RCODE{rcode}"}"'
        f',"addresses":[{",".join(map(_address, learned))}],"cnames":[{",".join(map(_name, cnames))}]'
        f',"ttl":{"null" if ttl is None else ttl}'
        f',"upstream_ms":{upstream * 1000:.3f},"hold_ms":{hold * 1000:.3f}'
        f',"server":{quoted(server)},"cause":{quoted(cause)}'
        f',"not_learned":[{",".join(map(_address, private))}]'
    )


_RENDERERS: dict[str, Callable[..., str]] = {"request": _request, "response": _response}


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
    """The thread that writes a ring's events to a file (`-`: standard output).

    A named pipe that nobody reads yet is opened as soon as somebody does.
    """

    def __init__(self, ring: Ring, file: Path, *, rate: int, say: Callable[[str], None]) -> None:
        """`say` is told, from the writer's thread and once per trouble, what keeps events from the file."""
        self._file = file
        self._say = say
        self._drain = Drain(ring, rate, time.monotonic())
        self._stopped = threading.Event()
        self._reopen = False
        self._healthy = True
        self._cut = False  # the last line stands there half
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
            if self._reopen or self._output is None:
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
        self._cut = False
        if old is not None and self._file != STDOUT:
            os.close(old)

    def _write(self) -> None:
        now = time.monotonic()
        ahead = time.time() - now
        events = self._drain.take(now)
        lost = self._drain.lost(len(events))
        if self._output is None:
            raise OSError(errno.ENXIO, "nobody reads this pipe", str(self._file))
        lines = [render(event, ahead) for event in events]
        if lost:
            lines.append(render_lost(lost, now + ahead))
        self._append(self._output, "".join(lines).encode(), len(events), lost)

    def _append(self, output: int, text: bytes, events: int, lost: int) -> None:
        """Write lines, one for each event and one for the lost; note those that are there whole."""
        if self._cut:
            os.write(output, b"\n")
            self._cut = False
        written = 0
        try:
            while written < len(text):
                written += os.write(output, text[written:])
        finally:
            lines = text.count(b"\n", 0, written)
            self._drain.wrote(min(lines, events), lost if lines > events else 0)
            half = written - (text.rfind(b"\n", 0, written) + 1)
            self._cut = half > 0 and not _taken_back(output, half)


def _taken_back(output: int, octets: int) -> bool:
    """Cut the last octets off a file; tell whether that could be done."""
    try:
        os.ftruncate(output, os.fstat(output).st_size - octets)
    except OSError:  # a pipe, or a terminal
        return False
    return True


def _opened(file: Path) -> int | None:
    """Return a descriptor to append to, None for a pipe without a reader.

    Others may not read the file, since it tells who asked for what.
    """
    if file == STDOUT:
        return sys.stdout.fileno()
    try:
        output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
    except OSError as error:
        if error.errno == errno.ENXIO and file.is_fifo():
            return None
        raise unwritable(file, error) from None
    os.set_blocking(output, True)  # it is the thread that waits
    return output
