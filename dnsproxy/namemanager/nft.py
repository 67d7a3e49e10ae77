"""Sets in the kernel: nftables over a netlink socket of our own.

Why not a library: docs/design/netlink.md. The bytes are made and read in netlink.py; here are the sockets,
the thread, and the sentences for a person.

One worker thread does everything that enters the kernel, in order: a netlink write blocks inside the kernel,
whatever the socket is set to, while another transaction holds the lock of nf_tables. The event loop only
waits for the thread. The kernel answers a request before `send` returns, so then the answers are there:
nothing here waits for one, and a missing one is an error.

Changes by others come to a second socket, which the event loop reads. A filter in the kernel drops what our
own transactions cause: else a thousand elements of ours would overrun that socket and look like a change by
somebody else. The kernel sends no event when an element times out.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from struct import Struct
from typing import TYPE_CHECKING, TypeVar

from dnsproxy.errors import Cause, DnsproxyError, KernelError, RightsError, SetError
from dnsproxy.namemanager import commands, netlink

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dnsproxy.namemanager.elements import Element, SetSpec
    from dnsproxy.namemanager.netlink import Message, Request, Shape

_T = TypeVar("_T")
_K = TypeVar("_K")
_V = TypeVar("_V")

_BUFFER = 1 << 20  # octets; the kernel doubles it, and allows less without CAP_NET_ADMIN over the machine
_DATAGRAM = 1 << 16  # the kernel sends at most 32 KiB at once in a dump, a page in events
_READS = 64  # events read per turn of the loop
_DUMPS = 5  # attempts to read what others keep changing
_SETS = 500  # sets created per transaction

_NETLINK_NETFILTER, _SOL_NETLINK, _NETLINK_CAP_ACK = 12, 270, 10  # linux/netlink.h
_SO_ATTACH_FILTER, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 26, 32, 33  # asm-generic/socket.h
_FILTER_STEP = Struct("=HBBI")  # struct sock_filter
_FILTER = Struct("@HP")  # struct sock_fprog

_NO_RIGHTS = (
    "changing nftables sets needs CAP_NET_ADMIN: run as root, or under systemd with"
    " AmbientCapabilities=CAP_NET_ADMIN, or set `sets: {backend: show}` to see the changes only"
)
_NO_NF_TABLES = "this kernel has no nf_tables: load it with `modprobe nf_tables`, or use a kernel that has it"


class _Refusal(Exception):  # noqa: N818 -- an answer of the kernel, which _explained turns into an error
    """The kernel's errno, and the set whose request it is about (None: the transaction as a whole)."""

    def __init__(self, number: int, spec: SetSpec | None = None) -> None:
        super().__init__(number, spec)
        self.number = number
        self.spec = spec


class _Connection:
    """A netlink socket for requests, used by one thread at a time; no call leaves an answer unread."""

    def __init__(self) -> None:
        self._socket = _netlink_socket()
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)  # an error does not repeat the request
        self._socket.bind((0, 0))
        self._sequence = 0
        self.port: int = self._socket.getsockname()[0]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def transact(self, requests: Sequence[Request]) -> None:
        """Apply all of `requests`, or nothing and raise _Refusal with the first error."""
        first = self._numbers(len(requests) + 2)
        packet = netlink.batch(requests, first)
        limit = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - 32
        if len(packet) > limit:
            raise ValueError(
                f"a transaction of {len(packet)} octets, the limit is {limit}: commit less at once"
            )
        self._socket.send(packet)
        answers = {
            answer.sequence - first & 0xFFFFFFFF: netlink.error_number(answer) for answer in self._answers()
        }
        for position, number in answers.items():
            if number:
                raise _Refusal(number, requests[position - 1].spec if position else None)
        if len(requests) not in answers:
            raise _Refusal(errno.ENOBUFS)

    def dump(self, request: Request, take: Callable[[bytes], None]) -> bool:
        """Hand over the body of each message of a dump; tell whether nothing changed meanwhile."""
        self._socket.send(netlink.message(request, self._numbers(1)))
        generations = set()
        for answer in self._answers():
            if answer.kind not in (netlink.ERROR, netlink.DONE):
                generations.add(netlink.generation(answer.body))
                take(answer.body)
            elif number := netlink.error_number(answer):
                raise _Refusal(number, request.spec)
        return len(generations) <= 1

    def _numbers(self, count: int) -> int:
        """Return the first of `count` fresh sequence numbers."""
        first = self._sequence
        self._sequence += count
        return first

    def _answers(self) -> Iterator[Message]:
        """Yield everything that the kernel has answered or, in a dump, goes on answering."""
        lost = False
        while True:
            try:
                datagram = self._socket.recv(_DATAGRAM)
            except BlockingIOError:
                break
            except OSError as error:  # reported once, between what could be kept
                if error.errno != errno.ENOBUFS:
                    raise
                lost = True
                continue
            yield from netlink.messages(datagram)
        if lost:
            raise _Refusal(errno.ENOBUFS)


class NftSets:
    """The nftables sets of one network namespace: that of the thread which makes the object.

    The methods are those that the NameManager wants. A refused call has changed nothing, except for `ensure`
    with more than 500 sets to create. They raise SetError with its cause, RightsError without
    CAP_NET_ADMIN, KernelError without nf_tables; the constructor already may raise the last two.
    """

    enforces: bool = True

    def __init__(self) -> None:
        self._events = _event_socket()
        self._connection = _Connection()
        _drop_events_of(self._events, self._connection.port)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nft")
        self._reading: asyncio.AbstractEventLoop | None = None  # the loop that reads events
        self._changed = asyncio.Event()
        self._watched: set[tuple[int, str, str]] = set()
        self._timed: set[SetSpec] = set()
        self._destroys: bool | None = None  # whether the kernel has DESTROYSETELEM; None: not asked yet

    async def ensure(self, specs: Collection[SetSpec]) -> None:
        """Create what is missing of our tables and sets, and check that every set takes our elements.

        Nothing is created if a set misfits or a set of the user's is missing: ask for the user's sets
        apart where ours must not wait for them. All sets asked for are watched from here on.
        """
        self._watched.update((netlink.FAMILIES[spec.family], spec.table, spec.name) for spec in specs)
        await self._run(self._ensure, specs)

    async def read(self, spec: SetSpec) -> dict[bytes, str]:
        """Return key -> comment of the elements that are in a set to stay (no running timeout)."""
        return await self._run(self._read, spec)

    async def commit(self, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        """Delete, then add, in one transaction; return when the kernel has applied it.

        Raises ValueError for more than a transaction can hold; 1,000 elements always fit.
        """
        await self._run(self._commit, deletes, adds)

    async def foreign_change(self) -> None:
        """Return when somebody else has changed a set that was ensured, or its table, since last time."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop()
            self._reading.add_reader(self._events.fileno(), self._read_events)
        await self._changed.wait()
        self._changed.clear()

    async def close(self) -> None:
        """Finish what is under way and close the sockets. The sets in the kernel stay."""
        if self._reading is not None:
            self._reading.remove_reader(self._events.fileno())
        self._events.close()
        await self._run(self._connection.close)
        self._worker.shutdown()

    async def _run(self, job: Callable[..., _T], *arguments: object) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._explained, job, *arguments)

    def _read_events(self) -> None:
        for _ in range(_READS):
            try:
                datagram = self._events.recv(_DATAGRAM)
            except BlockingIOError:
                return
            except OSError:  # ENOBUFS: events were lost, so anything may have changed
                self._changed.set()
                return
            if any(netlink.changed(event) in self._watched for event in netlink.messages(datagram)):
                self._changed.set()

    # --- On the worker thread ---

    def _explained(self, job: Callable[..., _T], *arguments: object) -> _T:
        try:
            return job(*arguments)
        except _Refusal as refusal:
            raise self._error(refusal) from None

    def _error(self, refusal: _Refusal) -> DnsproxyError:
        if refusal.spec is None:
            return _refused_whole(refusal.number)
        try:
            sets = self._sets(refusal.spec)
        except _Refusal as second:
            return _refused_whole(second.number)
        problem = _problem(refusal.spec, sets)
        if problem and (refusal.number == errno.ENOENT or problem.cause is Cause.MISMATCH):
            return problem
        return _refused(refusal.number, refusal.spec, sets or {})

    def _probe(self) -> bool:
        """Tell whether the kernel has DESTROYSETELEM; the first call also meets missing rights."""
        if self._destroys is None:
            try:
                self._connection.transact([netlink.probe()])
            except _Refusal as refusal:
                if refusal.number not in (errno.ENOENT, errno.EINVAL):
                    raise
                self._destroys = refusal.number == errno.ENOENT
        return bool(self._destroys)

    def _ensure(self, specs: Collection[SetSpec]) -> None:
        self._probe()
        tables = {(spec.family, spec.table): spec for spec in specs}
        found = {table: self._sets(spec) for table, spec in tables.items()}
        shapes = {spec: (found[spec.family, spec.table] or {}).get(spec.name) for spec in specs}
        for spec, shape in shapes.items():
            problem = _problem(spec, found[spec.family, spec.table])
            if problem and (shape or not spec.ours):
                raise problem
        self._timed = self._timed.difference(specs) | {
            spec for spec, shape in shapes.items() if shape and shape.timed
        }
        requests = [netlink.new_table(tables[table]) for table, sets in found.items() if sets is None]
        missing = [spec for spec, shape in shapes.items() if shape is None]
        requests += [netlink.new_set(spec, number) for number, spec in enumerate(missing, 1)]
        for at in range(0, len(requests), _SETS):
            self._connection.transact(requests[at : at + _SETS])

    def _read(self, spec: SetSpec) -> dict[bytes, str]:
        return self._dump(netlink.get_elements(spec), netlink.read_elements)

    def _commit(self, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        destroy = self._probe()
        requests: list[Request] = []
        replaced = [element for element in adds if element.spec in self._timed]  # whatever timeout it had
        for spec, elements in _by_set((*deletes, *replaced)).items():
            timed = spec in self._timed
            requests += netlink.delete_elements(spec, elements, destroy=destroy, timed=timed)
        for spec, elements in _by_set(adds).items():
            requests += netlink.add_elements(spec, elements, timed=spec in self._timed)
        if requests:
            self._connection.transact(requests)

    def _sets(self, spec: SetSpec) -> dict[str, Shape] | None:
        """Return the sets in the table of `spec`; None if there is no such table."""
        try:
            return self._dump(netlink.get_sets(spec), netlink.read_sets)
        except _Refusal as refusal:
            if refusal.number != errno.ENOENT:
                raise
            return None

    def _dump(self, request: Request, read: Callable[[bytes], Iterable[tuple[_K, _V]]]) -> dict[_K, _V]:
        """Return what a dump lists.

        One that a change interrupts may lack entries or hold some just deleted. It is repeated, but not for
        ever, since any change in any table interrupts it: what it lacks is added again, and what others
        delete is an event.
        """
        found: dict[_K, _V] = {}
        for _ in range(_DUMPS):
            found.clear()
            if self._connection.dump(request, lambda body: found.update(read(body))):
                break
        return found


def _by_set(elements: Iterable[Element]) -> dict[SetSpec, list[Element]]:
    found: dict[SetSpec, list[Element]] = {}
    for element in elements:
        found.setdefault(element.spec, []).append(element)
    return found


# --- Sentences ---


def _problem(spec: SetSpec, sets: dict[str, Shape] | None) -> SetError | None:
    """Say why a set, among those of its table, cannot take our elements, and what to do."""
    if sets is None:
        commands_needed = f"`{commands.add_table(spec)}` and `{commands.add_set(spec)}`"
        return SetError(
            Cause.TABLE_MISSING,
            f"there is no table {spec.family} {spec.table}: create it with {commands_needed}",
        )
    if spec.name not in sets:
        return SetError(
            Cause.SET_MISSING, f"there is no set {spec}: create it with `{commands.add_set(spec)}`"
        )
    shape = sets[spec.name]
    if shape.fits(spec):
        return None
    needed = f"type {' . '.join(commands.key_types(spec))}, without constant, interval or map"
    mend = f"delete it and the rules that name it, then `{commands.add_set(spec)}`"
    return SetError(
        Cause.MISMATCH, f"set {spec} has {shape}, needed is {needed}: {mend}, or name another set"
    )


def _refused(number: int, spec: SetSpec, sets: dict[str, Shape]) -> SetError:
    """Say why the kernel refused to make a set, or a change to one that has the right shape."""
    if number == errno.ENFILE and spec.name in sets:
        size = sets[spec.name].size
        return SetError(
            Cause.FULL, f"set {spec} is full (size {size}): declare it with a greater size, or without"
        )
    if number == errno.EPERM:
        hint = (
            "its table belongs to another program (flag owner), which alone may change it: use another table"
        )
    elif number == errno.ERANGE:
        hint = "its name is too long, nf_tables takes 255 octets: choose shorter names"
    else:
        hint = os.strerror(number)
    return SetError(Cause.OTHER, f"the kernel refused a change to set {spec}, nothing was applied: {hint}")


def _refused_whole(number: int) -> DnsproxyError:
    """Say why the kernel refused a transaction without looking at its requests."""
    if number == errno.EPERM:
        return RightsError(_NO_RIGHTS)
    if number == errno.EOPNOTSUPP:
        return KernelError(_NO_NF_TABLES)
    if number == errno.ENOBUFS:
        return SetError(Cause.OTHER, "the kernel's answer to a transaction was lost: read the sets again")
    return SetError(
        Cause.OTHER, f"the kernel refused a transaction: {os.strerror(number)}; nothing of it was applied"
    )


# --- Sockets ---


def _netlink_socket() -> socket.socket:
    try:
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_NETFILTER)
    except OSError as error:
        raise KernelError(f"{_NO_NF_TABLES} (netlink socket: {error.strerror})") from None
    _enlarge(made, _SO_SNDBUFFORCE, socket.SO_SNDBUF)
    _enlarge(made, _SO_RCVBUFFORCE, socket.SO_RCVBUF)
    return made


def _enlarge(made: socket.socket, force: int, ask: int) -> None:
    try:
        made.setsockopt(socket.SOL_SOCKET, force, _BUFFER)
    except PermissionError:  # no CAP_NET_ADMIN where the machine counts it: up to net.core.*mem_max
        made.setsockopt(socket.SOL_SOCKET, ask, _BUFFER)


def _event_socket() -> socket.socket:
    """Return a socket that is told of every change to nf_tables in this network namespace."""
    made = _netlink_socket()
    try:
        made.bind((0, netlink.EVENTS))
    except PermissionError:
        made.close()
        raise RightsError(_NO_RIGHTS) from None
    return made


def _drop_events_of(made: socket.socket, port: int) -> None:
    """Make the kernel drop the events whose first header has `port` as port ID, the one that caused them.

    One look is enough: a datagram tells of one transaction only.
    """
    as_loaded = int.from_bytes(port.to_bytes(4, sys.byteorder), "big")  # a load takes network order
    steps = (
        (0x20, 0, 0, 12),  # load the word at 12
        (0x15, 0, 1, as_loaded),  # equal: the next step, else the one after
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
    )
    program = ctypes.create_string_buffer(b"".join(_FILTER_STEP.pack(*step) for step in steps))
    made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _FILTER.pack(len(steps), ctypes.addressof(program)))
