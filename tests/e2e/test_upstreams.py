"""Upstream servers as they are: NSD, unbound and dnsmasq, one that dies, and one that answers as it likes.

192.0.2.53   NSD "first"     .54  NSD "second", asked before it     .55  dnsmasq     .56  unbound
192.0.2.57   whatever a test puts there
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import struct
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product

import dns.edns
import dns.flags
import dns.message
import dns.query
import dns.rcode
import dns.rrset
import pytest
from sites import numbered, site

from dnsproxy.demo.lab import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

PROXY = "10.1.0.1"
FIRST, SECOND, DNSMASQ, UNBOUND, OURS = (f"192.0.2.{number}" for number in range(53, 58))
FIRST_SAYS, SECOND_SAYS = "198.51.100.53", "198.51.100.54"

POLICY = """
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: test}
spec:
  endpointSelector: {matchLabels: {app: test}}
  resolve: ["**.test"]
"""
ROUTES = {
    "corp.test": [FIRST],
    "lab.corp.test": [SECOND],
    "first.test": [FIRST],
    "masq.test": [DNSMASQ],
    "bound.test": [UNBOUND],
    "ours.test": [OURS],
}
UNBOUND_CONF = f"""
server:
  interface: {UNBOUND}
  outgoing-interface: {UNBOUND}
  access-control: 0.0.0.0/0 allow
  do-not-query-localhost: no
  do-daemonize: no
  module-config: "iterator"
  local-zone: "test." nodefault
  cache-max-ttl: 0
  rrset-roundrobin: no
  username: ""
  chroot: ""
  use-syslog: no
  pidfile: ""
remote-control:
  control-enable: no
forward-zone:
  name: "."
  forward-addr: {FIRST}
"""
MUTE = f"table ip mute {{ chain in {{ type filter hook input priority 0; ip daddr {SECOND} drop; }}; }}"
HANDSHAKES = """
table ip handshakes
delete table ip handshakes
table ip handshakes {
    chain out {
        type filter hook output priority 0
        tcp dport 53 tcp flags & (syn | ack) == syn counter
    }
}
"""


def zones(who):
    """What an NSD serves: the same names on both, with different answers."""
    names = "\n".join(f"{name} A {who}" for name in ("who", "lab", "who.lab", "xlab", "a.b.lab"))
    return {"open.test": f"{names}\n{numbered(200)}", "corp.test": names}


@pytest.fixture(scope="module")
def place():
    with site() as made:
        made.world.address("router", *(f"{address}/24" for address in (SECOND, DNSMASQ, UNBOUND, OURS)))
        many = "\n".join(f"many A 198.51.103.{number}" for number in range(120))
        served = dict.fromkeys(("first.test", "masq.test", "bound.test"), f"{numbered(200)}\n{many}")
        made.nsd(zones(FIRST_SAYS) | served, FIRST)
        made.second = made.nsd(zones(SECOND_SAYS), SECOND)
        start_dnsmasq(made)
        start_unbound(made)
        made.write(POLICY, upstream={"servers": [SECOND, FIRST], "routes": ROUTES, "attempt": 0.3})
        made.start()
        yield made


def start_dnsmasq(made):
    options = [
        "--no-resolv",
        "--no-hosts",
        "--bind-interfaces",
        "--cache-size=0",
        "--user=root",
        "--pid-file",
    ]
    made.world.popen(
        "dnsmasq", "-k", "-C", "/dev/null", *options, f"--server={FIRST}", f"--listen-address={DNSMASQ}"
    )
    made.await_server(DNSMASQ, "masq.test")


def start_unbound(made):
    path = made.directory / "unbound.conf"
    path.write_text(UNBOUND_CONF)
    made.world.popen("unbound", "-d", "-c", str(path))
    made.await_server(UNBOUND, "bound.test")


def transfer(namespace, wire, server, *, tcp=False):
    """Ask with exactly these octets; return those of the answer."""
    query = dns.message.from_wire(wire)
    exchange = dns.query.tcp if tcp else dns.query.udp
    send = partial(exchange, query, server, timeout=5)
    query.to_wire = lambda *_, **__: wire
    return namespace.call(send).wire


def who(place, name="who.open.test", *, tcp=False):
    """Return the address that a name has by the server that answers."""
    exchange = dns.query.tcp if tcp else dns.query.udp
    query = dns.message.make_query(name, "A")
    answer = place.client.call(lambda: exchange(query, PROXY, timeout=5))
    assert answer.rcode() == dns.rcode.NOERROR
    return answer.answer[0][0].address


# -- who is asked ---------------------------------------------------------------------------------------


@contextmanager
def dead(place):
    """The second NSD is killed: its port is closed, which the network reports."""
    os.killpg(place.second.pid, signal.SIGKILL)
    place.second.wait(5)
    yield
    place.second = place.nsd(zones(SECOND_SAYS), SECOND)


@contextmanager
def mute(place):
    """Nothing that is sent to the second NSD arrives, and nobody says so."""
    place.world.run("nft", "-f", "-", stdin=MUTE)
    yield
    place.world.run("nft", "delete", "table", "ip", "mute")


@contextmanager
def load(place, mode, in_flight):
    """Ask without a pause; afterwards every answer must have been there and good."""
    queries = place.directory / "queries"
    queries.write_text("".join(f"n{number}.open.test A\n" for number in range(200)))
    command = [
        "dnsperf",
        "-s",
        PROXY,
        "-m",
        mode,
        "-d",
        str(queries),
        "-l",
        "200",
        "-q",
        in_flight,
        "-Q",
        "500",
    ]
    log = place.directory / "dnsperf.log"
    process = place.client.popen(*command, log=log)
    yield
    process.send_signal(signal.SIGINT)
    process.wait(20)
    report = log.read_text()
    completed = int(re.search(r"Queries completed: +(\d+)", report)[1])
    assert completed > 100, report
    assert f"Response codes:       NOERROR {completed} (100.00%)" in report
    assert re.search(r"Queries lost: +0 ", report), report


def said(place, event):
    return sum(event in entry["event"] for entry in place.events_of_log())


@pytest.mark.parametrize("mode", ["udp", "tcp"])
@pytest.mark.parametrize("outage", [dead, mute])
def test_when_the_first_server_fails_answers_go_on_and_when_it_is_back_it_is_asked_again(place, outage, mode):
    tcp = mode == "tcp"
    wait_for(lambda: who(place, tcp=tcp) == SECOND_SAYS, 90, "the second NSD to be asked first")
    failed, back = (said(place, event) for event in ("does not answer", "answers again"))
    with load(place, mode, "10"):
        with outage(place):
            entry = place.await_log("does not answer", failed + 1)
            assert entry["server"] == f"{SECOND}:53"
            assert [who(place, tcp=tcp) for _ in range(20)] == [FIRST_SAYS] * 20
        wait_for(lambda: who(place, tcp=tcp) == SECOND_SAYS, 90, "the second NSD to be asked again")
        place.await_log("answers again", back + 1)
        assert [who(place, tcp=tcp) for _ in range(20)] == [SECOND_SAYS] * 20


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("who.corp.test", FIRST_SAYS),
        ("who.lab.corp.test", SECOND_SAYS),
        ("a.b.lab.corp.test", SECOND_SAYS),
        ("lab.corp.test", SECOND_SAYS),
        ("LAB.Corp.TEST", SECOND_SAYS),
        ("xlab.corp.test", FIRST_SAYS),
        ("who.open.test", SECOND_SAYS),
        ("who.lab.open.test", SECOND_SAYS),
    ],
)
def test_the_route_with_the_longest_suffix_wins(place, name, says, tcp):
    assert who(place, name, tcp=tcp) == says


# -- what they say --------------------------------------------------------------------------------------

UPSTREAMS = [("first.test", FIRST), ("masq.test", DNSMASQ), ("bound.test", UNBOUND)]


@pytest.mark.parametrize("transport", ["+notcp", "+tcp"])
@pytest.mark.parametrize("tool", ["dig", "kdig"])
@pytest.mark.parametrize(("domain", "server"), UPSTREAMS)
def test_the_usual_tools_get_their_answers(place, domain, server, tool, transport):
    output = place.client.run(tool, f"@{PROXY}", transport, "+short", f"n7.{domain}", "A").stdout
    assert output == "198.51.100.7\n"
    output = place.client.run(tool, f"@{PROXY}", transport, f"none.{domain}", "A").stdout
    assert re.search(r"status: NXDOMAIN", output)


@pytest.mark.parametrize("tool", ["dig", "kdig"])
@pytest.mark.parametrize("domain", [domain for domain, _ in UPSTREAMS])
def test_many_queries_over_one_connection_of_a_tool(place, domain, tool):
    place.client.run("nft", "-f", "-", stdin=HANDSHAKES)
    asked = [word for number in range(20) for word in (f"n{number}.{domain}", "A")]
    output = place.client.run(tool, f"@{PROXY}", "+tcp", "+keepopen", "+short", *asked).stdout
    assert output.split() == [f"198.51.100.{number}" for number in range(20)]
    assert "counter packets 1 " in place.client.run("nft", "list", "table", "ip", "handshakes").stdout


@pytest.mark.parametrize("tool", ["dig", "kdig"])
@pytest.mark.parametrize("transport", ["+notcp", "+tcp"])
def test_the_name_of_the_server_is_that_of_the_upstream(place, tool, transport):
    output = place.client.run(tool, f"@{PROXY}", transport, "+nsid", "n1.first.test").stdout
    assert re.search(rf'NSID: .*"{re.escape(FIRST)}"', output), output


@pytest.mark.parametrize("tool", ["dig", "kdig"])
@pytest.mark.parametrize("domain", [domain for domain, _ in UPSTREAMS])
def test_a_cut_answer_makes_a_tool_ask_again_over_tcp(place, domain, tool):
    done = place.client.run(tool, f"@{PROXY}", f"many.{domain}", "A", "+bufsize=512")
    output = done.stdout + done.stderr
    assert re.search(r"(?i)truncated", output), output
    assert set(re.findall(r"\sA\s+(\S+)", output)) >= {f"198.51.103.{number}" for number in range(120)}


@pytest.mark.parametrize("tool", ["dig", "kdig"])
def test_the_size_that_a_tool_announces_holds(place, tool):
    asked = [tool, f"@{PROXY}", "many.first.test", "A", "+ignore"]
    large = place.client.run(*asked, "+bufsize=4096").stdout
    assert "ANSWER: 120" in large
    assert re.search(r"(?i)flags:[^;]* tc", place.client.run(*asked, "+bufsize=1232").stdout)


OPTIONS = [
    dns.edns.GenericOption(dns.edns.NSID, b""),
    dns.edns.GenericOption(65_001, b"anything"),
    dns.edns.ECSOption("198.51.100.0", 24),
]
FLAGS = list(product([0, dns.flags.AD], [0, dns.flags.CD], [0, dns.flags.DO]))


def questions(domain):
    """Queries of every kind that a client may send."""
    for ad, cd, do in FLAGS:
        query = dns.message.make_query(f"n1.{domain}", "A", use_edns=0, payload=1400, options=OPTIONS)
        query.flags |= ad | cd
        query.ednsflags |= do
        yield query
    for name, kind in (("N2", "A"), ("none", "A"), ("n3", "AAAA"), ("many", "A"), ("n4", "TYPE65400")):
        yield dns.message.make_query(f"{name}.{domain}", kind)


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize(("domain", "server"), UPSTREAMS)
def test_an_answer_is_what_the_server_says_to_anybody_byte_for_byte(place, domain, server, tcp):
    for query in questions(domain):
        wire = query.to_wire()
        theirs = transfer(place.router, wire, server, tcp=tcp)
        assert transfer(place.client, wire, PROXY, tcp=tcp) == theirs, query


@pytest.mark.parametrize(("ad", "cd", "do"), FLAGS)
def test_all_but_the_id_passes_untouched_both_ways(place, ad, cd, do):
    """The server here answers with whatever flags and options come to its mind."""
    [query] = [each for each in questions("ours.test") if (each.flags & ad, each.flags & cd) == (ad, cd)][:1]
    query.flags = dns.flags.RD | ad | cd
    query.ednsflags = do
    wire = query.to_wire()
    answer = dns.message.make_response(query)
    answer.flags |= dns.flags.AA | dns.flags.RA | (ad ^ dns.flags.AD) | cd | 0x40
    answer.use_edns(0, do, 1400, options=OPTIONS)
    answer.answer = [dns.rrset.from_text(query.question[0].name, 60, "IN", "A", "198.51.100.1")]
    with bound(place.world, socket.SOCK_DGRAM) as server, asking(place.client) as client:
        client.send(wire)
        received, peer = server.recvfrom(4096)
        assert received[2:] == wire[2:]
        reply = answer.to_wire()
        server.sendto(received[:2] + reply[2:], peer)
        assert client.recv(4096) == reply


@contextmanager
def bound(namespace, kind):
    with namespace.call(lambda: socket.socket(socket.AF_INET, kind)) as sock:
        sock.settimeout(5)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((OURS, 53))
        yield sock


@contextmanager
def asking(namespace):
    with namespace.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.settimeout(5)
        sock.connect((PROXY, 53))
        yield sock


# -- in which order they say it -------------------------------------------------------------------------


class Whimsical:
    """A server that answers each query after some milliseconds of its own choice."""

    def __init__(self):
        self.writers = []
        self._whim = random.Random(7766)

    async def serve(self, reader, writer):
        self.writers.append(writer)
        loop = asyncio.get_running_loop()
        with suppress(asyncio.IncompleteReadError):
            while True:
                answer = framed(answer_to(await receive(reader)))
                loop.call_later(self._whim.uniform(0.0, 0.005), writer.write, answer)

    async def close(self):
        for writer in self.writers:
            writer.close()
            await writer.wait_closed()


def framed(wire):
    return struct.pack(">H", len(wire)) + wire


async def receive(reader):
    (length,) = struct.unpack(">H", await reader.readexactly(2))
    return await reader.readexactly(length)


def answer_to(query):
    """Return the address that goes with the number in a name; by hand, so that no query has to wait."""
    number = int(query[14 : 13 + query[12]])
    record = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04" + socket.inet_aton(address(number))
    return query[:2] + b"\x85\x00\x00\x01\x00\x01\x00\x00\x00\x00" + query[12:] + record


def address(number):
    return f"198.51.{100 + number // 256}.{number % 256}"


def queries_for(numbers):
    return [
        framed(dns.message.make_query(f"n{number}.ours.test", "A", id=ident).to_wire())
        for ident, number in enumerate(numbers)
    ]


async def ask_all(sock, frames):
    """Ask for all at once; return the answers in the order of their coming."""
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(b"".join(frames))
    answers = [await receive(reader) for _ in frames]
    writer.close()
    await writer.wait_closed()
    return answers


def told(wire):
    """Return what an answer says, as (ID, name, address)."""
    answer = dns.message.from_wire(wire)
    return answer.id, answer.question[0].name.to_text(omit_final_dot=True), answer.answer[0][0].address


def test_answers_overtake_each_other_on_a_pipelined_connection_and_each_finds_its_query(place):
    whimsical = Whimsical()
    lots = [range(first, first + 100) for first in range(0, 1000, 100)]
    frames = [queries_for(numbers) for numbers in lots]

    async def play(listener):
        server = await asyncio.start_server(whimsical.serve, sock=listener)
        socks = place.client.call(lambda: [socket.create_connection((PROXY, 53)) for _ in lots])
        answers = await asyncio.gather(*map(ask_all, socks, frames))
        server.close()
        await whimsical.close()
        return answers

    with bound(place.world, socket.SOCK_STREAM) as listener, asyncio.Runner() as runner:
        answers = runner.run(play(listener))
    for numbers, wires in zip(lots, answers, strict=True):
        got = [told(wire) for wire in wires]
        expected = [(ident, f"n{number}.ours.test", address(number)) for ident, number in enumerate(numbers)]
        assert sorted(got) == expected
        assert got != expected
    assert len(whimsical.writers) == 1, "all of it over one connection of the proxy's"
