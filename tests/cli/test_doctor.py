"""`dnsproxy doctor` as a command."""

from __future__ import annotations

import json

import pytest

from dnsproxy.cli import checks
from dnsproxy.cli.checks import FAIL, OK, WARN, Finding


@pytest.fixture
def finds(monkeypatch):
    """Have the doctor find this and nothing else."""

    def found(*findings):
        monkeypatch.setattr(checks, "CHECKS", {"look": lambda case: iter(findings)})

    return found


def test_lines_have_a_result_a_check_and_a_hint(dnsproxy, finds):
    finds(Finding(OK, "fine"), Finding(WARN, "hm", "do this"))
    assert dnsproxy("doctor") == (
        0, "ok     look        fine\nwarn   look        hm\n                   do this\n", "",
    )  # fmt: skip


def test_a_failure_ends_with_one_and_json_has_it_all(dnsproxy, finds):
    finds(Finding(FAIL, "broken", "mend it"))
    code, out, _ = dnsproxy("doctor", "-o", "json")
    assert code == 1
    assert json.loads(out) == [{"check": "look", "result": "fail", "message": "broken", "hint": "mend it"}]
    assert dnsproxy("doctor")[1].startswith("FAIL   look ")


def test_a_client_is_named_once_and_has_to_be_there(dnsproxy, finds):
    finds()
    assert dnsproxy("doctor", "--netns", "x", "--pid", "1")[0] == 2
    code, _, err = dnsproxy("doctor", "--netns", "no-such-namespace")
    assert (code, "there is no namespace no-such-namespace" in err) == (1, True)
