"""Telling another program, or a web service, that a record has changed or that updates are halted.

Both get the event as one JSON object: the program on its standard input, the service in the body of a POST.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import aiohttp

from dnsproxy import __version__
from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dnsproxy.dyndns.status import Event

PATIENCE: Final = 30.0  # seconds for a program or a service
AGENT: Final = f"dnsproxy/{__version__}"


class Hook:
    """Who is told: a program with its arguments, the URL of a service, or both."""

    def __init__(self, command: Sequence[str] = (), url: str | None = None) -> None:
        self._command = tuple(command)
        self._url = url

    async def __call__(self, event: Event) -> None:
        """Tell of an event; DnsproxyError where somebody did not take it."""
        body = json.dumps(event.row()).encode()
        if self._command:
            await _run(self._command, body)
        if self._url is not None:
            await _post(self._url, body)


async def _run(command: tuple[str, ...], body: bytes) -> None:
    name = command[0]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise DnsproxyError(f"{name}: cannot be started: {error.strerror}") from None
    try:
        async with asyncio.timeout(PATIENCE):
            await process.communicate(body)
    except TimeoutError:
        raise DnsproxyError(f"{name}: did not end within {PATIENCE:g} s and was ended") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise DnsproxyError(f"{name}: ended with {process.returncode}")


async def _post(url: str, body: bytes) -> None:
    """Post; no message shows the URL, which may hold a token."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    headers = {"Content-Type": "application/json", "User-Agent": AGENT}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(url, data=body, allow_redirects=False) as response,
        ):
            status = response.status
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise DnsproxyError(f"the webhook was not reached: {type(error).__name__}") from None
    if status >= 300:
        raise DnsproxyError(f"the webhook answered {status}; 2xx was expected")
