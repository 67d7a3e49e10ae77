"""One endpoint's zombies: Cilium's scenarios 70 to 83, the proof by passes, the order of eviction, bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.cache import zombies as module
from dnsproxy.cache.lookups import LookupCache
from dnsproxy.cache.zombies import COST, NAMES, PIECE, REMEMBERED, TOLD, Gone, Passes, ZombieRecord, Zombies
from dnsproxy.names import from_text

A, B, C = map(from_text, ("a.example", "b.example", "c.example"))
ONE, TWO, THREE, SIX = b"\xc0\x00\x02\x01", b"\xc0\x00\x02\x02", b"\xc0\x00\x02\x03", bytes(15) + b"\x06"


def zombies(maximum=1000, per_name=1000, grace=0.0, unobserved=3600.0):
    return Zombies(maximum, per_name, grace, unobserved, Passes())


def scan(these, at, *alive):
    """Do one whole pass."""
    serial = these.passes.begin()
    mark(these, serial, at, *alive)
    these.passes.complete(serial, at)


def mark(these, serial, at, *alive):
    for _ in these.mark(serial, at, set(alive)):
        pass


def collect(these, now, cache=None):
    """Do one round; return what is gone."""
    cache = LookupCache(0, 0, 1000) if cache is None else cache
    gone = [pair for piece, _ in these.collect(now, cache) for pair in piece]
    assert_consistent(these)
    return set(gone)


def force(these, now, *names):
    return sum(these.expire(names.__contains__, now, connections=True))


def pairs(these):
    return {(name, zombie.address) for zombie in these for name in zombie.names}


def gone(cause, *pairs_):
    return {Gone(name, address, cause) for name, address in pairs_}


def assert_consistent(these):
    found = [(name, zombie.address) for zombie in these for name in zombie.names]
    assert len(found) == these.pairs
    assert {(name, address) for name in these._by_name for address in these.addresses(name)} == set(found)
    assert all(these.of(zombie.address) is zombie and zombie.names for zombie in these)


# Cilium's scenarios


def test_a_live_address_keeps_its_sibling():  # 70
    these = zombies()
    for name, address in ((A, ONE), (A, TWO), (B, THREE)):
        these.add(name, address, 0.0)
    scan(these, 1.0, ONE)
    scan(these, 2.0, ONE)
    assert collect(these, 3.0) == gone("idle", (B, THREE))
    assert pairs(these) == {(A, ONE), (A, TWO)}


def test_one_pass_alone_kills_nothing():  # 71
    these = zombies()
    these.add(A, ONE, 0.0)
    these.add(B, TWO, 0.0)
    scan(these, 1.0)
    assert collect(these, 2.0) == set()
    assert pairs(these) == {(A, ONE), (B, TWO)}


def test_the_second_pass_kills_what_it_does_not_see_and_dead_ones_are_told_once():  # 72, 73
    these = zombies()
    these.add(A, ONE, 0.0)
    these.add(B, TWO, 0.0)
    scan(these, 1.0)
    scan(these, 2.0, TWO)
    assert collect(these, 3.0) == gone("idle", (A, ONE))
    assert pairs(these) == {(B, TWO)}
    assert collect(these, 4.0) == set()


def test_a_dead_address_that_is_put_up_again_lives_with_just_the_new_name():  # 74
    these = zombies()
    these.add(A, ONE, 0.0)
    scan(these, 1.0)
    scan(these, 2.0)
    assert collect(these, 3.0) == gone("idle", (A, ONE))
    these.add(B, ONE, 4.0)
    assert collect(these, 5.0) == set()
    assert pairs(these) == {(B, ONE)}


def test_the_last_one_dies_with_all_its_names():  # 75
    these = zombies()
    these.add(A, ONE, 0.0)
    these.add(B, ONE, 0.0)
    scan(these, 1.0, ONE)
    scan(these, 2.0, ONE)
    assert collect(these, 3.0) == set()
    scan(these, 4.0)
    assert collect(these, 5.0) == gone("idle", (A, ONE), (B, ONE))
    assert len(these) == 0


def test_above_the_maximum_the_one_put_up_first_goes():  # 76
    these = zombies(maximum=2)
    these.add(A, ONE, 1.0)
    these.add(B, TWO, 0.0)
    these.add(C, THREE, 2.0)
    assert collect(these, 3.0) == gone("limit", (B, TWO))
    assert (these.evicted, these.evicted_live) == (1, 0)


def test_above_the_maximum_the_unmarked_goes_although_it_is_the_newest():  # 77
    these = zombies(maximum=2)
    these.add(A, ONE, 0.0)
    these.add(B, TWO, 1.0)
    these.add(C, THREE, 2.0)
    scan(these, 3.0, ONE, TWO)
    assert collect(these, 4.0) == gone("limit", (C, THREE))


def test_forcing_the_last_name_ends_a_zombie_and_it_does_not_count_as_dead():  # 78, 82
    these = zombies()
    these.add(A, ONE, 0.0)
    these.add(B, TWO, 0.0)
    assert force(these, 1.0, A) == 1
    assert these.forget(B, TWO, 1.0)
    assert len(these) == 0
    assert collect(these, 2.0) == gone("forced", (A, ONE), (B, TWO))
    assert collect(these, 3.0) == set()


def test_forcing_a_pair_leaves_other_addresses_names_and_strangers():  # 79, 80, 81
    these = zombies()
    these.add(A, ONE, 0.0)
    these.add(B, ONE, 0.0)
    assert not these.forget(A, TWO, 1.0)
    assert not these.forget(C, ONE, 1.0)
    assert pairs(these) == {(A, ONE), (B, ONE)}
    assert these.forget(A, ONE, 1.0)
    assert pairs(these) == {(B, ONE)}


def test_between_equals_fewer_names_go_first_then_the_lower_address():  # 83
    these = zombies(maximum=2)
    for name, address in ((A, ONE), (B, ONE), (A, TWO), (B, TWO), (C, THREE)):
        these.add(name, address, 0.0)
    assert collect(these, 1.0) == gone("limit", (C, THREE))
    these.add(C, SIX, 0.0)
    these.add(A, SIX, 0.0)
    assert collect(these, 1.0) == gone("limit", (A, SIX), (C, SIX))


# The proof


def test_a_pass_that_began_before_proves_nothing():
    these = zombies()
    running = these.passes.begin()
    these.add(A, ONE, 0.0)
    these.passes.complete(running, -1.0)
    scan(these, 1.0)
    assert collect(these, 2.0) == set()
    scan(these, 3.0)
    assert collect(these, 4.0) == gone("idle", (A, ONE))


def test_a_failed_pass_proves_nothing():
    these = zombies()
    these.add(A, ONE, 0.0)
    scan(these, 1.0)
    these.passes.begin()
    these.passes.begin()
    assert collect(these, 2.0) == set()
    these.passes.begin()
    scan(these, 3.0)
    assert collect(these, 4.0) == gone("idle", (A, ONE))


def test_two_serials_are_not_two_completed_passes():
    these = zombies()
    these.add(A, ONE, 0.0)
    these.passes.begin()
    scan(these, 1.0)
    assert collect(these, 2.0) == set()


def test_what_a_running_or_failed_pass_has_seen_lives():
    these = zombies()
    these.add(A, ONE, 0.0)
    scan(these, 1.0)
    scan(these, 2.0)
    mark(these, these.passes.begin(), 3.0, ONE)
    assert collect(these, 4.0) == set()
    scan(these, 5.0)
    assert collect(these, 6.0) == gone("idle", (A, ONE))


def test_a_pass_that_began_long_ago_makes_nothing_look_older():
    these = zombies()
    these.add(A, ONE, 5.0)
    mark(these, these.passes.begin(), 1.0, ONE)
    assert these.of(ONE).alive_at == 5.0


def test_put_up_again_it_needs_two_passes_again():
    these = zombies()
    these.add(A, ONE, 0.0)
    scan(these, 1.0)
    these.add(B, ONE, 2.0)
    scan(these, 3.0)
    assert collect(these, 4.0) == set()
    scan(these, 5.0)
    assert collect(these, 6.0) == gone("idle", (A, ONE), (B, ONE))


def test_passes_of_addresses_that_are_no_zombies_are_ignored():
    these = zombies()
    scan(these, 1.0, ONE, TWO)
    assert len(these) == 0


@pytest.mark.parametrize("seen", [True, False])
def test_grace_counts_from_the_last_sign_of_life(seen):
    these = zombies(grace=10.0)
    these.add(A, ONE, 0.0)
    scan(these, 1.0, *([ONE] if seen else []))
    scan(these, 2.0)
    scan(these, 3.0)
    until = 11.0 if seen else 10.0
    assert collect(these, until - 0.5) == set()
    assert collect(these, until) == gone("idle", (A, ONE))


def test_where_nobody_can_look_zombies_live_for_a_fixed_time():
    these = zombies(unobserved=60.0)
    these.passes.observing = False
    these.add(A, ONE, 0.0)
    these.add(B, TWO, 30.0)
    assert collect(these, 59.9) == set()
    assert collect(these, 60.0) == gone("unobserved", (A, ONE))
    assert pairs(these) == {(B, TWO)}


def test_when_sight_is_lost_what_was_alive_lives_on_for_the_fixed_time():
    these = zombies(unobserved=60.0)
    these.add(A, ONE, 0.0)
    scan(these, 1000.0, ONE)
    these.passes.observing = False
    assert collect(these, 1059.0) == set()
    assert collect(these, 1060.0) == gone("unobserved", (A, ONE))


def test_siblings_are_one_step_and_no_chain():
    these = zombies()
    for name, address in ((A, ONE), (A, TWO), (B, TWO), (B, THREE)):
        these.add(name, address, 0.0)
    scan(these, 1.0, ONE)
    scan(these, 2.0, ONE)
    assert collect(these, 3.0) == gone("idle", (B, THREE))


def test_loaded_zombies_keep_their_times_and_need_two_passes_from_then_on():
    old = zombies()
    old.add(A, ONE, 0.0)
    old.add(B, ONE, 5.0)
    scan(old, 7.0, ONE)
    records = list(old.records())
    assert records == [ZombieRecord(ONE, (A, B), 7.0, 5.0)] == [old.record(ONE)]
    new = zombies()
    scan(new, 50.0)
    scan(new, 51.0)
    new.load(records)
    assert list(new.records()) == records
    scan(new, 52.0)
    assert collect(new, 53.0) == set()
    scan(new, 54.0)
    assert collect(new, 55.0) == gone("idle", (A, ONE), (B, ONE))


def test_a_record_without_names_is_nothing():
    these = zombies()
    these.load([ZombieRecord(ONE, (), 0.0, 0.0)])
    assert (len(these), these.of(ONE), these.record(ONE)) == (0, None, None)


def test_a_pair_that_is_in_the_cache_again_leaves_silently():
    these, cache = zombies(), LookupCache(0, 0, 10)
    these.add(A, ONE, 0.0)
    these.add(B, ONE, 0.0)
    these.add(A, TWO, 0.0)
    these.changed = set()
    cache.insert(A, (ONE, THREE), 60, 1.0)
    assert collect(these, 2.0, cache) == set()
    assert pairs(these) == {(B, ONE), (A, TWO)}
    assert these.changed == {ONE}
    assert not these.departed


def test_what_was_put_up_after_an_order_to_force_stays():
    these = zombies()
    these.add(A, ONE, 0.0)
    these.add(A, TWO, 2.0)
    assert force(these, 1.0, A) == 1
    assert pairs(these) == {(A, TWO)}


# Limits


def test_the_states_are_what_the_last_passes_say():
    these = zombies()
    for address in (ONE, TWO, THREE):
        these.add(A, address, 0.0)
    states = lambda: [these.state(zombie) for zombie in these]  # noqa: E731
    assert states() == ["new", "new", "new"]
    scan(these, 1.0, ONE, TWO)
    assert states() == ["live", "live", "idle"]
    running = these.passes.begin()
    these.add(A, SIX, 1.5)
    mark(these, running, 1.4, THREE)
    assert states() == ["live", "live", "live", "new"]
    these.passes.complete(running, 1.4)
    assert states() == ["recent", "recent", "live", "new"]
    scan(these, 2.0, TWO)
    assert states() == ["idle", "live", "recent", "idle"]


def test_idle_ones_are_evicted_before_new_before_recent_before_live_ones():
    these = zombies(maximum=4, grace=1000.0)
    idle_long, idle, recent, live = (bytes((10, 0, 0, n)) for n in (9, 8, 7, 6))
    for name, address in ((A, live), (A, recent), (A, idle), (A, idle_long)):
        these.add(name, address, 0.0)
    scan(these, 1.0, idle)
    scan(these, 2.0, recent, live)
    scan(these, 3.0, live)
    these.add(B, ONE, 4.0)
    order = []
    for maximum in (4, 3, 2, 1, 0):
        these._maximum = maximum or 1
        order += sorted({pair.address for pair in collect(these, 5.0)})
    assert order == [idle_long, idle, ONE, recent]
    assert (these.evicted, these.evicted_live) == (4, 0)


def test_an_evicted_live_one_is_told_as_such_and_counted():
    these = zombies(maximum=1)
    these.add(A, ONE, 0.0)
    these.add(B, TWO, 1.0)
    scan(these, 2.0, ONE, TWO)
    assert collect(these, 3.0) == gone("evicted live", (A, ONE))
    assert (these.evicted, these.evicted_live) == (1, 1)


def test_one_name_keeps_only_so_many_addresses_and_they_go_whole():
    these = zombies(per_name=2)
    for second, address in enumerate((ONE, TWO, THREE)):
        these.add(A, address, float(second))
    these.add(B, ONE, 0.0)
    scan(these, 3.0, TWO)
    assert collect(these, 4.0) == gone("limit", (A, ONE), (B, ONE))


def test_a_limit_of_zero_per_name_is_none():
    these = zombies(per_name=0)
    for address in (ONE, TWO, THREE):
        these.add(A, address, 0.0)
    assert collect(these, 1.0) == set()


def test_a_maximum_of_zero_switches_zombies_off():
    these = zombies(maximum=0)
    these.add(A, ONE, 0.0)
    these.add(A, TWO, 0.0)
    mark(these, these.passes.begin(), 0.5, ONE)
    assert collect(these, 1.0) == gone("off", (A, ONE), (A, TWO))
    assert these.evicted == 0


def step_through(these, now, between):
    """Do one round, calling `between` once, when the round has begun to rank."""
    told = set()
    for step, (piece, _) in enumerate(these.collect(now, LookupCache(0, 0, 10))):
        told.update(piece)
        between(step)
    assert_consistent(these)
    return told


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("moment", range(12))
def test_whatever_the_moment_in_which_a_pass_looks_the_live_one_stays(moment, whole, monkeypatch):
    """Invariant 6, between any two steps: a pass says that what was ranked first is alive."""
    monkeypatch.setattr(module, "PIECE", 1)
    these = zombies(maximum=1)
    for number, address in enumerate((ONE, TWO, THREE)):
        these.add(A, address, float(number))

    def between(step):
        if step == moment and whole:
            scan(these, 5.0, ONE)
        elif step == moment:
            mark(these, these.passes.begin(), 5.0, ONE)

    told = step_through(these, 6.0, between)
    evicted = {pair.address for pair in told if these.evicted_live == 0}
    alive = these.of(ONE)
    assert (alive is not None and told == gone("limit", (A, TWO), (A, THREE))) or ONE in evicted
    if moment < 9:  # before the ranking was over
        assert alive is not None
    assert len(these) == 1


@pytest.mark.parametrize("moment", [4, 5])  # after either of them has been ranked
def test_a_ranking_is_made_anew_when_passes_end_meanwhile(moment):
    """Two passes later the live one is the one that is idle longest."""
    these = zombies(maximum=1)
    these.add(A, ONE, 0.0)
    scan(these, 1.0, ONE)
    these.add(B, TWO, 2.0)

    def between(step):
        if step == moment:
            scan(these, 3.0)
            scan(these, 4.0)

    assert {pair.address for pair in step_through(these, 2.5, between)} >= {ONE}


@pytest.mark.parametrize("moment", range(12))
def test_what_comes_alive_in_the_middle_of_a_round_is_not_given_up_any_further(moment, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 1)
    these = zombies()
    for name in (A, B, C):
        these.add(name, ONE, 0.0)
    scan(these, 1.0)
    scan(these, 2.0)

    def between(step):
        if step == moment:
            mark(these, these.passes.begin(), 3.0, ONE)
        assert_consistent(these)

    told = step_through(these, 4.0, between)
    assert {(name, address) for name, address, _ in told} | pairs(these) == {(n, ONE) for n in (A, B, C)}
    assert {(name, address) for name, address, _ in told} & pairs(these) == set()
    if moment < 6:
        assert told == set()


# Bounds (invariant 9)


def numbered(number):
    return b"\x06%06d\x07example\x00" % number


def test_pairs_have_a_bound_and_the_oldest_names_of_the_greediest_go():
    these = zombies(maximum=10)
    these.add(B, TWO, 0.0)
    for number in range(1000):
        these.add(numbered(number), ONE, 0.0)
    scan(these, 1.0, ONE, TWO)
    told = collect(these, 2.0)
    assert these.pairs == 10 * NAMES
    assert these.addresses(B) == (TWO,)
    assert told == gone("limit", *((numbered(n), ONE) for n in range(1000 - 10 * NAMES + 1)))


def test_zombies_may_be_twice_too_many_between_two_rounds():
    these = zombies(maximum=200)
    for number in range(2 * 200 + PIECE):
        assert not these.overfull
        these.add(A, number.to_bytes(4, "big"), 0.0)
    these.add(A, b"more", 0.0)
    assert these.overfull
    collect(these, 1.0)
    assert not these.overfull
    for number in range(2 * 200 * NAMES + PIECE):
        these.add(numbered(number), b"more", 0.0)
    assert these.overfull


def test_steps_are_bounded():
    these = zombies(maximum=20_000)
    for number in range(40_000):
        these.add(numbered(number), ONE, 0.0)
        if number < 3000:
            these.add(A, number.to_bytes(4, "big"), 0.0)
    for maximum, now in ((20_000, 1.0), (500, 2.0), (500, 9000.0)):
        these._maximum = maximum
        these.passes.observing = now != 9000.0
        steps = list(these.collect(now, LookupCache(0, 0, 10)))
        assert max(spent for _, spent in steps) <= PIECE + COST
        assert max(len(piece) for piece, _ in steps) <= PIECE
    assert len(these) == 0


def test_a_drained_set_tells_everything():
    these = zombies()
    these.add(A, ONE, 0.0)
    these.add(B, ONE, 0.0)
    these.add(A, TWO, 0.0)
    these.forget(A, TWO, 1.0)
    told = {pair for piece, _ in these.drain(2.0) for pair in piece}
    assert told == gone("dropped", (A, ONE), (B, ONE)) | gone("forced", (A, TWO))
    assert len(these) == 0
    assert_consistent(these)


def test_the_departed_are_remembered_newest_last_and_only_so_many():
    these = zombies(maximum=0)
    for number in range(REMEMBERED + 5):
        these.add(numbered(number), number.to_bytes(4, "big"), 0.0)
    collect(these, 1.0)
    assert len(these.departed) == REMEMBERED
    for number in range(20):
        these.add(numbered(number), ONE, 0.0)
    collect(these, 2.0)
    departed = these.departed[ONE]
    assert (departed.when, departed.cause, len(departed.names)) == (2.0, "off", TOLD)
    assert next(reversed(these.departed)) == ONE


def test_names_that_left_one_by_one_are_remembered_together():
    these = zombies()
    these.add(A, ONE, 0.0)
    these.add(B, ONE, 0.0)
    these.forget(A, ONE, 1.0)
    these.forget(B, ONE, 2.0)
    assert these.departed[ONE] == (2.0, (B, A), "forced")


def test_whoever_asks_is_told_which_records_have_changed():
    these = zombies(maximum=2)
    these.add(A, ONE, 0.0)
    assert these.changed is None
    these.changed = set()

    def changed():
        taken, these.changed = these.changed, set()
        return taken

    these.add(A, TWO, 1.0)
    these.load([ZombieRecord(THREE, (A,), 0.5, 0.5)])
    assert changed() == {TWO, THREE}
    scan(these, 2.0, ONE)
    assert changed() == {ONE}
    collect(these, 3.0)
    assert changed() == {THREE}
    these.forget(A, TWO, 4.0)
    assert changed() == {TWO}
    assert (these.record(TWO), these.overrun) == (None, False)


def test_changes_have_a_bound_too():
    these = zombies(maximum=1)
    these.changed = set()
    for number in range(10_000):
        these.add(A, number.to_bytes(4, "big"), 0.0)
        assert len(these.changed) <= 4 + PIECE + 1
    assert these.overrun


@given(st.data())
def test_walks_may_be_interrupted_anywhere(data):
    these = zombies()
    for number in range(6):
        these.add(A, bytes((10, 0, 0, number)), 0.0)
    stay = {bytes((10, 0, 0, number)) for number in range(3)}
    seen = []
    for record in these.records():
        seen.append(record.address)
        number = data.draw(st.integers(3, 9))
        if not these.forget(A, bytes((10, 0, 0, number)), 1.0):
            these.add(B, bytes((10, 0, 0, number)), 1.0)
    assert stay <= set(seen)
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("observing", [True, False])
def test_force_leaves_alone_what_a_connection_may_use(observing):
    passes = Passes()
    these = Zombies(10, 10, 0.0, 50.0, passes)
    these.add(A, ONE, 1.0)
    passes.observing = observing
    assert sum(these.expire(lambda name: True, 2.0)) == 0
    for _ in range(2):
        passes.complete(passes.begin(), 3.0, 9.0)
    assert these.busy(these.of(ONE)) is not observing
    assert these.until(these.of(ONE)) == (9.0 if observing else 51.0)
    assert sum(these.expire(lambda name: True, 4.0)) == observing
    assert sum(these.expire(lambda name: True, 4.0, connections=True)) == (not observing)
