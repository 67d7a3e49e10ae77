from __future__ import annotations

import pytest
from admin_world import Records

from dnsproxy.admin.domains import row, rows, summary


@pytest.mark.parametrize("name", ["www.example.de", "WWW.example.de.", "www", "default/www"])
def test_a_record_is_found_by_any_of_its_names_with_its_events(name):
    found = row(Records(), name)
    assert found["spec"]["fqdn"] == "www.example.de"
    assert [event["reason"] for event in found["events"]] == ["DynDnsUpdateHalted"]


def test_without_dyndns_there_are_no_records():
    assert list(rows(None)) == []
    assert row(None, "www") is None
    assert row(Records(), "other") is None
    assert summary(None) == {"records": 0, "problems": []}


def test_the_summary_names_what_is_the_matter():
    assert summary(Records()) == {"records": 1, "problems": ["Domain default/www: halted"]}


def test_no_password_is_in_what_is_shown():
    assert "SECRET" not in str(row(Records(), "www"))
