"""Resolvers that tell the asker's address, played by real UDP servers on loopback."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from dnsproxy.addresses import from_text
from dnsproxy.dyndns.sources import SourceError, resolvers

LOOPBACK = {4: ("127.0.0.1",), 16: ("::1",)}


class Server(asyncio.DatagramProtocol):
    """`play(query, address of the asker)` returns the octets of each datagram that goes back."""

    def __init__(self, play):
        self.play, self.queries = play, []

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, peer):
        query = dns.message.from_wire(data)
        self.queries.append(query)
        for octets in self.play(query, peer[0]):
            self.transport.sendto(octets, peer)


@asynccontextmanager
async def server(play, host="127.0.0.1", port=0):
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(lambda: Server(play), local_addr=(host, port))
    protocol.port = transport.get_extra_info("sockname")[1]
    try:
        yield protocol
    finally:
        transport.close()


def answer(query, *records, change=lambda reply: None):
    reply = dns.message.make_response(query)
    asked = query.question[0]
    if records:
        reply.answer.append(dns.rrset.from_text(asked.name, 0, asked.rdclass, asked.rdtype, *records))
    change(reply)
    return reply.to_wire()


def mirror(query, peer):
    text = peer if query.question[0].rdtype in resolvers.ADDRESS_TYPE.values() else f'"{peer}"'
    return [answer(query, text)]


def at(service, port, servers=LOOPBACK):
    real = resolvers.SERVICES[service]
    return resolvers.Service(real.name, servers, real.rdclass, real.rdtype, port)


@pytest.mark.parametrize("service", ["opendns", "cloudflare"])
@pytest.mark.parametrize(("host", "length"), [("127.0.0.1", 4), ("::1", 16)])
async def test_the_address_of_the_asker(service, host, length):
    async with server(mirror, host) as played:
        assert await resolvers.ask(at(service, played.port), length, 5.0) == from_text(host)
    [query] = played.queries
    expected = {
        ("opendns", 4): "myip.opendns.com. IN A",
        ("opendns", 16): "myip.opendns.com. IN AAAA",
        ("cloudflare", 4): "whoami.cloudflare. CH TXT",
        ("cloudflare", 16): "whoami.cloudflare. CH TXT",
    }
    assert query.question[0].to_text() == expected[service, length]


def _truncate(reply):
    reply.flags |= dns.flags.TC


def _refuse(reply):
    reply.set_rcode(dns.rcode.REFUSED)


def _rename(reply):
    reply.answer[0].name = dns.name.from_text("elsewhere.example")


@pytest.mark.parametrize(
    ("service", "records", "change", "word"),
    [
        ("opendns", ["8.8.8.8"], _refuse, "REFUSED"),
        ("opendns", ["8.8.8.8"], _truncate, "part"),
        ("opendns", ["8.8.8.8"], _rename, "0 records"),
        ("opendns", [], lambda reply: None, "0 records"),
        ("opendns", ["8.8.8.8", "8.8.4.4"], lambda reply: None, "2 records"),
        ("cloudflare", ['"8.8.8.8" "8.8.4.4"'], lambda reply: None, "2 strings"),
        ("cloudflare", ['"8.8.8.8"', '"8.8.4.4"'], lambda reply: None, "2 records"),
        ("cloudflare", ['"nobody"'], lambda reply: None, "no address"),
        ("cloudflare", ['"\\255\\001"'], lambda reply: None, "no address"),
    ],
)
async def test_what_is_no_answer(service, records, change, word):
    async with server(lambda query, _: [answer(query, *records, change=change)]) as played:
        with pytest.raises(SourceError, match=word):
            await resolvers.ask(at(service, played.port), 4, 5.0)


async def test_datagrams_that_are_no_answer_to_the_question_do_not_end_the_wait():
    def play(query, peer):
        other = dns.message.make_query("other.example", "A")
        forged = answer(query, "8.8.8.8", change=lambda reply: setattr(reply, "id", query.id ^ 1))
        return [b"", b"nonsense", answer(other, "8.8.4.4"), forged, answer(query, "9.9.9.9")]

    async with server(play) as played:
        assert await resolvers.ask(at("opendns", played.port), 4, 5.0) == from_text("9.9.9.9")


async def test_the_second_server_is_asked_where_the_first_one_is_silent():
    async with server(lambda query, _: []) as silent, server(mirror, "127.0.0.2", silent.port) as played:
        service = at("opendns", silent.port, {4: ("127.0.0.1", "127.0.0.2")})
        assert await resolvers.ask(service, 4, 1.0) == from_text("127.0.0.1")
        assert (len(silent.queries), len(played.queries)) == (1, 1)


async def test_silence_ends():
    async with server(lambda query, _: []) as silent:
        service = at("opendns", silent.port, {4: ("127.0.0.1", "127.0.0.1")})
        with pytest.raises(SourceError, match=r"127\.0\.0\.1 and 127\.0\.0\.1 within 0\.2 s"):
            await resolvers.ask(service, 4, 0.2)
