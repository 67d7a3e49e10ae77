"""One update of a host name over dyndns2, and what its answer means.

    GET /nic/update?hostname=www.example.de&myip=192.0.2.1,2001:db8::1
    Authorization: Basic ...

STRATO, and every other provider that speaks the protocol of dyndns.org. The answer is a word at the start of
a line; error words come with HTTP 200, too, so the word decides wherever there is one, except that nothing
but a 2xx can be a success. The word is compared whole: "Goodbye" is no `good`.

The credentials are in a header made of UTF-8 octets and nowhere else, and what a server sends back of them
is struck out.
"""

from __future__ import annotations

import time
from base64 import b64encode
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from html import escape
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, quote_plus

from dnsproxy.addresses import from_text
from dnsproxy.dyndns.client import Failure, Limits, Question, Response, Trouble, fetch
from dnsproxy.dyndns.outcomes import Code, Reply, Request, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS: Final = {
    code.value: code
    for code in (
        Code.GOOD, Code.NOCHG, Code.BADAUTH, Code.DONATOR, Code.YOURS, Code.ACTIVE, Code.NOTFQDN, Code.NOHOST,
        Code.NUMHOST, Code.BADSYS, Code.BADAGENT, Code.ABUSE, Code.DNSERR, Code.NINE_ONE_ONE,
    )
}  # fmt: skip
_SUCCESS: Final = (Code.GOOD, Code.NOCHG)
_STATUS: Final = {
    401: Code.BADAUTH, 403: Code.BADAUTH, 404: Code.NO_SERVICE, 405: Code.NO_SERVICE, 410: Code.NO_SERVICE,
    429: Code.TOO_MANY,
}  # fmt: skip
_TROUBLE: Final = {
    Trouble.TLS: Code.TLS,
    Trouble.NETWORK: Code.NETWORK,
    Trouble.TIMEOUT: Code.TIMEOUT,
    Trouble.GARBLED: Code.UNKNOWN,
}
LIMITS: Final = Limits(connect=10.0, total=30.0)
_IGNORED: Final = from_text("127.0.0.1")
_LONGEST: Final = 10**9  # seconds that a Retry-After can mean


@dataclass(frozen=True, slots=True)
class Provider:
    """The way to the providers; `cafile` replaces the system's store of certificates."""

    limits: Limits = LIMITS
    cafile: str | None = None

    async def publish(self, request: Request) -> Reply:
        """Send one update, once. Whatever happens is a Reply; ValueError for what must never be sent."""
        answer = await fetch(question(request), self.limits, self.cafile)
        if isinstance(answer, Failure):
            return Reply(_TROUBLE[answer.trouble], answer.reason)
        return understood(answer, request, time.time())


def question(request: Request) -> Question:
    """Return the request as HTTP.

    The whole set goes out, IPv4 first. Without an address the server would take the one that it sees, and
    without TLS anybody could read the password: both are errors of the caller.
    """
    lengths = [len(address) for address in request.addresses]
    if not request.endpoint.startswith("https://"):
        raise ValueError("an update goes over https:// alone")
    if lengths not in ([4], [16], [4, 16]):
        raise ValueError("an update has an IPv4 address, an IPv6 address, or both in this order")
    query = f"hostname={quote(request.hostname, safe='')}&myip={quote(request.myip, safe=',:')}"
    return Question(f"{request.endpoint}?{query}", headers={"Authorization": f"Basic {_basic(request)}"})


def _basic(request: Request) -> str:
    return b64encode(request.username.encode() + b":" + request.password.reveal()).decode()


# --- the answer


def understood(response: Response, request: Request, wall: float) -> Reply:
    """Return what a response means; `wall` is the time of day, for a Retry-After that is a date."""
    body = response.body.decode("utf-8-sig", "replace")
    text = printable(_struck(body, request)) or "an empty answer"
    status = f"HTTP {response.status}: " if response.status != 200 else ""
    code, stored = _word(body, request) if response.whole else (None, ())
    if 300 <= response.status < 400 or (code in _SUCCESS and not 200 <= response.status < 300):
        code = None
    reply = Reply(
        code or _by_status(response.status),
        printable(status + text),
        retry_after(response.headers.get("Retry-After"), wall),
    )
    return replace(reply, stored=stored) if code in _SUCCESS else reply


def _by_status(status: int) -> Code:
    if 300 <= status < 400:
        return Code.REDIRECT
    return Code.SERVER_ERROR if 500 <= status < 600 else _STATUS.get(status, Code.UNKNOWN)


def _word(body: str, request: Request) -> tuple[Code | None, tuple[bytes, ...]]:
    """Return the word of an answer and the addresses behind it; None if any line is something else.

    One host name takes one line. Should there be more, the answer is as good as the worst of them.
    """
    lines = [line.split() for line in body.splitlines() if line.strip()]
    codes = [WORDS.get(words[0].lower()) for words in lines]
    if not codes or None in codes:
        return None, ()
    stored = tuple(_addresses(word for words in lines for word in words[1:]))
    bad = next((code for code in codes if code not in _SUCCESS), None)
    code = bad or (Code.GOOD if Code.GOOD in codes else Code.NOCHG)
    if code is Code.GOOD and _IGNORED in stored and _IGNORED not in request.addresses:
        code = Code.BADAGENT  # how a server says that it has ignored the request
    return code, stored


def _addresses(words: Iterator[str]) -> Iterator[bytes]:
    for part in (part for word in words for part in word.split(",")):
        try:
            ip_address(part)
        except ValueError:
            continue
        yield from_text(part)


def _struck(text: str, request: Request) -> str:
    """Return the text without the password and what the header made of it, longest forms first."""
    password = request.password.reveal()
    plain = password.decode("utf-8", "replace")
    forms = {
        plain, quote(password), quote(password, safe=""), quote_plus(password), escape(plain),
        b64encode(password).decode(), _basic(request),
    }  # fmt: skip
    for form in sorted(filter(None, forms), key=len, reverse=True):
        text = text.replace(form, "***")
    return text


def retry_after(value: str | None, wall: float) -> float | None:
    """Return the seconds that a Retry-After asks for (RFC 9110 section 10.2.3); None: none that counts."""
    value = (value or "").strip()
    if value.isascii() and value.isdecimal():
        return float(min(int(value[:20]), _LONGEST))
    try:
        asked = parsedate_to_datetime(value).timestamp() - wall
    except (ValueError, TypeError, OverflowError):
        return None
    return min(asked, float(_LONGEST)) if asked > 0 else None
