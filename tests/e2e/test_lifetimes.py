"""How long an address stays: real connections, the kernel's own table of them, restarts and crashes.

The firewall of these tests knows no established connections: every single packet to the world needs its
address in the set. So traffic that passes proves the element, and not the kernel's memory of how it began.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Thread, Timer

import dns.message
import dns.query
import dns.rcode
import dns.rrset
import pytest
from sites import ENDPOINTS, LEARNED, POLICY, open_connection, site

from dnsproxy.demo.lab import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

PROXY = "10.1.0.1"
STRICT = f"""
table inet strict
delete table inet strict
table inet strict {{
    chain tracked {{
        type filter hook prerouting priority 0
        ct state established,related,new accept
    }}
}}
add chain inet dnsproxy strict {{ type filter hook forward priority 10 ; policy accept ; }}
add rule inet dnsproxy strict ip saddr 10.1.0.5 ip daddr . meta l4proto . th dport @{LEARNED} accept
add rule inet dnsproxy strict ip saddr 10.1.0.5 reject
"""
SOON = {
    "cache": {"minimum_ttl": 1, "gc_interval": 0.2},
    "conntrack": {"shortest": 300.0},  # only when the test says so
}
POOL = [f"198.51.100.{number}" for number in range(1, 9)]


@pytest.fixture
def place():
    with site() as made:
        pool = "\n".join(f"pool{number} 1 A {address}" for number, address in enumerate(POOL))
        rotating = "\n".join(f"rotate 1 A {address}" for address in POOL)
        made.nsd({"open.test": f"one 1 A 198.51.100.200\n{pool}\n{rotating}"})
        made.write(**SOON)
        made.start()
        made.router.run("nft", "-f", "-", stdin=STRICT)
        with made.serve() as made.listener:
            yield made


def lasting(place):
    """Start anew with leases that outlast the test."""
    place.stop()
    place.write(cache={"minimum_ttl": 3600, "gc_interval": 0.2}, conntrack=SOON["conntrack"])
    place.start()


def ask(place, name):
    query = dns.message.make_query(name, "A")
    answer = place.client.call(lambda: dns.query.udp(query, PROXY, timeout=5))
    assert answer.rcode() == dns.rcode.NOERROR
    return {record.address for record in answer.answer[0]}


def connected(place, address, stack):
    """A connection of the client to the world, both of its ends."""
    ours = stack.enter_context(open_connection(place.client, address))
    theirs = stack.enter_context(wait_for(lambda: _accepted(place.listener), 10, "the connection"))
    return ours, theirs


def _accepted(listener):
    try:
        sock, _ = listener.accept()
    except BlockingIOError:
        return None
    sock.settimeout(10)
    return sock


def passes(ours, theirs):
    """Traffic both ways."""
    ours.sendall(b"ping")
    assert theirs.recv(4) == b"ping"
    theirs.sendall(b"pong")
    assert ours.recv(4) == b"pong"


def refused(place, address):
    with pytest.raises(OSError):
        open_connection(place.client, address, timeout=2).close()


def is_zombie(place, address):
    return wait_for(lambda: place.zombies().get(address), 20, f"{address} to become a zombie")


def departs(place, address, among=LEARNED):
    """Two looks that find nobody, and the next collection, take an address out of the set."""
    place.look(2)
    wait_for(lambda: address not in place.addresses(among), 20, f"{address} to leave its set")


def test_a_connection_outlives_the_ttl_and_its_address_goes_with_it(place):
    with ExitStack() as stack:
        (address,) = ask(place, "one.open.test")
        ours, theirs = connected(place, address, stack)
        is_zombie(place, address)
        place.look(3)
        passes(ours, theirs)
        assert place.zombies()[address]["state"] == "live"
        assert address in place.addresses()
        connected(place, address, stack)  # and so does a second one
    departs(place, address)
    refused(place, address)
    why = place.admin("GET", f"/v1/why/{address}?endpoint=default/client")["endpoints"][0]
    assert why["departed"]["names"] == ["one.open.test."]


def test_a_connection_outlives_the_limit_of_addresses_per_name(place):
    place.stop()
    place.write(
        cache={"minimum_ttl": 3600, "gc_interval": 0.2, "addresses_per_name": 4}, conntrack=SOON["conntrack"]
    )
    place.start()
    with ExitStack() as stack:
        assert ask(place, "rotate.open.test") == set(POOL)
        address = POOL[0]  # of equal leases the lowest addresses make room
        ours, theirs = connected(place, address, stack)
        wait_for(lambda: len(place.zombies()) == len(POOL) - 4, 20, "the limit to make zombies")
        assert set(place.zombies()) == set(POOL[:4])
        place.look(3)
        passes(ours, theirs)
        assert place.zombies()[address]["state"] == "live"
        assert place.addresses() == set(POOL), "siblings of a live one stay, too"
    place.look(2)
    wait_for(lambda: place.addresses() == set(POOL[4:]), 20, "what is idle to leave the set")
    refused(place, address)


@pytest.mark.parametrize("how", ["killed", "stopped", "without its state"])
def test_a_connection_outlives_a_restart(place, how):
    with ExitStack() as stack:
        (address,) = ask(place, "one.open.test")
        ours, theirs = connected(place, address, stack)
        is_zombie(place, address)
        if how == "stopped":
            assert place.stop() == 0
        else:
            place.kill()
        if how == "without its state":
            for part in (place.directory / "state").glob("state.db*"):
                part.unlink()
        passes(ours, theirs)
        place.start()
        passes(ours, theirs)
        is_zombie(place, address)
        place.look(3)
        passes(ours, theirs)
        assert address in place.addresses()
    departs(place, address)
    refused(place, address)


def test_what_was_learned_just_before_a_crash_is_open_after_it(place):
    """The state on disk may be seconds old; what is in the sets tells the rest."""
    lasting(place)
    addresses = {next(iter(ask(place, f"pool{number}.open.test"))) for number in range(len(POOL))}
    place.kill()
    place.start()
    assert place.addresses() == addresses
    for address in sorted(addresses):
        open_connection(place.client, address).close()


def test_what_no_policy_grants_any_more_closes_at_once_whatever_uses_it(place):
    with ExitStack() as stack:
        (address,) = ask(place, "one.open.test")
        connected(place, address, stack)
        is_zombie(place, address)
        (place.policies / "policy.yaml").write_text(POLICY.replace("*.open.test", "pool0.open.test"))
        place.admin("POST", "/v1/reload")
        wait_for(lambda: address not in place.addresses(), 2, "the address to leave the set")
        refused(place, address)


def test_an_endpoint_that_is_gone_takes_what_only_it_contributed(place):
    query = dns.message.make_query("one.open.test", "A")
    for client, server in ((place.client, PROXY), (place.other, "10.2.0.1")):
        client.call(partial(dns.query.udp, query, server, timeout=5))
    (address,) = place.addresses()
    assert place.addresses("ep.default.other.port4") == {address}
    gone = ENDPOINTS.partition("---")[2]  # the other one's document alone
    (place.policies / "endpoints.yaml").write_text(gone)
    place.admin("POST", "/v1/reload")
    wait_for(lambda: not place.addresses(), 2, "the set of the endpoint that is gone to be empty")
    assert place.addresses("ep.default.other.port4") == {address}
    rows = place.admin("GET", "/v1/lookups?source=global")
    assert [row["fqdn"] for row in rows] == ["one.open.test."]


def test_forced_expiry_spares_what_is_in_use_and_says_what_goes(place):
    lasting(place)
    (address,) = ask(place, "one.open.test")
    rows = place.admin("DELETE", "/v1/lookups?matchpattern=one.open.test&dry-run=true")
    assert [row["fqdn"] for row in rows] == ["one.open.test."]
    assert address in place.addresses()
    with ExitStack() as stack:
        ours, theirs = connected(place, address, stack)
        place.admin("DELETE", "/v1/lookups?matchpattern=one.open.test")
        is_zombie(place, address)
        place.look(2)
        passes(ours, theirs)
        assert address in place.addresses()
    departs(place, address)


def test_no_query_is_lost_while_another_instance_takes_over(place):
    """10,000 queries at a steady rate; the instances change places in the middle."""
    lasting(place)
    with ExitStack() as stack:
        (address,) = ask(place, "one.open.test")
        ours, theirs = connected(place, address, stack)
        former = place.proxy
        answered = place.client.call(lambda: _steadily(10_000, 2_000, place.successor))
        assert former.wait(20) == 0
        assert answered == set(range(10_000))
        passes(ours, theirs)
        assert address in place.addresses()
        entries = [json.loads(line) for line in place.log.read_text().splitlines() if line.startswith("{")]
        assert [entry for entry in entries if "took over" in entry["event"]]
        assert place.admin("GET", "/v1/status")["pid"] != former.pid


def test_what_is_answered_while_instances_change_places_stays_open(place):
    """Their answers take a second: some are asked of the former instance, and answered at its very end."""
    place.stop()
    place.write(
        policy=POLICY.replace("*.open.test", "**.open.test"),
        cache={"minimum_ttl": 3600, "gc_interval": 0.2},
        upstream={"routes": {"slow.open.test": ["192.0.2.53:5300"]}, "timeout": 4.0, "attempt": 3.0},
        conntrack=SOON["conntrack"],
    )
    place.start()
    former, count = place.proxy, 120
    with slow_server(place, 1.0):
        answered = place.client.call(lambda: _asked_slowly(count, 30.0, place.successor))
        assert answered == set(range(count))
        assert former.wait(20) == 0
        place.await_log("took over")
        place.admin("POST", "/v1/sets/resync")
        place.look(2)  # what nobody knows the lease of would be proven idle now, and be collected
        wait_for(lambda: not place.zombies(), 20, "the last zombie to go")
        kept = place.addresses()
        assert {f"198.51.101.{number}" for number in range(count)} <= kept


@contextmanager
def slow_server(place, delay):
    """A name server of the world that answers `n7.slow.open.test` with 198.51.101.7, after a while."""
    sock = place.world.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    sock.bind(("192.0.2.53", 5300))
    timers = []

    def serve():
        while (received := sock.recvfrom(4096))[0]:
            query, peer = dns.message.from_wire(received[0]), received[1]
            answer = dns.message.make_response(query)
            name = query.question[0].name
            address = f"198.51.101.{name.labels[0].decode().removeprefix('n')}"
            answer.answer = [dns.rrset.from_text(name, 300, "IN", "A", address)]
            timers.append(Timer(delay, sock.sendto, (answer.to_wire(), peer)))
            timers[-1].start()

    thread = Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.join()
        with place.world.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as last:
            last.sendto(b"", ("192.0.2.53", 5300))
        thread.join()
        sock.close()


def _asked_slowly(count, rate, then):
    """Ask each name once, and have the instances change places after a tenth of them; those answered."""
    answered = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((PROXY, 53))
        sock.settimeout(10)
        for number in range(count):
            sock.send(dns.message.make_query(f"n{number}.slow.open.test", "A", id=number).to_wire())
            if number == count // 10:
                then()
            time.sleep(1 / rate)
        while len(answered) < count:
            answer = dns.message.from_wire(sock.recv(4096))
            assert answer.rcode() == dns.rcode.NOERROR, answer
            answered.add(answer.id)
    return answered


def test_no_query_is_lost_over_a_restart_while_somebody_holds_the_sockets(place):
    """What systemd's socket unit does: the sockets stay, and what comes meanwhile waits in them."""
    place.stop()
    place.write(cache={"minimum_ttl": 3600})
    kinds = (socket.SOCK_DGRAM, socket.SOCK_STREAM)
    with ExitStack() as stack:
        held = [stack.enter_context(place.router.call(partial(_bound, kind))) for kind in kinds]
        place.start_with(held)

        def restart():
            place.proxy.send_signal(signal.SIGTERM)
            stack.callback(place.proxy.wait, 20)
            place.start_with(held, wait=False)

        answered = place.client.call(lambda: _steadily(10_000, 2_000, restart))
        assert answered == set(range(10_000))


def _bound(kind):
    sock = socket.socket(socket.AF_INET, kind)
    sock.bind((PROXY, 53))
    if kind == socket.SOCK_STREAM:
        sock.listen()
    return sock


def _steadily(count, rate, then):
    """Ask `count` queries at `rate` a second, and do something after a third; return those answered."""
    wires = [dns.message.make_query(f"pool{n % len(POOL)}.open.test", "A", id=n) for n in range(count)]
    wires = [query.to_wire() for query in wires]
    answered = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        sock.connect((PROXY, 53))
        sock.setblocking(False)
        started = time.monotonic()
        sent, last = 0, started
        while len(answered) < count and time.monotonic() - last < 10:
            due = min(count, int((time.monotonic() - started) * rate))
            for number in range(sent, due):
                sock.send(wires[number])
            if sent < count // 3 <= due:
                then()
            sent = max(sent, due)
            try:
                while True:
                    answered.add(int.from_bytes(sock.recv(4096)[:2], "big"))
                    last = time.monotonic()
            except BlockingIOError:
                time.sleep(0.001)
    return answered
