"""Sets and elements as text: the `nft` commands that stand for a change.

Used where a person reads: the `show` backend prints these commands, error messages end with one.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from dnsproxy.namemanager.elements import comment, key_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dnsproxy.namemanager.elements import Element, SetSpec


def key_types(spec: SetSpec) -> tuple[str, ...]:
    """Return nft's data types of the key of a set, in order."""
    address = f"ipv{spec.version}_addr"
    return (address, "inet_proto", "inet_service") if spec.ports else (address,)


def add_table(spec: SetSpec) -> str:
    """Return the command that creates the table of a set."""
    return f"nft add table {spec.family} {spec.table}"


def add_set(spec: SetSpec) -> str:
    """Return the command that creates a set as we need it."""
    return f"nft add set {spec} '{{ type {' . '.join(key_types(spec))}; }}'"


def add_elements(spec: SetSpec, elements: Iterable[Element]) -> str:
    """Return the command that adds elements, with their names as comments."""
    parts = (f'{key_text(element.key)} comment "{comment(element.name)}"' for element in elements)
    return f"nft add element {spec} {_block(parts)}"


def delete_elements(spec: SetSpec, elements: Iterable[Element]) -> str:
    """Return the command that deletes elements."""
    return f"nft delete element {spec} {_block(key_text(element.key) for element in elements)}"


def _block(parts: Iterable[str]) -> str:
    return shlex.quote(f"{{ {', '.join(parts)} }}")
