"""`dnsproxy check`."""

from __future__ import annotations

import re

import pytest
from command_line import DEMO, SAMPLE, TREE, process


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


def test_a_fault_in_the_settings_names_its_place(dnsproxy, folder, write):
    write(folder, "dnsproxy.yaml", "upstream:\n  server: [192.0.2.53]\n")
    code, out, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    place = f"{folder}/dnsproxy.yaml:2:3"
    assert (code, out) == (3, "")
    assert err == f"{place}: upstream.server: unknown key 'server': did you mean 'servers'?\n"


def test_faults_of_all_files_and_servers_come_together_and_in_order(dnsproxy, folder, write):
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


def test_notes_come_before_the_summary_and_are_no_faults(dnsproxy, folder, write):
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


def test_a_missing_policy_folder_says_what_to_do(dnsproxy, tmp_path, write):
    write(tmp_path, "dnsproxy.yaml", "policy: {directory: nowhere}\nupstream: {servers: [192.0.2.1]}\n")
    code, _, err = dnsproxy("check", "--config", tmp_path / "dnsproxy.yaml")
    assert code == 3
    assert err.startswith(f"{tmp_path}/nowhere: cannot be read: No such file or directory; create it")


def test_an_unusable_zone_and_a_missing_resolv_conf_are_faults(dnsproxy, folder, write):
    write(folder, "dnsproxy.yaml", "upstream: {zone: demo.zone}\n")
    write(folder, "demo.zone", "nothing of the kind\n")
    code, _, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 3
    assert err.startswith(f"{folder}/demo.zone: ")
    write(folder, "dnsproxy.yaml", "upstream: {resolv_conf: resolv.conf}\n")
    code, _, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 3
    assert err.startswith(f"{folder}/resolv.conf: cannot be read")


def test_what_is_left_out_of_a_resolv_conf_is_a_note(dnsproxy, folder, write):
    write(folder, "dnsproxy.yaml", "listen: ['0.0.0.0:53']\nupstream: {resolv_conf: resolv.conf}\n")
    write(folder, "resolv.conf", "nameserver 127.0.0.1\nnameserver 192.0.2.53\n")
    code, out, _ = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 0
    assert (
        out.splitlines()[0] == f"{folder}/resolv.conf:1:1: note: left out: 127.0.0.1:53 is this proxy itself"
    )


def test_a_resolv_conf_that_names_only_ourselves_is_a_fault(dnsproxy, folder, write):
    write(folder, "dnsproxy.yaml", "listen: ['127.0.0.1:53']\nupstream: {resolv_conf: resolv.conf}\n")
    write(folder, "resolv.conf", "nameserver 127.0.0.1\n")
    code, out, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert (code, out) == (3, "")
    assert f"upstream.resolv_conf: {folder}/resolv.conf names no server but ourselves; set" in err


def test_a_query_log_that_could_not_be_written_is_a_fault(dnsproxy, folder, write):
    write(folder, "dnsproxy.yaml", "upstream: {servers: [192.0.2.53]}\nevents: {file: none/log.jsonl}\n")
    code, _, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 3
    assert err.startswith(f"{folder}/none/log.jsonl: cannot be written: No such file or directory; make")


@pytest.mark.parametrize("file", ["log.jsonl", "-"])
def test_a_query_log_that_could_be_written_is_none_and_is_not_made(dnsproxy, folder, file, write):
    write(folder, "dnsproxy.yaml", f"upstream: {{servers: [192.0.2.53]}}\nevents: {{file: {file!r}}}\n")
    assert dnsproxy("check", "--config", folder / "dnsproxy.yaml")[0] == 0
    assert not (folder / file).exists()


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ("state: {directory: token/state}", "dnsproxy.yaml:2:20: state.directory: "),
        ("state: {directory: null, preload: cilium.json}", "cilium.json:1:"),
        (
            "state: {directory: null}\nadmin: {listen: '127.0.0.1:9', token_file: token}",
            "token: holds no token",
        ),
    ],
)
def test_what_the_daemon_keeps_or_reads_besides_is_looked_at(dnsproxy, folder, write, settings, fault):
    write(folder, "cilium.json", '[{"fqdn": 7}]')
    write(folder, "token", "short")
    (folder / "token").chmod(0o600)
    write(folder, "dnsproxy.yaml", f"upstream: {{servers: [192.0.2.1]}}\n{settings}\n")
    code, _, err = dnsproxy("check", "--config", folder / "dnsproxy.yaml")
    assert code == 3
    assert fault in err
