r"""DNS names as lower-cased wire labels, and their text at the surface.

Inside the program a name is its uncompressed wire form (RFC 1035 section 3.1) with ASCII letters
folded to lower case (RFC 4343): `b"\x03www\x07example\x03com\x00"`. Two names are equal exactly if
these bytes are, so a label that contains a dot or a space can never pass for two labels. Text is made
only for people; a byte outside the usual set is escaped as in zone files (RFC 1035 section 5.1).
"""

from __future__ import annotations

MAX_NAME = 255  # octets on the wire, RFC 1035 section 2.3.4
MAX_LABEL = 63

ROOT = b"\x00"
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_*/+:@~")


def labels(name: bytes) -> list[bytes]:
    """Return the labels of a wire name, leftmost first, without the root."""
    found = []
    at = 0
    while length := name[at]:
        found.append(name[at + 1 : at + 1 + length])
        at += 1 + length
    return found


def from_labels(parts: list[bytes]) -> bytes:
    """Return the wire form of labels, leftmost first; the caller has checked their lengths."""
    return b"".join(bytes((len(part),)) + part for part in parts) + ROOT


def from_text(text: str) -> bytes:
    """Return the lower-cased wire form of a plain dotted name, with or without its final dot.

    Raises ValueError with a sentence for a person: an empty or long label, a long name, an escape, a
    space, a letter outside ASCII.
    """
    if text == ".":
        return ROOT
    if odd := next((char for char in text if not "!" <= char <= "~" or char == "\\"), None):
        raise ValueError(f"{text!r} has the character {odd!r} in it; {_advice(odd)}")
    parts = text.lower().encode().removesuffix(b".").split(b".")
    if not all(parts):
        raise ValueError(f"{text!r} has an empty label: a name is labels with single dots between them")
    if long := next((part for part in parts if len(part) > MAX_LABEL), None):
        raise ValueError(f"{text!r} has a label of {len(long)} characters; {MAX_LABEL} is the most")
    wire = from_labels(parts)
    if len(wire) > MAX_NAME:
        raise ValueError(f"{text!r} takes {len(wire)} octets on the wire; {MAX_NAME} is the most")
    return wire


def _advice(odd: str) -> str:
    if not odd.isascii():
        return "write an international name in its ASCII form, which starts with xn--"
    if odd == "\\":
        return "write the name without escapes"
    return "write the name without spaces and control characters"


def to_text(name: bytes) -> str:
    r"""Return a wire name as text with a final dot, odd bytes escaped (`a\.b.com.`)."""
    parts = labels(name)
    if _PLAIN.issuperset(b"".join(parts)):
        return b".".join([*parts, b""]).decode() or "."
    return "".join(_label_text(label) + "." for label in parts)


def _label_text(label: bytes) -> str:
    if _PLAIN.issuperset(label):
        return label.decode()
    return "".join(map(_byte_text, label))


def _byte_text(byte: int) -> str:
    if byte in _PLAIN:
        return chr(byte)
    return f"\\{chr(byte)}" if 0x21 <= byte <= 0x7E else f"\\{byte:03d}"
