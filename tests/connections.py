"""Connections for the kernel's table, made without sending a packet; and what they look like in a list."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from dnsproxy.namemanager.netlink import attribute

SYN_SENT, ESTABLISHED, FIN_WAIT, TIME_WAIT, CLOSE = 1, 3, 4, 7, 8
_NESTED = 0x8000
_HEADER = struct.Struct("=IHHIIBBH")
_SEEN_REPLY, _ASSURED, _CONFIRMED = 2, 4, 8


def _tuple(source, destination, ports, protocol):
    first = 1 if len(source) == 4 else 3
    addresses = attribute(first, source) + attribute(first + 1, destination)
    numbers = [attribute(kind, port.to_bytes(2, "big")) for kind, port in zip((2, 3), ports, strict=True)]
    return attribute(1 | _NESTED, addresses) + attribute(
        2 | _NESTED, attribute(1, bytes((protocol,))) + b"".join(numbers)
    )


def entry(source, destination, *, port=1024, protocol=6, state=ESTABLISHED, timeout=600, reply=None, zone=0):
    """A message that creates a connection, or tells of it; `reply` is (source, destination) after NAT."""
    answer = reply or (destination, source)
    status = _SEEN_REPLY | _ASSURED | _CONFIRMED
    body = (
        attribute(1 | _NESTED, _tuple(source, destination, (port, 443), protocol))
        + attribute(2 | _NESTED, _tuple(*answer, (443, port), protocol))
        + attribute(3, status.to_bytes(4, "big"))
        + attribute(7, timeout.to_bytes(4, "big"))
    )
    if zone:
        body += attribute(18, zone.to_bytes(2, "big"))
    if protocol == 6:
        body += attribute(4 | _NESTED, attribute(1 | _NESTED, attribute(1, bytes((state,)))))
    family = socket.AF_INET if len(source) == 4 else socket.AF_INET6
    return _HEADER.pack(20 + len(body), 0x100, 0x601, 0, 0, family, 0, 0) + body


def create(entries):
    """Put connections into the table of this network namespace; OSError if the kernel refuses one."""
    with _socket() as sock:
        batch = b""
        for each in entries:
            batch += each
            if len(batch) > 60_000:
                _send(sock, batch)
                batch = b""
        _send(sock, batch)


def flush():
    """Empty the table of this network namespace."""
    with _socket() as sock:
        _send(sock, _HEADER.pack(20, 0x102, 0x5, 0, 0, 0, 0, 0))


def _socket():
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 12)
    made.setsockopt(270, 10, 1)  # an error does not repeat the request
    return made


def _send(sock, batch):
    sock.send(batch)
    with suppress(BlockingIOError):
        while answer := sock.recv(1 << 16):
            (number,) = struct.unpack_from("=i", answer, 16)
            if number:
                raise OSError(-number, os.strerror(-number))
