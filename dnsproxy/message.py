"""The wire reader and writer: functions on the bytes of DNS messages, and nothing else.

There is no message object. A query takes about one microsecond to read this way and sixteen or more as a
library's objects, and what we forward is the sender's bytes anyway. So every function takes the whole
message and, where it needs one, `end`: the offset behind the question, which `read_query` found. The
question always starts at octet 12, so a response that repeats it has the same `end`.

Queries are read strictly. They come from clients that policy governs, and what is not understood would
leave the host unexamined: one question, no answer or authority records, no compression in the question,
additional records that fit to the octet, at most one OPT (Unbound holds queries to the same, RFC 9619 and
RFC 6891 section 6.1.1 ask for it). TSIG, SIG(0) and other additional records are looked at as shapes only.

Answers are read leniently in what is passed on and strictly in what is learned. Only the answer section
is read. An address counts if its owner is on the chain that leads from the question through CNAME and
DNAME records, whatever the order of the records: some servers put the addresses first. So the records
are collected in one pass and the chain is followed afterwards. A record whose data is of no use (an A of
five octets, broken SVCB parameters, an unknown type) is passed over; a section that does not hold
together (a record past the end, a pointer that does not point back) is a FormError.

Names are resolved with a memo from offset to name, so that a name costs its own labels once, however many
records point at it. In nearly every answer the owners are `C0 0C`, which is in the memo from the start.

Hostile input. A pointer must point before the labels that led to it, and what it points at must end before
them too (RFC 1035 section 4.1.4: a *prior* occurrence), so following comes to an end; what the memo knows
has come to an end before, and makes chains of pointers linear. A name has at most 255 octets. The chain
of a question has at most MAX_CHAIN names, since a DNAME can make new names for ever. Nothing is recursive.
Reading past the end raises IndexError or struct.error in one place per function and leaves as FormError.

Taking addresses out of an answer (`strip`) is rare and yet not left to dnslib: that reads the one label
`a.b` as two, refuses octets over 127, and needs seconds for a message full of chained pointers.

A name with several CNAMEs is against the rules (RFC 2181 section 10.1) and seen nonetheless; all of them
are followed, since the client may follow any. Of several DNAMEs at one owner the least counts, so that
the outcome does not hang on the order of records.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from dnsproxy.addresses import unmapped
from dnsproxy.errors import FormError
from dnsproxy.names import MAX_NAME, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# Response codes, RFC 1035 section 4.1.1 and RFC 6891 section 9.
NOERROR: Final = 0
FORMERR: Final = 1
SERVFAIL: Final = 2
NXDOMAIN: Final = 3
NOTIMP: Final = 4
REFUSED: Final = 5
SILENCE: Final = -1  # what `triage` says where any reply would be wrong

# Extended DNS Errors, RFC 8914 section 4. A name that policy does not allow is BLOCKED, the code for a rule
# of whoever runs this proxy: FILTERED is for a rule that the client asked for, CENSORED for one that a third
# party forced on both. PROHIBITED is about the client, not the name: one that may not ask here at all.
OTHER: Final = 0
NOT_READY: Final = 14
BLOCKED: Final = 15
PROHIBITED: Final = 18
NO_REACHABLE_AUTHORITY: Final = 22
NETWORK_ERROR: Final = 23

MAX_CHAIN: Final = 64  # names; resolvers give up at 8 to 16 CNAMEs
_LONG_RUN = 64  # octets of labels; walking fewer is cheap, and remembering their parts is not
MAX_MESSAGE: Final = 65_535
SIZE: Final = 1232  # what we say we take over UDP: fits one IPv6 packet of the least MTU (DNS flag day 2020)
SMALLEST: Final = 512  # what everybody takes over UDP, RFC 1035 section 2.3.4

_HEADER = 12
_POINTER = 0xC0  # the two bits that make a label length the start of a pointer
_REACH = 0x4000  # pointers have fourteen bits
_IN = 1
_A, _CNAME, _AAAA, _DNAME = (kind << 16 | _IN for kind in (1, 5, 28, 39))  # type and class as one number
_SIZES = {_A: 4, _AAAA: 16}
_LINKS = (_CNAME, _DNAME)
_SERVICES = (64 << 16 | _IN, 65 << 16 | _IN)  # SVCB and HTTPS
_HINTS = {4: 4, 6: 16}  # SvcParamKey ipv4hint, ipv6hint: octets of one address
_FIXED = struct.Struct(">IiH")  # type and class, TTL, RDLENGTH. The TTL as signed: RFC 2181 section 8
_POINTED = struct.Struct(">HIiH")  # the same behind an owner that is a pointer
_PLAIN = 32  # address records that are read in one go; answers with more have their own cost
_ADDRESSES = {  # start of an A or AAAA record at the question's own name -> octets of its address
    struct.pack(">HI", _POINTER << 8 | _HEADER, kind): size for kind, size in _SIZES.items()
}
_RECORDS = {  # octets of an address -> how many such records -> start, TTL, RDLENGTH and address of each
    size: [struct.Struct(">" + f"6siH{size}s" * count) for count in range(_PLAIN + 1)] for size in (4, 16)
}
_EXTRA = struct.Struct(">H6xH")  # type, RDLENGTH
_PAIR = struct.Struct(">HH")
_OPT_FIELDS = struct.Struct(">HBBH")  # size, upper bits of the response code, version, flags
_OPT_RECORD = struct.Struct(">BHHBBHH")
_OPT_TYPE = 41
_OPT_START = b"\x00\x00\x29"  # the root as owner, the type
_DNSSEC_OK = 0x8000
_EDE_OPTION = 15

_TRIAGE: Final = tuple(SILENCE if flags & 0x80 else NOTIMP if flags & 0x78 else None for flags in range(256))
_ONE_QUESTION = b"\x00\x01\x00\x00\x00\x00\x00\x00"
_COUNTS: Final = tuple(tuple(struct.pack(">4H", 1, 0, soa, opt) for opt in (0, 1)) for soa in (0, 1))

# Where names stand in RDATA that may be compressed: octets before them, how many (RFC 3597 section 4).
_NAMES_IN_RDATA: Final = {
    2: (0, 1), 3: (0, 1), 4: (0, 1), 5: (0, 1), 6: (0, 2), 7: (0, 1), 8: (0, 1), 9: (0, 1), 12: (0, 1),
    14: (0, 2), 15: (2, 1), 17: (0, 2), 18: (2, 1), 21: (2, 1), 24: (18, 1), 26: (2, 2), 30: (0, 1),
    33: (6, 1), 36: (2, 1), 39: (0, 1),
}  # fmt: skip

_Names: TypeAlias = dict[int, bytes]  # offset -> the name that starts there
_Target: TypeAlias = tuple[bytes, int]  # name, TTL
_Link: TypeAlias = tuple[int, bytes, bytes, int]  # _CNAME or _DNAME, owner, target, TTL
_Leaf: TypeAlias = tuple[bytes, bytes, int]  # owner, address, TTL


# -- queries ----------------------------------------------------------------------------------------------


def triage(wire: bytes) -> int | None:
    """Say by the header alone what is not a query: SILENCE, or the response code it is answered with.

    None means: go on with `read_query`. A response is never answered, since that makes loops, and fewer
    than twelve octets leave no ID to answer to.
    """
    return _TRIAGE[wire[2]] if len(wire) >= _HEADER else SILENCE


def read_query(wire: bytes) -> tuple[bytes, int]:
    """Return the lower-cased name that a query asks for and the offset behind its question.

    FormError for anything but one whole question, followed at most by whole additional records.
    """
    at = _HEADER
    try:
        while 0 < (length := wire[at]) < 64:
            at += 1 + length
    except IndexError:
        raise FormError("the question runs past the end of the message") from None
    if length:
        raise FormError(f"octet {at}: a label of the question is compressed or longer than 63 octets")
    end = at + 5
    if end > _HEADER + MAX_NAME + 4:
        raise FormError(f"the question name is longer than {MAX_NAME} octets")
    if end != len(wire) or wire[4:12] != _ONE_QUESTION:
        if wire[4:10] != _ONE_QUESTION[:6]:
            raise FormError("a query has one question and no answer or authority records")
        _find_opt(wire, end)
    return wire[_HEADER : at + 1].lower(), end


def qtype(wire: bytes, end: int) -> int:
    """Return the type that the question asks for."""
    return wire[end - 4] << 8 | wire[end - 3]


def edns(query: bytes, end: int) -> tuple[int, int, bool] | None:
    """Return the EDNS of a query that `read_query` accepted, None if it has none (RFC 6891 section 6.1).

    That is the size it takes over UDP (512 or more), the version (one that is not 0 is for the server to
    refuse) and DO.
    """
    if end == len(query):
        return None
    at = end if query.startswith(_OPT_START, end) else _find_opt(query, end)
    if not at:
        return None
    size, _, version, flags = _OPT_FIELDS.unpack_from(query, at + 3)
    return max(size, SMALLEST), version, flags >= _DNSSEC_OK


def _find_opt(query: bytes, at: int) -> int:
    """Return where the OPT record starts, 0 if there is none; the records from `at` must fit exactly."""
    found = 0
    try:
        for _ in range(query[10] << 8 | query[11]):
            start, at = at, _after_name(query, at)
            kind, length = _EXTRA.unpack_from(query, at)
            at += 10 + length
            if kind == _OPT_TYPE:
                if found or query[start]:
                    raise FormError(f"octet {start}: a second OPT record, or one not at the root")
                found = start
                _check_options(query, at - length, at)
    except (IndexError, struct.error):
        raise FormError("the additional records run past the end of the message") from None
    if at != len(query):
        raise FormError(f"the message ends at octet {len(query)}, its records at octet {at}")
    return found


def _after_name(wire: bytes, at: int) -> int:
    """Return the offset behind a name that is of no interest itself."""
    start = at
    while 0 < (length := wire[at]) < 64:
        at += 1 + length
    if not length:
        return at + 1
    if length < _POINTER or (length & 0x3F) << 8 | wire[at + 1] >= start:
        raise FormError(f"octet {at}: neither a label nor a pointer to a name before it")
    return at + 2


def _check_options(query: bytes, at: int, end: int) -> None:
    while at < end:
        at += 4 + _PAIR.unpack_from(query, at)[1]
    if at != end:
        raise FormError("the options of the OPT record do not fit into it")


# -- answers ----------------------------------------------------------------------------------------------


def read_answer(
    wire: bytes, end: int, name: bytes
) -> tuple[tuple[bytes, ...], int | None, tuple[bytes, ...]]:
    """Return what a response to the question for `name` teaches: addresses, TTL, CNAME targets.

    Addresses are those of A and AAAA records and of the hints of SVCB and HTTPS records (RFC 9460 section
    7.3) whose owner is on the chain of the question, each once. The TTL is the smallest of the records
    that took part, None if none did. The targets are in the order of the chain. The caller has checked
    that the response repeats the question, which ends at `end`. FormError as the module says.
    """
    plain = _read_addresses(wire, end)
    if plain is not None:
        found, times = plain
        return tuple(dict.fromkeys(found)), max(min(times), 0), ()
    leaves, links = _read_records(wire, end, {_HEADER: name})
    chain, ttls = _follow(name, links) if links else ({name: None}, [])
    addresses: dict[bytes, None] = {}
    for owner, address, ttl in leaves:
        if owner in chain:
            addresses[address if len(address) == 4 else unmapped(address)] = None
            ttls.append(ttl)
    return tuple(addresses), max(min(ttls), 0) if ttls else None, tuple(chain)[1:]


def _read_addresses(wire: bytes, at: int) -> tuple[Iterable[bytes], Sequence[int]] | None:
    """Return addresses and TTLs of an answer section that is nothing but addresses of one family.

    Most are, and all have the question's own name as owner. They are read in one go, in a fifth of the time
    that records take which may be anything. None for all other answers.
    """
    start = wire[at : at + 6]
    size = _ADDRESSES.get(start)
    if size is None:
        return None
    count = wire[6] << 8 | wire[7]
    if not 0 < count <= _PLAIN or len(wire) < at + count * (12 + size):
        return None
    fields = _RECORDS[size][count].unpack_from(wire, at)
    if fields[::4].count(start) != count or fields[2::4].count(size) != count:
        return None
    return fields[3::4] if size == 4 else map(unmapped, fields[3::4]), fields[1::4]


def _read_records(wire: bytes, at: int, names: _Names) -> tuple[list[_Leaf], list[_Link]]:
    """Return the addresses, and the CNAMEs and DNAMEs, of the answer section, which starts at `at`."""
    leaves: list[_Leaf] = []
    links: list[_Link] = []
    try:
        for _ in range(wire[6] << 8 | wire[7]):
            if wire[at] < _POINTER:
                owner, at = _read_name(wire, at, names)
                kind, ttl, length = _FIXED.unpack_from(wire, at)
                at += 10
            else:
                pointer, kind, ttl, length = _POINTED.unpack_from(wire, at)
                owner = names.get(pointer & 0x3FFF) or _read_name(wire, at, names)[0]
                at += 12
            if kind in _SIZES:
                if length == _SIZES[kind]:
                    leaves.append((owner, wire[at : at + length], ttl))
            elif kind in _LINKS:
                links.append((kind, owner, _target(wire, at, length, names), ttl))
            elif kind in _SERVICES:
                leaves += [(owner, hint, ttl) for hint in _hints(wire[at : at + length])]
            at += length
    except (IndexError, struct.error):
        raise FormError("the answer records run past the end of the message") from None
    if at > len(wire):
        raise FormError("the answer records run past the end of the message")
    return leaves, links


def _target(wire: bytes, at: int, length: int, names: _Names) -> bytes:
    target, after = _read_name(wire, at, names)
    if after != at + length:
        raise FormError(f"octet {at}: the target of a CNAME or DNAME does not fill its record")
    return target


def _read_name(wire: bytes, at: int, names: _Names) -> tuple[bytes, int]:
    """Return the lower-cased name at `at` and the offset behind it, remembering where its parts start.

    Names are read once each and in ascending order, so `names` never holds `at` itself.
    """
    runs = []  # labels without a pointer between them: where they start, their octets
    limit = len(wire)
    after = 0
    while (name := names.get(at)) is None:
        start = at
        while 0 < (length := wire[at]) < 64 and (at == start or at not in names):
            at += 1 + length
        runs.append((start, wire[start:at]))
        if at in names:
            continue
        behind = at + 2 if length else at + 1
        if behind > limit or 0 < length < _POINTER:
            raise FormError(f"octet {at}: neither a label nor a pointer to a name before it")
        after = after or behind
        if not length:
            name = ROOT
            break
        at = (length & 0x3F) << 8 | wire[at + 1]
        if at >= start:
            raise FormError(f"octet {behind - 2}: a pointer that does not point to a name before it")
        limit = start
    for start, run in reversed(runs):
        name = run.lower() + name
        if len(name) > MAX_NAME:
            raise FormError(f"octet {start}: a name of more than {MAX_NAME} octets")
        names[start] = name
        if len(run) > _LONG_RUN:
            _remember_suffixes(start, len(run), name, names)
    return name, after


def _remember_suffixes(start: int, length: int, name: bytes, names: _Names) -> None:
    """Note the names that start inside a run of labels, lest pointers into it walk it again and again."""
    at = 0
    while at < length:
        names[start + at] = name[at:]
        at += 1 + name[at]


def _follow(name: bytes, links: list[_Link]) -> tuple[dict[bytes, None], list[int]]:
    """Return the names on the chain from `name`, in order, and the TTLs of the records that lead there."""
    cnames: dict[bytes, list[_Target]] = {}
    dnames: dict[bytes, _Target] = {}
    for kind, owner, target, ttl in links:
        if kind == _CNAME:
            cnames.setdefault(owner, []).append((target, ttl))
        else:
            dnames[owner] = min(dnames.get(owner, (target, ttl)), (target, ttl))
    chain: dict[bytes, None] = {name: None}
    ttls = []
    waiting = [name]
    for current in waiting:
        targets = sorted(cnames.get(current, ()))
        if dnames and (substitute := _substitute(current, dnames)):
            ttls.append(substitute[1])
            targets = targets or [substitute]  # the synthesised CNAME may be missing, RFC 6672 section 3.1
        for target, ttl in targets:
            if target not in chain:
                if len(chain) == MAX_CHAIN:
                    return chain, ttls
                chain[target] = None
                waiting.append(target)
            ttls.append(ttl)
    return chain, ttls


def _substitute(name: bytes, dnames: dict[bytes, _Target]) -> _Target | None:
    """Return what the closest DNAME above `name` makes of it (RFC 6672 section 2.2), None without one."""
    at = 0
    while name[at]:
        at += 1 + name[at]
        if found := dnames.get(name[at:]):
            target, ttl = found
            return (name[:at] + target, ttl) if at + len(target) <= MAX_NAME else None
    return None


def _hints(rdata: bytes) -> list[bytes]:
    """Return the addresses in the hints of an SVCB or HTTPS record, none if the record is broken."""
    try:
        _, parameters = _read_service(rdata)
    except (FormError, IndexError, struct.error):
        return []
    if rdata.startswith(b"\x00\x00"):  # AliasMode, where parameters mean nothing (RFC 9460 section 2.4.2)
        return []
    return [hint for key, size in _HINTS.items() for hint in _split(parameters.get(key, b""), size)]


def _read_service(rdata: bytes) -> tuple[bytes, dict[int, bytes]]:
    """Return priority and target of an SVCB or HTTPS record as they stand, and its parameters by key.

    FormError, IndexError or struct.error if it is malformed (RFC 9460 section 2.2); parameters other than
    the hints are not looked into.
    """
    at = 2
    while 0 < (length := rdata[at]) < 64:
        at += 1 + length
    at += 1
    if length or at > 2 + MAX_NAME:
        raise FormError("the target of an SVCB record is compressed or too long")
    head, last, parameters = rdata[:at], -1, {}
    while at < len(rdata):
        key, length = _PAIR.unpack_from(rdata, at)
        at += 4 + length
        size = _HINTS.get(key, 1)
        if key <= last or at > len(rdata) or (size > 1 and (not length or length % size)):
            raise FormError("the parameters of an SVCB record are out of order or do not fit")
        last = key
        parameters[key] = rdata[at - length : at]
    return head, parameters


def _split(value: bytes, size: int) -> list[bytes]:
    return [value[at : at + size] for at in range(0, len(value), size)]


# -- replies and changed answers --------------------------------------------------------------------------


def reply(
    query: bytes,
    end: int | None,
    rcode: int,
    *,
    soa_ttl: int | None = None,
    ede: tuple[int, str] | None = None,
) -> bytes:
    """Return our own reply to a query: its ID, opcode, RD, CD and question, with QR and RA set.

    `end` is None where the query cannot be read: then there is a header and nothing else. `soa_ttl` adds
    an SOA record, which lets a denial be cached for so many seconds (RFC 2308). `ede` is a code and a
    text of RFC 8914, sent where the query has an OPT record, as is a response code over 15. The reply has
    512 octets or fewer; a text that is too long is cut.
    """
    head = bytes((query[0], query[1], 0x80 | query[2] & 0x79, 0x80 | query[3] & 0x10 | rcode & 0x0F))
    if end is None:
        return head + bytes(8)
    body = query[_HEADER:end] + _soa(soa_ttl) if soa_ttl is not None else query[_HEADER:end]
    asked = edns(query, end)
    counts = _COUNTS[soa_ttl is not None][asked is not None]
    if asked is None:
        return head + counts + body
    room = SMALLEST - _HEADER - len(body) - _OPT_RECORD.size
    return head + counts + body + _opt(rcode, _ede(ede, room) if ede else b"", dnssec_ok=asked[2])


def truncated(answer: bytes, end: int, query: bytes) -> bytes:
    """Return the stub of an answer that is too large for its client: TC set, the question, and an OPT.

    ID, question and EDNS are the query's, flags and response code the answer's. No records rather than
    some: the client asks again over TCP, and half an answer is taken for a whole one by some.
    """
    asked = edns(query, end)
    flags = bytes((answer[2] | 0x02, answer[3]))
    opt = _opt(NOERROR, b"", dnssec_ok=asked[2]) if asked else b""
    return query[:2] + flags + _COUNTS[0][asked is not None] + query[_HEADER:end] + opt


@lru_cache(maxsize=16)
def _soa(ttl: int) -> bytes:
    """Return the SOA record of a denial.

    Its owner is the denied name itself. Stub resolvers (glibc, musl, Go) do not look at it; caches want
    the name or one above it (systemd-resolved, Unbound, dnsmasq). A name above it would be a lie about a
    zone of which other names may be allowed, and would linger in the cache of a resolver that asks
    through us. The rest is as for locally served zones (RFC 6303 section 3).
    """
    rdata = b"\xc0\x0c\x06nobody\x07invalid\x00" + struct.pack(">5I", 1, 3600, 1200, 604_800, ttl)
    return b"\xc0\x0c" + struct.pack(">HHIH", 6, _IN, ttl, len(rdata)) + rdata


def _opt(rcode: int, options: bytes, *, dnssec_ok: bool) -> bytes:
    flags = _DNSSEC_OK if dnssec_ok else 0
    return _OPT_RECORD.pack(0, _OPT_TYPE, SIZE, rcode >> 4, 0, flags, len(options)) + options


def _ede(ede: tuple[int, str], room: int) -> bytes:
    code, text = ede
    extra = text.encode()
    if len(extra) > room - 6:
        extra = extra[: room - 6].decode(errors="ignore").encode()
    return struct.pack(">3H", _EDE_OPTION, 2 + len(extra), code) + extra


def strip(answer: bytes, end: int, keep: Callable[[bytes], bool]) -> bytes:
    """Return an answer without the addresses that `keep` refuses, in records of any section and in hints.

    `keep` is asked about packed addresses, mapped ones unmapped. The question stays to the octet and the
    records in their order; compression and the case of other names may change. AD is cleared, since what
    was authentic is no longer whole. An SVCB record that cannot be read is left out, as nobody knows what
    it holds. FormError for an answer that does not hold together.
    """
    name = answer[_HEADER : end - 4].lower()
    names, places = {_HEADER: name}, {name: _HEADER}
    out = bytearray(answer[:end])
    at = end
    try:
        out[3] &= 0xDF
        for field in (6, 8, 10):
            kept = 0
            for _ in range(answer[field] << 8 | answer[field + 1]):
                owner, at = _read_name(answer, at, names)
                kind, ttl, length = _FIXED.unpack_from(answer, at)
                at += 10 + length
                rdata = _kept(answer, at - length, at, kind, names, keep)
                if rdata is not None:
                    kept += 1
                    out += _written(owner, len(out), places) + _FIXED.pack(kind, ttl, len(rdata)) + rdata
            out[field : field + 2] = kept.to_bytes(2, "big")
    except (IndexError, struct.error):
        raise FormError("the records run past the end of the message") from None
    if at > len(answer) or len(out) > MAX_MESSAGE:
        raise FormError("the records run past the end of the message, or grow past its largest size")
    return bytes(out)


def _written(name: bytes, at: int, places: dict[bytes, int]) -> bytes:
    """Return a name as it is written at `at`: a pointer to where it stands already, if one reaches there."""
    place = places.setdefault(name, at)
    return (_POINTER << 8 | place).to_bytes(2, "big") if place < min(at, _REACH) else name


def _kept(
    wire: bytes, at: int, end: int, kind: int, names: _Names, keep: Callable[[bytes], bool]
) -> bytes | None:
    """Return the RDATA at wire[at:end] as it may stay, its names in full, or None."""
    rdata = wire[at:end]
    if len(rdata) == _SIZES.get(kind):
        return rdata if keep(unmapped(rdata)) else None
    if kind in _SERVICES:
        return _kept_service(rdata, keep)
    before, count = _NAMES_IN_RDATA.get(kind >> 16, (0, 0))
    parts = [wire[at : at + before]]
    at += before
    for _ in range(count):
        name, at = _read_name(wire, at, names)
        parts.append(name)
    if at > end:
        raise FormError(f"octet {end}: the names in a record do not fit into it")
    return b"".join(parts) + wire[at:end]


def _kept_service(rdata: bytes, keep: Callable[[bytes], bool]) -> bytes | None:
    try:
        head, parameters = _read_service(rdata)
    except (FormError, IndexError, struct.error):
        return None
    for key, size in _HINTS.items():
        if key in parameters:
            parameters[key] = b"".join(hint for hint in _split(parameters[key], size) if keep(unmapped(hint)))
    written = (
        _PAIR.pack(key, len(value)) + value for key, value in parameters.items() if value or key not in _HINTS
    )
    return head + b"".join(written)
