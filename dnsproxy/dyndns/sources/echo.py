"""Echo services: a web page that holds the address it was asked from, and nothing else.

A name such as ipv4.example promises a family and does not keep it always, so the socket has the family.
An address in a page of HTML, or behind an HTTP error, is not taken: that is where captive portals and
protections against robots put theirs.
"""

from __future__ import annotations

from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING, Final

from dnsproxy.dyndns.client import Failure, Limits, Question, fetch
from dnsproxy.dyndns.sources import SourceError, read_address

if TYPE_CHECKING:
    from socket import AddressFamily

SOCKETS: Final[dict[int, AddressFamily]] = {4: AF_INET, 16: AF_INET6}  # by the length of an address


async def ask(url: str, length: int, limits: Limits, cafile: str | None = None) -> bytes:
    """Return the packed address from which a service sees a socket of this family."""
    response = await fetch(Question(url, family=SOCKETS[length]), limits, cafile)
    if isinstance(response, Failure):
        raise SourceError(response.reason)
    if response.status != 200:
        raise SourceError(f"answered HTTP {response.status}")
    if not response.whole:
        raise SourceError("answered more than an address")
    return read_address(response.body.decode("utf-8-sig", "replace"))
