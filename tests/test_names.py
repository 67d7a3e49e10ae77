import dns.name
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy import names

pytestmark = pytest.mark.timeout(3600)  # the deep profile takes minutes

labels = st.lists(st.binary(min_size=1, max_size=63), max_size=4)
plain = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_", min_size=1, max_size=63)


def complaint_about(text):
    """Return what is said against a text, nothing if it is a name; UnicodeError is no sentence."""
    try:
        names.from_text(text)
    except ValueError as error:
        return repr(error) if isinstance(error, UnicodeError) else str(error)
    return ""


def test_text_becomes_lower_cased_wire_labels():
    assert names.from_text("www.Example.COM") == b"\x03www\x07example\x03com\x00"


def test_the_final_dot_makes_no_difference():
    assert names.from_text("example.com.") == names.from_text("example.com")


def test_the_root_is_a_dot():
    assert names.from_text(".") == names.ROOT
    assert names.to_text(names.ROOT) == "."


def test_labels_with_underscores_stars_and_slashes_are_names():
    assert names.labels(names.from_text("_sip._tcp.0/25.*.example")) == [
        b"_sip", b"_tcp", b"0/25", b"*", b"example",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty label"),
        ("..", "empty label"),
        (".example.com", "empty label"),
        ("www..example.com", "empty label"),
        ("x" * 64 + ".com", "label of 64 characters; 63 is the most"),
        (".".join(["x" * 49] * 6), "301 octets on the wire; 255 is the most"),
        ("bücher.example", "'ü' in it; write an international name in its ASCII form"),
        ("git\N{KELVIN SIGN}.example", "ASCII form"),
        ("example。com", "ASCII form"),
        (r"a\.b.example", "without escapes"),
        ("www.example.com ", "without spaces"),
        ("www.exam\tple.com", "without spaces and control characters"),
        ("www.example.com\n", "without spaces and control characters"),
    ],
)
def test_what_is_no_name_is_named_in_a_sentence(text, complaint):
    message = complaint_about(text)
    assert complaint in message
    assert repr(text) in message


def test_the_longest_name_and_the_longest_label_are_names():
    longest = ".".join(["x" * 63, "y" * 63, "z" * 63, "w" * 61])
    assert len(names.from_text(longest)) == names.MAX_NAME
    with pytest.raises(ValueError, match="256 octets"):
        names.from_text(longest + "w")


def test_a_letter_that_lower_casing_would_make_ascii_is_not_ascii():
    assert "\N{KELVIN SIGN}".lower() == "k"
    with pytest.raises(ValueError, match="xn--"):
        names.from_text("\N{KELVIN SIGN}ernel.example")


def test_a_dot_inside_a_label_is_escaped():
    assert names.to_text(b"\x03a.b\x03com\x00") == r"a\.b.com."
    assert names.to_text(b"\x03a.b\x03com\x00") != names.to_text(b"\x01a\x01b\x03com\x00")


def test_odd_octets_are_escaped_as_in_zone_files():
    assert names.to_text(b'\x07\x00 "\\;\x7f\xff\x00') == r"\000\032\"\\\;\127\255."


@given(labels)
def test_labels_come_back(parts):
    assert names.labels(names.from_labels(parts)) == parts


@given(labels)
def test_text_means_the_same_name_to_another_reader(parts):
    wire = names.from_labels(parts)
    assert dns.name.from_text(names.to_text(wire)).to_wire() == wire


@given(st.lists(plain, min_size=1, max_size=3))
def test_plain_text_reads_as_another_reader_reads_it(parts):
    text = ".".join(parts)
    assert names.from_text(text) == dns.name.from_text(text).canonicalize().to_wire()
    assert names.to_text(names.from_text(text)) == text.lower() + "."


@given(st.text(max_size=80))
def test_any_text_is_a_name_or_a_value_error_with_its_text(text):
    if message := complaint_about(text):
        assert repr(text) in message
    else:
        wire = names.from_text(text)
        assert wire == wire.lower()
        assert names.from_text(names.to_text(wire).replace("\\", "")) == wire
