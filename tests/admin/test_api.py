"""The API over its unix socket: what each call answers, how it fails, and that nothing waits for it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from admin_world import CI, WEB, World
from fakes import until

from dnsproxy.admin import api, schema, server, views
from dnsproxy.errors import Cause, KernelError, SetError


@asynccontextmanager
async def asking(world: World, tmp_path):
    """Yield a function that does one call: status, decoded body."""
    path = tmp_path / "admin.sock"
    async with server.serve(world.state, path=path), _session(path) as session:

        async def call(method: str, target: str, **parameters):
            async with session.request(method, f"http://d{target}", params=parameters) as answer:
                return answer.status, json.loads(await answer.read())

        call.session = session
        yield call


def _session(path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)))


def busy() -> World:
    world = World()
    world.learn(CI, "www.example.com", "93.184.216.34", "93.184.216.35")
    world.learn(CI, "api.example.com", "198.41.0.4")
    world.learn(WEB, "a.example.org", "93.184.216.34")
    world.learn(CI, "old.example.com", "198.41.0.5", ttl=60)
    world.now += 100
    world.collect()
    return world


def _name(route):
    return "www.example.de" if "/domains/" in route.path else "ci"


TARGETS = [
    (route.method, route.path.format(namespace="default", name=_name(route), address="93.184.216.34"), route)
    for route in api.ROUTES
    if route.answer is not None
]


@pytest.mark.parametrize(("method", "target", "route"), TARGETS, ids=lambda each: str(each)[:40])
async def test_every_call_answers_what_its_model_says(method, target, route, tmp_path):
    world = busy()
    given = {"matchpattern": "*.example.com"} if route.query is schema.CleanQuery else {}
    async with world.writing(), asking(world, tmp_path) as call:
        status, body = await call(method, target, **given)
    assert status == 200, body
    for row in body if route.many else [body]:
        route.answer.model_validate(row)
    assert body


async def test_a_list_is_an_array_with_a_row_in_each_line(tmp_path):
    async with asking(busy(), tmp_path) as call:
        async with call.session.get("http://d/v1/lookups") as answer:
            text = await answer.text()
            assert answer.content_type == "application/json"
        first, *lines, last, end = text.split("\n")
        assert (first, last, end) == ("[", "]", "")
        assert len(lines) == 4
        assert [json.loads(line.removesuffix(",")) for line in lines] == json.loads(text)
        status, empty = await call("GET", "/v1/lookups", matchpattern="none.example.com")
        assert (status, empty) == (200, [])
        _, cilium = await call("GET", "/v1/names")
        assert set(cilium) == {"DNSPollNames", "FQDNPolicySelectors"}
        assert len(cilium["FQDNPolicySelectors"]) == 3


async def test_lookups_are_chosen_by_parameters(tmp_path):
    async with asking(busy(), tmp_path) as call:

        async def names(**given):
            status, found = await call("GET", "/v1/lookups", **given)
            assert status == 200
            return {row["fqdn"] for row in found}

        assert await names(matchpattern="WWW.example.com") == {"www.example.com."}
        assert await names(cidr="93.184.216.34") == {"www.example.com.", "a.example.org."}
        assert await names(endpoint="web") == {"a.example.org."}
        assert await names(source="connection") == {"old.example.com."}
        assert "old.example.com." in await names(source="global")


@pytest.mark.parametrize(("connections", "pairs"), [({}, 3), ({"connections": "true"}, 4)])
async def test_what_goes_is_shown_first_and_then_forced_out(tmp_path, connections, pairs):
    world = busy()
    given = {"matchpattern": "*.example.com", "endpoint": CI, **connections}
    async with asking(world, tmp_path) as call:
        status, shown = await call("DELETE", "/v1/lookups", **given, **{"dry-run": "true"})
        assert status == 200
        states = {row["fqdn"]: row["connection"] for row in shown}
        assert states == {
            "www.example.com.": None,
            "api.example.com.": None,
            **({"old.example.com.": "new"} if connections else {}),
        }
        assert sum(len(row["ips"]) for row in shown) == pairs
        assert len(world.caches.endpoints[CI]) == 2
        assert await call("DELETE", "/v1/lookups", **given) == (200, {"pairs": pairs})
        assert len(world.caches.endpoints[CI]) == 0
        assert len(world.caches.zombies[CI]) == (0 if connections else 1)
        assert len(world.caches.endpoints[WEB]) == 1


async def test_cleaning_twice_cuts_no_connection(tmp_path):
    world = World()
    world.learn(CI, "www.example.com", "93.184.216.34")
    async with asking(world, tmp_path) as call:
        for pairs in (1, 0):
            world.now += 1
            assert await call("DELETE", "/v1/lookups", matchpattern="*") == (200, {"pairs": pairs})
            world.collect()
    assert len(world.caches.zombies[CI]) == 1


async def test_what_was_forced_out_is_collected_at_once(tmp_path):
    world = World()
    world.learn(CI, "www.example.com", "93.184.216.34")
    async with world.writing(), asking(world, tmp_path) as call:
        world.now += 1
        await call("DELETE", "/v1/lookups", matchpattern="*")
        await asyncio.wait_for(until(lambda: len(world.caches.zombies[CI])), 10)


async def test_an_endpoint_with_its_rules_and_sets(tmp_path):
    async with asking(busy(), tmp_path) as call:
        status, row = await call("GET", "/v1/endpoints/shop/web")
    assert status == 200
    assert row["endpoint-id"] == WEB
    assert {rule["policy"] for rule in row["rules"]} == {"EgressPolicy shop/web"}
    assert "inet dnsproxy ep.shop.web.addr4" in row["sets"]


async def test_what_the_kernel_lost_is_found_and_repaired(tmp_path):
    world = World()
    async with world.writing(), asking(world, tmp_path) as call:
        world.learn(CI, "www.example.com", "93.184.216.34")
        await call("POST", "/v1/sets/resync")
        spec = next(each for each, content in world.sets.kernel.items() if content)
        key = next(iter(world.sets.kernel[spec]))
        del world.sets.kernel[spec][key]  # and no event tells
        _, found = await call("GET", "/v1/sets/verify", endpoint=CI)
        row = next(each for each in found if each["set"] == str(spec))
        assert (row["missing"], row["extra"]) == (1, 0)
        assert row["examples"][0]["name"] == "www.example.com."
        status, done = await call("POST", "/v1/sets/resync")
        assert (status, done["repaired"], done["drift"]) == (200, True, 1)
        assert key in world.sets.kernel[spec]


async def test_a_set_that_was_just_being_written_is_no_difference(tmp_path):
    world = World()
    async with world.writing(), asking(world, tmp_path) as call:
        world.learn(CI, "www.example.com", "93.184.216.34")
        await call("POST", "/v1/sets/resync")
        contents = {spec: [{}, dict(content)] for spec, content in world.sets.kernel.items()}

        async def read(spec):
            return contents[spec].pop(0)

        world.sets.read = read
        _, found = await call("GET", "/v1/sets/verify", endpoint=CI)
    assert {(row["missing"], row["extra"]) for row in found} == {(0, 0)}
    assert sum(not left for left in contents.values()) == 1, (
        "only the one that seemed to differ is read again"
    )


async def test_sets_that_cannot_be_read_or_repaired_say_why(tmp_path):
    world = World()

    async def read(spec):
        raise SetError(Cause.SET_MISSING, f"there is no set {spec}")

    async def resync():
        raise KernelError("no nf_tables")

    world.sets.read = read
    world.manager.resync = resync
    async with asking(world, tmp_path) as call:
        _, found = await call("GET", "/v1/sets/verify", endpoint=WEB)
        assert [row["error"] for row in found] == [f"there is no set {row['set']}" for row in found]
        assert len(found) == 4
        assert await call("POST", "/v1/sets/resync") == (
            409,
            {"error": "the sets could not be repaired: no nf_tables"},
        )


async def test_a_reload_answers_with_the_faults_or_with_success(tmp_path):
    world = World()
    async with asking(world, tmp_path) as call:
        assert await call("POST", "/v1/reload") == (200, {"reloaded": True, "faults": []})
        world.faults = {"policies": "p.yaml:1:1: no"}
        status, body = await call("POST", "/v1/reload")
    assert (status, body["faults"]) == (422, ["p.yaml:1:1: no"])
    assert "in force stays in force" in body["error"]
    assert world.reloads == 2


async def test_a_pass_is_answered_with_what_it_knows_or_with_why_not(tmp_path):
    world = World()
    async with asking(world, tmp_path) as call:
        status, body = await call("POST", "/v1/conntrack/pass")
        assert (status, body["completed"], body["entries"]) == (200, 1, 17)
        world.unreadable = "no right to"
        status, body = await call("POST", "/v1/conntrack/pass")
        assert status == 409
        assert "no right to" in body["error"]
        _, body = await call("GET", "/v1/conntrack")
        assert (body["failures"], body["problem"]) == (1, "no right to")


async def test_health_names_what_is_not_ready(tmp_path):
    world = World(listening=())
    async with asking(world, tmp_path) as call:
        assert await call("GET", "/livez") == (200, {"status": "ok"})
        for target in ("/readyz", "/healthz"):
            status, body = await call("GET", target)
            assert (status, body["status"]) == (503, "failing")
            assert [each["part"] for each in body["failing"]] == ["listeners", "sets"]


# -- what is wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "status", "message"),
    [
        ("GET", "/v1/lookups?matchpattern=a..b", 400, "matchpattern: 'a..b' has an empty label"),
        ("GET", "/v1/lookups?cidr=x", 400, "cidr: 'x' is not an address or a range"),
        ("GET", "/v1/lookups?source=x", 400, "source: "),
        ("GET", "/v1/lookups?patern=x", 400, "there is no parameter 'patern' here; there is endpoint, match"),
        ("GET", "/v1/lookups?cidr=::1&cidr=::2", 400, "the parameter cidr stands there twice"),
        ("GET", "/v1/status?x=1", 400, "there is no parameter 'x' here; there is none"),
        ("DELETE", "/v1/lookups", 400, "the parameter matchpattern is missing"),
        ("DELETE", "/v1/lookups?matchpattern=*&dry-run=perhaps", 400, "dry-run: "),
        ("GET", "/v1/why/10.0.0.256", 400, "'10.0.0.256' is not an IP address"),
        ("GET", "/v1/zombies?endpoint=nobody", 404, "no endpoint 'nobody'"),
        ("GET", "/v1/endpoints/default/nobody", 404, "no endpoint 'default/nobody'"),
        ("GET", "/v1/nothing", 404, "there is no /v1/nothing; /openapi.json lists what there is"),
        ("PUT", "/v1/lookups", 405, "PUT cannot be done to /v1/lookups; there is DELETE, GET"),
        ("GET", "/v1/events?verdict=x", 400, "verdict: "),
    ],
)
async def test_a_wrong_request_is_answered_with_a_sentence(method, target, status, message, tmp_path):
    async with asking(busy(), tmp_path) as call:
        got, body = await call(method, target)
    assert got == status
    assert message in body["error"]


async def test_a_bug_is_a_500_and_the_daemon_lives_on(tmp_path, capsys):
    world = World()
    world.state.store = lambda: 1 / 0
    async with asking(world, tmp_path) as call:
        status, body = await call("GET", "/v1/status")
        assert (status, body) == (500, {"error": "this is a fault of dnsproxy; its log has the details"})
        assert await call("GET", "/livez") == (200, {"status": "ok"})
    assert "ZeroDivisionError" in "".join(capsys.readouterr())


async def test_a_list_that_fails_in_the_middle_does_not_pass_for_the_whole(tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        yield [{"fqdn": "a."}]
        raise RuntimeError("broken")

    monkeypatch.setattr(views, "lookups", broken)
    async with asking(World(), tmp_path) as call:
        with pytest.raises(aiohttp.ClientError):
            await call("GET", "/v1/lookups")
        assert await call("GET", "/livez") == (200, {"status": "ok"})
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "admin.sock"))
        writer.write(b"GET /v1/lookups HTTP/1.1\r\nHost: d\r\n\r\n")
        raw = await asyncio.wait_for(reader.read(), 10)
        assert raw.endswith(b'{"fqdn":"a."}\r\n'), "and nothing behind it"
        writer.close()
        await writer.wait_closed()
    assert "RuntimeError" in "".join(capsys.readouterr())


async def test_who_goes_away_in_the_middle_ends_the_walk(tmp_path, monkeypatch):
    ended = asyncio.Event()

    def endless(*_, **__):
        try:
            yield [{"fqdn": "a."}]
            while True:
                yield []
        finally:
            ended.set()

    monkeypatch.setattr(views, "lookups", endless)
    async with asking(World(), tmp_path) as call:
        answer = await call.session.get("http://d/v1/lookups")
        await answer.content.readline()
        answer.close()
        await asyncio.wait_for(ended.wait(), 10)


# -- events ---------------------------------------------------------------------------------------------


async def test_events_come_as_they_happen_and_only_those_that_were_asked_for(tmp_path):
    world = World()
    async with asking(world, tmp_path) as call:
        async with call.session.get("http://d/v1/events?endpoint=ci&verdict=denied") as answer:
            assert answer.content_type == "application/x-ndjson"
            assert world.fan.recording
            world.ask("www.example.com")
            world.ask("evil.test", source="10.1.0.6")
            world.ask("evil.test")
            line = json.loads(await asyncio.wait_for(answer.content.readline(), 10))
            assert (line["endpoint"], line["name"], line["verdict"]) == (CI, "evil.test.", "denied")
        while world.fan.recording:  # noqa: ASYNC110 - the end of a connection has no event here
            await asyncio.sleep(0.01)


async def test_a_slow_reader_is_told_how_many_events_it_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("dnsproxy.events.Fan.subscribe.__wrapped__.__defaults__", (3,))
    world = World()
    async with (
        asking(world, tmp_path) as call,
        call.session.get("http://d/v1/events?name=*.example.com") as answer,
    ):
        for number in range(10):
            world.ask(f"n{number}.example.com")
        lines = [json.loads(await asyncio.wait_for(answer.content.readline(), 10)) for _ in range(4)]
    assert [line.get("name") for line in lines[:3]] == [f"n{number}.example.com." for number in (8, 9, 9)]
    assert (lines[3]["type"], lines[3]["count"]) == ("dropped", 17)


async def test_not_everybody_can_look_on(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "LOOKERS", 1)
    async with asking(World(), tmp_path) as call, call.session.get("http://d/v1/events") as answer:
        assert answer.status == 200
        status, body = await call("GET", "/v1/events")
        assert (status, body) == (503, {"error": "1 look on already; end one of them"})


async def test_the_end_waits_for_nobody_who_looks_on(tmp_path):
    path = tmp_path / "admin.sock"
    async with _session(path) as session:
        async with server.serve(World().state, path=path):
            answer = await session.get("http://d/v1/events")
        assert await asyncio.wait_for(answer.read(), 10) == b""


async def test_dyndns_says_why_it_does_not_send(tmp_path):
    world = busy()
    async with asking(world, tmp_path) as call:
        world.domains.refusal = "an hour is not over"
        assert await call("POST", "/v1/domains/www/force") == (409, {"error": "an hour is not over"})
        assert (await call("POST", "/v1/domains/none/resume"))[0] == 404
        assert (await call("GET", "/v1/domains/none"))[0] == 404
        world.domains = None
        assert await call("GET", "/v1/domains") == (200, [])
