"""A file that something else writes: a hook of the DHCP client, a script. One address of a family in it."""

from __future__ import annotations

import asyncio
import os
import stat
from typing import Final

from dnsproxy.dyndns.sources import SourceError, read_address

LIMIT: Final = 4096  # octets


async def ask(path: str, length: int) -> bytes:
    """Return the packed address of this family that a file has; blanks and newlines are between addresses."""
    text = await asyncio.to_thread(_read, path)
    found = {address for address in map(read_address, text.split()) if len(address) == length}
    if len(found) != 1:
        raise SourceError(f"has {len(found) or 'no'} addresses of this family, expected one")
    return found.pop()


def _read(path: str) -> str:
    """Read a regular file; a pipe would let us wait, and a device would never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SourceError("is no regular file")
            return file.read(LIMIT).decode("utf-8-sig", "replace")
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}") from None
