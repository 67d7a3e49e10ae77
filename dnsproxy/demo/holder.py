"""The process that holds one network namespace of a lab, and empties it when the lab is gone.

    unshare --net --mount -- python -I -S holder.py DIRECTORY

The lab keeps the writing end of this process's standard input and never writes. Whatever ends the lab
(its own `close`, an exception, SIGTERM, kill -9, the thread of a test time-out), the kernel closes that
end, and here the read returns. Then every process found in our namespace is killed, also grandchildren
and daemons that nobody tracked, the lab's directory is removed, and with this last process the kernel
removes the namespace and its links. So there is one way of cleaning up, and it needs no goodwill.

Runs by path and outside the package, hence the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

OURS = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - pathlib would double this process's start-up time


def neighbours() -> list[int]:
    """Return the processes in our network namespace, ourselves left out."""
    running = map(int, filter(str.isdigit, os.listdir("/proc")))  # noqa: PTH208 - as above
    return [pid for pid in running if pid != os.getpid() and inside(pid)]


def inside(pid: int) -> bool:
    """Tell whether a process is in our network namespace; one that ended or is not ours to see is not."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == OURS  # noqa: PTH116 - as above
    except OSError:
        return False


def end(pid: int) -> None:
    """Kill one process, by a handle, so that a number used again by somebody else is never hit."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if inside(pid):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def sweep() -> None:
    """Kill until nobody is left; a process that forks meanwhile is met in the next round."""
    while found := neighbours():
        for pid in found:
            end(pid)
        time.sleep(0.005)


def main(directory: str) -> None:
    """Say `ready`, wait for the end of the lab, tidy up.

    Started without a namespace of its own it would tidy up the whole machine, so then it refuses.
    """
    if inside(os.getppid()):
        sys.exit("holder.py: only ever started by the lab, in a network namespace of its own")
    print("ready", flush=True)
    while os.read(0, 1):
        pass
    sweep()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
