"""Cilium's cache as JSON (`cilium-dbg fqdn cache list -o json`) -> lookups for those who may use them.

An array of entries; keys that are not listed here are ignored, `endpoint-id` among them, since its numbers
mean nothing on another host:

    {"fqdn": "www.example.com.", "lookup-time": "2026-01-02T03:04:05.678Z", "ttl": 60,
     "expiration-time": "2026-01-02T03:05:05.678Z", "ips": ["192.0.2.1", "2001:db8::1"]}

`ttl` and `ips` may be missing, which means 0 and none. Cilium puts such entries into its global cache, where
its first collection takes them away again. Here each goes to the endpoints whose policies grant the name:
nobody else could use it. Times stay what the file says, so an entry that has expired becomes a zombie at the
first collection, and serves connections that are there already.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from dnsproxy import addresses as ip
from dnsproxy import names
from dnsproxy.cache.lookups import Lookup, Record
from dnsproxy.errors import DocumentError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_KINDS: Final = {str: "text", int: "a whole number", list: "a list", dict: "an object"}
_MOST_TTL: Final = 2**31 - 1  # RFC 2181 section 8
_PROBLEMS: Final = 100  # told at once


def parse(text: str, file: str) -> list[Record]:
    """Return the entries, times in seconds since 1970; DocumentError with every fault at its place."""
    reader = _Reader(text, file)
    records = list(reader.records())
    if reader.problems:
        raise DocumentError(reader.problems)
    return records


def spread(
    records: Iterable[Record], granting: Callable[[bytes], Iterable[str]], offset: float, now: float
) -> Iterator[tuple[str, Record]]:
    """Walk over the lookups of each endpoint (by key) to which `granting` says that the name is granted.

    `offset` is wall clock minus monotonic clock. Nothing was looked up later than `now`.
    """
    for name, (expiry, looked_up, ttl), addresses in records:
        record = Record(name, Lookup(expiry - offset, min(looked_up - offset, now), ttl), addresses)
        for key in granting(name):
            yield key, record


class _FaultError(ValueError):
    """A fault of an entry, at `key` or, None, of the entry as such; `path` is the place below that."""

    def __init__(self, key: str | None, message: str, path: str = "") -> None:
        super().__init__(message)
        self.key = key
        self.path = path


class _Reader:
    """Reads one entry at a time, so that a fault has its place; JSON's own reader tells no positions."""

    def __init__(self, text: str, file: str) -> None:
        self.problems: list[Problem] = []
        self._text = text
        self._file = file
        self._decode = json.JSONDecoder().raw_decode

    def records(self) -> Iterator[Record]:
        try:
            for number, (start, end, entry) in enumerate(self._entries()):
                if len(self.problems) >= _PROBLEMS:
                    return
                try:
                    yield _record(entry)
                except _FaultError as fault:
                    self._note(number, start, end, fault)
        except (ValueError, RecursionError) as error:  # a number may also be too long for Python
            at = getattr(error, "pos", 0)
            message = str(getattr(error, "msg", error))
            self.problems.append(self._problem(at, "", f"not JSON: {message[:1].lower()}{message[1:]}"))

    def _entries(self) -> Iterator[tuple[int, int, Any]]:
        """Walk over the array's values with their beginnings and ends."""
        at = self._skip(0)
        if self._text[at : at + 1] != "[":
            raise json.JSONDecodeError("expected an array, [...]", self._text, at)
        at = self._skip(at + 1)
        while self._text[at : at + 1] != "]":
            value, end = self._decode(self._text, at)
            yield at, end, value
            at = self._skip(end)
            if self._text[at : at + 1] == ",":
                at = self._skip(at + 1)
            elif self._text[at : at + 1] != "]":
                raise json.JSONDecodeError("expected , or ]", self._text, at)
        if (rest := self._skip(at + 1)) != len(self._text):
            raise json.JSONDecodeError("something follows the array", self._text, rest)

    def _skip(self, at: int) -> int:
        while self._text[at : at + 1] in {" ", "\t", "\n", "\r"}:
            at += 1
        return at

    def _note(self, number: int, start: int, end: int, fault: _FaultError) -> None:
        path = f"[{number}]" if fault.key is None else f"[{number}].{fault.key}{fault.path}"
        place = -1 if fault.key is None else self._text.find(f'"{fault.key}"', start, end)
        self.problems.append(self._problem(start if place < 0 else place, path, str(fault)))

    def _problem(self, at: int, path: str, message: str) -> Problem:
        line = self._text.count("\n", 0, at) + 1
        return Problem(self._file, line, at - self._text.rfind("\n", 0, at), path, message)


def _record(entry: Any) -> Record:  # noqa: ANN401 - any JSON value
    if not isinstance(entry, dict):
        raise _FaultError(None, f'expected an object such as {{"fqdn": ...}}, not {entry!r:.40}')
    ttl = _value(entry, "ttl", int, 0)
    if not 0 <= ttl <= _MOST_TTL:
        raise _FaultError("ttl", f"expected seconds from 0 to {_MOST_TTL}, not {ttl}")
    lookup = Lookup(_seconds(entry, "expiration-time"), _seconds(entry, "lookup-time"), ttl)
    return Record(_name(entry), lookup, tuple(_addresses(entry)))


def _value(entry: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:  # noqa: ANN401 - as `kind` says
    value = entry.get(key)
    value = default if value is None else value
    if value is None:
        raise _FaultError(key, "required, but missing")
    if type(value) is not kind:
        raise _FaultError(key, f"expected {_KINDS[kind]}, not {value!r:.40}")
    return value


def _name(entry: dict[str, Any]) -> bytes:
    try:
        return names.from_text(_value(entry, "fqdn", str))
    except _FaultError:
        raise
    except ValueError as error:
        raise _FaultError("fqdn", str(error)) from None


def _seconds(entry: dict[str, Any], key: str) -> float:
    text = _value(entry, key, str)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise _FaultError(key, f"expected a time such as 2026-01-02T03:04:05.678Z, not {text!r:.60}")
    return time.timestamp()


def _addresses(entry: dict[str, Any]) -> Iterator[bytes]:
    for number, text in enumerate(_value(entry, "ips", list, [])):
        try:
            yield ip.from_text(text if isinstance(text, str) else "")
        except ValueError:
            raise _FaultError("ips", f"expected an IP address, not {text!r:.60}", f"[{number}]") from None
