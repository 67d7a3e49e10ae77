"""The command line: what each command prints, and with which code it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from dnsproxy import __version__, cli

TREE = Path(__file__).parent.parent
DEMO = TREE / "config" / "demo.yaml"
SAMPLE = TREE / "config" / "dnsproxy.yaml"


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


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as users do, in a process of its own."""
    inherited = {
        key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "DNSPROXY_CONFIG"}
    }
    return subprocess.run(
        [sys.executable, "-m", "dnsproxy", *map(str, arguments)],
        env={**inherited, "PYTHONPATH": str(TREE), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def folder(tmp_path):
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


def write(folder, name, text):
    (folder / name).write_text(dedent(text).lstrip("\n"))


# -- the whole ------------------------------------------------------------------------------------------


def test_without_arguments_the_help_teaches_and_the_usage_is_wrong(dnsproxy):
    code, out, err = dnsproxy()
    assert code == 2
    for command in ("demo", "check", "policy trace", "template forward", "run", "version"):
        assert f"dnsproxy {command}" in out + err or f"  {command} " in out + err


@pytest.mark.parametrize("command", ["run", "check", "demo", "version", "policy trace", "template forward"])
def test_every_command_has_help(dnsproxy, command):
    code, out, _ = dnsproxy(*command.split(), "--help")
    assert code == 0
    assert f"Usage: dnsproxy {command}" in out


def test_examples_in_the_help_are_commands_that_parse(dnsproxy):
    examples: set[str] = set()
    for command in ("run", "check", "policy trace", "template"):
        _, out, _ = dnsproxy(*command.split(), "--help")
        examples |= set(re.findall(r"^ +dnsproxy (\S.*?)(?:  .*| >.*)?$", out, re.MULTILINE))
    assert len(examples) >= 6
    for example in examples:
        code, _, err = dnsproxy(*example.split(), "--help")
        assert code == 0, (example, err)


def test_version(dnsproxy):
    assert dnsproxy("version") == (0, f"dnsproxy {__version__}\n", "")


def test_an_unknown_command_is_wrong_usage(dnsproxy):
    code, _, err = dnsproxy("chekc")
    assert code == 2
    assert "chekc" in err


def test_completion_is_there():
    for shell in ("bash", "zsh", "fish"):
        done = process(_DNSPROXY_COMPLETE=f"source_{shell}")
        assert done.returncode == 0
        assert "dnsproxy" in done.stdout


def loaded_by(*arguments: object) -> set[str]:
    """Return the modules that a command line loads, in a process of its own."""
    script = f"""
        import sys
        from dnsproxy import cli
        sys.argv = ["dnsproxy", *{list(map(str, arguments))!r}]
        try:
            cli.main()
        except SystemExit:
            print("loaded", *sys.modules)
    """
    environment = {**os.environ, "PYTHONPATH": str(TREE)}
    command = [sys.executable, "-c", dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {
    "asyncio",
    "dnslib",
    "pyroute2",
    "rich",
    "structlog",
    "uvloop",
    "yaml",
}  # pydantic is typer's own need


@pytest.mark.parametrize("arguments", [("version",), ("--help",), ("policy", "trace", "--help")])
def test_what_only_speaks_loads_nothing_heavy(arguments):
    assert not loaded_by(*arguments) & HEAVY


@pytest.mark.parametrize(
    "arguments", [("check", "-c", SAMPLE), ("policy", "trace", "-c", DEMO, "-e", "host", "x.test")]
)
def test_what_reads_files_loads_neither_loops_nor_netlink(arguments):
    assert not loaded_by(*arguments) & {"pyroute2", "rich", "structlog", "uvloop"}


def test_no_colour_ever_reaches_a_pipe():
    done = process("policy", "trace", "--help", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b" not in done.stdout + done.stderr


# -- check ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "summary"),
    [
        (DEMO, "1 document, 1 endpoint, 1 policy: ok\n"),
        (SAMPLE, "4 documents, 3 endpoints, 2 policies: ok\n"),
    ],
)
def test_the_samples_check(dnsproxy, config, summary):
    code, out, err = dnsproxy("check", "--config", config)
    assert (code, out.splitlines(keepends=True)[-1], err) == (0, summary, "")


def test_documents_alone_check_without_settings(dnsproxy):
    code, out, _ = dnsproxy("check", TREE / "config" / "policies.d", TREE / "config" / "demo.d" / "host.yaml")
    assert (code, out) == (0, "5 documents, 3 endpoints, 3 policies: ok\n")


def test_the_settings_come_from_the_environment_too(folder):
    done = process("check", DNSPROXY_CONFIG=str(folder / "dnsproxy.yaml"))
    assert (done.returncode, done.stdout) == (0, "2 documents, 2 endpoints, 1 policy: ok\n")


def test_a_fault_in_the_settings_names_its_place(dnsproxy, folder):
    write(folder, "dnsproxy.yaml", "upstream:\n  server: [192.0.2.53]\n")
    code, out, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    place = f"{folder}/dnsproxy.yaml:2:3"
    assert (code, out) == (3, "")
    assert err == f"{place}: upstream.server: unknown key 'server': did you mean 'servers'?\n"


def test_faults_of_all_files_and_servers_come_together_and_in_order(dnsproxy, folder):
    write(folder, "dnsproxy.yaml", "listen: ['127.0.0.1:53']\nupstream: {servers: [127.0.0.1]}\n")
    write(folder, "policies.d/a.yaml", "kind: [\n")
    write(folder, "policies.d/b.yaml", "apiVersion: dnsproxy/v1\nkind: Egress\nmetadata: {name: x}\n")
    code, _, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 3
    found = [line.removeprefix(f"{folder}/") for line in err.splitlines()]
    assert [line.partition(":")[0] for line in found] == [
        "dnsproxy.yaml",
        "policies.d/a.yaml",
        "policies.d/b.yaml",
    ]
    assert found[0].startswith("dnsproxy.yaml:2:22: upstream.servers[0]: 127.0.0.1:53 is this proxy itself")
    assert found[2].startswith("policies.d/b.yaml:2:7: kind: unknown kind 'Egress'")


def test_notes_come_before_the_summary_and_are_no_faults(dnsproxy, folder):
    write(
        folder,
        "policies.d/cilium.yaml",
        """
        apiVersion: cilium.io/v2
        kind: CiliumNetworkPolicy
        metadata: {name: web, namespace: build}
        spec:
          endpointSelector: {matchLabels: {app: ci}}
          ingress: [{}]
        """,
    )
    code, out, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    *notes, summary = out.splitlines()
    assert (code, err, summary) == (0, "", "3 documents, 2 endpoints, 2 policies: ok")
    assert any(
        re.match(rf"{folder}/policies.d/cilium.yaml:6:\d+: note: spec.ingress: not enforced here", note)
        for note in notes
    )


def test_a_missing_file_says_what_to_do(dnsproxy, tmp_path):
    code, _, err = dnsproxy("check", "--config", tmp_path / "none.yaml")
    assert code == 3
    assert err.startswith(f"{tmp_path}/none.yaml: cannot be read: No such file or directory; create it")


def test_a_missing_policy_folder_says_what_to_do(dnsproxy, tmp_path):
    write(tmp_path, "dnsproxy.yaml", "policy: {directory: nowhere}\nupstream: {servers: [192.0.2.1]}\n")
    code, _, err = dnsproxy("check", "--config", tmp_path / "dnsproxy.yaml")
    assert code == 3
    assert err.startswith(f"{tmp_path}/nowhere: cannot be read: No such file or directory; create it")


def test_an_unusable_zone_and_a_missing_resolv_conf_are_faults(dnsproxy, folder):
    write(folder, "dnsproxy.yaml", "upstream: {zone: demo.zone}\n")
    write(folder, "demo.zone", "nothing of the kind\n")
    code, _, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 3
    assert err.startswith(f"{folder}/demo.zone: ")
    write(folder, "dnsproxy.yaml", "upstream: {resolv_conf: resolv.conf}\n")
    code, _, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 3
    assert err.startswith(f"{folder}/resolv.conf: cannot be read")


def test_what_is_left_out_of_a_resolv_conf_is_a_note(dnsproxy, folder):
    write(folder, "dnsproxy.yaml", "listen: ['0.0.0.0:53']\nupstream: {resolv_conf: resolv.conf}\n")
    write(folder, "resolv.conf", "nameserver 127.0.0.1\nnameserver 192.0.2.53\n")
    code, out, _ = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 0
    assert (
        out.splitlines()[0] == f"{folder}/resolv.conf:1:1: note: left out: 127.0.0.1:53 is this proxy itself"
    )


def test_a_resolv_conf_that_names_only_ourselves_is_a_fault(dnsproxy, folder):
    write(folder, "dnsproxy.yaml", "listen: ['127.0.0.1:53']\nupstream: {resolv_conf: resolv.conf}\n")
    write(folder, "resolv.conf", "nameserver 127.0.0.1\n")
    code, out, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert (code, out) == (3, "")
    assert f"upstream.resolv_conf: {folder}/resolv.conf names no server but ourselves; set" in err


def test_a_query_log_that_could_not_be_written_is_a_fault(dnsproxy, folder):
    write(folder, "dnsproxy.yaml", "upstream: {servers: [192.0.2.53]}\nevents: {file: none/log.jsonl}\n")
    code, _, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 3
    assert err.startswith(f"{folder}/none/log.jsonl: cannot be written: No such file or directory; make")


@pytest.mark.parametrize("file", ["log.jsonl", "-"])
def test_a_query_log_that_could_be_written_is_none_and_is_not_made(dnsproxy, folder, file):
    write(folder, "dnsproxy.yaml", f"upstream: {{servers: [192.0.2.53]}}\nevents: {{file: {file!r}}}\n")
    assert dnsproxy("check", "--config", folder / "dnsproxy.yaml")[0] == 0
    assert not (folder / file).exists()


# -- policy trace ---------------------------------------------------------------------------------------


def trace(dnsproxy, folder, *arguments):
    return dnsproxy("policy", "trace", "--config", folder / "dnsproxy.yaml", *arguments)


@pytest.mark.parametrize(
    "endpoint", ["ci-runner", "build/ci-runner", "10.1.0.5", "fd00::77", "::ffff:10.1.0.5"]
)
def test_an_allowed_name_comes_with_its_rule_and_what_it_opens(dnsproxy, folder, endpoint):
    code, out, err = trace(dnsproxy, folder, "--endpoint", endpoint, "GitHub.com.", "--type", "aaaa")
    assert (code, err) == (0, "")
    file = f"{folder}/policies.d/ci.yaml"
    assert out.splitlines() == [
        "allowed: github.com. AAAA for build/ci-runner",
        "  because a rule allows this name",
        f"  rule    {file}:12: EgressPolicy build/ci: spec.allow[0]: github.com",
        f"  opens   tcp 443; public addresses only  ({file}:12)",
    ]


@pytest.mark.parametrize(
    ("name", "opens"),
    [
        (
            "x.pypi.example",
            "tcp 22 80-82 443, udp 443; sets pypi, 4#inet#fw4#py; also private addresses in 10.0.0.0/8  (",
        ),
        ("any.example", "every port; public addresses only  ("),
        ("x.corp.example", "nothing: it may be asked for, not connected to"),
    ],
)
def test_what_a_name_opens(dnsproxy, folder, name, opens):
    code, out, _ = trace(dnsproxy, folder, "-e", "ci-runner", name)
    assert code == 0
    assert out.splitlines()[-1].startswith(f"  opens   {opens}")


def test_a_denied_name_ends_with_one(dnsproxy, folder):
    code, out, _ = trace(dnsproxy, folder, "-e", "ci-runner", "evil.example")
    assert code == 1
    assert out.splitlines() == [
        "denied: evil.example. A for build/ci-runner",
        "  because no rule allows this name",
    ]


def test_an_endpoint_that_no_policy_selects_is_not_restricted(dnsproxy, folder):
    code, out, _ = trace(dnsproxy, folder, "-e", "host", "evil.example")
    assert code == 0
    assert out.splitlines()[1:] == [
        "  because no policy selects this endpoint",
        "  opens   everything: its connections are not restricted",
    ]


def test_the_hosts_own_addresses_are_the_host(dnsproxy, folder):
    code, out, _ = trace(dnsproxy, folder, "-e", "127.0.0.1", "evil.example")
    assert (code, out.splitlines()[0]) == (0, "allowed: evil.example. A for default/host")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-e", "ci", "x.example"), "'ci' is unknown; there are: build/ci-runner, default/host"),
        (
            ("-e", "203.0.113.9", "x.example"),
            "'203.0.113.9' is unknown; there are: build/ci-runner, default/host",
        ),
        (("-e", "host", "a..example"), "'a..example' has an empty label"),
        (("-e", "host", "x.example", "--type", "AAAAA"), "'AAAAA' is not a type, such as A, AAAA"),
        (("x.example",), "--endpoint"),
    ],
)
def test_wrong_usage_of_trace_ends_with_two(dnsproxy, folder, arguments, message):
    code, out, err = trace(dnsproxy, folder, *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_a_name_that_two_namespaces_have_is_asked_back(dnsproxy, folder):
    write(
        folder,
        "policies.d/other.yaml",
        """
        apiVersion: dnsproxy/v1
        kind: Endpoint
        metadata: {name: ci-runner, namespace: test}
        spec: {addresses: [10.9.0.5]}
        """,
    )
    code, _, err = trace(dnsproxy, folder, "-e", "ci-runner", "github.com")
    assert code == 2
    assert "stands for several: build/ci-runner, test/ci-runner" in " ".join(err.split())


def test_trace_with_faulty_documents_ends_with_three(dnsproxy, folder):
    write(folder, "policies.d/a.yaml", "kind: 5\n")
    code, out, err = trace(dnsproxy, folder, "-e", "host", "x.example")
    assert (code, out) == (3, "")
    assert err.startswith(f"{folder}/policies.d/a.yaml:1:")


# -- template -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward", "output", "redirect"])
def test_a_template_is_made_from_settings_and_documents(dnsproxy, folder, name):
    write(
        folder, "dnsproxy.yaml", "listen: ['0.0.0.0:5300']\nsets: {table: inet mine}\nupstream: {mark: 99}\n"
    )
    code, out, err = dnsproxy("template", name, "--config", folder / "dnsproxy.yaml")
    assert (code, err) == (0, "")
    assert out.startswith("#!/usr/sbin/nft -f\n")
    assert "table inet mine {" in out
    expected = {
        "forward": "@ep.build.ci-runner.port4",
        "output": "meta mark 99",
        "redirect": "redirect to :5300",
    }
    assert expected[name] in out


def test_endpoints_that_no_policy_restricts_pass_the_forward_template(dnsproxy, folder):
    write(
        folder,
        "policies.d/free.yaml",
        """
        apiVersion: dnsproxy/v1
        kind: Endpoint
        metadata: {name: free}
        spec: {addresses: [10.9.0.5]}
        """,
    )
    _, out, _ = dnsproxy("template", "forward", "--config", folder / "dnsproxy.yaml")
    assert "@ep.build.ci-runner.addr4" in out
    assert "@ep.default.free.addr4" not in out


def test_a_template_that_cannot_be_is_one_message(dnsproxy, folder):
    write(folder, "dnsproxy.yaml", "upstream: {servers: [192.0.2.53], mark: 0}\n")
    code, out, err = dnsproxy("template", "redirect", "--config", folder / "dnsproxy.yaml")
    assert (code, out) == (1, "")
    assert err.startswith("dnsproxy: redirecting DNS takes a mark")


# -- run ------------------------------------------------------------------------------------------------


def test_run_with_faulty_settings_ends_with_three_and_no_traceback(folder):
    write(folder, "dnsproxy.yaml", "sets: {backend: iptables}\n")
    done = process("run", "--config", folder / "dnsproxy.yaml")
    assert done.returncode == 3
    assert done.stderr == f"{folder}/dnsproxy.yaml:1:17: sets.backend: expected 'nft', 'show' or 'auto'\n"
