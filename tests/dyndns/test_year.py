"""A year of everything at once, and what must hold in each moment of it."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
from dyndns_world import (
    PASSWORD,
    V6,
    World,
    domain,
    gaps,
    kill,
    minutes,
    run_long,
)

from dnsproxy.dyndns.outcomes import Code
from dnsproxy.dyndns.plan import RULES, Kind


@dataclass
class Year:
    """What happens to one host, and what must hold. Times of truth are kept for the one-interval rule."""

    chance: random.Random
    days: float
    interval: int = 5

    def __post_init__(self):
        self.world = World()
        self.spec = {"families": "[ipv4, ipv6]", "interval": self.interval}
        self.world.home.ipv6 = V6
        self.world.provider.late = 0.4
        self.password = PASSWORD
        self.task = None
        self.number = 0

    def document(self):
        return domain(password=self.password, **self.spec)

    def start(self):
        self.task = self.world.start(self.document(), chance=self.chance.random)

    async def live(self):
        self.world.provider.clock = self.world.now
        self.start()
        end = self.world.now() + self.days * 86_400
        steps = [
            (30, self.new_address), (5, self.new_prefix), (8, self.echo_fails), (6, self.provider_fails),
            (8, self.restart), (10, self.kill), (3, self.reboot), (5, self.leap), (3, self.rotate),
            (8, self.slow), (2, self.refuse), (4, self.flap),
        ]  # fmt: skip
        kinds = [step for weight, step in steps for _ in range(weight)]
        while self.world.now() < end:
            await self.chance.choice(kinds)()
            await self.calm(self.chance.choice((0.1, 2, 20, 60, 12 * 60)))
        await kill(self.task)

    async def calm(self, length: float):
        """Let time pass; after an interval of peace the record has to be right."""
        await minutes(length)
        if length * 60 > 2 * self.interval * 60 + 20 and self.healthy():
            assert self.held() or self.right(), (self.world.provider.records, self.world.home)

    def held(self) -> bool:
        return self.world.status().held_reason is not None

    def healthy(self) -> bool:
        home = self.world.home
        return None not in (home.ipv4, home.ipv6) and self.world.provider.out is None

    def right(self) -> bool:
        wanted = (self.world.home.ipv4, self.world.home.ipv6)
        return self.world.provider.records.get("www.example.de") == wanted

    async def new_address(self):
        self.number += 1
        self.world.home.ipv4 = (
            f"93.{184 + self.number // 65_536}.{self.number // 256 % 256}.{self.number % 256}"
        )

    async def new_prefix(self):
        self.number += 1
        self.world.home.ipv6 = f"2a01:238:{self.number % 65_535 + 1:x}::1"

    async def flap(self):
        first = self.world.home.ipv4
        await self.new_address()
        await minutes(self.chance.choice((0.5, 4, 6)))
        self.world.home.ipv4 = first

    async def there_and_back(self, length: float):
        """A new address, and in half of all cases the old one again when the trouble is over."""
        first = self.world.home.ipv4
        await self.new_address()
        await minutes(length)
        if self.chance.random() < 0.5:
            self.world.home.ipv4 = first

    async def echo_fails(self):
        home, before = self.world.home, (self.world.home.ipv4, self.world.home.ipv6)
        home.ipv4, home.ipv6 = self.chance.choice(((None, None), (None, before[1]), (before[0], None)))
        await minutes(self.chance.choice((1, 30, 600)))
        home.ipv4, home.ipv6 = before

    async def provider_fails(self):
        self.world.provider.out = self.chance.choice(
            [code for code in Code if RULES[code].kind in (Kind.UNKNOWN, Kind.SERVER, Kind.BLOCKED)]
        )
        await self.there_and_back(self.chance.choice((5, 60, 600)))
        self.world.provider.out = None

    async def slow(self):
        """Requests that are acted on, but only after everybody has lost patience."""
        self.world.provider.late = 400.0
        await self.there_and_back(self.chance.choice((8, 30)))
        self.world.provider.late = 0.4

    async def refuse(self):
        """A password that is wrong for a while: one request, and none until it is mended."""
        self.world.provider.passwords["www.example.de"] = "changed"
        await self.new_address()
        await minutes(12 * 60)
        sent = len(self.world.times())
        await self.new_address()
        await minutes(24 * 60)
        await self.restart()
        await minutes(24 * 60)
        if self.world.status().held_reason == "badauth":
            assert len(self.world.times()) <= sent + 1
        self.password = "changed"
        self.world.sync.update([self.document()])
        await minutes(11)
        assert self.held() or self.right()
        self.world.provider.passwords.clear()

    async def rotate(self):
        self.password = f"secret {self.chance.random()}"
        self.world.sync.update([self.document()])

    async def restart(self):
        await self.end()
        self.start()

    async def end(self):
        await kill(self.task)
        if b'"pending": true' in self.world.disk.rows.get("dyndns/www.example.de", b""):
            self.world.provider.unsure.add("www.example.de")  # the answer was not stored any more

    async def kill(self):
        """End the process at any moment around a change."""
        await minutes(6)  # so that the change is published at once
        self.world.sync.look_again()
        await self.there_and_back(self.chance.random() * 2 / 60)
        await self.restart()

    async def reboot(self):
        await self.end()
        self.world.boot = f"boot {self.chance.random()}"
        self.world.wall_ahead -= self.chance.choice((0, 0, 3600, 86_400 * 30))  # no battery, no time yet
        await minutes(1)
        self.start()

    async def leap(self):
        self.world.wall_ahead += self.chance.choice((-1, 1)) * self.chance.choice((30, 7200, 86_400 * 30))


@pytest.mark.timeout(3600)  # the whole year, in the deep profile
@pytest.mark.parametrize("seed", range(2))
def test_a_year(seed):
    """Never two requests within five minutes, none for nothing, the record right, no request after a halt.

    The deep profile takes the whole year at the shortest interval; otherwise it is some weeks of it.
    """
    year = Year(random.Random(seed), days=365 if os.environ.get("DNSPROXY_DEEP") else 40)
    run_long(year.live())
    requests = year.world.provider.requests
    assert len(requests) > 50
    assert min(gaps([at for at, *_ in requests])) >= 300
    assert year.world.provider.useless == []
    assert all(myip.count(",") == 1 for _, _, myip in requests)  # never half a set
