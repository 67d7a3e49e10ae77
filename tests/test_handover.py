"""Two sides in one process: an offer on a loop, and a taker in a thread."""

from __future__ import annotations

import asyncio
import os
import socket
import stat

import pytest

from dnsproxy import handover
from dnsproxy.errors import NetworkError
from dnsproxy.handover import NAME, Handover, offer


class Old:
    """An instance that serves, as far as a handover asks it."""

    def __init__(self, sockets):
        self.sockets = sockets
        self.steps = []

    async def prepare(self):
        self.steps.append("prepare")
        return self.sockets

    async def take(self):
        self.steps.append("take")

    async def resume(self):
        self.steps.append("resume")

    def done(self):
        self.steps.append("done")

    def offer(self, folder):
        return asyncio.create_task(offer(folder, self.prepare, self.take, self.resume, self.done))


@pytest.fixture
def bound():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket() as tcp:
        udp.bind(("127.0.0.1", 0))
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        yield [udp, tcp]


async def connected(folder):
    """Connect as soon as the offer stands."""
    return await asyncio.to_thread(Handover, folder)


async def soon(holds):
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - it is what is tested that makes it hold
            await asyncio.sleep(0.001)


async def stopped(serving):
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_what_was_queued_for_the_old_one_is_the_new_ones(tmp_path, bound):
    old = Old(bound)
    serving = old.offer(tmp_path)
    taker = await connected(tmp_path)
    taken = await asyncio.to_thread(taker.prepare)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client, socket.socket() as caller:
        client.sendto(b"query", bound[0].getsockname())
        caller.connect(bound[1].getsockname())
        await asyncio.to_thread(taker.take)
        taker.confirm(taken)
        ended = asyncio.create_task(asyncio.to_thread(taker.wait))
        done, _ = await asyncio.wait([ended], timeout=0.05)
        assert not done
        await stopped(serving)
        await ended
        for each in bound:
            each.close()
        assert taken[0].recv(100) == b"query"
        taken[1].accept()[0].close()
    taker.close()
    for each in taken:
        assert not each.getblocking()
        assert not os.get_inheritable(each.fileno())
        each.close()
    assert old.steps == ["prepare", "take", "done"]
    assert not (tmp_path / NAME).exists()


async def test_the_old_one_goes_on_when_the_new_one_goes_away(tmp_path, bound):
    old = Old(bound)
    serving = old.offer(tmp_path)
    first = await connected(tmp_path)
    for each in await asyncio.to_thread(first.prepare):
        each.close()
    first.close()
    second = await connected(tmp_path)
    for each in await asyncio.to_thread(second.prepare):
        each.close()
    await asyncio.to_thread(second.take)
    second.close()  # it has the sockets, and has not confirmed that it reads them
    third = await connected(tmp_path)
    sockets = await asyncio.to_thread(third.prepare)
    await asyncio.to_thread(third.take)
    third.confirm(sockets[:1])
    assert [each.fileno() < 0 for each in sockets] == [False, True], "what is not served is closed"
    await soon(lambda: old.steps[-1] == "done")
    await stopped(serving)
    third.close()
    sockets[0].close()
    once = ["prepare", "resume", "prepare", "take", "resume"]
    assert old.steps == [*once, "prepare", "take", "done"]


async def test_the_new_one_goes_on_when_the_old_one_dies_before_it_answers(tmp_path, bound):
    class Dying(Old):
        async def take(self):
            raise SystemError("killed")

    serving = Dying(bound).offer(tmp_path)
    taker = await connected(tmp_path)
    for each in await asyncio.to_thread(taker.prepare):
        each.close()
    await asyncio.to_thread(taker.take)
    with pytest.raises(SystemError):
        await serving
    await asyncio.to_thread(taker.take)  # a broken pipe is as good as an answer
    taker.close()


@pytest.mark.parametrize("count", [0, 1, 64, 65, 200])
async def test_any_number_of_sockets_arrives(tmp_path, count):
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    serving = Old(sockets).offer(tmp_path)
    taker = await connected(tmp_path)
    taken = await asyncio.to_thread(taker.prepare)
    assert [each.getsockname() for each in taken] == [each.getsockname() for each in sockets]
    for each in (*taken, *sockets):
        each.close()
    taker.close()
    await stopped(serving)


async def test_nobody_else_may_ask_and_a_leftover_is_no_hindrance(tmp_path, bound):
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(str(tmp_path / NAME))
    serving = Old(bound).offer(tmp_path)
    (await connected(tmp_path)).close()
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    await stopped(serving)


async def test_a_stranger_who_says_something_else_changes_nothing(tmp_path, bound):
    old = Old(bound)
    serving = old.offer(tmp_path)
    (await connected(tmp_path)).close()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / NAME))
        stranger.sendall(b"G")
        assert await asyncio.to_thread(stranger.recv, 1) == b""
    taker = await connected(tmp_path)
    for each in await asyncio.to_thread(taker.prepare):
        each.close()
    taker.close()
    await stopped(serving)
    assert old.steps == ["resume", "resume", "prepare"]


def test_where_nobody_offers_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "STARTING", 0.0)
    with pytest.raises(NetworkError, match="does not hand over"):
        Handover(tmp_path)


async def test_the_old_one_goes_on_when_the_new_one_falls_asleep(tmp_path, bound, monkeypatch):
    monkeypatch.setattr(handover, "LIMIT", 0.05)
    old = Old(bound)
    serving = old.offer(tmp_path)
    sleeper = await connected(tmp_path)
    for each in await asyncio.to_thread(sleeper.prepare):
        each.close()
    await asyncio.to_thread(sleeper.wait)  # it is let go of
    sleeper.close()
    assert old.steps == ["prepare", "resume"]
    await stopped(serving)


async def test_who_ends_leaves_the_socket_of_its_successor_alone(tmp_path, bound):
    first = Old(bound).offer(tmp_path)
    (await connected(tmp_path)).close()
    second = Old(bound).offer(tmp_path)
    before = (tmp_path / NAME).stat().st_ino
    await soon(lambda: (tmp_path / NAME).stat().st_ino != before)
    await stopped(first)
    (await connected(tmp_path)).close()
    await stopped(second)
    assert not (tmp_path / NAME).exists()
