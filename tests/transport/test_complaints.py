from __future__ import annotations

from dnsproxy.transport.complaints import INTERVAL, Complaints


def test_each_kind_is_said_once_and_then_with_the_number_left_out(caplog):
    complaints = Complaints("UDP 192.0.2.1:53")
    for now in range(5):
        complaints.note("KeyError", float(now))
    complaints.note("ValueError", 5.0)
    complaints.note("KeyError", INTERVAL)
    complaints.note("KeyError", INTERVAL + 1)
    assert [record.getMessage() for record in caplog.records] == [
        "UDP 192.0.2.1:53: KeyError; it goes on",
        "UDP 192.0.2.1:53: ValueError; it goes on",
        "UDP 192.0.2.1:53: KeyError (4 more since the last such line); it goes on",
    ]


def test_the_traceback_is_there(caplog):
    try:
        raise KeyError("lost")
    except KeyError as error:
        Complaints("here").note("KeyError", 0.0, error)
    assert "test_complaints.py" in caplog.text
    assert "KeyError: 'lost'" in caplog.text
