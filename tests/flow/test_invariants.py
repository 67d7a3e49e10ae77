"""The invariants of the design that the writer has to keep, under load, on virtual time.

Latencies are random, one write in ten fails in one of several ways, names leave the caches all the time,
and neighbours flush, delete and add. Numbers are those of the design, section 9.
"""

from __future__ import annotations

import asyncio
import os
from math import inf
from random import Random
from zlib import crc32

import pytest
from fakes import FakeSets, Writer, run_virtual
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dnsproxy.addresses import from_text as address
from dnsproxy.errors import Cause, SetError
from dnsproxy.namemanager.elements import SetSpec, address_of, key_of
from dnsproxy.names import from_text

WHO = [f"e{number}" for number in range(8)]
HUB = SetSpec("inet", "fw4", "hub", 4, ports=False, ours=False)


def policy(who):
    """Return documents for some endpoints that are all allowed the same."""
    endpoints = (
        f"""
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {{name: {name}, labels: {{app: {name[:1]}}}}}
spec: {{addresses: [192.0.2.{number + 1}]}}
"""
        for number, name in enumerate(who)
    )
    return "---".join((*endpoints, ALLOWED))


ALLOWED = """
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: all}
spec:
  endpointSelector: {matchLabels: {app: e}}
  allow:
  - {pattern: "*.ports.test", ports: [443/TCP, 443/UDP]}
  - {pattern: "*.plain.test"}
  - {pattern: "*.hub.test", ports: [22/TCP], set: ["4#inet#fw4#hub", shared]}
  resolve: ["*.lookup.test"]
"""
POLICY = policy(WHO)
FEW = policy(WHO[:3])
OTHER = FEW.replace("443/UDP", "80/TCP").replace('"*.lookup.test"', '"*.other.test"')
SEEDS = range(20 if os.environ.get("DNSPROXY_DEEP") else 1)
ZONES = ("ports.test", "ports.test", "plain.test", "hub.test", "lookup.test")


class Weather:
    """Random latencies and failures, all from one seed; at `hangs_at` one call hangs."""

    def __init__(self, seed, *, failing=0.1, hangs_at=inf):
        self.random = Random(seed)
        self.failing = failing
        self.hangs_at = hangs_at

    async def delay(self):
        if asyncio.get_running_loop().time() > self.hangs_at:
            self.hangs_at = inf
            await asyncio.sleep(6.0)
        await asyncio.sleep(self.random.expovariate(1 / 0.001))

    def trouble(self, deletes, adds):
        if self.random.random() >= self.failing:
            return None
        without_a_reason = self.random.random() < 0.8
        return SetError(Cause.OTHER, "refused") if without_a_reason else OSError(105, "no buffer space")

    def late_trouble(self):
        return OSError(5, "lost") if self.random.random() < self.failing / 20 else None

    def sets(self):
        return FakeSets(
            delay=self.delay, trouble=self.trouble, late_trouble=self.late_trouble, kernel={HUB: {}}
        )


async def client(writer, who, random, count, rate=100.0):
    """Ask for names whose addresses rotate, at random times."""
    for _ in range(count):
        await asyncio.sleep(random.expovariate(rate))
        text = f"n{random.randrange(12)}.{random.choice(ZONES)}"
        turn = int(writer.clock() / 3) + crc32(text.encode()) % 7
        pool = [bytes((93, turn & 255, number, len(text))) for number in range(3)]
        pool.append(bytes.fromhex("26064700") + bytes(10) + bytes((turn & 255, len(text))))
        pool += [bytes((94, *random.randbytes(2), 1)) for _ in range(3)]
        writer.ask(text, *random.sample(pool, random.randrange(1, 4)), who=who, ttl=random.choice([0, 1, 5]))


async def load(writer, seed, count, who=WHO, rate=100.0):
    """Let clients ask, all at once."""
    randoms = [Random(seed * 1000 + number) for number, _ in enumerate(who)]
    await asyncio.gather(*(client(writer, *pair, count, rate) for pair in zip(who, randoms, strict=True)))


def short_lived(sets, text=POLICY):
    return Writer(text, sets, minimum_ttl=1, addresses_per_name=8, gc_interval=2, repair_interval=6)


# 1. No answer leaves before its addresses are in the kernel, or the hold ended.


@pytest.mark.parametrize("seed", SEEDS)
def test_invariant_1_no_answer_leaves_before_its_addresses_are_in_the_kernel(seed):
    async def main():
        async with short_lived(Weather(seed, hangs_at=1020.0).sets()).running(start=False) as writer:
            await load(writer, seed, 4200)
            await asyncio.sleep(20)
            manager = writer.manager
            assert writer.unapplied() == []
            assert len(writer.answers) == writer.asked == 33_600
            assert manager.holds >= 20_000
            assert manager.holds == manager.released + manager.timeouts + manager.refused
            assert manager.released > 0.8 * manager.holds
            assert manager.timeouts > 0
            assert manager.failures > 100
            assert any(deletes for deletes, _ in writer.sets.transactions)
            assert max(held for _, held in writer.ends.values()) < 0.1001

    run_virtual(main())


@pytest.mark.parametrize("seed", SEEDS)
def test_invariant_1_holds_beside_neighbours_from_the_instant_they_are_heard_of(seed):
    async def main():
        weather = Weather(seed, failing=0.02)
        async with short_lived(weather.sets()).running(start=False) as writer:
            await asyncio.sleep(1)
            changes = set()
            loading = asyncio.ensure_future(load(writer, seed, 1000))
            while not loading.done():
                await asyncio.sleep(weather.random.expovariate(1 / 0.3))
                meddle(writer, weather.random)
                changes.add(writer.clock())
            await asyncio.sleep(5)
            late = [n for n in writer.unapplied() if writer.answers[n].at not in changes]
            assert late == []
            assert writer.manager.released > 2000
            assert writer.manager.drift > 100
            assert writer.in_kernel() == writer.wanted_of_ours()

    run_virtual(main())


def test_the_check_finds_a_writer_that_trusts_its_caches():
    """The check itself: pushing what is new to the cache lets answers out too early."""

    async def main():
        async with short_lived(Weather(1, failing=0).sets()).running(start=False) as writer:
            observe = writer.plan.observe

            def naive(view, grants, name, addresses, ttl, now):
                known = set(writer.caches.of(view.endpoint.key).addresses(name))
                lacking = observe(view, grants, name, addresses, ttl, now)
                return tuple(each for each in lacking if address_of(each.key) not in known)

            writer.plan.observe = naive
            for number in range(30):
                for _ in range(2):
                    writer.ask("n1.ports.test", bytes((94, 0, 0, number)), who="e0")
                await asyncio.sleep(0.05)
            assert len(writer.unapplied()) == 30

    run_virtual(main())


# 2. After a quiet repair, kernel = wanted, whatever was flushed, deleted or added from outside.


def meddle(writer, random):
    """Do something that another program might do to our sets."""
    sets = writer.sets
    ours = [spec for spec in sets.kernel if spec.ours]
    act = random.choice(["flush", "drop", "clear", "remove", "remove", "add", "rename"])
    if act == "flush" or not ours:
        sets.flush()
        return
    spec = random.choice(ours)
    content = sets.kernel[spec]
    if act == "drop":
        del sets.kernel[spec]
    elif act == "clear":
        content.clear()
    elif act == "add":
        one = bytes((93, 0, 0, random.randrange(256)))
        sets.add(spec, key_of(one, 6, 25) if spec.ports else one, random.choice(["", "n1.ports.test.", "x"]))
    elif content:
        key = random.choice(list(content))
        sets.remove(spec, key)
        if act == "rename":
            sets.add(spec, key, "somebody.else.test.")
    sets.changed.set()


# Claims were lost: by writes between reading and taking over, and by writes that failed amid that.
@example(24, 11, False)
@example(23, 12, False)
@example(121, 1, True)
@example(36, 5, True)
@given(st.integers(0, 2**32), st.integers(0, 12), st.booleans())
@settings(max_examples=1_000 if os.environ.get("DNSPROXY_DEEP") else 25)
def test_invariant_2_after_a_quiet_repair_the_kernel_is_what_is_wanted(seed, count, told):
    async def main():
        random = Random(seed)
        weather = Weather(seed, failing=0.05)
        async with short_lived(weather.sets(), FEW).running(start=False) as writer:
            writer.sets.kernel[HUB][address("93.9.9.9")] = "by hand"
            loading = asyncio.ensure_future(load(writer, seed, 40, who=WHO[:3]))
            for _ in range(count):
                await asyncio.sleep(random.expovariate(1 / 0.04))
                meddle(writer, random)
                if random.random() < 0.2:
                    writer.swap(random.choice([FEW, OTHER]))
            await loading
            meddle(writer, random)
            if not told:
                writer.sets.changed.clear()
            weather.failing = 0
            await asyncio.sleep(10)
            assert writer.in_kernel() == writer.wanted_of_ours()
            theirs = writer.wanted().get(HUB, {}) | {address("93.9.9.9"): "by hand"}
            assert writer.sets.kernel[HUB] == theirs
            assert writer.manager.status()["state"] == "enforcing"

    run_virtual(main())


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_flush_under_load_everything_is_back_within_a_second(seed):
    async def main():
        weather = Weather(seed, failing=0)
        writer = Writer(POLICY, weather.sets())
        async with writer.running():
            for number in range(3000):
                one = bytes((94, number >> 8, number & 255, 1))
                writer.ask(f"n{number}.ports.test", one, who=WHO[number % 8])
            loading = asyncio.ensure_future(load(writer, seed, 600))
            await asyncio.sleep(3)
            before = writer.in_kernel()
            assert sum(map(len, before.values())) > 6000
            flushed = writer.clock()
            writer.sets.flush()
            await asyncio.sleep(1)
            after = writer.in_kernel()
            assert all(content.keys() <= after[spec].keys() for spec, content in before.items())
            await loading
            assert [n for n in writer.unapplied() if writer.answers[n].at != flushed] == []
            assert writer.manager.repairs in (2, 3)
            assert writer.manager.timeouts == 0
            assert writer.manager.drift > 0.9 * sum(map(len, before.values()))

    run_virtual(main())


# 7. A learned address opens nothing for an endpoint that did not ask.


@pytest.mark.parametrize("seed", SEEDS)
def test_invariant_7_what_one_endpoint_learned_opens_nothing_for_another(seed):
    async def main():
        weather = Weather(seed, failing=0.05)
        async with short_lived(weather.sets()).running(start=False) as writer:
            asked = {who: set() for who in WHO}
            ask = writer.ask

            def noting(text, *addresses, who, ttl):
                asked[who].update(addresses)
                return ask(text, *addresses, who=who, ttl=ttl)

            writer.ask = noting
            loading = asyncio.ensure_future(load(writer, seed, 300, who=WHO[:5]))
            while not loading.done():
                await asyncio.sleep(0.4)
                meddle(writer, weather.random)
            await asyncio.sleep(5)
            added = [each for _, adds in writer.sets.transactions for each in adds]
            assert len(added) > 1000
            for each in added:
                if each.spec.name.startswith("ep."):
                    who = each.spec.name.split(".")[2]
                    assert address_of(each.key) in asked[who], who

    run_virtual(main())


@given(st.integers(0, 2**32))
def test_invariant_7_also_for_what_the_sets_hold_at_the_start(seed):
    """Elements of one endpoint's set, and of shared ones, are adopted for nobody else."""

    async def main():
        random = Random(seed)
        sets = FakeSets(kernel={HUB: {}})
        writer = Writer(POLICY, sets)
        mine = {who: set() for who in WHO}
        for spec in writer.plan.specs():
            for _ in range(random.randrange(4)):
                one = bytes((93, 0, 0, random.randrange(20)))
                if spec.version == 4:
                    key = key_of(one, 6, 443) if spec.ports else one
                    text = f"n.{random.choice(ZONES)}."
                    sets.kernel.setdefault(spec, {})[key] = text
                    if spec.name.startswith("ep.default.e"):
                        mine[spec.name.split(".")[2]].add(one)
        async with writer.running():
            pass
        for who in WHO:
            found = {found for _, found, _ in writer.caches.of(f"default/{who}").items()}
            assert found <= mine[who]
        assert writer.in_kernel() == writer.wanted_of_ours()

    run_virtual(main())


def test_invariant_7_a_name_that_only_resolves_opens_nothing():
    async def main():
        async with Writer(POLICY, FakeSets(kernel={HUB: {}})).running() as writer:
            number = writer.ask("n.lookup.test", address("93.1.1.1"), who="e0")
            assert writer.answers[number].wire == b"answer"
            await asyncio.sleep(100)
            assert writer.in_kernel() == {}
            assert writer.sets.transactions == []
            assert writer.caches.of("default/e0").addresses(from_text("n.lookup.test")) != ()

    run_virtual(main())


# Restarts and zombies: nothing that a connection may use goes, and nothing else stays.


def learned(key, text):
    """Tell what clients have learned from what `meddle` added or renamed."""
    return address_of(key)[:3] != bytes((93, 0, 0)) and text.startswith("n")


def test_what_another_instance_writes_while_it_winds_down_is_adopted():
    """Two writers on one kernel: the old one learns on after the new one is ready, and up to its end."""
    one, two, late = (address(f"93.184.216.{number}") for number in (34, 35, 36))
    port4 = SetSpec("inet", "dnsproxy", "ep.default.e0.port4", 4, ports=True, ours=True)

    def addresses(sets):
        return {address_of(key) for key in sets.kernel[port4]}

    async def main():
        sets = FakeSets(kernel={HUB: {}})
        old = Writer(FEW, sets)
        new = Writer(FEW, sets, deletes=False, repair_interval=6, zombies_per_endpoint=10)
        async with new.running():
            async with old.running():
                old.ask("a.ports.test", one, who="e0")
                await asyncio.sleep(10)  # a repair of the new one reads it
                old.ask("b.ports.test", two, who="e0")
                await asyncio.sleep(0.05)  # none has read this one
                assert addresses(sets) == {one, two}
            new.manager.deletes = True
            await asyncio.sleep(20)
            assert addresses(sets) == {one, two}
            sets.add(port4, key_of(late, 6, 443), "c.ports.test.")  # nobody's, once it removes
            await asyncio.sleep(20)
            assert addresses(sets) == {one, two}
            assert new.in_kernel() == new.wanted_of_ours()

    run_virtual(main())


@pytest.mark.parametrize("seed", SEEDS)
def test_invariants_1_2_and_7_across_kills_with_zombies_passes_and_neighbours(seed):
    """One kernel, three processes: each is killed in the middle of its work and leaves nothing but claims."""

    async def main():
        weather = Weather(seed, failing=0.02)
        sets, random = weather.sets(), weather.random
        sets.kernel[HUB][address("93.9.9.9")] = "by hand"
        claims = []
        for _ in range(3):
            writer = Writer(
                POLICY, sets, minimum_ttl=1, gc_interval=2, repair_interval=6, zombies_per_endpoint=1000
            )
            writer.plan.restore(claims, writer.plan.sets())
            left = {spec: dict(content) for spec, content in sets.kernel.items()}
            async with writer.running():
                for spec, content in left.items():
                    kept = {key for key, text in content.items() if learned(key, text)}
                    assert not spec.name.startswith("ep.") or kept <= sets.kernel[spec].keys()
                changes = set()
                loading = asyncio.ensure_future(load(writer, seed, 150))
                for _ in range(5):
                    await asyncio.sleep(random.expovariate(1 / 0.3))
                    meddle(writer, random)
                    changes.add(writer.clock())
                    begun = writer.caches.passes.begin()
                    live = random.sample([bytes((93, 0, n, 12)) for n in range(9)], 3)
                    for zombies in writer.caches.zombies.values():
                        for _ in zombies.mark(begun, writer.clock(), live):
                            pass
                    writer.caches.passes.complete(begun, writer.clock())
                await loading
                assert [n for n in writer.unapplied() if writer.answers[n].at not in changes] == []
                claims = list(writer.plan.claims())
            sets.changed.clear()  # what others did is there for the next process to find
        writer = Writer(
            POLICY, sets, minimum_ttl=1, gc_interval=2, repair_interval=6, zombies_per_endpoint=1000
        )
        writer.plan.restore(claims, ())
        weather.failing = 0
        async with writer.running():
            await asyncio.sleep(10)
            assert writer.in_kernel() == writer.wanted_of_ours() != {}
            for _ in range(2):
                passes = writer.caches.passes
                passes.complete(passes.begin(), writer.clock())
            await asyncio.sleep(10)
            assert writer.in_kernel() == {}
            assert sets.kernel[HUB] == {address("93.9.9.9"): "by hand"}

    run_virtual(main())
