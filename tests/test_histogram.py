from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.histogram import Histogram

BOUNDS = (0.001, 0.01, 0.1)


def test_a_value_at_a_bound_belongs_below_it():
    histogram = Histogram(BOUNDS)
    for value in (0.001, 0.0011, 0.1, 0.2):
        histogram.observe(value)
    assert histogram.counts == [1, 1, 1, 1]
    assert histogram.sum == 0.001 + 0.0011 + 0.1 + 0.2


@given(st.lists(st.floats(0, 1)))
def test_cumulative_counts_are_what_is_at_most_each_bound(values):
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    for at, bound in enumerate(BOUNDS):
        assert sum(histogram.counts[: at + 1]) == sum(value <= bound for value in values)
    assert sum(histogram.counts) == len(values)
