"""A web server on loopback, over TLS with a test CA or without, that answers what a test tells it to.

It plays STRATO, echo services and routers: any octets, hang-ups, and silence for as long as nobody leaves.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from aiohttp.abc import AbstractResolver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

HANG_UP = b""
SILENCE = None  # the connection stays open


def reply(status: int, body: str | bytes = "", **headers: str) -> bytes:
    """Return an HTTP response; underscores in the names of headers stand for hyphens."""
    octets = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} Some reason", f"Content-Length: {len(octets)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + octets


@dataclass
class Seen:
    """A request that arrived."""

    method: str
    target: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    peer: str

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))


@dataclass
class WebServer:
    """`answers` is what to send, or a function of the request. `raw`: of whatever arrives first.

    `lingering`: what was sent is not the end, and nothing more comes.
    """

    answers: bytes | Callable[[Seen], bytes | None] | None = HANG_UP
    raw: bool = False
    lingering: bool = False
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    _open: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open[asyncio.current_task()] = writer
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()
            del self._open[asyncio.current_task()]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[0]
        seen = Seen("", "", {}, await reader.read(65536), peer) if self.raw else await _request(reader, peer)
        self.seen.append(seen)
        self.arrived.set()
        octets = self.answers(seen) if callable(self.answers) else self.answers
        writer.write(octets or b"")
        await writer.drain()
        if octets is SILENCE or self.lingering:
            await reader.read()  # until the client leaves

    async def close(self) -> None:
        for writer in self._open.values():
            writer.transport.abort()
        await asyncio.gather(*self._open)


async def _request(reader: asyncio.StreamReader, peer: str) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method, target, headers, body, peer)


@asynccontextmanager
async def serving(
    answers: bytes | Callable[[Seen], bytes | None] | None = HANG_UP,
    context: ssl.SSLContext | None = None,
    hosts: tuple[str, ...] = ("127.0.0.1",),
    *,
    raw: bool = False,
) -> AsyncIterator[WebServer]:
    """Serve on one port of some loopback addresses."""
    web = WebServer(answers, raw)
    servers: list[asyncio.Server] = []
    try:
        for host in hosts:
            server = await asyncio.start_server(web.serve, host, web.port, ssl=context)
            servers.append(server)
            web.port = server.sockets[0].getsockname()[1]
        yield web
    finally:
        for server in servers:
            server.close()
        await web.close()
        for server in servers:
            await server.wait_closed()


class Resolver(AbstractResolver):
    """Every name is loopback, by the family that was asked for; `nothing.invalid` is no name."""

    async def resolve(self, host, port=0, family=socket.AF_INET):
        if host == "nothing.invalid":
            raise OSError(None, "DNS lookup failed")
        addresses = {socket.AF_INET: ["127.0.0.1"], socket.AF_INET6: ["::1"]}
        found = addresses.get(family) or [*addresses[socket.AF_INET6], *addresses[socket.AF_INET]]
        return [
            {
                "hostname": host,
                "host": each,
                "port": port,
                "family": socket.AF_INET6 if ":" in each else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for each in found
        ]

    async def close(self):
        pass


@dataclass(frozen=True)
class Authority:
    """A certificate authority of the test's own, and a server that it vouches for as `localhost`."""

    cafile: str
    context: ssl.SSLContext


def authority(directory) -> Authority:
    import trustme  # noqa: PLC0415 - takes a while, and few tests need it

    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(directory / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost", "127.0.0.1", "::1").configure_cert(context)
    return Authority(str(directory / "ca.pem"), context)
