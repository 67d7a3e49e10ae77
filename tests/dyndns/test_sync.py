"""All records on virtual time: neighbours, restarts, a memory that fails, what people ask for."""

from __future__ import annotations

import asyncio

import pytest
from dyndns_world import (
    OTHER,
    PASSWORD,
    THIRD,
    V4,
    Disk,
    World,
    domain,
    gaps,
    kill,
    minutes,
    virtual,
)
from fakes import until

from dnsproxy.dyndns.outcomes import Code
from dnsproxy.dyndns.sync import UnknownDomainError

HOUR, DAY = 60, 24 * 60  # minutes


# --- one for all and none for the others


@virtual
async def test_one_that_hangs_breaks_or_is_halted_delays_no_other():
    world = World()
    world.provider.deaf = {"a.example.de"}
    world.provider.passwords["b.example.de"] = "another"
    names = ["a", "b", "c", "d"]
    async with world.running(*(domain(name) for name in names)):
        await minutes(1)
        world.home.ipv4 = OTHER
        await minutes(6)
        for name in ("c", "d"):
            assert world.provider.records[f"{name}.example.de"] == (OTHER,)
        await minutes(HOUR)
        assert world.status("a.example.de").last_code == "timeout"
        assert world.status("b.example.de").phase == "halted"
        assert [title.split(":")[0] for title in world.sync.problems()] == [
            "Domain default/a", "Domain default/b",
        ]  # fmt: skip


@virtual
async def test_a_fault_of_ours_in_one_record_ends_no_other_and_is_seen():
    world = World()
    find = world.home.find

    async def broken(search):
        if world.home.searches < 3:
            world.home.searches += 1
            raise KeyError(PASSWORD)
        return await find(search)

    world.home.find = broken
    async with world.running(domain("a"), domain("b")):
        await minutes(1)
        assert "internal error (KeyError in broken" in world.status("a.example.de").message
        await minutes(12)
        assert world.status("a.example.de").last_result is True
        assert world.status("b.example.de").last_result is True


@virtual
async def test_a_publisher_that_breaks_counts_as_a_request():
    world = World()
    world.provider.replies = [RuntimeError("connection pool")]
    async with world.running(domain()):
        await minutes(4)
        assert world.sent() == [V4]
        assert world.status().last_code == "unknown"
        await minutes(2)
        assert world.sent() == [V4, V4]


@virtual
async def test_many_records_at_a_start_are_spread():
    world = World()
    async with world.running(*(domain(f"host{number}") for number in range(50))):
        await minutes(5)
        starts = sorted(at for at, *_ in world.provider.requests)
        assert len(starts) == 50
        assert min(gaps(starts)) >= 1.9


@virtual
async def test_a_cancelled_task_ends_though_everything_hangs():
    world = World()
    world.provider.deaf = {"www.example.de"}
    task = world.start(domain())
    await minutes(1)
    task.cancel()
    started = world.now()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.now() - started < 2
    assert [each for each in asyncio.all_tasks() if each is not asyncio.current_task()] == []


# --- restarts


@virtual
async def test_a_restart_sends_nothing_and_repeats_no_event():
    world = World()
    for _ in range(20):
        async with world.running(domain()):
            await minutes(7)
            world.boot = f"{world.boot}x"
    assert world.sent() == [V4]
    assert world.reasons() == ["DynDnsUpdateCompleted", "DynDnsUpdateSkipped"]


@pytest.mark.parametrize("code", [Code.BADAUTH, Code.ABUSE])
@virtual
async def test_halts_and_holds_outlive_restarts_and_boots(code):
    world = World()
    world.provider.out = code
    for round_ in range(60):
        world.boot = f"boot {round_ // 2}"
        async with world.running(domain()):
            await minutes(0.9)
    assert world.sent() == [V4]
    assert world.reasons()[0] == "DynDnsUpdateFailed"
    assert len(world.reasons()) == 2


@virtual
async def test_killed_between_sending_and_storing_there_is_no_resend_at_once():
    world = World()
    task = world.start(domain())
    await until(lambda: world.provider.requests, 0.01)
    await kill(task)  # the provider has acted or not: nobody knows
    for _ in range(4):
        async with world.running(domain()):
            await minutes(1)
    assert len(world.sent()) == 1
    async with world.running(domain()):
        await minutes(6)
        assert world.sent() == [V4, V4]
        assert min(gaps(world.times())) >= 300
        await minutes(DAY)
        assert len(world.sent()) == 2


@virtual
async def test_a_memory_that_breaks_in_its_own_way_ends_nothing():
    world = World()
    async with world.running(domain("a"), domain("b")):
        await minutes(6)

        async def remember(key, value):
            raise RuntimeError("cannot schedule new futures after shutdown")

        world.disk.remember = remember
        world.home.ipv4 = OTHER
        await minutes(6)
        assert world.sync.problem == "cannot schedule new futures after shutdown"
    assert world.sent() == [V4, V4, OTHER, OTHER]


@pytest.mark.parametrize("disk", [None, Disk(broken=True)])
@virtual
async def test_where_nothing_can_be_stored_restarts_still_cannot_become_a_storm(disk):
    world = World(disk=disk)
    for _ in range(100):
        async with world.running(domain()):
            await minutes(0.5)
    assert world.sent() == []
    async with world.running(domain()):
        await minutes(DAY)
    assert world.sent() == [V4]


@virtual
async def test_where_a_request_could_not_be_noted_a_crash_cannot_repeat_it():
    world = World()
    async with world.running(domain()):
        await minutes(6)
    world.home.ipv4 = OTHER
    for _ in range(20):
        task = world.start(domain())
        await asyncio.sleep(0)
        world.disk.broken = True  # it can be read and not written
        await minutes(0.5)
        await kill(task)
        world.disk.broken = False
    assert world.sent() == [V4]


@virtual
async def test_what_cannot_be_read_may_have_been_a_request_of_a_moment_ago():
    world = World()
    async with world.running(domain()):
        await minutes(0.1)
    world.disk.broken = True
    task = world.start(domain())
    await asyncio.sleep(0)
    world.disk.broken = False  # it can be written and was not read
    await minutes(4)
    assert world.sent() == [V4]
    await minutes(2)
    assert world.sent() == [V4, V4]
    assert min(gaps(world.times())) >= 300
    await kill(task)


@virtual
async def test_a_disk_that_fills_up_later_stops_nothing_but_is_said():
    world = World()
    async with world.running(domain()):
        await minutes(6)
        world.disk.broken = True
        world.home.ipv4 = OTHER
        await minutes(6)
        assert world.sent() == [V4, OTHER]
        assert world.sync.problem == "disk full"
        world.disk.broken = False
        await minutes(6)
        assert world.sync.problem is None
    async with world.running(domain()):
        await minutes(6)
    assert world.sent() == [V4, OTHER]


@virtual
async def test_rows_of_hosts_that_are_long_gone_are_forgotten():
    world = World()
    async with world.running(domain("a"), domain("b")):
        await minutes(1)
    await minutes(8 * DAY)
    async with world.running(domain("a")):
        await minutes(1)
    assert list(world.disk.rows) == ["dyndns/a.example.de"]


@virtual
async def test_rows_of_others_in_the_same_memory_are_left_alone():
    world = World(disk=Disk(rows={"other": b"x"}))
    async with world.running(domain()):
        await minutes(1)
    assert world.disk.rows["other"] == b"x"


# --- what people may do


@virtual
async def test_force_sends_once_an_hour_at_most_however_often_it_is_pressed():
    world = World()
    async with world.running(domain()):
        await minutes(6)
        refusals = [world.sync.force("www.example.de") for _ in range(100)]
        assert refusals[0] is None
        assert all("less than an hour" in each for each in refusals[1:])
        await minutes(1)
        assert len(world.sent()) == 2
        for _ in range(DAY):
            world.sync.force("default/www")
            await minutes(1)
        assert len(world.sent()) <= 2 + 24
        assert min(gaps(world.times())[1:]) >= 3599.9


@virtual
async def test_people_may_name_a_record_as_they_know_it_and_learn_what_there_is():
    world = World()
    async with world.running(domain()):
        await minutes(1)
        for name in ("www", "default/www", "WWW.example.de."):
            assert world.sync.resume(name) == "the record is not held"
        with pytest.raises(UnknownDomainError, match=r"known: www\.example\.de"):
            world.sync.force("ww")


@virtual
async def test_faults_in_documents_are_told_once():
    world = World()
    async with world.running(domain()):
        await minutes(6)
        for _ in range(3):
            world.sync.invalid("d.yaml:1:1: no")
        world.sync.update([domain()])
        world.sync.invalid("d.yaml:1:1: no")
    assert world.reasons().count("ConfigInvalid") == 2


@virtual
async def test_a_hook_hears_of_changes_and_halts_and_may_break_or_hang():
    world = World()

    async def hook(event):
        world.hooks.append(event.reason)
        if len(world.hooks) == 1:
            raise OSError("no such program")
        if len(world.hooks) == 2:
            await asyncio.Event().wait()

    async with world.running(domain(), hook=hook):
        await minutes(6)
        world.home.ipv4 = OTHER
        await minutes(6)
        world.home.ipv4, world.provider.out = THIRD, Code.NOHOST
        await minutes(11)
    assert world.hooks == ["DynDnsUpdateCompleted", "DynDnsUpdateCompleted", "DynDnsUpdateHalted"]
    assert world.sent() == [V4, OTHER, THIRD]
