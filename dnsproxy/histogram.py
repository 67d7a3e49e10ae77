"""A histogram that costs one search and two additions: what answers may afford to be counted by."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts of values by upper bounds, the last count being that of what exceeds them all.

    `bounds` ascend; a value equal to a bound belongs below it, as in Prometheus (`le`). `counts` are per
    bucket, not cumulative; `sum` is that of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
