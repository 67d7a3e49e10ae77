"""Random patterns and names that meet often: few labels, few letters."""

from __future__ import annotations

from hypothesis import strategies as st

from dnsproxy.names import from_labels

_PIECES = st.sampled_from(["a", "b", "ab", "A", "-", "_", "*", "**", "***"])
_LABELS = st.lists(_PIECES, min_size=1, max_size=3).map("".join)
_BYTES = st.sampled_from([b"a", b"b", b"ab", b"-", b"_", b"aab", b"abab"])
_ODD = st.sampled_from([b"a.b", b"a b", b"\xff", b"\\", b"*", b"a\x00", b"!"])


def pattern_texts() -> st.SearchStrategy[str]:
    """Return texts of patterns, all of them legal."""
    labels = st.lists(_LABELS, min_size=1, max_size=4).map(".".join)
    front = st.sampled_from(["", "", "*.", "**.", "***."])
    alone = st.sampled_from(["*", "*.", "**", ".", "**."])
    return st.tuples(front, labels, st.sampled_from(["", "."])).map("".join) | alone


def plain_names() -> st.SearchStrategy[bytes]:
    """Return wire names of characters of a name only."""
    return st.lists(_BYTES, max_size=5).map(from_labels)


def odd_names() -> st.SearchStrategy[bytes]:
    """Return wire names that may have any byte in a label."""
    return st.lists(_BYTES | _ODD, max_size=5).map(from_labels)
