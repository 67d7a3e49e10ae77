from __future__ import annotations

import asyncio
import threading

import pytest

from dnsproxy.cache.journal import State
from dnsproxy.cache.keeper import EXTENDED, Keeper
from dnsproxy.errors import DnsproxyError

WALL, NOW = 1_000_000.0, 50.0


class Journal:
    """Things that change; a batch takes them all."""

    def __init__(self):
        self.changed = []
        self.offsets = []

    def take(self, batch, offset):
        self.offsets.append(offset)
        yield
        batch.tables["lookups"].rows, self.changed = dict.fromkeys(self.changed), []
        yield

    def give_back(self, batch):
        self.changed = [*batch.tables["lookups"].rows, *self.changed]


class Store:
    """A disk that may be full, or slow."""

    def __init__(self):
        self.written = []
        self.threads = set()
        self.full = False
        self.closed = False
        self.whole_due = True
        self.allowed = threading.Event()
        self.allowed.set()

    def write(self, batch):
        self.threads.add(threading.current_thread())
        assert self.allowed.wait(10)
        if self.full:
            raise DnsproxyError("the disk is full")
        self.whole_due = False
        self.written.append((batch.whole, list(batch.tables["lookups"].rows)))

    def acquire(self):
        self.closed = False
        return True

    def load(self):
        self.threads.add(threading.current_thread())
        return State()

    def close(self):
        self.closed = True


@pytest.fixture
def journal():
    return Journal()


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def keeper(journal, store):
    return Keeper(journal, store, clock=lambda: NOW, wall=lambda: WALL)


async def test_the_first_batch_is_whole_and_the_others_are_what_changed(keeper, journal, store):
    assert await keeper.flush()
    journal.changed = ["a"]
    assert await keeper.flush()
    assert store.written == [(True, []), (False, ["a"])]
    assert journal.offsets == [WALL - NOW, WALL - NOW]
    await keeper.close()


async def test_nothing_is_written_when_nothing_changed(keeper, store):
    await keeper.flush()
    await keeper.flush()
    assert len(store.written) == 1
    assert keeper.status() == {"age": 0.0, "batches": 1, "problem": None}
    await keeper.close()


async def test_what_a_full_disk_did_not_take_goes_with_the_next_batch(keeper, journal, store):
    journal.changed, store.full = ["a"], True
    assert not await keeper.flush()
    assert keeper.status() == {"age": None, "batches": 0, "problem": "the disk is full"}
    journal.changed.append("b")
    store.full = False
    assert await keeper.flush()
    assert store.written == [(True, ["a", "b"])]
    assert keeper.problem is None
    await keeper.close()


async def test_the_end_writes_the_rest_and_lets_go(keeper, journal, store):
    assert await keeper.load() == State()
    assert not keeper.lost
    await keeper.flush()
    journal.changed = ["last"]
    await keeper.close()
    assert store.written[-1] == (False, ["last"])
    assert store.closed
    assert len(store.threads) == 1
    assert threading.current_thread() not in store.threads


async def test_nothing_is_written_between_release_and_resume(keeper, journal, store):
    await keeper.flush()
    await keeper.release()
    assert store.closed
    journal.changed = ["a"]
    assert not await keeper.flush()
    await keeper.resume()
    assert not store.closed
    assert await keeper.flush()
    assert store.written[-1] == (False, ["a"])
    await keeper.close()


async def test_a_batch_under_way_when_the_task_is_cancelled_is_not_lost(keeper, journal, store):
    await keeper.flush()
    journal.changed = ["a"]
    store.allowed.clear()
    task = asyncio.create_task(keeper.run())
    async with asyncio.timeout(10):
        while journal.changed:  # noqa: ASYNC110 - it is taken by what is tested
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.allowed.set()
    await keeper.close()
    assert (False, ["a"]) in store.written


async def test_two_callers_write_one_after_the_other(keeper, journal, store):
    journal.changed = ["a"]
    assert await asyncio.gather(keeper.flush(), keeper.flush()) == [True, True]
    assert store.written == [(True, ["a"])]
    await keeper.close()


async def test_longer_leases_are_written_less_often_and_at_the_end(monkeypatch, store):
    monkeypatch.setattr("dnsproxy.cache.keeper.PERIOD", 0.0)
    now, taken, enough = 0.0, [], asyncio.Event()

    class Watching(Journal):
        def take(self, batch, offset):
            nonlocal now
            taken.append((now, batch.extended))
            now += 5.0
            if len(taken) > EXTENDED / 5.0:
                enough.set()
            return super().take(batch, offset)

    keeper = Keeper(Watching(), store, clock=lambda: now, wall=lambda: WALL)
    running = asyncio.create_task(keeper.run())
    await enough.wait()
    running.cancel()
    await asyncio.wait([running])
    first, *others, last = taken[: int(EXTENDED / 5.0) + 1]
    assert (first, last) == ((0.0, True), (EXTENDED, True))
    assert not any(extended for _, extended in others)
    await keeper.close()
    assert taken[-1][1]
