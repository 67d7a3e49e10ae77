"""Many patterns -> one trie of labels, read from the right, that says which patterns match a name.

A name is looked up label by label: an exact label is a dict hit, a whole-label `*` is one more child, and a
label with an inner star (`api-*`, `*-eu`, `a*z`) is found by what is fixed in it: one dict hit for each
length that the part before a first star has at this node, and below it one for each length of the part after
a last star. `**.` ends a path: it matches what is left, if that is at least one label and all of it is made
of characters of a name.

So a name costs a few dict hits per label, however many patterns there are. Only labels with the same ends
that differ between two stars (`*a*`, `*b*`) are tried one by one. Every node has one parent and stands at one
depth, hence no node is visited twice for a name, and no pattern can make matching explode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

from dnsproxy.names import labels
from dnsproxy.rules.pattern import fits, plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dnsproxy.rules.pattern import Pattern, Pieces

K = TypeVar("K")

_STAR = (b"", b"")  # the pieces of a label that is one star

# Length of what stands after the last star -> that -> all pieces -> node.
_Backs: TypeAlias = "dict[int, dict[bytes, dict[Pieces, _Node]]]"
_NO_BACKS: _Backs = {}
_NO_NODES: dict[Pieces, _Node] = {}


class _Node:
    """The patterns that share the labels on the way here, counted from the right."""

    __slots__ = ("deep", "exact", "here", "star", "starred")

    def __init__(self) -> None:
        self.exact: dict[bytes, _Node] = {}
        self.star: _Node | None = None
        self.starred: dict[int, dict[bytes, _Backs]] = {}  # length of what stands before a star -> that
        self.here: list[int] = []  # patterns that end here
        self.deep: list[int] = []  # patterns that go on with `**.`

    def child(self, pieces: Pieces) -> _Node:
        """Return the node of a label of a pattern, made where it is missing."""
        if len(pieces) == 1:
            return _made(self.exact, pieces[0])
        if pieces == _STAR:
            self.star = self.star or _Node()
            return self.star
        fronts = self.starred.setdefault(len(pieces[0]), {})
        backs = fronts.setdefault(pieces[0], {}).setdefault(len(pieces[-1]), {})
        return _made(backs.setdefault(pieces[-1], {}), pieces)

    def fitting(self, label: bytes) -> Iterator[_Node]:
        """Yield the nodes of the labels with inner stars that a label of a name fits."""
        for before, fronts in self.starred.items():
            for after, backs in fronts.get(label[:before], _NO_BACKS).items():
                for pieces, node in backs.get(label[len(label) - after :], _NO_NODES).items():
                    if fits(pieces, label):
                        yield node


def _made(nodes: dict[K, _Node], key: K) -> _Node:
    if (node := nodes.get(key)) is None:
        node = nodes[key] = _Node()
    return node


class Matcher:
    """Tells which of many patterns match a name; a pattern's id is its place in the order given."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._root = _Node()
        for number, pattern in enumerate(patterns):
            self._add(number, pattern)

    def _add(self, number: int, pattern: Pattern) -> None:
        node = self._root
        for pieces in reversed(pattern.labels):
            node = node.child(pieces)
        if pattern.deep or pattern.everything:
            node.deep.append(number)
        if not pattern.deep:
            node.here.append(number)

    def match(self, name: bytes) -> tuple[int, ...]:
        """Return the ids of all patterns that match a wire name, in ascending order."""
        parts = labels(name)
        clean = _clean(parts)
        found: list[int] = []
        open_: list[tuple[_Node, int]] = [(self._root, len(parts))]
        while open_:
            node, left = open_.pop()
            if not left:
                found += node.here
                continue
            if node.deep and left <= clean:
                found += node.deep
            left -= 1
            label = parts[left]
            if (child := node.exact.get(label)) is not None:
                open_.append((child, left))
            if node.star is not None and (left < clean or plain(label)):
                open_.append((node.star, left))
            if node.starred:
                open_ += [(child, left) for child in node.fitting(label)]
        return tuple(sorted(found))


def _clean(parts: list[bytes]) -> int:
    """Return how many labels from the left consist of characters of a name only."""
    if plain(b"".join(parts)):
        return len(parts)
    return next(place for place, label in enumerate(parts) if not plain(label))
