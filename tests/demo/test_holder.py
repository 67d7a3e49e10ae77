"""The holder by itself; what it does for a lab is in test_lab.py."""

import subprocess
import sys

from dnsproxy.demo import holder


def test_refuses_to_run_in_the_namespace_of_who_started_it(tmp_path):
    command = [sys.executable, "-I", "-S", holder.__file__, str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "a network namespace of its own" in done.stderr
    assert tmp_path.exists()
