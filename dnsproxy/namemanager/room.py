"""The waiting room for answers: whose turn it is, and who goes when there is no room.

Every owner, an endpoint, has a queue of its own. A transaction takes elements of all owners in turn, an equal
share for each, so that whatever one of them floods, what another one waits for is in the next transaction.
An owner's queue is first come, first served. Two bounds hold exactly: the number of holds, and that of the
elements that all of them wait for. When a newcomer does not fit, the owner that has most in its queue gives
up its newest hold; if that is the newcomer's own, the newcomer is not let in.

A hold is looked at twice: when its elements are taken, and when the last of them is written. Nothing rescans
the room. A hold that has ended before its turn stays in the queue, and counts, until its elements are taken:
its client will ask again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dnsproxy.namemanager.elements import Element
    from dnsproxy.namemanager.plan import Hold

WAITING: Final = 16_384  # holds in the room; as many queries may be in flight
QUEUE: Final = 100_000  # elements that all of them wait for
LOOKS: Final = 4  # elements looked at for each one that a transaction has room for


class Room:
    """Holds by owner. Each is in the room until it `leave`s, in a queue until it was taken, or both."""

    def __init__(self) -> None:
        self._holds: dict[Hold, None] = {}
        self._queues: dict[str, deque[Hold]] = {}  # in the order of turns; none is empty
        self._queued: dict[str, int] = {}  # by owner, the elements of the holds in its queue
        self._sizes: dict[Hold, int] = {}  # of all that are in the room or in a queue
        self._elements = 0

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        """Walk over the holds in the room, which may come and go meanwhile."""
        return iter(list(self._holds))

    def __contains__(self, hold: Hold) -> bool:
        return hold in self._holds

    @property
    def queued(self) -> int:
        """The number of elements that wait to be taken."""
        return sum(self._queued.values())

    def enter(self, hold: Hold) -> list[Hold]:
        """Let a hold in; return those that have to be given up for it, maybe itself; they are out already."""
        displaced: list[Hold] = []
        size = len(hold.elements)
        while len(self._sizes) >= WAITING or self._elements + size > QUEUE:
            owner = max(self._queued, key=self._queued.__getitem__, default=hold.owner)
            if self._queued.get(owner, 0) <= self._queued.get(hold.owner, 0) + size:
                return [*displaced, hold]
            victim = self._pop(owner, newest=True)
            if victim in self._holds:
                del self._holds[victim]
                displaced.append(victim)
            self._release(victim)
        self._holds[hold] = None
        self._sizes[hold] = size
        self._elements += size
        self._append(hold)
        return displaced

    def leave(self, hold: Hold) -> None:
        """Let a hold out, for whatever reason; it may still be in the queue."""
        del self._holds[hold]
        if not hold.queued:
            self._release(hold)

    def take(
        self, size: int, lacking: Callable[[Sequence[Element]], Iterable[Element]]
    ) -> tuple[list[Element], list[Hold]]:
        """Take what the next transaction is to add, and the holds that will then have been taken whole.

        `lacking` tells which elements do not count as applied. At most `size` elements are returned.
        """
        taken: dict[Element, None] = {}
        whole: list[Hold] = []
        looks = LOOKS * size
        while self._queues and len(taken) < size and looks > 0:
            share = max(1, (size - len(taken)) // len(self._queues))
            for owner in list(self._queues):
                if (room := min(share, size - len(taken))) <= 0 or looks <= 0:
                    break
                looks -= self._turn(owner, room, lacking, taken, whole)
        return list(taken), whole

    def _turn(
        self,
        owner: str,
        share: int,
        lacking: Callable[[Sequence[Element]], Iterable[Element]],
        taken: dict[Element, None],
        whole: list[Hold],
    ) -> int:
        """Take up to `share` elements of one owner, then put it last; return how many were looked at."""
        queue = self._queues.pop(owner)
        self._queues[owner] = queue
        looks, limit = 0, LOOKS * share
        while queue and share > 0 and looks < limit:
            hold = queue[0]
            piece = hold.elements[hold.at : hold.at + share]
            found = dict.fromkeys(lacking(piece))
            taken.update(found)
            hold.at += len(piece)
            looks += 1 + len(piece)
            share -= len(found)
            if hold.at >= len(hold.elements):
                self._pop(owner)
                if hold in self._holds:
                    whole.append(hold)
                else:
                    self._release(hold)
        return looks

    def put_back(self, holds: Iterable[Hold]) -> None:
        """Have the holds that are still in the room taken again."""
        for hold in holds:
            if hold in self._holds and not hold.queued:
                self._append(hold)

    def change(self, hold: Hold, elements: tuple[Element, ...]) -> None:
        """Have a hold in the room wait for other elements. The bounds do not drive it out."""
        if hold.queued:
            self._queued[hold.owner] += len(elements) - self._sizes[hold]
        self._elements += len(elements) - self._sizes[hold]
        self._sizes[hold] = len(elements)
        hold.elements, hold.at = elements, 0

    def _append(self, hold: Hold) -> None:
        hold.queued, hold.at = True, 0
        self._queues.setdefault(hold.owner, deque()).append(hold)
        self._queued[hold.owner] = self._queued.get(hold.owner, 0) + self._sizes[hold]

    def _pop(self, owner: str, *, newest: bool = False) -> Hold:
        queue = self._queues[owner]
        hold = queue.pop() if newest else queue.popleft()
        hold.queued = False
        self._queued[owner] -= self._sizes[hold]
        if not queue:
            del self._queues[owner], self._queued[owner]
        return hold

    def _release(self, hold: Hold) -> None:
        self._elements -= self._sizes.pop(hold)
