"""Echo services, played by a real web server on both families of loopback."""

from __future__ import annotations

import pytest
from web_server import HANG_UP, SILENCE, reply, serving

from dnsproxy.addresses import from_text
from dnsproxy.dyndns.client import Limits
from dnsproxy.dyndns.sources import SourceError, echo

PATIENT = Limits(5.0, 5.0)
ADDRESS = from_text("93.184.216.34")


def mirror(seen):
    return reply(200, f"{seen.peer}\n")


@pytest.mark.parametrize(("length", "address"), [(4, "127.0.0.1"), (16, "::1")])
async def test_the_family_is_forced_on_the_socket(ca, length, address):
    async with serving(mirror, ca.context, ("127.0.0.1", "::1")) as web:
        url = f"https://localhost:{web.port}/"
        assert await echo.ask(url, length, PATIENT, ca.cafile) == from_text(address)


async def test_a_service_without_this_family_is_not_asked_over_the_other(ca):
    async with serving(mirror, ca.context, ("127.0.0.1",)) as web:
        with pytest.raises(SourceError):
            await echo.ask(f"https://localhost:{web.port}/", 16, PATIENT, ca.cafile)
    assert web.connections == 0


@pytest.mark.parametrize("body", ["93.184.216.34", " 93.184.216.34\r\n", "\ufeff93.184.216.34\n"])
async def test_blanks_around_the_address_do_not_matter(body):
    async with serving(reply(200, body)) as web:
        assert await echo.ask(f"http://127.0.0.1:{web.port}/", 4, PATIENT) == ADDRESS


@pytest.mark.parametrize(
    "answer",
    [
        reply(200, "<html>Your address is 93.184.216.34</html>"),
        reply(200, "93.184.216.34 8.8.8.8"),
        reply(200, "093.184.216.34"),
        reply(200, "93.184.216"),
        reply(200, "fe80::1%eth0"),
        reply(200, ""),
        reply(200, b"\xff\xfe"),
        reply(200, "93.184.216.34" + " " * 70000 + "8.8.8.8"),
        reply(403, "93.184.216.34"),
        reply(429, "93.184.216.34"),
        reply(503, "93.184.216.34"),
        reply(302, "93.184.216.34", Location="/elsewhere"),
        HANG_UP,
    ],
)
async def test_what_is_no_answer(answer):
    async with serving(answer) as web:
        with pytest.raises(SourceError) as error:
            await echo.ask(f"http://127.0.0.1:{web.port}/", 4, PATIENT)
    assert len(str(error.value)) < 150
    assert str(error.value).isprintable()


async def test_the_sentence_says_what_happened(ca):
    async with serving(reply(503)) as web:
        with pytest.raises(SourceError, match="HTTP 503"):
            await echo.ask(f"http://127.0.0.1:{web.port}/", 4, PATIENT)
        web.answers = SILENCE
        with pytest.raises(SourceError, match=r"within 0\.2 s"):
            await echo.ask(f"http://127.0.0.1:{web.port}/", 4, Limits(5.0, 0.2))
    with pytest.raises(SourceError, match="no connection"):
        await echo.ask(f"http://127.0.0.1:{web.port}/", 4, PATIENT)
