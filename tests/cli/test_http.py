"""The few lines of HTTP, against whatever may come over the socket."""

from __future__ import annotations

import io
import threading

import pytest
from fake_daemon import deaf

from dnsproxy.cli.http import HEADERS, HttpError, Response, asked, escaped

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def response(octets: bytes) -> Response:
    return Response(io.BytesIO(octets))


def test_a_body_has_its_length_or_comes_in_chunks():
    assert response(HEAD + b"content-LENGTH: 3\r\n\r\nabcdef").read() == b"abc"
    assert response(CHUNKED + b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n").read() == b"abc0123456789"


def test_lines_may_be_cut_anywhere():
    found = response(CHUNKED + b"3\r\na\nb\r\n4\r\nc\n\nd\r\n0\r\n\r\n")
    assert list(found.lines()) == [b"a", b"bc", b"", b"d"]


def test_status_and_reason():
    found = response(b"HTTP/1.0 404 Not Found\r\n\r\n")
    assert (found.status, found.reason) == (404, "Not Found")


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"220 mail\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK",
        HEAD,
        HEAD + b"no colon\r\n\r\n",
        HEAD + b"A: b\r\n" * HEADERS + b"\r\n",
        HEAD + b"A: " + b"b" * 100_000 + b"\r\n\r\n",
        HEAD + b"\r\nabc",
        HEAD + b"Content-Length: 4\r\n\r\nabc",
        HEAD + b"Content-Length: -1\r\n\r\nabc",
        CHUNKED,
        CHUNKED + b"3\r\nabc\r\n",
        CHUNKED + b"3\r\nab",
        CHUNKED + b"3\r\nabcde0\r\n\r\n",
        CHUNKED + b"x\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_whole_answer_is_an_error(octets):
    with pytest.raises(HttpError):
        response(octets).read()


def test_what_is_asked_goes_out_as_it_should(tmp_path):
    said = []
    with deaf(tmp_path / "x") as listener:

        def answer():
            with listener.accept()[0] as peer:
                said.append(peer.recv(1000))
                peer.send(HEAD + b"Content-Length: 2\r\n\r\nok")

        thread = threading.Thread(target=answer)
        thread.start()
        with asked(tmp_path / "x", "GET", "/v1/x?a=b", 10.0) as found:
            assert found.read() == b"ok"
        thread.join()
    lines = said[0].split(b"\r\n")
    assert lines[0] == b"GET /v1/x?a=b HTTP/1.1"
    assert b"Connection: close" in lines
    assert lines[-2:] == [b"", b""]


def test_what_means_something_in_a_target_is_escaped():
    assert escaped("*.a&b/c d\n\u00e4~") == "%2A.a%26b%2Fc%20d%0A%C3%A4~"
