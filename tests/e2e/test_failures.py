"""What can be wrong around us: one clear message with cause and next step, and nothing half done."""

from __future__ import annotations

import socket
import sys

import dns.message
import dns.query
import dns.rcode
import pytest
from sites import numbered, open_connection, site, unprivileged

from dnsproxy.demo.lab import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

PROXY = "10.1.0.1"
NAMED_SET = """
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: test}
spec:
  endpointSelector: {matchLabels: {app: test}}
  allow:
  - {pattern: "*.open.test", ports: [443/TCP], set: "4#inet#fw4#small"}
  - other.test:443/TCP
"""


@pytest.fixture(scope="module")
def network():
    with site() as made:
        made.nsd({"open.test": numbered(20), "other.test": "@ A 198.51.102.1"})
        with made.serve():
            yield made


@pytest.fixture
def place(network):
    """The network with nothing left of the test before."""
    yield network
    if network.proxy is not None and network.proxy.poll() is None:
        network.stop()
    network.proxy = None
    network.router.run("nft", "flush", "ruleset")


def refused_start(place, *wrapper):
    """Exit code and message of a start that must not succeed."""
    command = [*wrapper, sys.executable, "-m", "dnsproxy", "run", "--config", str(place.config)]
    done = place.router.run(*command, check=False, timeout=30)
    assert "Traceback" not in done.stderr
    assert "inet dnsproxy" not in place.router.run("nft", "list", "tables").stdout, "nothing half done"
    assert not place.router.run("ss", "-Hlun").stdout
    return done.returncode, done.stderr


def ask(place, name):
    query = dns.message.make_query(name, "A", use_edns=0)
    return place.client.call(lambda: dns.query.udp(query, PROXY, timeout=5))


def test_a_bad_document(place):
    place.write(
        policy="kind: EgressPolicy\napiVersion: dnsproxy/v1\nmetadata: {name: x}\nspec:\n  allow: [a..b]\n"
    )
    code, message = refused_start(place)
    assert code == 3
    assert "policies/policy.yaml:5:11: spec.allow[0]: " in message


def test_an_unreadable_folder(place):
    place.write()
    place.config.write_text(place.config.read_text().replace("directory: policies", "directory: elsewhere"))
    code, message = refused_start(place)
    assert (code, "elsewhere" in message, "create it" in message) == (3, True, True)


def test_an_occupied_port(place):
    place.write()
    with place.router.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as holder:
        holder.bind((PROXY, 53))
        command = [sys.executable, "-m", "dnsproxy", "run", "--config", str(place.config)]
        done = place.router.run(*command, check=False, timeout=30)
    assert done.returncode == 4
    assert "10.1.0.1:53 is taken" in done.stderr
    assert "ss -lunp" in done.stderr


def test_no_right_to_change_sets(place):
    place.write()
    code, message = refused_start(place, *unprivileged())
    assert code == 5
    assert "CAP_NET_ADMIN" in message


def test_no_right_to_change_sets_where_showing_will_do(place):
    place.write(sets={"backend": "auto"})
    place.proxy = place.router.popen(
        *unprivileged(sys.executable, "-m", "dnsproxy", "run", "--config", str(place.config)), log=place.log
    )
    entry = place.await_log("shown, not made")
    assert "CAP_NET_ADMIN" in entry["reason"]
    place.await_log("ready")
    assert ask(place, "n1.open.test").rcode() == dns.rcode.NOERROR
    wait_for(
        lambda: "add element inet dnsproxy ep.default.client.port4" in place.log.read_text(),
        10,
        "the command",
    )


def test_ourselves_as_upstream(place):
    place.write(upstream={"servers": ["10.1.0.1"]})
    code, message = refused_start(place)
    assert (code, "upstream.servers[0]" in message, "this proxy itself" in message) == (3, True, True)


def test_an_upstream_that_cannot_be_reached(place):
    place.write(upstream={"servers": ["192.0.2.1"]})
    place.start()
    for _ in range(3):
        answer = ask(place, "n1.open.test")
        assert answer.rcode() == dns.rcode.SERVFAIL
        assert answer.options[0].code in (22, 23)
    assert place.await_log("does not answer")["server"] == "192.0.2.1:53"


def test_a_full_set_of_the_users_fails_alone(place):
    place.router.run("nft", "-f", "-", stdin="table inet fw4 { set small { type ipv4_addr; size 2; }; }")
    place.write(policy=NAMED_SET)
    place.start()
    for number in range(2):
        assert ask(place, f"n{number}.open.test").rcode() == dns.rcode.NOERROR
    assert ask(place, "n2.open.test").rcode() == dns.rcode.SERVFAIL
    message = place.await_log("not enforced")["error"]
    assert "small" in message
    assert "full" in message
    assert ask(place, "other.test").rcode() == dns.rcode.NOERROR


def test_a_missing_set_of_the_users_is_waited_for(place):
    place.write(policy=NAMED_SET)
    place.start()
    assert "nft add" in place.await_log("not enforced")["error"]
    assert ask(place, "n1.open.test").rcode() == dns.rcode.SERVFAIL
    place.router.run("nft", "-f", "-", stdin="table inet fw4 { set small { type ipv4_addr; }; }")
    wait_for(lambda: ask(place, "n1.open.test").rcode() == dns.rcode.NOERROR, 20, "the set to be found")
    assert "198.51.100.1 comment" in place.router.run("nft", "list", "set", "inet", "fw4", "small").stdout


def test_a_set_of_another_type_is_left_alone_and_named(place):
    found = "table inet dnsproxy { set ep.default.client.port4 { type ipv4_addr; flags interval; }; }"
    place.router.run("nft", "-f", "-", stdin=found)
    place.write()
    place.start()
    assert "ep.default.client.port4" in place.await_log("not enforced")["error"]
    assert ask(place, "n1.open.test").rcode() == dns.rcode.SERVFAIL


def test_what_the_user_put_into_a_set_stays(place):
    place.router.run(
        "nft",
        "-f",
        "-",
        stdin="table inet fw4 { set small { type ipv4_addr; elements = { 203.0.113.9 }; }; }",
    )
    place.write(policy=NAMED_SET)
    place.start()
    ask(place, "n1.open.test")
    (place.policies / "policy.yaml").write_text(NAMED_SET.replace("*.open.test", "*.closed.test"))
    place.await_log("policy in force")

    def listed():
        return place.router.run("nft", "list", "set", "inet", "fw4", "small").stdout

    wait_for(lambda: "198.51.100.1" not in listed(), 10, "our element to go")
    assert "203.0.113.9" in listed()


def test_ready_means_served_for_the_first_connection_too(place):
    place.write()
    place.template()
    place.start()
    ask(place, "n3.open.test")
    open_connection(place.client, "198.51.100.3").close()
