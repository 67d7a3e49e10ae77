"""All commands together: help, version, completion, what is loaded, how a command ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest
from command_line import DEMO, SAMPLE, TREE, process

from dnsproxy import __version__
from dnsproxy.cli import root
from dnsproxy.errors import DocumentError, NetworkError, Problem, RightsError


def test_without_arguments_the_help_teaches_and_the_usage_is_wrong(dnsproxy):
    code, out, err = dnsproxy()
    assert code == 2
    for command in ("demo", "check", "policy trace", "template forward", "run", "version"):
        assert f"dnsproxy {command}" in out + err or f"  {command} " in out + err


@pytest.mark.parametrize("command", ["run", "check", "demo", "version", "policy trace", "template forward"])
def test_every_command_has_help(dnsproxy, command):
    code, out, _ = dnsproxy(*command.split(), "--help")
    assert code == 0
    assert f"Usage: dnsproxy {command}" in out


def test_examples_in_the_help_are_commands_that_parse(dnsproxy):
    examples: set[str] = set()
    for command in ("run", "check", "policy trace", "template"):
        _, out, _ = dnsproxy(*command.split(), "--help")
        examples |= set(re.findall(r"^ +dnsproxy (\S.*?)(?:  .*| >.*)?$", out, re.MULTILINE))
    assert len(examples) >= 6
    for example in examples:
        code, _, err = dnsproxy(*example.split(), "--help")
        assert code == 0, (example, err)


def test_version(dnsproxy):
    assert dnsproxy("version") == (0, f"dnsproxy {__version__}\n", "")


def test_an_unknown_command_is_wrong_usage(dnsproxy):
    code, _, err = dnsproxy("chekc")
    assert code == 2
    assert "chekc" in err


def test_completion_is_there():
    for shell in ("bash", "zsh", "fish"):
        done = process(_DNSPROXY_COMPLETE=f"{shell}_source")
        assert done.returncode == 0
        assert "dnsproxy" in done.stdout


def loaded_by(*arguments: object) -> set[str]:
    """Return the modules that a command line loads, in a process of its own."""
    script = f"""
        import sys
        from dnsproxy import cli
        sys.argv = ["dnsproxy", *{list(map(str, arguments))!r}]
        try:
            cli.main()
        except SystemExit:
            print("loaded", *sys.modules)
    """
    environment = {**os.environ, "PYTHONPATH": str(TREE)}
    command = [sys.executable, "-c", dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {
    "asyncio",
    "dnslib",
    "pyroute2",
    "rich",
    "structlog",
    "uvloop",
    "yaml",
}  # pydantic is typer's own need


@pytest.mark.parametrize("arguments", [("version",), ("--help",), ("policy", "trace", "--help")])
def test_what_only_speaks_loads_nothing_heavy(arguments):
    assert not loaded_by(*arguments) & HEAVY


@pytest.mark.parametrize(
    "arguments", [("check", "-c", SAMPLE), ("policy", "trace", "-c", DEMO, "-e", "host", "x.test")]
)
def test_what_reads_files_loads_neither_loops_nor_netlink(arguments):
    assert not loaded_by(*arguments) & {"pyroute2", "rich", "structlog", "uvloop"}


def test_no_colour_ever_reaches_a_pipe():
    done = process("policy", "trace", "--help", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b" not in done.stdout + done.stderr


def test_run_with_faulty_settings_ends_with_three_and_no_traceback(folder, write):
    write(folder, "dnsproxy.yaml", "sets: {backend: iptables}\n")
    done = process("run", "--config", folder / "dnsproxy.yaml")
    assert done.returncode == 3
    assert done.stderr == f"{folder}/dnsproxy.yaml:1:17: sets.backend: expected 'nft', 'show' or 'auto'\n"


def test_the_version_is_an_option_too(dnsproxy):
    assert dnsproxy("--version")[:2] == (0, f"dnsproxy {__version__}\n")


@pytest.mark.parametrize("group", ["", "cache", "endpoints", "policy", "sets", "template"])
def test_no_line_in_a_list_of_commands_is_cut(dnsproxy, group):
    _, out, _ = dnsproxy(*group.split(), "--help")
    listed = out.partition("Commands:")[2]
    assert listed
    assert "..." not in listed
    assert listed.rstrip().endswith((".", ")"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(dnsproxy, shell):
    code, out, _ = dnsproxy("completion", shell)
    assert (code, f"_DNSPROXY_COMPLETE={shell}_complete" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "code"), [("--help", 0), ("policy trace -e host x.test", 1), ("cache", 2)]
)
def test_a_reader_that_has_gone_changes_neither_code_nor_words(arguments, code):
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(TREE), "DNSPROXY_CONFIG": str(DEMO)}
    done = subprocess.run(
        [sys.executable, "-m", "dnsproxy", *arguments.split()],
        env=environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr if code < 2 else "") == (code, "")


def test_what_asks_the_daemon_loads_neither_documents_nor_loops():
    assert not loaded_by("status", "--socket", "/nowhere") & {
        "asyncio",
        "pydantic",
        "pyroute2",
        "aiohttp",
        "yaml",
        "http.client",
        "email",
        "ssl",
    }


@pytest.mark.parametrize(
    ("errors", "code", "told"),
    [
        ([NetworkError("port taken")], 4, "dnsproxy: port taken\n"),
        (
            [ExceptionGroup("", [RightsError("no right")]), NetworkError("port"), NetworkError("port")],
            5,
            "dnsproxy: no right\ndnsproxy: port\n",
        ),
        (
            [DocumentError([Problem("a", 2, 1, "", "y"), Problem("a", 1, 1, "", "x")])],
            3,
            "a:1:1: x\na:2:1: y\n",
        ),
    ],
)
def test_errors_of_ours_in_a_group_end_as_messages(dnsproxy, monkeypatch, errors, code, told):
    def fails(**_):
        raise ExceptionGroup("unhandled errors in a TaskGroup", errors)

    monkeypatch.setattr("dnsproxy.cli.root.cli", fails)
    assert dnsproxy("run") == (code, "", told)


def test_a_group_with_a_fault_of_the_program_is_not_hidden(monkeypatch):
    def fails(**_):
        raise ExceptionGroup("both", [NetworkError("port taken"), KeyError("bug")])

    monkeypatch.setattr(root, "cli", fails)
    with pytest.raises(ExceptionGroup, match="both"):
        root._ended()
