"""DynDNS beside the proxy: what starts it, what it survives, and what it remembers."""

from __future__ import annotations

import asyncio

import pytest

from dnsproxy import domains
from dnsproxy.cache.gc import Caches
from dnsproxy.cache.journal import Journal
from dnsproxy.cache.keeper import Keeper
from dnsproxy.cache.store import Store
from dnsproxy.config import read
from dnsproxy.domains import Alone, Domains, Kept
from dnsproxy.dyndns import documents
from dnsproxy.errors import DnsproxyError

DOMAIN = """
apiVersion: dyndns.contrib.strato.com/v1alpha1
kind: Domain
metadata: {name: www}
spec: {fqdn: www.example.de, ipAddress: 93.184.216.34, enabled: false, interval: 5, password: {name: p}}
---
apiVersion: v1
kind: Secret
metadata: {name: p}
stringData: {password: hush}
"""


class FakeSync:
    """Keeps records until it is cancelled, or breaks down."""

    made: list[FakeSync]

    def __init__(self, config, memory):
        self.wanted = []
        self.started = asyncio.Event()
        self.broken = asyncio.Event()
        self.made.append(self)

    def update(self, found):
        self.wanted = list(found)

    def look_again(self):
        self.looked = True

    async def run(self):
        self.started.set()
        await self.broken.wait()
        raise RuntimeError("a fault")


@pytest.fixture
def made(monkeypatch):
    FakeSync.made = []
    monkeypatch.setattr(domains, "_sync", FakeSync)
    monkeypatch.setattr(domains, "RETRY", 0.0)
    return FakeSync.made


@pytest.fixture
async def kept(made):
    found = Domains(read("", "dnsproxy.yaml"), None)
    task = asyncio.create_task(found.run())
    yield found
    task.cancel()
    await asyncio.wait([task])


async def until(count, made):
    async with asyncio.timeout(10):
        while len(made) < count:  # noqa: ASYNC110 - it is what is tested that makes them
            await asyncio.sleep(0)
        await made[-1].started.wait()


async def test_nothing_is_made_before_the_first_document(kept, made):
    kept.update(())
    kept.look_again()
    await asyncio.sleep(0)
    assert made == []
    kept.update(("a",))
    await until(1, made)
    assert made[0].wanted == ["a"]
    kept.update(())
    assert made[0].wanted == []


async def test_what_breaks_down_starts_again_with_the_same_records(kept, made):
    kept.update(("a", "b"))
    await until(1, made)
    made[0].broken.set()
    await until(2, made)
    assert made[1].wanted == ["a", "b"]


async def test_a_pause_ends_when_it_is_over(kept, made):
    kept.update(("a",))
    await until(1, made)
    await kept.pause()
    await asyncio.sleep(0)
    assert len(made) == 1
    kept.resume()
    await until(2, made)


async def test_alone_it_touches_nothing_of_the_proxys_state_but_its_own(tmp_path):
    store = Store(tmp_path)
    assert store.acquire()
    memory = Alone(store)
    await memory.remember("dyndns/www.example.de", b"row")
    await memory.close()
    again = Store(tmp_path)
    assert again.acquire(), "it has let go"
    memory = Alone(again)
    assert await memory.load() == {"dyndns/www.example.de": b"row"}
    await memory.close()


async def test_where_the_state_was_lost_nobody_takes_it_for_a_first_start(tmp_path):
    (tmp_path / "state.db").write_bytes(b"damaged" * 1000)
    store = Store(tmp_path)
    assert store.acquire()
    memory = Alone(store)
    with pytest.raises(DnsproxyError, match="was lost"):
        await memory.load()
    await memory.remember("dyndns/www.example.de", b"row")
    assert await memory.load() == {"dyndns/www.example.de": b"row"}
    await memory.close()


async def test_the_proxys_state_stays_lost_for_the_records_though_it_was_read_before(tmp_path):
    (tmp_path / "state.db").write_bytes(b"damaged" * 1000)
    store = Store(tmp_path)
    assert store.acquire()
    keeper = Keeper(Journal(Caches(minimum_ttl=0, addresses_per_name=0, names_per_endpoint=10)), store)
    await keeper.load()  # as the proxy does at its start, which sets the file aside
    with pytest.raises(DnsproxyError, match="was lost"):
        await Kept(keeper).load()
    await keeper.close()


def test_the_real_thing_is_made_of_the_settings(tmp_path):
    (domain,) = documents.load([("domain.yaml", DOMAIN)]).domains
    made = domains._sync(read("dyndns: {hook_command: [/bin/true]}", "dnsproxy.yaml"), None)
    made.update([domain])
    assert made.problems() == []
