import json
import subprocess
import sys

import pytest

SAY = """
import logging, structlog
from dnsproxy.logs import configure
configure({level!r}, {style!r})
structlog.get_logger("x").info("hello", number=7)
logging.getLogger("y").warning("from %s", "elsewhere")
"""


def said(level, style):
    script = SAY.format(level=level, style=style)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize("style", ["json", "auto"])
def test_a_collector_gets_one_json_object_per_entry_from_both_kinds_of_loggers(style):
    ours, theirs = map(json.loads, said("info", style))
    assert (ours["event"], ours["number"], ours["level"]) == ("hello", 7, "info")
    assert (theirs["event"], theirs["level"]) == ("from elsewhere", "warning")
    assert ours["timestamp"].endswith("Z")


def test_a_person_gets_a_line_without_colours_off_a_terminal():
    ours, theirs = said("info", "text")
    assert "hello" in ours
    assert "number=7" in ours
    assert "from elsewhere" in theirs
    assert "\033" not in ours + theirs


def test_the_level_holds_for_both():
    assert said("error", "text") == []
