"""The waiting room: turns, bounds, and who has to go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.namemanager import room as room_module
from dnsproxy.namemanager.elements import Element, SetSpec
from dnsproxy.namemanager.plan import Hold
from dnsproxy.namemanager.room import Room

SPEC = SetSpec("inet", "dnsproxy", "one", 4, ports=False, ours=True)


def hold(owner, *numbers):
    """Return a hold that waits for some elements, given by number."""
    elements = tuple(Element(SPEC, number.to_bytes(4, "big"), "a.test.") for number in numbers)
    return Hold(elements, None, None, 0.0, 1.0, b"", owner=owner)


def numbers(elements):
    return [int.from_bytes(element.key, "big") for element in elements]


def take(room, size, applied=()):
    """Take a transaction; return its numbers and the holds that are whole with it."""
    elements, whole = room.take(size, lambda some: [each for each in some if each.key not in applied])
    return numbers(elements), whole


def test_holds_of_one_owner_are_taken_in_their_order():
    room = Room()
    first, second = hold("a", 1, 2), hold("a", 3)
    assert room.enter(first) == room.enter(second) == []
    assert take(room, 10) == ([1, 2, 3], [first, second])
    assert take(room, 10) == ([], [])
    assert len(room) == 2


def test_a_hold_larger_than_a_transaction_is_taken_in_pieces():
    room = Room()
    large = hold("a", *range(25))
    room.enter(large)
    assert [take(room, 10) for _ in range(3)] == [
        (list(range(10)), []),
        (list(range(10, 20)), []),
        (list(range(20, 25)), [large]),
    ]


def test_what_two_wait_for_is_taken_once():
    room = Room()
    room.enter(hold("a", 1, 2))
    room.enter(hold("b", 2, 3))
    taken, whole = take(room, 10)
    assert sorted(taken) == [1, 2, 3]
    assert len(whole) == 2


def test_every_owner_has_an_equal_share_and_the_rest_goes_to_who_wants_it():
    room = Room()
    room.enter(hold("loud", *range(100)))
    room.enter(hold("loud", *range(100, 200)))
    quiet = [hold(f"q{number}", 1000 + number) for number in range(3)]
    for each in quiet:
        room.enter(each)
    taken, whole = take(room, 20)
    assert len(taken) == 20
    assert set(taken) >= {1000, 1001, 1002}
    assert whole == quiet


def test_with_more_owners_than_places_the_turns_go_round():
    room = Room()
    owners = [hold(f"o{number}", number) for number in range(25)]
    for each in owners:
        room.enter(each)
        room.enter(hold(each.owner, 100 + len(room)))
    seen = [number for _ in range(3) for number in take(room, 10)[0] if number < 100]
    assert seen == list(range(25))


def test_one_take_looks_at_a_bounded_number_of_elements():
    room = Room()
    known = {number.to_bytes(4, "big") for number in range(1000)}
    room.enter(hold("a", *range(1000)))
    room.enter(hold("b", 2000))
    looked = []

    def lacking(elements):
        looked.extend(elements)
        return [each for each in elements if each.key not in known]

    elements, _ = room.take(10, lacking)
    assert numbers(elements) == [2000]
    assert len(looked) <= 2 * room_module.LOOKS * 10


def test_who_ended_before_its_turn_is_written_all_the_same_and_comes_back_no_more():
    room = Room()
    one = hold("a", 1)
    room.enter(one)
    room.leave(one)
    assert len(room) == 0
    assert take(room, 10) == ([1], [])
    room.put_back([one])
    assert take(room, 10) == ([], [])


def test_who_is_put_back_is_taken_again_from_its_beginning():
    room = Room()
    one = hold("a", 1, 2)
    room.enter(one)
    assert take(room, 10) == ([1, 2], [one])
    room.put_back([one, one])
    assert room.queued == 2
    assert take(room, 10) == ([1, 2], [one])


def test_who_waits_for_something_else_now_is_taken_anew():
    room = Room()
    one = hold("a", *range(4))
    room.enter(one)
    take(room, 2)
    room.change(one, hold("a", 7, 8, 9).elements)
    assert room.queued == 3
    assert take(room, 10) == ([7, 8, 9], [one])


def test_in_a_full_room_who_has_most_gives_up_its_newest(monkeypatch):
    monkeypatch.setattr(room_module, "QUEUE", 10)
    room = Room()
    old, new = hold("loud", 1, 2, 3, 4), hold("loud", 5, 6, 7, 8)
    room.enter(old)
    room.enter(new)
    quiet = hold("quiet", 20, 21, 22)
    assert room.enter(quiet) == [new]
    assert list(room) == [old, quiet]
    more = hold("loud", 9, 10, 11, 12)
    assert room.enter(more) == [more]
    assert room.queued == 7


def test_the_number_of_holds_is_bounded_too(monkeypatch):
    monkeypatch.setattr(room_module, "WAITING", 3)
    room = Room()
    loud = [hold("loud", 1) for _ in range(4)]
    assert [room.enter(each) for each in loud] == [[], [], [], [loud[3]]]
    assert room.enter(hold("quiet", 2)) == [loud[2]]
    assert len(room) == 3


@pytest.mark.parametrize("quiet", [1, 30])
def test_a_hold_that_fits_in_no_room_drives_nobody_out(monkeypatch, quiet):
    monkeypatch.setattr(room_module, "QUEUE", 10)
    room = Room()
    other = hold("other", 1, 2, 3)
    room.enter(other)
    large = hold("large", *range(100, 100 + 10 + quiet))
    assert room.enter(large) == [large]
    assert list(room) == [other]


STEPS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=6)),
    st.tuples(st.just("take"), st.integers(1, 5)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("put_back")),
    st.tuples(st.just("change"), st.integers(0, 20), st.lists(st.integers(0, 9), max_size=6)),
)


@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_the_room_counts_right_and_nobody_is_lost(steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room_module, "WAITING", 6)
        patch.setattr(room_module, "QUEUE", 15)
        room, here, taken = Room(), [], []
        for verb, *arguments in steps:
            if verb == "enter":
                new = hold(arguments[0], *arguments[1])
                gone = room.enter(new)
                here = [each for each in [*here, new] if each not in gone]
                assert len(room) <= 6
            elif verb == "take":
                taken += take(room, arguments[0])[1]
            elif verb == "put_back":
                room.put_back(taken)
                taken = []
            elif here:
                one = here[arguments[0] % len(here)]
                if verb == "leave":
                    room.leave(one)
                    here.remove(one)
                else:
                    room.change(one, hold("", *arguments[1]).elements)
            assert list(room) == here
            queued = [each for queue in room._queues.values() for each in queue]
            assert room.queued == sum(len(each.elements) for each in queued)
            assert room._elements == sum(len(each.elements) for each in {*queued, *here})
        room.put_back(taken)
        for _ in range(100):
            for each in take(room, 3)[1]:
                room.leave(each)
        assert (len(room), room._elements, room._sizes) == (0, 0, {})
