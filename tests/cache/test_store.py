"""The state on disk: what is written is read again, after a kill as well; what is damaged is set aside."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from itertools import count
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dnsproxy.cache.journal import Batch
from dnsproxy.cache.store import FILE, Store
from dnsproxy.errors import DnsproxyError, DocumentError, RightsError

SET = ("inet", "fw4", "github", 4, 0, 0)


def lookup(number, endpoint="default/ci", expiry=1000.5):
    return (endpoint, b"\x04host" + number.to_bytes(2, "big"), expiry, 940.25, 60, b"\x04\xc0\x00\x02\x01")


def batch(*rows, whole=False, cleared=(), table="lookups", width=2, gone=()):
    made = Batch(whole=whole)
    changes = made.tables[table]
    changes.cleared = list(cleared)
    changes.rows = {key: [] for key in gone}
    for row in rows:
        changes.rows.setdefault(row[:width], []).append(row)
    return made


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path)
    assert made.acquire()
    yield made
    made.close()


def read(directory):
    """Read as another process would that does not own the file."""
    return Store(directory).load()


def damaged_files(directory):
    names = sorted(path.name for path in directory.iterdir())
    return [name for name in names if name.startswith(f"{FILE}.") and not name.endswith(("-wal", "-shm"))]


def test_nothing_is_read_where_nothing_was_written(store):
    assert store.load().tables == {}
    assert store.load().notes == []
    assert store.whole_due


@pytest.mark.parametrize(
    ("table", "row", "width"),
    [
        ("lookups", lookup(1), 2),
        ("zombies", ("default/ci", b"\xc0\x00\x02\x01", 900.5, 901.0, b"\x01a\x00\x01b\x00"), 2),
        ("aliases", ("default/ci", b"\x01c\x00", 1000.0, b"\x01a\x00"), 2),
        ("claims", (*SET, b"\xc0\x00\x02\x01", "github.com."), 8),
        ("sets", SET, 6),
    ],
)
def test_rows_of_every_table_come_back_as_they_were_and_go_by_their_key(store, tmp_path, table, row, width):
    store.write(batch(row, whole=True, table=table, width=width))
    found = read(tmp_path).tables
    assert found[table] == [row]
    assert [list(map(type, each)) for each in found[table]] == [list(map(type, row))]
    store.write(batch(table=table, gone=[row[:width]]))
    assert read(tmp_path).tables[table] == []


def test_many_keys_go_and_come_in_one_batch(store, tmp_path):
    store.write(batch(*map(lookup, range(3000)), whole=True))
    store.write(
        batch(
            *(lookup(n, expiry=2000.5) for n in range(1000, 2000)), gone=[lookup(n)[:2] for n in range(1000)]
        )
    )
    found = read(tmp_path).tables["lookups"]
    assert found == [lookup(n, expiry=2000.5 if n < 2000 else 1000.5) for n in range(1000, 3000)]


def test_a_cleared_endpoint_loses_its_rows_only(store, tmp_path):
    store.write(batch(lookup(1), lookup(2, "default/web"), whole=True))
    store.write(batch(lookup(3), cleared=["default/ci"]))
    assert read(tmp_path).tables["lookups"] == [lookup(3), lookup(2, "default/web")]


def test_a_whole_batch_replaces_everything_but_the_free_values(store, tmp_path):
    store.write(batch(lookup(1), whole=True))
    store.remember("dyndns", b"\x00state")
    store.write(batch(SET, whole=True, table="sets", width=6))
    found = read(tmp_path)
    assert (found.tables["lookups"], found.tables["sets"]) == ([], [SET])
    assert found.memo == {"dyndns": b"\x00state"}
    store.remember("dyndns", None)
    assert read(tmp_path).memo == {}


def test_the_first_batch_has_to_be_whole(store):
    with pytest.raises(DnsproxyError, match="all is written anew"):
        store.write(batch(lookup(1)))
    store.write(batch(whole=True))
    assert not store.whole_due


def test_nobody_else_may_read_the_files(store, tmp_path):
    store.write(batch(lookup(1), whole=True))
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_file_removed_while_running_is_written_whole_again(store, tmp_path):
    store.write(batch(lookup(1), whole=True))
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(DnsproxyError, match="another file than before"):
        store.write(batch(lookup(2)))
    assert store.whole_due
    store.write(batch(lookup(2), whole=True))
    assert read(tmp_path).tables["lookups"] == [lookup(2)]


# Two instances


def test_a_second_instance_reads_but_writes_only_after_the_first_has_let_go(store, tmp_path):
    store.write(batch(lookup(1), whole=True))
    second = Store(tmp_path)
    assert not second.acquire()
    assert second.load().tables["lookups"] == [lookup(1)]
    with pytest.raises(DnsproxyError, match="another instance holds it"):
        second.write(batch(whole=True))
    store.write(batch(lookup(2)))
    store.close()
    assert second.acquire()
    assert second.load().tables["lookups"] == [lookup(1), lookup(2)]
    second.write(batch(lookup(3), whole=True))
    second.close()
    assert read(tmp_path).tables["lookups"] == [lookup(3)]


def test_who_does_not_hold_the_lock_moves_nothing(store, tmp_path):
    store.path.write_bytes(b"no database" * 1000)
    (note,) = read(tmp_path).notes
    assert "Another instance holds it" in note
    assert damaged_files(tmp_path) == []


def test_another_thread_is_our_own_fault_and_costs_no_file(store, tmp_path):
    store.write(batch(lookup(1), whole=True))
    raised = []

    def write():
        try:
            store.write(batch(lookup(2)))
        except sqlite3.ProgrammingError as error:
            raised.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert len(raised) == 1
    assert damaged_files(tmp_path) == []


# Files that cannot be used


def foreign(path):
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE precious (value)")
    other.close()


def change(statement):
    def run(path):
        owner = Store(path.parent)
        owner.acquire()
        owner.write(batch(lookup(1), whole=True))
        owner.close()
        other = sqlite3.connect(path)
        other.execute(statement)
        other.commit()
        other.close()

    return run


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda path: path.write_bytes(b"no database" * 1000),
            "damaged",
            "is damaged (file is not a database)",
        ),
        (foreign, "foreign", "is a database of another program"),
        (
            change("PRAGMA user_version = 99"),
            "newer",
            "was written by a newer version (schema 99, known here: 1)",
        ),
        (change("DROP TABLE zombies"), "damaged", "is damaged (no such table: zombies)"),
        (
            change("UPDATE lookups SET addresses = x'04c6336401'"),
            "damaged",
            "a row of lookups is not what was written",
        ),
        (change("UPDATE lookups SET ttl = 'x'"), "damaged", "a row of lookups is not what was written"),
    ],
)
def test_an_unfit_file_is_set_aside_whole_and_a_new_one_begun(store, tmp_path, make, kind, message):
    store.close()
    make(store.path)
    before = store.path.read_bytes()
    assert store.acquire()
    found = store.load()
    (note,) = found.notes
    assert found.tables == {}
    assert message in note
    (aside,) = damaged_files(tmp_path)
    assert aside.startswith(f"{FILE}.{kind}-")
    assert aside in note
    assert (tmp_path / aside).read_bytes() == before
    store.write(batch(lookup(1), whole=True))
    assert read(tmp_path).tables["lookups"] == [lookup(1)]


def test_a_link_to_somebody_elses_file_is_neither_read_nor_changed(store, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o644)
    store.close()
    store.path.symlink_to(victim)
    assert store.acquire()
    (note,) = store.load().notes
    assert "is a symbolic link" in note
    store.write(batch(lookup(1), whole=True))
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("precious", 0o644)
    assert not store.path.is_symlink()


def test_two_files_set_aside_in_one_second_both_stay(store, tmp_path):
    for content in (b"first", b"second"):
        store.path.write_bytes(content * 1000)
        assert store.load().notes
    kept = [(tmp_path / name).read_bytes()[:5] for name in damaged_files(tmp_path)]
    assert sorted(kept) == [b"first", b"secon"]


def test_damage_found_while_writing_sets_the_file_aside(store, tmp_path):
    store.close()
    foreign(store.path)
    with pytest.raises(DnsproxyError, match=r"set aside as state\.db\.foreign-"):
        store.write(batch(whole=True))
    store.write(batch(lookup(1), whole=True))
    assert read(tmp_path).tables["lookups"] == [lookup(1)]
    assert len(damaged_files(tmp_path)) == 1


def test_a_full_disk_is_told_and_what_was_there_stays(store, tmp_path):
    store.write(batch(lookup(1), whole=True))
    store._connection.execute("PRAGMA max_page_count = 1")  # no less than there are, and no more
    messages = set()
    for _ in range(2):
        with pytest.raises(DnsproxyError, match="is full; free some space") as caught:
            store.write(batch(*map(lookup, range(5000))))
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert not store.whole_due
    assert read(tmp_path).tables["lookups"] == [lookup(1)]
    store._connection.execute("PRAGMA max_page_count = 100000")
    store.write(batch(*map(lookup, range(5000))))
    assert len(read(tmp_path).tables["lookups"]) == 5000


def test_a_folder_that_is_none_is_the_settings_fault(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DocumentError, match="cannot be used as a folder for the state"):
        Store(tmp_path / "file" / "state").acquire()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_folder_of_somebody_else_is_a_matter_of_rights(tmp_path):
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises((RightsError,), match="make it writable for user 65534"):
            Store(tmp_path).acquire()
    finally:
        os.seteuid(0)


def test_what_is_no_file_is_told_and_not_waited_for(store):
    os.mkfifo(store.path)
    (note,) = store.load().notes
    assert "not a regular file" in note


# Kill and corruption

WRITER = """
import sys
from pathlib import Path
from dnsproxy.cache.journal import Batch
from dnsproxy.cache.store import Store
store = Store(Path(sys.argv[1]))
assert store.acquire()
found = store.load()
assert not found.notes, found.notes
number = int(found.tables["lookups"][0][2]) if found.tables.get("lookups") else 0
print("ready", flush=True)
while True:
    number += 1
    batch = Batch(whole=store.whole_due)
    for each in range(400):
        key = ("default/ci", b"\\x02" + each.to_bytes(2, "big") + b"\\x00")
        batch.tables["lookups"].rows[key] = [(*key, float(number), 0.5, 60, b"\\x04\\x01\\x02\\x03\\x04")]
    store.write(batch)
    print(number, flush=True)
"""


def test_after_kill_9_at_any_moment_the_next_open_sees_a_whole_batch_and_the_last_one(tmp_path):
    random = Random(9)
    for _ in range(30):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert writer.stdout.readline() == "ready\n"
            for _ in range(random.randrange(4)):
                writer.stdout.readline()
            for _ in range(random.randrange(20_000)):
                pass  # some moment within the next batch
        finally:
            writer.send_signal(signal.SIGKILL)
            told = [line for line in writer.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]
        found = read(tmp_path)
        assert found.notes == []
        rows = found.tables.get("lookups", [])
        assert len({row[2] for row in rows}) == (1 if rows else 0)
        assert len(rows) in (0, 400)
        assert not told or (rows and rows[0][2] >= float(told[-1]))


def test_a_damaged_name_in_an_error_message_is_damage(store):
    store.write(batch(lookup(1), whole=True))
    store.close()
    content = store.path.read_bytes()
    store.path.write_bytes(content.replace(b"lookups (endpoint", b"lookups (endpo\xc5nt"))
    assert store.acquire()
    (note,) = store.load().notes
    assert "is damaged" in note


@settings(max_examples=60 if not os.environ.get("DNSPROXY_DEEP") else 20_000)
@given(st.data())
def test_any_damage_is_read_as_what_was_written_or_set_aside(data):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        store = Store(directory)
        assert store.acquire()
        rows = [lookup(number) for number in range(200)]
        store.write(batch(*rows, whole=True))
        other = None
        if data.draw(st.booleans(), label="WAL left behind"):
            other = (directory / f"{FILE}-wal").read_bytes()
            content = (directory / FILE).read_bytes()
        store.close()
        if other is not None:
            (directory / FILE).write_bytes(content)
            (directory / f"{FILE}-wal").write_bytes(other)
        for part in (FILE, f"{FILE}-wal"):
            if (directory / part).exists():
                damage(directory / part, data)
        assert store.acquire()
        found = store.load()
        assert found.tables.get("lookups", []) in ([], rows)
        store.whole_due = True
        write_twice(store, rows)
        assert read(directory).tables["lookups"] == rows
        store.close()


def damage(path, data):
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(100, len(content) - 1)))
        content[at] ^= data.draw(st.integers(1, 255))
    size = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    path.write_bytes(content[:size])


def write_twice(store, rows):
    """What a daemon does: a batch that fails is written whole again."""
    for attempt in count(1):
        try:
            store.write(batch(*rows, whole=True))
        except DnsproxyError:
            assert attempt < 3
        else:
            return
