"""What the demonstration is made of; the whole of it runs in tests/e2e/test_demo.py."""

from ipaddress import ip_address

import pytest

from dnsproxy import config
from dnsproxy.demo import walk, zone
from dnsproxy.demo.lab import Lab
from dnsproxy.errors import DnsproxyError
from dnsproxy.rules.policy import load


def test_its_documents_check_and_its_addresses_may_be_learned():
    settings = config.read(walk.SETTINGS, "dnsproxy.yaml")
    table, policy = load([("build.yaml", walk.POLICY), ("endpoints.yaml", walk.ENDPOINTS)])
    assert not policy.notes
    for client, key in ((walk.CI, "default/ci"), (walk.GUEST, "default/guest")):
        assert table.find(ip_address(client).packed).key == key
    for records in zone.read(walk.ZONE, "demo.zone").records.values():
        for record in records:
            if record.rtype in (1, 28):
                assert any(ip_address(str(record.rdata)) in network for network in settings.policy.private)


@pytest.mark.kernel
def test_what_does_not_hold_ends_it(capsys):
    with Lab() as lab:
        shown = walk.Walk(lab)
        shown.step("Something")
        done = shown.run(shown.ci, "echo out; echo >&2 err; exit 3")
        assert done.returncode == 3
        shown.expect(done.stdout == "out\n", "it says out")
        with pytest.raises(DnsproxyError, match="failed at step 1: this does not hold: it says in"):
            shown.expect(done.stdout == "in\n", "it says in")
    assert capsys.readouterr().out.splitlines() == [
        "",
        "1. Something",
        "   ci$ echo out; echo >&2 err; exit 3",
        "   out",
        "   err",
        "   \N{CHECK MARK} it says out",
    ]


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert walk.bold("text") == "\033[1mtext\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert walk.bold("text") == "text"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert walk.bold("text") == "text"
