"""The doctor's checks, each with a case that is well and one that is not."""

from __future__ import annotations

import errno
from functools import partial

import pytest

from dnsproxy.cli import checks, client, inputs, probes
from dnsproxy.cli.checks import FAIL, OK, WARN, Case

STATUS = {"pid": 7, "state": "enforcing", "problem": None, "faults": {}, "conntrack": {"observing": True}}


@pytest.fixture
def case(folder, tmp_path):
    """A case whose settings and policies are read."""
    made = Case(folder / "dnsproxy.yaml", partial(client.connect, tmp_path / "admin.sock", folder))
    assert [found.result for found in checks.settings(made)] == [OK]
    return made


def results(found):
    return [each.result for each in found]


def test_every_fault_of_the_files_is_a_failure(folder, write):
    write(folder, "dnsproxy.yaml", "listen: [x]\nsets: {hold: -1}\n")
    case = Case(folder / "dnsproxy.yaml", lambda: None)
    assert results(checks.settings(case)) == [FAIL, FAIL]
    assert case.settings is None
    for name, check in checks.CHECKS.items():
        if name in ("ports", "template", "resolver", "upstream", "bypass"):
            assert list(check(case)) == []


def test_the_daemon_answers_and_enforces_or_not(case, daemon):
    daemon.says("GET /v1/status", STATUS)
    assert results(checks.daemon(case)) == [OK]
    daemon.says("GET /v1/status", STATUS | {"state": "not enforcing", "faults": {"policies": "a:1: x"}})
    assert results(checks.daemon(case)) == [FAIL, FAIL]
    daemon.says("GET /v1/status", STATUS | {"state": "shown, not enforced"})
    assert results(checks.daemon(case)) == [WARN]


def test_nobody_at_the_socket_is_a_failure(case):
    (found,) = checks.daemon(case)
    assert found.result == FAIL
    assert found.message.startswith("no daemon listens")


@pytest.mark.parametrize(
    ("has", "status", "expected"),
    [(set(probes.CAPABILITIES), None, [OK]), (set(), None, [WARN, WARN]), (set(), STATUS, [FAIL, FAIL]),
     (None, STATUS, [WARN])],
)  # fmt: skip
def test_rights_that_are_missing(case, monkeypatch, has, status, expected):
    monkeypatch.setattr(probes, "capabilities", lambda pid: has)
    monkeypatch.setattr(probes, "first_free_port", lambda: 1024)
    case.status = status
    assert results(checks.rights(case)) == expected


@pytest.mark.parametrize(
    ("error", "held", "status", "expected"),
    [
        (None, {}, None, OK),
        (None, {}, STATUS, FAIL),
        (errno.EADDRINUSE, {9: "dnsmasq"}, None, FAIL),
        (errno.EADDRINUSE, {7: "dnsproxy"}, STATUS, OK),
        (errno.EADDRINUSE, {}, None, WARN),
        (errno.EACCES, {}, None, WARN),
        (errno.EADDRNOTAVAIL, {}, None, FAIL),
    ],
)
def test_ports(case, monkeypatch, error, held, status, expected):
    monkeypatch.setattr(probes, "bind_error", lambda *_, **__: error and OSError(error, "text"))
    monkeypatch.setattr(probes, "holders", lambda *_, **__: held)
    case.status = status
    assert set(results(checks.ports(case))) == {expected}


def test_ports_of_the_administration_are_looked_at_too(folder, write, monkeypatch):
    (folder / "token").write_text("x" * 64)
    (folder / "token").chmod(0o600)
    write(
        folder,
        "dnsproxy.yaml",
        """
        listen: [127.0.0.1:5300]
        upstream: {servers: [192.0.2.53]}
        admin: {listen: 127.0.0.1:5301, token_file: token}
        metrics: {listen: 127.0.0.1:5302}
        """,
    )
    case = Case(folder / "dnsproxy.yaml", lambda: None)
    list(checks.settings(case))
    taken = {5301, 5302}
    monkeypatch.setattr(
        probes,
        "bind_error",
        lambda _, port, **__: OSError(errno.EADDRINUSE, "x") if port in taken else None,
    )
    monkeypatch.setattr(probes, "holders", lambda port, **_: {9: "other"})
    assert [(found.result, found.message) for found in checks.ports(case)] == [
        (OK, "UDP 127.0.0.1:5300 is free"),
        (OK, "TCP 127.0.0.1:5300 is free"),
        (FAIL, "TCP 127.0.0.1:5301 (admin.listen) is taken by other (9)"),
        (FAIL, "TCP 127.0.0.1:5302 (metrics.listen) is taken by other (9)"),
    ]


def test_rules_have_to_name_the_sets_of_restricted_endpoints(case, monkeypatch):
    monkeypatch.setattr(probes, "rules", list)
    (found,) = checks.template(case)
    assert (found.result, "build/ci-runner" in found.message) == (FAIL, True)
    assert f"template forward --config {case.config} |" in found.hint
    rule = {"family": "inet", "table": "dnsproxy", "expr": ["@ep.build.ci-runner.addr6"]}
    monkeypatch.setattr(probes, "rules", lambda: [rule])
    assert results(checks.template(case)) == [OK]


def test_a_resolv_conf_names_us_or_a_rule_redirects(case, tmp_path):
    path = tmp_path / "resolv.conf"
    case.client = probes.Client("namespace ci", tmp_path, path)
    assert results(checks.resolver(case)) == [WARN]
    path.write_text("nameserver 192.0.2.1\nnameserver 127.0.0.11\nnameserver 127.0.0.1\n")
    assert results(checks.resolver(case)) == [FAIL, FAIL, FAIL]  # loopback of another namespace is not ours
    case.rules = [{"expr": [{"redirect": None}]}]
    assert results(checks.resolver(case)) == [OK, OK, OK]
    case.client, case.rules = None, []
    assert checks._is_us(case, "127.0.0.1")
    assert not checks._is_us(case, "127.0.0.2")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("no answer", FAIL),
        (probes.Reply("NOERROR", False, 0.1), OK),
        (probes.Reply("REFUSED", False, 0.1), WARN),
        (probes.Reply("REFUSED", True, 0.1), FAIL),
    ],
)
def test_upstreams(case, monkeypatch, reply, expected):
    monkeypatch.setattr(probes, "ask", lambda *_, **__: reply)
    assert results(checks.upstream(case)) == [expected, expected]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("refused", OK),
        (probes.Reply("NXDOMAIN", True, 0.1), OK),
        (probes.Reply("NXDOMAIN", False, 0.1), FAIL),
    ],
)
def test_a_way_around_the_proxy(case, monkeypatch, tmp_path, reply, expected):
    monkeypatch.setattr(probes, "ask", lambda *_, **__: reply)
    assert results(checks.bypass(case)) == [OK]  # the host is not restricted
    case.client = probes.Client("namespace ci", tmp_path, tmp_path)
    assert results(checks.bypass(case)) == [expected, expected]


def test_the_kernel_is_tried_without_a_change(case, monkeypatch):
    asked = []
    monkeypatch.setattr(probes, "nft", lambda *arguments, **_: asked.append(arguments) or "")
    assert results(checks.kernel(case)) == [OK]
    assert asked == [("--check", "--file", "-")]


def test_connections_that_the_daemon_reads_can_be_read(case):
    case.status = STATUS
    assert results(checks.conntrack(case)) == [OK]


def test_all_checks_are_made_and_an_error_is_a_failure(case, monkeypatch):
    def fails(_):
        raise checks.DnsproxyError("broken")
        yield

    monkeypatch.setattr(checks, "CHECKS", {"a": fails, "b": lambda _: iter([checks.Finding(OK, "x")])})
    assert [(name, found.result) for name, found in checks.examine(case)] == [("a", FAIL), ("b", OK)]
    assert inputs.local_addresses(case.settings) == frozenset()
