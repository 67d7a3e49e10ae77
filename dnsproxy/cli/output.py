"""How rows are printed: as a table for people, as JSON or YAML for programs; and a reader that goes away."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dnsproxy.errors import Problem

Row: TypeAlias = "Mapping[str, Any]"
Columns: TypeAlias = "Mapping[str, Callable[[Row], object]]"  # heading -> what stands under it

NOTHING = "-"  # what a table shows where a row has nothing
NARROWEST, GAP = 5, 3  # characters; the table of Cilium's command line


class Outlet:
    """A stream whose reader may go away, as `head` does: what comes after that goes nowhere, without a word.

    The command runs to its end, so that its exit code is what it always is. What has no end looks at `gone`.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.gone = False

    def write(self, text: str) -> int:
        """Write as the stream does."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        """Flush as the stream does."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        """Send what is still in the stream's buffer, and all that follows, to where nobody reads."""
        self.gone = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        with suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else the stream has
        return getattr(self._stream, name)


def show(rows: Iterable[Row], columns: Columns, output: str) -> None:
    """Print rows as a table with these columns, or whole as JSON or YAML."""
    if output == "table":
        print(*table(columns, rows), sep="\n")
    else:
        show_value(list(rows), output)


def show_value(value: object, output: str) -> None:
    """Print a value as JSON or YAML."""
    if output == "json":
        print(json.dumps(value, indent=2, ensure_ascii=False))
        return
    import yaml  # noqa: PLC0415

    print(yaml.dump(value, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True, width=1000), end="")


def table(columns: Columns, rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a table, its heading first, which is all there is without rows."""
    cells = [list(columns), *([text(cell(row)) for cell in columns.values()] for row in rows)]
    widths = [max(NARROWEST, *map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.ljust(width + GAP) for cell, width in zip(line, widths, strict=True))
        yield "".join(padded).rstrip()


def text(value: object) -> str:
    """Return what a cell shows for a value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return NOTHING if value in (None, "") else printable(str(value))


def printable(value: str) -> str:
    """Return a text without what could drive a terminal."""
    return value if value.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)


def moment(stamp: str | None) -> str | None:
    """Return a time stamp of the daemon's cut to milliseconds."""
    return None if stamp is None else f"{stamp[:23]}Z"


def counted(number: int, one: str, many: str) -> str:
    """Return a number and the word that goes with it."""
    return f"{number} {one if number == 1 else many}"


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems as they stand in the files."""
    return sorted(problems, key=lambda problem: (problem.file, problem.line, problem.column))
