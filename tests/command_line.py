"""The command as users run it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).parent.parent
DEMO = TREE / "config" / "demo.yaml"
SAMPLE = TREE / "config" / "dnsproxy.yaml"


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as users do, in a process of its own."""
    inherited = {
        key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "DNSPROXY_CONFIG"}
    }
    return subprocess.run(
        [sys.executable, "-m", "dnsproxy", *map(str, arguments)],
        env={**inherited, "PYTHONPATH": str(TREE), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
