from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from textwrap import dedent

import pytest

SCRIPT = """
    from pathlib import Path
    from dnsproxy import memory

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    kept = [bytes(1000) for _ in range(50_000)]
    kept[:-1] = []
    full = resident()
    memory.trim()
    assert full - before > 40_000_000, "nothing was kept by the C library: this tests nothing"
    assert resident() - before < 10_000_000
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="a C library that keeps nothing")
def test_what_was_freed_below_what_is_in_use_goes_back_to_the_kernel():
    command = [sys.executable, "-c", dedent(SCRIPT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
