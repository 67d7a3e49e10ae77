"""The files that an operator names: read them, notice when they change, tell whether one could be written.

Change is noticed by comparing signatures once a second, not by inotify: what counts is the state of the
folder *after* a change, which has to be read anyway; kubelet and configuration management swap whole trees
by symbolic link, which takes watches on every link of the chain to see; and on network and overlay file
systems inotify stays silent about what others write. A signature costs a helper thread two to three
microseconds a file (docs/design/files.md), and the looks become rarer as it grows, so that watching takes
one percent of a CPU at most.

Functions that read are to be called where waiting hurts nobody: a file system may take its time.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
from stat import S_ISDIR, S_ISREG
from time import thread_time
from typing import TYPE_CHECKING, TypeAlias

from dnsproxy.errors import DocumentError, Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

SUFFIXES = (".yaml", ".yml")
LARGEST = 16 * 1024 * 1024  # octets of one file
TOGETHER = 64 * 1024 * 1024  # characters of files that are read together
SETTLE = 0.1  # seconds between two looks that must agree before a change counts
QUIET, CHANGING = 100, 10  # a pause between looks lasts so many times what a look takes
DIRECTORY = "directory"

Mark: TypeAlias = tuple[str | int, ...]
Signature: TypeAlias = tuple[Mark, ...]


def read_text(path: Path) -> str:
    """Return the text of a regular UTF-8 file; DocumentError says why it cannot be read and what to do."""
    try:
        return io.TextIOWrapper(io.BytesIO(_read(path)), encoding="utf-8-sig").read()
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} is not UTF-8; save the file as UTF-8"
        raise DocumentError([Problem(str(path), 0, 0, "", message)]) from None


def _read(path: Path) -> bytes:
    """Return the octets of a regular file that is not too large."""
    mode = path.stat().st_mode
    if not (S_ISREG(mode) or S_ISDIR(mode)):  # opening a folder has an error of its own
        message = "is not a regular file (a pipe would be waited for without end); name a file"
        raise DocumentError([Problem(str(path), 0, 0, "", message)])
    with path.open("rb") as file:
        octets = file.read(LARGEST + 1)
    if len(octets) > LARGEST:
        message = f"is larger than {LARGEST >> 20} MiB: is it the right file? Divide it if so"
        raise DocumentError([Problem(str(path), 0, 0, "", message)])
    return octets


def read_policies(directory: Path) -> list[tuple[str, str]]:
    """Return (file, text) of every policy file in lexical order; DocumentError names all unreadable ones.

    A folder without any, and a file without a word, are faults: a volume that is not mounted or a copy that
    was cut short must not pass for a policy that restricts nobody.
    """
    paths = policy_files(directory)
    if not paths:
        message = "holds no *.yaml file: put the policy documents there, or mount what should be there"
        raise DocumentError([Problem(str(directory), 0, 0, "", message)])
    return _read_each(paths)


def read_paths(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Return (file, text) of files as named, and of the policy files in folders; DocumentError as above."""
    return _read_each(file for path in paths for file in (policy_files(path) if path.is_dir() else [path]))


def _read_each(paths: Iterable[Path]) -> list[tuple[str, str]]:
    texts: list[tuple[str, str]] = []
    problems: list[Problem] = []
    size = 0
    for path in paths:
        try:
            text = read_text(path)
        except DocumentError as error:
            problems += error.problems
            continue
        if not text.strip():
            problems.append(
                Problem(str(path), 0, 0, "", "is empty: cut short? Remove it if it is to say nothing")
            )
        size += len(text)
        if size > TOGETHER:
            message = f"goes beyond {TOGETHER >> 20} MiB of policies in all: is something there by mistake?"
            raise DocumentError([*problems, Problem(str(path), 0, 0, "", message)])
        texts.append((str(path), text))
    if problems:
        raise DocumentError(problems)
    return texts


def policy_files(directory: Path) -> list[Path]:
    """Return the `*.yaml` and `*.yml` files of a folder in lexical order.

    Symbolic links are followed. Names that begin with a dot are left out: editors' swap files, and the
    `..data` by which kubelet swaps a mounted ConfigMap (the plain names beside it lead through it). A
    dangling link stays in, so that reading it says so: a policy must not vanish in silence.
    """
    names = _policy_names(directory)
    return [directory / name for name in names if not os.path.isdir(directory / name)]  # noqa: PTH112 - unlike Path.is_dir, it raises nothing


def _policy_names(directory: Path) -> list[str]:
    try:
        return sorted(
            entry
            for entry in os.listdir(directory)  # noqa: PTH208 - names only
            if entry.endswith(SUFFIXES) and not entry.startswith(".")
        )
    except OSError as error:
        raise _unreadable(directory, error) from None


def _unreadable(path: Path, error: OSError) -> DocumentError:
    next_step = {
        FileNotFoundError: "create it, or name another (--config, or policy.directory in the settings)",
        PermissionError: f"make it readable for user {os.geteuid()}",
        NotADirectoryError: "name a directory, or the directory that holds this file",
        IsADirectoryError: "name a file",
    }.get(type(error), "mend the file system or name another path")
    message = f"cannot be read: {error.strerror or error}; {next_step}"
    return DocumentError([Problem(str(path), 0, 0, "", message)])


def check_writable(path: Path) -> None:
    """Raise DocumentError if this file could not be opened to append to it; it is neither opened nor made."""
    try:
        _try_writing(path)
    except OSError as error:
        raise unwritable(path, error) from None


def _try_writing(path: Path) -> None:
    """Raise the OSError that opening would raise, as far as looking tells."""
    place, rights = path, os.W_OK
    try:
        if S_ISDIR(path.stat().st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except FileNotFoundError:
        place, rights = path.resolve().parent, os.W_OK | os.X_OK
        place.stat()
    if not os.access(place, rights, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def unwritable(path: Path, error: OSError) -> DocumentError:
    """Return the error for a query log that cannot be opened."""
    message = (
        f"cannot be written: {error.strerror}; make its directory writable or set events.file to another"
    )
    return DocumentError([Problem(str(path), 0, 0, "", message)])


def signature(paths: Iterable[Path]) -> Signature:
    """Return what changes whenever one of these files or policy folders, or a file in one, changes.

    Of each, behind all links: inode, modification and status times, and size. A swapped link or a replaced
    file changes the inode, a `chmod` that makes a file readable the status time.
    """
    return tuple(mark for path in paths for mark in _marks(path))


def _marks(path: Path) -> Iterable[Mark]:
    mark = _mark(path)
    yield mark
    if mark[1] != DIRECTORY:
        return
    try:
        for name in _policy_names(path):
            yield _mark(f"{mark[0]}/{name}")
    except DocumentError as error:
        yield (mark[0], str(error))


def _mark(path: str | Path) -> Mark:
    """Return the mark of one path; strings, since a Path costs more than the look at the file."""
    try:
        found = os.stat(path)  # noqa: PTH116 - see above
    except OSError as error:
        return (str(path), error.strerror or "")
    if S_ISDIR(found.st_mode):
        return (str(path), DIRECTORY)  # its own times change with files that are not policies
    return (str(path), found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


async def changes(
    paths: Callable[[], Iterable[Path]], since: Signature, *, interval: float = 1.0
) -> AsyncIterator[Signature]:
    """Yield the new signature after each change, looking every `interval` seconds or less often.

    `paths` is asked at each look, since a reload may name other files. `since` is the signature taken
    *before* the files were read, so that a change in between is not lost. A change counts when two looks
    agree, so that a file that is just being written is not read half.
    """
    known = since
    cost = 0.0
    while True:
        await asyncio.sleep(max(interval, QUIET * cost))
        seen, cost = await asyncio.to_thread(_look, tuple(paths()))
        while seen != known:
            await asyncio.sleep(max(min(SETTLE, interval), CHANGING * cost))
            before = seen
            seen, cost = await asyncio.to_thread(_look, tuple(paths()))
            if before == seen:
                known = seen
                yield known


def _look(paths: Iterable[Path]) -> tuple[Signature, float]:
    """Return a signature and the seconds of CPU that it took."""
    started = thread_time()
    return signature(paths), thread_time() - started
