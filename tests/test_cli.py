"""The command as a process: `python -m dnsproxy`."""

from __future__ import annotations

from command_line import process

from dnsproxy import __version__


def test_the_package_is_the_command():
    done = process("version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dnsproxy {__version__}\n", "")


def test_the_exit_code_is_the_commands():
    assert process("policy", "trace").returncode == 2
