"""As much of HTTP/1.1 (RFC 9112) as it takes to ask one thing over a unix socket.

The standard library's client costs a short command a quarter of its time, most of it for the reader of mail
headers. Ours knows one request for each connection, and answers that are chunked or tell their length.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINE = 65_536  # octets of a line of the head, or of the size of a chunk
HEADERS = 100

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ?(.*)\r\n").fullmatch
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15}) *(?:;.*)?\r\n").fullmatch


class HttpError(Exception):
    """What came is no HTTP, or ends in the middle."""


class Response:
    """An answer: its status, and the reason beside it; the body is read as it comes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        line = _STATUS(stream.readline(LINE))
        if line is None:
            raise HttpError("no status line")
        self.status = int(line[1])
        self.reason = line[2].decode("latin-1")
        self._headers = dict(self._read_headers())

    def _read_headers(self) -> Iterator[tuple[bytes, bytes]]:
        for _ in range(HEADERS):
            line = self._stream.readline(LINE)
            if line == b"\r\n":
                return
            name, colon, value = line.partition(b":")
            if not (colon and line.endswith(b"\r\n")):
                break
            yield name.lower(), value.strip()
        raise HttpError("no end of the head")

    def read(self) -> bytes:
        """Return the whole body."""
        return b"".join(self._pieces())

    def lines(self) -> Iterator[bytes]:
        """Yield the body line by line as it comes; the last may have no end."""
        rest = b""
        for piece in self._pieces():
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
        if rest:
            yield rest

    def _pieces(self) -> Iterator[bytes]:
        if self._headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            yield from self._chunks()
        elif (length := self._headers.get(b"content-length", b"")).isdigit():
            yield self._exactly(int(length))
        else:
            raise HttpError("no length")

    def _chunks(self) -> Iterator[bytes]:
        while size := self._size():
            yield self._exactly(size)
            if self._exactly(2) != b"\r\n":
                raise HttpError("no end of a chunk")

    def _size(self) -> int:
        line = _SIZE(self._stream.readline(LINE))
        if line is None:
            raise HttpError("no size of a chunk")
        return int(line[1], 16)

    def _exactly(self, size: int) -> bytes:
        found = self._stream.read(size)
        if len(found) < size:
            raise HttpError("the end is missing")
        return found


@contextmanager
def asked(path: Path, method: str, target: str, patience: float | None) -> Iterator[Response]:
    """Ask for something; `patience` are seconds of silence. OSError if nobody is there, HttpError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(patience)
        connection.connect(os.fspath(path))
        head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode("ascii"))
        with connection.makefile("rb") as stream:
            yield Response(stream)


def escaped(text: object) -> str:
    """Return a text as part of a target (RFC 3986 section 2.1)."""
    octets = str(text).encode("utf-8", "surrogateescape")
    return "".join(chr(each) if chr(each) in _UNRESERVED else f"%{each:02X}" for each in octets)


_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
