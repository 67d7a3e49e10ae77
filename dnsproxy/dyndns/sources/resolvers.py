"""Resolvers that answer with the address they were asked from.

They are asked directly, over the family in question; whoever answers in their place (a router that takes
every query for itself) has no such name or says another address, and the other sources do not agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import dns.asyncquery
import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
from dns.rdtypes.ANY.TXT import TXT

from dnsproxy.dyndns.sources import SourceError, read_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dns.rdata import Rdata

ADDRESS_TYPE: Final = {4: dns.rdatatype.A, 16: dns.rdatatype.AAAA}


@dataclass(frozen=True, slots=True)
class Service:
    """A name that stands for the asker. `rdtype` None: the address type of the family in question.

    `servers` are, by the length of an address, those that know the name; the second one is asked where the
    first one is silent.
    """

    name: str
    servers: Mapping[int, tuple[str, ...]]
    rdclass: dns.rdataclass.RdataClass = dns.rdataclass.IN
    rdtype: dns.rdatatype.RdataType | None = None
    port: int = 53


SERVICES: Final[Mapping[str, Service]] = {
    "opendns": Service(
        "myip.opendns.com",
        {4: ("208.67.222.222", "208.67.220.220"), 16: ("2620:119:35::35", "2620:119:53::53")},
    ),
    "cloudflare": Service(
        "whoami.cloudflare",
        {4: ("1.1.1.1", "1.0.0.1"), 16: ("2606:4700:4700::1111", "2606:4700:4700::1001")},
        rdclass=dns.rdataclass.CH,
        rdtype=dns.rdatatype.TXT,
    ),
}


async def ask(service: Service, length: int, patience: float) -> bytes:
    """Return the packed address from which the service sees us over this family, within so many seconds."""
    rdtype = service.rdtype or ADDRESS_TYPE[length]
    query = dns.message.make_query(service.name, rdtype, service.rdclass)
    servers = service.servers[length]
    for server in servers:
        try:
            reply = await dns.asyncquery.udp(
                query,
                server,
                patience / len(servers),
                service.port,
                ignore_unexpected=True,  # a forged answer must not end the wait for the real one
                ignore_errors=True,
            )
        except dns.exception.Timeout:
            continue
        except dns.exception.DNSException as error:
            raise SourceError(f"{server} answered with something else ({type(error).__name__})") from None
        return _address(reply, query)
    raise SourceError(f"no answer from {' and '.join(servers)} within {patience:g} s")


def _address(reply: dns.message.Message, query: dns.message.Message) -> bytes:
    if reply.rcode() != dns.rcode.NOERROR:
        raise SourceError(f"answered {dns.rcode.to_text(reply.rcode())}: is it the resolver that was asked?")
    if reply.flags & dns.flags.TC:
        raise SourceError("answered with a part of an answer")
    asked = query.question[0]
    records = [
        record
        for rrset in reply.answer
        if (rrset.name, rrset.rdtype, rrset.rdclass) == (asked.name, asked.rdtype, asked.rdclass)
        for record in rrset
    ]
    if len(records) != 1:
        raise SourceError(f"answered {len(records)} records, expected one")
    return read_address(_text(records[0]))


def _text(record: Rdata) -> str:
    if not isinstance(record, TXT):
        return record.to_text()
    if len(record.strings) != 1:
        raise SourceError(f"answered a text of {len(record.strings)} strings, expected one")
    return record.strings[0].decode("ascii", "replace")
