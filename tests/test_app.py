"""The whole program as a process on loopback, without rights: sets are shown, not made."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import dns.message
import dns.query
import dns.rcode
import pytest
import yaml
from sites import ask_admin

from dnsproxy.demo.lab import wait_for
from dnsproxy.handover import Handover

ZONE = """
$ORIGIN demo.test.
$TTL 60
@ SOA ns hostmaster 1 60 60 60 60
www A 192.0.2.10
new A 192.0.2.11
"""
POLICY = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: host, labels: {app: me}}
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: me}
spec:
  endpointSelector: {matchLabels: {app: me}}
  allow: [www.demo.test:443/TCP]
"""


def free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Daemon:
    """A running proxy and its files."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.config = folder / "dnsproxy.yaml"
        self.policy = folder / "policies" / "policy.yaml"
        self.log, self.out = folder / "log", folder / "out"
        self.process = None

    def write(self, **changes):
        settings = {
            "listen": [f"127.0.0.1:{self.port}"],
            "upstream": {"zone": "zone"},
            "policy": {"directory": "policies", "private": ["192.0.2.0/24"]},
            "sets": {"backend": "show"},
            "events": {"file": "events"},
            "state": {"directory": "state"},
            "admin": {"socket": "admin.sock"},
        } | changes
        self.config.write_text(yaml.safe_dump(settings))

    def start(self, *arguments):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "dnsproxy", "run", "--config", str(self.config), *arguments]
        with self.log.open("w") as log, self.out.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=log, env=environment)
        self.said("ready")

    def entries(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def said(self, event, count=1):
        def find():
            assert self.process.poll() is None, self.log.read_text()
            found = [entry for entry in self.entries() if event in entry["event"]]
            return found[count - 1] if len(found) >= count else None

        return wait_for(find, 20, f"{event!r} in the log")

    def ask(self, name, *, tcp=False):
        exchange = dns.query.tcp if tcp else dns.query.udp
        return exchange(dns.message.make_query(name, "A"), "127.0.0.1", port=self.port, timeout=5)

    def tell(self, number):
        self.process.send_signal(number)


@contextmanager
def running(folder, **changes):
    (folder / "policies").mkdir()
    (folder / "zone").write_text(ZONE)
    daemon = Daemon(folder)
    daemon.policy.write_text(POLICY)
    daemon.write(**changes)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.process.terminate()
        code = daemon.process.wait(20)
    assert code == 0, daemon.log.read_text()


@pytest.fixture
def daemon(tmp_path):
    with running(tmp_path) as made:
        yield made


def test_it_serves_over_both_transports_and_shows_its_sets(daemon):
    assert daemon.ask("www.demo.test").answer[0][0].address == "192.0.2.10"
    assert daemon.ask("www.demo.test", tcp=True).answer[0][0].address == "192.0.2.10"
    assert daemon.ask("other.demo.test").rcode() == dns.rcode.NXDOMAIN
    shown = "ep.default.host.port4 '{ 192.0.2.10 . tcp . 443 comment \"www.demo.test.\" }'"
    assert f"nft add element inet dnsproxy {shown}" in daemon.out.read_text()


def test_a_changed_policy_is_in_force_without_a_word(daemon):
    assert daemon.ask("new.demo.test").rcode() == dns.rcode.NXDOMAIN
    daemon.policy.write_text(POLICY.replace("www.demo.test:443", "new.demo.test:443"))
    daemon.said("policy in force")
    assert daemon.ask("new.demo.test").rcode() == dns.rcode.NOERROR
    assert daemon.ask("www.demo.test").rcode() == dns.rcode.NXDOMAIN


def test_a_folder_swapped_by_symlinks_as_kubelet_does_it(tmp_path):
    folder = tmp_path / "policies"
    with running(tmp_path) as daemon:
        for number, name in enumerate(("www", "new"), 1):
            version = folder / f"..version{number}"
            version.mkdir()
            (version / "policy.yaml").write_text(POLICY.replace("www.demo.test:443", f"{name}.demo.test:443"))
            (folder / "..next").symlink_to(version.name)
            (folder / "..next").rename(folder / "..data")
            if number == 1:
                daemon.policy.unlink()
                daemon.policy.symlink_to("..data/policy.yaml")
                daemon.said("policy in force")
        wait_for(lambda: daemon.ask("new.demo.test").rcode() == dns.rcode.NOERROR, 20, "the new version")
        assert daemon.ask("www.demo.test").rcode() == dns.rcode.NXDOMAIN


@pytest.mark.parametrize(
    "broken", ["", "spec: [", "kind: Nothing", POLICY.replace("allow", "alow"), POLICY + POLICY]
)
def test_a_reload_with_any_fault_keeps_the_running_policy_whole(daemon, broken):
    daemon.policy.write_text(broken)
    assert "policy.yaml:" in daemon.said("have faults")["faults"]
    assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR
    assert daemon.ask("new.demo.test").rcode() == dns.rcode.NXDOMAIN


def test_hangup_reads_the_settings_again_and_says_what_needs_a_restart(daemon):
    daemon.write(policy={"directory": "policies", "private": ["192.0.2.0/24"], "enforcement": "always"},
                 limits={"queries": 7})  # fmt: skip
    daemon.tell(signal.SIGHUP)
    assert daemon.said("next start")["settings"] == ["limits.queries"]
    daemon.said("upstreams in force")
    assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR


def test_hangup_changes_how_names_are_denied_and_what_may_be_learned(daemon):
    assert daemon.ask("other.demo.test").rcode() == dns.rcode.NXDOMAIN
    daemon.write(policy={"directory": "policies", "deny": "refused", "strip_private": True})
    daemon.tell(signal.SIGHUP)
    daemon.said("upstreams in force")
    assert daemon.ask("other.demo.test").rcode() == dns.rcode.REFUSED
    answer = daemon.ask("www.demo.test")
    assert (answer.rcode(), answer.answer) == (dns.rcode.NOERROR, [])


def test_hangup_with_faulty_settings_keeps_everything(daemon):
    daemon.config.write_text("listen: [nowhere]\n")
    daemon.tell(signal.SIGHUP)
    assert "dnsproxy.yaml:1:10: listen[0]" in daemon.said("have faults")["faults"]
    assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR


def test_a_reload_is_all_or_nothing_over_settings_policies_and_upstreams(daemon):
    other = daemon.folder / "others"
    other.mkdir()
    (other / "policy.yaml").write_text(POLICY.replace("www.demo.test:443", "new.demo.test:443"))
    changed = {"directory": "others", "private": ["192.0.2.0/24"]}
    daemon.write(policy=changed, upstream={"zone": "zone", "servers": ["127.0.0.1"]})
    daemon.tell(signal.SIGHUP)
    daemon.said("have faults")
    assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR
    assert daemon.ask("new.demo.test").rcode() == dns.rcode.NXDOMAIN
    daemon.tell(signal.SIGUSR1)
    assert len(daemon.said("statistics")["faults"]) == 1
    daemon.write(policy=changed)
    daemon.tell(signal.SIGHUP)
    daemon.said("policy in force")
    assert daemon.ask("new.demo.test").rcode() == dns.rcode.NOERROR
    daemon.tell(signal.SIGUSR1)
    assert daemon.said("statistics", 2)["faults"] == []


def test_a_folder_named_by_a_reload_is_followed(daemon):
    other = daemon.folder / "others"
    other.mkdir()
    (other / "policy.yaml").write_text(POLICY)
    daemon.write(policy={"directory": "others", "private": ["192.0.2.0/24"]})
    daemon.tell(signal.SIGHUP)
    daemon.said("policy in force")
    (other / "policy.yaml").write_text(POLICY.replace("www.demo.test:443", "new.demo.test:443"))
    wait_for(lambda: daemon.ask("new.demo.test").rcode() == dns.rcode.NOERROR, 20, "the new folder's change")


def test_an_endpoint_that_becomes_restricted_asks_for_its_template(daemon):
    daemon.policy.write_text(POLICY.partition("---")[0])
    daemon.said("policy in force")
    assert daemon.said("firewall template")["changed"] == ["default/host"]


def test_statistics_on_request(daemon):
    daemon.ask("www.demo.test")
    daemon.tell(signal.SIGUSR1)
    entry = daemon.said("statistics")
    assert entry["queries"]["queries"] == 1
    assert entry["sets"]["state"] == "enforcing"


def test_the_query_log_is_reopened_for_rotation(daemon):
    daemon.ask("www.demo.test")
    events, rotated = daemon.folder / "events", daemon.folder / "events.1"
    wait_for(lambda: events.read_text().count("\n") == 2, 20, "two events")
    events.rename(rotated)
    daemon.tell(signal.SIGUSR2)
    wait_for(events.exists, 20, "a new file")
    daemon.ask("denied.demo.test")
    wait_for(lambda: '"verdict":"denied"' in events.read_text(), 20, "the denial")
    kinds = [json.loads(line)["type"] for line in rotated.read_text().splitlines()]
    assert kinds == ["request", "response"]


def test_a_resolv_conf_is_followed(tmp_path):
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.1\n")
    with running(tmp_path, upstream={"resolv_conf": "resolv.conf"}) as daemon:
        resolv.write_text("nameserver 127.0.0.77\nnameserver ::1\n")
        assert daemon.said("upstreams in force")["servers"] == ["127.0.0.77:53", "[::1]:53"]


def test_sockets_may_come_from_systemd(tmp_path):
    """Whatever `listen` says, what systemd holds open is served; it does so for both transports."""
    alone = {"state": {"directory": None}, "admin": {"socket": None}}
    with running(tmp_path, **alone) as first, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as passed:
        passed.bind(("127.0.0.1", 0))
        shell = (
            f'exec 3<&{passed.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" -m dnsproxy run --config "$1"'
        )
        command = ["/bin/bash", "-c", shell, sys.executable, str(first.config)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(
            command,
            pass_fds=[passed.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        ) as second:
            assert b"ready" in second.stderr.readline()
            query = dns.message.make_query("www.demo.test", "A")
            answer = dns.query.udp(query, "127.0.0.1", port=passed.getsockname()[1], timeout=5)
            second.terminate()
    assert answer.rcode() == dns.rcode.NOERROR


def test_a_second_instance_with_the_same_state_says_what_to_do(daemon):
    done = second_instance(daemon)
    assert done.returncode == 4
    assert f"another instance is running with the state in {daemon.folder / 'state'}" in done.stderr
    assert "--take-over" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_for_metrics_that_is_taken_is_one_message_and_no_start(daemon):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon.write(
            listen=[f"127.0.0.1:{free_port()}"], state={"directory": "other"}, admin={"socket": None},
            metrics={"listen": f"127.0.0.1:{port}"},
        )  # fmt: skip
        done = second_instance(daemon)
    assert (done.returncode, "Traceback" in done.stderr) == (4, False)
    assert str(port) in done.stderr.splitlines()[-1]


def test_a_port_for_metrics_that_is_taken_takes_no_names_away_from_who_takes_over(daemon):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon.write(metrics={"listen": f"127.0.0.1:{taken.getsockname()[1]}"})
        former, daemon.log = daemon.process, daemon.folder / "successor.log"
        daemon.start("--take-over")
        assert former.wait(20) == 0
        assert daemon.said("cannot be served")["level"] == "warning"
        assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR


@pytest.mark.parametrize("steps", [1, 2])
def test_who_takes_over_and_goes_away_before_it_serves_is_as_good_as_never_there(daemon, steps):
    taker = Handover(daemon.folder / "state")
    for sock in taker.prepare():
        sock.close()
    if steps > 1:
        taker.take()
    taker.close()
    if steps > 1:
        daemon.said("serving again")
    assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR
    assert daemon.ask("www.demo.test", tcp=True).rcode() == dns.rcode.NOERROR
    former, daemon.log = daemon.process, daemon.folder / "successor.log"
    daemon.start("--take-over")
    assert former.wait(20) == 0
    assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR


DOMAIN = """
apiVersion: dyndns.contrib.strato.com/v1alpha1
kind: Domain
metadata: {name: www}
spec: {fqdn: www.example.de, ipAddress: 93.184.216.34, enabled: false, password: {env: NO_SUCH_SECRET}}
"""


def test_records_are_kept_beside_the_proxy_as_documents_come_and_go(daemon):
    domain = daemon.policy.with_name("domain.yaml")
    assert domains(daemon) == []
    domain.write_text(DOMAIN)
    wait_for(lambda: domains(daemon), 20, "the record to be kept")
    assert [row["spec"]["enabled"] for row in domains(daemon)] == [False]
    domain.write_text(DOMAIN.replace("www.example.de", "localhost"))
    assert "domain.yaml:5:14: spec.fqdn" in daemon.said("have faults")["faults"]
    assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR
    domain.unlink()
    wait_for(lambda: not domains(daemon), 20, "the record to be kept no longer")


def test_records_are_kept_alone_and_not_twice(daemon):
    daemon.policy.with_name("domain.yaml").write_text(DOMAIN)
    command = [sys.executable, "-m", "dnsproxy", "dyndns", "--config", str(daemon.config)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert done.returncode == 1
    assert "another instance is running with the state" in done.stderr
    daemon.write(state={"directory": "other"})
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as alone:
        assert '"domains": 1' in alone.stderr.readline()
        alone.terminate()
        assert alone.wait(20) == 0


def domains(daemon):
    status, rows = ask_admin(daemon.folder / "admin.sock", "GET", "/v1/domains")
    assert status == 200
    return rows


def test_a_folder_where_no_handover_can_be_offered_ends_nothing(tmp_path):
    (tmp_path / "state" / "handover.sock").mkdir(parents=True)
    with running(tmp_path) as daemon:
        assert daemon.said("no other instance can take over")["level"] == "warning"
        assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR


def test_a_fault_in_the_settings_leaves_the_former_instance_as_it_was(daemon):
    (daemon.folder / "token").write_text("short")
    daemon.write(admin={"socket": "admin.sock", "listen": "127.0.0.1:9", "token_file": "token"})
    done = second_instance(daemon, "--take-over")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert daemon.ask("www.demo.test").rcode() == dns.rcode.NOERROR


def test_a_second_instance_on_the_same_port_says_who_may_hold_it(daemon):
    daemon.write(state={"directory": "other"})
    done = second_instance(daemon)
    assert done.returncode == 4
    assert f"127.0.0.1:{daemon.port} is taken" in done.stderr
    assert "Traceback" not in done.stderr


def second_instance(daemon, *arguments):
    command = [sys.executable, "-m", "dnsproxy", "run", "--config", str(daemon.config), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_what_only_some_settings_need_is_not_loaded_with_the_rest():
    script = "import sys, dnsproxy.app; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    few = {"pyroute2", "dns", "difflib", "unittest", "dnsproxy.demo.zone", "dnsproxy.dyndns.client"}
    loaded = set(done.stdout.split())
    assert "dnsproxy.exchange" in loaded
    assert not loaded & few
