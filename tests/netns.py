"""A network namespace of its own for the calling thread, and for what it starts from then on.

Linux keeps the namespace per thread; new threads and processes inherit it. When the last of them and
the last socket made in it are gone, the kernel removes it: there is nothing to clean up.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def network_namespace():
    """Run the body in a fresh network namespace; PermissionError without CAP_SYS_ADMIN."""
    before = os.open(Path("/proc/thread-self/ns/net"), os.O_RDONLY)
    try:
        _check(_libc.unshare(_CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_libc.setns(before, _CLONE_NEWNET))
    finally:
        os.close(before)


def _check(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
