"""Saying what goes wrong per packet without a line per packet."""

from __future__ import annotations

import logging

INTERVAL = 60.0  # seconds between two lines about the same kind of trouble

log = logging.getLogger(__name__)


class Complaints:
    """The log of one listener or stream: each kind of trouble at once, then at most once a minute.

    The kinds are exception types and the like, never something a packet carries, so they are few.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._next: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def note(self, kind: str, now: float, error: BaseException | None = None) -> None:
        """Log one occurrence, with its traceback if it has one, or only remember that there was one."""
        if now < self._next.get(kind, now):
            self._silent[kind] = self._silent.get(kind, 0) + 1
            return
        self._next[kind] = now + INTERVAL
        silent = self._silent.pop(kind, 0)
        more = f" ({silent} more since the last such line)" if silent else ""
        log.error("%s: %s%s; it goes on", self._where, kind, more, exc_info=error)
