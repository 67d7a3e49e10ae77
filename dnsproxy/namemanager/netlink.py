"""nf_tables messages as bytes: what goes to the kernel and what comes back. No socket in here.

A netlink message is a header (length, type, flags, sequence number, port ID of the sender), for nf_tables
followed by four octets (family, version, resource ID) and attributes. An attribute is length, type and
value, padded to four octets; a nested one has attributes as its value. Headers are in the order of the
machine, numbers inside attributes in network order. (linux/netlink.h, linux/netfilter/nf_tables.h)

A *batch* is one transaction: BEGIN, requests, END. The kernel applies all of it or nothing. Every error is
answered with the sequence number of the request that caused it, or of BEGIN where the transaction is refused
as a whole (rights, no nf_tables). Only the last request asks for an acknowledgement: it comes after the
commit, so it stands for the whole batch. (BEGIN and END answer a request for one only since Linux 6.10.)

What surprises:
- The length of an attribute has 16 bits, so many elements go out as several requests of one batch.
- Sets of address . protocol . port are declared exactly as nft does: key types packed six bits each, *no*
  description of the fields (NFTA_SET_DESC_CONCAT) and no flag NFT_SET_CONCAT, both of which nft writes for
  interval sets only. With them an nft file that declares the same set is refused: for the kernel it is not
  the same set.
- In a set with timeouts an element without one gets the default of the set, and vanishes without an event.
  There we say "timeout 0", which is never; where the set has no timeouts that attribute is an error.
- A dump of elements during which something changes is not marked with NLM_F_DUMP_INTR (Linux 6.18), but each
  of its messages bears the generation of the ruleset, in the place of the resource ID.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from dnsproxy.namemanager.commands import key_types
from dnsproxy.namemanager.elements import comment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dnsproxy.namemanager.elements import Element, SetSpec

ERROR, DONE = 2, 3  # types of control messages
REQUEST, ACK, DUMP, CREATE = 0x1, 0x4, 0x300, 0x400  # flags of requests

BATCH_BEGIN, BATCH_END = 0x10, 0x11
_NF_TABLES = 10  # the nfnetlink subsystem
NEW_TABLE = 0x0A00
NEW_SET, GET_SETS, DELETE_SET, DESTROY_SET = 0x0A09, 0x0A0A, 0x0A0B, 0x0A1D
NEW_ELEMENTS, GET_ELEMENTS, DELETE_ELEMENTS, DESTROY_ELEMENTS = 0x0A0C, 0x0A0D, 0x0A0E, 0x0A1E

_SET_EVENTS = frozenset((NEW_SET, DELETE_SET, DESTROY_SET, NEW_ELEMENTS, DELETE_ELEMENTS, DESTROY_ELEMENTS))
EVENTS = 1 << 6  # the bit mask of the multicast group NFNLGRP_NFTABLES (7)

FAMILIES = {"inet": 1, "ip": 2, "netdev": 5, "bridge": 7, "ip6": 10}

_FLAGS = {0x1: "anonymous", 0x2: "constant", 0x4: "interval", 0x8: "map", 0x10: "timeout", 0x20: "dynamic",
          0x40: "object map"}  # fmt: skip
_TIMEOUT = 0x10
_UNFIT = 0x1 | 0x2 | 0x4 | 0x8 | 0x40  # flags of a set that cannot take single addresses one by one
_KEY_TYPES = {"ipv4_addr": (7, 4), "ipv6_addr": (8, 16), "inet_proto": (12, 4), "inet_service": (13, 4)}
_TYPE_NAMES = {5: "string", 9: "ether_addr", 19: "mark", 41: "ifname"} | {
    n: t for t, (n, _) in _KEY_TYPES.items()
}

_LIST_LIMIT = 60_000  # octets of elements in one request; the attribute ends at 65,535

_HEADER = Struct("=IHHIIBBH")  # with nf_tables' four octets; the last number is in network order
_HEAD = Struct("=IHHII")
_ATTRIBUTE = Struct("=HH")
_ERROR = Struct("=i")
_ORDER = Struct("=I")
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


class Request(NamedTuple):
    """One request about a set or its table; without one, it is about nothing that exists."""

    kind: int
    flags: int
    spec: SetSpec | None
    body: bytes


class Message(NamedTuple):
    """One message of the kernel; `body` begins after the 16 octets of the header."""

    kind: int
    flags: int
    sequence: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """What a set is: the packed types and the octets of its keys, its flags, its limit (0: none)."""

    key_type: int
    key_length: int
    flags: int
    size: int

    @property
    def timed(self) -> bool:
        """Whether elements may have timeouts."""
        return bool(self.flags & _TIMEOUT)

    def fits(self, spec: SetSpec) -> bool:
        """Tell whether such a set takes single elements of the kind that `spec` wants."""
        return (self.key_type, self.key_length) == _wanted(spec) and not self.flags & _UNFIT

    def __str__(self) -> str:
        packed = [self.key_type >> shift & 0x3F for shift in (24, 18, 12, 6, 0)]
        types = " . ".join(_TYPE_NAMES.get(number, f"number {number}") for number in packed if number)
        flags = ", ".join(name for bit, name in _FLAGS.items() if self.flags & bit)
        return f"type {types or 'unknown'}" + (f", flags {flags}" if flags else "")


# --- To the kernel ---


def attribute(kind: int, value: bytes) -> bytes:
    """Return an attribute, padded."""
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + _PADDING[len(value) & 3]


def message(request: Request, sequence: int) -> bytes:
    """Return a request on its own, such as one for a dump."""
    family = FAMILIES[request.spec.family] if request.spec else 0
    return _message(request.kind, request.flags | REQUEST, sequence, family, request.body)


def batch(requests: Sequence[Request], sequence: int) -> bytes:
    """Return one transaction; its requests have the numbers after `sequence`, which is that of BEGIN."""
    parts = [_message(BATCH_BEGIN, REQUEST, sequence, 0, b"", _NF_TABLES)]
    parts += [message(request, sequence + number) for number, request in enumerate(requests[:-1], 1)]
    last = requests[-1]
    parts.append(message(last._replace(flags=last.flags | ACK), sequence + len(requests)))
    parts.append(_message(BATCH_END, REQUEST, sequence + len(requests) + 1, 0, b"", _NF_TABLES))
    return b"".join(parts)


def probe() -> Request:
    """Return a request that always fails: ENOENT if the kernel has DESTROYSETELEM, EINVAL if not."""
    return Request(DESTROY_ELEMENTS, 0, None, attribute(1, b"-\0") + attribute(2, b"-\0"))


def new_table(spec: SetSpec) -> Request:
    """Return the request that creates the table of a set."""
    return Request(NEW_TABLE, CREATE, spec, attribute(1, _text(spec.table)) + attribute(2, bytes(4)))


def new_set(spec: SetSpec, number: int) -> Request:
    """Return the request that creates a set as nft would; `number` is unique in its transaction."""
    key_type, key_length = _wanted(spec)
    body = (
        _place(spec)
        + attribute(3, bytes(4))
        + attribute(4, _number(key_type))
        + attribute(5, _number(key_length))
        + attribute(10, _number(number))
        + attribute(13, _userdata(spec))
    )
    return Request(NEW_SET, CREATE, spec, body)


def get_sets(spec: SetSpec) -> Request:
    """Return the request that lists the sets of the table of `spec`."""
    return Request(GET_SETS, DUMP, spec, attribute(1, _text(spec.table)))


def get_elements(spec: SetSpec) -> Request:
    """Return the request that lists the elements of a set."""
    return Request(GET_ELEMENTS, DUMP, spec, _place(spec))


def add_elements(spec: SetSpec, elements: Iterable[Element], *, timed: bool) -> list[Request]:
    """Return the requests that add elements, whether they exist or not; `timed`: the set has timeouts."""
    never = attribute(4, bytes(8)) if timed else b""
    packed = [_element(element.key, never + attribute(6, _comment(element.name))) for element in elements]
    return _lists(NEW_ELEMENTS, CREATE, spec, packed)


def delete_elements(
    spec: SetSpec, elements: Iterable[Element], *, destroy: bool, timed: bool
) -> list[Request]:
    """Return the requests that delete elements, whether they exist or not.

    `destroy`: the kernel has DESTROYSETELEM (Linux 6.3). Where it has not, deleting a missing
    or twice deleted element would undo the whole transaction, so each is added first, and counts once.
    """
    elements = {element.key: element for element in elements}.values()
    packed = [_element(element.key) for element in elements]
    if destroy:
        return _lists(DESTROY_ELEMENTS, 0, spec, packed)
    return add_elements(spec, elements, timed=timed) + _lists(DELETE_ELEMENTS, 0, spec, packed)


def _message(kind: int, flags: int, sequence: int, family: int, body: bytes, resource: int = 0) -> bytes:
    resource = resource << 8 | resource >> 8  # network order, whatever the machine's
    return _HEADER.pack(20 + len(body), kind, flags, sequence & 0xFFFFFFFF, 0, family, 0, resource) + body


def _lists(kind: int, flags: int, spec: SetSpec, packed: list[bytes]) -> list[Request]:
    place = _place(spec)
    return [Request(kind, flags, spec, place + attribute(3, part)) for part in _parts(packed)]


def _parts(packed: list[bytes]) -> Iterator[bytes]:
    """Join elements to values that an attribute can hold."""
    part: list[bytes] = []
    size = 0
    for element in packed:
        if size + len(element) > _LIST_LIMIT:
            yield b"".join(part)
            part, size = [], 0
        part.append(element)
        size += len(element)
    if part:
        yield b"".join(part)


def _element(key: bytes, rest: bytes = b"") -> bytes:
    return attribute(1, attribute(1, attribute(1, key)) + rest)


def _comment(name: str) -> bytes:
    text = comment(name).encode("ascii") + b"\0"
    return bytes((0, len(text))) + text


def _userdata(spec: SetSpec) -> bytes:
    """Return what nft notes about the key of a set, its byte order: 2 is network order, 0 several fields."""
    return bytes((0, 4)) + _ORDER.pack(0 if spec.ports else 2)


def _wanted(spec: SetSpec) -> tuple[int, int]:
    """Return the packed type and the length of the keys of a set, as nft counts them."""
    packed = length = 0
    for name in key_types(spec):
        number, octets = _KEY_TYPES[name]
        packed, length = packed << 6 | number, length + octets
    return packed, length


def _place(spec: SetSpec) -> bytes:
    return attribute(1, _text(spec.table)) + attribute(2, _text(spec.name))


def _text(text: str) -> bytes:
    return text.encode() + b"\0"


def _number(number: int) -> bytes:
    return number.to_bytes(4, "big")


# --- From the kernel, which is trusted to send well-formed messages ---


def messages(datagram: bytes) -> Iterator[Message]:
    """Yield the messages of one datagram."""
    at = 0
    while at < len(datagram):
        length, kind, flags, sequence, _ = _HEAD.unpack_from(datagram, at)
        yield Message(kind, flags, sequence, datagram[at + 16 : at + length])
        at += length + 3 & ~3


def attributes(body: bytes, at: int = 4) -> dict[int, bytes]:
    """Return the attributes in a body from `at` on; without `at`, after the four octets of nf_tables."""
    found = {}
    while at < len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        found[kind & 0x3FFF] = body[at + 4 : at + length]  # without the marks "nested" and "network order"
        at += length + 3 & ~3
    return found


def error_number(message: Message) -> int:
    """Return the errno of an ERROR or DONE message, 0 for an acknowledgement."""
    (number,) = _ERROR.unpack_from(message.body)
    return -int(number)


def changed(event: Message) -> tuple[int, str, str] | None:
    """Return family, table and name of the set that an event is about, if any.

    A table does not go without an event for each of its sets.
    """
    if event.kind not in _SET_EVENTS:
        return None
    found = attributes(event.body)
    return event.body[0], _string(found[1]), _string(found[2])


def generation(body: bytes) -> bytes:
    """Return the low octets of the number of the ruleset's version that a message of a dump shows."""
    return body[2:4]


def read_sets(body: bytes) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of the one set in a message of a dump."""
    found = attributes(body)
    size = attributes(found.get(9, b""), 0).get(1, b"")
    yield (
        _string(found[2]),
        Shape(*(_whole(value) for value in (found[4], found[5], found.get(3, b""), size))),
    )


def read_elements(body: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield key and comment of the elements of one message of a dump.

    Left out: an element with a running timeout (attribute 5), which may vanish at any moment without an
    event, and the catch-all element, which has no key.
    """
    items = attributes(body).get(3, b"")
    at = 0
    while at < len(items):
        (length, _) = _ATTRIBUTE.unpack_from(items, at)
        found = attributes(items[at + 4 : at + length], 0)
        if 1 in found and 5 not in found:
            yield found[1][4:], _read_comment(found.get(6, b""))
        at += length + 3 & ~3


def _read_comment(userdata: bytes) -> str:
    """Return the comment (type 0) among the notes on an element: type, length, value, unpadded."""
    at = 0
    while at < len(userdata):
        kind, length = userdata[at], userdata[at + 1]
        if kind == 0:
            return _string(userdata[at + 2 : at + 2 + length])
        at += 2 + length
    return ""


def _string(value: bytes) -> str:
    return value.rstrip(b"\0").decode("utf-8", "replace")


def _whole(value: bytes) -> int:
    return int.from_bytes(value, "big")
