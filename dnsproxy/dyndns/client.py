"""One HTTP request, with nothing done that was not asked for.

No redirect is followed, no proxy is taken from the environment, no cookie, no netrc, no connection is kept.
The certificate is verified against the system's store, which is read anew each time: a process may live
longer than a root certificate. What goes wrong is a value and no exception, since aiohttp's exceptions carry
the headers of the request, and a password must not travel in them.

aiohttp sends a GET again by itself if the connection breaks off before the reply. For an update that may be
one too many: what is asked for once is sent once (`_once`).
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from enum import Enum
from socket import AF_UNSPEC, AddressFamily
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp
from yarl import URL

from dnsproxy import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMIT: Final = 65_536  # octets of a body
AGENT: Final = f"dnsproxy-dyndns/{__version__}"


class Limits(NamedTuple):
    """Seconds: until there is a connection, TLS included, and until everything is over."""

    connect: float
    total: float


@dataclass(frozen=True, slots=True)
class Question:
    """One request. `url` is sent as it stands; the headers may hold credentials."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | None = None
    family: AddressFamily = AF_UNSPEC  # of the socket


@dataclass(frozen=True, slots=True)
class Response:
    """What was answered; a body longer than `LIMIT` is cut there."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def whole(self) -> bool:
        """Whether the body is all that was sent."""
        return len(self.body) < LIMIT


class Trouble(Enum):
    """How a request can fail."""

    TLS = "tls"  # nothing was sent
    NETWORK = "network"
    TIMEOUT = "timeout"
    GARBLED = "garbled"  # an answer that is no HTTP


@dataclass(frozen=True, slots=True)
class Failure:
    """No response; `reason` is half a sentence to a person."""

    trouble: Trouble
    reason: str


async def fetch(question: Question, limits: Limits, cafile: str | None = None) -> Response | Failure:
    """Make one request; `cafile` replaces the system's store of certificates."""
    try:
        return await _fetch(question, limits, cafile)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return _failure(error, limits)


async def _fetch(question: Question, limits: Limits, cafile: str | None) -> Response:
    context = await asyncio.to_thread(ssl.create_default_context, cafile=cafile)
    connector = aiohttp.TCPConnector(
        family=question.family, ssl=context, force_close=True, resolver=aiohttp.ThreadedResolver()
    )
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=limits.total, connect=limits.connect),
        auto_decompress=False,
        trust_env=False,
        middlewares=(_once(),),
    )
    headers = {"User-Agent": AGENT, "Accept": "*/*", "Accept-Encoding": "identity", **question.headers}
    async with (
        session,
        session.request(
            question.method,
            URL(question.url, encoded=True),
            headers=headers,
            data=question.body,
            allow_redirects=False,
        ) as response,
    ):
        return Response(response.status, response.headers, await _body(response.content))


def _once() -> aiohttp.ClientMiddlewareType:
    sent = False

    async def middleware(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        nonlocal sent
        if sent:
            raise aiohttp.ClientConnectionError
        sent = True
        return await handler(request)

    return middleware


async def _body(content: aiohttp.StreamReader) -> bytes:
    body = b""
    while len(body) < LIMIT and (part := await content.read(LIMIT - len(body))):
        body += part
    return body


def _failure(error: Exception, limits: Limits) -> Failure:
    """Return what happened, in our own words: the error's own may quote what was sent."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or "it does not fit the name"
        return Failure(Trouble.TLS, f"the certificate is not to be trusted: {reason}")
    if isinstance(error, ssl.SSLError | aiohttp.ClientSSLError):
        return Failure(Trouble.TLS, "TLS could not be agreed on")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Failure(Trouble.NETWORK, "the name of the server cannot be resolved")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Failure(Trouble.NETWORK, f"no connection within {limits.connect:g} s")
    if isinstance(error, TimeoutError):
        return Failure(Trouble.TIMEOUT, f"no answer within {limits.total:g} s")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Failure(Trouble.NETWORK, f"no connection: {error.os_error.strerror or 'unreachable'}")
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return Failure(Trouble.NETWORK, "the connection broke off")
    return Failure(Trouble.GARBLED, "the answer is no HTTP")
