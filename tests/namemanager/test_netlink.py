from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroute2.netlink.nfnetlink.nftsocket import nft_set_elem_list_msg

from dnsproxy.namemanager import netlink
from dnsproxy.namemanager.elements import Element, SetSpec, comment, key_of

FOUR = SetSpec("inet", "dnsproxy", "github4", 4, ports=False, ours=True)
SIX = SetSpec("ip6", "filter", "g", 6, ports=False, ours=False)
FOUR_PORTS = SetSpec("inet", "dnsproxy", "ep.default.ci.port4", 4, ports=True, ours=True)
SIX_PORTS = SetSpec("inet", "dnsproxy", "ep.default.ci.port6", 6, ports=True, ours=True)
SPECS = (FOUR, SIX, FOUR_PORTS, SIX_PORTS)
KEY = bytes((192, 0, 2, 1))


def key_size(spec: SetSpec) -> int:
    return (4 if spec.version == 4 else 16) + (8 if spec.ports else 0)


name_texts = st.text("abcxyz019.-", min_size=1, max_size=150)


def element_of(spec: SetSpec):
    keys = st.binary(min_size=key_size(spec), max_size=key_size(spec))
    return st.builds(Element, st.just(spec), keys, name_texts)


any_element = st.sampled_from(SPECS).flatmap(element_of)
any_elements = st.sampled_from(SPECS).flatmap(lambda spec: st.lists(element_of(spec), min_size=1, max_size=9))

few = settings(max_examples=200)  # in the deep profile too: there are few shapes, and pyroute2 is slow


def as_pyroute2(spec: SetSpec, kind: int, flags: int, elements: list[dict]) -> bytes:
    """Return the message that pyroute2 makes of the same elements."""
    made = nft_set_elem_list_msg()
    made["header"].update({"type": kind, "flags": flags, "sequence_number": 7, "pid": 0})
    made["nfgen_family"] = netlink.FAMILIES[spec.family]
    made["attrs"] = [
        ["NFTA_SET_ELEM_LIST_TABLE", spec.table],
        ["NFTA_SET_ELEM_LIST_SET", spec.name],
        ["NFTA_SET_ELEM_LIST_ELEMENTS", elements],
    ]
    made.encode()
    return bytes(made.data)


def as_attributes(element: Element, *, named: bool, timed: bool = False) -> dict:
    attributes: list = [["NFTA_SET_ELEM_KEY", {"attrs": [("NFTA_DATA_VALUE", element.key)]}]]
    if timed:
        attributes.append(["NFTA_SET_ELEM_TIMEOUT", 0])
    if named:
        attributes.append(
            ["NFTA_SET_ELEM_USERDATA", [("NFTNL_UDATA_SET_ELEM_COMMENT", comment(element.name))]]
        )
    return {"attrs": attributes}


# --- To the kernel ---

# One at a time: pyroute2 numbers the elements of a list, nft and we give each the type NFTA_LIST_ELEM.


@few
@given(any_element, st.booleans())
def test_adding_is_encoded_byte_for_byte_as_by_pyroute2(element, timed):
    (request,) = netlink.add_elements(element.spec, [element], timed=timed)
    expected = as_pyroute2(element.spec, 0x0A0C, 0x401, [as_attributes(element, named=True, timed=timed)])
    assert netlink.message(request, 7).hex(" ", 4) == expected.hex(" ", 4)


@few
@given(any_element)
def test_deleting_is_encoded_byte_for_byte_as_by_pyroute2(element):
    (request,) = netlink.delete_elements(element.spec, [element], destroy=True, timed=False)
    expected = as_pyroute2(element.spec, 0x0A1E, 0x1, [as_attributes(element, named=False)])
    assert netlink.message(request, 7).hex(" ", 4) == expected.hex(" ", 4)


def test_without_destroy_elements_are_added_then_deleted():
    elements = [Element(FOUR, KEY, "a.example.")]
    add, delete = netlink.delete_elements(FOUR, elements, destroy=False, timed=True)
    assert [add] == netlink.add_elements(FOUR, elements, timed=True)
    assert netlink.message(delete, 7) == as_pyroute2(
        FOUR, 0x0A0E, 0x1, [as_attributes(elements[0], named=False)]
    )


@pytest.mark.parametrize("value", [b"", b"a", b"ab", b"abc", b"abcd"])
def test_an_attribute_is_padded_to_four_octets_which_its_length_does_not_count(value):
    padding = bytes(-len(value) % 4)
    assert netlink.attribute(5, value) == struct.pack("=HH", 4 + len(value), 5) + value + padding


def test_a_batch_is_framed_numbered_and_acknowledged_at_its_last_request_only():
    requests = [netlink.new_table(FOUR), netlink.new_set(FOUR, 1), netlink.new_set(FOUR_PORTS, 2)]
    sent = list(netlink.messages(netlink.batch(requests, 40)))
    assert [message.kind for message in sent] == [0x10, 0x0A00, 0x0A09, 0x0A09, 0x11]
    assert [message.sequence for message in sent] == [40, 41, 42, 43, 44]
    assert [message.flags for message in sent] == [0x1, 0x401, 0x401, 0x405, 0x1]
    assert sent[0].body == sent[-1].body == bytes((0, 0, 0, 10))  # the subsystem, in network order
    assert [message.body[0] for message in sent[1:-1]] == [1, 1, 1]


def test_sequence_numbers_wrap():
    sent = list(netlink.messages(netlink.batch([netlink.new_table(FOUR)], 0xFFFFFFFF)))
    assert [message.sequence for message in sent] == [0xFFFFFFFF, 0, 1]


def test_more_elements_than_an_attribute_holds_go_out_as_several_requests():
    elements = [Element(SIX_PORTS, key_of(n.to_bytes(16, "big"), 6, 443), "x" * 127) for n in range(1000)]
    requests = netlink.add_elements(SIX_PORTS, elements, timed=True)
    assert len(requests) > 1
    bodies = [bytes(4) + request.body for request in requests]
    assert all(len(netlink.attributes(body)[3]) + 4 <= 0xFFFF for body in bodies)
    found = [key for body in bodies for key, _ in netlink.read_elements(body)]
    assert found == [element.key for element in elements]


def test_no_elements_make_no_request():
    assert netlink.add_elements(FOUR, [], timed=False) == []
    assert netlink.delete_elements(FOUR, [], destroy=False, timed=False) == []


@pytest.mark.parametrize(
    ("spec", "key_type", "key_length", "order"),
    [(FOUR, 7, 4, 2), (SIX, 8, 16, 2), (FOUR_PORTS, 0x730D, 12, 0), (SIX_PORTS, 0x830D, 24, 0)],
)
def test_a_set_is_declared_with_the_numbers_that_nft_uses(spec, key_type, key_length, order):
    request = netlink.new_set(spec, 3)
    assert netlink.attributes(bytes(4) + request.body) == {
        1: spec.table.encode() + b"\0",
        2: spec.name.encode() + b"\0",
        3: bytes(4),
        4: key_type.to_bytes(4, "big"),
        5: key_length.to_bytes(4, "big"),
        10: bytes((0, 0, 0, 3)),
        13: b"\0\4" + struct.pack("=I", order),
    }


# --- From the kernel ---


@few
@given(any_elements)
def test_elements_are_read_back_with_their_comments(elements):
    (request,) = netlink.add_elements(elements[0].spec, elements, timed=True)
    found = list(netlink.read_elements(bytes(4) + request.body))
    assert found == [(element.key, comment(element.name)) for element in elements]


def listed(*items: bytes) -> bytes:
    """Return the body of a dump's message as the kernel writes it, lists and elements marked as nested."""
    nested = 0x8000
    return bytes(4) + netlink.attribute(
        3 | nested, b"".join(netlink.attribute(1 | nested, item) for item in items)
    )


def keyed(key: bytes) -> bytes:
    return netlink.attribute(1 | 0x8000, netlink.attribute(1, key))


def test_an_element_that_will_time_out_is_not_one_to_count_on():
    timed = keyed(b"\1\1\1\1") + netlink.attribute(4, bytes(8)) + netlink.attribute(5, bytes(8))
    never = keyed(b"\2\2\2\2") + netlink.attribute(4, bytes(8))
    assert list(netlink.read_elements(listed(timed, never))) == [(b"\2\2\2\2", "")]


def test_a_catch_all_element_is_passed_over():
    catch_all = netlink.attribute(3, bytes((0, 0, 0, 2)))
    assert list(netlink.read_elements(listed(catch_all, keyed(KEY)))) == [(KEY, "")]


def test_a_comment_is_found_behind_other_notes():
    notes = b"\1\4\0\0\0\0" + b"\0\3hi\0"
    assert list(netlink.read_elements(listed(keyed(KEY) + netlink.attribute(6, notes)))) == [(KEY, "hi")]


def test_an_empty_set_has_no_elements():
    assert list(netlink.read_elements(bytes(4) + netlink.attribute(1, b"t\0"))) == []


def described(spec: SetSpec, flags: int = 0, size: int = 0) -> netlink.Shape:
    body = bytes(4) + netlink.new_set(spec, 1).body
    body = body.replace(netlink.attribute(3, bytes(4)), netlink.attribute(3, flags.to_bytes(4, "big")))
    if size:
        body += netlink.attribute(9 | 0x8000, netlink.attribute(1, size.to_bytes(4, "big")))
    ((name, shape),) = netlink.read_sets(body)
    assert name == spec.name
    return shape


@pytest.mark.parametrize("spec", SPECS)
def test_a_set_fits_what_it_was_made_for_and_nothing_else(spec):
    shape = described(spec)
    assert [other for other in SPECS if shape.fits(other)] == [spec]


@pytest.mark.parametrize("flags", [0x10, 0x20, 0x30, 0x80, 0x100])
def test_timeouts_updates_by_rules_field_descriptions_and_counters_do_no_harm(flags):
    assert described(FOUR, flags).fits(FOUR)


@pytest.mark.parametrize("flags", [0x1, 0x2, 0x4, 0x8, 0x40, 0x14, 0x84])
def test_anonymous_constant_interval_and_map_sets_do_not_fit(flags):
    assert not described(FOUR, flags).fits(FOUR)


def test_a_shape_is_told_in_nfts_words():
    assert str(described(FOUR)) == "type ipv4_addr"
    assert (
        str(described(SIX_PORTS, 0x14))
        == "type ipv6_addr . inet_proto . inet_service, flags interval, timeout"
    )
    assert str(netlink.Shape(41, 16, 0, 0)) == "type ifname"
    assert str(netlink.Shape(63, 4, 0, 0)) == "type number 63"


def test_the_limit_and_the_timeouts_of_a_set_are_read():
    assert described(FOUR, 0x10, size=100).size == 100
    assert described(FOUR, 0x10).timed
    assert not described(FOUR, 0x20).timed


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (0x0A09, (1, "dnsproxy", "github4")),  # new set
        (0x0A0B, (1, "dnsproxy", "github4")),  # set deleted
        (0x0A1D, (1, "dnsproxy", "github4")),  # set destroyed
        (0x0A0C, (1, "dnsproxy", "github4")),  # new element
        (0x0A0E, (1, "dnsproxy", "github4")),  # element deleted
        (0x0A1E, (1, "dnsproxy", "github4")),  # element destroyed
        (0x0A00, None),  # new table
        (0x0A02, None),  # table deleted, its sets have events of their own
        (0x0A06, None),  # new rule
        (0x0A0F, None),  # new generation
    ],
)
def test_an_event_tells_which_set_it_is_about(kind, place):
    body = b"\1\0\0\0" + netlink.attribute(1, b"dnsproxy\0") + netlink.attribute(2, b"github4\0")
    assert netlink.changed(netlink.Message(kind, 0, 0, body)) == place


def test_a_datagram_is_taken_apart_at_the_padded_lengths():
    one = struct.pack("=IHHII", 18, 2, 0, 5, 9) + b"ab" + bytes(2)
    two = struct.pack("=IHHII", 20, 3, 2, 6, 9) + b"wxyz"
    assert list(netlink.messages(one + two)) == [
        netlink.Message(2, 0, 5, b"ab"),
        netlink.Message(3, 2, 6, b"wxyz"),
    ]


@pytest.mark.parametrize(("raw", "number"), [(0, 0), (-2, 2), (-23, 23)])
def test_an_error_is_the_negative_errno_at_the_head_of_the_body(raw, number):
    message = netlink.Message(netlink.ERROR, 0, 1, struct.pack("=i", raw) + bytes(16))
    assert netlink.error_number(message) == number
