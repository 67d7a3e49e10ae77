"""The main job through real sockets, servers and the kernel: ask, be judged, learn, connect."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import select
import signal
import socket
import struct
import time
from contextlib import ExitStack, suppress
from functools import partial

import dns.message
import dns.query
import dns.rcode
import pytest
from sites import LEARNED, numbered, open_connection, site

from dnsproxy.demo.lab import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

WATCH = """
table ip watch
delete table ip watch
table ip watch {
    chain in {
        type filter hook input priority 0
        udp dport 53 counter
        tcp dport 53 tcp flags & psh == psh counter
    }
}
"""
PROXY, PROXY6 = "10.1.0.1", "fd00:1::1"


@pytest.fixture(scope="module")
def place():
    with site() as made:
        zone = numbered(1000) + "\n" + "\n".join(f"v{n} AAAA 2001:db8:1::{n:x}" for n in range(1, 50))
        many = "\n".join(f"many A 198.51.103.{n}" for n in range(120))
        bursts = "\n".join(f"b{n} AAAA {_burst_address(n)}" for n in range(300))
        chain = "alias CNAME middle\nmiddle CNAME n7"
        made.nsd(
            {
                "open.test": f"{zone}\n{bursts}\n{many}\n{chain}",
                "lookup.test": numbered(1000),
                "closed.test": numbered(9),
            }
        )
        made.write()
        made.template()
        made.start()
        with made.serve() as made.listener:
            yield made


def ask(place, name, kind="A", *, server=PROXY, namespace=None, tcp=False, **options):
    query = dns.message.make_query(name, kind, **options)
    exchange = dns.query.tcp if tcp else dns.query.udp
    return (namespace or place.client).call(lambda: exchange(query, server, timeout=5))


@pytest.mark.parametrize("burst", range(3))
def test_hundred_first_seen_names_in_flight_are_open_when_their_answers_arrive(place, burst):
    """The SYN to its address follows each answer within microseconds; a missing element would refuse it.

    What would be caught, a write behind an answer's back, is over in a fraction of a millisecond. So the
    sockets are made before, the address is known from the ID, and whoever waits for the answer comes before
    everybody else on this machine, the proxy included.
    """
    numbers = range(100 * burst, 100 * burst + 100)
    doors = {number: place.client.call(_idle_stream) for number in numbers}
    queries = [dns.message.make_query(f"b{number}.open.test", "AAAA", id=number) for number in numbers]
    with ExitStack() as stack:
        for door in doors.values():
            stack.enter_context(door)
        sock = stack.enter_context(
            place.client.call(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        )
        sock.connect((PROXY6, 53))
        sock.settimeout(10)
        wires = [query.to_wire() for query in queries]
        answers, results = place.client.call(lambda: _follow(sock, wires, doors))
        assert {answer.rcode() for answer in map(dns.message.from_wire, answers)} == {dns.rcode.NOERROR}
        assert set(results) <= {0, errno.EINPROGRESS}, "refused at once"
        assert [_result(door) for door in doors.values()] == [0] * 100
        assert {door.getpeername()[0] for door in doors.values()} == {_burst_address(n) for n in numbers}
    _accept_all(place)
    assert place.statistics()["sets"]["timeouts"] == 0


def _burst_address(number):
    return f"2001:db8:1::b:{number + 1:x}"


def _idle_stream():
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def _follow(sock, wires, doors):
    """Ask, and connect each door at the moment in which the answer with its number is there."""
    targets = {
        number.to_bytes(2, "big"): (door, (_burst_address(number), 443)) for number, door in doors.items()
    }
    with suppress(PermissionError):  # some containers do not let root; then the test is merely less sharp
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # this thread, which ends with the call
    answers, results = [], []
    for wire in wires:
        sock.send(wire)
    for _ in wires:
        answer = sock.recv(4096)
        door, target = targets[answer[:2]]
        results.append(door.connect_ex(target))
        answers.append(answer)
    return answers, results


def _result(door):
    """Return what became of a connection, as an errno; 0: open."""
    assert select.select([], [door], [], 5)[1], "neither open nor refused"
    return door.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _accept_all(place):
    """Make room in the queue of connections that the world has not accepted."""
    with suppress(BlockingIOError):
        while True:
            place.listener.accept()[0].close()


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("server", [PROXY, PROXY6])
def test_an_allowed_name_opens_its_address_and_port_and_nothing_else(place, tcp, server):
    number = 300 + 2 * tcp + (server == PROXY6)
    address = f"198.51.{100 + number // 256}.{number % 256}"
    with pytest.raises(OSError, match="refused"):
        open_connection(place.client, address)
    ask(place, f"n{number}.open.test", server=server, tcp=tcp)
    open_connection(place.client, address).close()
    for who, port in ((place.other, 443), (place.client, 444)):
        with pytest.raises(OSError, match=r"refused|route|prohibited"):
            open_connection(who, address, port)


def test_ipv6_addresses_open_too(place):
    with pytest.raises(OSError, match=r"refused|denied"):
        open_connection(place.client, "2001:db8:1::9")
    ask(place, "v9.open.test", "AAAA", server=PROXY6)
    open_connection(place.client, "2001:db8:1::9").close()


def test_a_chain_opens_for_the_name_that_was_asked(place):
    answer = ask(place, "alias.open.test")
    assert len(answer.answer) == 3
    assert '198.51.100.7 . tcp . 443 comment "alias.open.test."' in place.elements()


@pytest.mark.parametrize("kind", ["A", "AAAA", "TXT", "MX", "HTTPS", "ANY"])
@pytest.mark.parametrize("tcp", [False, True])
def test_a_denied_name_never_leaves_the_router(place, kind, tcp):
    """Queries to the name server are counted by the kernel on the far side; a stream may close meanwhile."""
    place.world.run("nft", "-f", "-", stdin=WATCH)
    assert ask(place, "n1.closed.test", kind, tcp=tcp).rcode() == dns.rcode.NXDOMAIN
    assert place.world.run("nft", "list", "table", "ip", "watch").stdout.count("counter packets 0 ") == 2


def test_an_answer_is_the_upstreams_byte_for_byte(place):
    for kind, options in (
        ("A", {}),
        ("SOA", {"use_edns": 0, "payload": 4096}),
        ("TXT", {"want_dnssec": True}),
    ):
        query = dns.message.make_query("n5.lookup.test", kind, **options)
        asked = partial(dns.query.udp, query, timeout=5)
        mine = place.client.call(partial(asked, PROXY)).wire
        theirs = place.router.call(partial(asked, "192.0.2.53")).wire
        assert mine == theirs


def test_an_answer_too_large_for_the_client_is_cut_and_whole_over_tcp(place):
    assert ask(place, "many.open.test").flags & 0x200
    whole = ask(place, "many.open.test", tcp=True)
    assert len(whole.answer[0]) == 120
    assert {f"198.51.103.{n}" for n in range(120)} <= place.addresses()


def test_thousand_tcp_queries_over_ten_connections_none_lost(place):
    async def pipeline(number, socks):
        reader, writer = await asyncio.open_connection(sock=socks[number])
        names = [f"n{(number * 100 + each) % 1000}.lookup.test" for each in range(100)]
        for ident, name in enumerate(names):
            wire = dns.message.make_query(name, "A", id=ident).to_wire()
            writer.write(struct.pack(">H", len(wire)) + wire)
        seen = {}
        for _ in names:
            (length,) = struct.unpack(">H", await reader.readexactly(2))
            answer = dns.message.from_wire(await reader.readexactly(length))
            seen[answer.id] = answer.question[0].name.to_text(omit_final_dot=True)
        writer.close()
        return seen == dict(enumerate(names))

    async def all_of_them():
        socks = place.client.call(lambda: [socket.create_connection((PROXY, 53)) for _ in range(10)])
        return await asyncio.gather(*(pipeline(number, socks) for number in range(10)))

    with asyncio.Runner() as runner:
        assert runner.run(all_of_them()) == [True] * 10


def test_garbage_at_both_listeners_stops_nothing(place):
    noise = random.Random(4711)
    query = dns.message.make_query("n1.lookup.test", "A").to_wire()
    with place.client.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.connect((PROXY, 53))
        for number in range(20_000):
            mutant = bytearray(query if number % 2 else noise.randbytes(noise.randrange(200)))
            for _ in range(noise.randrange(4)):
                if mutant:
                    mutant[noise.randrange(len(mutant))] = noise.randrange(256)
            sock.send(bytes(mutant))
            while select.select([sock], [], [], 0)[0]:
                sock.recv(4096)
    for _ in range(200):
        with place.client.call(lambda: socket.create_connection((PROXY, 53))) as stream:
            stream.send(noise.randbytes(noise.randrange(600)))
    assert ask(place, "n1.lookup.test").rcode() == dns.rcode.NOERROR
    assert ask(place, "n1.lookup.test", tcp=True).rcode() == dns.rcode.NOERROR
    assert place.proxy.poll() is None


def test_an_open_connection_and_a_new_one_survive_a_flush_under_load(place):
    """`flush ruleset` takes our rules too, which are the operator's to load again; the sets are ours."""
    for number in range(400, 500):
        ask(place, f"n{number}.open.test")
    expected = place.addresses()
    assert len(expected) >= 100
    before = place.statistics()["sets"]
    load = place.client.popen("dnsperf", "-s", PROXY, "-d", str(_queries(place)), "-l", "4", "-Q", "2000")
    wait_for(lambda: place.statistics()["queries"]["queries"] > 1000, 10, "load")
    flushed = time.monotonic()
    place.router.run("nft", "flush", "ruleset")
    wait_for(lambda: _present(place) and expected <= place.addresses(), 10, "the sets")
    print(f"sets complete {time.monotonic() - flushed:.3f} s after the flush, reading them back included")
    load.wait(20)
    after = place.statistics()["sets"]
    assert after["repairs"] > before["repairs"]
    assert after["drift"] > before["drift"]
    assert " Queries lost:         0" in _output(place, load)
    place.template()
    open_connection(place.client, "198.51.101.144").close()


def _queries(place):
    path = place.directory / "queries"
    path.write_text("".join(f"n{number}.open.test A\n" for number in range(400, 600)))
    return path


def _output(place, process):
    return (place.directory / f"client-{place.client.processes.index(process)}.log").read_text()


def _present(place):
    return place.router.run("nft", "list", "set", "inet", "dnsproxy", LEARNED, check=False).returncode == 0


@pytest.mark.parametrize(
    "command", ["delete table inet dnsproxy", f"flush set inet dnsproxy {LEARNED}",
                f"delete element inet dnsproxy {LEARNED} {{ 198.51.101.144 . tcp . 443 }}",
                f"add element inet dnsproxy {LEARNED} {{ 198.51.103.250 . tcp . 443 }}"]
)  # fmt: skip
def test_what_others_do_to_the_sets_is_undone(place, command):
    ask(place, "n400.open.test")
    expected = place.addresses()
    place.router.run("nft", *command.split(" ", 2)[:2], command.split(" ", 2)[2])
    wait_for(lambda: _present(place) and place.addresses() == expected, 10, "the repair")
    place.template()


def test_a_policy_swap_by_symlink_closes_what_is_no_longer_allowed(place):
    """As kubelet does it: a new directory, and a link renamed over the old one."""
    original = (place.policies / "policy.yaml").read_text()
    ask(place, "n600.open.test")
    ask(place, "n601.open.test")
    (place.policies / "policy.yaml").write_text(
        original.replace('"*.open.test:443/TCP"', '"n601.open.test:443/TCP"')
    )
    wait_for(lambda: place.addresses() == {"198.51.102.89"}, 10, "the sets follow the policy")
    assert ask(place, "n600.open.test").rcode() == dns.rcode.NXDOMAIN
    (place.policies / "policy.yaml").write_text(original)
    wait_for(lambda: "198.51.102.88" in place.addresses(), 10, "cached names are picked up at once")


def test_a_reload_with_a_fault_changes_nothing_and_says_so(place):
    policy = place.policies / "policy.yaml"
    original = policy.read_text()
    policy.write_text(original.replace("resolve", "resolv"))
    entry = place.await_log("have faults")
    assert "policy.yaml:" in entry["faults"]
    assert "did you mean" in entry["faults"]
    assert ask(place, "n610.open.test").rcode() == dns.rcode.NOERROR
    policy.write_text(original)


def test_sighup_reads_the_upstreams_again(place):
    text = place.config.read_text()
    place.config.write_text(text.replace("192.0.2.53", "2001:db8:53::53"))
    place.proxy.send_signal(signal.SIGHUP)
    place.await_log("upstreams in force")
    assert ask(place, "n620.open.test").rcode() == dns.rcode.NOERROR
    place.config.write_text(text)
    place.proxy.send_signal(signal.SIGHUP)
    place.await_log("upstreams in force", 2)


def test_a_restart_closes_nobody_out(place):
    """The sets outlive the daemon; the next one adopts what the policy still grants."""
    ask(place, "n640.open.test")
    expected = place.addresses()
    with open_connection(place.client, "198.51.102.128") as connection:
        assert place.stop() == 0
        assert place.addresses() == expected
        place.start()
        assert place.addresses() == expected
        connection.send(b"x")
    open_connection(place.client, "198.51.102.128").close()
