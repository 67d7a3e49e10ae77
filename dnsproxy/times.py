"""Wall-clock times as text, for people and for files."""

from __future__ import annotations

from datetime import UTC, datetime


def to_text(wall: float) -> str:
    """Return seconds since 1970 as RFC 3339 in UTC, with microseconds: `2001-09-09T01:46:40.250000Z`."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
