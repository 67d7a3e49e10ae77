"""Passwords from outside the documents: a file, an environment variable, a systemd credential.

They are read anew for each pass, so that a new one counts without a restart; what a file holds leaves this
module as a Password or not at all.
"""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dnsproxy.dyndns.documents import Missing, Place, stripped
from dnsproxy.dyndns.outcomes import Password

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST: Final = 4096  # octets; what is longer is some other file


class Passwords:
    """The places where passwords are; `environment` is usually `os.environ`."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment

    async def read(self, place: Place) -> Password | Missing:
        """Return the password that is there now, or why there is none."""
        if place.kind == "env":
            found = self._variable(place.name)
        else:
            path = Path(place.name) if place.kind == "file" else self._credential(place.name)
            found = await asyncio.to_thread(_file, path) if isinstance(path, Path) else path
        if isinstance(found, Missing):
            return found
        password = stripped(Password(found))
        return password or Missing(f"{place.kind} {place.name}: is empty; a password was expected")

    def _variable(self, name: str) -> bytes | Missing:
        value = self._environment.get(name)
        if value is None:
            return Missing(f"the environment variable {name} is not set: set it and start again")
        return os.fsencode(value)

    def _credential(self, name: str) -> Path | Missing:
        folder = self._environment.get("CREDENTIALS_DIRECTORY")
        if folder is None:
            return Missing(f"no systemd credentials here: add LoadCredential={name}:/PATH to the unit")
        return Path(folder) / name


def _file(path: Path) -> bytes | Missing:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return Missing(f"{path}: is no file; the password was expected in it")
            found = file.read(MOST + 1)
    except OSError as error:
        return Missing(f"{path}: cannot be read: {error.strerror}; put the password there, readable for us")
    if len(found) > MOST:
        return Missing(f"{path}: holds more than {MOST} octets; the password alone was expected")
    return found
