"""Tables, JSON, YAML, and a reader that goes away."""

from __future__ import annotations

import json
import os

import pytest
import yaml

from dnsproxy.cli import output

COLUMNS = {"Name": lambda row: row["name"], "IPs": lambda row: row["ips"], "Good": lambda row: row["good"]}
ROWS = [
    {"name": "a.test.", "ips": ["192.0.2.1", "192.0.2.2"], "good": True},
    {"name": "", "ips": [], "good": False},
]


def test_a_table_is_aligned_and_shows_nothing_as_a_dash():
    assert list(output.table(COLUMNS, ROWS)) == [
        "Name      IPs                   Good",
        "a.test.   192.0.2.1,192.0.2.2   yes",
        "-         -                     no",
    ]


def test_an_empty_table_is_its_heading():
    assert list(output.table(COLUMNS, [])) == ["Name    IPs     Good"]


@pytest.mark.parametrize(("kind", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_json_and_yaml_are_the_rows_as_they_are(capsys, kind, read):
    output.show(iter(ROWS), COLUMNS, kind)
    assert read(capsys.readouterr().out) == ROWS


def test_what_could_drive_a_terminal_is_written_out():
    assert output.text("a\x1b[31mb") == "a\\x1b[31mb"


def test_after_the_reader_has_gone_everything_goes_nowhere():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        outlet = output.Outlet(stream)
        print("x" * 100_000, file=outlet)
        outlet.flush()
        assert outlet.gone
        print("more", file=outlet)
        outlet.flush()
