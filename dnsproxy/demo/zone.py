"""A tiny authoritative name server for one zone file: the upstream of demonstrations and tests.

    python -m dnsproxy.demo.zone FILE --listen 192.0.2.53:53 --listen [2001:db8::53]:53

The file is read again whenever it changes, so an address can be rotated by writing it. Speed does not
matter here, clarity does: one datagram, one parsed message, one answer (RFC 1034 section 4.3.2, RFC 4592
for wildcards, RFC 2308 for negative answers). Runs on any asyncio loop.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from dnslib import CLASS, QTYPE, RCODE, RR, DNSHeader, DNSRecord
from dnslib import EDNS0 as OPT

from dnsproxy.config import SocketAddress, socket_address
from dnsproxy.errors import DocumentError, NetworkError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

UDP_SIZE = 1232  # octets we send in a datagram at most, whatever the client could take (DNS flag day 2020)
_PLAIN_SIZE = 512  # without EDNS, RFC 1035 section 4.2.1
_CHAIN = 16  # CNAMEs followed at most
_DO = 0x8000
_FORMERR, _NOTIMP = 1, 4

_log = logging.getLogger(__name__)

Labels: TypeAlias = tuple[bytes, ...]  # of a name, lower-cased, leftmost first
Say: TypeAlias = "Callable[[str], None]"


class Zone(NamedTuple):
    """The records of a zone by owner. `names` holds every name that exists, those between included."""

    origin: Labels
    soa: Any
    records: dict[Labels, list[Any]]
    names: frozenset[Labels]


def read(text: str, file: str) -> Zone:
    """Return the zone in a text; DocumentError if it is none."""
    try:
        found = list(RR.fromZone(text))
    except Exception as error:  # dnslib raises whatever a broken text leads to
        raise _unusable(file, f"not a zone file ({error or type(error).__name__})") from error
    soa = [record for record in found if record.rtype == QTYPE.SOA]
    if len(soa) != 1:
        raise _unusable(file, f"expected one SOA record, there are {len(soa)}")
    origin = _labels(soa[0].rname)
    records: dict[Labels, list[Any]] = {}
    for record in found:
        if not _inside(_labels(record.rname), origin):
            raise _unusable(file, f"{record.rname} is outside the zone {soa[0].rname}")
        records.setdefault(_labels(record.rname), []).append(record)
    names = {owner[cut:] for owner in records for cut in range(len(owner) - len(origin) + 1)}
    return Zone(origin, soa[0], records, frozenset(names))


def _unusable(file: str, why: str) -> DocumentError:
    return DocumentError([Problem(file, 0, 0, "", why)])


def _labels(name: Any) -> Labels:  # noqa: ANN401 - a DNSLabel; dnslib has no types
    return tuple(part.lower() for part in name.label)


def _inside(name: Labels, origin: Labels) -> bool:
    return name[len(name) - len(origin) :] == origin if len(name) >= len(origin) else False


def find(zone: Zone, name: Labels) -> list[Any] | None:
    """Return the records of a name, or of the wildcard that covers it; None if the name does not exist."""
    if name in zone.names:
        return zone.records.get(name, [])
    encloser = next(name[cut:] for cut in range(1, len(name)) if name[cut:] in zone.names)
    return zone.records.get((b"*", *encloser))


def resolve(zone: Zone, name: Any, qtype: int) -> tuple[int, list[Any], bool]:  # noqa: ANN401 - a DNSLabel
    """Return response code, answer records, and whether they end without what was asked for.

    The records are the chain of CNAMEs, as far as it stays in the zone, and what it ends at.
    """
    chain: list[Any] = []
    while _inside(_labels(name), zone.origin) and len(chain) < _CHAIN:
        found = find(zone, _labels(name))
        if found is None:
            return RCODE.NXDOMAIN, chain, True
        wanted = [_owned(record, name) for record in found if qtype in (record.rtype, QTYPE.ANY)]
        cname = [_owned(record, name) for record in found if record.rtype == QTYPE.CNAME]
        if wanted or not cname:
            return RCODE.NOERROR, chain + wanted, not wanted
        chain += cname
        name = cname[0].rdata.label
    return RCODE.NOERROR, chain, False


def _owned(record: Any, name: Any) -> Any:  # noqa: ANN401 - as above
    """Return the record as one of `name`, which differs from its owner under a wildcard."""
    return RR(name, record.rtype, record.rclass, record.ttl, record.rdata)


def answer(zone: Zone, wire: bytes, *, stream: bool) -> bytes | None:
    """Return the reply to a query; None to what must not be answered (too short, or a reply itself)."""
    if len(wire) < 12 or wire[2] & 0x80:
        return None
    if wire[2] & 0x78:
        return _bare(wire, _NOTIMP)
    try:
        query = DNSRecord.parse(wire)
        return (
            _sized(_reply(zone, query), query, stream=stream)
            if len(query.questions) == 1
            else _bare(wire, _FORMERR)
        )
    except Exception:  # dnslib raises whatever hostile bytes lead to
        return _bare(wire, _FORMERR)


def _bare(wire: bytes, rcode: int) -> bytes:
    """Return a header alone, with the query's ID, opcode and RD."""
    return wire[:2] + bytes((0x80 | wire[2] & 0x79, rcode)) + bytes(8)


def _reply(zone: Zone, query: Any) -> Any:  # noqa: ANN401 - DNSRecords
    """Return the reply, unsized. RA is set although we do not recurse: stubs behind a proxy look for it."""
    question = query.q
    reply = DNSRecord(
        DNSHeader(id=query.header.id, bitmap=0, qr=1, aa=1, ra=1, rd=query.header.rd), q=question
    )
    if question.qclass != CLASS.IN or not _inside(_labels(question.qname), zone.origin):
        reply.header.aa, reply.header.rcode = 0, RCODE.REFUSED
    else:
        reply.header.rcode, records, negative = resolve(zone, question.qname, question.qtype)
        reply.add_answer(*records)
        if negative:
            reply.add_auth(_negative(zone))
    return reply


def _negative(zone: Zone) -> Any:  # noqa: ANN401 - an RR
    """Return the SOA that says how long a name or type does not exist (RFC 2308 section 3)."""
    soa = zone.soa
    return RR(soa.rname, soa.rtype, soa.rclass, min(soa.ttl, soa.rdata.times[4]), soa.rdata)


def _sized(reply: Any, query: Any, *, stream: bool) -> bytes:  # noqa: ANN401 - DNSRecords
    """Return the reply as bytes, with OPT if the query had it; TC and no records if it is too big."""
    size = _PLAIN_SIZE
    for opt in [record for record in query.ar if record.rtype == QTYPE.OPT]:
        size = min(max(opt.rclass, _PLAIN_SIZE), UDP_SIZE)
        reply.add_ar(OPT(udp_len=UDP_SIZE, flags="do" if opt.ttl & _DO else ""))
    wire = bytes(reply.pack())
    if stream or len(wire) <= size:
        return wire
    reply.header.tc, reply.rr, reply.auth = 1, [], []
    return bytes(reply.pack())


class ZoneServer:
    """A zone file that is being served. `serve` makes it."""

    def __init__(self, path: Path, say: Say, report: Say) -> None:
        self._path = path
        self._say = say
        self._report = report
        self._text = self._read()
        self._zone = read(self._text, str(path))
        self._complained = False
        self._open: set[asyncio.BaseTransport] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, datagrams: socket.socket, streams: socket.socket) -> None:
        """Serve on two bound sockets."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Stream(self), sock=streams)
        await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=datagrams)

    def opened(self, transport: asyncio.BaseTransport) -> None:
        """Note a transport that `close` is to close."""
        self._open.add(transport)

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Forget a transport that has ended by itself."""
        self._open.discard(transport)

    def answer(self, wire: bytes, *, stream: bool) -> bytes | None:
        """Return the reply of the zone as the file has it now."""
        self._refresh()
        reply = answer(self._zone, wire, stream=stream)
        if reply is not None:
            self._report(f"{'tcp' if stream else 'udp'} {_question(reply)}")
        return reply

    def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server:
            self._server.close()
        for transport in tuple(self._open):
            transport.close()

    def _refresh(self) -> None:
        """Compare the text itself: `stat` sees no two changes in one tick of the file system's clock."""
        try:
            text = self._read()
            if text != self._text:
                self._text = text
                self._zone = read(text, str(self._path))
        except DocumentError as error:
            if not self._complained:
                self._say(f"{error}; still serving what was there before")
            self._complained = True
        else:
            self._complained = False

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(str(self._path), f"cannot be read: {error}") from error


def _question(reply: bytes) -> str:
    question = DNSRecord.parse(reply).questions
    return f"{question[0].qname} {QTYPE.get(question[0].qtype)}" if question else "not a query"


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: ZoneServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)
        self._server.opened(transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:  # noqa: ANN401 - two or four parts, by family
        reply = self._server.answer(data, stream=False)
        if reply is not None:
            self._transport.sendto(reply, addr)


class _Stream(asyncio.Protocol):
    """One TCP connection: messages behind their length (RFC 1035 section 4.2.2), answered in their order."""

    def __init__(self, server: ZoneServer) -> None:
        self._server = server
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.opened(transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's signature
        self._server.closed(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 2 and len(self._buffer) >= (
            end := 2 + int.from_bytes(self._buffer[:2], "big")
        ):
            reply = self._server.answer(self._buffer[2:end], stream=True)
            self._buffer = self._buffer[end:]
            if reply is not None:
                self._transport.write(len(reply).to_bytes(2, "big") + reply)


def open_sockets(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """Return a datagram and a listening socket on the same port; port 0 chooses one that is free for both."""
    while True:
        datagrams = _bound(socket.SOCK_DGRAM, host, port)
        try:
            streams = _bound(socket.SOCK_STREAM, host, datagrams.getsockname()[1])
        except NetworkError:
            datagrams.close()
            if port:
                raise
        else:
            streams.listen()
            return datagrams, streams


def _bound(kind: socket.SocketKind, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, kind)
    made.setblocking(False)
    try:
        if kind == socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise NetworkError(
            f"the zone server cannot listen on {SocketAddress(host, port)}: {error.strerror}"
        ) from error
    return made


async def serve(
    path: Path, host: str, port: int, say: Say = _log.warning, report: Say = lambda _: None
) -> tuple[int, ZoneServer]:
    """Serve a zone file over UDP and TCP; return the port (for 0 a free one) and the server, to be closed.

    `say` is told once when the file stops being a zone, `report` of each query (`udp www.demo.test. AAAA`).
    DocumentError: the file is no zone. NetworkError: the address is not to be had.
    """
    server = ZoneServer(path, say, report)
    datagrams, streams = open_sockets(host, port)
    await server.listen(datagrams, streams)
    return int(datagrams.getsockname()[1]), server


def main() -> None:
    """Serve a zone file until SIGTERM or Ctrl-C, and print every query."""
    parser = argparse.ArgumentParser(prog="python -m dnsproxy.demo.zone", description="Serve one zone file.")
    parser.add_argument("file", type=Path, help="a zone file in the usual format (RFC 1035 section 5)")
    parser.add_argument(
        "--listen", type=socket_address, action="append", required=True, metavar="ADDR:PORT",
        help="an address for UDP and TCP; may be given several times",
    )  # fmt: skip
    arguments = parser.parse_args()
    asyncio.run(_run(arguments.file, arguments.listen))


async def _run(path: Path, listen: list[SocketAddress]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    servers = [(await serve(path, address, port, report=_print))[1] for address, port in listen]
    _print(f"listening on {', '.join(map(str, listen))}")
    await stop.wait()
    for server in servers:
        server.close()


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
