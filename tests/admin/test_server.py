"""Where the API is listened for: who gets in, and whose socket it is."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from admin_world import World

from dnsproxy.admin import server
from dnsproxy.errors import DocumentError, NetworkError

TOKEN = b"0123456789abcdef"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def get(url: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        if answer.status >= 400 and answer.status != 503:
            assert set(await answer.json()) == {"error"}
        return answer.status


# -- the unix socket ------------------------------------------------------------------------------------


async def test_the_socket_is_for_owner_and_group_in_a_folder_of_its_own(tmp_path):
    path = tmp_path / "run" / "dnsproxy" / "admin.sock"
    async with server.serve(World().state, path=path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert [each.name for each in path.parent.iterdir()] == ["admin.sock"]
    assert not path.exists()


def test_a_socket_that_nobody_answers_on_is_replaced(tmp_path):
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server.open_socket(path).close()


def test_a_socket_that_somebody_answers_on_is_not_unless_it_is_taken_over(tmp_path):
    path = tmp_path / "admin.sock"
    with server.open_socket(path) as first:
        first.listen()
        with pytest.raises(NetworkError, match="another process answers on"):
            server.open_socket(path)
        with server.open_socket(path, replace=True) as second, socket.socket(socket.AF_UNIX) as client:
            second.listen()
            client.connect(str(path))
            second.accept()[0].close()


async def test_who_was_replaced_leaves_the_path_to_its_successor(tmp_path):
    path = tmp_path / "admin.sock"
    async with server.serve(World().state, path=path):
        second = server.open_socket(path, replace=True)
    assert path.exists()
    second.close()


def test_what_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "admin.sock"
    path.write_text("precious")
    for replace in (False, True):
        with pytest.raises(NetworkError, match="is there and no socket"):
            server.open_socket(path, replace=replace)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["x" * 120, "file/admin.sock"])
def test_a_path_that_no_socket_can_have_is_said(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(NetworkError, match=r"cannot make the admin socket .*see admin\.socket"):
        server.open_socket(tmp_path / name)


@contextmanager
def somebody(user: int, group: int):
    """Be another user for a while, with no other groups."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")
def test_only_owner_and_group_may_connect():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "admin.sock"
        with server.open_socket(path) as listening:
            listening.listen()
            os.chown(path, 0, 4711)
            with (
                socket.socket(socket.AF_UNIX) as client,
                somebody(65534, 65534),
                pytest.raises(PermissionError),
            ):
                client.connect(str(path))
            with socket.socket(socket.AF_UNIX) as client, somebody(65534, 4711):
                client.connect(str(path))


# -- loopback ports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.1", "::"])
def test_only_loopback_is_listened_on(address):
    with pytest.raises(NetworkError, match="no loopback address"):
        server.open_port(address, 0)


def test_a_port_that_is_taken_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NetworkError, match=f"cannot listen on 127.0.0.1 port {port}.*in use"):
            server.open_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer " + TOKEN.decode()}, 200),
        ({"Authorization": "bearer " + TOKEN.decode()}, 200),
        ({"Authorization": "Bearer " + TOKEN.decode()[:-1]}, 401),
        ({"Authorization": "Bearer gr\xfcn"}, 401),
        ({"Authorization": "Basic " + TOKEN.decode()}, 401),
        ({"Authorization": "Bearer " + TOKEN.decode(), "Host": "rebound.example.com"}, 403),
        ({"Authorization": "Bearer " + TOKEN.decode(), "Origin": "http://rebound.example.com"}, 403),
        ({"Authorization": "Bearer " + TOKEN.decode(), "Origin": "null"}, 403),
    ],
)
async def test_over_tcp_a_token_is_needed_and_no_web_page_gets_in(headers, status):
    port = free_port()
    async with server.serve(World().state, listen=("127.0.0.1", port), token=TOKEN):
        assert await get(f"http://127.0.0.1:{port}/v1/status", **headers) == status
        assert await get(f"http://127.0.0.1:{port}/livez", **headers) == status


async def test_a_port_without_a_token_is_not_opened():
    with pytest.raises(ValueError, match="a port without a token"):
        async with server.serve(World().state, listen=("127.0.0.1", free_port())):
            pass


async def test_metrics_and_health_need_no_token_and_are_all_there_is():
    port = free_port()
    async with server.serve(World().state, metrics=("127.0.0.1", port)):
        base = f"http://localhost:{port}"
        assert await get(f"{base}/metrics") == 200
        assert await get(f"{base}/livez") == 200
        assert await get(f"{base}/readyz") == 503
        assert await get(f"{base}/v1/status") == 404
        assert await get(f"{base}/metrics", Host="rebound.example.com") == 403


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:9353", True),
        ("LocalHost:9353", True),
        ("[::1]:9353", True),
        ("[::1]", True),
        ("192.0.2.1", False),
        ("localhost.example.com", False),
        ("localhost:9353.example.com", False),
        ("[::1].example.com", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_which_hosts_are_here(host, here):
    assert server._is_here(host) is here


async def test_who_is_silent_keeps_nobody_out(monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    port = free_port()
    async with server.serve(World().state, metrics=("127.0.0.1", port)), aiohttp.ClientSession() as session:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        async with session.get(f"http://127.0.0.1:{port}/livez") as answer:
            assert answer.status == 200
        reader, writer = silent[0]
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, writer in silent:
            writer.close()
            with suppress(ConnectionResetError):
                await writer.wait_closed()


async def test_one_connection_too_many_is_closed_at_once_while_the_others_are_busy(monkeypatch, tmp_path):
    monkeypatch.setattr(server, "CONNECTIONS", 1)
    path = tmp_path / "admin.sock"
    async with (
        server.serve(World().state, path=path),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.get("http://d/v1/events") as stream,
    ):
        assert stream.status == 200
        reader, writer = await asyncio.open_unix_connection(str(path))
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        await writer.wait_closed()


async def test_what_is_no_http_is_answered_and_fills_no_log(caplog):
    port = free_port()
    secret = b"secret-secret-secret"
    async with server.serve(World().state, listen=("127.0.0.1", port), token=TOKEN):
        for bad in (
            b"Authorization: Bearer " + secret + b"\x00",
            b"X" * 10_000 + b": " + secret,
            b"no colon",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + bad + b"\r\n\r\n")
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 10)
            writer.close()
            await writer.wait_closed()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert secret.decode() not in caplog.text


def test_a_fault_of_ours_is_still_logged(caplog):
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        server.log.exception("Unhandled exception")
    assert "broken" in caplog.text


# -- the token ------------------------------------------------------------------------------------------


def test_a_token_is_one_line_that_others_cannot_read(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o640)
    assert server.read_token(file) == TOKEN


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (b"short", 0o600, "holds no token: one line, 16 characters or more"),
        (b"", 0o600, "holds no token"),
        (TOKEN + b"\n" + TOKEN, 0o600, "holds no token"),
        (TOKEN + b" x", 0o600, "holds no token"),
        ("grüngrüngrüngrün".encode(), 0o600, "holds no token"),
        (b"\xff" * 20, 0o600, "cannot be read: it is not text"),
        (TOKEN, 0o604, "can be read or written by every user of this host; chmod 600 it"),
    ],
)
def test_a_token_file_that_will_not_do_is_a_fault_and_never_shown(tmp_path, text, mode, message):
    file = tmp_path / "token"
    file.write_bytes(text)
    file.chmod(mode)
    with pytest.raises(DocumentError, match=message) as caught:
        server.read_token(file)
    assert TOKEN.decode() not in str(caught.value)


def test_a_token_file_that_is_not_there(tmp_path):
    with pytest.raises(DocumentError, match="cannot be read: No such file or directory; make one with"):
        server.read_token(tmp_path / "token")
