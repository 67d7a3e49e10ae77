from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from transport_fakes import (
    Echo,
    Forwarder,
    Inbox,
    TcpClient,
    ask,
    message,
    one_port,
    reply_to,
    soon,
    udp_client,
    until,
)

from dnsproxy.servers import Server
from dnsproxy.transport import upstream
from dnsproxy.transport.tcp import Streams, TcpListener, framed
from dnsproxy.transport.udp import UdpListener
from dnsproxy.transport.upstream import DRAIN, DRAINING, IDLE, ROTATE, STRAYS, UNSENT, Upstreams


class Answering:
    """An upstream server on plain sockets that keeps what it is asked and answers when it is told to."""

    def __init__(self, host="127.0.0.1"):
        self.sock, self.stream_sock = one_port(host)  # the latter does not listen: it refuses
        self.sock.setblocking(False)
        self.server = Server(host, self.sock.getsockname()[1])
        self.asked = []  # (message, sockaddr or writer)
        self.writers = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.sock, self._readable)
        self._streams = None

    def _readable(self):
        while True:
            try:
                self.asked.append(self.sock.recvfrom(65_535))
            except BlockingIOError:
                return

    async def accept(self):
        """Serve TCP on the same port too."""
        self._streams = await asyncio.start_server(self._serve, sock=self.stream_sock)

    async def _serve(self, reader, writer):
        self.writers.append(writer)
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(2), "big")
                self.asked.append((await reader.readexactly(length), writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def answer(self, index=0):
        wire, where = self.asked.pop(index)
        if isinstance(where, asyncio.StreamWriter):
            where.write(framed(reply_to(wire)))
        else:
            self.sock.sendto(reply_to(wire), where)

    async def close(self):
        self._loop.remove_reader(self.sock)
        self.sock.close()
        if self._streams is not None:
            self._streams.close()
        self.stream_sock.close()
        for writer in self.writers:
            writer.transport.abort()
        await until(
            lambda: all(task_is_done(task) for task in asyncio.all_tasks() - {asyncio.current_task()})
        )


def task_is_done(task):
    return task.done() or "_serve" not in repr(task.get_coro())


@asynccontextmanager
async def answering(host="127.0.0.1", *, tcp=False):
    server = Answering(host)
    try:
        if tcp:
            await server.accept()
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def asking(server, **settings):
    """An exchange that forwards to one server, and its Upstreams."""
    exchange = Forwarder(server)
    upstreams = Upstreams([server], exchange, asyncio.get_running_loop(), **settings)
    try:
        yield exchange, upstreams
    finally:
        await upstreams.close()
        assert server.udp == []
        assert server.tcp is None


def forward(exchange, number, inbox, *, stream=False):
    sink, wire, peer = exchange.forward(message(number), inbox, number, stream=stream)
    sink.send(wire, peer)
    return sink


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


# -- datagrams --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_each_server_has_its_sockets_on_ports_of_their_own(host):
    async with answering(host) as far, asking(far.server, sockets=5) as (exchange, _):
        assert len(far.server.udp) == 5
        assert {channel.server for channel in far.server.udp} == {far.server}
        inbox = Inbox()
        for number in range(50):
            forward(exchange, number, inbox)
        await until(lambda: len(far.asked) == 50)
        assert len({address[1] for _, address in far.asked}) == 5
        for _ in range(50):
            far.answer(-1)
        await until(lambda: len(inbox.got) == 50)
        assert sorted(inbox.got) == [(reply_to(message(number)), number) for number in range(50)]
        assert all(not channel.pending for channel in far.server.udp)


async def test_a_socket_hears_nobody_but_its_server():
    async with answering() as far, answering() as stranger, asking(far.server, sockets=1) as (exchange, _):
        inbox = Inbox()
        forward(exchange, 1, inbox)
        await until(lambda: far.asked)
        stranger.sock.sendto(reply_to(far.asked[0][0]), far.asked[0][1])
        far.answer()
        await until(lambda: inbox.got)
        assert len(exchange.answers) == 1
        assert exchange.strays == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="marks need CAP_NET_ADMIN")
@pytest.mark.parametrize("mark", [53, 0])
async def test_packets_carry_the_mark(mark):
    async with answering(tcp=True) as far, asking(far.server, mark=mark) as (exchange, _):
        socks = [channel.sink._sock for channel in far.server.udp]
        assert [sock.getsockopt(socket.SOL_SOCKET, upstream.SO_MARK) for sock in socks] == [mark] * 4
        forward(exchange, 1, Inbox(), stream=True)
        await until(lambda: far.asked)
        stream = far.server.tcp.sink._transport.get_extra_info("socket")
        assert stream.getsockopt(socket.SOL_SOCKET, upstream.SO_MARK) == mark


@pytest.mark.skipif(os.geteuid() != 0, reason="takes the rights of root away for a moment")
async def test_without_the_right_there_is_no_mark_and_no_trouble():
    async with answering() as far:
        os.seteuid(65_534)
        try:
            async with asking(far.server) as (exchange, _):
                forward(exchange, 1, Inbox())
                await until(lambda: far.asked)
                assert far.server.udp[0].sink._sock.getsockopt(socket.SOL_SOCKET, upstream.SO_MARK) == 0
        finally:
            os.seteuid(0)


async def test_a_refused_query_is_lost_at_once():
    async with asking(Server("127.0.0.1", 1), sockets=1) as (exchange, _):
        inbox = Inbox()
        forward(exchange, 1, inbox)
        await until(lambda: inbox.got)
        assert inbox.got == [(b"lost" + message(1), 1)]
        assert exchange.losses == [(exchange.server.udp[0], 1)]


async def test_a_server_that_comes_back_is_heard_again():
    gone = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    gone.bind(("127.0.0.1", 0))
    address = gone.getsockname()
    gone.close()
    async with asking(Server(*address), sockets=1) as (exchange, _):
        inbox, loop = Inbox(), asyncio.get_running_loop()
        for number in range(3):  # refused again and again
            forward(exchange, number, inbox)
            await until(lambda: len(inbox.got) == number + 1)  # noqa: B023 - awaited here
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as back:
            back.setblocking(False)
            back.bind(address)
            forward(exchange, 7, inbox)
            query = await soon(loop.sock_recv(back, 100))
            back.sendto(reply_to(query), exchange.server.udp[0].sink._sock.getsockname())
            await until(lambda: len(inbox.got) == 4)
            assert inbox.got[3] == (reply_to(message(7)), 7)


async def test_what_is_lost_may_be_sent_again_over_the_same_socket():
    server = Server("127.0.0.1", 1)
    async with asking(server, sockets=1) as (exchange, _):
        inbox = Inbox()
        exchange.retry = True
        forward(exchange, 1, inbox)
        await until(lambda: inbox.got)
        assert [count for _, count in exchange.losses] == [1, 1]


async def test_an_answer_that_raises_costs_only_itself(caplog):
    async with answering() as far, asking(far.server, sockets=1) as (exchange, upstreams):
        inbox = Inbox()
        forward(exchange, 1, inbox)
        await until(lambda: far.asked)
        where = far.asked[0][1]
        for wire in (b"\x00\x00!!", b"", b"\x00", b"\xff\xff garbage", b"\x00\x00!!"):
            far.sock.sendto(wire, where)
        far.answer()
        await until(lambda: inbox.got)
        assert inbox.got == [(reply_to(message(1)), 1)]
        assert exchange.strays == 3
        assert upstreams.counts["errors"] == 2
    assert len(caplog.records) == 1


# -- rotation ---------------------------------------------------------------------------------------------


async def test_used_sockets_are_replaced_one_a_turn_and_unused_ones_stay():
    async with answering() as far, asking(far.server, sockets=4) as (exchange, upstreams):
        inbox, before = Inbox(), list(far.server.udp)
        for number in range(2):
            forward(exchange, number, inbox)
        await until(lambda: len(far.asked) == 2)
        used = [channel for channel in before if channel.pending]
        assert len(used) == 2
        now = asyncio.get_running_loop().time()
        upstreams.maintain(now + ROTATE - 1)
        assert far.server.udp == before
        for turn in (1, 2):
            upstreams.maintain(now + ROTATE + turn)
            assert upstreams.counts["rotated"] == turn
            assert len(far.server.udp) == 4
        assert not set(used) & set(far.server.udp)
        assert set(before) - set(used) <= set(far.server.udp)
        upstreams.maintain(now + ROTATE + 3)
        assert upstreams.counts["rotated"] == 2


async def test_a_replaced_socket_listens_until_its_queries_are_answered():
    async with answering() as far, asking(far.server, sockets=1) as (exchange, upstreams):
        inbox, now = Inbox(), asyncio.get_running_loop().time()
        for number in range(2):
            forward(exchange, number, inbox)
        await until(lambda: len(far.asked) == 2)
        (old,) = far.server.udp
        upstreams.maintain(now + ROTATE + 1)
        (new,) = far.server.udp
        assert new is not old
        far.answer()
        await until(lambda: len(inbox.got) == 1)
        upstreams.maintain(now + ROTATE + 2)
        far.answer()
        await until(lambda: len(inbox.got) == 2)
        assert old.sink._fd >= 0
        upstreams.maintain(now + ROTATE + 3)
        assert old.sink._fd == -1
        forward(exchange, 3, inbox)
        await until(lambda: far.asked)
        assert far.asked[0][1] == new.sink._sock.getsockname()


async def test_a_replaced_socket_that_is_never_answered_is_closed_all_the_same():
    async with answering() as far, asking(far.server, sockets=1) as (exchange, upstreams):
        now = asyncio.get_running_loop().time()
        forward(exchange, 1, Inbox())
        await until(lambda: far.asked)
        (old,) = far.server.udp
        upstreams.maintain(now + ROTATE + 1)
        upstreams.maintain(now + ROTATE + 1 + DRAIN - 1)
        assert old.sink._fd >= 0
        upstreams.maintain(now + ROTATE + 1 + DRAIN)
        assert old.sink._fd == -1


async def test_replaced_sockets_are_bounded():
    async with answering() as far, asking(far.server, sockets=1) as (exchange, upstreams):
        now = asyncio.get_running_loop().time()
        for number in range(DRAINING + 5):
            forward(exchange, number, Inbox())
            await until(lambda: len(far.asked) == number + 1)  # noqa: B023 - awaited here
            for channel in far.server.udp:
                channel.sink.opened = now - ROTATE
            upstreams.maintain(now)
        assert upstreams.counts["rotated"] == DRAINING
        assert len(upstreams._draining) == DRAINING


async def test_a_socket_that_failed_is_replaced_before_its_time():
    async with asking(Server("127.0.0.1", 1), sockets=1) as (exchange, upstreams):
        (old,) = exchange.server.udp
        inbox = Inbox()
        forward(exchange, 1, inbox)
        await until(lambda: inbox.got)
        now = asyncio.get_running_loop().time()
        upstreams.maintain(now)
        assert exchange.server.udp != [old]
        assert len(exchange.server.udp) == 1
        assert old.sink._fd == -1


async def test_a_flood_of_strays_ends_a_socket_before_its_time_and_a_late_answer_does_not():
    async with answering() as far, asking(far.server, sockets=1) as (exchange, upstreams):
        (old,), inbox, now = far.server.udp, Inbox(), asyncio.get_running_loop().time()
        for turn in range(STRAYS + 10):  # a stray before each answer
            forward(exchange, turn, inbox)
            await until(lambda: far.asked)
            far.sock.sendto(b"\xff\xffstray", far.asked[0][1])
            far.answer()
            await until(lambda: len(inbox.got) == turn + 1)  # noqa: B023 - awaited here
        upstreams.maintain(now)
        assert far.server.udp == [old]
        for turn in range(STRAYS):
            far.sock.sendto(b"\xff\xffstray", old.sink._sock.getsockname())
            await until(lambda: exchange.strays == STRAYS + 10 + turn + 1)  # noqa: B023 - awaited here
        upstreams.maintain(now)
        assert old not in far.server.udp
        assert upstreams.counts["rotated"] == 1


async def test_a_socket_that_cannot_be_replaced_is_kept():
    async with answering() as far, asking(far.server, sockets=1) as (exchange, upstreams):
        forward(exchange, 1, Inbox())
        await until(lambda: far.asked)
        before, far.server.address = list(far.server.udp), "255.255.255.255"
        upstreams.maintain(asyncio.get_running_loop().time() + ROTATE + 1)
        assert far.server.udp == before
        assert upstreams.counts["rotated"] == 0


# -- opening and letting go -------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["255.255.255.255", "fe80::1%nowhere"])
async def test_a_server_that_cannot_be_reached_yet_is_tried_again_less_and_less(address, caplog):
    server = Server(address, 53)  # 255.255.255.255 needs SO_BROADCAST: the kernel says no at once
    async with asking(server, sockets=2) as (_, upstreams):
        now = asyncio.get_running_loop().time()
        assert server.udp == []
        for ahead, tries in [(0.5, 1), (1.1, 2), (2.9, 2), (3.2, 3), (7.0, 3), (7.5, 4)]:
            upstreams.maintain(now + ahead)
            assert upstreams.counts["unopened"] == tries
        for turn in range(100):
            upstreams.maintain(now + 10 + 10 * turn)
        assert 4 + 1_000 // 31 <= upstreams.counts["unopened"] <= 4 + 1_000 // 29
        server.address, server.port = "127.0.0.1", 5_353
        upstreams.maintain(now + 2_000)
        assert len(server.udp) == 2
    assert len(caplog.records) == 1
    assert "cannot be reached yet" in caplog.text


async def test_a_stream_to_a_server_that_cannot_be_reached_is_lost():
    async with asking(Server("255.255.255.255", 53)) as (exchange, _):
        inbox = Inbox()
        forward(exchange, 1, inbox, stream=True)
        await until(lambda: inbox.got)
        assert inbox.got == [(b"lost" + message(1), 1)]


async def test_new_servers_are_opened_and_old_ones_let_go_when_answered():
    async with (
        answering(tcp=True) as one,
        answering() as two,
        asking(one.server, sockets=2) as (exchange, upstreams),
    ):
        inbox = Inbox()
        forward(exchange, 1, inbox)
        forward(exchange, 2, inbox, stream=True)
        await until(lambda: len(one.asked) == 2)
        old = [*one.server.udp, one.server.tcp]
        kept = Server("127.0.0.1", 9)
        upstreams.update([two.server, kept, kept])
        assert (one.server.udp, one.server.tcp) == ([], None)
        assert [len(server.udp) for server in (two.server, kept)] == [2, 2]
        before = list(kept.udp)
        upstreams.update([kept, two.server])
        assert kept.udp == before
        one.answer()
        one.answer()
        await until(lambda: len(inbox.got) == 2)
        upstreams.maintain(asyncio.get_running_loop().time())
        assert upstreams._draining == []
        assert [channel.sink._fd for channel in old[:2]] == [-1, -1]
        await until(lambda: old[2].sink._transport is None)


async def test_closing_leaves_no_descriptor_and_no_task():
    async with answering(tcp=True) as far:
        before = open_descriptors()
        async with asking(far.server) as (exchange, upstreams):
            forward(exchange, 1, Inbox())
            forward(exchange, 2, Inbox(), stream=True)
            await until(lambda: len(far.asked) == 2)
            upstreams.maintain(asyncio.get_running_loop().time() + ROTATE + 1)
            assert open_descriptors() > before
        far.writers.pop().transport.abort()
        await until(lambda: open_descriptors() == before)
        assert exchange.losses == []


async def test_closing_ends_a_connect_that_is_under_way():
    with never_accepting() as address:
        async with asking(Server(*address)) as (exchange, upstreams):
            forward(exchange, 1, Inbox(), stream=True)
            await asyncio.sleep(0)
            assert len(upstreams._tasks) == 1
        assert not upstreams._tasks
        assert exchange.losses == []


@contextmanager
def never_accepting():
    """A TCP address whose backlog is full: a handshake with it takes for ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        try:
            for _ in range(2):
                fillers.append(socket.socket())
                fillers[-1].setblocking(False)
                fillers[-1].connect_ex(listener.getsockname())
            yield listener.getsockname()
        finally:
            for filler in fillers:
                filler.close()


# -- streams ----------------------------------------------------------------------------------------------


async def test_a_stream_is_opened_by_its_first_query_and_carries_all_that_follow():
    async with answering(tcp=True) as far, asking(far.server) as (exchange, _):
        inbox = Inbox()
        assert far.writers == []
        for number in range(100):
            forward(exchange, number, inbox, stream=True)
        await until(lambda: len(far.asked) == 100)
        forward(exchange, 100, inbox, stream=True)
        await until(lambda: len(far.asked) == 101)
        assert len(far.writers) == 1
        for _ in range(101):
            far.answer(-1)
        await until(lambda: len(inbox.got) == 101)
        assert [number for _, number in inbox.got] == list(range(100, -1, -1))
        assert exchange.losses == []


async def test_answers_cut_anyhow_are_answers():
    async with answering(tcp=True) as far, asking(far.server) as (exchange, _):
        inbox = Inbox()
        for number in (1, 2):
            forward(exchange, number, inbox, stream=True)
        await until(lambda: len(far.asked) == 2)
        octets = b"".join(framed(reply_to(wire)) for wire, _ in far.asked)
        for octet in octets:
            far.writers[0].write(bytes((octet,)))
            await soon(far.writers[0].drain())
            await asyncio.sleep(0)
        await until(lambda: len(inbox.got) == 2)


async def test_a_refused_stream_loses_its_queries():
    async with answering() as far, asking(far.server) as (exchange, upstreams):
        inbox = Inbox()
        for number in (1, 2):
            forward(exchange, number, inbox, stream=True)
        await until(lambda: inbox.got)
        assert inbox.got == [(b"lost" + message(number), number) for number in (1, 2)]
        await far.accept()
        forward(exchange, 3, inbox, stream=True)
        await until(lambda: far.asked)
        assert [wire[2:] for wire, _ in far.asked] == [message(3)[2:]]
        await until(lambda: not upstreams._tasks)


async def test_a_handshake_that_takes_too_long_loses_its_queries():
    with never_accepting() as address:
        async with asking(Server(*address)) as (exchange, upstreams):
            inbox = Inbox()
            forward(exchange, 1, inbox, stream=True)
            await until(lambda: inbox.got)
            assert inbox.got == [(b"lost" + message(1), 1)]
            await until(lambda: not upstreams._tasks)


@pytest.mark.parametrize("how", ["close", "abort", "garbage"])
async def test_a_stream_that_ends_under_queries_loses_them_and_the_next_opens_another(how):
    async with answering(tcp=True) as far, asking(far.server) as (exchange, _):
        inbox = Inbox()
        for number in (1, 2, 3):
            forward(exchange, number, inbox, stream=True)
        await until(lambda: len(far.asked) == 3)
        far.answer(1)
        await until(lambda: len(inbox.got) == 1)
        writer = far.writers[0]
        {
            "close": writer.close,
            "abort": writer.transport.abort,
            "garbage": lambda: writer.write(b"\x00\x05xxxxx"),
        }[how]()
        await until(lambda: len(inbox.got) == 3)
        assert inbox.got[1:] == [(b"lost" + message(number), number) for number in (1, 3)]
        far.asked.clear()
        forward(exchange, 4, inbox, stream=True)
        await until(lambda: far.asked)
        far.answer()
        await until(lambda: len(inbox.got) == 4)
        assert len(far.writers) == 2


async def test_a_stream_of_strays_is_closed_and_the_next_one_starts_anew():
    async with answering(tcp=True) as far, asking(far.server) as (exchange, upstreams):
        inbox = Inbox()
        for turn in (1, 2):
            forward(exchange, turn, inbox, stream=True)
            await until(lambda: far.asked)
            for _ in range(STRAYS - 1):
                far.writers[-1].write(framed(b"\xff\xff stray message"))
            far.answer()
            await until(lambda: len(inbox.got) == 2 * turn - 1)  # noqa: B023 - awaited here
            forward(exchange, 10 + turn, inbox, stream=True)
            await until(lambda: far.asked)
            for _ in range(2):
                far.writers[-1].write(framed(b"\xff\xff stray message"))
            await until(lambda: len(inbox.got) == 2 * turn)  # noqa: B023 - awaited here
            assert inbox.got[-1] == (b"lost" + message(10 + turn), 10 + turn)
            far.asked.clear()
        assert upstreams.counts["flooded"] == 2
        assert len(far.writers) == 2


async def test_half_an_answer_is_forgotten_with_its_stream():
    async with answering(tcp=True) as far, asking(far.server) as (exchange, _):
        inbox = Inbox()
        for number in (1, 2):
            forward(exchange, number, inbox, stream=True)
            await until(lambda: far.asked)
            far.writers[-1].write(framed(reply_to(far.asked[0][0]))[:20])
            if number == 1:
                far.writers[-1].close()
                far.asked.clear()
                await until(lambda: inbox.got)
            else:
                far.writers[-1].write(framed(reply_to(far.asked[0][0]))[20:])
        await until(lambda: len(inbox.got) == 2)
        assert inbox.got == [(b"lost" + message(1), 1), (reply_to(message(2)), 2)]


async def test_what_a_stream_loses_may_be_sent_again_over_the_next():
    async with answering(tcp=True) as far, asking(far.server) as (exchange, _):
        inbox = Inbox()
        exchange.retry = True
        for number in (1, 2):
            forward(exchange, number, inbox, stream=True)
        await until(lambda: len(far.asked) == 2)
        far.asked.clear()
        far.writers[0].transport.abort()
        await until(lambda: len(far.asked) == 2)
        assert len(far.writers) == 2
        for _ in range(2):
            far.answer()
        await until(lambda: len(inbox.got) == 2)
        assert inbox.got == [(reply_to(message(number)), number) for number in (1, 2)]


async def test_an_idle_stream_ends_in_silence():
    async with answering(tcp=True) as far, asking(far.server) as (exchange, upstreams):
        inbox = Inbox()
        for turn in range(2):  # first the server closes, then we do
            forward(exchange, turn, inbox, stream=True)
            await until(lambda: far.asked)
            upstreams.maintain(asyncio.get_running_loop().time() + IDLE)
            assert not exchange.server.tcp.sink._transport.is_closing()
            far.answer()
            await until(lambda: len(inbox.got) == turn + 1)  # noqa: B023 - awaited here
            if turn == 0:
                far.writers[0].close()
            else:
                upstreams.maintain(asyncio.get_running_loop().time() + IDLE - 1)
                assert not exchange.server.tcp.sink._transport.is_closing()
                upstreams.maintain(asyncio.get_running_loop().time() + IDLE)
            await until(lambda: exchange.server.tcp.sink._transport is None)
        assert exchange.losses == []
        assert len(far.writers) == 2


async def test_a_query_that_meets_a_closing_stream_goes_over_the_next():
    async with answering(tcp=True) as far, asking(far.server) as (exchange, upstreams):
        inbox = Inbox()
        forward(exchange, 1, inbox, stream=True)
        await until(lambda: far.asked)
        far.answer()
        await until(lambda: inbox.got)
        upstreams.maintain(asyncio.get_running_loop().time() + IDLE)
        exchange.retry = True
        forward(exchange, 2, inbox, stream=True)
        await until(lambda: far.asked)
        far.answer()
        await until(lambda: len(inbox.got) == 2)
        assert inbox.got[1] == (reply_to(message(2)), 2)


async def test_what_waits_for_a_stream_is_bounded():
    large = bytes(65_535)
    with never_accepting() as address:
        async with asking(Server(*address)) as (exchange, upstreams):
            sink = exchange.server.tcp.sink
            for _ in range(20):
                sink.send(large, None)
            assert len(sink._unsent) <= UNSENT
            assert upstreams.counts["dropped"] == 20 - UNSENT // (2 + len(large))
    async with answering(tcp=True) as far, asking(far.server) as (exchange, upstreams):
        forward(exchange, 1, Inbox(), stream=True)
        await until(lambda: far.asked)
        sink = far.server.tcp.sink
        far.writers[0].transport.pause_reading()
        while not upstreams.counts["dropped"]:
            sink.send(large, None)
        assert sink._transport.get_write_buffer_size() <= UNSENT


# -- both ends of the transport ---------------------------------------------------------------------------


@asynccontextmanager
async def proxy(far):
    """Listeners of both kinds in front of one server."""
    loop = asyncio.get_running_loop()
    async with asking(far) as (exchange, _):
        datagrams, stream = one_port()
        udp = UdpListener(datagrams, exchange, loop)
        tcp = TcpListener(stream, exchange, loop, Streams())
        await tcp.start()
        try:
            yield datagrams.getsockname()[1]
        finally:
            udp.close()
            tcp.close()
            await until(lambda: not tcp.connections)


@asynccontextmanager
async def echo_server():
    """The transport's own listeners as an upstream server."""
    loop = asyncio.get_running_loop()
    datagrams, stream = one_port()
    udp = UdpListener(datagrams, Echo(), loop)
    tcp = TcpListener(stream, Echo(), loop, Streams())
    await tcp.start()
    try:
        yield Server(*datagrams.getsockname())
    finally:
        udp.close()
        tcp.close()
        await until(lambda: not tcp.connections)


async def test_a_thousand_queries_pass_through_both_ways():
    async with echo_server() as far, proxy(far) as port:
        with udp_client(port) as client:
            for number in range(1_000):
                assert await ask(client, message(number)) == reply_to(message(number))
        client = await TcpClient.open(port)
        client.send(*(message(number) for number in range(1_000)))
        got = [await client.receive() for _ in range(1_000)]
        assert sorted(got) == [reply_to(message(number)) for number in range(1_000)]
        await client.close()
