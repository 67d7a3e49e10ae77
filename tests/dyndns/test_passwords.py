from __future__ import annotations

import os

import pytest

from dnsproxy.dyndns.documents import Missing, Place
from dnsproxy.dyndns.outcomes import Password
from dnsproxy.dyndns.passwords import MOST, Passwords


async def read(kind: str, name: object, **environment: str) -> Password | Missing:
    return await Passwords(environment).read(Place(kind, str(name)))


@pytest.mark.parametrize(
    ("octets", "password"),
    [
        (b"geheim", b"geheim"),
        (b"geheim\n", b"geheim"),
        (b" ge heim \r\n", b" ge heim "),
        (b"geheim\n\n", b"geheim\n"),
        (b"\xff\xfe", b"\xff\xfe"),
        (b"x" * (MOST - 1) + b"\n", b"x" * (MOST - 1)),
    ],
)
async def test_a_file_holds_the_password_and_perhaps_a_newline(tmp_path, octets, password):
    (tmp_path / "p").write_bytes(octets)
    assert (await read("file", tmp_path / "p")).reveal() == password


async def test_a_file_is_read_each_time(tmp_path):
    for octets in (b"one", b"two"):
        (tmp_path / "p").write_bytes(octets)
        assert await read("file", tmp_path / "p") == Password(octets)


async def test_what_is_no_password_is_missing_and_says_why(tmp_path):
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "long").write_bytes(b"geheim" * MOST)
    os.mkfifo(tmp_path / "pipe")  # that nobody writes to: it must not be waited for
    for name, why in (
        ("empty", "is empty"),
        ("long", "more than 4096 octets"),
        ("pipe", "is no file"),
        ("none", "No such file"),
        (".", "directory"),
    ):
        found = await read("file", tmp_path / name)
        assert isinstance(found, Missing), name
        assert why in found.reason
        assert str(tmp_path / name) in found.reason
        assert "geheim" not in found.reason


async def test_a_variable():
    assert await read("env", "PW", PW="gehäim\n") == Password("gehäim".encode())
    assert "PW is not set" in (await read("env", "PW")).reason
    assert "is empty" in (await read("env", "PW", PW="")).reason


async def test_a_credential(tmp_path):
    (tmp_path / "strato").write_bytes(b"geheim\n")
    folder = str(tmp_path)
    assert await read("credential", "strato", CREDENTIALS_DIRECTORY=folder) == Password(b"geheim")
    assert "No such file" in (await read("credential", "other", CREDENTIALS_DIRECTORY=folder)).reason
    assert "LoadCredential=strato" in (await read("credential", "strato")).reason
