"""Opening the sockets that clients ask, with one clear sentence for each way in which that fails."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Any, Final

from dnsproxy.addresses import with_port
from dnsproxy.errors import DnsproxyError, NetworkError, RightsError

SO_RCVBUFFORCE: Final = 33  # asm-generic/socket.h; needs CAP_NET_ADMIN and may exceed net.core.rmem_max
BUFFER: Final = 4 * 1024 * 1024  # octets; a burst of some thousand datagrams waits here, not at the client

LARGEST_QUERY: Final = 4_096  # octets, over UDP and TCP; a query is a name and an OPT record

_PROTOCOLS: Final = {socket.SOCK_DGRAM: "UDP", socket.SOCK_STREAM: "TCP"}
_TOOLS: Final = {socket.SOCK_DGRAM: "ss -lunp", socket.SOCK_STREAM: "ss -ltnp"}


def resolve(host: str, port: int, kind: socket.SocketKind) -> tuple[socket.AddressFamily, Any]:
    """Return family and sockaddr of an address in text, `fe80::1%eth0` included, or raise NetworkError."""
    try:
        found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
    except socket.gaierror as error:
        raise NetworkError(
            f"{with_port(host, port)}: {host!r} is not an IP address of this host's kind ({error.strerror})"
        ) from error
    family, _, _, _, address = found[0]
    return family, address


def bound(host: str, port: int, kind: socket.SocketKind) -> socket.socket:
    """Return a non-blocking socket bound to exactly this address.

    An IPv6 socket takes IPv6 only, so that `[::]:53` and `0.0.0.0:53` can stand side by side.
    Raises NetworkError or RightsError.
    """
    family, address = resolve(host, port, kind)
    sock: socket.socket | None = None
    try:
        sock = socket.socket(family, kind)
        sock.setblocking(False)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if kind == socket.SOCK_STREAM:  # connections of the last run in TIME_WAIT do not hold the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise _refusal(host, port, kind, error) from error
    return sock


def _refusal(host: str, port: int, kind: socket.SocketKind, error: OSError) -> DnsproxyError:
    where = f"{_PROTOCOLS[kind]} {with_port(host, port)}"
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    match error.errno:
        case errno.EADDRINUSE:
            return NetworkError(
                f"{where} is taken ({name}): another resolver such as systemd-resolved or dnsmasq may hold "
                f"it; `{_TOOLS[kind]}` shows which. Stop it, or listen on another address or port."
            )
        case errno.EACCES | errno.EPERM:
            return RightsError(
                f"{where} may not be bound ({name}): ports below 1024 need root or CAP_NET_BIND_SERVICE. "
                "Grant it, or listen on a higher port such as 5353."
            )
        case errno.EADDRNOTAVAIL:
            return NetworkError(
                f"{where} cannot be bound ({name}): this host has no such address; "
                "`ip address` lists those it has."
            )
        case errno.EAFNOSUPPORT:
            return NetworkError(
                f"{where} cannot be bound ({name}): this host has no IPv6; leave that address out."
            )
    return NetworkError(f"{where} cannot be bound ({name}): {error.strerror}")


def enlarge(sock: socket.socket) -> None:
    """Give a socket a large receive buffer: beyond the system's limit where we may, up to it where not."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    except PermissionError:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
