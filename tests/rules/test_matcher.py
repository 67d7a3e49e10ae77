from __future__ import annotations

import gc
import sys

import pytest
from cilium_vectors import NAME, VECTORS, reference, wire
from hypothesis import given
from hypothesis import strategies as st
from rule_strategies import odd_names, pattern_texts, plain_names

from dnsproxy.names import from_labels, from_text, to_text
from dnsproxy.rules.matcher import Matcher
from dnsproxy.rules.pattern import match_name, match_pattern


def texts_matching(texts, name):
    """The texts of those patterns that match."""
    return [texts[number] for number in Matcher(map(match_pattern, texts)).match(from_text(name))]


@pytest.mark.parametrize(("field", "text", "name", "matches"), VECTORS)
def test_vector(field, text, name, matches):
    pattern = (match_name if field == NAME else match_pattern)(text)
    assert Matcher([pattern]).match(wire(name)) == ((0,) if matches else ())


def test_all_vectors_at_once_give_each_its_own_verdict():
    found = Matcher(match_pattern(text) for _, text, _, _ in VECTORS)
    for _, _, name, _ in VECTORS:
        expected = tuple(
            number for number, (_, text, _, _) in enumerate(VECTORS) if reference(text, to_text(wire(name)))
        )
        assert found.match(wire(name)) == expected


@given(st.lists(pattern_texts(), max_size=12), st.lists(plain_names() | odd_names(), max_size=6))
def test_matches_what_the_plain_reference_matches(texts, names):
    found = Matcher(map(match_pattern, texts))
    for name in names:
        assert found.match(name) == tuple(n for n, text in enumerate(texts) if reference(text, to_text(name)))


def test_every_pattern_that_matches_is_told():
    texts = ["www.example.com", "*.example.com", "w*.example.com", "*w.example.com", "**.com", "*.*.com", "*",
             "*ww*.example.com", "example.com", "www.*.com", "**.www.example.com"]  # fmt: skip
    assert texts_matching(texts, "www.example.com") == [*texts[:8], "www.*.com"]


def test_equal_patterns_each_have_their_own_id():
    assert Matcher(map(match_pattern, ["a.x", "A.X."])).match(from_text("a.x")) == (0, 1)


def test_no_pattern_no_match():
    assert Matcher([]).match(from_text("a.x")) == ()
    assert Matcher([]).match(b"\x00") == ()


def test_stars_do_not_match_odd_bytes_but_the_rest_of_a_name_still_counts():
    texts = ["*.x", "**.x", "a*.x", "*.a.x", "**.a.x", "*"]
    found = Matcher(map(match_pattern, texts))
    assert found.match(from_labels([b"a b", b"x"])) == ()
    assert found.match(from_labels([b"a!", b"a", b"x"])) == ()
    assert found.match(from_labels([b"b", b"a", b"x"])) == (1, 3, 4, 5)


def lines_run(call):
    """How many lines of Python a call runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # whoever watches the collector runs lines too
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize(
    "name", ["h00003.zone.test", "x.h00003.zone.test", "h00003-x.zone.test", "x-00003.zone.test", "no.test"]
)
def test_a_name_costs_the_same_steps_with_many_patterns(name):
    def steps(number):
        kinds = (
            "h{:05}.zone.test",
            "*.h{:05}.zone.test",
            "h{:05}-*.zone.test",
            "*-{:05}.zone.test",
            "**.h{:05}.test",
        )
        built = Matcher(match_pattern(kind.format(i)) for i in range(number) for kind in kinds)
        return lines_run(lambda: built.match(from_text(name)))

    assert steps(10) == steps(2000)
