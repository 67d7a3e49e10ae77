from __future__ import annotations

import asyncio
import json
import sys

import pytest
from aiohttp import web

from dnsproxy.dyndns import hook as module
from dnsproxy.dyndns.hook import Hook
from dnsproxy.dyndns.status import Event
from dnsproxy.errors import DnsproxyError

EVENT = Event(0.0, "Normal", "DynDnsUpdateCompleted", "Domain default/www", "www.example.de", "ü %s")


async def test_a_program_reads_the_event(tmp_path):
    script = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    await Hook([sys.executable, "-c", script, str(tmp_path / "out")])(EVENT)
    assert json.loads((tmp_path / "out").read_text()) == EVENT.row()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/nonexistent/program"], "cannot be started: No such file"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with 3"),
    ],
)
async def test_a_program_that_fails_is_told_of(command, why):
    with pytest.raises(DnsproxyError, match=why):
        await Hook(command)(EVENT)


async def test_a_program_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    mark = tmp_path / "pid"
    script = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(DnsproxyError, match="did not end"):
        await Hook([sys.executable, "-c", script, str(mark)])(EVENT)


class Service:
    def __init__(self, status: int) -> None:
        self.status, self.got = status, []

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/token", self.take)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/token"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def take(self, request):
        self.got.append((request.headers["User-Agent"].split("/")[0], await request.json()))
        return web.Response(status=self.status, headers={"Location": "/token"})


async def test_a_service_is_posted_the_event():
    async with Service(204) as service:
        await Hook(url=service.url)(EVENT)
    assert service.got == [("dnsproxy", EVENT.row())]


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_a_service_that_does_not_take_it_is_told_of_without_its_token(status):
    async with Service(status) as service:
        with pytest.raises(DnsproxyError, match=f"answered {status}") as caught:
            await Hook(url=service.url)(EVENT)
    assert "token" not in str(caught.value)
    assert len(service.got) == 1


async def test_a_service_that_is_not_there_is_told_of_without_its_token():
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(DnsproxyError, match="was not reached") as caught:
        await Hook(url=f"http://127.0.0.1:{port}/token")(EVENT)
    assert "token" not in str(caught.value)
