"""One matchName or matchPattern: checked, canonical, matched on wire labels.

Cilium defines the meaning by a regular expression on the name's text. We keep the meaning and compare labels
instead, so that a label which contains a dot can never pass for two, and so that a backslash has no role:

    `*`                one or more stars: any characters of a name inside one label, also none
    `**.` in front     one or more whole labels
    `*` alone          every name

A *character of a name* is a letter, a digit, `-` or `_`. A label with any other byte is matched by no star;
it passes only where a DNS rule says `*`, which allows every name whatever its bytes (`Pattern.everything`;
in a toFQDNs entry `*` means every name that consists of such characters).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import ip_network
from typing import TypeAlias

from dnsproxy.names import labels

MAX_PATTERN = 255  # characters; Cilium's limit, and that of a name on the wire

Pieces: TypeAlias = tuple[
    bytes, ...
]  # a label cut at its stars: (b"www",), (b"a", b"z") for a*z, (b"", b"") for *

_ALPHABET = b"-_0123456789abcdefghijklmnopqrstuvwxyz"  # names are lower-cased
_LEGAL = re.compile(r"[-A-Za-z0-9_.*]+").fullmatch
_STARS = re.compile(r"\*+")
_STARS_ALONE = re.compile(r"\*+\.").fullmatch
_STARS_IN_FRONT = re.compile(r"^\*\*+\.")
_URL = re.compile(r"[A-Za-z][-+.A-Za-z0-9]*://(?:[^/@]*@)?(\[[^]]*\]|[^/:]*)").match
_BRACKETED = re.compile(r"\[([^]]*)\](?::\d+)?").fullmatch
_WITH_PORT = re.compile(r"([^:]+):\w*").fullmatch


@dataclass(frozen=True)
class Pattern:
    """A set of names.

    `text` is canonical: lower case, a final dot, one spelling for runs of stars; patterns are equal if this
    text is. `written` is what the user wrote.
    """

    text: str
    written: str = field(compare=False)

    @property
    def everything(self) -> bool:
        """Tell whether this is `*` alone."""
        return self.text == "*"

    @property
    def deep(self) -> bool:
        """Tell whether one or more whole labels stand in front (`**.`)."""
        return self.text.startswith("**.")

    @cached_property
    def labels(self) -> tuple[Pieces, ...]:
        """The labels, leftmost first, each cut at its stars; no leading `**.`; none for `*` and `.`."""
        if self.text in ("*", "."):
            return ()
        labels_ = self.text.removeprefix("**.").encode()[:-1].split(b".")
        return tuple([tuple(label.split(b"*")) for label in labels_])

    def matches(self, name: bytes) -> bool:
        """Tell whether a wire name is in the set, as a toFQDNs entry sees it."""
        parts = labels(name)
        if self.everything:
            return plain(b"".join(parts))
        front = len(parts) - len(self.labels)
        if front < self.deep or (front and not self.deep) or not plain(b"".join(parts[:front])):
            return False
        return all(map(fits, self.labels, parts[front:]))


def plain(label: bytes) -> bool:
    """Tell whether a label consists of characters of a name only."""
    return not label.translate(None, _ALPHABET)


def fits(pieces: Pieces, label: bytes) -> bool:
    """Tell whether a lower-cased label is the pieces in order, with any characters of a name between them."""
    if len(pieces) == 1:
        return pieces[0] == label
    first, *inner, last = pieces
    at, end = len(first), len(label) - len(last)
    if at > end or not (label.startswith(first) and label.endswith(last) and plain(label)):
        return False
    for piece in inner:
        found = label.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


# --- text to pattern


def mistaken(text: str, *, port: bool = False) -> str | None:
    """Return a sentence about what was written for a name and is none; `port`: a port may stand behind it."""
    if url := _URL(text):
        return f"{text!r} is a URL: write the name alone, {url[1] or 'such as github.com'}"
    if _is_address(text):
        return f"{text!r} is an address, not a name: addresses stand in firewall rules"
    if not port and (found := _WITH_PORT(text)):
        return f"{text!r} is a name and a port: write the name alone, {found[1]}"
    return None


def _is_address(text: str) -> bool:
    """Tell whether a text is an address or a prefix, perhaps in brackets or with a port behind."""
    bracketed = _BRACKETED(text)
    host, colon, port = text.partition(":")
    bare = bracketed[1] if bracketed else host if colon and port.isdigit() else text
    try:
        ip_network(bare.removesuffix("."), strict=False)
    except ValueError:
        return False
    return not bare.isdigit()


def match_name(text: str) -> Pattern:
    """Return the pattern of a matchName, which has no wildcards; ValueError is a sentence for a person."""
    if "*" in text:
        raise ValueError(
            f"{text!r} has a '*', and this is a plain name: wildcards stand in a pattern (matchPattern)"
        )
    return match_pattern(text)


def match_pattern(text: str) -> Pattern:
    """Return the pattern of a matchPattern; ValueError is a sentence for a person."""
    if not text:
        raise ValueError("a name is missing here: the text is empty")
    if not _LEGAL(text):
        raise ValueError(mistaken(text) or _odd(text))
    if len(text) > MAX_PATTERN:
        raise ValueError(f"{text[:40]!r}... has {len(text)} characters; a name has at most {MAX_PATTERN}")
    if text != "." and (text.startswith(".") or ".." in text):
        raise ValueError(f"{text!r} has an empty label: a dot stands between two labels, or once at the end")
    return Pattern(_canonical(text), text)


def _canonical(text: str) -> str:
    whole = text.lower().removesuffix(".") + "."
    if "**" not in whole and whole != "*.":
        return whole
    if _STARS_ALONE(whole):
        return "*"
    tail = _STARS_IN_FRONT.sub("", whole)
    return ("**." if tail != whole else "") + _STARS.sub("*", tail)


def _odd(text: str) -> str:
    odd = next(character for character in text if not _LEGAL(character))
    return f"{text!r} has {odd!r}, which no name has: {_advice(text, odd)}"


_STAR_ADVICE = (
    "this is no regular expression; '*' stands for any characters inside one label, "
    "'**.' in front for one or more whole labels"
)
_ADVICE = (
    ("[](){}|^$+?\\", _STAR_ADVICE),
    (":/@#", "write the name alone, without scheme, port or path; ports have a place of their own"),
    (",;", "write one name per entry"),
    (" \t\r\n", "remove the blank"),
)


def _advice(text: str, odd: str) -> str:
    for characters, advice in _ADVICE:
        if odd in characters:
            return advice
    if odd.isascii():
        return "a name consists of letters, digits, '-', '_' and dots"
    return f"write an internationalised name in its ASCII form{_ascii_form(text)}"


def _ascii_form(text: str) -> str:
    try:
        return f", {text.encode('idna').decode()}"
    except UnicodeError:
        return " (xn--...)"
