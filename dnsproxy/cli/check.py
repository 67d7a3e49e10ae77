"""`dnsproxy check`: everything that `run` would read, read and judged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dnsproxy.cli import inputs, options, output
from dnsproxy.errors import DocumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dnsproxy.cli.inputs import Texts
    from dnsproxy.config import Config
    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.errors import Problem


@click.command()
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path(path_type=Path))
@options.config
def check(paths: tuple[Path, ...], config: Path) -> None:
    """Check the settings and all policies.

    PATHs are policy files or folders to check instead of the configured ones.

    \b
      dnsproxy check                        everything that `run` would read
      dnsproxy check --config new.yaml      other settings
      dnsproxy check policies.d new.yaml    these policy documents only

    Exit 0: all is well, 3: something is wrong. Faults are FILE:LINE:COLUMN: PATH: MESSAGE, on standard error.
    Notes tell what a document asks for that is not enforced here, and what does not do what it seems to.
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    settings = None if paths else inputs.settings(config)
    faults, notes = checked_settings(settings) if settings else ([], [])
    try:
        texts = inputs.texts([settings.policy.directory] if settings else paths)
        notes += _checked_domains(texts, faults)
        table, policy = inputs.load(texts, settings)
    except DocumentError as error:
        faults += error.problems
    if faults:
        raise DocumentError(list(dict.fromkeys(faults)))
    _report(texts, table, [*notes, *policy.notes])


def _checked_domains(texts: Texts, faults: list[Problem]) -> list[Problem]:
    """Return the notes about DynDNS documents, and add their faults."""
    from dnsproxy.dyndns import documents  # noqa: PLC0415

    try:
        return list(documents.load(texts).notes)
    except DocumentError as error:
        faults += error.problems
        return []


def checked_settings(settings: Config) -> tuple[list[Problem], list[Problem]]:
    """Return what is wrong with the servers and files that the settings name, and what is left out."""
    faults: list[Problem] = []
    notes: list[Problem] = []
    for step in (_check_loops, _check_zone, _check_resolv_conf, _check_events, _check_state, _check_token):
        try:
            notes += step(settings)
        except DocumentError as error:
            faults += error.problems
    return faults, notes


def _check_loops(settings: Config) -> list[Problem]:
    from dnsproxy.config import check_loops  # noqa: PLC0415

    check_loops(settings, inputs.local_addresses(settings))
    return []


def _check_zone(settings: Config) -> list[Problem]:
    if settings.upstream.zone is not None:
        from dnsproxy import files  # noqa: PLC0415
        from dnsproxy.demo import zone  # noqa: PLC0415

        zone.read(files.read_text(settings.upstream.zone), str(settings.upstream.zone))
    return []


def _check_resolv_conf(settings: Config) -> list[Problem]:
    path = settings.upstream.resolv_conf
    if settings.upstream.zone is not None or settings.upstream.servers or path is None:
        return []
    from dnsproxy import files  # noqa: PLC0415
    from dnsproxy.config import upstreams_of  # noqa: PLC0415

    _, notes = upstreams_of(settings, files.read_text(path), str(path), inputs.local_addresses(settings))
    return notes


def _check_events(settings: Config) -> list[Problem]:
    from dnsproxy import files  # noqa: PLC0415
    from dnsproxy.config import STDOUT  # noqa: PLC0415

    if settings.events.file not in (None, STDOUT):
        files.check_writable(settings.events.file)
    return []


def _check_state(settings: Config) -> list[Problem]:
    """Look at what the daemon would write to, and read, apart from policies."""
    folder, preloaded = settings.state.directory, settings.state.preload
    if folder is not None:
        place = next(each for each in (folder, *folder.parents) if each.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            message = f"{folder} cannot be made, or not be written to, by user {os.geteuid()}"
            raise DocumentError([settings.problem(("state", "directory"), message)])
    if preloaded is not None:
        from dnsproxy import files  # noqa: PLC0415
        from dnsproxy.cache import preload  # noqa: PLC0415

        preload.parse(files.read_text(preloaded), str(preloaded))
    return []


def _check_token(settings: Config) -> list[Problem]:
    if settings.admin.token_file is not None:
        from dnsproxy.admin.server import read_token  # noqa: PLC0415

        read_token(settings.admin.token_file)
    return []


def _report(texts: Texts, table: EndpointTable, notes: Iterable[Problem]) -> None:
    for note in output.in_order(notes):
        message = f"{note.path}: {note.message}" if note.path else note.message
        print(replace(note, path="note", message=message))
    documents, policies = _counts(texts)
    counted = (
        output.counted(documents, "document", "documents"),
        output.counted(len(table.endpoints), "endpoint", "endpoints"),
        output.counted(policies, "policy", "policies"),
    )
    print(f"{', '.join(counted)}: ok")


def _counts(texts: Texts) -> tuple[int, int]:
    """Return how many documents there are, and how many of them are policies."""
    from dnsproxy.yamldoc import parse  # noqa: PLC0415

    kinds = [str(document.value["kind"]) for file, text in texts for document in parse(text, file)]
    return len(kinds), sum(kind.endswith("Policy") for kind in kinds)
