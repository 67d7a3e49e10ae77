"""Where the admin API is listened for: a unix socket, and loopback ports for it and for metrics.

Who may connect to the unix socket is a matter of its mode (0660) and owner. A loopback port can be reached by
every user of the host and, through their browsers, by every web page they visit. So over TCP a request must
name a loopback address or `localhost` as its Host (a page that has its own name resolve to 127.0.0.1 cannot),
must not come from a page (Origin), and, but for metrics and health, must carry the token.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import os
import socket
import stat
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dnsproxy.admin.api import HEALTH, ROUTES, application, refusal
from dnsproxy.admin.metrics import registry_of
from dnsproxy.errors import DocumentError, NetworkError, Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from aiohttp.typedefs import Handler, Middleware

    from dnsproxy.admin.views import State

CONNECTIONS: Final = 64  # on one listener; the next ones are closed at once
SHUTDOWN: Final = 1.0  # seconds for a request to end
MODE: Final = 0o660
TOKEN: Final = 16  # characters, at least


def _is_ours(record: logging.LogRecord) -> bool:
    """Tell whether a record is about more than a message that is no HTTP, which may hold a token."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


log = logging.getLogger("dnsproxy.admin.http")  # aiohttp's own words
log.addFilter(_is_ours)


def read_token(file: Path) -> bytes:
    """Return the token in a file; DocumentError if it is short, or if every user of the host may read it."""
    try:
        mode, text = file.stat().st_mode, file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise _unfit(file, f"cannot be read: {reason}; make one with: openssl rand -hex 32") from None
    if mode & 0o007:
        raise _unfit(file, "can be read or written by every user of this host; chmod 600 it")
    if len(text) < TOKEN or not text.isascii() or not text.isprintable() or " " in text:
        raise _unfit(file, f"holds no token: one line, {TOKEN} characters or more, no spaces")
    return text.encode()


def _unfit(file: Path, message: str) -> DocumentError:
    return DocumentError([Problem(str(file), 0, 0, "", message)])


@asynccontextmanager
async def serve(
    state: State,
    *,
    path: Path | None = None,
    listen: tuple[str, int] | None = None,
    token: bytes = b"",
    metrics: tuple[str, int] | None = None,
    per_endpoint: bool = False,
    replace: bool = False,
) -> AsyncIterator[None]:
    """Answer for as long as the block runs; NetworkError says what cannot be listened on.

    `path` is that of the unix socket. A socket that another process answers on is only taken over with
    `replace`; that process then answers no new requests. `token` must be given with `listen`.
    """
    registry = registry_of(state, per_endpoint=per_endpoint)
    async with AsyncExitStack() as stack:
        if path is not None:
            sock = open_socket(path, replace=replace)
            stack.callback(_remove, path, _identity(path))
            await stack.enter_async_context(_serving(application(state, registry, ROUTES), sock))
        if listen is not None:
            app = application(state, registry, ROUTES, _from_here, _with(token))
            await stack.enter_async_context(_serving(app, open_port(*listen)))
        if metrics is not None:
            app = application(state, registry, HEALTH, _from_here)
            await stack.enter_async_context(_serving(app, open_port(*metrics)))
        yield


@asynccontextmanager
async def _serving(app: web.Application, sock: socket.socket) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, access_log=None, logger=log, shutdown_timeout=SHUTDOWN)
    await runner.setup()
    answering = runner.server
    assert answering is not None, "a runner that is set up"

    def meet() -> asyncio.BaseProtocol:
        return answering() if len(answering.connections) < CONNECTIONS or _evict(answering) else _Full()

    listening = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
    server = await listening(meet, sock=sock)
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()


def _evict(answering: web.Server) -> bool:
    """Close the oldest connection that asks nothing, so that who is silent keeps nobody out."""
    for handler in answering.connections:
        transport, asking = handler.transport, getattr(handler, "_current_request", None)
        if transport is not None and asking is None and not transport.is_closing():
            handler.force_close()
            transport.abort()  # it leaves the connections in the loop's next turn
            return True
    return False


class _Full(asyncio.Protocol):
    """What meets a connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


# -- the unix socket ----------------------------------------------------------------------------------------


def open_socket(path: Path, *, replace: bool = False) -> socket.socket:
    """Return a bound unix socket with mode 0660, in a folder that is made if it is missing.

    It is made beside and moved into place, so that nobody meets it with another mode, and so that the path
    is never without a socket while one instance follows another.
    """
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _clear(path, replace=replace)
        return _bound(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise NetworkError(
            f"cannot make the admin socket {path}: {reason}; see admin.socket in the settings"
        ) from None


def _clear(path: Path, *, replace: bool) -> None:
    """Raise NetworkError if what is at a path is not ours to replace."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise NetworkError(f"{path} is there and no socket: remove it, or name another as admin.socket")
        if not replace and _answers(path):
            raise NetworkError(
                f"another process answers on {path}: end it, or name another socket as admin.socket"
            )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)


def _bound(path: Path) -> socket.socket:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        beside.unlink(missing_ok=True)
        sock.bind(str(beside))
        beside.chmod(MODE)
        beside.rename(path)
    except OSError:
        beside.unlink(missing_ok=True)
        sock.close()
        raise
    return sock


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _remove(path: Path, identity: tuple[int, int]) -> None:
    """Remove our socket, but not one that another instance has put in its place."""
    with suppress(OSError):
        if _identity(path) == identity:
            path.unlink()


# -- loopback ports -----------------------------------------------------------------------------------------


def open_port(address: str, port: int) -> socket.socket:
    """Return a bound TCP socket on a loopback address."""
    if not ip_address(address).is_loopback:
        raise NetworkError(
            f"{address} is no loopback address; only 127.0.0.1 and the like, and ::1, are served"
        )
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        raise NetworkError(f"cannot listen on {address} port {port} (TCP): {error.strerror}") from None
    return sock


@web.middleware
async def _from_here(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a web page makes a browser send."""
    if not _is_here(request.host):
        return refusal(403, f"this is not {request.host!r}; ask for localhost or the loopback address")
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.host}":
        return refusal(403, "web pages may not ask here")
    return await handler(request)


def _is_here(host: str) -> bool:
    """Tell whether a Host header means this host: localhost or a loopback address, with a port or not."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        port = port.removeprefix(":") if bracket else "?"
    else:
        name, _, port = host.partition(":")
    if port and not port.isdigit():
        return False
    try:
        return name.lower() == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _with(token: bytes) -> Middleware:
    """Return the middleware that asks for a token."""
    if len(token) < TOKEN:
        raise ValueError("a port without a token")

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token)
        if scheme.lower() != "bearer" or not right:
            message = "a token is needed: Authorization: Bearer, and what admin.token_file holds"
            return refusal(401, message, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check
