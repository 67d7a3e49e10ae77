"""The API, asked whatever its own description allows, and what it does not."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from ipaddress import IPv4Network

import pytest
import schemathesis
from admin_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from dnsproxy.admin import server
from dnsproxy.admin.api import ROUTES

TOKEN = b"0123456789abcdef0123456789abcdef"
EXAMPLES = 200 if os.environ.get("DNSPROXY_DEEP") else 8

_address = st.ip_addresses().map(str)
schemathesis.openapi.format("address", _address)
schemathesis.openapi.format(
    "cidr",
    _address
    | st.tuples(st.ip_addresses(v=4), st.integers(0, 32)).map(
        lambda pair: str(IPv4Network((int(pair[0]) >> (32 - pair[1]) << (32 - pair[1]), pair[1])))
    ),
)


class Served(threading.Thread):
    """The API on a loop and a port of its own, since schemathesis asks from this thread."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self._ready = threading.Event()
        self.start()
        assert self._ready.wait(10)

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        world = World()
        world.learn("default/ci", "www.example.com", "93.184.216.34", "2606:2800::1")
        async with world.writing(), server.serve(world.state, listen=("127.0.0.1", self.port), token=TOKEN):
            self._ready.set()
            await self._end.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self.join(10)


@pytest.fixture(scope="module")
def described():
    served = Served()
    headers = {"Authorization": f"Bearer {TOKEN.decode()}"}
    yield schemathesis.openapi.from_url(f"http://127.0.0.1:{served.port}/openapi.json", headers=headers)
    served.stop()


# /v1/events never ends by itself; test_api.py has its tests.
ASKED = [route for route in ROUTES if route.path != "/v1/events"]
CALLS = [(route.method, route.path, GenerationMode.POSITIVE) for route in ASKED] + [
    (route.method, route.path, GenerationMode.NEGATIVE)
    for route in ASKED
    if route.query.model_fields or "{" in route.path  # else there is nothing that could be wrong
]


@pytest.mark.parametrize(("method", "path", "mode"), CALLS, ids=str)
def test_the_api_is_what_it_says(described, method, path, mode):
    operation = described[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def asked(case) -> None:
        case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN.decode()}"})

    asked()
