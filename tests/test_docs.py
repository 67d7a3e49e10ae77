"""The documentation is run: YAML blocks are checked, commands are executed, links lead somewhere.

A block's first word says what it is:

    ```yaml       documents or settings that check; directly followed by a block of `text`, ones that do not
                  check, and the text is what is said of them
    ```console    `$ dnsproxy ...` lines that are run; each line of output below has to begin a line of what
                  they print; `$ echo $?` shows the exit code
    ```sh         commands for a person, parsed only
    ```text       anything else
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from dnsproxy import config, events
from dnsproxy.errors import DnsproxyError, DocumentError
from dnsproxy.rules.policy import load

TREE = Path(__file__).parent.parent
PAGES = sorted([TREE / "README.md", TREE / "CHANGELOG.md", *(TREE / "docs").rglob("*.md")])
LANGUAGES = {"yaml", "console", "sh", "text", "json", "nft", "python", "mermaid"}


class Block(NamedTuple):
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(TREE)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found = []
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif opened is None:
            opened, lines = (number, line.removeprefix("```").strip()), []
        else:
            found.append(Block(page, *opened, "\n".join(lines) + "\n"))
            opened = None
    assert opened is None, f"{page}: the block at line {opened[0]} has no end"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [each for each in BLOCKS if each.language in languages], ids=str)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_says_what_it_is(block):
    assert block.language in LANGUAGES


def refusal(block: Block) -> str | None:
    """Return the text block that directly follows a block."""
    after = block.line + block.text.count("\n") + 3  # its last line, and an empty one
    return next(
        (
            each.text
            for each in BLOCKS
            if (each.page, each.line, each.language) == (block.page, after, "text")
        ),
        None,
    )


def check(block: Block, file: str) -> None:
    """Check a YAML block as what it is: documents if it has kinds, else settings."""
    if "\nkind:" in block.text:
        load([(file, block.text)])
    else:
        config.read(block.text, file)


@of("yaml")
def test_yaml_checks_or_is_refused_in_these_words(block):
    said = refusal(block)
    if said is None:
        check(block, str(block))
        return
    with pytest.raises(DocumentError) as refused:
        check(block, said.partition(":")[0])
    assert sorted(str(refused.value).splitlines()) == sorted(said.splitlines())


@of("sh")
def test_shell_commands_parse(block):
    assert subprocess.run(["bash", "-n"], input=block.text, text=True, check=False).returncode == 0


# -- commands -------------------------------------------------------------------------------------------

NOT_HERE = {"run", "demo"}  # they serve until stopped, or need namespaces; tests/e2e has them


def steps(block: Block) -> list[tuple[list[str], list[str]]]:
    """Return (words of a command, lines of output) of a console block."""
    found: list[tuple[list[str], list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((shlex.split(line.removeprefix("$ "), comments=True), []))
        else:
            found[-1][1].append(line)
    return found


@pytest.fixture
def desk(tmp_path):
    """A folder as the pages have it."""
    (tmp_path / "config").symlink_to(TREE / "config")
    (tmp_path / "policies.d").symlink_to(TREE / "config" / "policies.d")
    return tmp_path


def execute(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(TREE),
        "DNSPROXY_CONFIG": str(TREE / "config" / "dnsproxy.yaml"),
    }
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@of("console")
def test_commands_print_what_the_page_says(block, desk):
    last = 0
    for words, expected in steps(block):
        if words[:2] == ["echo", "$?"]:
            assert expected == [str(last)]
        elif words[0] == "dnsproxy" and words[1] not in NOT_HERE:
            done = execute(words, desk)
            last = done.returncode
            printed = (done.stdout + done.stderr).splitlines()
            for line in expected:
                assert any(shown.startswith(line) for shown in printed), f"{line!r} is not in {printed}"
            if expected == []:
                assert done.returncode == 0, done.stderr


def test_the_pages_show_the_commands():
    shown = {
        words[1]
        for block in BLOCKS
        if block.language == "console"
        for words, _ in steps(block)
        if len(words) > 1
    }
    assert {"check", "policy"} <= shown


# -- links ----------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as forges make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TREE)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} -> {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} -> {target}"


def test_the_map_names_every_page():
    readme = (TREE / "README.md").read_text()
    for page in (TREE / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme
    notes = (TREE / "docs" / "design" / "README.md").read_text()
    for page in (TREE / "docs" / "design").glob("*.md"):
        assert page.name == "README.md" or page.name in notes, page.name


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != TREE], ids=lambda page: str(page.relative_to(TREE))
)
def test_pages_say_when_to_read_them(page):
    if page.name != "README.md":
        head = page.read_text()[:1500]
        assert "Read when:" in head
        assert "Defines:" in head


# -- the first screen, and what the tables promise ------------------------------------------------------


def test_the_readmes_first_screen_has_both_commands_and_a_policy():
    first = "\n".join((TREE / "README.md").read_text().splitlines()[:25])
    assert "make run" in first
    assert "make test" in first
    assert "kind: EgressPolicy" in first


def test_exit_codes_in_the_manual_are_those_of_the_code():
    manual = (TREE / "docs" / "operations.md").read_text()
    told = {int(code) for code in re.findall(r"^\| (\d) \|", manual, re.MULTILINE)}
    classes = [DnsproxyError, *DnsproxyError.__subclasses__()]
    assert told == {0, 2} | {each.exit_code for each in classes}


def test_fields_of_events_in_the_manual_are_those_of_the_code():
    manual = (TREE / "docs" / "operations.md").read_text()
    for kind, sample in {
        "request": ("request", 0.0, "", b"\x7f\x00\x00\x01", False, None, 1, None),
        "response": (
            "response",
            0.0,
            "",
            b"\x7f\x00\x00\x01",
            False,
            None,
            1,
            0,
            (),
            (),
            None,
            0.0,
            0.0,
            "",
            "",
            (),
        ),
    }.items():
        row = next(line for line in manual.splitlines() if line.startswith(f"| `{kind}` |"))
        written = re.findall(r'"(\w+)":', events.render(sample, 0.0))
        assert re.findall(r"`(\w+)`", row.partition("|")[2].partition("|")[2]) == written[2:]


def test_messages_in_the_manual_are_those_of_the_code():
    source = "\n".join(path.read_text() for path in (TREE / "dnsproxy").rglob("*.py"))
    manual = (
        (TREE / "docs" / "operations.md").read_text().partition("\n## Messages\n")[2].partition("\n## ")[0]
    )
    told = [line.split("`")[1] for line in manual.splitlines() if line.startswith("| `")]
    assert len(told) > 10
    for message in told[1:]:  # the first is how a fault is laid out
        for part in message.split("..."):
            assert part.strip() in source, message
