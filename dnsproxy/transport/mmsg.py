"""Many datagrams in one system call: recvmmsg(2) and sendmmsg(2) through ctypes.

A kernel call costs Python about a microsecond before the kernel does anything, and a datagram needs a
receive and a send. So one call moves up to `BATCH` datagrams, and what is left per datagram is a slice
or two. The memory that the kernel reads and writes is laid out once:

    mmsghdr[64]     one per datagram: where its parts are; the kernel writes back their lengths
    iovec[64]       one per datagram: where its octets are
    peers           one slot per datagram: sockaddr, and for wildcard sockets the control message
    data            the octets

*Receiving:* every datagram has a fixed place in `data`, one octet larger than the limit, so a larger datagram
shows by its length. The lengths of all of them are unpacked from the mmsghdr array in one go. (The kernel
also writes the lengths of sockaddr and control there; both always fill their room, so none is to be reset.)
*Sending:* the datagrams are joined, copied to `data` in one go, and the iovecs point into it.

A *peer* is the slot as it was received: 16 or 32 octets of sockaddr (28 and padding for IPv6), followed by
the control message where the socket is bound to a wildcard address. Sent back unchanged it makes the reply
go to the client *and* leave from the address that the client asked (ip(7) IP_PKTINFO, ipv6(7) IPV6_PKTINFO;
RFC 2181 section 4.1: clients drop replies from elsewhere). For an IPv4 client on a dual-stack socket the
kernel gives an IPV6_PKTINFO with mapped addresses and takes the same one back. The interface index in it is
set to 0: with it, replies would bypass the routing table. (Link-local peers have theirs in the sockaddr.)

The calls never block (MSG_DONTWAIT), so they keep the GIL (PyDLL): giving it away would let a busy thread
hold it for a switch interval, 5 ms, on every call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from array import array
from errno import EAGAIN, EINTR
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH: Final = 64
LARGEST: Final = 65_535  # no UDP payload is larger

IP_PKTINFO: Final = 8  # linux/in.h; the socket module has it from 3.12 on
_LINE: Final = 64  # slots of `data` start on a cache line


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    """struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iovec", ctypes.c_void_p),
        ("iovec_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    """struct mmsghdr; `length` is that of the datagram."""

    _fields_ = (("header", _Header), ("length", ctypes.c_uint32))


_Messages = _Message * BATCH
_Iovecs = _Iovec * BATCH
_LENGTH: Final = f"{_Message.length.offset}xI{ctypes.sizeof(_Message) - _Message.length.offset - 4}x"

_libc = ctypes.PyDLL(None, use_errno=True)
_NOWAIT: Final = int(socket.MSG_DONTWAIT)
_NULL: Final = ctypes.c_void_p(None)
_NO_INTERFACES: Final = memoryview(array("I", bytes(4 * BATCH)))


class Layout(NamedTuple):
    """What a peer consists of: octets of sockaddr and control, and where interface and address are in it."""

    name: int
    control: int
    interface: int
    address: slice

    @property
    def padded(self) -> int:
        """The octets of a sockaddr with its padding."""
        return (self.name + 7) & ~7

    @property
    def peer(self) -> int:
        """The octets of a peer."""
        return self.padded + self.control


CONNECTED: Final = Layout(0, 0, 0, slice(0, 0))
_IPV4: Final = Layout(16, 0, 0, slice(4, 8))
_IPV6: Final = Layout(28, 0, 0, slice(8, 24))
# CMSG_SPACE of in_pktinfo (index, local address, address) and in6_pktinfo (address, index)
_ANY_IPV4: Final = _IPV4._replace(control=socket.CMSG_SPACE(12), interface=16 + socket.CMSG_LEN(0))
_ANY_IPV6: Final = _IPV6._replace(control=socket.CMSG_SPACE(20), interface=32 + socket.CMSG_LEN(16))


def layout_of(sock: socket.socket) -> Layout:
    """Return what peers of a bound UDP socket look like; a wildcard one is told to report destinations."""
    wide = sock.family == socket.AF_INET6
    if sock.getsockname()[0] not in ("0.0.0.0", "::", "::ffff:0.0.0.0"):
        return _IPV6 if wide else _IPV4
    if wide:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        return _ANY_IPV6
    sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
    return _ANY_IPV4


class _Memory:
    """The headers of a batch, ready but for what changes from call to call."""

    def __init__(self, octets: int, layout: Layout) -> None:
        self.data = mmap.mmap(-1, octets)  # its pages come into being when they are touched
        self.peers = mmap.mmap(-1, BATCH * max(layout.peer, 1))
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        self.messages = _Messages()
        self.iovecs = _Iovecs()
        peers = ctypes.addressof(ctypes.c_char.from_buffer(self.peers))
        for at, message in enumerate(self.messages):
            header = message.header
            header.iovec = ctypes.addressof(self.iovecs) + at * ctypes.sizeof(_Iovec)
            header.iovec_count = 1
            if layout.name:
                header.name = peers + at * layout.peer
                header.name_length = layout.name
            if layout.control:
                header.control = peers + at * layout.peer + layout.padded
                header.control_length = layout.control
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.messages))


class Receiver:
    """Room to receive one batch in; one serves every socket of a loop that has the same layout."""

    def __init__(self, limit: int, layout: Layout) -> None:
        """Datagrams of more than `limit` octets are refused."""
        stride = -(-(limit + 1) // _LINE) * _LINE
        self._memory = memory = _Memory(BATCH * stride, layout)
        self._data = memory.data
        self._limit = limit
        self._starts = tuple(range(0, BATCH * stride, stride))
        for iovec, start in zip(memory.iovecs, self._starts, strict=True):
            iovec.base = memory.base + start
            iovec.length = limit + 1
        self._headers = memoryview(memory.messages).cast("B")
        self._lengths = [Struct(_LENGTH * count) for count in range(BATCH + 1)]
        self._peers = [Struct(f"{layout.peer}s" * count) for count in range(BATCH + 1)]
        self._interfaces: memoryview | None = None
        if layout.control:
            words = memoryview(memory.peers).cast("I")
            self._interfaces = words[layout.interface // 4 :: layout.peer // 4]
        self.oversize = 0

    def receive(self, fd: int) -> list[bytes]:
        """Return the datagrams waiting at a socket, at most `BATCH`; one that is too large comes back empty.

        Raises OSError for what the socket reports instead, such as ECONNREFUSED.
        """
        count = _libc.recvmmsg(fd, self._memory.pointer, BATCH, _NOWAIT, _NULL)
        if count < 0:
            code = ctypes.get_errno()
            if code in (EAGAIN, EINTR):
                return []
            raise OSError(code, os.strerror(code))
        data = self._data
        lengths = self._lengths[count].unpack_from(self._headers)
        wires = [data[at : at + length] for at, length in zip(self._starts, lengths, strict=False)]
        if count and max(lengths) > self._limit:
            self._refuse(wires)
        return wires

    def peers(self, count: int) -> tuple[bytes, ...]:
        """Return the peers of the `count` datagrams received last."""
        if self._interfaces is not None:
            self._interfaces[:] = _NO_INTERFACES
        return self._peers[count].unpack_from(self._memory.peers)

    def _refuse(self, wires: list[bytes]) -> None:
        for at, wire in enumerate(wires):
            if len(wire) > self._limit:
                self.oversize += 1
                wires[at] = b""


class Sender:
    """Room to send one batch from; one serves every socket of a loop that has the same layout."""

    def __init__(self, layout: Layout) -> None:
        self._memory = memory = _Memory(BATCH * LARGEST, layout)
        self._named = layout.peer > 0
        self._data = memory.data
        self._peers = memory.peers
        self._iovecs = memoryview(memory.iovecs).cast("B")
        self._places = [Struct("NN" * count) for count in range(BATCH + 1)]

    def send(self, fd: int, wires: Sequence[bytes], peers: Sequence[bytes]) -> int:
        """Hand up to `BATCH` datagrams to the kernel; return how many it took, or -errno if not the first.

        `peers` are those of a receiver with the same layout, one per datagram; unused on connected sockets.
        """
        count = len(wires)
        places = [0] * (2 * count)
        places[1::2] = lengths = list(map(len, wires))
        places[::2] = accumulate(lengths[:-1], initial=self._memory.base)
        self._places[count].pack_into(self._iovecs, 0, *places)
        joined = b"".join(wires)
        self._data[: len(joined)] = joined
        if self._named:
            named = b"".join(peers)
            self._peers[: len(named)] = named
        sent: int = _libc.sendmmsg(fd, self._memory.pointer, count, _NOWAIT)
        return sent if sent > 0 else -ctypes.get_errno()
