"""A process that is killed with SIGKILL while its request is under way, and the next one after it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# The publisher says that it sends, on standard output, and then does what the first argument says.
PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
from dyndns_world import Home, domain
from dnsproxy.cache.journal import Journal
from dnsproxy.cache.keeper import Keeper
from dnsproxy.cache.store import Store
from dnsproxy.dyndns.outcomes import Code, Reply
from dnsproxy.dyndns.plan import Phase
from dnsproxy.dyndns.sync import Sync

class Publisher:
    async def publish(self, request):
        print("sent", flush=True)
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return Reply(Code.GOOD)

class Memory:
    def __init__(self, store):
        self.store = store
    async def load(self):
        return self.store.load().memo
    async def remember(self, key, value):
        self.store.remember(key, value)

async def main():
    sync = Sync(Home(), Publisher(), None, Memory(Store(Path(sys.argv[2]))), boot=sys.argv[3],
                chance=lambda: 0.0)
    sync.update([domain()])
    task = asyncio.create_task(sync.run())
    while not (views := sync.views()) or views[0][0].phase is Phase.PENDING:
        await asyncio.sleep(0.01)
    view, shown = views[0]
    print(view.phase.value, round(view.next_run - sync.clock(), -1), view.state.doubtful, flush=True)
    task.cancel()

asyncio.run(main())
"""


def run(folder: Path, what: str, boot: str) -> subprocess.CompletedProcess[str]:
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, what, str(folder), boot],
        env={"PYTHONPATH": ":".join(path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("boot", ["this", "another"])
def test_killed_between_sending_and_storing_the_next_process_waits(tmp_path, boot):
    first = run(tmp_path, "kill", "this")
    assert (first.returncode, first.stdout) == (-signal.SIGKILL, "sent\n"), first.stderr
    second = run(tmp_path, "answer", boot)
    assert (second.returncode, second.stdout) == (0, "spaced 300.0 True\n"), second.stderr


def test_without_a_kill_the_next_process_finds_nothing_to_do(tmp_path):
    first, second = run(tmp_path, "answer", "this"), run(tmp_path, "answer", "this")
    assert first.stdout.splitlines()[0] == "sent", first.stderr
    assert "in-sync" in first.stdout.splitlines()[-1]
    assert "sent" not in second.stdout, second.stderr
    assert "in-sync" in second.stdout
