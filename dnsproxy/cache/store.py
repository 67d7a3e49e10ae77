"""The state on disk: one SQLite file, read whole at start and written behind, a batch a transaction.

*Two instances.* A lock on the folder (`flock`, which the kernel gives up with the process, however that
ends) says who may write; the other one may read at any time, since readers of a WAL file hold up nobody. So
an instance that takes over reads while the old one still writes, and once more when that has let go.

*Reading* opens the file read-only and changes nothing until it is known whether the file is ours and sound.
If it is not, who holds the lock sets it aside under another name, together with its -wal and -shm; the next
batch, a whole one, makes a new file. SQLite checks its structure and its WAL, but not what is in a row:
there every row carries a seal, a checksum over its values and their types. What is read is therefore what
was written, or nothing; a flipped bit opens no foreign address.

*Writing* goes in statements of many rows, for the sake of speed beside a busy event loop: SQLite lets go of
the interpreter for every statement, and the loop gives it back late, so that a statement for each row would
take minutes where it could take a second.

All methods but `acquire` belong to one thread, which is the caller's affair: SQLite's connections do not
change threads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

from dnsproxy.cache.journal import KEYS, State
from dnsproxy.errors import DnsproxyError, DocumentError, Problem, RightsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dnsproxy.cache.journal import Batch, Row

FILE: Final = "state.db"
APPLICATION: Final = 0x646E7370  # "dnsp": so that `file` and we can tell whose file it is
SCHEMA: Final = 1
PARAMETERS: Final = 900  # in one statement; 999 is what the oldest SQLite in use can bear
WAL_KEPT: Final = 4 * 1024 * 1024  # octets to which the WAL is cut back after it had to grow
PAGES_KEPT: Final = (
    64 * 1024 * 1024
)  # octets of memory for pages while a batch is written: names come in no order
BUSY: Final = 5.0  # seconds to wait for another program that holds the file

_SET: Final = (
    "family TEXT",
    "nft_table TEXT",
    "name TEXT",
    "version INTEGER",
    "ports INTEGER",
    "ours INTEGER",
)
_COLUMNS: Final = {
    "lookups": (
        "endpoint TEXT",
        "name BLOB",
        "expiry REAL",
        "looked_up REAL",
        "ttl INTEGER",
        "addresses BLOB",
    ),
    "zombies": ("endpoint TEXT", "address BLOB", "alive_at REAL", "pending_at REAL", "names BLOB"),
    "aliases": ("endpoint TEXT", "target BLOB", "expiry REAL", "owner BLOB"),
    "claims": (*_SET, "key BLOB", "comment TEXT"),
    "sets": _SET,
    "memo": ("key TEXT", "value BLOB"),
}
_PRIMARY: Final = {**KEYS, "lookups": 5, "memo": 1}  # how many of the first columns make a row the only one

# SQLite's primary result codes that say something of the file itself; the others, of the world around it.
_UNSOUND: Final = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_MISMATCH,
}
_ADVICE: Final = {
    sqlite3.SQLITE_FULL: "free some space",
    sqlite3.SQLITE_BUSY: "end the program that holds it",
    sqlite3.SQLITE_READONLY: "make it and its directory writable, or set state.directory to another",
    sqlite3.SQLITE_CANTOPEN: "make it and its directory writable, or set state.directory to another",
}


class _UnfitError(Exception):
    """A file that cannot be used; `kind` becomes a part of its new name."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


# What a file may raise; names and messages that are made of damaged octets are no UTF-8.
_FAULTS: Final = (_UnfitError, sqlite3.Error, UnicodeDecodeError)


class Store:
    """The file in one folder.

    `whole_due`: the next batch has to be a whole one, since what the file holds is not what was taken.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self.whole_due = True
        self._lock: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    # -- who may write

    def acquire(self) -> bool:
        """Take the lock, if nobody else has it; tell whether we have it. The folder is made if need be.

        Raises RightsError or DocumentError, which say what to do, where the folder cannot be used.
        """
        if self._lock is None:
            with self._told("used as a folder for the state", self.path.parent):
                self._lock = _locked(self.path.parent)
        return self._lock is not None

    def close(self) -> None:
        """Let go of the file, and then of the lock."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self.whole_due = True

    # -- reading

    def load(self) -> State:
        """Return what the file holds; nothing, and a note that says why, where it cannot be used."""
        try:
            if self.path.is_symlink():
                raise _UnfitError("foreign", "is a symbolic link, which this program does not make")
            if not _is_readable(self.path):
                return State()
            with closing(self._connect("ro")) as connection:
                return _read(connection)
        except OSError as error:
            return State(notes=[self._unread(error.strerror or str(error))])
        except (*_FAULTS, MemoryError) as error:
            unfit = _unfit(error)
            return State(notes=[self._unread(str(error)) if unfit is None else self._dispose(unfit)])

    def _unread(self, reason: str) -> str:
        return f"{self.path}: cannot be read: {reason}. Leases of before are forgotten; it is written anew"

    def _dispose(self, unfit: _UnfitError) -> str:
        """Set the file aside, if it is ours to do so; return what a person has to know."""
        if self._lock is None:
            return (
                f"{self.path}: {unfit}. Another instance holds it: it stays, and nothing is known of before"
            )
        place = self._set_aside(unfit.kind)
        return (
            f"{self.path}: {unfit}. It was set aside as {place.name}, and a new one begun. Leases of before"
            " are forgotten: what is in our sets stays until it is proven idle; what we put into sets of your"
            " own can no longer be told from yours and stays. Delete the file if it is of no use to you"
        )

    def _set_aside(self, kind: str) -> Path:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        stem, number = f"{FILE}.{kind}-{stamp}", 1
        place = self.path.with_name(stem)
        while place.exists():
            number += 1
            place = self.path.with_name(f"{stem}-{number}")
        self.whole_due = True
        with self._told("set aside", self.path):
            for suffix in ("-wal", "-shm", "-journal", ""):  # the file last: until then it is found again
                part = Path(f"{self.path}{suffix}")
                if os.path.lexists(part):
                    part.rename(f"{place}{suffix}")
        return place

    # -- writing

    def write(self, batch: Batch) -> None:
        """Write a batch in one transaction; DnsproxyError says why none of it was written.

        The same message comes at each attempt as long as the cause is the same. The batch is then to be given
        back, and the next one has to be whole if `whole_due` says so.
        """
        with self._transaction() as connection:
            if self.whole_due and not batch.whole:
                raise DnsproxyError(f"{self.path}: is another file than before; all is written anew")
            for table, changes in batch.tables.items():
                if batch.whole:
                    connection.execute(f"DELETE FROM {table}")
                else:
                    _delete(connection, table, [(key,) for key in changes.cleared])
                    _delete(connection, table, changes.rows)
                _insert(connection, table, chain.from_iterable(changes.rows.values()))
        self.whole_due = False

    def remember(self, key: str, value: bytes | None) -> None:
        """Keep a value under a key for another start; None forgets it. Errors as with `write`."""
        with self._transaction() as connection:
            _delete(connection, "memo", [(key,)])
            if value is not None:
                _insert(connection, "memo", [(key, value)])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if not self.acquire():
            raise DnsproxyError(
                f"{self.path}: another instance holds it; it is written when that one has ended"
            )
        try:
            with self._told("written", self.path):
                connection = self._writable()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
                connection.execute(
                    "PRAGMA shrink_memory"
                )  # else the pages stay in memory until the next time
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except _FAULTS as error:
            raise self._unwritten(error) from None

    def _unwritten(self, error: Exception) -> DnsproxyError:
        unfit = _unfit(error)
        if unfit is not None:
            self._forget_connection()
            return DnsproxyError(self._dispose(unfit))
        advice = _ADVICE.get(_code(error), "mend the file system or set state.directory to another")
        kept = "what is learned stays in memory until it can be"
        return DnsproxyError(f"{self.path}: cannot be written: {error}; {advice}; {kept}")

    def _writable(self) -> sqlite3.Connection:
        """Return the open connection, a new one if somebody removed or replaced the file."""
        if self._connection is not None and self._is_replaced():
            self._forget_connection()
        if self._connection is None:
            made = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.fchmod(made, 0o600)
            os.close(made)
            self._connection = self._connect("rw")
            self._inode = self.path.stat().st_ino
            _prepare(self._connection)
        return self._connection

    def _is_replaced(self) -> bool:
        return not self.path.exists() or self.path.stat().st_ino != self._inode

    def _forget_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self.whole_due = True

    def _connect(self, mode: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}", uri=True, timeout=BUSY, isolation_level=None
        )

    @contextmanager
    def _told(self, purpose: str, path: Path) -> Iterator[None]:
        """Turn what the file system refuses into a message."""
        try:
            yield
        except PermissionError as error:
            message = (
                f"{path}: cannot be {purpose}: {error.strerror}; make it writable for user {os.geteuid()}"
            )
            raise RightsError(f"{message}, or set state.directory to another") from None
        except OSError as error:
            message = f"cannot be {purpose}: {error.strerror}; set state.directory to another, or to null"
            raise DocumentError([Problem(str(path), 0, 0, "", message)]) from None


def _locked(directory: Path) -> int | None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _is_readable(path: Path) -> bool:
    """Tell whether there is anything to read; OSError where it cannot be.

    The file is not opened: to close it again would take away the locks that SQLite may have on it.
    """
    if not path.exists():
        return False
    if not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    if not os.access(path, os.R_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return path.stat().st_size > 0


# What is in the file


def _read(connection: sqlite3.Connection) -> State:
    """Read all of it as of one moment."""
    connection.execute("BEGIN")
    made = _is_made(connection)
    (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if result != "ok":  # also where nothing has been made yet: it would be made on top of it
        raise _UnfitError("damaged", f"is damaged ({result})")
    if not made:
        return State()
    tables = {table: _rows(connection, table) for table in KEYS}
    return State(tables, dict(_rows(connection, "memo")))


def _is_made(connection: sqlite3.Connection) -> bool:
    """Tell whether the file holds our tables; False if it holds nothing at all."""
    application, schema = (
        _number(connection, f"PRAGMA {what}") for what in ("application_id", "user_version")
    )
    if (application, schema) == (APPLICATION, SCHEMA):
        return True
    if application != APPLICATION:
        if not application and not schema and not _number(connection, "SELECT count(*) FROM sqlite_master"):
            return False
        raise _UnfitError("foreign", "is a database of another program")
    if schema > SCHEMA:
        raise _UnfitError("newer", f"was written by a newer version (schema {schema}, known here: {SCHEMA})")
    raise _UnfitError("damaged", f"is damaged (schema {schema})")


def _number(connection: sqlite3.Connection, query: str) -> int:
    (found,) = connection.execute(query).fetchone()
    return int(found)


def _rows(connection: sqlite3.Connection, table: str) -> list[Row]:
    columns = ", ".join(_names(table))
    order = ", ".join(_names(table)[: _PRIMARY[table]])
    rows = []
    for *row, seal in connection.execute(f"SELECT {columns}, seal FROM {table} ORDER BY {order}"):
        found = tuple(row)
        if seal != _seal(found):
            raise _UnfitError("damaged", f"is damaged (a row of {table} is not what was written)")
        rows.append(found)
    return rows


def _seal(row: Row) -> int:
    return crc32(repr(row).encode())


def _names(table: str) -> list[str]:
    return [column.split()[0] for column in _COLUMNS[table]]


def _prepare(connection: sqlite3.Connection) -> None:
    """Set the connection up for writing, and make our tables if there are none."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_KEPT}")
    connection.execute(f"PRAGMA cache_size = -{PAGES_KEPT // 1024}")
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not _is_made(connection):
            for table, columns in _COLUMNS.items():
                primary = ", ".join(_names(table)[: _PRIMARY[table]])
                layout = f"{', '.join(columns)}, seal INTEGER, PRIMARY KEY ({primary})"
                connection.execute(f"CREATE TABLE {table} ({layout}) WITHOUT ROWID")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    width = len(_COLUMNS[table]) + 1
    for piece in _pieces(rows, PARAMETERS // width):
        values = ", ".join([f"({', '.join('?' * width)})"] * len(piece))
        flat = [value for row in piece for value in (*row, _seal(row))]
        connection.execute(f"INSERT OR REPLACE INTO {table} VALUES {values}", flat)


def _delete(connection: sqlite3.Connection, table: str, keys: Iterable[Row]) -> None:
    """Delete the rows whose first columns are one of these keys, all of which have the same length.

    Keys that differ in their last part only, as most do, go together: for rows of several columns after IN
    SQLite walks through the table.
    """
    for shared, group in groupby(keys, key=lambda key: key[:-1]):
        *front, last = _names(table)[: len(shared) + 1]
        for piece in _pieces(group, PARAMETERS - len(shared)):
            equal = "".join(f"{column} = ? AND " for column in front)
            query = f"DELETE FROM {table} WHERE {equal}{last} IN ({', '.join('?' * len(piece))})"
            connection.execute(query, [*shared, *(key[-1] for key in piece)])


def _pieces(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    left = iter(rows)
    while piece := list(islice(left, size)):
        yield piece


def _unfit(error: Exception) -> _UnfitError | None:
    """Return what is the matter with the file itself, if anything is."""
    if isinstance(error, _UnfitError):
        return error
    if isinstance(error, sqlite3.ProgrammingError):
        raise error  # ours, such as a call from another thread
    return _UnfitError("damaged", f"is damaged ({error})") if _code(error) in _UNSOUND else None


def _code(error: Exception) -> int:
    """Return SQLite's primary result code; that of an error that Python found is SQLITE_ERROR."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF
