"""The lookup cache against a plain specification of it, and Cilium's cache scenarios 60 to 69."""

from __future__ import annotations

import os
from collections import Counter
from itertools import count
from math import floor, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dnsproxy.cache.lookups import HORIZON, PAIRS_PER_NAME, UNLIMITED, Lookup, LookupCache, Record, Removed
from dnsproxy.names import from_text

DEEP = bool(os.environ.get("DNSPROXY_DEEP"))
A, B, C = map(from_text, ("a.example", "b.example", "c.example"))
ONE, TWO, THREE, SIX = b"\xc0\x00\x02\x01", b"\xc0\x00\x02\x02", b"\xc0\x00\x02\x03", bytes(15) + b"\x06"


def cache(minimum_ttl=0, addresses_per_name=0, max_names=1000, **options):
    return LookupCache(minimum_ttl, addresses_per_name, max_names, **options)


def collect(this, now, budget=10**9):
    """Collect to the end, in steps of `budget`."""
    removed = []
    for _ in range(100_000):
        step = this.collect(now, budget)
        removed += step.removed
        if not step.more:
            return removed
    raise AssertionError("collection does not end")


def content(this):
    return {(name, address): lookup for name, address, lookup in this.items()}


def causes(removed):
    return {(pair.name, pair.address): pair.cause for pair in removed}


def assert_consistent(this):
    """Both maps and the counts agree, and every name waits in one bucket that is not late."""
    pairs = [(name, address) for name, address, _ in this.items()]
    assert len(pairs) == len(set(pairs)) == this.pairs
    assert {(n, a) for a in this._reverse for n in this.holders(a)} == set(pairs)
    assert set(this._reverse) == {address for _, address in pairs}
    assert sorted(this) == sorted({name for name, _ in pairs})
    assert sorted(this._seconds) == sorted(this._buckets)
    waiting = [(name, due) for due, bucket in this._buckets.items() for name in bucket]
    assert sorted(waiting) == sorted((name, this._forward[name].due) for name in this)
    assert [held.place for held in this._list] == list(range(len(this)))
    assert {held.name for held in this._list} == set(this)
    earliest = {name: min(this._forward[name].values()).expiry for name in this}
    assert not this._expires or all(due <= floor(earliest[name]) + 1 for name, due in waiting)


# Cilium's scenarios


def test_only_unexpired_addresses_remain_each_once():  # 60
    this = cache()
    for second in range(4):
        this.insert(A, (bytes((10, 0, 0, second)),), 10 - 2 * second, 0.0)
        this.insert(A, (bytes((10, 0, 0, second)),), 1, 0.0)
    for second in range(12):
        collect(this, float(second))
        alive = [bytes((10, 0, 0, n)) for n in range(4) if 10 - 2 * n >= second]
        assert sorted(this.addresses(A)) == alive


def test_forced_expiry_of_names_that_do_not_match_changes_nothing():  # 61
    this = cache()
    for name in (A, B, C):
        this.insert(name, (ONE,), 60, 0.0)
    before = content(this)
    assert this.expire(inf, this.matching(lambda name: name.startswith(b"\x01x"))) == []
    assert content(this) == before
    assert collect(this, 0.0) == []


def test_forced_expiry_by_names_leaves_the_others():  # 62
    this = cache()
    for name in (A, B, C):
        this.insert(name, (ONE, TWO), 60, 5.0)
    assert this.expire(6.0, [A, C, from_text("absent.example")]) == [A, C]
    assert list(this) == [B]
    assert causes(collect(this, 6.0)) == {(n, a): "forced" for n in (A, C) for a in (ONE, TWO)}


def test_forced_expiry_spares_what_was_looked_up_since():
    this = cache()
    this.insert(A, (ONE, TWO), 60, 5.0)
    this.insert(A, (TWO,), 60, 6.0)
    assert this.expire(5.0, [A]) == []
    assert this.expire(6.0, [A]) == [A]
    assert this.addresses(A) == (TWO,)
    assert this.expire(6.0, [A]) == []


@pytest.mark.parametrize("addresses", [(ONE, TWO), (TWO, ONE), (TWO,), (TWO, TWO)])
def test_an_older_answer_shortens_nothing_whatever_its_order(addresses):
    this = cache()
    this.insert(A, (ONE, TWO), 60, 5.0)
    before = content(this)
    assert this.insert(A, addresses, 50, 4.0) == ()
    assert content(this) == before


def test_part_of_an_answer_extends_that_part_and_all_of_it_in_any_order_all():
    this = cache()
    this.insert(A, (ONE, TWO, THREE), 60, 0.0)
    this.insert(A, (THREE, TWO, ONE), 60, 1.0)
    assert content(this) == dict.fromkeys([(A, ONE), (A, TWO), (A, THREE)], Lookup(61.0, 1.0, 60))
    this.insert(A, (TWO, TWO, ONE), 60, 2.0)
    assert {address: lookup.looked_up for (_, address), lookup in content(this).items()} == {
        ONE: 2.0, TWO: 2.0, THREE: 1.0
    }  # fmt: skip


def test_what_two_caches_learn_from_one_answer_is_there_once():
    mine, everybodys, addresses = cache(), cache(expires=False), (ONE, TWO)
    for this in (mine, everybodys):
        this.insert(A, addresses, 60, 0.0)
        assert this.addresses(A) is addresses


def test_names_of_a_shared_address_are_sorted_and_live_by_their_own_leases():  # 63
    this = cache()
    this.insert(B, (ONE,), 4, 0.0)
    this.insert(A, (ONE,), 2, 0.0)
    collect(this, 1.0)
    assert this.names(ONE) == [A, B]
    collect(this, 3.0)
    assert this.names(ONE) == [B]
    collect(this, 5.0)
    assert this.names(ONE) == []


def test_records_list_every_lookup_once():  # 64
    this = cache()
    for second in range(6):
        this.insert(
            (A, B)[second % 2], (bytes((10, 0, 0, second)), bytes((10, 0, 1, second))), 60, float(second)
        )
    records = list(this.records())
    assert sorted(record.lookup.looked_up for record in records) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(len(record.addresses) == 2 for record in records)


def test_loaded_records_keep_their_times():  # 65
    first = cache()
    first.insert(A, (ONE, TWO), 10, 0.0)
    second = cache(minimum_ttl=3600)
    second.load(list(first.records()))
    assert content(second) == content(first)
    collect(second, 11.0)
    assert content(second) == {}


def test_a_minimum_ttl_raises_the_lease():  # 66
    this = cache(minimum_ttl=60)
    this.insert(A, (ONE,), 3, 0.0)
    assert this.lookup(A, ONE) == Lookup(expiry=60.0, looked_up=0.0, ttl=60)
    assert collect(this, 3.0) == []
    assert causes(collect(this, 70.0)) == {(A, ONE): "ttl"}


def test_a_lease_is_valid_in_its_last_second():  # 67
    this = cache()
    this.insert(A, (ONE,), 10, 0.0)
    assert collect(this, 10.0) == []
    assert collect(this, 10.9) == []
    assert causes(collect(this, 11.0)) == {(A, ONE): "ttl"}


def test_without_a_limit_nothing_is_trimmed():  # 68
    this = cache(addresses_per_name=0)
    addresses = tuple(n.to_bytes(4, "big") for n in range(3000))
    this.insert(A, addresses, 60, 0.0)
    assert collect(this, 1.0) == []
    assert len(this.addresses(A)) == 3000


def test_a_mark_of_a_name_that_is_gone_harms_nothing():  # 69
    this = cache(addresses_per_name=2)
    this.insert(A, (ONE, TWO, THREE), 60, 0.0)
    this.expire(inf, [A])
    assert set(causes(collect(this, 1.0)).values()) == {"forced"}
    assert list(this) == []


# Leases


def test_insert_tells_the_addresses_that_are_new_for_the_name():  # 84 to 86
    this = cache()
    assert this.addresses(A) == ()
    assert this.insert(A, (ONE,), 60, 0.0) == (ONE,)
    assert this.insert(A, (ONE, TWO, TWO, SIX), 60, 0.0) == (TWO, SIX)
    assert this.insert(A, (SIX, ONE), 90, 0.0) == ()
    assert this.lookup(A, ONE).ttl == 90
    assert this.insert(B, (ONE,), 60, 0.0) == (ONE,)
    assert this.insert(C, (), 60, 0.0) == ()
    assert C not in this


def test_no_sighting_shortens_a_lease():
    this = cache()
    this.insert(A, (ONE,), 100, 0.0)
    this.insert(A, (ONE,), 5, 1.0)
    assert this.lookup(A, ONE).expiry == 100.0


def test_reads_return_expired_pairs_until_they_are_collected():
    this = cache()
    this.insert(A, (ONE,), 1, 0.0)
    this.insert(B, (ONE,), 900, 800.0)
    assert this.addresses(A) == (ONE,)
    assert this.names(ONE) == [A, B]
    collect(this, 900.0)
    assert this.names(ONE) == [B]


def test_extending_a_lease_leaves_the_schedule_alone_and_still_holds():
    this = cache()
    this.insert(A, (ONE,), 10, 0.0)
    schedule = {second: dict(bucket) for second, bucket in this._buckets.items()}
    for second in range(1, 100):
        this.insert(A, (ONE,), 10, float(second))
    assert this._buckets == schedule
    assert collect(this, 109.0) == []
    assert causes(collect(this, 110.0)) == {(A, ONE): "ttl"}


def test_a_shorter_lease_beside_a_longer_one_ends_in_time():
    this = cache()
    this.insert(A, (ONE,), 1000, 0.0)
    this.insert(A, (TWO,), 10, 0.0)
    assert causes(collect(this, 11.0)) == {(A, TWO): "ttl"}


@pytest.mark.parametrize("ttl", [HORIZON + 10, 10 * HORIZON, 2**31 - 1])
def test_leases_beyond_the_horizon_end_in_time(ttl):
    this = cache()
    this.insert(A, (ONE,), ttl, 0.5)
    for now in range(0, min(ttl, 20 * HORIZON), HORIZON // 7):
        assert collect(this, float(now)) == []
        assert_consistent(this)
    assert collect(this, float(ttl)) == []
    assert causes(collect(this, float(ttl + 1))) == {(A, ONE): "ttl"}


def test_time_removes_nothing_where_leases_do_not_expire():
    this = cache(expires=False)
    this.insert(A, (ONE,), 10, 0.0)
    for now in (9.0, 11.0, 11.5, 12.0, 5000.0):
        assert collect(this, now) == []
    assert this.addresses(A) == (ONE,)
    assert_consistent(this)


def test_replace_refreshes_and_shrinks_and_never_introduces():
    this, one, two = cache(expires=False), cache(), cache()
    this.insert(A, (ONE, TWO), 100, 0.0)
    one.insert(A, (ONE, THREE), 50, 1.0)
    two.insert(A, (ONE,), 50, 2.0)
    two.insert(B, (TWO,), 50, 2.0)
    assert this.replace(A, (ONE, TWO, THREE), (one, two)) == [TWO]
    assert content(this) == {(A, ONE): Lookup(52.0, 2.0, 50)}
    assert this.replace(B, (TWO,), (one, two)) == []
    assert this.replace(A, (ONE,), ()) == [ONE]
    assert A not in this
    assert_consistent(this)


def test_replace_keeps_what_it_is_told_to_keep_as_it_is():
    this = cache(expires=False)
    this.insert(A, (ONE, TWO), 100, 0.0)
    assert this.replace(A, (ONE, TWO), (), {TWO, THREE}) == [ONE]
    assert content(this) == {(A, TWO): Lookup(100.0, 0.0, 100)}


@given(st.data())
def test_a_walk_may_be_interrupted_by_anything(data):
    this = cache()
    names = [name for name, _ in zip(fresh_names(), range(30), strict=False)]
    stay = set(names[:5])
    this.load([Record(name, Lookup(9e9, 5.0, 60), (ONE,)) for name in data.draw(st.permutations(names[:12]))])
    seen = []
    for name in this.walk():
        seen.append(name)
        other = data.draw(st.sampled_from(names[5:]))
        if not this.expire(inf, [other]):
            this.insert(other, (ONE,), 60, 5.0)
        assert_consistent(this)
        assert len(seen) < 1000
    assert stay <= set(seen)


def test_records_may_be_dumped_while_names_come_and_go():
    this = cache()
    for name in (A, B, C):
        this.insert(name, (ONE,), 60, 0.0)
    dump = this.records()
    first = next(dump)
    this.expire(inf, [A, first.name])
    rest = {record.name for record in dump}
    assert {first.name, *rest} >= {B, C} - {first.name}
    assert A not in rest


def test_the_records_of_one_name():
    this = cache()
    this.insert(A, (ONE, TWO), 60, 0.0)
    this.insert(A, (TWO, SIX), 60, 1.0)
    assert sorted(this.records_of(A)) == [
        Record(A, Lookup(60.0, 0.0, 60), (ONE,)),
        Record(A, Lookup(61.0, 1.0, 60), (TWO, SIX)),
    ]
    assert this.records_of(B) == []


def test_whoever_asks_is_told_which_names_have_changed():
    this = cache(addresses_per_name=1)
    this.insert(A, (ONE,), 60, 0.0)
    assert this.changed is None
    this.changed = set()

    def changed():
        taken, this.changed = this.changed, set()
        return taken

    assert (changed(), this.extended) == (set(), set())
    this.insert(A, (ONE,), 60, 1.0)
    assert (changed(), this.extended) == (set(), {A}), "only its lease is longer"
    this.insert(B, (ONE, TWO), 600, 1.0)
    this.load([Record(C, Lookup(500.0, 1.0, 60), (ONE,))])
    assert changed() == {B, C}
    collect(this, 2.0)
    assert changed() == {B}
    collect(this, 62.0)
    assert (changed(), this.extended) == ({A}, set()), "what has left is no longer among the extended"
    this.expire(inf, [C])
    assert (changed(), this.overrun) == ({C}, False)


def test_changes_have_a_bound_and_what_is_lost_is_said():
    this = cache(minimum_ttl=60, max_names=10)
    this.changed = set()
    for number, name in zip(range(1000), fresh_names(), strict=False):
        this.insert(name, (ONE,), 0, float(number))
        assert len(this.changed) <= 4 * 10 + 1
    assert this.overrun


# Order does not matter

NAMES = st.sampled_from((A, B, C))
ADDRESSES = st.sampled_from((ONE, TWO, THREE, SIX))
LOOKUPS = st.builds(
    lambda at, ttl: Lookup(at + ttl, at, ttl), st.integers(-9, 9).map(lambda n: n / 2), st.integers(0, 9)
)
RECORDS = st.builds(Record, NAMES, LOOKUPS, st.lists(ADDRESSES, min_size=1, max_size=4).map(tuple))


@pytest.mark.parametrize("feed", ["insert", "load"])
@pytest.mark.parametrize("order", [1, -1])
def test_of_two_lookups_that_end_together_the_later_one_counts(feed, order):
    this = cache()
    for now, ttl in [(0.0, 10), (5.0, 5)][::order]:
        if feed == "insert":
            this.insert(A, (ONE,), ttl, now)
        else:
            this.load([Record(A, Lookup(now + ttl, now, ttl), (ONE,))])
    assert this.lookup(A, ONE) == Lookup(10.0, 5.0, 5)


@given(st.lists(RECORDS, max_size=12), st.randoms(), st.integers(0, 3), st.integers(1, 4))
def test_feeding_and_merging_in_any_order_give_the_same_cache(records, random, limit, parts):
    """Invariant 5, also with a limit per name, which holds from the next collection on."""
    in_order = cache(addresses_per_name=limit)
    in_order.load(records)
    shuffled = random.sample(records, len(records))
    merged = cache(addresses_per_name=limit, minimum_ttl=99)
    for part in range(parts):
        piece = cache(addresses_per_name=limit)
        piece.load(shuffled[part::parts])
        merged.merge(piece)
    if limit == 0:
        assert content(merged) == content(in_order)
    for now in (-20.0, 3.0, 7.5):
        collect(merged, now)
        collect(in_order, now)
        assert content(merged) == content(in_order)


@given(st.lists(RECORDS, max_size=12), st.integers(1, 3), st.integers(1, 5))
def test_small_steps_collect_the_same(records, limit, budget):
    whole, stepped = cache(addresses_per_name=limit), cache(addresses_per_name=limit)
    whole.load(records)
    stepped.load(records)
    for now in (-20.0, 3.0, 7.5, 40.0):
        assert Counter(collect(stepped, now, budget)) == Counter(collect(whole, now))
        assert content(stepped) == content(whole)


# The model: every sighting in a list, no schedule


class Specification:
    """What the cache is, in the plainest words."""

    def __init__(self, minimum_ttl, limit):
        self.minimum_ttl, self.limit = minimum_ttl, limit
        self.sightings = {}
        self.left = Counter()

    def see(self, name, lookup, addresses):
        new = [a for a in dict.fromkeys(addresses) if (name, a) not in self.sightings]
        for address in addresses:
            self.sightings.setdefault((name, address), []).append(lookup)
        if self.limit and len(self.of(name)) > 2 * self.limit:
            self.left.update(self.surplus(name))
            self.drop(self.surplus(name))
        return tuple(new)

    def insert(self, name, addresses, ttl, now):
        ttl = max(ttl, self.minimum_ttl)
        return self.see(name, Lookup(now + ttl, now, ttl), addresses)

    def content(self):
        return {pair: max(seen) for pair, seen in self.sightings.items()}

    def of(self, name):
        return sorted((lookup, a) for (n, a), lookup in self.content().items() if n == name)

    def surplus(self, name):
        over = max(0, len(self.of(name)) - self.limit) if self.limit else 0
        return [Removed(name, address, lookup, "limit") for lookup, address in self.of(name)[:over]]

    def expired(self, now):
        return [Removed(*pair, at, "ttl") for pair, at in self.content().items() if at.expiry < floor(now)]

    def force(self, before, names):
        found = [(pair, at) for pair, at in self.content().items() if pair[0] in names]
        old = [Removed(*pair, at, "forced") for pair, at in found if at.looked_up < before]
        self.left.update(old)
        self.drop(old)
        return sorted({pair.name for pair in old})

    def drop(self, removed):
        for pair in removed:
            del self.sightings[pair.name, pair.address]

    def collect(self, now):
        reported, self.left = self.left, Counter()
        for step in (self.expired, lambda _: [pair for name in (A, B, C) for pair in self.surplus(name)]):
            removed = step(now)
            reported.update(removed)
            self.drop(removed)
        return reported


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.real = cache(minimum_ttl=2, addresses_per_name=2)
        self.plain = Specification(2, 2)
        self.now = -40.0  # monotonic time of before the machine started, as restored leases have it

    @rule(
        name=NAMES,
        addresses=st.lists(ADDRESSES, max_size=5).map(tuple),
        ttl=st.sampled_from((0, 1, 3, 9, 8000)),
    )
    def insert(self, name, addresses, ttl):
        new = self.real.insert(name, addresses, ttl, self.now)
        assert new == self.plain.insert(name, addresses, ttl, self.now)

    @rule(record=RECORDS)
    def load(self, record):
        self.real.load([record])
        self.plain.see(*record)

    @rule(seconds=st.sampled_from((0.25, 0.5, 1.0, 1.75, 6.0, 3000.0)))
    def wait(self, seconds):
        self.now += seconds

    @rule(before=st.integers(-45, 10), names=st.lists(NAMES, max_size=2))
    def force(self, before, names):
        assert sorted(set(self.real.expire(float(before), names))) == self.plain.force(float(before), names)

    @rule(name=NAMES, addresses=st.sets(ADDRESSES), records=st.lists(RECORDS, max_size=4))
    def replace(self, name, addresses, records):
        source = cache()
        source.load(records)
        known = {a: source.lookup(name, a) for a in addresses if (name, a) in self.plain.sightings}
        left = [a for a, lookup in known.items() if lookup is None]
        assert sorted(self.real.replace(name, addresses, [source])) == sorted(left)
        for address, lookup in known.items():
            self.plain.sightings[name, address] = [lookup]
        self.plain.drop(Removed(name, address, None, "") for address in left)

    @rule(budget=st.integers(1, 9))
    def collect(self, budget):
        assert Counter(collect(self.real, self.now, budget)) == self.plain.collect(self.now)

    @rule(budget=st.integers(1, 4))
    def collect_a_piece(self, budget):
        """A piece that is not the whole takes only what may go, and tells why."""
        step = self.real.collect(self.now, budget)
        forced = Counter(step.removed) & self.plain.left
        self.plain.left -= forced
        rest = Counter(step.removed) - forced
        expired = [pair for pair in rest if pair.cause == "ttl"]
        assert set(expired) <= set(self.plain.expired(self.now))
        self.plain.drop(expired)
        trimmed = {pair for pair in rest if pair.cause != "ttl"}
        assert trimmed in [{s for n in names for s in self.plain.surplus(n)} for names in SUBSETS]
        self.plain.drop(trimmed)
        assert step.unreported == 0

    @invariant()
    def same(self):
        assert content(self.real) == self.plain.content()
        assert_consistent(self.real)


SUBSETS = [(), (A,), (B,), (C,), (A, B), (A, C), (B, C), (A, B, C)]
CacheMachine.TestCase.settings = settings(max_examples=10_000 if DEEP else 60, stateful_step_count=30)
test_the_cache_does_as_specified = CacheMachine.TestCase


# Bounds (invariant 9)


def fresh_names():
    return (b"%c%06d\x07example\x00" % (6, n) for n in count())


def address_of(number):
    return number.to_bytes(4, "big")


def test_names_never_exceed_their_bound_and_what_leaves_is_reported():
    this = cache(minimum_ttl=60, max_names=50)
    names = [name for name, _ in zip(fresh_names(), range(300), strict=False)]
    reported = []
    for number, name in enumerate(names):
        assert this.insert(name, (address_of(number),), 0, number / 10) == (address_of(number),)
        assert len(this) <= 50
        if number % 40 == 0:
            reported += collect(this, number / 10)
    assert_consistent(this)
    reported += collect(this, 30.0)
    assert {pair.cause for pair in reported} == {"limit"}
    assert sorted([pair.name for pair in reported] + list(this)) == names


def test_the_name_that_is_due_first_makes_room():
    this = cache(max_names=3)
    this.insert(A, (ONE,), 30, 0.0)
    this.insert(B, (ONE,), 20, 0.0)
    this.insert(C, (ONE,), 10, 0.0)
    this.insert(C, (ONE,), 40, 1.0)  # extended: the schedule does not know it yet
    this.insert(from_text("d.example"), (ONE,), 5, 2.0)
    assert causes(collect(this, 2.0)) == {(B, ONE): "limit"}


def test_pairs_have_a_bound_too():
    this = cache(max_names=20, addresses_per_name=10)
    bound = PAIRS_PER_NAME * 20 + 2 * 10
    for number, name in zip(range(200), fresh_names(), strict=False):
        this.insert(name, tuple(address_of(number * 20 + n) for n in range(number % 20)), 60, float(number))
        assert this.pairs <= bound
        assert_consistent(this)
    assert this.pairs > bound - 40


def test_one_name_is_bounded_between_collections():
    this = cache(minimum_ttl=60, addresses_per_name=10)
    for number in range(1000):
        this.insert(A, (address_of(2 * number), address_of(2 * number + 1)), 0, float(number))
        assert len(this.addresses(A)) <= 20
    collect(this, 1000.0)
    assert sorted(this.addresses(A)) == [address_of(n) for n in range(1990, 2000)]


def test_one_name_is_bounded_without_a_limit():
    this = cache(minimum_ttl=60)
    for number in range(100):
        this.insert(A, tuple(address_of(100 * number + n) for n in range(100)), 0, float(number))
    assert UNLIMITED <= len(this.addresses(A)) <= 2 * UNLIMITED
    assert address_of(9999) in this.addresses(A)


def test_pairs_that_leave_without_a_report_are_counted():
    this = cache(minimum_ttl=60, max_names=10)
    for number, name in zip(range(100), fresh_names(), strict=False):
        this.insert(name, (ONE, TWO), 0, float(number))
    step = this.collect(0.0, 1000)
    assert (len(step.removed), step.unreported) == (10, 170)
    assert this.collect(0.0, 1000).unreported == 0


def test_in_a_full_waiting_room_the_longest_wait_ends_first():
    this = cache(minimum_ttl=60, max_names=4)
    names = [name for name, _ in zip(fresh_names(), range(12), strict=False)]
    pressing = []
    for number, name in enumerate(names):
        this.insert(name, (ONE,), 0, float(number))
        pressing.append(this.pressing)
    assert pressing == [False] * 6 + [True] * 6  # 4 names and 2 that wait, then more
    step = this.collect(12.0, 1000)
    assert ([pair.name for pair in step.removed], step.unreported) == (names[4:8], 4)
    assert not this.pressing


def test_what_was_forced_out_is_not_lost_to_a_flood():
    this = cache(minimum_ttl=60, max_names=4, addresses_per_name=100)
    for name in (A, B, C):
        this.insert(name, (ONE, TWO, THREE, SIX), 0, 0.0)
    this.expire(inf, [A, B, C])
    assert this.pressing
    for number, name in zip(range(6), fresh_names(), strict=False):
        this.insert(name, (ONE,), 0, float(number))
    step = this.collect(6.0, 1000)
    assert (len(step.removed), step.unreported) == (12, 2)


def test_the_schedule_never_outgrows_the_names():
    this = cache(minimum_ttl=60, max_names=100, expires=False)
    for number, name in zip(range(5000), fresh_names(), strict=False):
        now = number / 10
        this.insert(name, (ONE,), number * 7919 % 100_000, now)
        this.replace(name, (ONE,), (this,) if number % 3 else ())
        if number % 100 == 0:
            collect(this, now)
        assert max(this._seconds, default=0) <= now + HORIZON + 1
    assert_consistent(this)
    assert len(this) <= 100


def test_many_names_on_one_address_leave_in_bounded_steps():
    this = cache(max_names=160_000)
    for _, name in zip(range(160_000), fresh_names(), strict=False):
        this.insert(name, (ONE,), 60, 0.0)
    steps = []
    while not steps or steps[-1].more:
        steps.append(this.collect(61.0, 500))
    assert max(step.spent for step in steps) <= 501
    assert sum(len(step.removed) for step in steps) == 160_000
    assert list(this.holders(ONE)) == []


def test_a_drained_cache_reports_everything():
    this = cache(addresses_per_name=2)
    this.insert(A, (ONE, TWO), 60, 0.0)
    this.insert(B, (ONE,), 60, 0.0)
    this.insert(C, (SIX,), 60, 0.0)
    this.expire(1.0, [C])
    removed, more = [], True
    while more:
        step = this.drain(1)
        removed, more = removed + step.removed, step.more
    assert sorted(causes(removed)) == [(A, ONE), (A, TWO), (B, ONE), (C, SIX)]
    assert (len(this), this.pairs) == (0, 0)
    assert_consistent(this)
