"""The connection table's bytes: what is read from them, and that no bytes do harm."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import threading

import pytest
from connections import CLOSE, ESTABLISHED, FIN_WAIT, SYN_SENT, TIME_WAIT, entry
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.addresses import from_text as address
from dnsproxy.errors import DnsproxyError, KernelError, RightsError
from dnsproxy.namemanager import conntrack
from dnsproxy.namemanager.netlink import attribute

CLIENT, SERVER, OTHER = map(address, ("10.1.0.5", "198.51.100.1", "198.51.100.2"))
CLIENT6, SERVER6 = map(address, ("fd00:1::5", "2001:db8:1::1"))
DONE = conntrack._HEADER.pack(20, 3, 2, 0, 0, 0, 0, 0)


def refused(number):
    """An ERROR message, as for a request that the kernel refuses."""
    return conntrack._HEAD.pack(20, 2, 0) + bytes(8) + conntrack._NUMBER.pack(-number)


def interrupted(message):
    """The same message, of a dump during which something was skipped."""
    return message[:6] + struct.pack("=H", 0x12) + message[8:]


class Kernel:
    """A socket that answers each dump with the next of `dumps`, each a list of datagrams or errors."""

    def __init__(self, *dumps):
        self.dumps = list(dumps)
        self.requests = []
        self.datagrams = []

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        pass

    def send(self, request):
        self.requests.append(request)
        self.datagrams = list(self.dumps.pop(0))

    def recv(self, size):
        if not self.datagrams:
            raise BlockingIOError(errno.EAGAIN, "nothing there")
        datagram = self.datagrams.pop(0)
        if isinstance(datagram, Exception):
            raise datagram
        return datagram


@pytest.fixture
def kernel(monkeypatch):
    """Let a made-up kernel answer; both families are there."""

    def answer(*dumps):
        made = Kernel(*dumps)
        monkeypatch.setattr(conntrack, "_socket", lambda: made)
        monkeypatch.setattr(conntrack, "_show_ourselves", lambda: frozenset({4, 16}))
        return made

    return answer


def owner(source):
    return {CLIENT: "default/ci", CLIENT6: "default/ci"}.get(source)


def read(who=owner):
    return conntrack._read(who, threading.Event())


# --- What is live ---


def test_connections_of_endpoints_are_live_by_where_they_go(kernel):
    kernel(
        [
            entry(CLIENT, SERVER) + entry(OTHER, SERVER, port=2),
            entry(CLIENT6, SERVER6) + entry(SERVER, CLIENT, port=3) + DONE,
        ]
    )
    assert read() == conntrack.Reading({"default/ci": {SERVER, SERVER6}}, 4, True, frozenset())


def test_where_nat_sent_a_connection_counts_as_what_was_asked_for(kernel):
    kernel([entry(CLIENT, address("10.96.0.1"), reply=(SERVER, address("203.0.113.7"))), DONE])
    assert read().live == {"default/ci": {address("10.96.0.1"), SERVER}}


@pytest.mark.parametrize(
    ("state", "live"),
    [(SYN_SENT, True), (ESTABLISHED, True), (FIN_WAIT, True), (TIME_WAIT, False), (CLOSE, False)],
)
def test_a_connection_that_tcp_has_closed_is_not_live(kernel, state, live):
    kernel([entry(CLIENT, SERVER, state=state), DONE])
    assert bool(read().live) is live


@pytest.mark.parametrize("protocol", [1, 17, 132])
def test_other_protocols_are_live_while_they_have_an_entry(kernel, protocol):
    kernel([entry(CLIENT, SERVER, protocol=protocol), DONE])
    assert read().live == {"default/ci": {SERVER}}


def test_mapped_addresses_are_the_addresses_in_them(kernel):
    mapped, server = (bytes(10) + b"\xff\xff" + each for each in (CLIENT, SERVER))
    kernel([entry(mapped, server), DONE])
    assert read().live == {"default/ci": {SERVER}}


def test_the_owner_is_asked_once_per_address(kernel):
    asked = []
    kernel(
        [*(entry(CLIENT, SERVER, port=port) + entry(OTHER, SERVER, port=port) for port in range(1, 9)), DONE]
    )
    read(asked.append)
    assert asked == [CLIENT, OTHER]


# --- What is not whole ---


def test_a_family_of_which_nothing_is_in_the_table_is_not_tracked(kernel):
    kernel([entry(CLIENT, SERVER), DONE], [DONE])
    assert read().untracked == {16}
    assert read().untracked == {4, 16}


def test_an_interrupted_dump_is_repeated_and_what_both_saw_is_live(kernel):
    made = kernel([interrupted(entry(CLIENT, SERVER)), DONE], [entry(CLIENT, OTHER) + DONE])
    reading = read()
    assert len(made.requests) == 2
    assert reading.whole
    assert reading.entries == 1
    assert reading.live == {"default/ci": {SERVER, OTHER}}


@pytest.mark.parametrize(
    "where", [[interrupted(entry(CLIENT, SERVER)), DONE], [entry(CLIENT, SERVER), interrupted(DONE)]]
)
def test_a_dump_that_is_always_interrupted_is_not_whole(kernel, where):
    made = kernel(*[where] * 10)
    reading = read()
    assert len(made.requests) == conntrack.DUMPS
    assert not reading.whole
    assert reading.live == {"default/ci": {SERVER}}


@pytest.mark.parametrize(
    "rest", [[], [OSError(errno.ENOBUFS, "No buffer space available")], [refused(errno.ENOMEM)]]
)
def test_a_list_that_breaks_off_is_an_error(kernel, rest):
    kernel([entry(CLIENT, SERVER), *rest])
    with pytest.raises(KernelError, match="whole list of connections"):
        read()


def test_missing_rights_are_named(kernel):
    kernel([refused(errno.EPERM)])
    with pytest.raises(RightsError, match="CAP_NET_ADMIN"):
        read()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_missing_module_is_named(kernel, number):
    kernel([refused(number)])
    with pytest.raises(KernelError, match="modprobe nf_conntrack_netlink"):
        read()


def test_no_netlink_at_all_is_named(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(KernelError, match=r"modprobe nf_conntrack_netlink.*Protocol not supported"):
        conntrack._socket()


async def test_a_pass_that_nobody_waits_for_ends_early(kernel):
    """The thread notices at its next datagram, with 10,000 still to come."""
    reached, go_on = threading.Event(), threading.Event()
    made = kernel([entry(CLIENT, SERVER, port=port) for port in range(1, 10_000)])

    def stop_at_first(source):
        reached.set()
        go_on.wait()

    task = asyncio.ensure_future(conntrack.read(stop_at_first))
    await asyncio.to_thread(reached.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert len(made.datagrams) > 9_990


# --- Forgetting ---


def test_only_connections_of_the_endpoint_to_the_addresses_are_deleted(kernel):
    acknowledged = [refused(0)]
    made = kernel(
        [
            entry(CLIENT, SERVER, port=1) + entry(OTHER, SERVER, port=2) + entry(CLIENT, OTHER, port=3),
            entry(CLIENT, address("10.96.0.1"), reply=(SERVER, CLIENT), port=4) + DONE,
        ],
        acknowledged,
        [refused(errno.ENOENT)],
    )
    assert conntrack._forget({"default/ci": {SERVER}}, owner, threading.Event()) == 1
    deletions = made.requests[1:]
    assert len(deletions) == 2
    ports = [conntrack.find(conntrack.find(conntrack.find(each, 1, 20), 2), 2) for each in deletions]
    assert ports == [b"\0\x01", b"\0\x04"]


def test_a_deletion_that_is_refused_is_an_error(kernel):
    kernel([entry(CLIENT, SERVER) + DONE], [refused(errno.EBUSY)])
    with pytest.raises(KernelError, match="did not forget"):
        conntrack._forget({"default/ci": {SERVER}}, owner, threading.Event())


# --- Any bytes ---

WHOLE = entry(CLIENT, SERVER) + entry(CLIENT6, SERVER6, state=TIME_WAIT) + DONE


@st.composite
def damaged(draw):
    """A datagram, cut off or with some octets changed."""
    datagram = bytearray(WHOLE[: draw(st.integers(0, len(WHOLE)))])
    for at, octet in draw(st.lists(st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 255)), max_size=5)):
        if at < len(datagram):
            datagram[at] = octet
    return bytes(datagram)


@given(st.one_of(st.binary(max_size=200), damaged()))
def test_any_datagram_is_read_or_refused(datagram):
    made = Kernel([datagram, DONE])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conntrack, "_socket", lambda: made)
        patch.setattr(conntrack, "PAUSE", 0)
        try:
            reading = read(lambda source: "default/ci")
        except DnsproxyError:
            return
    assert {len(each) for live in reading.live.values() for each in live} <= {4, 16}


@given(st.binary(max_size=64), st.integers(0, 65535))
def test_any_value_has_an_attribute_or_not_or_is_refused(value, kind):
    try:
        found = conntrack.find(value, kind & 0x3FFF)
    except KernelError:
        return
    assert found is None or attribute(kind & 0x3FFF, found)[4:].rstrip(b"\0") in value


@pytest.mark.parametrize("size", range(1, len(entry(CLIENT, SERVER)), 3))
def test_a_message_that_is_cut_off_is_refused(size):
    with pytest.raises(KernelError, match="laid out"):
        list(conntrack.messages(entry(CLIENT, SERVER)[:size]))


def test_an_attribute_without_length_ends_the_search():
    with pytest.raises(KernelError, match="laid out"):
        conntrack.find(bytes(8), 1)
