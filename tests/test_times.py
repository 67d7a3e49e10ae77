"""Times as text."""

from __future__ import annotations

from dnsproxy import times


def test_a_time_is_rfc_3339_in_utc_with_six_digits_always():
    assert times.to_text(1_000_000_000.25) == "2001-09-09T01:46:40.250000Z"
    assert times.to_text(1_000_000_000) == "2001-09-09T01:46:40.000000Z"
