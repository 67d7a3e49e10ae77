"""The verbs against the real API, with the real core behind it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from admin_world import CI, World
from command_line import process

from dnsproxy.admin import server


@asynccontextmanager
async def running(tmp_path):
    """Yield a function that runs a command line against a daemon that has learned something."""
    world, path = World(), tmp_path / "admin.sock"
    world.learn(CI, "www.example.com", "93.184.216.34")
    world.learn(CI, "old.example.com", "198.41.0.5", ttl=60)
    world.now += 100
    world.collect()
    async with server.serve(world.state, path=path):

        async def run(line: str):
            return await asyncio.to_thread(process, *line.split(), DNSPROXY_SOCKET=str(path))

        yield run


READ = [
    "cache list",
    "cache list -s global",
    "names",
    "zombies",
    "endpoints list",
    "endpoints show ci",
    "sets list",
    "sets verify",
    "why 93.184.216.34",
    "why 203.0.113.9 -e ci",
    "status",
]


async def test_every_read_verb_prints_a_table_and_json(tmp_path):
    async with running(tmp_path) as run:
        for verb in READ:
            table, rows = await run(verb), await run(f"{verb} -o json")
            assert table.stderr == rows.stderr == "", verb
            assert table.stdout.strip(), verb
            assert table.returncode in (0, 1), verb
            json.loads(rows.stdout)


async def test_what_was_learned_is_listed_explained_and_forgotten(tmp_path):
    async with running(tmp_path) as run:
        assert "www.example.com.   " in (await run("cache list -e ci")).stdout
        assert "www.example.com." in (await run("why 93.184.216.34")).stdout
        cleaned = await run("cache clean -f -p www.example.com")
        assert (cleaned.returncode, cleaned.stdout) == (0, "forgotten: 1 pair of name and address\n")
        assert "lookup   www.example.com." not in (await run("cache list")).stdout


@pytest.mark.parametrize(
    ("line", "code"),
    [("cache list -e none", 2), ("cache list -p a..b", 2), ("why nonsense", 2), ("reload", 0)],
)
async def test_wrong_questions_are_wrong_usage(tmp_path, line, code):
    async with running(tmp_path) as run:
        done = await run(line)
        assert done.returncode == code, done.stderr
        assert bool(done.stderr) == bool(code)
