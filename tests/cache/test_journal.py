"""What the journal takes is what changed, and what is restored is what was taken, whatever the clock did."""

from __future__ import annotations

import os
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from dnsproxy.cache import journal as journals
from dnsproxy.cache.gc import Caches
from dnsproxy.cache.journal import PIECE, Batch, Journal, State, restore
from dnsproxy.cache.lookups import Lookup
from dnsproxy.namemanager.elements import SetSpec
from dnsproxy.names import from_text

A, B, C = map(from_text, ("a.example", "b.example", "c.example"))
ONE, TWO, SIX = b"\xc0\x00\x02\x01", b"\xc0\x00\x02\x02", bytes(15) + b"\x06"
CI, WEB = "default/ci", "default/web"
OFFSET = 2.0**30  # keeps all the bits of the times in here
SET = SetSpec("inet", "fw4", "github", 4, ports=False, ours=False)


def caches(*keys):
    made = Caches(minimum_ttl=0, addresses_per_name=0, names_per_endpoint=10_000, zombies_per_endpoint=1000)
    for key in keys or (CI,):
        made.of(key)
    return made


class File:
    """The file as a dict: what a store makes of batches."""

    def __init__(self):
        self.rows = {table: {} for table in journals.KEYS}

    def write(self, batch):
        for table, changes in batch.tables.items():
            kept = {} if batch.whole else self.rows[table]
            kept = {key: rows for key, rows in kept.items() if key[0] not in changes.cleared}
            kept.update(changes.rows)
            self.rows[table] = {key: rows for key, rows in kept.items() if rows}

    def state(self):
        return State({table: sorted(chain.from_iterable(rows.values())) for table, rows in self.rows.items()})


def take(journal, *, whole=False, extended=True):
    batch = Batch(whole=whole, extended=extended)
    for _ in journal.take(batch, OFFSET):
        pass
    return batch


def restored(state, *keys, now=0.0, offset=OFFSET):
    made = caches(*keys)
    for _ in restore(state, made, offset, now):
        pass
    return made


def content(made):
    lookups = {key: sorted(cache.items()) for key, cache in made.endpoints.items()}
    zombies = {key: sorted(each.records()) for key, each in made.zombies.items()}
    return lookups, zombies


def test_longer_leases_are_taken_by_the_batches_that_are_for_them():
    made = caches()
    cache = made.endpoints[CI]
    journal = Journal(made)
    cache.insert(A, (ONE,), 60, 0.0)
    cache.insert(B, (TWO,), 60, 0.0)
    take(journal, whole=True)
    cache.insert(A, (ONE,), 60, 5.0)
    cache.insert(B, (SIX,), 60, 5.0)
    assert take(journal, extended=False).tables["lookups"].rows.keys() == {(CI, B)}
    batch = take(journal)
    assert batch.tables["lookups"].rows.keys() == {(CI, A)}
    journal.give_back(batch)
    assert take(journal, extended=False).tables["lookups"].rows.keys() == {(CI, A)}, "it is overdue by then"
    assert not take(journal)


def test_only_what_changed_is_taken():
    made = caches()
    cache = made.endpoints[CI]
    journal = Journal(made)
    cache.insert(A, (ONE, SIX), 60, 0.0)
    cache.insert(B, (TWO,), 60, 0.0)
    assert take(journal, whole=True).tables["lookups"].rows.keys() == {(CI, A), (CI, B)}
    assert not take(journal)
    cache.insert(B, (TWO,), 60, 5.0)
    row = (CI, B, OFFSET + 65.0, OFFSET + 5.0, 60, b"\x04" + TWO)
    assert take(journal).tables["lookups"].rows == {(CI, B): [row]}
    cache.expire(10.0, [B])
    assert take(journal).tables["lookups"].rows == {(CI, B): []}


def test_a_zombie_is_taken_with_its_names_in_order():
    made = caches()
    journal = Journal(made)
    take(journal, whole=True)
    made.zombies[CI].add(B, ONE, 3.0)
    made.zombies[CI].add(A, ONE, 4.0)
    row = (CI, ONE, OFFSET + 4.0, OFFSET + 4.0, B + A)
    assert take(journal).tables["zombies"].rows == {(CI, ONE): [row]}
    made.zombies[CI].forget(A, ONE, 5.0)
    made.zombies[CI].forget(B, ONE, 5.0)
    assert take(journal).tables["zombies"].rows == {(CI, ONE): []}


def test_an_endpoint_that_is_dropped_or_replaced_is_cleared():
    made, file = caches(CI, WEB), File()
    journal = Journal(made)
    for key in (CI, WEB):
        made.endpoints[key].insert(A, (ONE,), 60, 0.0)
    file.write(take(journal, whole=True))
    for key in (CI, WEB):
        made.drop(key)
    made.of(WEB).insert(B, (TWO,), 60, 1.0)
    batch = take(journal)
    assert sorted(batch.tables["lookups"].cleared) == sorted(batch.tables["zombies"].cleared) == [CI, WEB]
    file.write(batch)
    assert file.rows["lookups"].keys() == {(WEB, B)}


def test_a_cache_that_lost_track_is_taken_anew():
    made, file = caches(), File()
    journal = Journal(made)
    made.endpoints[CI].insert(A, (ONE,), 60, 0.0)
    file.write(take(journal, whole=True))
    made.endpoints[CI].expire(10.0, [A])
    made.endpoints[CI].insert(B, (ONE,), 60, 0.0)
    made.endpoints[CI].changed.clear()
    made.endpoints[CI].overrun = True
    file.write(take(journal))
    assert file.rows["lookups"].keys() == {(CI, B)}
    assert not made.endpoints[CI].overrun


def test_what_is_compared_whole_comes_and_goes():
    aliases, claims, sets = [(CI, C, 50.0, A)], [(SET, ONE, "a.example.")], [SET]
    journal, file = (
        Journal(caches(), aliases=lambda: aliases, claims=lambda: claims, sets=lambda: sets),
        File(),
    )
    file.write(take(journal, whole=True))
    state = file.state()
    assert list(journals.aliases(state, OFFSET, 0.0)) == aliases
    assert list(journals.claims(state)) == claims
    assert list(journals.sets(state)) == sets
    assert type(next(journals.sets(state)).ports) is bool
    assert not take(journal)
    aliases[:] = [(CI, C, 80.0, A)]
    claims.clear()
    sets.clear()
    file.write(take(journal))
    assert list(journals.aliases(file.state(), OFFSET, 0.0)) == aliases
    assert (file.rows["claims"], file.rows["sets"]) == ({}, {})


def test_what_was_given_back_is_taken_again():
    claims, made, file = [(SET, ONE, "a.example.")], caches(CI, WEB), File()
    journal = Journal(made, claims=lambda: claims)
    file.write(take(journal, whole=True))
    made.endpoints[CI].insert(A, (ONE,), 60, 0.0)
    made.zombies[CI].add(B, TWO, 0.0)
    made.drop(WEB)
    claims[:] = [(SET, TWO, "b.example.")]
    lost = take(journal)
    assert not take(journal)
    journal.give_back(lost)
    again = take(journal)
    for table, changes in lost.tables.items():
        assert again.tables[table].rows == changes.rows
        assert again.tables[table].cleared == changes.cleared


def test_a_batch_that_was_broken_off_is_complete_when_taken_again():
    made, file = caches(), File()
    journal = Journal(made)
    for number in range(3 * PIECE):
        made.endpoints[CI].insert(number.to_bytes(2, "big"), (ONE,), 60, 0.0)
    for whole in (True, False):
        batch = Batch(whole=whole)
        taking = journal.take(batch, OFFSET)
        next(taking)
        taking.close()
        journal.give_back(batch)
    file.write(take(journal))
    assert len(file.rows["lookups"]) == 3 * PIECE


def test_taking_and_loading_go_in_bounded_steps():
    made, file = caches(), File()
    for number in range(10 * PIECE):
        made.endpoints[CI].insert(number.to_bytes(2, "big"), (ONE,), 60, 0.0)
    batch, steps, taken = Batch(whole=True), [], 0
    for _ in Journal(made).take(batch, OFFSET):
        steps.append(len(batch.tables["lookups"].rows) - taken)
        taken += steps[-1]
    assert max(steps) <= PIECE
    file.write(batch)
    other = caches()
    sizes = [len(other.endpoints[CI]) for _ in restore(file.state(), other, OFFSET, 0.0)]
    assert max(after - before for before, after in zip([0, *sizes], sizes, strict=False)) <= PIECE
    assert content(other) == content(made)


# Clocks


def lookup_after(offset, now, *, ttl=60):
    """Store a lookup made at 100.0, and load it at `now` with another offset."""
    made, file = caches(), File()
    made.endpoints[CI].insert(A, (ONE,), ttl, 100.0)
    file.write(take(Journal(made), whole=True))
    return restored(file.state(), CI, now=now, offset=offset).endpoints[CI].lookup(A, ONE)


def test_another_monotonic_clock_changes_nothing():
    assert lookup_after(OFFSET + 100.0, 10.0) == Lookup(60.0, 0.0, 60)


def test_a_clock_that_was_set_back_makes_no_lease_longer_than_its_ttl():
    assert lookup_after(OFFSET - 86_400.0, 130.0) == Lookup(190.0, 130.0, 60)


def test_a_clock_that_was_set_forward_ends_leases_but_forgets_none():
    assert lookup_after(OFFSET + 86_400.0, 130.0) == Lookup(160.0 - 86_400.0, 100.0 - 86_400.0, 60)


def test_a_zombie_from_the_future_is_from_now():
    made, file = caches(), File()
    made.zombies[CI].add(A, ONE, 100.0)
    file.write(take(Journal(made), whole=True))
    (found,) = restored(file.state(), CI, now=50.0).zombies[CI].records()
    assert (found.alive_at, found.pending_at) == (50.0, 50.0)


def test_an_endpoint_that_is_no_more_is_passed_over_and_its_rows_go_with_the_first_batch():
    made, file = caches(CI, WEB), File()
    made.endpoints[WEB].insert(A, (ONE,), 60, 0.0)
    made.zombies[WEB].add(B, TWO, 0.0)
    file.write(take(Journal(made), whole=True))
    other = restored(file.state(), CI)
    assert content(other) == ({CI: []}, {CI: []})
    file.write(take(Journal(other), whole=True))
    assert file.rows["lookups"] == {}


def test_the_global_cache_is_restored_with_the_others():
    made, file = caches(), File()
    made.endpoints[CI].insert(A, (ONE,), 60, 0.0)
    file.write(take(Journal(made), whole=True))
    assert restored(file.state(), CI).global_.addresses(A) == (ONE,)


# Any history

NAMES, ADDRESSES = st.sampled_from((A, B, C)), st.sampled_from((ONE, TWO, SIX))
STEP = st.one_of(
    st.tuples(st.just("insert"), st.sampled_from((CI, WEB)), NAMES, ADDRESSES),
    st.tuples(st.just("expire"), st.sampled_from((CI, WEB)), NAMES, ADDRESSES),
    st.tuples(st.just("zombie"), st.sampled_from((CI, WEB)), NAMES, ADDRESSES),
    st.tuples(st.just("forget"), st.sampled_from((CI, WEB)), NAMES, ADDRESSES),
    st.tuples(
        st.sampled_from(("drop", "write", "lose", "break off")), st.just(WEB), st.just(A), st.just(ONE)
    ),
)


def apply(made, step, now):
    what, key, name, address = step
    cache = made.of(key)
    if what == "insert":
        cache.insert(name, (address,), 60, now)
    elif what == "expire":
        cache.expire(now, [name])
    elif what == "zombie":
        made.zombies[key].add(name, address, now)
    elif what == "forget":
        made.zombies[key].forget(name, address, now)
    elif what == "drop":
        made.drop(key)


@settings(max_examples=200 if not os.environ.get("DNSPROXY_DEEP") else 100_000)
@given(st.lists(STEP, max_size=30), st.lists(STEP, max_size=5))
def test_after_any_history_the_file_holds_what_the_caches_hold(steps, meanwhile):
    made, file = caches(CI, WEB), File()
    journal = Journal(made)
    file.write(take(journal, whole=True))
    for now, step in enumerate(steps):
        if step[0] in ("write", "lose", "break off"):
            batch = Batch()
            taking = journal.take(batch, OFFSET)
            for late in meanwhile:  # in the middle of it, as far as there is one
                apply(made, late, float(now))
                next(taking, None)
            if step[0] != "break off":
                list(taking)
            file.write(batch) if step[0] == "write" else journal.give_back(batch)
        else:
            apply(made, step, float(now))
    file.write(take(journal))
    other = restored(file.state(), *made.endpoints, now=1000.0)
    assert content(other) == content(made)
