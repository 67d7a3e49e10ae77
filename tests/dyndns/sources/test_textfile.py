"""Addresses in files."""

from __future__ import annotations

import os

import pytest

from dnsproxy.addresses import from_text
from dnsproxy.dyndns.sources import SourceError, textfile


@pytest.mark.parametrize(
    ("text", "length", "address"),
    [
        ("93.184.216.34\n", 4, "93.184.216.34"),
        ("93.184.216.34", 4, "93.184.216.34"),
        ("\ufeff93.184.216.34\r\n2A01:238:1::1\r\n", 16, "2a01:238:1::1"),
        ("2a01:238:1::1 93.184.216.34\n93.184.216.34", 4, "93.184.216.34"),
    ],
)
async def test_the_one_address_of_a_family(tmp_path, text, length, address):
    path = tmp_path / "address"
    path.write_text(text)
    assert await textfile.ask(str(path), length) == from_text(address)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no addresses"),
        ("2a01:238:1::1", "no addresses"),
        ("1.2.3.4 1.2.3.5", "2 addresses"),
        ("address: 1.2.3.4", "'address:'"),
        ("1.2.3", "'1.2.3'"),
    ],
)
async def test_what_is_no_answer(tmp_path, text, word):
    path = tmp_path / "address"
    path.write_text(text)
    with pytest.raises(SourceError, match=word):
        await textfile.ask(str(path), 4)


async def test_what_is_no_readable_file(tmp_path):
    with pytest.raises(SourceError, match="No such file"):
        await textfile.ask(str(tmp_path / "none"), 4)
    with pytest.raises(SourceError):
        await textfile.ask(str(tmp_path), 4)
    with pytest.raises(SourceError, match="regular"):
        await textfile.ask("/dev/zero", 4)


async def test_a_pipe_without_a_writer_does_not_let_us_wait(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="regular"):
        await textfile.ask(str(tmp_path / "pipe"), 4)
