"""The wire reader and writer, against dnspython as an independent reader of the same bytes."""

import io
import os
import random
import struct
import sys
from typing import NamedTuple

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import dns.wire
import pytest
from dns.rdtypes.svcbbase import IPv4HintParam, IPv6HintParam
from hypothesis import given, settings
from hypothesis import strategies as st

from dnsproxy import message, names
from dnsproxy.addresses import from_text as packed
from dnsproxy.addresses import unmapped
from dnsproxy.errors import FormError

pytestmark = pytest.mark.timeout(3600)  # the deep profile takes minutes

# Whole messages drawn record by record cost ten milliseconds each; damaged ones are drawn more cheaply.
whole_messages = settings(max_examples=min(settings().max_examples, 10_000))

MUTATIONS = 100_000 if os.environ.get("DNSPROXY_DEEP") else 2_000

A, CNAME, AAAA, DNAME, SVCB, HTTPS = 1, 5, 28, 39, 64, 65
ASKED = "www.example.com"
HINTS = {4: IPv4HintParam, 6: IPv6HintParam}


# -- building messages, without our own writer ------------------------------------------------------------


def query(name=ASKED, kind="A", **more):
    made = dns.message.make_query(name, kind, **more)
    made.id = 0x1234
    return made.to_wire()


class Written(NamedTuple):
    owner: dns.name.Name
    kind: int
    ttl: int
    rdata: dns.rdata.Rdata | bytes
    rdclass: int = 1


def written(line):
    """Return `owner ttl type rdata` as a record to write."""
    owner, ttl, kind, rdata = line.split(None, 3)
    kind = dns.rdatatype.from_text(kind)
    return Written(name(owner), kind, int(ttl), rdata_of(kind, rdata))


def rdata_of(kind, text):
    return dns.rdata.from_text(1, kind, text, origin=dns.name.root, relativize=False)


def name(text):
    return dns.name.from_text(text)


def wire_of(text):
    return name(text).canonicalize().to_wire()


def response(*answer, asked=ASKED, kind=A, authority=(), additional=(), flags=0x8180, compress=True):
    """Write a response record by record, in the order given, with any TTL."""
    sections = [
        [written(line) if isinstance(line, str) else line for line in section]
        for section in (answer, authority, additional)
    ]
    out = io.BytesIO()
    out.write(struct.pack(">6H", 0x1234, flags, 1, *map(len, sections)))
    places = {} if compress else None
    name(asked).to_wire(out, places)
    out.write(struct.pack(">2H", kind, 1))
    for section in sections:
        for record in section:
            write(out, record, places)
    return out.getvalue()


def write(out, record, places):
    record.owner.to_wire(out, places)
    out.write(struct.pack(">HHIH", record.kind, record.rdclass, record.ttl, 0))
    start = out.tell()
    if isinstance(record.rdata, bytes):
        out.write(record.rdata)
    else:
        record.rdata.to_wire(out, places)
    length = out.tell() - start
    out.seek(start - 2)
    out.write(struct.pack(">H", length))
    out.seek(0, io.SEEK_END)


def end_of(asked=ASKED):
    return 12 + len(wire_of(asked)) + 4


def learned(wire, asked=ASKED):
    """Return what a response teaches, addresses and names as text."""
    addresses, ttl, cnames = message.read_answer(wire, end_of(asked), wire_of(asked))
    return set(addresses), ttl, [names.to_text(target).rstrip(".") for target in cnames]


def addresses(*texts):
    return set(map(packed, texts))


# -- a plain reading of an answer on dnspython ------------------------------------------------------------


class Record(NamedTuple):
    owner: dns.name.Name
    kind: int
    ttl: int
    target: dns.name.Name | None  # of a CNAME or DNAME
    addresses: tuple[bytes, ...]


def records_of(parsed):
    """The answer section of a message as dnspython parses it whole."""
    found = []
    for rrset in parsed.answer:
        for rdata in rrset:
            if rrset.rdclass != 1:
                continue
            target = rdata.target if rrset.rdtype in (CNAME, DNAME) else None
            found.append(Record(rrset.name, rrset.rdtype, rrset.ttl, target, addresses_in(rdata)))
    return found


def addresses_in(rdata):
    if rdata.rdtype in (A, AAAA):
        return (unmapped(packed(rdata.address)),)
    if rdata.rdtype in (SVCB, HTTPS):
        hints = [hint for key in HINTS if key in rdata.params for hint in rdata.params[key].addresses]
        return tuple(unmapped(packed(hint)) for hint in hints)
    return ()


class Overlap(dns.exception.DNSException):
    """What dnspython refuses behind a first pointer, and we do not if we know the rest of the name already.

    That is labels that reach into the name itself, a pointer from there that does not lead further back,
    and a long chain. Either way is finite and stays inside the message.
    """


class Parser(dns.wire.Parser):
    """dnspython's parser, telling that refusal apart from others."""

    def get_name(self, origin=None, decompress=False):
        self.pointed = False
        try:
            return super().get_name(origin, decompress)
        except dns.exception.FormError as error:
            short = (dns.exception.FormError, dns.name.BadPointer, dns.name.PointerChainTooLong)
            if self.pointed and type(error) in short:
                raise Overlap from None
            raise

    def restrict_end(self, end):
        self.pointed = True
        super().restrict_end(end)


def records_at(wire, end):
    """The answer section read with dnspython's parser, which refuses no RDATA that we do not look into."""
    parser = Parser(wire, end)
    found = []
    for _ in range(struct.unpack_from(">H", wire, 6)[0]):
        owner = parser.get_name(decompress=True)
        kind, rdclass, ttl, length = parser.get_struct("!HHIH")
        with parser.restrict_to(length):
            target, rdata = None, b""
            if rdclass == 1 and kind in (CNAME, DNAME):
                target = parser.get_name(decompress=True)
            else:
                rdata = parser.get_remaining()
        if rdclass == 1:
            found.append(Record(owner, kind, ttl, target, addresses_in_octets(kind, rdata)))
    return found


def addresses_in_octets(kind, rdata):
    if (kind, len(rdata)) in ((A, 4), (AAAA, 16)):
        return (unmapped(rdata),)
    if kind not in (SVCB, HTTPS):
        return ()
    try:
        return hints_in(dns.wire.Parser(rdata))
    except (dns.exception.DNSException, ValueError):
        return ()


def hints_in(parser):
    priority = parser.get_uint16()
    parser.get_name(decompress=False)
    prior, found = -1, []
    while parser.remaining():
        key, length = parser.get_struct("!HH")
        if key <= prior:
            raise dns.exception.FormError
        prior = key
        with parser.restrict_to(length):
            if key in HINTS:
                found += HINTS[key].from_wire_parser(parser).addresses
            else:
                parser.get_remaining()
    return tuple(unmapped(packed(hint)) for hint in found) if priority else ()


def reference(asked, records):
    """What an answer teaches, in the plainest way: go over all records again for every name of the chain."""
    chain, ttls, found = [asked], [], set()
    for current in chain:
        links = [record for record in records if record.kind == CNAME and record.owner == current]
        covering = closest_dname(current, records)
        if covering:
            ttls.append(covering.ttl)
            links = links or [covering]
        for link in sorted(links, key=lambda link: (wire_form(link.target), link.ttl)):
            if link.target not in chain:
                chain.append(link.target)
            if len(chain) <= message.MAX_CHAIN:
                ttls.append(link.ttl)
        if len(chain) > message.MAX_CHAIN:
            break
    chain = chain[: message.MAX_CHAIN]
    for record in records:
        if record.addresses and record.owner in chain:
            found.update(record.addresses)
            ttls.append(record.ttl)
    ttl = min(map(valid, ttls), default=None)
    return found, ttl, [wire_form(target) for target in chain[1:]]


def valid(ttl):
    return 0 if ttl > 0x7FFFFFFF else ttl


def closest_dname(current, records):
    """The DNAME that applies, with what it makes of the name as its target."""
    above = [
        record
        for record in records
        if record.kind == DNAME and current.is_subdomain(record.owner) and current != record.owner
    ]
    if not above:
        return None
    link = min(above, key=lambda link: (-len(link.owner), wire_form(link.target), valid(link.ttl)))
    try:
        return link._replace(target=current.relativize(link.owner).concatenate(link.target))
    except dns.name.NameTooLong:
        return None


def wire_form(target):
    return target.canonicalize().to_wire()


def as_reference(found):
    return set(found[0]), found[1], list(found[2])


# -- triage and queries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", range(256))
def test_triage_by_the_flags(flags):
    wire = bytes((0, 1, flags)) + bytes(9)
    if flags & 0x80:
        assert message.triage(wire) == message.SILENCE
    elif flags >> 3:
        assert message.triage(wire) == message.NOTIMP
    else:
        assert message.triage(wire) is None


@pytest.mark.parametrize("size", range(12))
def test_less_than_a_header_is_met_with_silence(size):
    assert message.triage(bytes(size)) == message.SILENCE


def test_the_name_of_a_query_is_lower_cased_and_its_question_ends_behind_the_class():
    wire = query("WWW.Example.COM", use_edns=False)
    assert message.read_query(wire) == (b"\x03www\x07example\x03com\x00", len(wire))


@pytest.mark.parametrize("kind", ["A", "AAAA", "HTTPS", "ANY", "TYPE65280"])
def test_the_type_of_a_query(kind):
    wire = query(kind=kind)
    _, end = message.read_query(wire)
    assert message.qtype(wire, end) == dns.rdatatype.from_text(kind)


def test_the_root_can_be_asked_for():
    assert message.read_query(query(".", "NS")) == (names.ROOT, 17)


def test_a_dot_in_a_label_is_no_boundary():
    found, _ = message.read_query(query(name(r"www\.example.com")))
    assert found == b"\x0bwww.example\x03com\x00"


def test_the_longest_name_is_read_and_a_longer_one_is_not():
    labels = b"".join(bytes((size,)) + b"x" * size for size in (63, 63, 63, 61))
    header = query()[:4] + b"\x00\x01\x00\x00\x00\x00\x00\x00"
    found, end = message.read_query(header + labels + b"\x00\x00\x01\x00\x01")
    assert len(found) == 255
    assert end == 12 + 255 + 4
    with pytest.raises(FormError, match="255"):
        message.read_query(header + b"\x01x" + labels + b"\x00\x00\x01\x00\x01")


OPT = b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"
PLAIN = query(use_edns=False)
END = len(PLAIN)


def with_counts(wire, *counts):
    return wire[:4] + struct.pack(">4H", *counts) + wire[12:]


BASE = END + 12  # where the RDATA of a first record starts whose owner is a pointer


def raw(*records):
    """A response of records as they stand on the wire, filled up with addresses at the last name."""
    return with_counts(PLAIN[:2] + b"\x81\x80" + PLAIN[4:] + b"".join(records), 1, len(records), 0, 0)


def record(owner, kind, rdata):
    return owner + struct.pack(">HHIH", kind, 1, 60, len(rdata)) + rdata


def pointer(place):
    return struct.pack(">H", 0xC000 | place)


OTHER = b"\xff\x00\x00\x01\x00\x00\x00\x00\x00\x00"  # what follows the owner of a record of no interest
LONG = (b"\x3f" + b"x" * 63) * 3  # 192 octets of a name


@pytest.mark.parametrize(
    "wire",
    {
        "shorter than a header": PLAIN[:11],
        "no question": with_counts(PLAIN[:12], 0, 0, 0, 0),
        "no question, yet octets": with_counts(PLAIN, 0, 0, 0, 0),
        "two questions": with_counts(PLAIN + PLAIN[12:], 2, 0, 0, 0),
        "two questions announced": with_counts(PLAIN, 2, 0, 0, 0),
        "a cut name": PLAIN[:20],
        "a cut type": PLAIN[:-3],
        "a cut class": PLAIN[:-1],
        "a label of type 01": PLAIN[:12] + b"\x41" + PLAIN[13:],
        "a label of type 10": PLAIN[:12] + b"\x81" + PLAIN[13:],
        "a pointer in the question": with_counts(PLAIN[:12] + b"\x01a\xc0\x0c\x00\x01\x00\x01", 1, 0, 0, 0),
        "a pointer to a name in the header": PLAIN[:12] + b"\xc0\x03\x00\x01\x00\x01",
        "an answer record": with_counts(PLAIN + b"\xc0\x0c\x00\x01\x00\x01" + bytes(6), 1, 1, 0, 0),
        "an authority record": with_counts(PLAIN + b"\xc0\x0c\x00\x01\x00\x01" + bytes(6), 1, 0, 1, 0),
        "OPT among the answers": with_counts(PLAIN + OPT, 1, 1, 0, 0),
        "OPT in authority": with_counts(PLAIN + OPT, 1, 0, 1, 0),
        "an octet too many": PLAIN + b"\x00",
        "an OPT that is not counted": PLAIN + OPT,
        "a record that is not there": with_counts(PLAIN, 1, 0, 0, 1),
        "a cut OPT": with_counts(PLAIN + OPT[:-1], 1, 0, 0, 1),
        "an octet behind OPT": with_counts(PLAIN + OPT + b"\x00", 1, 0, 0, 1),
        "two OPT": with_counts(PLAIN + OPT + OPT, 1, 0, 0, 2),
        "OPT not at the root": with_counts(PLAIN + b"\x01a" + OPT, 1, 0, 0, 1),
        "OPT at the question": with_counts(PLAIN + b"\xc0\x0c" + OPT[1:], 1, 0, 0, 1),
        "a cut option": with_counts(PLAIN + OPT[:-1] + b"\x05\x00\x0a\x00\x08\x01", 1, 0, 0, 1),
        "half an option": with_counts(PLAIN + OPT[:-1] + b"\x03\x00\x0a\x00", 1, 0, 0, 1),
        "more records announced than there are": with_counts(PLAIN + OPT, 1, 0, 0, 0xFFFF),
        "an owner that points forward": with_counts(PLAIN + b"\xc0\xff" + OPT[1:], 1, 0, 0, 1),
        "an owner that points far forward": with_counts(PLAIN + b"\xe0\x00" + OPT[1:], 1, 0, 0, 1),
        "an owner with a label of type 10": with_counts(PLAIN + b"\x80" + OPT[1:], 1, 0, 0, 1),
        "an owner of type 10 that would point back": with_counts(PLAIN + b"\x80\x0c" + OTHER, 1, 0, 0, 1),
        "an owner of type 01 that would point back": with_counts(PLAIN + b"\x40\x0c" + OTHER, 1, 0, 0, 1),
        "an owner that points to itself": with_counts(PLAIN + pointer(END) + OTHER, 1, 0, 0, 1),
        "an option an octet too long": with_counts(
            PLAIN + OPT[:-1] + b"\x05\x00\x0a\x00\x02\x01", 1, 0, 0, 1
        ),
        "a label of 64 octets": PLAIN[:12] + b"\x40" + b"x" * 64 + b"\x00\x00\x01\x00\x01",
        "a name of 256 octets": PLAIN[:12] + LONG + b"\x3e" + b"x" * 62 + b"\x00\x00\x01\x00\x01",
    }.items(),
    ids=lambda item: item[0],
)
def test_malformed_queries(wire):
    with pytest.raises(FormError, match=r"\w+ \w+ \w+"):
        message.read_query(wire[1])


def test_the_longest_name_and_label_can_be_asked_for():
    asked = LONG + b"\x3d" + b"x" * 61 + b"\x00"
    assert message.read_query(PLAIN[:12] + asked + b"\x00\x01\x00\x01") == (asked, 12 + 255 + 4)


def test_signatures_and_other_additional_records_are_shapes():
    tsig = b"\x03key\x00\x00\xfa\x00\xff\x00\x00\x00\x00\x00\x04\xde\xad\xbe\xef"
    sig0 = b"\x00\x00\x18\x00\xff\x00\x00\x00\x00\x00\x02\xff\xff"
    other = b"\xc0\x0c\xff\x00\x00\x01\x00\x00\x00\x00\x00\x00"
    for extra in (tsig, sig0, other):
        assert message.read_query(with_counts(PLAIN + extra, 1, 0, 0, 1))[1] == END
        both = with_counts(PLAIN + extra + OPT, 1, 0, 0, 2)
        assert message.read_query(both)[1] == END
        assert message.edns(both, END) == (1232, 0, False)
        assert message.edns(with_counts(PLAIN + extra, 1, 0, 0, 1), END) is None


def test_flags_do_not_make_a_query_malformed():
    for flags in (0x0200, 0x0400, 0x0010, 0x0070, 0x000F):  # TC, AA, CD, all Z bits, a response code
        wire = PLAIN[:2] + struct.pack(">H", flags) + PLAIN[4:]
        assert message.triage(wire) is None
        assert message.read_query(wire)[1] == END


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"use_edns": False}, None),
        ({"use_edns": 0, "payload": 4096}, (4096, 0, False)),
        ({"use_edns": 0, "payload": 1232, "want_dnssec": True}, (1232, 0, True)),
        ({"use_edns": 0, "payload": 100}, (512, 0, False)),
        ({"use_edns": 0, "payload": 0}, (512, 0, False)),
        ({"use_edns": 3, "payload": 1400}, (1400, 3, False)),
        ({"use_edns": 0, "options": [dns.edns.GenericOption(10, b"12345678")]}, (1232, 0, False)),
    ],
)
def test_edns(more, expected):
    wire = query(**more)
    _, end = message.read_query(wire)
    assert message.edns(wire, end) == expected


def plain_query(wire):
    """Read a query with dnspython's parser alone: the name, the end of the question, the EDNS."""
    parser = dns.wire.Parser(wire)
    _, _, *counts = parser.get_struct("!6H")
    asked = parser.get_name(decompress=False)
    parser.get_struct("!HH")
    end = parser.current
    edns = None
    if counts[:3] != [1, 0, 0]:
        raise dns.exception.FormError
    for _ in range(counts[3]):
        root = plain_owner(parser)
        kind, size, _, version, flags, length = parser.get_struct("!HHBBHH")
        with parser.restrict_to(length):
            if kind != 41:
                parser.get_remaining()
                continue
            if edns or not root:
                raise dns.exception.FormError
            edns = (max(size, 512), version, flags >= 0x8000)
            while parser.remaining():
                parser.get_bytes(parser.get_struct("!HH")[1])
    if parser.remaining():
        raise dns.exception.FormError
    return wire_form(asked), end, edns


def plain_owner(parser):
    """Pass over an owner whose pointer, if any, points back; tell whether it is the root."""
    start = parser.current
    while 0 < (length := parser.get_uint8()) < 64:
        parser.get_bytes(length)
    if length and (length < 192 or (length & 63) << 8 | parser.get_uint8() >= start):
        raise dns.exception.FormError
    return length == 0 and parser.current == start + 1


def our_query(wire):
    found, end = message.read_query(wire)
    return found, end, message.edns(wire, end)


def outcome(read, *arguments):
    try:
        return read(*arguments)
    except (FormError, dns.exception.DNSException):
        return "malformed"


# -- answers ----------------------------------------------------------------------------------------------


def test_a_chain_with_two_addresses():
    wire = response(
        "www.example.com 300 CNAME edge.example.net",
        "edge.example.net 60 A 192.0.2.1",
        "edge.example.net 60 A 192.0.2.2",
    )
    assert message.read_answer(wire, END, wire_of(ASKED)) == (
        (packed("192.0.2.1"), packed("192.0.2.2")),
        60,
        (b"\x04edge\x07example\x03net\x00",),
    )


LONG_CHAIN = [
    "www.example.com 300 CNAME a.example.net",
    "a.example.net 200 CNAME b.example.org",
    "b.example.org 100 CNAME c.example.org",
    "c.example.org 400 A 192.0.2.1",
    "c.example.org 400 A 192.0.2.2",
    "www.example.org 1 A 198.51.100.1",
]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_records_makes_no_difference(seed):
    lines = random.Random(seed).sample(LONG_CHAIN, len(LONG_CHAIN))
    chain = ["a.example.net", "b.example.org", "c.example.org"]
    assert learned(response(*lines)) == (addresses("192.0.2.1", "192.0.2.2"), 100, chain)


def test_only_owners_on_the_chain_teach():
    wire = response("www.example.com 300 A 192.0.2.1", "example.com 1 A 192.0.2.2", "evil.example 1 CNAME x")
    assert learned(wire) == (addresses("192.0.2.1"), 300, [])


def test_case_makes_no_difference():
    wire = response("wWw.eXample.com 300 CNAME EDGE.example.net", "edge.EXAMPLE.net 300 A 192.0.2.1")
    assert learned(wire) == (addresses("192.0.2.1"), 300, ["edge.example.net"])


def test_a_label_with_a_dot_is_another_owner():
    wire = response(r"www\.example.com 300 A 192.0.2.1")
    assert learned(wire) == (set(), None, [])


def test_nothing_took_part():
    assert learned(response()) == (set(), None, [])
    assert learned(response("www.example.com 300 TXT hello")) == (set(), None, [])


def test_aliases_alone_have_a_ttl():
    assert learned(response("www.example.com 300 CNAME a.example")) == (set(), 300, ["a.example"])


def test_a_ttl_with_the_top_bit_is_zero():
    top = written("www.example.com 300 A 192.0.2.1")._replace(ttl=0x80000000)
    assert learned(response(top, "www.example.com 300 A 192.0.2.2"))[1] == 0
    assert learned(response(top._replace(ttl=0xFFFFFFFF)))[1] == 0
    assert learned(response(top._replace(ttl=0x7FFFFFFF)))[1] == 0x7FFFFFFF


def test_both_families_and_mapped_addresses():
    wire = response(
        "www.example.com 300 AAAA 2001:db8::1",
        "www.example.com 300 AAAA ::ffff:192.0.2.1",
        "www.example.com 300 A 192.0.2.1",
        "www.example.com 300 AAAA 64:ff9b::192.0.2.2",
    )
    expected = (packed("2001:db8::1"), packed("192.0.2.1"), packed("64:ff9b::c000:202"))
    assert message.read_answer(wire, END, wire_of(ASKED))[0] == expected


@pytest.mark.parametrize(
    "record",
    [
        Written(name(ASKED), A, 1, b"\x01\x02\x03"),
        Written(name(ASKED), A, 1, b"\x01\x02\x03\x04\x05"),
        Written(name(ASKED), A, 1, b""),
        Written(name(ASKED), AAAA, 1, b"\x01\x02\x03\x04"),
        Written(name(ASKED), AAAA, 1, bytes(17)),
        Written(name(ASKED), A, 1, b"\x01\x02\x03\x04", rdclass=3),
        Written(name(ASKED), AAAA, 1, bytes(16), rdclass=255),
        Written(name(ASKED), CNAME, 1, b"\xff\xff", rdclass=3),
        Written(name(ASKED), 6, 1, b"\xff\xff"),
        Written(name(ASKED), 65280, 1, b"\xc0\xff\xc0\xff"),
        Written(name("."), 41, 1, b"\xff"),
    ],
)
def test_a_record_of_no_use_is_passed_over(record):
    wire = response("www.example.com 300 A 192.0.2.1", record, "www.example.com 200 A 192.0.2.2")
    assert learned(wire) == (addresses("192.0.2.1", "192.0.2.2"), 200, [])


@pytest.mark.parametrize("kind", ["SVCB", "HTTPS"])
def test_hints_of_service_records_are_addresses(kind):
    wire = response(
        f"www.example.com 300 {kind} 1 . alpn=h2,h3 ipv4hint=192.0.2.1,192.0.2.2 ipv6hint=2001:db8::1",
        f"www.example.com 100 {kind} 2 other.example. port=8443 ipv6hint=::ffff:192.0.2.3",
        f"other.example 1 {kind} 1 . ipv4hint=198.51.100.1",
    )
    found = addresses("192.0.2.1", "192.0.2.2", "2001:db8::1", "192.0.2.3")
    assert learned(wire) == (found, 100, [])


def test_a_service_record_without_hints_takes_no_part():
    wire = response("www.example.com 5 HTTPS 1 . alpn=h2", "www.example.com 300 A 192.0.2.1")
    assert learned(wire) == (addresses("192.0.2.1"), 300, [])


GOOD_HINT = b"\x00\x04\x00\x04\xc0\x00\x02\x01"


@pytest.mark.parametrize(
    "rdata",
    {
        "empty": b"",
        "priority alone": b"\x00\x01",
        "a cut target": b"\x00\x01\x03www",
        "a compressed target": b"\x00\x01\xc0\x0c" + GOOD_HINT,
        "a target of type 10": b"\x00\x01\x80" + GOOD_HINT,
        "a target of 256 octets": b"\x00\x01" + (b"\x3f" + b"x" * 63) * 3 + b"\x3e" + b"x" * 62 + b"\0"
        + GOOD_HINT,
        "a cut key": b"\x00\x01\x00" + GOOD_HINT + b"\x00\x06\x00",
        "a value past the end": b"\x00\x01\x00\x00\x04\x00\x08\xc0\x00\x02\x01",
        "a hint of three octets": b"\x00\x01\x00\x00\x04\x00\x03\xc0\x00\x02",
        "a hint of five octets": b"\x00\x01\x00\x00\x04\x00\x05\xc0\x00\x02\x01\x01",
        "an empty hint": b"\x00\x01\x00" + GOOD_HINT + b"\x00\x06\x00\x00",
        "a hint of IPv6 with an IPv4 address": b"\x00\x01\x00" + GOOD_HINT
        + b"\x00\x06\x00\x04\xc0\x00\x02\x01",
        "keys out of order": b"\x00\x01\x00\x00\x05\x00\x00" + GOOD_HINT,
        "a key twice": b"\x00\x01\x00" + GOOD_HINT + GOOD_HINT,
        "parameters of an alias": b"\x00\x00\x00" + GOOD_HINT,
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_a_broken_service_record_teaches_nothing_and_spoils_nothing(rdata):
    broken = Written(name(ASKED), HTTPS, 1, rdata[1])
    wire = response(broken, "www.example.com 300 HTTPS 1 . ipv4hint=192.0.2.9")
    assert learned(wire) == (addresses("192.0.2.9"), 300, [])


def test_the_hint_that_the_broken_ones_are_made_of_is_good():
    wire = response(Written(name(ASKED), HTTPS, 1, b"\x00\x01\x00" + GOOD_HINT))
    assert learned(wire) == (addresses("192.0.2.1"), 1, [])


def test_a_dname_with_its_cname():
    wire = response(
        "example.com 50 DNAME example.net",
        "www.example.com 300 CNAME www.example.net",
        "www.example.net 200 A 192.0.2.1",
    )
    assert learned(wire) == (addresses("192.0.2.1"), 50, ["www.example.net"])


def test_a_dname_without_its_cname():
    wire = response("example.com 50 DNAME example.net", "www.example.net 200 A 192.0.2.1")
    assert learned(wire) == (addresses("192.0.2.1"), 50, ["www.example.net"])


def test_a_cname_without_its_dname():
    wire = response("www.example.com 300 CNAME www.example.net", "www.example.net 200 A 192.0.2.1")
    assert learned(wire) == (addresses("192.0.2.1"), 200, ["www.example.net"])


def test_the_cname_given_wins_over_what_the_dname_makes():
    wire = response(
        "example.com 50 DNAME example.net",
        "www.example.com 300 CNAME www.example.org",
        "www.example.net 1 A 192.0.2.1",
        "www.example.org 200 A 192.0.2.2",
    )
    assert learned(wire) == (addresses("192.0.2.2"), 50, ["www.example.org"])


def test_a_dname_does_not_change_its_own_owner():
    wire = response("www.example.com 50 DNAME example.net", "www.example.com 200 A 192.0.2.1")
    assert learned(wire) == (addresses("192.0.2.1"), 200, [])


def test_the_closest_of_several_dnames_counts():
    wire = response(
        "com 9 DNAME far",
        "example.com 50 DNAME example.net",
        "www.example.net 200 A 192.0.2.1",
        "www.example.far 1 A 192.0.2.2",
    )
    assert learned(wire) == (addresses("192.0.2.1"), 50, ["www.example.net"])


def test_a_dname_whose_product_is_too_long_leads_nowhere():
    target = ".".join(["x" * 62] * 4)
    wire = response(f"example.com 50 DNAME {target}", "www.example.com 200 A 192.0.2.1")
    assert learned(wire) == (addresses("192.0.2.1"), 200, [])


@pytest.mark.parametrize("size", [254, 255, 256])
def test_what_a_dname_makes_has_255_octets_or_fewer(size):
    target = LONG + bytes((size - 4 - 192 - 2,)) + b"y" * (size - 4 - 192 - 2) + b"\x00"
    assert len(b"\x03www" + target) == size
    wire = raw(record(wire_of("example.com"), DNAME, target))
    _, _, cnames = message.read_answer(wire, END, wire_of(ASKED))
    assert cnames == ((b"\x03www" + target,) if size <= 255 else ())


def test_all_of_several_cnames_are_followed():
    lines = [
        "www.example.com 300 CNAME b.example",
        "www.example.com 300 CNAME a.example",
        "b.example 60 A 192.0.2.2",
        "a.example 50 A 192.0.2.1",
    ]
    expected = (addresses("192.0.2.1", "192.0.2.2"), 50, ["a.example", "b.example"])
    assert learned(response(*lines)) == learned(response(*reversed(lines))) == expected


def test_of_several_dnames_at_one_owner_the_least_counts_in_any_order():
    lines = [
        "example.com 50 DNAME b.example",
        "example.com 60 DNAME a.example",
        "www.a.example 200 A 192.0.2.1",
        "www.b.example 200 A 192.0.2.2",
    ]
    expected = (addresses("192.0.2.1"), 60, ["www.a.example"])
    assert learned(response(*lines)) == learned(response(*reversed(lines))) == expected


def test_a_loop_of_cnames_ends():
    wire = response(
        "www.example.com 300 CNAME a.example",
        "a.example 200 CNAME www.example.com",
        "a.example 100 A 192.0.2.1",
    )
    assert learned(wire) == (addresses("192.0.2.1"), 100, ["a.example"])
    assert learned(response("www.example.com 3 CNAME www.example.com")) == (set(), 3, [])


def test_a_dname_that_makes_ever_longer_names_ends():
    found, ttl, chain = learned(response("example.com 50 DNAME a.example.com"))
    assert (found, ttl) == (set(), 50)
    assert chain[:2] == ["www.a.example.com", "www.a.a.example.com"]
    assert len(chain) == message.MAX_CHAIN - 1


def test_the_chain_has_a_bound_that_does_not_hang_on_the_order():
    lines = [f"www.example.com {400 + number} CNAME n{number:03}.example" for number in range(200)]
    lines += [f"n{number:03}.example 1000 A 192.0.2.{number}" for number in range(200)]
    found = learned(response(*lines))
    assert found == learned(response(*reversed(lines)))
    assert len(found[0]) == len(found[2]) == message.MAX_CHAIN - 1
    assert found[1] == 400


def test_only_the_answer_section_is_read():
    wire = response(
        "www.example.com 300 A 192.0.2.1",
        authority=["www.example.com 1 A 192.0.2.2"],
        additional=["www.example.com 1 A 192.0.2.3"],
    )
    expected = (addresses("192.0.2.1"), 300, [])
    assert learned(wire) == expected
    assert learned(wire[:-20]) == expected
    assert learned(wire + b"trailing") == expected


ONE = response("www.example.com 300 A 192.0.2.1")
ALIAS = response("www.example.com 300 CNAME x.example.com")


@pytest.mark.parametrize(
    "wire",
    {
        "a cut address": ONE[:-1],
        "a cut record": ONE[:-5],
        "a cut owner": ONE[: END + 1],
        "no record": ONE[:END],
        "no question either": ONE[:20],
        "nothing": b"",
        "more records announced": with_counts(ONE, 1, 2, 0, 0),
        "RDATA past the end": ONE[:-6] + b"\xff\xff" + ONE[-4:],
        "an owner that points to itself": ONE[:END] + struct.pack(">H", 0xC000 | END) + ONE[END + 2 :],
        "an owner that points forward": ONE[:END] + struct.pack(">H", 0xC004 | END) + ONE[END + 2 :],
        "an owner that points past the end": ONE[:END] + b"\xff\xff" + ONE[END + 2 :],
        "owners that point at each other": raw(
            record(b"\xc0\x0c", 10, pointer(BASE + 2) + pointer(BASE)),
            record(pointer(BASE), A, b"\xc0\x00\x02\x01"),
        ),
        "an owner with a label of type 10": ONE[:END] + b"\x80\x0c" + ONE[END + 2 :],
        "an owner with a label of type 01": ONE[:END] + b"\x41\x0c" + ONE[END + 2 :],
        "a target that points to itself": ALIAS[:-2] + struct.pack(">H", 0xC000 | len(ALIAS) - 2),
        "a target that points into itself": ALIAS[:-2] + struct.pack(">H", 0xC000 | len(ALIAS) - 4),
        "an owner at a pointer that runs into it by an octet": raw(
            record(b"\xc0\x0c", 16, b"\xc0"), record(b"\x0c" + b"x" * 12 + pointer(BASE), A, bytes(4))
        ),
        "an owner at a label that runs into it": raw(
            record(b"\xc0\x0c", 16, b"\x02"), record(b"\x03x\x00y" + pointer(BASE), A, bytes(4))
        ),
        "a target that ends early": response(Written(name(ASKED), CNAME, 1, b"\x01x\x00\x00")),
        "a target that ends late": response(Written(name(ASKED), CNAME, 1, b"\x01x\xc0")) + b"\x0c",
        "an empty target": response(Written(name(ASKED), CNAME, 1, b"")),
        "a cut target": response(Written(name(ASKED), DNAME, 1, b"\x03ab")),
        "a target of 256 octets": response(
            Written(name(ASKED), CNAME, 1, (b"\x3f" + b"x" * 63) * 3 + b"\x3e" + b"x" * 62 + b"\x00")
        ),
        "a target that grows too long": response(
            Written(name(ASKED), CNAME, 1, (b"\x3f" + b"x" * 63) * 3 + b"\x2e" + b"x" * 46 + b"\xc0\x0c")
        ),
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_answers_that_do_not_hold_together(wire):
    with pytest.raises(FormError, match=r"\w+ \w+ \w+"):
        message.read_answer(wire[1], END, wire_of(ASKED))


def test_the_longest_target_is_read():
    target = (b"\x3f" + b"x" * 63) * 3 + b"\x2d" + b"x" * 45 + b"\xc0\x0c"
    _, _, cnames = message.read_answer(response(Written(name(ASKED), CNAME, 1, target)), END, wire_of(ASKED))
    assert [len(target) for target in cnames] == [255]


def test_a_pointer_at_labels_that_run_into_the_name_itself_is_refused():
    """The second owner points at a label of five octets that holds that owner, and a root behind."""
    place = END + 12
    inside = struct.pack(">H", 0xC000 | place) + b"\x00\x01\x00"
    wire = ONE[:END] + b"\xc0\x0c\x00\x0a\x00\x01\x00\x00\x00\x00\x00\x01\x05" + inside
    wire = with_counts(wire + b"\x01\x00\x00\x00\x00\x00\x04\xc0\x00\x02\x01", 1, 2, 0, 0)
    with pytest.raises(Overlap):
        records_at(wire, END)
    with pytest.raises(FormError, match=f"octet {place + 8}"):
        message.read_answer(wire, END, wire_of(ASKED))


# -- hostile answers: the work is bounded by the size of the message --------------------------------------


def chain_of_pointers(size):
    places = [BASE, *range(BASE + 1, min(BASE + size // 2, 0x3FF0), 2)]
    blob = b"\x00" + b"".join(map(pointer, places[:-1]))
    address = record(pointer(places[-1]), A, b"\xc0\x00\x02\x01")
    return raw(record(b"\xc0\x0c", 10, blob), *[address] * (size // 2 // len(address)))


def pointers_into_names(size, octets, label=b"\x01a"):
    blob = (label * (octets // len(label)) + b"\x00") * (0x4000 // octets)
    blob = blob[: min(size // 4, 0x3F00)]
    places = [BASE + at for at in range(len(blob) - 256) if blob[at] == label[0]]
    aliases = [
        record(pointer(one), CNAME, pointer(two)) for one, two in zip(places, reversed(places), strict=True)
    ]
    return raw(record(b"\xc0\x0c", 10, blob + b"\x00"), *aliases[: size * 3 // 4 // len(aliases[0])])


def many_targets(size, kind):
    owner = b"\xc0\x0c" if kind == CNAME else b"\x00"
    made = [record(owner, kind, b"\x04" + b"%04d" % number + b"\x00") for number in range(size // 17)]
    return raw(*made[: size // len(made[0])])


def many_hints(size):
    hints = b"\x00\x01\x00\x00\x04" + struct.pack(">H", size // 4 * 4 - 400)
    return raw(record(b"\xc0\x0c", HTTPS, hints + bytes(range(4)) * (size // 4 - 100)))


def many_parameters(size):
    keys = b"".join(struct.pack(">HH", key, 0) for key in range(7, 7 + size // 4 - 100))
    return raw(record(b"\xc0\x0c", HTTPS, b"\x00\x01\x00" + keys))


def many_addresses(size):
    return raw(*[record(b"\xc0\x0c", A, b"\xc0\x00\x02\x01")] * (size // 16))


HOSTILE = {
    "chain of pointers": chain_of_pointers,
    "pointers into long names": lambda size: pointers_into_names(size, 254),
    "pointers into names of longer labels": lambda size: pointers_into_names(size, 254, b"\x05aaaaa"),
    "pointers into shorter names": lambda size: pointers_into_names(size, 64),
    "many CNAMEs at one owner": lambda size: many_targets(size, CNAME),
    "many DNAMEs at one owner": lambda size: many_targets(size, DNAME),
    "many hints": many_hints,
    "many parameters": many_parameters,
    "many addresses": many_addresses,
}


def lines_run(function, *arguments):
    """Count the lines of Python that a call runs: work without a clock."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_work_grows_no_faster_than_the_message(make):
    small, large = make(16_000), make(64_000)
    assert len(large) > 45_000
    for read in (lambda wire: message.read_answer(wire, END, wire_of(ASKED)), strip_all):
        outcome(read, large)
        work = lines_run(outcome, read, large)
        assert work < 10 * len(large)
        assert work < 6 * lines_run(outcome, read, small)


def strip_all(wire):
    return message.strip(wire, END, lambda address: False)


@pytest.mark.parametrize("place", [0x100C, 0x200C, 0x300C, 0x3FFF])
def test_pointers_have_fourteen_bits(place):
    """Names far into a message, at places whose lower bits are those of the question name's place."""
    filler = record(b"\xc0\x0c", 10, bytes(place - BASE - 12))
    near = record(b"\xc0\x0c", CNAME, b"\x03far\x07example\x00")
    further = record(pointer(place), CNAME, b"\x01x" + pointer(place))
    wire = raw(filler, near, further, record(b"\x01x" + pointer(place), A, b"\xc0\x00\x02\x01"))
    assert learned(wire) == (addresses("192.0.2.1"), 60, ["far.example", "x.far.example"])


def test_names_that_grow_without_end_cost_little():
    wire = raw(record(b"\x00", DNAME, b"\x01a\x00"))
    assert lines_run(message.read_answer, wire, END, wire_of(ASKED)) < 10_000


# -- against the reference --------------------------------------------------------------------------------

POOL = [name(text) for text in (
    ASKED, "example.com", "com", ".", "a.example.com", "www.example.net", "example.net", "b.a.example.com",
    "WWW.example.ORG", "x", r"www\.example.com", "a.www.example.com", "y" * 63 + ".example.com",
)]  # fmt: skip
ADDRESSES4 = ["192.0.2.1", "192.0.2.2", "10.0.0.1", "198.51.100.7"]
ADDRESSES6 = ["2001:db8::1", "fd00::2", "::ffff:192.0.2.1", "64:ff9b::a00:1"]


def some_rdata(draw, kind):
    """Return RDATA of a type as text; `draw` picks one of a list."""
    target = draw(POOL)
    return {
        "A": lambda: draw(ADDRESSES4),
        "AAAA": lambda: draw(ADDRESSES6),
        "HTTPS": lambda: some_service(draw),
        "SVCB": lambda: some_service(draw),
        "TXT": lambda: '"v=spf1"',
        "MX": lambda: f"10 {target}",
        "SRV": lambda: f"1 2 443 {target}",
        "SOA": lambda: f"{target} hostmaster.example. 1 2 3 4 5",
        "TYPE65280": lambda: r"\# 3 c00cff",
        "RRSIG": lambda: f"A 8 3 300 20300101000000 20200101000000 1 {target} AAAA",
    }.get(kind, lambda: str(target))()


def some_service(draw):
    hints4, hints6 = draw([[], ADDRESSES4[:1], ADDRESSES4[1:]]), draw([[], ADDRESSES6[:1], ADDRESSES6[1:]])
    parts = [str(draw([0, 1, 2])), str(draw(POOL))]
    if parts[0] == "0":
        return " ".join(parts)
    parts += ["alpn=h2,h3"] * draw([0, 1])
    parts += [f"ipv4hint={','.join(hints4)}"] * bool(hints4)
    parts += [f"ipv6hint={','.join(hints6)}"] * bool(hints6)
    return " ".join(parts)


KINDS = ["A", "A", "AAAA", "CNAME", "CNAME", "DNAME", "HTTPS", "SVCB", "TXT", "MX", "NS", "SRV", "SOA",
         "TYPE65280", "RRSIG", "PTR"]  # fmt: skip
TTLS = [0, 1, 60, 300, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def some_records(draw, most):
    made = []
    for _ in range(draw(range(most + 1))):
        kind = draw(KINDS)
        number = dns.rdatatype.from_text(kind)
        rdata = rdata_of(number, some_rdata(draw, kind))
        made.append(Written(draw(POOL), number, draw(TTLS), rdata))
    return made


def some_response(draw):
    asked = str(draw([POOL[0], *POOL]))
    return asked, response(
        *some_records(draw, 8),
        asked=asked,
        authority=some_records(draw, 2),
        additional=some_records(draw, 3),
        compress=draw([True, True, False]),
        flags=draw([0x8180, 0x81A0, 0x8583, 0x8380]),
    )


@st.composite
def responses(draw):
    return some_response(lambda choices: draw(st.sampled_from(choices)))


@whole_messages
@given(responses())
def test_a_valid_answer_teaches_what_the_reference_reads(made):
    asked, wire = made
    end, lowered = end_of(asked), wire_of(asked)
    found = as_reference(message.read_answer(wire, end, lowered))
    parsed = dns.message.from_wire(wire, one_rr_per_rrset=True)
    assert found == reference(name(asked), records_of(parsed))
    assert found == reference(name(asked), records_at(wire, end))


@whole_messages
@given(responses(), st.randoms(use_true_random=False))
def test_the_order_of_records_teaches_nothing(made, chance):
    asked, wire = made
    answer = [
        Written(rrset.name, rrset.rdtype, rrset.ttl, rdata)
        for rrset in dns.message.from_wire(wire, one_rr_per_rrset=True).answer
        for rdata in rrset
    ]
    chance.shuffle(answer)
    found = message.read_answer(wire, end_of(asked), wire_of(asked))
    again = message.read_answer(response(*answer, asked=asked), end_of(asked), wire_of(asked))
    assert as_reference(again) == as_reference(found)


class Mutator:
    """Damage done to messages, the same for the same seed: single octets, cuts, copies, pointers."""

    def __init__(self, seed):
        self.chance = random.Random(seed)

    def __call__(self, octets):
        for _ in range(self.chance.randint(1, 4)):
            octets = self.chance.choice(self.ways)(self, octets)
        return octets

    def flip(self, octets):
        if not octets:
            return octets
        at = self.chance.randrange(len(octets))
        return octets[:at] + bytes((octets[at] ^ 1 << self.chance.randrange(8),)) + octets[at + 1 :]

    def put(self, octets):
        at = self.chance.randrange(len(octets) + 1)
        value = self.chance.choice((0, 1, 5, 12, 28, 39, 41, 63, 64, 65, 128, 192, 255))
        return octets[:at] + bytes((value,)) + octets[at + 1 :]

    def point(self, octets):
        at = self.chance.randrange(len(octets) + 1)
        place = self.chance.choice((12, 16, 24, self.chance.randrange(len(octets) + 60)))
        return octets[:at] + struct.pack(">H", 0xC000 | place) + octets[at + 2 :]

    def insert(self, octets):
        at = self.chance.randrange(len(octets) + 1)
        return octets[:at] + self.chance.randbytes(self.chance.randint(1, 4)) + octets[at:]

    def delete(self, octets):
        at = self.chance.randrange(len(octets) + 1)
        return octets[:at] + octets[at + self.chance.randint(1, 4) :]

    def cut(self, octets):
        return octets[: self.chance.randrange(len(octets) + 1)]

    def copy(self, octets):
        at, size = self.chance.randrange(len(octets) + 1), self.chance.randint(1, 24)
        return octets + octets[at : at + size]

    ways = (flip, flip, put, put, point, point, insert, delete, cut, copy)


def damaged(make, seed):
    """Endless messages made by `make` and then damaged behind the first `end` octets, counts aside."""
    chance = random.Random(seed)
    damage = Mutator(seed)
    while True:
        asked, wire = make(chance.choice)
        end = end_of(asked)
        for _ in range(20):
            head = wire[:12] if chance.random() < 0.8 else wire[:4] + damage(wire[4:12]).ljust(8, b"\0")[:8]
            yield asked, head + wire[12:end] + damage(wire[end:])


def test_a_damaged_answer_teaches_what_the_reference_reads_or_is_malformed():
    outcomes = {"same": 0, "malformed": 0, "overlap": 0}
    for _, (asked, wire) in zip(range(MUTATIONS), damaged(some_response, 1), strict=False):
        end, lowered = end_of(asked), wire_of(asked)
        found = outcome(message.read_answer, wire, end, lowered)
        try:
            expected = reference(name(asked), records_at(wire, end))
        except Overlap:
            outcomes["overlap"] += 1
            continue
        except dns.exception.DNSException:
            expected = "malformed"
        assert (found if found == "malformed" else as_reference(found)) == expected, wire.hex()
        outcomes["malformed" if expected == "malformed" else "same"] += 1
    assert outcomes["overlap"] < MUTATIONS / 50
    assert min(outcomes["same"], outcomes["malformed"]) > MUTATIONS / 5


EDNS_OPTIONS = [
    None,
    [],
    [dns.edns.GenericOption(10, b"12345678")],
    [dns.edns.ECSOption("192.0.2.0", 24), dns.edns.GenericOption(12, bytes(40))],
]


def some_query(draw):
    asked = draw([POOL[0], *POOL])
    options = draw(EDNS_OPTIONS)
    more = {} if options is None else {"use_edns": draw([0, 0, 1, 255]), "options": options,
                                       "payload": draw([0, 512, 1232, 65535])}  # fmt: skip
    made = dns.message.make_query(asked, draw(["A", "AAAA", "HTTPS"]), **more or {"use_edns": False})
    made.id = 0x1234
    made.flags = draw([0, 0x0100, 0x0110, 0x0120, 0x01B0])
    if options is not None and draw([False, True]):
        made.want_dnssec()
    wire = made.to_wire()
    if draw([False, False, True]):
        shape = draw([b"\x03key\0\0\xfa\0\xff\0\0\0\0\0\x03xyz", b"\xc0\x0c\0\x01\0\x01" + bytes(6)])
        wire = wire[:11] + bytes((wire[11] + 1,)) + wire[12:] + shape
    return str(asked), wire


@st.composite
def queries(draw):
    return some_query(lambda choices: draw(st.sampled_from(choices)))


@whole_messages
@given(queries())
def test_a_valid_query_is_read_as_the_reference_reads_it(made):
    asked, wire = made
    assert message.triage(wire) is None
    assert our_query(wire) == plain_query(wire)
    assert message.read_query(wire) == (wire_of(asked), end_of(asked))


def test_a_damaged_query_is_read_as_the_reference_reads_it_or_is_malformed():
    outcomes = {"same": 0, "malformed": 0}
    chance, damage = random.Random(2), Mutator(2)
    for _ in range(MUTATIONS):
        _, wire = some_query(chance.choice)
        wire = damage(wire) if chance.random() < 0.5 else wire[:12] + damage(wire[12:])
        found = outcome(our_query, wire)
        assert found == outcome(plain_query, wire), wire.hex()
        outcomes["malformed" if found == "malformed" else "same"] += 1
    assert min(outcomes.values()) > MUTATIONS / 50


# -- anything at all --------------------------------------------------------------------------------------


def everything(wire, asked=ASKED):
    """Do to a message all that can be done; return how it went. FormError is the only way out."""
    went = [message.triage(wire), outcome(message.read_query, wire)]
    if went[0] != message.SILENCE:
        went.append(message.reply(wire, None, message.FORMERR))
    if went[1] != "malformed" and len(wire) >= 12:
        end = went[1][1]
        ede = (message.BLOCKED, "not allowed")
        went += [message.edns(wire, end), message.qtype(wire, end)]
        went += [
            message.reply(wire, end, message.NXDOMAIN, soa_ttl=5, ede=ede),
            message.truncated(wire, end, wire),
        ]
    went.append(outcome(message.read_answer, wire, end_of(asked), wire_of(asked)))
    went.append(outcome(strip_all, wire))
    return went


@given(st.binary(max_size=600))
def test_any_octets_are_read_or_malformed(wire):
    everything(wire)


@given(st.binary(max_size=300), st.integers(0, 40))
def test_any_octets_behind_a_question_are_read_or_malformed(rest, count):
    everything(with_counts(PLAIN[:2] + b"\x81\x80" + PLAIN[4:] + rest, 1, count, 0, 0))
    everything(with_counts(PLAIN + rest, 1, 0, 0, count))


@pytest.mark.parametrize("wire", [query(want_dnssec=True), response(*LONG_CHAIN), ALIAS, ONE])
def test_every_beginning_of_a_message_is_read_or_malformed(wire):
    for size in range(len(wire)):
        assert everything(wire[:size])[1] == "malformed"


# -- replies ----------------------------------------------------------------------------------------------


def replied(asked, code=message.SERVFAIL, **more):
    _, end = message.read_query(asked)
    wire = message.reply(asked, end, code, **more)
    parsed = dns.message.from_wire(wire)
    assert dns.message.from_wire(asked).is_response(parsed)
    return wire, parsed


def test_a_reply_repeats_id_question_and_flags_and_says_recursion_is_available():
    asked = query("wWw.eXample.Com", use_edns=False)
    wire, parsed = replied(asked, message.REFUSED)
    assert wire[:2] == asked[:2]
    assert wire[12:] == asked[12:]
    assert dns.flags.to_text(parsed.flags) == "QR RD RA"
    assert parsed.rcode() == dns.rcode.REFUSED
    assert not parsed.answer + parsed.authority + parsed.additional


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (0x0000, "QR RA"),
        (0x0100, "QR RD RA"),
        (0x0110, "QR RD RA CD"),
        (0x0120, "QR RD RA"),
        (0x07F0, "QR RD RA CD"),
    ],
)
def test_of_the_flags_rd_and_cd_are_kept(flags, expected):
    asked = PLAIN[:2] + struct.pack(">H", flags) + PLAIN[4:]
    assert dns.flags.to_text(dns.message.from_wire(message.reply(asked, END, 0)).flags) == expected


def test_the_opcode_is_kept():
    asked = PLAIN[:2] + struct.pack(">H", 5 << 11) + PLAIN[4:]
    wire = message.reply(asked, None, message.NOTIMP)
    parsed = dns.message.from_wire(wire)
    assert (parsed.opcode(), parsed.rcode(), len(wire)) == (dns.opcode.UPDATE, dns.rcode.NOTIMP, 12)


def test_what_cannot_be_read_is_answered_with_a_header():
    assert message.reply(PLAIN[:15], None, message.FORMERR) == PLAIN[:2] + b"\x81\x81" + bytes(8)


def test_a_denial_can_be_cached_for_the_time_given():
    _, parsed = replied(query(), message.NXDOMAIN, soa_ttl=5)
    (rrset,) = parsed.authority
    assert (rrset.name, rrset.ttl, rrset.rdtype) == (name(ASKED), 5, dns.rdatatype.SOA)
    assert rrset[0].to_text() == "www.example.com. nobody.invalid. 1 3600 1200 604800 5"
    assert parsed.rcode() == dns.rcode.NXDOMAIN
    negative = dns.message.QueryMessage.resolve_chaining(parsed)
    assert (negative.minimum_ttl, negative.answer) == (5, None)


def test_the_root_can_be_denied():
    _, parsed = replied(query("."), message.NXDOMAIN, soa_ttl=7, ede=(message.BLOCKED, "no"))
    assert parsed.authority[0].name == dns.name.root


def test_edns_is_answered_with_edns():
    _, parsed = replied(query(want_dnssec=True, payload=4096))
    assert (parsed.edns, parsed.payload, parsed.ednsflags, parsed.options) == (0, message.SIZE, 0x8000, ())
    _, parsed = replied(query(use_edns=0))
    assert (parsed.edns, parsed.ednsflags) == (0, 0)
    _, parsed = replied(query(use_edns=False), ede=(message.BLOCKED, "not allowed"))
    assert parsed.edns == -1


def test_the_options_of_a_query_are_not_echoed():
    _, parsed = replied(query(options=[dns.edns.GenericOption(10, b"12345678")]))
    assert parsed.options == ()


def test_an_extended_error_is_a_code_and_a_text():
    _, parsed = replied(query(use_edns=0), ede=(message.BLOCKED, "nicht erlaubt für ci"))
    (option,) = parsed.options
    assert (option.code, option.text) == (dns.edns.EDECode.BLOCKED, "nicht erlaubt für ci")


def test_the_codes_are_those_of_the_registry():
    for error in ("OTHER", "NOT_READY", "BLOCKED", "PROHIBITED", "NO_REACHABLE_AUTHORITY", "NETWORK_ERROR"):
        assert getattr(message, error) == dns.edns.EDECode[error]
    for code in ("NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"):
        assert getattr(message, code) == dns.rcode.from_text(code)


def test_a_code_of_more_than_four_bits_and_a_version_that_is_not_0():
    asked = query(use_edns=1)
    _, end = message.read_query(asked)
    assert message.edns(asked, end)[1] == 1
    _, parsed = replied(asked, dns.rcode.BADVERS)
    assert (parsed.rcode(), parsed.edns) == (dns.rcode.BADVERS, 0)


@pytest.mark.parametrize("text", ["x" * 2000, "é" * 1000, "é" * 999 + "x", "", "\N{PILE OF POO}" * 300])
def test_a_reply_fits_every_client(text):
    longest = ".".join(["x" * 63, "y" * 63, "z" * 63, "w" * 61])
    for asked in (query(longest, use_edns=0), query("a.b", use_edns=0)):
        wire, parsed = replied(asked, message.NXDOMAIN, soa_ttl=5, ede=(message.BLOCKED, text))
        assert len(wire) <= 512
        sent = parsed.options[0].text or ""
        assert text.startswith(sent)
        assert sent == text or len(wire) > 508


def test_a_text_is_cut_to_the_octet():
    asked = query(use_edns=0)
    sizes = [len(replied(asked, ede=(message.OTHER, "x" * size))[0]) for size in range(520)]
    assert sizes == [min(sizes[0] + size, 512) for size in range(520)]


@whole_messages
@given(queries(), st.sampled_from(range(24)), st.none() | st.integers(0, 0x7FFFFFFF), st.text(max_size=600))
def test_every_reply_is_one_to_another_reader(made, code, ttl, text):
    _, asked = made
    _, end = message.read_query(asked)
    wire = message.reply(asked, end, code, soa_ttl=ttl, ede=(message.BLOCKED, text))
    parsed = dns.message.from_wire(wire)
    assert wire[:2] + wire[12:end] == asked[:2] + asked[12:end]
    assert len(wire) <= 512
    assert (parsed.edns >= 0) == (message.edns(asked, end) is not None)
    assert parsed.rcode() == (code if parsed.edns >= 0 else code & 15)
    assert [rrset.ttl for rrset in parsed.authority] == ([] if ttl is None else [ttl])


def test_the_stub_of_an_answer_says_to_come_again_over_tcp():
    asked = query("WWW.example.com", want_dnssec=True)
    _, end = message.read_query(asked)
    answer = b"\xff\xff" + response(*LONG_CHAIN, flags=0x85B0)[2:]
    wire = message.truncated(answer, end, asked)
    parsed = dns.message.from_wire(wire)
    assert dns.flags.to_text(parsed.flags) == "QR AA TC RD RA AD CD"
    assert wire[:2] + wire[12:end] == asked[:2] + asked[12:end]
    assert parsed.answer + parsed.authority + parsed.additional == []
    assert (parsed.edns, parsed.payload, parsed.ednsflags) == (0, message.SIZE, 0x8000)


def test_the_stub_for_a_client_without_edns_has_none():
    wire = message.truncated(response(*LONG_CHAIN, flags=0x8183), END, PLAIN)
    parsed = dns.message.from_wire(wire)
    assert (parsed.edns, parsed.rcode()) == (-1, dns.rcode.NXDOMAIN)
    assert wire[12:] == PLAIN[12:]


# -- answers without some addresses -----------------------------------------------------------------------


def public_only(address):
    return address not in addresses("10.0.0.1", "fd00::2", "64:ff9b::a00:1")


def sections(parsed):
    return [
        [(rrset.name, rrset.ttl, rdata) for rrset in section for rdata in rrset]
        for section in (parsed.answer, parsed.authority, parsed.additional)
    ]


def kept(rdata, keep):
    """What is to be left of a record, by dnspython's reading of it."""
    if rdata.rdtype in (A, AAAA):
        return rdata if keep(unmapped(packed(rdata.address))) else None
    if rdata.rdtype not in (SVCB, HTTPS):
        return rdata
    params = dict(rdata.params)
    for key, made in HINTS.items():
        if key in params:
            left = [hint for hint in params.pop(key).addresses if keep(unmapped(packed(hint)))]
            params |= {key: made(left)} if left else {}
    return rdata.replace(params=params)


def test_strip_takes_addresses_out_of_every_section_and_clears_ad():
    wire = response(
        "www.example.com 300 CNAME edge.example.net",
        "edge.example.net 60 A 192.0.2.1",
        "edge.example.net 60 A 10.0.0.1",
        "edge.example.net 60 AAAA ::ffff:10.0.0.1",
        "edge.example.net 60 HTTPS 1 . alpn=h2 ipv4hint=10.0.0.1,192.0.2.2 ipv6hint=fd00::2,::ffff:10.0.0.1",
        authority=["example.net 60 NS ns.example.net"],
        additional=["ns.example.net 60 A 10.0.0.1", "ns.example.net 60 A 192.0.2.3"],
        asked="wWw.example.com",
        flags=0x81B0,
    )
    stripped = message.strip(wire, END, public_only)
    parsed = dns.message.from_wire(stripped)
    assert [str(rrset) for rrset in parsed.answer + parsed.authority + parsed.additional] == [
        "wWw.example.com. 300 IN CNAME edge.example.net.",
        "edge.example.net. 60 IN A 192.0.2.1",
        'edge.example.net. 60 IN HTTPS 1 . alpn="h2" ipv4hint="192.0.2.2"',
        "example.net. 60 IN NS ns.example.net.",
        "ns.example.net. 60 IN A 192.0.2.3",
    ]
    assert stripped[:3] + stripped[12:END] == wire[:3] + wire[12:END]
    assert dns.flags.to_text(parsed.flags) == "QR RD RA CD"
    assert learned(stripped) == (addresses("192.0.2.1", "192.0.2.2"), 60, ["edge.example.net"])


def test_strip_keeps_labels_with_dots_and_octets_of_any_value():
    wire = response(
        r"www.example.com 300 CNAME a\.b.\255\000.example", r"a\.b.\255\000.example 60 A 10.0.0.1"
    )
    parsed = dns.message.from_wire(message.strip(wire, END, public_only))
    assert [str(rrset) for rrset in parsed.answer] == [
        r"www.example.com. 300 IN CNAME a\.b.\255\000.example."
    ]


def test_strip_leaves_out_a_service_record_that_cannot_be_read():
    broken = Written(name(ASKED), HTTPS, 1, b"\x00\x01\x00" + GOOD_HINT + b"\x00")
    stripped = message.strip(response(broken, "www.example.com 1 A 192.0.2.1"), END, public_only)
    assert [rrset.rdtype for rrset in dns.message.from_wire(stripped).answer] == [A]


def test_strip_does_not_point_past_where_pointers_reach():
    filler = Written(name("x"), 10, 1, bytes(0x4000))
    far = [written("far.example 1 CNAME near.example")] * 3
    stripped = message.strip(response(filler, *far, compress=False), END, public_only)
    assert [str(rrset) for rrset in dns.message.from_wire(stripped, one_rr_per_rrset=True).answer[1:]] == [
        "far.example. 1 IN CNAME near.example."
    ] * 3


# RFC 1035 section 3.3 and RFC 3597 section 4: type, octets before the names, names.
COMPRESSIBLE = [
    ("NS", 0, 1), ("MD", 0, 1), ("MF", 0, 1), ("CNAME", 0, 1), ("SOA", 0, 2), ("MB", 0, 1), ("MG", 0, 1),
    ("MR", 0, 1), ("PTR", 0, 1), ("MINFO", 0, 2), ("MX", 2, 1), ("RP", 0, 2), ("AFSDB", 2, 1), ("RT", 2, 1),
    ("SIG", 18, 1), ("PX", 2, 2), ("NXT", 0, 1), ("SRV", 6, 1), ("KX", 2, 1), ("DNAME", 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "before", "count"), COMPRESSIBLE, ids=str)
def test_strip_writes_names_in_records_out_in_full(kind, before, count):
    number = dns.rdatatype.from_text(kind)
    rest = b"" if kind in ("CNAME", "DNAME") else b"rest"
    rdata = b"b" * before + b"\xc0\x0c" * count + rest
    stripped = message.strip(raw(record(b"\xc0\x0c", number, rdata)), END, public_only)
    assert stripped[BASE:] == b"b" * before + wire_of(ASKED) * count + rest


def test_strip_keeps_a_message_of_the_largest_size():
    wire = raw(record(b"\xc0\x0c", 65_400, bytes(65_535 - BASE)))
    assert len(wire) == 65_535
    assert message.strip(wire, END, public_only) == wire


def test_strip_keeps_an_empty_parameter_that_is_no_hint():
    empty = b"\x00\x01\x00" + b"\x00\x02\x00\x00"  # no-default-alpn, RFC 9460 section 7.1.1
    hint = b"\x00\x04\x00\x04\x0a\x00\x00\x01"
    stripped = message.strip(raw(record(b"\xc0\x0c", HTTPS, empty + hint)), END, public_only)
    assert stripped == raw(record(b"\xc0\x0c", HTTPS, empty))


def test_strip_refuses_a_name_that_ends_an_octet_behind_its_record():
    owner = b"\xc0\x0c\x00\x02\x00\x01\x00\x00\x00\x3c\x00\x03"
    with pytest.raises(FormError, match="do not fit"):
        message.strip(raw(owner + b"\x02ns\x00"), END, public_only)


def test_addresses_of_other_classes_are_neither_learned_nor_taken_out():
    wire = response(Written(name(ASKED), A, 60, packed("10.0.0.1"), rdclass=3))
    assert learned(wire) == (set(), None, [])
    assert message.strip(wire, END, public_only) == wire


def test_strip_refuses_to_grow_a_message_past_its_largest_size():
    long = (b"\x3f" + b"x" * 63) * 3 + b"\x00"
    blob = record(b"\xc0\x0c", 10, long)
    alias = record(b"\xc0\x0c", 12, pointer(BASE))
    assert len(message.strip(raw(blob, *[alias] * 250), END, public_only)) > 50_000
    with pytest.raises(FormError, match="largest size"):
        message.strip(raw(blob, *[alias] * 400), END, public_only)


@pytest.mark.parametrize("size", range(END, len(ONE)))
def test_strip_refuses_an_answer_that_does_not_hold_together(size):
    with pytest.raises(FormError, match=r"\w+ \w+ \w+"):
        message.strip(ONE[:size], END, public_only)


def test_strip_refuses_names_that_do_not_fit_into_their_record():
    wire = response(Written(name(ASKED), 15, 1, b"\x00\x0a\x01x"), "x 1 A 192.0.2.1")
    with pytest.raises(FormError, match="do not fit"):
        message.strip(wire, END, public_only)


@whole_messages
@given(responses())
def test_strip_leaves_what_the_reference_leaves(made):
    asked, wire = made
    parsed = dns.message.from_wire(wire, one_rr_per_rrset=True)
    stripped = message.strip(wire, end_of(asked), public_only)
    assert stripped[12 : end_of(asked)] == wire[12 : end_of(asked)]
    assert sections(dns.message.from_wire(stripped, one_rr_per_rrset=True)) == [
        [(owner, ttl, left) for owner, ttl, rdata in section if (left := kept(rdata, public_only))]
        for section in sections(parsed)
    ]


def test_strip_of_a_damaged_answer_leaves_no_refused_address_or_is_malformed():
    outcomes = {"same": 0, "malformed": 0}
    for _, (asked, wire) in zip(range(MUTATIONS), damaged(some_response, 3), strict=False):
        end, lowered = end_of(asked), wire_of(asked)
        found = outcome(message.read_answer, wire, end, lowered)
        stripped = "malformed" if found == "malformed" else outcome(message.strip, wire, end, public_only)
        outcomes["malformed" if stripped == "malformed" else "same"] += 1
        if stripped != "malformed":
            left, _, chain = message.read_answer(stripped, end, lowered)
            assert (left, chain) == (tuple(filter(public_only, found[0])), found[2]), wire.hex()
    assert min(outcomes.values()) > MUTATIONS / 10
