"""Who can tell the public address, one kind in a file. What goes wrong is a SourceError, or an OSError."""

from __future__ import annotations

from dnsproxy import addresses
from dnsproxy.dyndns.outcomes import printable
from dnsproxy.errors import DnsproxyError


class SourceError(DnsproxyError):
    """A source gave no answer. The message is half a sentence, without the name of the source."""


def read_address(text: str) -> bytes:
    """Return the address that a text is, blanks around it aside; SourceError for all else, zones too."""
    text = text.strip()
    try:
        if "%" not in text:
            return addresses.from_text(text)
    except ValueError:
        pass
    raise SourceError(f"answered no address: {printable(text)[:60]!r}")
