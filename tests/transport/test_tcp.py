from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import socket
from contextlib import asynccontextmanager, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_fakes import Echo, Later, TcpClient, message, reply_to, soon, until

from dnsproxy.errors import FormError, NetworkError
from dnsproxy.transport import tcp
from dnsproxy.transport.sockets import LARGEST_QUERY
from dnsproxy.transport.tcp import (
    CHOKED,
    HEADER,
    ROOM,
    UNFETCHED,
    Frames,
    Streams,
    TcpListener,
    framed,
    open_tcp,
)

LOCAL = bytes((127, 0, 0, 1))


@asynccontextmanager
async def listening(exchange, host="127.0.0.1", **limits):
    loop = asyncio.get_running_loop()
    listener = TcpListener(open_tcp(host, 0), exchange, loop, Streams(**limits))
    port = listener._sock.getsockname()[1]
    await listener.start()
    try:
        yield listener, port
    finally:
        listener.close()
        await until(lambda: not listener.connections)
        assert listener.streams.open == 0
        assert not listener.streams._clients
        assert not listener._tasks


@asynccontextmanager
async def clients(port, count=1, source="127.0.0.1"):
    opened = [await TcpClient.open(port, source) for _ in range(count)]
    try:
        yield opened
    finally:
        for client in opened:
            await client.close()


# -- framing ----------------------------------------------------------------------------------------------


def everything(frames):
    return list(iter(frames.take, None))


@given(st.lists(st.binary(min_size=HEADER, max_size=300), max_size=8), st.data())
def test_however_a_stream_is_cut_its_messages_are_the_same(wires, data):
    stream = b"".join(map(framed, wires))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    frames, got = Frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        frames.feed(stream[start:end])
        got += everything(frames)
    assert got == wires


def test_the_largest_message_fits_a_frame():
    wire = bytes(range(256)) * 256
    frames = Frames()
    frames.feed(framed(wire[:65_535]) + framed(message(1)))
    assert everything(frames) == [wire[:65_535], message(1)]


@pytest.mark.parametrize("length", range(HEADER))
def test_a_length_that_no_message_has_is_an_error_once_it_is_read(length):
    frames = Frames()
    frames.feed(framed(message(1)) + length.to_bytes(2, "big")[:1])
    assert everything(frames) == [message(1)]
    frames.feed(length.to_bytes(2, "big")[1:])
    with pytest.raises(FormError, match=f"{length} octets"):
        frames.take()


def test_a_message_above_the_limit_is_an_error_as_soon_as_its_length_is_read():
    frames = Frames(100)
    frames.feed(framed(message(1, 100)) + b"\x00\x65")
    assert frames.take() == message(1, 100)
    with pytest.raises(FormError, match="101 octets in a stream, more than 100"):
        frames.take()


@given(st.binary(max_size=500))
def test_any_octets_are_messages_or_an_error(octets):
    frames = Frames()
    frames.feed(octets)
    try:
        got = everything(frames)
    except FormError:
        return
    assert octets.startswith(b"".join(map(framed, got)))


# -- questions and answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "asked", "source"),
    [
        ("127.0.0.1", "127.0.0.1", LOCAL),
        ("::1", "::1", bytes(15) + b"\x01"),
        ("0.0.0.0", "127.0.0.2", LOCAL),
    ],
)
async def test_a_query_is_answered(host, asked, source):
    exchange = Echo()
    async with listening(exchange, host) as (_, port):
        reader, writer = await soon(
            asyncio.open_connection(asked, port, local_addr=("::1" if ":" in asked else "127.0.0.1", 0))
        )
        client = TcpClient(reader, writer)
        client.send(message(1))
        assert await client.receive() == reply_to(message(1))
        await client.close()
    assert exchange.asked == [(message(1), source, True)]


@pytest.mark.parametrize("connections", [1, 12])
async def test_no_flood_of_queries_takes_a_turn_of_the_loop_for_itself(connections):
    """What is asked and answered between two turns is bounded, however much has been read already."""
    exchange, most, count = Echo(), 0, 600
    async with listening(exchange) as (_, port), clients(port, connections) as opened:
        for client in opened:
            for number in range(count):
                client.send(message(number))
        before = 0
        async with asyncio.timeout(30):
            while len(exchange.asked) < connections * count:
                await asyncio.sleep(0)
                most, before = max(most, len(exchange.asked) - before), len(exchange.asked)
        for client in opened:
            assert [await client.receive() for _ in range(count)] == [
                reply_to(message(number)) for number in range(count)
            ]
    assert most <= (tcp.TURN + 1) * tcp.SHARE


async def test_a_mapped_client_is_the_ipv4_client_that_it_is():
    exchange = Echo()
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("::", 0))
    listener = TcpListener(sock, exchange, asyncio.get_running_loop(), Streams())
    await listener.start()
    async with clients(sock.getsockname()[1]) as (client,):
        client.send(message(1))
        await client.receive()
    assert exchange.asked[0][1] == LOCAL
    listener.close()
    await until(lambda: not listener.connections)


async def test_a_query_that_comes_octet_by_octet_is_one_query():
    exchange = Echo()
    async with listening(exchange) as (_, port), clients(port) as (client,):
        wires = [message(1, 300), message(2, 12)]
        for octet in b"".join(map(framed, wires)):
            client.writer.write(bytes((octet,)))
            await soon(client.writer.drain())
            await asyncio.sleep(0)
        assert [await client.receive() for _ in wires] == list(map(reply_to, wires))
    assert [wire for wire, _, _ in exchange.asked] == wires


class Large(Echo):
    """Answers with messages of another size."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def query(self, wire, source, sink, peer, now, *, stream):
        super().query(wire, source, sink, peer, now, stream=stream)
        return sink, large(wire, self.size), peer


def large(wire, size):
    return reply_to(wire)[:12] + bytes(size - 12)


async def test_the_largest_messages_pass_in_both_directions():
    wire = message(1, LARGEST_QUERY)
    async with listening(Large(65_535)) as (_, port), clients(port) as (client,):
        client.send(wire, wire)
        assert await client.receive() == large(wire, 65_535)
        assert await client.receive() == large(wire, 65_535)


@pytest.mark.parametrize("in_flight", [128, 16, 1])
async def test_a_thousand_queries_over_ten_connections_answered_in_any_order(in_flight):
    exchange, dice = Later(), random.Random(in_flight)
    async with listening(exchange, in_flight=in_flight) as (_, port), clients(port, 10) as all_clients:
        for at, client in enumerate(all_clients):
            client.send(*(message(100 * at + number) for number in range(100)))
        gathered = asyncio.gather(*(receive_many(client, 100) for client in all_clients))
        answered = 0
        while answered < 1_000:
            await until(lambda: exchange.waiting)
            if in_flight >= 100:
                await until(lambda: exchange.asked == 1_000)
            for _ in range(len(exchange.waiting)):
                exchange.release(dice.randrange(len(exchange.waiting)))
                answered += 1
        got = await soon(gathered)
    for at, answers in enumerate(got):
        assert sorted(answers) == [reply_to(message(100 * at + number)) for number in range(100)]
    assert exchange.most <= in_flight
    if in_flight > 1:
        assert any(answers != sorted(answers) for answers in got)


async def receive_many(client, count):
    return [await client.receive() for _ in range(count)]


async def test_silence_takes_no_place():
    async with listening(Echo(), in_flight=2) as (_, port), clients(port) as (client,):
        client.send(*(b".." + bytes(20) for _ in range(50)), message(1))
        assert await client.receive() == reply_to(message(1))


async def test_an_exception_costs_only_its_own_query(caplog):
    async with listening(Echo(), in_flight=2) as (listener, port), clients(port) as (client,):
        client.send(*(b"!!" + bytes(20) for _ in range(50)), message(1))
        assert await client.receive() == reply_to(message(1))
        assert listener.counts["errors"] == 50
    assert len(caplog.records) == 1


# -- how connections end ----------------------------------------------------------------------------------


async def test_a_client_that_ends_its_side_gets_every_answer_and_then_the_end():
    exchange = Later()
    async with listening(exchange) as (_, port), clients(port) as (client,):
        client.send(message(1), message(2), message(3))
        client.writer.write_eof()
        await until(lambda: exchange.asked == 3)
        for index in (2, 0, 0):
            exchange.release(index)
        assert await receive_many(client, 3) == [reply_to(message(number)) for number in (3, 1, 2)]
        assert await client.ended()


async def test_a_client_may_end_its_side_while_more_is_asked_than_may_be_in_flight():
    exchange = Later()
    async with listening(exchange, in_flight=4) as (_, port), clients(port) as (client,):
        client.send(*map(message, range(20)))
        client.writer.write_eof()
        got = []
        while len(got) < 20:
            await until(lambda: exchange.waiting)
            exchange.release()
            got.append(await client.receive())
        assert got == [reply_to(message(number)) for number in range(20)]
        assert await client.ended()


@pytest.mark.parametrize("rest", [b"", b"\x00", b"\x00\x28half a message"])
async def test_a_client_that_ends_its_side_with_nothing_to_answer_is_let_go(rest):
    async with listening(Echo()) as (_, port), clients(port) as (client,):
        client.writer.write(rest)
        client.writer.write_eof()
        assert await client.ended()


async def test_answers_for_a_client_that_left_go_nowhere():
    exchange = Later()
    async with listening(exchange) as (listener, port):
        async with clients(port) as (client,):
            client.send(message(1), message(2))
            await until(lambda: exchange.asked == 2)
        client.writer.transport.abort()
        sink = exchange.waiting[0][0]
        sink._transport.abort()
        exchange.release()
        await until(lambda: not listener.connections)
        exchange.release()


@pytest.mark.parametrize("frame", [b"\x00\x00", b"\x00\x0bshort frame", b"\x00\x01x"])
async def test_a_frame_that_is_no_message_ends_its_connection_and_no_other(frame):
    async with listening(Echo()) as (listener, port), clients(port, 2) as (bad, good):
        good.send(message(1))
        bad.send(message(2))
        assert await bad.receive() == reply_to(message(2))
        bad.writer.write(frame)
        assert await bad.ended()
        assert await good.receive() == reply_to(message(1))
        good.send(message(3))
        assert await good.receive() == reply_to(message(3))
        assert listener.counts["malformed"] == 1


async def test_garbage_hurts_nobody_else():
    noise = random.Random(3)
    async with listening(Echo()) as (_, port), clients(port) as (good,):
        for _ in range(50):
            async with clients(port) as (bad,):
                bad.writer.write(noise.randbytes(noise.randrange(1, 3_000)))
                bad.writer.write_eof()
                await bad.ended()  # answers or none, but an end
        good.send(message(1))
        assert await good.receive() == reply_to(message(1))


# -- limits -----------------------------------------------------------------------------------------------


async def test_one_client_may_have_so_many_connections_and_others_still_get_in():
    async with listening(Echo(), per_client=2) as (listener, port), clients(port, 2) as (one, two):
        for client in (one, two):
            client.send(message(1))
            await client.receive()
        async with clients(port) as (third,):
            assert await third.ended()
        assert listener.counts["turned_away"] == 1
        async with clients(port, source="127.0.0.2") as (other,):
            other.send(message(2))
            assert await other.receive() == reply_to(message(2))
        await one.close()
        await until(lambda: listener.streams.open == 1)
        async with clients(port) as (next_one,):
            next_one.send(message(3))
            assert await next_one.receive() == reply_to(message(3))


async def test_all_clients_together_may_have_so_many_connections_over_all_listeners():
    exchange, loop = Later(), asyncio.get_running_loop()
    async with listening(exchange, connections=3) as (listener, port):
        second = TcpListener(open_tcp("127.0.0.1", 0), exchange, loop, listener.streams)
        other_port = second._sock.getsockname()[1]
        await second.start()
        async with clients(port, 2) as two, clients(other_port, source="127.0.0.3") as one:
            for client in (*one, *two):
                client.send(message(1))
            await until(lambda: exchange.asked == 3)
            async with clients(other_port, source="127.0.0.4") as (late,):
                assert await late.ended()
        second.close()
        await until(lambda: not second.connections)


def home(address):
    """Those of 127.0.0.0/24 are one endpoint, those of 127.0.1.0/24 another, and the rest are strangers."""
    return {0: "default/zero", 1: "default/one"}.get(address[2])


async def test_a_client_is_an_endpoint_and_not_an_address():
    async with (
        listening(Echo(), per_client=2, owner=home) as (listener, port),
        clients(port),
        clients(port, source="127.0.0.2"),
        clients(port, source="127.0.1.1"),
    ):
        async with clients(port, source="127.0.0.3") as (third,):
            assert await third.ended()
        assert listener.streams.open == 3
        assert listener.counts["turned_away"] == 1


async def test_all_strangers_are_one_client():
    async with (
        listening(Echo(), per_client=2, owner=home) as (listener, port),
        clients(port, source="127.0.8.1"),
        clients(port, source="127.0.8.2"),
    ):
        async with clients(port, source="127.0.8.3") as (third,):
            assert await third.ended()
        async with clients(port) as (known,):
            known.send(message(1))
            assert await known.receive() == reply_to(message(1))
        assert listener.counts["turned_away"] == 1


async def test_a_stranger_makes_room_before_anybody_else_and_then_who_is_idle_longest():
    async with listening(Echo(), connections=3, owner=home) as (listener, port), clients(port, 2) as known:
        for client in known:  # idle for longer than the stranger
            client.send(message(1))
            await client.receive()
        async with (
            clients(port, source="127.0.8.1") as (stranger,),
            clients(port, source="127.0.1.1") as (late,),
        ):
            assert await stranger.ended()
            late.send(message(2))
            assert await late.receive() == reply_to(message(2))
            loop = asyncio.get_running_loop()
            now = loop.time()  # uvloop's clock goes by milliseconds
            await until(lambda: loop.time() > now)
            known[0].send(message(3))
            await known[0].receive()
            async with clients(port, source="127.0.1.2") as (later,):
                assert await known[1].ended()
                for client in (known[0], late, later):
                    client.send(message(4))
                    assert await client.receive() == reply_to(message(4))
        assert listener.counts["evicted"] == 2
        assert listener.counts["turned_away"] == 0


async def test_a_stranger_takes_nobodys_place_and_a_query_in_flight_keeps_its_own():
    exchange = Later()
    async with (
        listening(exchange, connections=2, owner=home) as (listener, port),
        clients(port, 2) as known,
    ):
        await until(lambda: listener.streams.open == 2)
        async with clients(port, source="127.0.8.1") as (stranger,):
            assert await stranger.ended()
        for client in known:
            client.send(message(1))
        await until(lambda: exchange.asked == 2)
        async with clients(port, source="127.0.1.1") as (late,):
            assert await late.ended()
        assert (listener.counts["turned_away"], listener.counts["evicted"]) == (2, 0)


@contextmanager
def no_descriptors():
    """Let the process have no further descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_clients_wait_and_the_log_stays_short(monkeypatch, caplog):
    monkeypatch.setattr(tcp, "REST", 0.01)
    async with listening(Echo()) as (listener, port), clients(port, 2) as both:
        await until(lambda: listener.streams.open == 2)
        with socket.socket() as late:
            late.setblocking(False)
            with no_descriptors():
                late.connect_ex(("127.0.0.1", port))
                await until(lambda: listener.counts["unaccepted"] >= 3)
                for client in both:
                    client.send(message(1))
                    assert await client.receive() == reply_to(message(1))
            loop = asyncio.get_running_loop()
            await soon(loop.sock_sendall(late, framed(message(2))))
            assert await soon(loop.sock_recv(late, 100)) == framed(reply_to(message(2)))
    assert len(caplog.records) == 1
    assert "Too many open files" in caplog.text


async def test_a_rest_for_want_of_descriptors_ends_with_a_pause():
    async with listening(Echo()) as (listener, _):
        listener._rest(OSError(errno.EMFILE, "made up"))
        assert not asyncio.get_running_loop().remove_reader(listener._sock.fileno())
        listener.pause()
        assert listener._retry is None


@pytest.mark.parametrize("size", [LARGEST_QUERY + 1, 65_535])
async def test_a_query_larger_than_any_ends_its_connection_behind_the_answers(size):
    exchange = Later()
    async with listening(exchange) as (listener, port), clients(port) as (client,):
        client.send(message(1), message(2, size), message(3))
        await until(lambda: exchange.asked == 1)
        exchange.release()
        assert await client.receive() == reply_to(message(1))
        assert await soon(client.reader.read()) == b""
        assert exchange.asked == 1
        assert listener.counts["malformed"] == 1


async def test_what_is_read_and_not_yet_asked_is_bounded():
    exchange = Later()
    async with listening(exchange, in_flight=4) as (listener, port), clients(port) as (client,):
        client.send(*(message(number, 4_000) for number in range(500)))
        await until(lambda: exchange.asked == 4)
        (connection,) = listener.connections
        most = 0
        while exchange.asked < 500:
            await until(lambda: exchange.waiting)
            exchange.release()
            most = max(most, len(connection._frames._octets))
        assert 0 < most <= ROOM + 2 + LARGEST_QUERY


async def test_answers_in_flight_for_a_client_that_fetches_none_are_bounded():
    exchange, largest = Later(), 65_535
    async with listening(exchange) as (listener, port), clients(port) as (client,):
        client.reader._transport.pause_reading()
        client.send(*map(message, range(128)))
        await until(lambda: exchange.asked == 128)
        (connection,) = listener.connections
        most = 0
        while exchange.waiting:
            sink, wire, peer = exchange.waiting.pop()
            sink.send(large(wire, largest), peer)
            most = max(most, connection._transport.get_write_buffer_size())
            await asyncio.sleep(0)
        assert CHOKED < most <= UNFETCHED
        assert listener.counts["unfetched"] == 1
        await until(lambda: not listener.connections)


async def test_reading_stops_while_too_much_is_in_flight():
    exchange = Later()
    async with listening(exchange, in_flight=8) as (listener, port), clients(port) as (client,):
        client.send(*map(message, range(30)))
        await until(lambda: exchange.asked == 8)
        (connection,) = listener.connections
        assert not connection._transport.is_reading()
        for _ in range(3):
            exchange.release()
        assert await receive_many(client, 3) == [reply_to(message(number)) for number in range(3)]
        assert exchange.asked == 8  # half of them have to be answered first
        exchange.release()
        await until(lambda: exchange.asked == 12)
        while exchange.waiting:
            exchange.release()
            await asyncio.sleep(0)
        assert len(await receive_many(client, 27)) == 27
        await until(connection._transport.is_reading)


async def test_reading_stops_while_a_client_does_not_fetch_its_answers():
    exchange = Large(60_000)
    async with listening(exchange) as (listener, port), clients(port) as (client,):
        total = 400
        wires = [message(number, 4_000) for number in range(total)]
        sending = asyncio.get_running_loop().create_task(send_slowly(client, wires))
        client.reader._transport.pause_reading()
        await until(lambda: any(connection._choked for connection in listener.connections))
        (connection,) = listener.connections
        assert not connection._transport.is_reading()
        assert len(exchange.asked) < total
        client.reader._transport.resume_reading()
        assert await soon(receive_many(client, total)) == [large(wire, 60_000) for wire in wires]
        await soon(sending)
        assert listener.counts["unfetched"] == 0


async def send_slowly(client, wires):
    for wire in wires:
        client.send(wire)
        await client.writer.drain()


async def test_an_idle_connection_is_closed():
    async with listening(Echo(), idle=0.05) as (listener, port), clients(port) as (client,):
        client.send(message(1))
        assert await client.receive() == reply_to(message(1))
        assert await client.ended()
        await until(lambda: listener.streams.open == 0)


async def test_only_whole_messages_keep_a_connection_open():
    exchange = Later()
    async with listening(exchange, idle=1_000.0) as (listener, port), clients(port) as (client,):
        client.send(message(1))
        await until(lambda: exchange.waiting)
        (connection,) = listener.connections
        timer = connection._timer
        connection._check_idle()
        timer.cancel()
        assert not connection._transport.is_closing()
        connection.active -= 2_000  # long ago
        exchange.release()
        await client.receive()
        connection._check_idle()
        assert not connection._transport.is_closing()
        connection.active -= 2_000
        client.writer.write(b"\x00\x28drop by drop")
        await until(lambda: connection._frames._octets)
        connection._check_idle()
        assert await client.ended()


# -- the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [2, 128])
async def test_a_pause_answers_what_was_read_and_reads_no_more(in_flight):
    exchange = Later()
    async with listening(exchange, in_flight=in_flight) as (listener, port), clients(port, 2) as (busy, idle):
        busy.send(*map(message, range(4)))
        await until(lambda: exchange.waiting and len(listener.connections) == 2)
        listener.pause()
        assert await idle.ended()
        busy.send(message(4))  # stays unread, and must not reset the connection
        for number in range(4):
            await until(lambda: exchange.waiting)
            exchange.release()
            assert await busy.receive() == reply_to(message(number))
        assert await soon(busy.reader.read()) == b""
        assert exchange.asked == 4
        assert len(listener.connections) == 2  # for a moment, that the clients may notice


async def test_a_paused_connection_does_not_wait_for_its_client_without_end(monkeypatch):
    monkeypatch.setattr(tcp, "LINGER", 0.01)
    async with listening(Echo()) as (listener, port), clients(port) as (client,):
        client.send(message(1))
        await client.receive()
        listener.pause()
        await until(lambda: not listener.connections)


@pytest.mark.parametrize("in_flight", [1, 128])
async def test_a_paused_connection_ends_with_its_client_and_keeps_nothing_of_what_it_still_sends(
    in_flight, monkeypatch
):
    monkeypatch.setattr(tcp, "LINGER", 1_000.0)
    exchange = Later()
    async with listening(exchange, in_flight=in_flight) as (listener, port), clients(port) as (client,):
        client.send(message(1))
        await until(lambda: exchange.waiting)
        (connection,) = listener.connections
        listener.pause()
        exchange.release()
        assert await client.receive() == reply_to(message(1))
        assert await soon(client.reader.read()) == b""
        client.send(*map(message, range(100)))
        client.writer.write_eof()
        await until(lambda: not listener.connections)
        assert (exchange.asked, len(connection._frames._octets)) == (1, 0)


@pytest.mark.parametrize("way", [TcpListener.pause, TcpListener.close])
async def test_a_connection_that_is_made_when_all_is_over_ends(way):
    async with listening(Echo()) as (listener, port):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setblocking(False)
            listener._acceptable()
            (connection,) = listener.connections
            assert not connection._made
            way(listener)
            assert await soon(asyncio.get_running_loop().sock_recv(sock, 100)) == b""


async def test_whoever_else_has_the_socket_takes_over():
    old, new, loop = Later(), Echo(), asyncio.get_running_loop()
    async with listening(old) as (listener, port), clients(port) as (before,):
        before.send(message(1))
        await until(lambda: old.waiting)
        other = TcpListener(listener._sock.dup(), new, loop, Streams())
        listener.pause()
        async with clients(port) as (after,):
            after.send(message(2))
            await other.start()
            assert await after.receive() == reply_to(message(2))
            old.release()
            assert await before.receive() == reply_to(message(1))
            listener.close()
            async with clients(port) as (late,):
                late.send(message(3))
                assert await late.receive() == reply_to(message(3))
        other.close()
        await until(lambda: not other.connections)
    assert old.asked == 1


async def test_closing_drops_every_connection():
    async with listening(Later()) as (listener, port), clients(port, 3) as all_clients:
        all_clients[0].send(message(1))
        await until(lambda: len(listener.connections) == 3)
        listener.close()
        for client in all_clients:
            assert await client.ended()


async def test_an_occupied_port_has_its_sentence():
    with open_tcp("127.0.0.1", 0) as sock:
        sock.listen()
        with pytest.raises(NetworkError, match=r"TCP 127\.0\.0\.1.*ss -ltnp"):
            open_tcp(*sock.getsockname())
