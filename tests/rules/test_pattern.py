from __future__ import annotations

import pytest
from cilium_vectors import NAME, VECTORS, expression, reference, wire
from hypothesis import example, given
from hypothesis import strategies as st
from rule_strategies import odd_names, pattern_texts, plain_names

from dnsproxy.names import from_labels, from_text, to_text
from dnsproxy.rules.pattern import MAX_PATTERN, Pattern, fits, match_name, match_pattern

PARSERS = {NAME: match_name, "matchPattern": match_pattern}


@pytest.mark.parametrize(("field", "text", "name", "matches"), VECTORS)
def test_vector(field, text, name, matches):
    assert PARSERS[field](text).matches(wire(name)) is matches


@pytest.mark.parametrize(("field", "text", "name", "matches"), VECTORS)
def test_the_reference_agrees_with_the_vectors(field, text, name, matches):
    assert reference(text, to_text(wire(name))) is matches


@given(pattern_texts(), plain_names() | odd_names())
@example("*", b"\x00")
@example("**.x", from_labels([b"a.b", b"x"]))
def test_matches_what_the_expression_on_text_matches(text, name):
    assert match_pattern(text).matches(name) is reference(text, to_text(name))


def test_a_dot_inside_a_label_is_not_two_labels():
    name = from_labels([b"www.example", b"com"])
    assert to_text(name) == "www\\.example.com."
    assert not any(
        match_pattern(text).matches(name) for text in ("www.example.com", "*.example.com", "*.com", "*")
    )


# --- scenarios 1 to 5


def test_dots_are_literal_and_both_ends_are_bound():
    assert expression("a.example.com").pattern == "a[.]example[.]com[.]"
    pattern = match_pattern("a.example.com")
    assert pattern.matches(from_text("a.example.com"))
    for other in ("axexample.com", "b.a.example.com", "a.example.com.test", "a.example.comx"):
        assert not pattern.matches(from_text(other))


def test_a_dot_alone_is_the_root_only():
    assert match_pattern(".").matches(b"\x00")
    assert not match_pattern(".").matches(from_text("a"))


@pytest.mark.parametrize("text", ["*", "*.", "**", "**.", "***", "****."])
def test_stars_alone_are_everything_and_one_canonical_text(text):
    pattern = match_pattern(text)
    assert (pattern.text, pattern.everything, pattern.written) == ("*", True, text)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("*.com", "*.com."), ("***.com", "**.com."), ("***.com.", "**.com."), ("WWW.X.COM", "www.x.com."),
        ("www.example.com.", "www.example.com."), ("www.**.x", "www.*.x."), ("**x", "*x."), ("x**", "x*."),
        ("a**b***c.x", "a*b*c.x."), ("**.**.x", "**.*.x."), ("**.*", "**.*."), ("*.*", "*.*."), (".", "."),
    ],
)  # fmt: skip
def test_canonical_text(text, canonical):
    assert match_pattern(text).text == canonical
    assert match_pattern(canonical).text == canonical


@given(pattern_texts())
def test_canonical_text_is_stable_and_keeps_the_meaning(text):
    canonical = match_pattern(text).text
    assert match_pattern(canonical) == match_pattern(text)
    assert expression(canonical).pattern == expression(text).pattern


def test_patterns_are_equal_by_canonical_text():
    spellings = {match_pattern(text) for text in ("cilium.io", "cilium.io.", "Cilium.io")} | {
        match_name("CILIUM.IO")
    }
    assert len(spellings) == 1
    assert match_pattern("*.x") != match_pattern("**.x")


# --- what is refused


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[a-z]+.example.com", ["'['", "no regular expression", "'*'", "'**.'"]),
        ("^example.com$", ["'^'", "no regular expression"]),
        (r"example\.com", ["no regular expression"]),
        ("(a|b).example.com", ["'('", "no regular expression"]),
        ("https://example.com", ["is a URL", "write the name alone, example.com"]),
        ("https://", ["is a URL", "such as github.com"]),
        ("https://[2001:db8::1]/", ["is a URL"]),
        ("example.com:443", ["a name and a port", "write the name alone, example.com"]),
        ("2001:db8::1", ["is an address", "firewall rules"]),
        ("::/0", ["is an address"]),
        ("a:b:c", ["':'", "without scheme, port or path"]),
        ("example.com/path", ["'/'", "without scheme"]),
        ("a.com,b.com", ["','", "one name per entry"]),
        (" example.com", ["' '", "remove the blank"]),
        ("example.com\n", ["remove the blank"]),
        ("exämple.com", ["'ä'", "xn--exmple-cua.com"]),
        ("ex\u2028\u0378mple.com", ["xn--..."]),
        ("ex!mple.com", ["'!'", "letters, digits"]),
        ("", ["the text is empty"]),
        (".example.com", ["empty label"]),
        ("a..example.com", ["empty label"]),
        ("example.com..", ["empty label"]),
        ("..", ["empty label"]),
        ("a" * (MAX_PATTERN + 1), ["256 characters", "at most 255"]),
    ],
)
def test_what_is_refused_and_why(text, parts):
    with pytest.raises(ValueError) as refused:
        match_pattern(text)
    message = str(refused.value)
    assert [part for part in parts if part not in message] == []


def test_a_plain_name_has_no_star():
    with pytest.raises(ValueError, match="wildcards stand in a pattern"):
        match_name("*.example.com")


def test_the_longest_pattern_is_accepted():
    assert match_pattern("a" * MAX_PATTERN).text == "a" * MAX_PATTERN + "."


@given(st.text(max_size=30))
def test_any_text_is_a_pattern_or_a_sentence(text):
    try:
        assert isinstance(match_pattern(text), Pattern)
    except ValueError as refused:
        assert str(refused)  # noqa: PT017 - either outcome is right


# --- one label


@pytest.mark.parametrize(
    ("pieces", "label", "fit"),
    [
        ((b"www",), b"www", True), ((b"www",), b"ww", False), ((b"", b""), b"anything", True),
        ((b"a", b"a"), b"a", False), ((b"a", b"a"), b"aa", True), ((b"ab", b"bc"), b"abc", False),
        ((b"a", b"b", b"c"), b"a-b-c", True), ((b"a", b"b", b"c"), b"acb", False),
        ((b"", b"ab", b"ab", b""), b"xabab", True), ((b"", b"ab", b"ab", b""), b"xaba", False),
        ((b"a", b""), b"a!", False), ((b"a!",), b"a!", True),
    ],
)  # fmt: skip
def test_fits(pieces, label, fit):
    assert fits(pieces, label) is fit
