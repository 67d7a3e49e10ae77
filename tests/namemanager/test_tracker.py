"""When passes are made and what they prove, on virtual time, with real caches and a made-up kernel."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from ipaddress import ip_network

import pytest
from fakes import run_virtual
from structlog.testing import capture_logs

from dnsproxy.addresses import from_text as address
from dnsproxy.cache import zombies as zombies_module
from dnsproxy.cache.gc import Caches
from dnsproxy.endpoints import Endpoint, EndpointTable, built_in_host
from dnsproxy.errors import KernelError, RightsError
from dnsproxy.namemanager import tracker as tracker_module
from dnsproxy.namemanager.tracker import POLL, Tracker, adapted
from dnsproxy.names import from_text

NAME = from_text("a.example.com")
CI, WEB = "default/ci", "default/web"
ONE, TWO, SIX = address("93.184.216.1"), address("93.184.216.2"), address("2606:2800::1")


def virtual(test):
    """Run an async test on virtual time."""

    @wraps(test)
    def run(*arguments, **keywords):
        return run_virtual(test(*arguments, **keywords))

    return run


def table(**prefixes):
    prefixes = prefixes or {"ci": "192.0.2.10", "web": "192.0.2.20"}
    endpoints = [Endpoint("default", name, {}, (ip_network(text),)) for name, text in prefixes.items()]
    return EndpointTable(endpoints, built_in_host())


@dataclass
class Seen:
    """A reading."""

    live: dict = field(default_factory=dict)
    entries: int = 0
    whole: bool = True
    untracked: frozenset = frozenset()


class World:
    """A tracker, its caches, and a kernel's table as (source, destination) texts.

    `reads` are the times at which passes read; `failure` is raised, `seen` changes what they return.
    """

    def __init__(self, **settings):
        self.clock = asyncio.get_running_loop().time
        self.caches = Caches(
            minimum_ttl=60, addresses_per_name=0, names_per_endpoint=100_000, zombies_per_endpoint=50_000
        )
        for key in (CI, WEB):
            self.caches.of(key)
        self.passes = self.caches.passes
        self.table = table()
        self.connections = []
        self.reads = []
        self.failure = None
        self.lasts = 0.0
        self.seen = {}
        self.meanwhile = lambda: None
        self.tracker = Tracker(self.read, self.caches, lambda: self.table, clock=self.clock, **settings)

    async def read(self, owner):
        self.reads.append(self.clock())
        await asyncio.sleep(self.lasts)
        if self.failure:
            raise self.failure
        live = {}
        for source, destination in self.connections:
            if (key := owner(address(source))) is not None:
                live.setdefault(key, set()).add(address(destination))
        self.meanwhile()
        return Seen(**{"live": live, "entries": len(self.connections)} | self.seen)

    def put_up(self, *addresses, key=CI):
        for each in addresses:
            self.caches.zombies[key].add(NAME, each, self.clock())

    def forget(self, *addresses, key=CI):
        for each in addresses:
            self.caches.zombies[key].forget(NAME, each, self.clock())

    def marked(self, key=CI):
        """The zombies that the last pass begun has seen."""
        return {zombie.address for zombie in self.caches.zombies[key] if zombie.marked == self.passes.begun}

    @asynccontextmanager
    async def running(self):
        task = asyncio.ensure_future(self.tracker.run())
        await asyncio.sleep(0)
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def since(self, start):
        return [at - start for at in self.reads if at >= start]


# --- When ---


@virtual
async def test_there_is_one_pass_at_the_start_and_none_while_there_are_no_zombies():
    world = World()
    async with world.running():
        await asyncio.sleep(10_000)
    assert len(world.reads) == 1
    assert world.passes.next_at is None


@virtual
async def test_a_pass_follows_soon_after_the_first_zombie_and_the_second_after_the_shortest_interval():
    world = World(shortest=30)
    async with world.running():
        await asyncio.sleep(10_000)
        start = world.clock()
        world.put_up(ONE)
        world.connections = [("192.0.2.10", "93.184.216.1")]
        await asyncio.sleep(45)
        first, second = world.since(start)
        assert first <= POLL
        assert second - first == 30
        assert world.passes.next_at == world.clock() + 60 + first - 45


@virtual
async def test_an_idle_time_ends_a_long_interval():
    world = World(shortest=30, longest=300)
    world.tracker._interval = 300.0
    async with world.running():
        await asyncio.sleep(10)
        world.put_up(ONE)
        world.connections = [("192.0.2.10", "93.184.216.1")]
        start = world.clock()
        await asyncio.sleep(40)
        assert len(world.since(start)) == 2


@pytest.mark.parametrize(
    ("idle", "after"),
    [
        (0.0, 100), (0.01, 150), (0.049, 150), (0.05, 100), (0.25, 100),
        (0.5, 50), (0.9, 30), (1.0, 30), (0.8, 30),
    ],
)  # fmt: skip
def test_the_interval_follows_the_share_of_zombies_without_a_connection(idle, after):
    assert adapted(100, idle, 30, 300) == pytest.approx(after)


def test_the_interval_shrinks_by_ninety_per_cent_at_most():
    assert adapted(1000, 1.0, 1, 2000) == pytest.approx(100)
    assert adapted(280, 0.01, 30, 300) == 300


@virtual
async def test_the_interval_adapts_to_what_a_pass_found():
    world = World(shortest=30, longest=300)
    many = [bytes((93, 0, 0, last)) for last in range(100)]
    world.put_up(*many)
    world.connections = [("192.0.2.10", f"93.0.0.{last}") for last in range(1, 100)]
    async with world.running():
        await asyncio.sleep(1000)
    gaps = [later - earlier for earlier, later in zip(world.reads, world.reads[1:], strict=False)]
    assert gaps[:6] == [45, 67.5, 101.25, 151.875, 227.8125, 300]
    assert world.tracker.idle == 0.01


@virtual
async def test_after_a_long_pass_is_a_long_rest():
    world = World(shortest=30)
    world.put_up(ONE)
    world.connections = [("192.0.2.10", "93.184.216.1")]
    world.lasts = 7.0
    async with world.running():
        await asyncio.sleep(200)
    assert [later - earlier for earlier, later in zip(world.reads, world.reads[1:], strict=False)] == [77, 77]
    assert world.tracker.seconds == 7.0


@virtual
async def test_a_pass_can_be_asked_for_and_waits_for_the_one_under_way():
    world = World()
    world.lasts = 2.0
    world.put_up(ONE)
    async with world.running():
        start = world.clock()
        assert await world.tracker.pass_now()
        assert world.since(start) == [0, 2]
        assert world.passes.completed == 2
        await asyncio.sleep(50)
        assert world.since(start)[2] == 34  # the next one rests from the one asked for


# --- What ---


@virtual
async def test_a_pass_marks_zombies_of_the_endpoint_whose_connection_it_is_and_of_no_other():
    world = World()
    world.put_up(ONE, TWO)
    world.put_up(ONE, TWO, key=WEB)
    world.connections = [
        ("192.0.2.10", "93.184.216.1"), ("192.0.2.20", "93.184.216.2"), ("192.0.2.99", "93.184.216.2"),
        ("192.0.2.10", "93.184.216.77"),
    ]  # fmt: skip
    begun = world.clock()
    assert await world.tracker.pass_now()
    assert world.marked() == {ONE}
    assert world.marked(WEB) == {TWO}
    assert world.passes.started_at == begun
    assert world.tracker.entries == 4
    assert world.tracker.idle == 0.5


@virtual
async def test_a_pass_counts_from_its_begin():
    world = World()
    world.lasts = 5.0
    begun = world.clock()
    task = asyncio.ensure_future(world.tracker.pass_now())
    await asyncio.sleep(1)
    assert (world.passes.begun, world.passes.completed) == (1, 0)
    assert await task
    assert (world.passes.begun, world.passes.completed) == (1, 1)
    assert world.passes.started_at == begun


@virtual
async def test_a_pass_completes_only_after_everything_is_marked_and_marks_in_bounded_steps(monkeypatch):
    world = World()
    many = [bytes((93, 0, number >> 8, number & 255)) for number in range(20_000)]
    world.put_up(*many)
    world.seen = {"live": {CI: set(many)}}
    turns = 0
    task = asyncio.ensure_future(world.tracker.pass_now())
    marked_before_end = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
        if not world.passes.completed:
            marked_before_end = len(world.marked())
    assert marked_before_end == len(many)
    assert turns >= len(many) / tracker_module.PIECE + len(many) / zombies_module.PIECE


@virtual
async def test_two_passes_after_a_connection_has_closed_its_address_is_proven_idle():
    world = World()
    zombies = world.caches.zombies[CI]
    world.connections = [("192.0.2.10", "93.184.216.1")]
    world.put_up(ONE)
    for _ in range(3):
        await world.tracker.pass_now()
    assert zombies._verdict(zombies.of(ONE), world.clock()) is None
    world.connections = []
    for _ in range(2):
        await world.tracker.pass_now()
    assert zombies._verdict(zombies.of(ONE), world.clock()) == "idle"


# --- What proves nothing ---


@virtual
async def test_a_reading_that_is_not_whole_marks_and_completes_nothing():
    world = World()
    world.put_up(ONE)
    world.connections = [("192.0.2.10", "93.184.216.1")]
    world.seen = {"whole": False}
    assert not await world.tracker.pass_now()
    assert world.marked() == {ONE}
    assert world.passes.completed == 0
    assert world.tracker.failures == 1
    assert "faster than it can be read" in world.tracker.problem


@virtual
async def test_a_reading_by_an_old_table_of_endpoints_completes_nothing():
    world = World()
    world.put_up(ONE)
    world.connections = [("192.0.2.30", "93.184.216.1")]

    def reload():
        world.table = table(ci="192.0.2.30", web="192.0.2.20")

    world.meanwhile = reload
    assert not await world.tracker.pass_now()
    assert world.passes.completed == 0
    assert world.passes.observing
    world.meanwhile = lambda: None
    assert await world.tracker.pass_now()
    assert world.marked() == {ONE}


@virtual
async def test_an_endpoint_that_goes_in_the_middle_of_a_pass_is_no_error():
    world = World()
    world.put_up(ONE)
    world.put_up(ONE, key=WEB)
    world.connections = [("192.0.2.10", "93.184.216.1")]
    world.meanwhile = lambda: world.caches.drop(WEB)
    assert await world.tracker.pass_now()
    assert world.marked() == {ONE}


@pytest.mark.parametrize(
    "failure", [RightsError("needs CAP_NET_ADMIN"), KernelError("no module"), OSError(1, "x")]
)
@virtual
async def test_what_cannot_be_read_is_said_once_and_once_when_it_can_again(failure):
    world = World(shortest=30)
    world.put_up(ONE)
    world.connections = [("192.0.2.10", "93.184.216.1")]
    world.failure = failure
    with capture_logs() as logs:
        async with world.running():
            await asyncio.sleep(100)
            assert len(world.reads) == 4
            assert (world.passes.begun, world.passes.completed, world.passes.observing) == (4, 0, False)
            assert world.tracker.problem == str(failure)
            assert world.tracker.failures == 4
            assert [(entry["log_level"], entry["reason"]) for entry in logs] == [("warning", str(failure))]
            assert world.passes.next_at > world.clock()
            world.failure = None
            await asyncio.sleep(100)
            assert world.passes.observing
            assert world.tracker.problem is None
            assert [entry["log_level"] for entry in logs] == ["warning", "info"]


@virtual
async def test_missing_rights_are_said_at_the_start_although_there_are_no_zombies():
    world = World()
    world.failure = RightsError("needs CAP_NET_ADMIN")
    with capture_logs() as logs:
        async with world.running():
            await asyncio.sleep(1000)
    assert [entry["reason"] for entry in logs] == ["needs CAP_NET_ADMIN"]


@virtual
async def test_a_family_that_is_not_tracked_matters_only_where_it_has_zombies():
    world = World()
    world.seen = {"untracked": frozenset({16})}
    assert await world.tracker.pass_now()
    world.put_up(ONE)
    assert await world.tracker.pass_now()
    world.put_up(SIX, key=WEB)
    assert not await world.tracker.pass_now()
    assert not world.passes.observing
    assert "IPv6" in world.tracker.problem
    assert "IPv4" not in world.tracker.problem
    assert "ct state established,related accept" in world.tracker.problem
    world.forget(SIX, key=WEB)
    assert await world.tracker.pass_now()
    assert world.passes.observing


@virtual
async def test_without_any_tracking_nothing_is_observed():
    world = World()
    world.put_up(ONE)
    world.seen = {"untracked": frozenset({4, 16})}
    assert not await world.tracker.pass_now()
    assert "IPv4 connections" in world.tracker.problem


@virtual
async def test_a_pass_that_is_given_up_completes_nothing_and_the_next_one_works():
    world = World()
    world.put_up(ONE)
    world.lasts = 5.0
    task = asyncio.ensure_future(world.tracker.pass_now())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.passes.completed == 0
    assert await world.tracker.pass_now()
    assert world.passes.completed == world.passes.begun == 2
