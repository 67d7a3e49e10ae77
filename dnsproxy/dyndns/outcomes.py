"""What the parts of DynDNS tell each other: what is looked for and found, what is sent and answered.

Addresses are packed (addresses.py), IPv4 before IPv6 wherever there are both. An outcome has a name: an
address that is known, one that could not be found out this time, and one that is none of our business are
three things; a provider that took an update, refused it, is in trouble, or was not heard are four.

`detect.py` turns a Search into a Found, `strato.py` a Request into a Reply; neither raises for anything that
the world does (`find(search) -> Found`, `publish(request) -> Reply`, both awaited, both cancellable).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, TypeAlias

from dnsproxy.addresses import to_text

if TYPE_CHECKING:
    from dnsproxy.addresses import Network

TEXT_KEPT: Final = 200  # characters of foreign text in status, events and logs


class Password:
    """A password that no text, log, traceback or pickle shows. `reveal` is for the request alone."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        """Return the password's octets."""
        return self._value

    def fingerprint(self, salt: str) -> str:
        """Return a few octets in hex that tell this password from the next one, and from little else.

        Four octets are too few to confirm a guess among many, and enough to notice a change.
        """
        return blake2b(self._value, digest_size=4, key=blake2b(salt.encode()).digest()).hexdigest()

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Password) and compare_digest(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]  # no key of anything

    def __repr__(self) -> str:
        return "Password(...)"

    def __reduce__(self) -> str:
        raise TypeError("a password is not pickled")


# --- finding addresses

# https://... (an echo service), dns:opendns, dns:cloudflare, fritzbox, igd (both may have :HOST),
# interface:NAME, file:/PATH
SOURCE: Final = re.compile(
    r"https?://[^\s@]+|dns:(?:opendns|cloudflare)|(?:fritzbox|igd)(?::[^\s/@]+)?"
    r"|interface:[^\s/:]{1,15}|file:/.+"
).fullmatch


@dataclass(frozen=True, slots=True)
class Wanted:
    """How the address of one family is to be found.

    `sources` are texts that fit `SOURCE`, empty for the built-in ones; `suffix` are the host bits
    that replace those behind `prefix_length` bits of what is found, None for none. `known` is the address
    that was accepted last: one answer confirms it, while a change needs as many as the quorum says.
    """

    sources: tuple[str, ...] = ()
    suffix: bytes | None = None
    prefix_length: int = 64
    known: bytes | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """What is to be found, a family that is None being not managed. `allow`: published though not public."""

    ipv4: Wanted | None
    ipv6: Wanted | None
    quorum: int = 2
    allow: tuple[Network, ...] = ()


class Why(Enum):
    """Why an address is unavailable; the values are the reasons of events."""

    FAILED = "RetrieveExternalIpFailed"  # no source answered
    DISAGREE = "IpSourcesDisagree"  # no quorum
    REJECTED = "IpAddressRejected"  # an address, but none to publish (private, CGNAT, ...)


@dataclass(frozen=True, slots=True)
class Known:
    """An address, and the names of the sources that said so."""

    address: bytes
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No address this time; `reason` is a sentence to a person, with the source and a hint."""

    why: Why
    reason: str


@dataclass(frozen=True, slots=True)
class NotManaged:
    """A family that is none of our business."""


Finding: TypeAlias = Known | Unavailable | NotManaged


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found. `cgnat`: IPv4 arrives at the carrier's address, not here."""

    ipv4: Finding
    ipv6: Finding
    cgnat: bool = False


# --- one update


@dataclass(frozen=True, slots=True)
class Request:
    """One update: the whole set of addresses of one host name, never a part of it."""

    endpoint: str  # https://dyndns.strato.com/nic/update
    hostname: str  # A-labels, without a final dot
    username: str
    password: Password = field(repr=False, compare=False)
    addresses: tuple[bytes, ...]

    @property
    def myip(self) -> str:
        """The addresses as the protocol wants them: `v4,v6`."""
        return ",".join(map(to_text, self.addresses))


class Code(Enum):
    """What came of a request: a word of the protocol, or what happened instead. Values are for people.

    HTTP 401 and 403 without a word are BADAUTH; `good 127.0.0.1` that nobody asked for is BADAGENT.
    """

    GOOD = "good"
    NOCHG = "nochg"
    BADAUTH = "badauth"
    DONATOR = "!donator"
    YOURS = "!yours"
    ACTIVE = "!active"
    NOTFQDN = "notfqdn"
    NOHOST = "nohost"
    NUMHOST = "numhost"
    BADSYS = "badsys"
    BADAGENT = "badagent"
    ABUSE = "abuse"
    DNSERR = "dnserr"
    NINE_ONE_ONE = "911"
    TOO_MANY = "http-429"
    SERVER_ERROR = "http-5xx"
    NO_SERVICE = "http-404"  # or 405, 410: no such service there
    REDIRECT = "http-3xx"  # not followed
    UNKNOWN = "unknown"  # another word, nothing, HTML, another HTTP status
    TIMEOUT = "timeout"  # the server may have acted
    NETWORK = "network"  # no name, no route, refused, broken off: whether it was heard is not known either
    TLS = "tls"  # no certificate that is to be trusted: nothing was sent


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a request.

    `text` is what was answered, or a sentence about what happened: `printable`, and never the password.
    `retry_after`: seconds the server asked us to wait, from now. `stored`: the addresses that a `good` or
    `nochg` listed, in their order.
    """

    code: Code
    text: str = ""
    retry_after: float | None = None
    stored: tuple[bytes, ...] = ()


def printable(text: str) -> str:
    """Return foreign text as one line without control characters, cut to what is kept."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text[: TEXT_KEPT * 8]).split())
    return line if len(line) <= TEXT_KEPT else line[: TEXT_KEPT - 3] + "..."
