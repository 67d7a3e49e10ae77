"""The demonstration as a user meets it: all of it, interrupted, and without rights."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dnsproxy.demo.lab import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

DEMO = [sys.executable, "-m", "dnsproxy", "demo"]


@pytest.fixture
def environment(tmp_path):
    return os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())}


def remains(directory: Path) -> list[str]:
    """What is left of a demonstration: files, and processes, all of which name its directory."""
    found = [str(path) for path in directory.iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if str(directory).encode() in command:
                found.append(f"{process.name} {command!r}")
    return found


def test_shows_everything_and_leaves_nothing(environment, tmp_path):
    done = subprocess.run(DEMO, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    lines = done.stdout.splitlines()
    assert [line[0] for line in lines if re.match(r"\d\. ", line)] == list("1234567")
    assert sum("\N{CHECK MARK}" in line for line in lines) == 13
    assert 'comment "rotate.demo.test."' in done.stdout
    assert "\033" not in done.stdout
    assert len(lines) < 80
    assert not remains(tmp_path)


@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_in_the_middle_it_leaves_nothing(environment, tmp_path, end, code):
    """The signal goes to the whole group, as a terminal sends it."""
    with subprocess.Popen(
        DEMO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        try:
            for line in demo.stdout:
                if line.startswith("3. "):
                    break
            assert remains(tmp_path)
            os.killpg(demo.pid, end)
            _, errors = demo.communicate(timeout=60)
        finally:
            demo.kill()
    assert (demo.returncode, errors) == (code, "")
    assert not remains(tmp_path)


def test_killed_in_the_middle_it_leaves_nothing(environment, tmp_path):
    with subprocess.Popen(DEMO, env=environment, stdout=subprocess.PIPE, text=True) as demo:
        for line in demo.stdout:
            if line.startswith("3. "):
                break
        demo.kill()
    wait_for(lambda: not remains(tmp_path), 20, "the end of everything")


def test_without_rights_it_takes_a_user_namespace_or_says_why_not(environment):
    """uid 1000 of a user namespace owns root's files but has no rights."""
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"]
    allowed = subprocess.run([*user, "unshare", "--user", "--map-root-user", "--net", "true"], check=False)
    done = subprocess.run([*user, *DEMO], env=environment, capture_output=True, text=True, check=False)
    if allowed.returncode:
        assert done.returncode == 5
        assert "needs root, or a kernel that lets users make namespaces" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
