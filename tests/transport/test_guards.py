"""What a query on the common path must not cost: a task, a future, memory that stays.

The common path is that of a permitted name whose addresses are known: UDP in, upstream over UDP, UDP out.
Policy, plan, exchange and sockets are the real ones, and the test drives the loop by callbacks alone.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys

import dns.message
import dns.rrset
import pytest
from transport_fakes import one_port
from worlds import make_plan

from dnsproxy.exchange import Exchange
from dnsproxy.rules.policy import load
from dnsproxy.servers import Routes, Server
from dnsproxy.transport.udp import UdpListener, open_udp
from dnsproxy.transport.upstream import Upstreams

DOCUMENTS = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ci, labels: {app: ci}}
spec: {addresses: [127.0.0.1]}
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: ci}
spec:
  endpointSelector: {matchLabels: {app: ci}}
  allow: ["*.example.com:443/TCP"]
"""
NAMES = 40
WINDOW = 20  # queries in flight, no two of them for the same name


class CountingLoop(asyncio.SelectorEventLoop):
    """A loop that counts the futures and tasks it is asked for."""

    def __init__(self):
        super().__init__()
        self.futures = self.tasks = 0
        self.set_task_factory(self._task)

    def create_future(self):
        self.futures += 1
        return super().create_future()

    @staticmethod
    def _task(loop, coroutine, **options):
        loop.tasks += 1
        return asyncio.Task(coroutine, loop=loop, **options)


class Room:
    """A waiting room in which the kernel acknowledges at once."""

    def __init__(self, plan):
        self.plan = plan
        self.held = 0

    def send(self, wire, hold):
        self.held += 1
        self.plan.acknowledged((), hold.elements)
        hold.sink.send(wire, hold.peer)


class Upstream:
    """A server on a socket; each answer is made before the first query comes."""

    def __init__(self, loop):
        self.sock, stream = one_port("127.0.0.1")
        stream.close()
        self.sock.setblocking(False)
        self.answers = dict(map(answered, range(NAMES)))
        loop.add_reader(self.sock, self._readable)

    def _readable(self):
        query, peer = self.sock.recvfrom(4096)
        self.sock.sendto(query[:2] + self.answers[query[2:]], peer)


def query_for(number):
    return dns.message.make_query(f"n{number}.example.com", "A", id=number).to_wire()


def answered(number):
    query = dns.message.from_wire(query_for(number))
    answer = dns.message.make_response(query)
    answer.answer = [dns.rrset.from_text(query.question[0].name, 60, "IN", "A", f"203.0.113.{number}")]
    return query.to_wire()[2:], answer.to_wire()[2:]


class World:
    """A client, the proxy and a server, all on one loop."""

    def __init__(self, loop):
        self.loop = loop
        endpoints, policy = load([("policies.yaml", DOCUMENTS)], enforcement="default")
        plan = make_plan(endpoints, policy)
        self.room = Room(plan)
        self.upstream = Upstream(loop)
        server = Server("127.0.0.1", self.upstream.sock.getsockname()[1])
        self.exchange = Exchange(
            endpoints=endpoints, policy=policy, routes=Routes([server], {}), plan=plan, waiting=self.room
        )
        self.upstreams = Upstreams([server], self.exchange, loop)
        sock = open_udp("127.0.0.1", 0)
        self.client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.client.connect(sock.getsockname())
        self.client.setblocking(False)
        self.listener = UdpListener(sock, self.exchange, loop)
        self.queries = [query_for(number) for number in range(NAMES)]
        self.unasked = self.unanswered = 0
        loop.add_reader(self.client, self._answered)

    def ask(self, count):
        """Have `count` queries answered, some of them at a time."""
        self.unasked = self.unanswered = count
        for _ in range(min(WINDOW, count)):
            self._next()
        patience = self.loop.call_later(20, self.loop.stop)
        self.loop.run_forever()
        patience.cancel()
        assert self.unanswered == 0
        self.exchange.expire(self.loop.time() + 100)  # forget those that are done, as the timer does
        assert self.exchange.flying == 0

    def _next(self):
        self.unasked -= 1
        self.client.send(self.queries[self.unasked % NAMES])

    def _answered(self):
        wire = self.client.recv(4096)
        assert wire[3] & 15 == 0
        self.unanswered -= 1
        if self.unasked:
            self._next()
        elif not self.unanswered:
            self.loop.stop()

    def blocks(self):
        """Count the objects that live, without the IDs that were drawn in advance."""
        gc.collect()
        return sys.getallocatedblocks() - len(self.exchange._idents)

    def close(self):
        self.listener.close()
        self.loop.run_until_complete(self.upstreams.close())
        self.loop.remove_reader(self.client)
        self.loop.remove_reader(self.upstream.sock)
        self.client.close()
        self.upstream.sock.close()


@pytest.fixture
def world():
    loop = CountingLoop()
    made = World(loop)
    made.ask(NAMES)  # from here on all names are known
    yield made
    made.close()
    loop.close()


def test_a_known_query_makes_no_task_and_no_future(world):
    held, answers = world.room.held, world.exchange.counts["answers"]
    world.loop.futures = world.loop.tasks = 0
    world.ask(1000)
    assert (world.loop.tasks, world.loop.futures) == (0, 0)
    assert world.room.held == held, "the common path goes past the waiting room"
    assert world.exchange.counts["answers"] == answers + 1000


def test_the_counters_count(world):
    before = world.loop.tasks, world.loop.futures
    world.loop.run_until_complete(asyncio.sleep(0.001))
    assert (world.loop.tasks, world.loop.futures) == (before[0] + 1, before[1] + 1)


def test_a_known_query_leaves_nothing_behind(world):
    world.ask(500)
    before = world.blocks()
    world.ask(500)
    assert world.blocks() - before < 50
