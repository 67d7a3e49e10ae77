"""One HTTP request against real servers: what is sent, what is not, and what each failure is called."""

from __future__ import annotations

import asyncio

import pytest
from web_server import HANG_UP, SILENCE, authority, reply, serving

from dnsproxy.dyndns.client import AGENT, LIMIT, Failure, Limits, Question, Response, Trouble, fetch

PATIENT = Limits(5.0, 5.0)


async def test_a_response_has_status_headers_and_body(ca):
    async with serving(reply(418, "tea", Retry_After="7"), ca.context) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/a?b=c,d:e"), PATIENT, ca.cafile)
    assert isinstance(answer, Response)
    assert (answer.status, answer.body, answer.headers["retry-after"]) == (418, b"tea", "7")
    assert (web.seen[0].method, web.seen[0].target) == ("GET", "/a?b=c,d:e")
    assert web.seen[0].headers["user-agent"] == AGENT


async def test_the_certificate_is_verified_against_the_systems_store(ca):
    async with serving(reply(200), ca.context) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/"), PATIENT)
    assert isinstance(answer, Failure)
    assert answer.trouble is Trouble.TLS
    assert not web.seen


async def test_the_certificate_must_fit_the_name(ca, tmp_path):
    async with serving(reply(200), ca.context) as web:
        answer = await fetch(Question(f"https://127.0.0.2:{web.port}/"), PATIENT, ca.cafile)
        assert isinstance(answer, Failure)
        assert answer.trouble is Trouble.NETWORK  # nobody there: the server is bound to 127.0.0.1
    async with serving(reply(200), ca.context, hosts=("127.0.0.2",)) as web:
        answer = await fetch(Question(f"https://127.0.0.2:{web.port}/"), PATIENT, ca.cafile)
        assert isinstance(answer, Failure)
        assert answer.trouble is Trouble.TLS
        assert not web.seen


async def test_a_certificate_of_another_authority_is_not_trusted(ca, tmp_path):
    other = authority(tmp_path)
    async with serving(reply(200), other.context) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/"), PATIENT, ca.cafile)
    assert (answer.trouble, web.seen) == (Trouble.TLS, [])


async def test_a_store_that_is_not_there_is_a_failure_too(tmp_path):
    answer = await fetch(Question("https://localhost:1/"), PATIENT, str(tmp_path / "none.pem"))
    assert isinstance(answer, Failure)


async def test_tls_is_not_left_out_where_a_server_speaks_plain_http(ca):
    async with serving(reply(400), raw=True) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/secret"), PATIENT, ca.cafile)
    assert (answer.trouble, len(web.seen)) == (Trouble.TLS, 1)
    assert b"secret" not in web.seen[0].body


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(ca, status):
    async with serving(reply(200, "elsewhere")) as other:
        target = f"http://127.0.0.1:{other.port}/"
        async with serving(reply(status, Location=target), ca.context) as web:
            answer = await fetch(Question(f"https://localhost:{web.port}/"), PATIENT, ca.cafile)
    assert (answer.status, len(web.seen), other.connections) == (status, 1, 0)


async def test_the_proxy_of_the_environment_is_not_used(ca, monkeypatch):
    async with serving(reply(200, "proxied")) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        async with serving(reply(200, "direct"), ca.context) as web:
            answer = await fetch(Question(f"https://localhost:{web.port}/"), PATIENT, ca.cafile)
    assert (answer.body, proxy.connections) == (b"direct", 0)


async def test_a_hang_up_is_not_answered_with_a_second_request(ca):
    async with serving(HANG_UP, ca.context) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/"), PATIENT, ca.cafile)
    assert (answer.trouble, len(web.seen), web.connections) == (Trouble.NETWORK, 1, 1)


async def test_half_a_body_is_no_response(ca):
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ngood", ca.context) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/"), PATIENT, ca.cafile)
    assert (answer.trouble, len(web.seen)) == (Trouble.NETWORK, 1)


async def test_silence_ends(ca):
    async with serving(SILENCE, ca.context) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/"), Limits(5.0, 0.3), ca.cafile)
    assert answer.trouble is Trouble.TIMEOUT


async def test_a_handshake_without_an_end_ends(ca):
    async with serving(SILENCE, raw=True) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/"), Limits(0.1, 5.0), ca.cafile)
    assert answer.trouble is Trouble.NETWORK


async def test_nobody_there(ca):
    async with serving() as web:
        port = web.port
    answer = await fetch(Question(f"https://localhost:{port}/"), PATIENT, ca.cafile)
    assert answer.trouble is Trouble.NETWORK


async def test_a_name_that_does_not_exist(ca):
    answer = await fetch(Question("https://nothing.invalid/"), PATIENT, ca.cafile)
    assert answer.trouble is Trouble.NETWORK
    assert "resolved" in answer.reason


@pytest.mark.parametrize("octets", [b"SSH-2.0-OpenSSH\r\n", b"good\r\n\r\n", b"HTTP/1.1 2x0 no\r\n\r\n"])
async def test_what_is_no_http(ca, octets):
    async with serving(octets, ca.context) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/"), PATIENT, ca.cafile)
    assert (answer.trouble, len(web.seen)) == (Trouble.GARBLED, 1)


async def test_a_body_is_read_up_to_a_limit(ca):
    endless = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 4 * LIMIT
    async with serving(endless, ca.context) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/"), PATIENT, ca.cafile)
    assert len(answer.body) == LIMIT


async def test_a_compressed_body_stays_as_it_is(ca):
    async with serving(reply(200, b"\x1f\x8bnonsense", Content_Encoding="gzip"), ca.context) as web:
        answer = await fetch(Question(f"https://localhost:{web.port}/"), PATIENT, ca.cafile)
    assert answer.body == b"\x1f\x8bnonsense"
    assert web.seen[0].headers["accept-encoding"] == "identity"


async def test_a_request_can_be_cancelled(ca):
    async with serving(SILENCE, ca.context) as web:
        asked = asyncio.ensure_future(fetch(Question(f"https://localhost:{web.port}/"), PATIENT, ca.cafile))
        await web.arrived.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
