"""The zone server, read by dnspython, which shares no code with it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import dns.asyncquery
import dns.edns
import dns.flags
import dns.message
import dns.query
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.demo import zone
from dnsproxy.errors import DocumentError, NetworkError

TEXT = """
$ORIGIN demo.test.
$TTL 60
@        SOA   ns.demo.test. hostmaster.demo.test. ( 1 3600 600 86400 30 )
@        NS    ns.demo.test.
www      A     192.0.2.1
www      AAAA  2001:db8::1
alias    CNAME deeper.demo.test.
deeper   CNAME www.demo.test.
away     CNAME www.example.com.
lost     CNAME nothing.demo.test.
loop     CNAME loop.demo.test.
a.b.c    A     192.0.2.2
*.wild   A     192.0.2.3
*.wild   TXT   "text"
x.wild   TXT   "here"
*.star   CNAME www.demo.test.
""" + "\n".join(f"big A 192.0.2.{number}" for number in range(100))
ZONE = zone.read(TEXT, "test")


def ask(name, qtype="A", *, stream=False, **options):
    query = dns.message.make_query(name, qtype, **options)
    reply = dns.message.from_wire(zone.answer(ZONE, query.to_wire(), stream=stream))
    assert query.is_response(reply)
    return reply


def records(reply):
    return [f"{rrset.name} {rrset.ttl} {record.to_text()}" for rrset in reply.answer for record in rrset]


@pytest.mark.parametrize(
    ("name", "qtype", "rcode", "answer", "negative"),
    [
        ("www.demo.test", "A", "NOERROR", ["www.demo.test. 60 192.0.2.1"], False),
        ("WWW.Demo.test", "AAAA", "NOERROR", ["WWW.Demo.test. 60 2001:db8::1"], False),
        ("demo.test", "NS", "NOERROR", ["demo.test. 60 ns.demo.test."], False),
        ("www.demo.test", "MX", "NOERROR", [], True),
        ("none.demo.test", "A", "NXDOMAIN", [], True),
        ("c.demo.test", "A", "NOERROR", [], True),  # exists between a.b.c and the zone
        ("z.b.c.demo.test", "A", "NXDOMAIN", [], True),
        (
            "alias.demo.test",
            "A",
            "NOERROR",
            [
                "alias.demo.test. 60 deeper.demo.test.",
                "deeper.demo.test. 60 www.demo.test.",
                "www.demo.test. 60 192.0.2.1",
            ],
            False,
        ),
        ("alias.demo.test", "CNAME", "NOERROR", ["alias.demo.test. 60 deeper.demo.test."], False),
        ("away.demo.test", "A", "NOERROR", ["away.demo.test. 60 www.example.com."], False),
        ("lost.demo.test", "A", "NXDOMAIN", ["lost.demo.test. 60 nothing.demo.test."], True),
        ("one.wild.demo.test", "A", "NOERROR", ["one.wild.demo.test. 60 192.0.2.3"], False),
        ("one.two.wild.demo.test", "A", "NOERROR", ["one.two.wild.demo.test. 60 192.0.2.3"], False),
        ("x.wild.demo.test", "A", "NOERROR", [], True),  # a name that exists hides the wildcard
        ("y.x.wild.demo.test", "A", "NXDOMAIN", [], True),  # and is the closest encloser below it
        ("wild.demo.test", "A", "NOERROR", [], True),
        (
            "s.star.demo.test",
            "A",
            "NOERROR",
            ["s.star.demo.test. 60 www.demo.test.", "www.demo.test. 60 192.0.2.1"],
            False,
        ),
    ],
)
def test_answers(name, qtype, rcode, answer, negative):
    reply = ask(name, qtype)
    assert dns.rcode.to_text(reply.rcode()) == rcode
    assert records(reply) == answer
    assert [rrset.ttl for rrset in reply.authority if rrset.rdtype == dns.rdatatype.SOA] == [30] * negative
    assert reply.flags & dns.flags.AA


def test_every_type_of_a_name():
    assert len(records(ask("www.demo.test", "ANY"))) == 2


def test_a_chain_that_bites_its_tail_ends():
    assert len(ask("loop.demo.test").answer[0]) == 1


@pytest.mark.parametrize(
    ("name", "rdclass"), [("www.example.com", "IN"), ("demo.testy", "IN"), ("www.demo.test", "CH")]
)
def test_what_is_not_ours_is_refused(name, rdclass):
    reply = ask(name, rdclass=rdclass)
    assert reply.rcode() == dns.rcode.REFUSED
    assert not reply.flags & dns.flags.AA


def test_edns_is_answered_with_our_size_and_their_do():
    reply = ask("www.demo.test", use_edns=0, payload=4096, want_dnssec=True)
    assert (reply.payload, reply.ednsflags) == (zone.UDP_SIZE, dns.flags.DO)
    assert ask("www.demo.test").edns == -1


@pytest.mark.parametrize("options", [{}, {"use_edns": 0, "payload": 512}, {"use_edns": 0, "payload": 65535}])
def test_too_big_for_a_datagram(options):
    reply = ask("big.demo.test", **options)
    assert reply.flags & dns.flags.TC
    assert not reply.answer
    assert reply.edns == (0 if options else -1)
    whole = ask("big.demo.test", stream=True, **options)
    assert not whole.flags & dns.flags.TC
    assert len(whole.answer[0]) == 100


def test_what_is_no_query():
    query = dns.message.make_query("www.demo.test", "A").to_wire()
    assert zone.answer(ZONE, query[:11], stream=False) is None
    assert zone.answer(ZONE, query[:2] + b"\x80" + query[3:], stream=False) is None  # a response
    assert zone.answer(ZONE, query[:2] + b"\x29" + query[3:], stream=False) == query[
        :2
    ] + b"\xa9\x04" + bytes(8)
    assert zone.answer(ZONE, query[:-3], stream=False) == query[:2] + b"\x81\x01" + bytes(8)


@given(st.binary(max_size=60), st.booleans())
def test_no_bytes_break_it(tail, stream):
    reply = zone.answer(ZONE, b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + tail, stream=stream)
    assert reply is not None
    assert reply[:2] == b"\x12\x34"
    assert reply[2] & 0x80


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("www A", "not a zone file"),
        ("$ORIGIN demo.test.\nwww 60 A 192.0.2.1", "expected one SOA record, there are 0"),
        (TEXT + "\nwww.example.com. 60 A 192.0.2.1", "www.example.com. is outside the zone demo.test."),
    ],
)
def test_unusable_files_say_why(text, why):
    with pytest.raises(DocumentError, match=f"^here: {why}"):
        zone.read(text, "here")


async def over(transport, host, port, name):
    ask_by = {"udp": dns.asyncquery.udp, "tcp": dns.asyncquery.tcp}[transport]
    reply = await ask_by(dns.message.make_query(name, "A"), host, 5, port)
    return records(reply)


@pytest.mark.parametrize("transport", ["udp", "tcp"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_serves_and_reads_the_file_again_when_it_changes(tmp_path, host, transport):
    path = tmp_path / "zone"
    path.write_text(TEXT)
    said, seen = [], []
    port, server = await zone.serve(path, host, 0, said.append, seen.append)
    try:
        assert await over(transport, host, port, "www.demo.test") == ["www.demo.test. 60 192.0.2.1"]
        path.write_text(TEXT.replace("192.0.2.1\n", "192.0.2.7\n"))
        assert await over(transport, host, port, "www.demo.test") == ["www.demo.test. 60 192.0.2.7"]
        path.write_text("broken")
        assert await over(transport, host, port, "www.demo.test") == ["www.demo.test. 60 192.0.2.7"]
        path.unlink()
        assert await over(transport, host, port, "www.demo.test") == ["www.demo.test. 60 192.0.2.7"]
        path.write_text(TEXT)
        assert await over(transport, host, port, "www.demo.test") == ["www.demo.test. 60 192.0.2.1"]
    finally:
        server.close()
    assert said == [f"{path}: not a zone file (list index out of range); still serving what was there before"]
    assert seen == [f"{transport} www.demo.test. A"] * 5


async def test_a_connection_carries_many_queries_in_any_pieces(tmp_path):
    path = tmp_path / "zone"
    path.write_text(TEXT)
    port, server = await zone.serve(path, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        queries = [
            dns.message.make_query(name, "A", id=number)
            for number, name in enumerate(["www.demo.test", "big.demo.test"])
        ]
        stream = b"".join(
            len(wire).to_bytes(2, "big") + wire for wire in (query.to_wire() for query in queries)
        )
        for cut in range(len(stream)):
            writer.write(stream[cut : cut + 1])
            await writer.drain()
        for query in queries:
            length = int.from_bytes(await reader.readexactly(2), "big")
            assert query.is_response(dns.message.from_wire(await reader.readexactly(length)))
        server.close()
        assert await reader.read() == b""
    finally:
        writer.close()
        await writer.wait_closed()


async def test_files_and_addresses_that_are_not_to_be_had(tmp_path):
    with pytest.raises(DocumentError, match="no-such-file: cannot be read"):
        await zone.serve(tmp_path / "no-such-file", "127.0.0.1", 0)
    path = tmp_path / "zone"
    path.write_text(TEXT)
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(NetworkError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            await zone.serve(path, "127.0.0.1", port)


def free_port():
    datagrams, streams = zone.open_sockets("127.0.0.1", 0)
    with datagrams, streams:
        return datagrams.getsockname()[1]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_as_a_command(tmp_path, end):
    path = tmp_path / "zone"
    path.write_text(TEXT)
    port = free_port()
    command = [sys.executable, "-m", "dnsproxy.demo.zone", str(path), "--listen", f"127.0.0.1:{port}"]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout.readline() == f"listening on 127.0.0.1:{port}\n"
            reply = dns.query.udp(dns.message.make_query("www.demo.test", "A"), "127.0.0.1", 5, port)
            assert records(reply) == ["www.demo.test. 60 192.0.2.1"]
            assert server.stdout.readline() == "udp www.demo.test. A\n"
            server.send_signal(end)
            assert server.wait(10) == 0
        finally:
            server.kill()


def test_the_zone_of_the_demo_reads():
    demo = zone.read(Path("config/demo.zone").read_text(), "config/demo.zone")
    wire = dns.message.make_query("big.demo.test", "A", use_edns=0, payload=65535).to_wire()
    assert dns.message.from_wire(zone.answer(demo, wire, stream=False)).flags & dns.flags.TC
