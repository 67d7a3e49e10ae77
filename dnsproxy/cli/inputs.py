"""The files that a command reads: settings and policy documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dnsproxy.config import Config
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.rules.policy import Policy

Texts: TypeAlias = list[tuple[str, str]]  # (file, text)


def settings(path: Path) -> Config:
    """Return the settings of a file; DocumentError names every fault."""
    from dnsproxy import config, files  # noqa: PLC0415

    return config.read(files.read_text(path), str(path))


def texts(paths: Iterable[Path]) -> Texts:
    """Return the policy files among the paths and in the folders among them."""
    from dnsproxy import files  # noqa: PLC0415

    return files.read_paths(paths)


def load(found: Texts, given: Config | None) -> tuple[EndpointTable, Policy]:
    """Return the endpoints and the policy that texts hold; DocumentError names every fault of all."""
    from dnsproxy.rules.policy import load as read  # noqa: PLC0415

    return read(found, enforcement=given.policy.enforcement if given else "default")


def local_addresses(given: Config) -> frozenset[bytes]:
    """Return this host's addresses where they matter, which is for listeners on every address."""
    if not any(listener.is_wildcard for listener in given.listen):
        return frozenset()
    from dnsproxy import host  # noqa: PLC0415

    return host.read()
