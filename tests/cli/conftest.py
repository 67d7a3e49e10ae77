"""What the tests of the commands share: running a command line, settings to spoil, a daemon that is none."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest
from fake_daemon import FakeDaemon

from dnsproxy import cli


@pytest.fixture
def dnsproxy(capsys, monkeypatch):
    """Run a command line in this process; return (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dnsproxy", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture
def write():
    """Write a text, as it stands indented in a test, to a file in a folder."""

    def written(folder, name, text):
        (folder / name).write_text(dedent(text).lstrip("\n"))

    return written


@pytest.fixture
def folder(tmp_path, write):
    """Settings and one endpoint with a policy, which tests may spoil."""
    (tmp_path / "policies.d").mkdir()
    write(tmp_path, "dnsproxy.yaml", "upstream: {servers: [192.0.2.53]}\n")
    write(
        tmp_path,
        "policies.d/ci.yaml",
        """
        apiVersion: dnsproxy/v1
        kind: Endpoint
        metadata: {name: ci-runner, namespace: build, labels: {app: ci}}
        spec: {addresses: [10.1.0.5, "fd00::/64"]}
        ---
        apiVersion: dnsproxy/v1
        kind: EgressPolicy
        metadata: {name: ci, namespace: build}
        spec:
          endpointSelector: {matchLabels: {app: ci}}
          allow:
          - github.com:443/TCP
          - pattern: "*.pypi.example"
            ports: [80-82/TCP, 22/TCP, 443]
            set: [pypi, "4#inet#fw4#py"]
            cidrs: [10.0.0.0/8]
          - {name: any.example}
          resolve: ["*.corp.example"]
        """,
    )
    return tmp_path


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """A daemon that answers what a test puts into its mouth, where the commands look for one."""
    with FakeDaemon(tmp_path / "admin.sock") as fake:
        monkeypatch.setenv("DNSPROXY_SOCKET", str(fake.path))
        yield fake
