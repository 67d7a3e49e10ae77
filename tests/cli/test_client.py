"""Asking the daemon, and every way in which that fails."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, deaf

from dnsproxy.cli import client
from dnsproxy.cli.client import DEFAULT_SOCKET, Admin, FaultsError, WrongError, connect
from dnsproxy.errors import DnsproxyError, DocumentError, NetworkError


def test_an_answer_is_its_value_and_parameters_are_escaped(daemon):
    daemon.says("GET /v1/lookups", [1, 2])
    admin = Admin(daemon.path)
    assert admin.get("/v1/lookups", matchpattern="*.a&b", endpoint=None, dry_run="true") == [1, 2]
    daemon.says("GET /v1/why/fd00%3A%3A1%2F8", {})
    assert admin.get("/v1/why", "fd00::1/8") == {}
    assert daemon.asked[0] == "GET /v1/lookups?matchpattern=%2A.a%26b&dry-run=true"


def test_lines_come_one_by_one(daemon):
    daemon.says("GET /v1/events", '{"a": 1}\n\n{"a": 2}\n')
    assert list(Admin(daemon.path).lines("/v1/events")) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("status", "body", "kind", "code", "message"),
    [
        (404, {"error": "no endpoint x"}, WrongError, 2, "no endpoint x"),
        (400, {"error": "no pattern"}, WrongError, 2, "no pattern"),
        (409, {"error": "in the way"}, DnsproxyError, 1, "in the way"),
        (
            422,
            {"error": "faults", "faults": ["a:1:2: x", "b:1:1: y"]},
            FaultsError,
            3,
            "faults:\na:1:2: x\nb:1:1: y",
        ),
        (500, "oh", DnsproxyError, 1, "the daemon answers 500 Internal Server Error, and not why"),
    ],
)
def test_a_refusal_is_an_error_with_its_sentence(daemon, status, body, kind, code, message):
    daemon.says("GET /v1/x", body, status=status)
    with pytest.raises(kind) as raised:
        Admin(daemon.path).get("/v1/x")
    assert (raised.value.exit_code, str(raised.value)) == (code, message)


def test_an_answer_that_ends_in_the_middle_is_an_error(daemon):
    daemon.says("GET /v1/x", "[\n", whole=False)
    with pytest.raises(NetworkError, match="ended in the middle"):
        Admin(daemon.path).get("/v1/x")
    daemon.says("GET /v1/events", '{"a": 1}\n', whole=False)
    with pytest.raises(NetworkError, match="ended in the middle"):
        list(Admin(daemon.path).lines("/v1/events"))


def test_where_nobody_listens_it_says_how_to_find_or_start_one(tmp_path):
    for path in (tmp_path / "none.sock", tmp_path / "left.sock"):
        if path.name == "left.sock":
            deaf(path).close()
        with pytest.raises(NetworkError, match=r"no daemon listens at .*--socket") as raised:
            Admin(path).get("/v1/status")
        assert raised.value.exit_code == 4


def test_without_rights_it_says_whose_group_to_join(monkeypatch, tmp_path):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(client.http, "asked", refused)
    with pytest.raises(DnsproxyError, match="may not be used by user") as raised:
        Admin(tmp_path / "x").get("/v1/status")
    assert raised.value.exit_code == 5


def test_somebody_who_speaks_something_else_is_told_apart(tmp_path):
    with deaf(tmp_path / "x") as listener:

        def answer():
            with listener.accept()[0] as peer:
                peer.recv(1000)
                peer.send(b"220 mail\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NetworkError, match="does not speak our HTTP"):
            Admin(tmp_path / "x").get("/v1/status")
        thread.join()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("listen: []", DEFAULT_SOCKET),
        ("admin: {socket: /x/y}", Path("/x/y")),
        ("upstream: {sockets: 4}", DEFAULT_SOCKET),
        ("# admin.socket", DEFAULT_SOCKET),
    ],
)
def test_the_socket_is_that_of_the_settings(tmp_path, text, expected):
    (tmp_path / "c.yaml").write_text(text)
    assert connect(None, tmp_path / "c.yaml").path == expected


def test_a_relative_socket_is_beside_the_settings_and_a_named_one_wins(tmp_path):
    (tmp_path / "c.yaml").write_text("admin: {socket: run/a.sock}")
    assert connect(None, tmp_path / "c.yaml").path == tmp_path / "run" / "a.sock"
    assert connect(Path("/mine"), tmp_path / "none.yaml").path == Path("/mine")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("admin: {socket: null}", NetworkError, "admin.socket is null"),
        ("socket: [", DocumentError, "it is no settings file"),
        ("- socket", DocumentError, "it is no settings file"),
    ],
)
def test_settings_without_a_socket_are_told(tmp_path, text, kind, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(kind, match=message):
        connect(None, tmp_path / "c.yaml")
    with pytest.raises(DocumentError, match="No such file"):
        connect(None, tmp_path / "none.yaml")


def test_the_fake_ends_with_its_test(tmp_path):
    with FakeDaemon(tmp_path / "a.sock") as fake:
        assert fake.find("GET", "/v1/none")[0] == 404
