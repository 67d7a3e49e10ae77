"""Sets that are only shown: each change is printed as the nft command that would make it.

Used without CAP_NET_ADMIN. The sets live in memory, so the NameManager works as it does with the kernel.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dnsproxy.errors import Cause, SetError
from dnsproxy.namemanager import commands
from dnsproxy.namemanager.elements import comment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from dnsproxy.namemanager.elements import Element, SetSpec


class ShowSets:
    """Sets in memory, with the methods that the NameManager wants; `write` is given one command at a time.

    Elements that are added twice or deleted without being there are no change, and not shown.
    """

    enforces: bool = False

    def __init__(self, write: Callable[[str], None] = print) -> None:
        self._write = write
        self._sets: dict[SetSpec, dict[bytes, str]] = {}
        self._tables: set[tuple[str, str]] = set()

    async def ensure(self, specs: Collection[SetSpec]) -> None:
        """Make the sets that are not there yet; those of the user are taken as being there, and empty."""
        for spec in specs:
            if spec not in self._sets:
                self._create(spec)

    async def read(self, spec: SetSpec) -> dict[bytes, str]:
        """Return key -> comment."""
        return dict(self._elements(spec))

    async def commit(self, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        """Delete, then add; SetError, and nothing changed, if a set was never asked for."""
        specs = dict.fromkeys(element.spec for element in (*deletes, *adds))
        sets = [(spec, self._elements(spec)) for spec in specs]
        for spec, elements in sets:
            gone = {element.key: element for element in _of(spec, deletes) if element.key in elements}
            if gone:
                self._write(commands.delete_elements(spec, gone.values()))
            for key in gone:
                del elements[key]
        for spec, elements in sets:
            new = {element.key: element for element in _of(spec, adds) if element.key not in elements}
            if new:
                self._write(commands.add_elements(spec, new.values()))
            elements.update((key, comment(element.name)) for key, element in new.items())

    async def foreign_change(self) -> None:
        """Never return: nobody else can change these sets."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _create(self, spec: SetSpec) -> None:
        table = (spec.family, spec.table)
        if spec.ours and table not in self._tables:
            self._write(commands.add_table(spec))
            self._tables.add(table)
        if spec.ours:
            self._write(commands.add_set(spec))
        self._sets[spec] = {}

    def _elements(self, spec: SetSpec) -> dict[bytes, str]:
        try:
            return self._sets[spec]
        except KeyError:
            raise SetError(Cause.SET_MISSING, f"set {spec} was never asked for") from None


def _of(spec: SetSpec, elements: Iterable[Element]) -> Iterable[Element]:
    return (element for element in elements if element.spec == spec)
