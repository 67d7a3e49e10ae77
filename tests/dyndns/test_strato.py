"""Updates against a real HTTPS server that plays STRATO, and the meaning of every answer."""

from __future__ import annotations

import asyncio
import base64
import logging
import traceback
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_server import HANG_UP, SILENCE, reply, serving

from dnsproxy.addresses import from_text
from dnsproxy.dyndns.client import LIMIT, Limits, Response
from dnsproxy.dyndns.outcomes import TEXT_KEPT, Code, Password, Request
from dnsproxy.dyndns.strato import LIMITS, WORDS, Provider, question, retry_after, understood

V4, V6 = "93.184.216.34", "2a01:238:1::1"
BOTH = (from_text(V4), from_text(V6))
SECRET = "Pä:ss/w@rd#?%&=+ ß'\"<"


def request(endpoint="https://localhost/nic/update", addresses=BOTH, password=SECRET, **more):
    more = {"hostname": "www.example.de", "username": "example.de"} | more
    return Request(endpoint, password=Password(password.encode()), addresses=addresses, **more)


def means(body, status=200, headers=None, **more):
    octets = body if isinstance(body, bytes) else body.encode()
    return understood(Response(status, headers or {}, octets), request(**more), wall=0.0)


async def publish(web, ca, limits=LIMITS, **more):
    endpoint = f"https://localhost:{web.port}/nic/update"
    return await Provider(limits, ca.cafile).publish(request(endpoint, **more))


# --- what is sent


async def test_one_get_with_host_both_addresses_and_credentials_in_a_header(ca):
    async with serving(reply(200, f"good {V4} {V6}\r\n"), ca.context) as web:
        answer = await publish(web, ca)
    [seen] = web.seen
    assert (answer.code, answer.stored) == (Code.GOOD, BOTH)
    assert (seen.method, seen.target) == (
        "GET",
        f"/nic/update?hostname=www.example.de&myip={V4},{V6}",
    )
    kind, _, credentials = seen.headers["authorization"].partition(" ")
    assert (kind, base64.b64decode(credentials).decode()) == ("Basic", f"example.de:{SECRET}")
    assert seen.headers["user-agent"].startswith("dnsproxy-dyndns/")
    assert "cookie" not in seen.headers


@pytest.mark.parametrize(
    "password", ["ä", "#", "a b", "%41", "/", "?", "'", "x" * 500, "日本", "a:b", "\x7f"]
)
async def test_any_password_arrives_as_it_is(ca, password):
    async with serving(reply(200, "nochg"), ca.context) as web:
        await publish(web, ca, password=password)
    sent = base64.b64decode(web.seen[0].headers["authorization"].removeprefix("Basic "))
    assert sent == f"example.de:{password}".encode()


def test_octets_that_are_no_utf8_are_sent_as_they_are():
    odd = Request("https://localhost/", "www.example.de", "u", Password(b"\xff\xfe"), BOTH)
    header = question(odd).headers["Authorization"]
    assert base64.b64decode(header.removeprefix("Basic ")) == b"u:\xff\xfe"


@pytest.mark.parametrize(
    ("addresses", "myip"), [((V4,), V4), ((V6,), V6), (("2A01:0238:1:0::1",), V6), ((V4, V6), f"{V4},{V6}")]
)
async def test_addresses_are_canonical_and_ipv4_is_first(ca, addresses, myip):
    async with serving(reply(200, "good"), ca.context) as web:
        await publish(web, ca, addresses=tuple(map(from_text, addresses)))
    assert web.seen[0].query["myip"] == myip


@pytest.mark.parametrize("addresses", [(), BOTH[::-1], (BOTH[0], BOTH[0]), (b"",)])
def test_an_update_without_the_whole_set_in_order_is_not_made(addresses):
    with pytest.raises(ValueError, match="IPv4"):
        question(request(addresses=addresses))


def test_an_update_without_tls_is_not_made():
    with pytest.raises(ValueError, match="https"):
        question(request("http://localhost/nic/update"))


@given(st.text(min_size=1), st.text())
def test_neither_address_nor_repr_of_a_request_holds_the_password(hostname, password):
    password = "s3cret" + password.encode(errors="replace").decode()
    made = request(hostname=hostname.encode(errors="replace").decode(), password=password)
    asked = question(made)
    form = asked.headers["Authorization"].removeprefix("Basic ")
    for text in (asked.url, repr(asked), repr(made), str(made.password)):
        assert "s3cret" not in text
        assert form not in text
    assert asked.url.isascii()
    assert asked.url.count("&") == asked.url.count("?") == 1


# --- what an answer means


@pytest.mark.parametrize("word", sorted(WORDS))
async def test_every_word_is_an_outcome_of_its_own(ca, word):
    async with serving(reply(200, f"{word} 2.209.1.1\n"), ca.context) as web:
        answer = await publish(web, ca)
    assert answer.code is Code(word)
    assert answer.text == f"{word} 2.209.1.1"
    assert len(web.seen) == 1


def test_all_words_of_the_protocol_are_known():
    assert set(WORDS) == {
        "good", "nochg", "badauth", "!donator", "!yours", "!active", "notfqdn", "nohost", "numhost", "badsys",
        "badagent", "abuse", "dnserr", "911",
    }  # fmt: skip


@pytest.mark.parametrize(
    "body", ["GOOD", " good ", "\ufeffgood 1.2.3.4", "good\r\n\r\n", "\r\n\n  Good\t93.184.216.34\r\n"]
)
def test_case_blanks_line_ends_and_a_mark_of_byte_order_do_not_matter(body):
    assert means(body).code is Code.GOOD


@pytest.mark.parametrize(
    "body",
    [
        "",
        " \r\n",
        "Goodbye",
        "goodness",
        "no good",
        "good.",
        "not good 1.2.3.4",
        "nochg,good",
        "<html>good</html>",
        "<!DOCTYPE html>\n<title>Login</title>\n good ",
        "good 1.2.3.4\n<html>",
        "error: good",
        '{"good": true}',
        "badauth!",
        "\uff47\uff4f\uff4f\uff44",
        "good".encode("utf-16"),
        b"\xff\x00\xfe",
        "good" + "\n" * LIMIT,
    ],
)
def test_success_is_not_found_inside_anything_else(body):
    assert means(body).code is Code.UNKNOWN


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("good 93.184.216.34\ngood 2a01:238:1::1", Code.GOOD),
        ("nochg\ngood", Code.GOOD),
        ("nochg\nnochg", Code.NOCHG),
        ("good\nabuse", Code.ABUSE),
        ("badauth\ngood", Code.BADAUTH),
        ("good\nwhatever", Code.UNKNOWN),
    ],
)
def test_several_lines_are_as_good_as_the_worst(body, code):
    assert means(body).code is code


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        ("good", ()),
        (f"good {V4}", (V4,)),
        (f"nochg {V4},{V6}", (V4, V6)),
        ("good 8.8.8.8", ("8.8.8.8",)),
        (f"good {V6.upper()} and so on 1.2.3 01.2.3.4", (V6,)),
    ],
)
def test_what_the_server_says_it_stored_is_told(body, stored):
    assert means(body).stored == tuple(map(from_text, stored))


def test_good_for_an_address_nobody_asked_for_means_that_the_agent_is_ignored():
    assert means("good 127.0.0.1").code is Code.BADAGENT
    assert means("good 127.0.0.1", addresses=(from_text("127.0.0.1"),)).code is Code.GOOD


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (200, "badauth", Code.BADAUTH),
        (201, "good", Code.GOOD),
        (401, "", Code.BADAUTH),
        (401, "<html>Unauthorized", Code.BADAUTH),
        (401, "good", Code.BADAUTH),
        (403, "abuse 1.2.3.4", Code.ABUSE),
        (403, "Forbidden", Code.BADAUTH),
        (400, "notfqdn", Code.NOTFQDN),
        (400, "", Code.UNKNOWN),
        (404, "not found", Code.NO_SERVICE),
        (405, "", Code.NO_SERVICE),
        (410, "", Code.NO_SERVICE),
        (429, "", Code.TOO_MANY),
        (429, "abuse", Code.ABUSE),
        (500, "911", Code.NINE_ONE_ONE),
        (500, "good", Code.SERVER_ERROR),
        (502, "<html>", Code.SERVER_ERROR),
        (503, "nochg", Code.SERVER_ERROR),
        (599, "", Code.SERVER_ERROR),
        (301, "good", Code.REDIRECT),
        (302, "badauth", Code.REDIRECT),
        (304, "", Code.REDIRECT),
        (418, "", Code.UNKNOWN),
    ],
)
async def test_the_word_decides_and_else_the_status(ca, status, body, code):
    async with serving(reply(status, "" if status == 304 else body), ca.context) as web:
        answer = await publish(web, ca)
    assert answer.code is code
    assert len(web.seen) == 1
    assert status in (200, 201) or str(status) in answer.text


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_redirect_takes_the_credentials_nowhere(ca, scheme):
    async with serving(reply(200, "good"), ca.context if scheme == "https" else None) as other:
        location = f"{scheme}://localhost:{other.port}/nic/update"
        async with serving(reply(302, Location=location), ca.context) as web:
            answer = await publish(web, ca)
    assert (answer.code, other.connections) == (Code.REDIRECT, 0)


async def test_a_hang_up_a_silence_and_nonsense_are_not_success(ca):
    async with serving(HANG_UP, ca.context) as web:
        assert (await publish(web, ca)).code is Code.NETWORK
        assert len(web.seen) == 1
        web.answers = b"good\r\n\r\n"
        assert (await publish(web, ca)).code is Code.UNKNOWN
        web.answers = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ngood"
        assert (await publish(web, ca)).code is Code.NETWORK
        web.answers = SILENCE
        assert (await publish(web, ca, Limits(5.0, 0.3))).code is Code.TIMEOUT


async def test_half_an_answer_is_none(ca):
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngo", ca.context) as web:
        web.lingering = True
        answer = await publish(web, ca, Limits(5.0, 0.3))
    assert answer.code is Code.TIMEOUT


async def test_without_a_trusted_certificate_nothing_is_sent(ca):
    async with serving(reply(200, "good"), ca.context) as web:
        answer = await Provider().publish(request(f"https://localhost:{web.port}/"))
    assert (answer.code, web.seen) == (Code.TLS, [])
    assert "certificate" in answer.text


def test_a_text_is_one_short_printable_line_and_never_a_format():
    answer = means("x%s%n{0}\x1b[31m\r\n\t" + "y" * LIMIT)
    assert answer.text.startswith("x%s%n{0} [31m y")
    assert len(answer.text) <= TEXT_KEPT
    assert answer.text.isprintable()
    assert means("").text == "an empty answer"


@pytest.mark.parametrize("status", [200, 401, 500])
@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        base64.b64encode(f"example.de:{SECRET}".encode()).decode(),
        base64.b64encode(SECRET.encode()).decode(),
        "P%C3%A4%3Ass%2Fw%40rd%23%3F%25%26%3D%2B%20%C3%9F%27%22%3C",
        "P%C3%A4%3Ass%2Fw%40rd%23%3F%25%26%3D%2B+%C3%9F%27%22%3C",
        "Pä:ss/w@rd#?%&amp;=+ ß&#x27;&quot;&lt;",
    ],
)
def test_what_a_server_sends_back_of_the_credentials_is_struck_out(status, form):
    text = means("x" * 150 + f" you sent {form}, which is wrong", status).text
    assert "you sent ***, which" in text


async def test_the_password_is_in_no_log_and_no_exception(ca, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().set_debug(True)
    told = []
    for answers in (HANG_UP, b"nonsense\r\n\r\n", reply(500), reply(302, Location="/x")):
        async with serving(answers, ca.context) as web:
            told.append(repr(await publish(web, ca)))
    async with serving(SILENCE, ca.context) as web:
        asked = asyncio.ensure_future(publish(web, ca))
        await web.arrived.wait()
        asked.cancel()
        try:
            await asked
        except asyncio.CancelledError as error:
            told += traceback.format_exception(error)
    asyncio.get_running_loop().set_debug(False)
    written = capfd.readouterr()
    everything = "\n".join([*told, caplog.text, written.out, written.err])
    assert everything
    for form in (SECRET, "w@rd", base64.b64encode(f"example.de:{SECRET}".encode()).decode()):
        assert form not in everything


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        ("120", 120.0),
        (" 0 ", 0.0),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("9" * 5000, 1e9),
        ("²", None),
        ("inf", None),
        ("Thu, 01 Jan 1970 01:00:00 GMT", 3600.0),
        ("Wed, 31 Dec 1969 23:00:00 GMT", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 1e9),
        ("Fri, 99 Dec 2026 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_has_bounds(value, seconds):
    assert retry_after(value, wall=0.0) == seconds


def test_retry_after_reaches_the_reply():
    date = format_datetime(datetime.fromtimestamp(600, UTC), usegmt=True)
    assert means("", 503, {"Retry-After": date}).retry_after == 600.0
    assert means("abuse", 429, {"Retry-After": "7"}).retry_after == 7.0
    assert means("good").retry_after is None


@given(st.binary(max_size=300), st.integers(100, 999), st.text(max_size=40))
def test_any_octets_are_an_outcome(body, status, header):
    answer = understood(Response(status, {"Retry-After": header}, body), request(), wall=1e9)
    success = answer.code in (Code.GOOD, Code.NOCHG)
    assert not success or (200 <= status < 300 and body.lstrip(b"\xef\xbb\xbf \r\n\t\v\f\x1c\x1d\x1e")[:1])
    assert len(answer.text) <= TEXT_KEPT
