"""What is shipped beside the code: the image, the units, the gate, the licence, the samples."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import yaml

from dnsproxy import __version__, config

TREE = Path(__file__).parent.parent
PROJECT = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
UNITS = TREE / "config" / "systemd"
EXPOSURE = 2.0  # of systemd-analyze security; 1.8 with version 252


# -- Dockerfile -----------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of the Dockerfile, continued lines joined, comments left out."""
    lines = [
        line for line in (TREE / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found


def test_the_image_is_built_in_two_stages_from_one_base():
    build, final = stages()
    assert build[0][1].endswith(" AS build")
    assert final[0][1] == build[0][1].removesuffix(" AS build")
    version = tuple(map(int, re.match(r"python:(\d+)\.(\d+)", final[0][1]).groups()))
    assert version >= (3, 11)


def test_what_the_image_copies_exists_and_is_not_ignored():
    ignored = (TREE / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for word, rest in instructions():
        if word != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert (TREE / source).exists(), source
            assert any(pattern == source or pattern.startswith(f"{source}/") for pattern in kept), source


def test_the_image_runs_as_a_user_with_marked_rights_only():
    _, final = stages()
    words = [word for word, _ in final]
    (user,) = [rest for word, rest in final if word == "USER"]
    assert user not in {"root", "0"}
    assert words.index("USER") > max(place for place, word in enumerate(words) if word == "RUN")
    shell = " ".join(rest for word, rest in final if word == "RUN")
    assert f"useradd --system --no-create-home --shell /usr/sbin/nologin {user}" in shell
    assert re.findall(r"setcap (\S+)", shell) == ["cap_net_admin,cap_net_bind_service+ep"]


def test_the_image_starts_our_command_and_asks_it_a_question():
    _, final = stages()
    found = dict(final)
    assert yaml.safe_load(found["ENTRYPOINT"]) == ["dnsproxy"]
    assert "dnsproxy" in PROJECT["scripts"]
    assert yaml.safe_load(found["CMD"]) == ["run", "--config", "/etc/dnsproxy/dnsproxy.yaml"]
    health = found["HEALTHCHECK"].partition("CMD ")[2]
    python, flag, script = yaml.safe_load(health)
    assert (python, flag) == ("python", "-c")
    compile(script, "HEALTHCHECK", "exec")


def test_the_health_check_tells_an_answer_from_nobody():
    """The check as it stands in the image, but for the port: somebody answers, then nobody is there."""
    script = yaml.safe_load(dict(stages()[1])["HEALTHCHECK"].partition("CMD ")[2])[2]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        command = [
            sys.executable,
            "-c",
            script.replace(", 53)", f", {port})"),
        ]

        def answer():
            query, peer = server.recvfrom(512)
            server.sendto(query[:2] + b"\x80\x05" + query[4:], peer)

        thread = threading.Thread(target=answer)
        thread.start()
        assert subprocess.run(command, check=False, timeout=60).returncode == 0
        thread.join()
    refused = subprocess.run(command, check=False, timeout=60, capture_output=True)
    assert refused.returncode == 1


# -- systemd --------------------------------------------------------------------------------------------


def unit(name: str) -> dict[str, list[str]]:
    """Return the values of every key of a unit."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def runnable_units(tmp_path):
    """The units with a program that exists: systemd-analyze looks for it."""
    text = (UNITS / "dnsproxy.service").read_text()
    (tmp_path / "dnsproxy.service").write_text(
        text.replace("/opt/dnsproxy/bin/dnsproxy", shutil.which("true"))
    )
    shutil.copy(UNITS / "dnsproxy.socket", tmp_path)
    return tmp_path


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


@needs_systemd
def test_systemd_takes_the_units_without_a_word(runnable_units):
    files = sorted(runnable_units.iterdir())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_service_is_exposed_little(runnable_units):
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={int(EXPOSURE * 10)}"]
    done = subprocess.run(
        [*command, runnable_units / "dnsproxy.service"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout[-300:]


def test_the_service_has_two_rights_and_leaves_the_sets_alone():
    service = unit("dnsproxy.service")
    rights = ["CAP_NET_ADMIN CAP_NET_BIND_SERVICE"]
    assert service["AmbientCapabilities"] == service["CapabilityBoundingSet"] == rights
    assert not {"ExecStopPost", "ExecStop"} & set(service)
    assert "AF_NETLINK" in service["RestrictAddressFamilies"][0].split()


def test_the_service_calls_commands_that_exist():
    for line in unit("dnsproxy.service")["ExecStart"] + unit("dnsproxy.service")["ExecStartPre"]:
        program, *arguments = shlex.split(line)
        assert Path(program).name == "dnsproxy"
        command = [sys.executable, "-m", "dnsproxy", arguments[0], "--help"]
        environment = {**os.environ, "PYTHONPATH": str(TREE)}
        shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        assert arguments[1] in shown


def test_the_socket_has_the_addresses_that_the_settings_listen_on():
    passed = unit("dnsproxy.socket")
    default = [str(place) for place in config.read("{}", "dnsproxy.yaml").listen]
    assert passed["ListenDatagram"] == passed["ListenStream"] == default


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux")
def test_the_program_loads_where_memory_cannot_be_written_and_executed():
    """MemoryDenyWriteExecute in the unit; ctypes and compiled parts are what could mind it."""
    script = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(65, 1, 0, 0, 0):   # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN; Linux 6.3
    sys.exit(77 if ctypes.get_errno() == errno.EINVAL else 1)
import dnsproxy.app
"""
    environment = {**os.environ, "PYTHONPATH": str(TREE)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode == 77:
        pytest.skip("this kernel does not have PR_SET_MDWE")
    assert done.returncode == 0, done.stderr


# -- the gate, the licence, the version -----------------------------------------------------------------


def test_ci_calls_the_gate_and_requires_kernel_tests():
    lines = [
        line for line in (TREE / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert lines[-1] == "make test"
    assert "export DNSPROXY_KERNEL_TESTS=required" in lines


@pytest.mark.parametrize("path", [".ci/run", "tools/python", "tools/system-packages", "tools/test-parts"])
def test_scripts_are_executable_and_parse(path):
    assert (TREE / path).stat().st_mode & stat.S_IXUSR
    shell = "bash" if "bash" in (TREE / path).read_text().splitlines()[0] else "sh"
    assert subprocess.run([shell, "-n", TREE / path], check=False).returncode == 0


def test_the_gate_runs_the_suite_on_both_loops_and_every_linter():
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "test"], cwd=TREE, capture_output=True, text=True, check=True
    ).stdout
    for step in ("ruff format --check", "ruff check", "bin/mypy", "lint-imports", "tools/test-parts",
                 "DNSPROXY_LOOP=asyncio", "DNSPROXY_LOOP=uvloop", "--group dev"):  # fmt: skip
        assert step in shown


def test_the_licence_is_there_and_named():
    text = (TREE / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_one_version_everywhere():
    assert PROJECT["version"] == __version__
    assert f"## {__version__}" in (TREE / "CHANGELOG.md").read_text()


def test_every_dependency_has_its_reason():
    reasons = (TREE / "docs" / "design" / "dependencies.md").read_text()
    groups = tomllib.loads((TREE / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    for requirement in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["fast"] + groups:
        name = re.match(r"[\w.-]+", requirement)[0]
        assert re.search(rf"\b{re.escape(name)}\b", reasons), name


def test_bounds_in_the_note_are_those_of_the_project():
    reasons = (TREE / "docs" / "design" / "dependencies.md").read_text()
    for requirement in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["fast"]:
        name, bounds = re.match(r"([\w.-]+)(.*)", requirement).groups()
        row = next(line for line in reasons.splitlines() if line.startswith(f"| {name} "))
        assert row.split("|")[1].replace(" ", "").startswith(name + bounds.replace(" ", "")), row
