from __future__ import annotations

import asyncio
import random
import socket
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_fakes import Echo, Later, TcpClient, message, reply_to, soon, until

from dnsproxy.errors import FormError, NetworkError
from dnsproxy.transport.tcp import HEADER, Frames, Streams, TcpListener, framed, open_tcp

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
        assert listener.streams._clients == {}


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


async def test_the_largest_messages_pass_in_both_directions():
    wire = message(1, 65_535)
    async with listening(Echo()) as (_, port), clients(port) as (client,):
        client.send(wire, wire)
        assert await client.receive() == reply_to(wire)
        assert await client.receive() == reply_to(wire)


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
        assert listener.errors == 50
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
        assert listener.malformed == 1


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
        assert listener.streams.turned_away == 1
        async with clients(port, source="127.0.0.2") as (other,):
            other.send(message(2))
            assert await other.receive() == reply_to(message(2))
        await one.close()
        await until(lambda: listener.streams.open == 1)
        async with clients(port) as (next_one,):
            next_one.send(message(3))
            assert await next_one.receive() == reply_to(message(3))


async def test_all_clients_together_may_have_so_many_connections_over_all_listeners():
    exchange, loop = Echo(), asyncio.get_running_loop()
    async with listening(exchange, connections=3) as (listener, port):
        second = TcpListener(open_tcp("127.0.0.1", 0), exchange, loop, listener.streams)
        other_port = second._sock.getsockname()[1]
        await second.start()
        async with clients(port, 2), clients(other_port, source="127.0.0.3"):
            await until(lambda: listener.streams.open == 3)
            async with clients(other_port, source="127.0.0.4") as (late,):
                assert await late.ended()
        second.close()
        await until(lambda: not second.connections)


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
    exchange = Echo()
    async with listening(exchange) as (listener, port), clients(port) as (client,):
        total = 400
        wires = [message(number, 60_000) for number in range(total)]
        sending = asyncio.get_running_loop().create_task(send_slowly(client, wires))
        client.reader._transport.pause_reading()
        await until(lambda: any(connection._choked for connection in listener.connections))
        (connection,) = listener.connections
        assert not connection._transport.is_reading()
        assert len(exchange.asked) < total
        client.reader._transport.resume_reading()
        assert await soon(receive_many(client, total)) == list(map(reply_to, wires))
        await soon(sending)


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
        connection._active -= 2_000  # long ago
        exchange.release()
        await client.receive()
        connection._check_idle()
        assert not connection._transport.is_closing()
        connection._active -= 2_000
        client.writer.write(b"\x00\x28drop by drop")
        await until(lambda: connection._frames._octets)
        connection._check_idle()
        assert await client.ended()


# -- the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_flight", "taken"), [(2, 2), (128, 4)])
async def test_draining_answers_what_was_taken_and_takes_no_more(in_flight, taken):
    exchange = Later()
    async with listening(exchange, in_flight=in_flight) as (listener, port), clients(port, 2) as (busy, idle):
        busy.send(*map(message, range(4)))
        await until(lambda: exchange.asked == taken and len(listener.connections) == 2)
        listener.drain()
        assert await idle.ended()
        busy.send(message(4))
        for number in reversed(range(taken)):
            exchange.release(number)
            assert await busy.receive() == reply_to(message(number))
        assert await busy.ended()
        assert exchange.asked == taken
        with pytest.raises(ConnectionRefusedError):
            await TcpClient.open(port)


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
