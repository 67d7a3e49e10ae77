"""Giving memory back to the kernel.

The C library keeps what was freed, if something that is still in use lies above it. After a large batch for
the state on disk that is some 100 octets for each of its rows, for ever: 7 MB at 20,000 names.
"""

from __future__ import annotations

import ctypes
from typing import Final

_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl keeps nothing


def trim() -> None:
    """Give back what was freed: some milliseconds, in which other threads may go on."""
    if _trim is not None:
        _trim(0)
