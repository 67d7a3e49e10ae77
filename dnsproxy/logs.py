"""The daemon's own log on standard error: sentences for a person, or JSON lines for a collector.

The query log is another thing: events.py.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import structlog


def configure(level: str, style: str) -> None:
    """Send structlog and the standard library's loggers to standard error.

    `style` is "text", "json", or "auto": text on a terminal, JSON elsewhere.
    """
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    json = style == "json" or (style == "auto" and not sys.stderr.isatty())
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer() if json else _console(),
        ],
    )
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.getLogger("pyroute2").setLevel(logging.WARNING)  # its debug lines tell of itself only
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _console() -> structlog.dev.ConsoleRenderer:
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return structlog.dev.ConsoleRenderer(colors=colors, pad_event=0)
