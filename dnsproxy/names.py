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

    Raises ValueError with a sentence for a person: an empty or long label, a long name, an escape.
    """
    if text == ".":
        return ROOT
    parts = [part.encode("ascii", "strict") for part in text.removesuffix(".").lower().split(".")]
    if any(not 1 <= len(part) <= MAX_LABEL for part in parts):
        raise ValueError(f"{text!r} has an empty label or one of more than {MAX_LABEL} characters")
    wire = from_labels(parts)
    if len(wire) > MAX_NAME:
        raise ValueError(f"{text!r} is longer than {MAX_NAME} octets on the wire")
    return wire


def to_text(name: bytes) -> str:
    r"""Return a wire name as text with a final dot, odd bytes escaped (`a\.b.com.`)."""
    return "".join(_label_text(label) + "." for label in labels(name)) or "."


def _label_text(label: bytes) -> str:
    return "".join(_byte_text(byte) for byte in label)


def _byte_text(byte: int) -> str:
    if byte in _PLAIN:
        return chr(byte)
    return f"\\{chr(byte)}" if 0x21 <= byte <= 0x7E else f"\\{byte:03d}"
