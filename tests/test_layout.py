"""The shape of the tree: partners, rooms, sizes, no cycle. The import contracts stand in pyproject.toml."""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import grimp
import pytest

TREE = Path(__file__).parent.parent
SOURCES = sorted(path for path in (TREE / "dnsproxy").rglob("*.py") if path.name != "__init__.py")
CONTRACTS = tomllib.loads((TREE / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
CORE = next(contract for contract in CONTRACTS if contract["id"] == "core")["source_modules"]

# The door is tested from outside, as a running program.
PARTNERS = {
    "dnsproxy/__main__.py": "tests/test_cli.py",
    "dnsproxy/parts.py": "tests/test_app.py",
    "dnsproxy/reload.py": "tests/test_app.py",
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(TREE).with_suffix("").parts)


def partner(path: Path) -> str:
    """Return the test file of a source file: `dnsproxy/rules/pattern.py` -> `tests/rules/test_pattern.py`."""
    inside = path.relative_to(TREE / "dnsproxy")
    return PARTNERS.get(
        str(path.relative_to(TREE)), f"tests/{inside.parent}/test_{inside.name}".replace("/./", "/")
    )


def in_core(name: str) -> bool:
    return any(name == member or name.startswith(member + ".") for member in CORE)


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_each_source_file_has_its_test_file(path):
    assert (TREE / partner(path)).is_file(), f"write {partner(path)}"


def test_each_source_file_has_a_room():
    layers = next(contract for contract in CONTRACTS if contract["id"] == "rooms")["layers"]
    placed = set(chain.from_iterable(layer.replace(" ", "").split(":") for layer in layers))
    homeless = [
        name
        for name in map(module, SOURCES)
        if not any(name == member or name.startswith(member + ".") for member in placed)
    ]
    assert not homeless, f"name their layer in pyproject.toml: {homeless}"


@pytest.mark.parametrize("path", [path for path in SOURCES if in_core(module(path))], ids=module)
def test_the_core_is_synchronous(path):
    asynchronous = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    found = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, asynchronous)]
    assert not found


def functions(path: Path) -> list[tuple[str, int]]:
    """Return (place, lines) of every function of a file; docstrings and decorators do not count."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            found.append((f"{path.relative_to(TREE)}:{node.lineno} {node.name}", lines))
    return found


def test_functions_stay_short():
    everything = [found for path in SOURCES for found in functions(path)]
    lengths = [lines for _, lines in everything]
    longest = sorted(everything, key=lambda found: -found[1])[:5]
    assert statistics.median(lengths) <= 8
    assert statistics.quantiles(lengths, n=10)[-1] <= 30
    assert longest[0][1] <= 60, longest


def test_no_import_cycle():
    graph = grimp.build_graph("dnsproxy", exclude_type_checking_imports=True)
    edges = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(edges).prepare()  # CycleError names the cycle


def test_the_import_contracts_hold():
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
    ]
    environment = {**os.environ, "PYTHONPATH": str(TREE)}
    done = subprocess.run(
        [*command, "--no-cache"], cwd=TREE, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_no_raw_tasks_and_no_loop_policy(path):
    """A TaskGroup sees its tasks' errors; a uvloop policy would break the loops of pyroute2's threads."""
    calls = {
        ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    }
    assert not calls & {
        "asyncio.create_task",
        "asyncio.ensure_future",
        "asyncio.set_event_loop_policy",
        "uvloop.install",
    }
