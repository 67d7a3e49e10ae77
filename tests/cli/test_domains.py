"""`dnsproxy domains` and `dyndns`."""

from __future__ import annotations

import json

import pytest

ROW = {
    "apiVersion": "dyndns.contrib.strato.com/v1alpha1",
    "kind": "Domain",
    "metadata": {"name": "www", "namespace": "default"},
    "spec": {"fqdn": "www.example.de", "enabled": True, "interval": 5},
    "status": {
        "ipAddress": "192.0.2.1",
        "mode": "Dynamic",
        "lastLoop": "2026-12-01T00:00:00Z",
        "lastResult": False,
        "phase": "halted",
        "message": "badauth: the password is wrong",
    },
}
EVENT = {
    "at": "2026-12-01T00:00:00Z",
    "type": "Warning",
    "reason": "DynDnsUpdateHalted",
    "message": "badauth",
}


def test_the_list_has_the_columns_of_the_original(dnsproxy, daemon):
    daemon.says("GET /v1/domains", [ROW])
    code, out, _ = dnsproxy("domains", "list")
    heading, line = out.splitlines()
    assert code == 0
    assert heading.split("  ")[0] == "Fqdn"
    assert heading.split() == ["Fqdn", "IP", "Address", "Mode", "Successful", "Last", "Run", "Enabled"]
    assert line.split() == ["www.example.de", "192.0.2.1", "Dynamic", "no", "2026-12-01T00:00:00Z", "yes"]
    assert "badauth: the password is wrong" in dnsproxy("domains", "list", "-o", "wide")[1]
    assert json.loads(dnsproxy("domains", "list", "-o", "json")[1]) == [ROW]


def test_one_is_shown_with_its_events(dnsproxy, daemon):
    daemon.says("GET /v1/domains/www.example.de", ROW | {"events": [EVENT]})
    code, out, _ = dnsproxy("domains", "show", "www.example.de")
    assert code == 0
    assert "phase" in out
    assert "DynDnsUpdateHalted: badauth" in out.splitlines()[-1]


@pytest.mark.parametrize("verb", ["force", "resume"])
def test_what_is_refused_is_said(dnsproxy, daemon, verb):
    daemon.says(f"POST /v1/domains/www.example.de/{verb}", {"done": True})
    assert dnsproxy("domains", verb, "www.example.de")[0] == 0
    daemon.says(f"POST /v1/domains/www.example.de/{verb}", {"error": "an hour is not over"}, status=409)
    code, _, err = dnsproxy("domains", verb, "www.example.de")
    assert code == 1
    assert "an hour is not over" in err


def test_check_reads_the_documents_of_dyndns(dnsproxy, folder, write):
    write(
        folder,
        "policies.d/domain.yaml",
        """
        apiVersion: dyndns.contrib.strato.com/v1alpha1
        kind: Domain
        metadata: {name: www}
        spec: {fqdn: localhost, interval: 1, password: {env: P}}
        """,
    )
    code, _, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 3
    assert "domain.yaml:4:14: spec.fqdn: " in err
    assert "spec.interval: " in err
