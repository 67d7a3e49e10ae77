"""The admin API: each call, and how it answers. `openapi.json` describes it, from the table below.

Lists are streamed, step by step (`views.py`), and the loop turns between two steps. A wrong request is a 4xx
with `{"error": a sentence}`; a bug in here is a 500 with a traceback in the log, and no more than that. A
stream that fails in the middle is cut off, so that nobody takes the half for the whole.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import structlog
from aiohttp import web
from pydantic import ValidationError

from dnsproxy import addresses
from dnsproxy.admin import domains, schema, views
from dnsproxy.admin.metrics import exposed
from dnsproxy.admin.openapi import LINES, Route, document
from dnsproxy.admin.why import why
from dnsproxy.errors import DnsproxyError
from dnsproxy.events import PERIOD, render, render_lost

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from prometheus_client import CollectorRegistry

    from dnsproxy.admin.views import Row, State, Steps
    from dnsproxy.events import Ring
    from dnsproxy.namemanager.elements import SetSpec

LOOKERS: Final = 16  # who may look on at events at the same time
LINES_A_TURN: Final = 100  # events looked at before the loop turns, some 2 ms

STATE: Final = web.AppKey("state", object)
REGISTRY: Final = web.AppKey("registry", object)
CLOSING: Final = web.AppKey("closing", asyncio.Event)

log = structlog.get_logger("dnsproxy.admin")


class ApiError(Exception):
    """A request that is answered with an error; the message is for a person."""

    def __init__(self, status: int, message: str, faults: list[str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Call:
    """One request: the state, and its checked parameters."""

    request: web.Request
    query: Any

    @property
    def state(self) -> State:
        """The running state."""
        return cast("State", self.request.app[STATE])

    @property
    def endpoint(self) -> str | None:
        """The key of the endpoint that is asked about; ApiError if there is none of that name."""
        text = getattr(self.query, "endpoint", None)
        return None if text is None else _endpoint(self.state, text)


Answer: TypeAlias = "Row | AsyncGenerator[list[Row], None] | web.StreamResponse"


def _endpoint(state: State, text: str) -> str:
    found = views.find(state, text)
    if found is None:
        raise ApiError(404, f"no endpoint {text!r}: /v1/endpoints lists them, as namespace/name")
    return found.key


async def paced(steps: Steps) -> AsyncGenerator[list[Row], None]:
    """Take steps with a turn of the loop after each."""
    with closing(steps):
        for step in steps:
            yield step
            await asyncio.sleep(0)


def iter_once(rows: list[Row]) -> Steps:
    """Return what is short as one step."""
    yield rows


async def _last(steps: Steps) -> Row:
    """Return the row that the last step is."""
    row: Row = {}
    async for step in paced(steps):
        row = step[0] if step else row
    return row


# -- what there is to see -----------------------------------------------------------------------------------


async def _endpoints(call: Call) -> Answer:
    return paced(views.endpoints(call.state))


async def _endpoint_shown(call: Call) -> Answer:
    state = call.state
    key = _endpoint(state, "{namespace}/{name}".format_map(call.request.match_info))
    found = next((each for each in state.endpoints().endpoints if each.key == key), None)
    assert found is not None, "an endpoint that was just found"
    rules = [row async for step in paced(views.rules(state, key)) for row in step]
    sets = [str(spec) for spec, _ in views.specs(state, key)]
    return {**views.endpoint(state, found), "rules": rules, "sets": sets}


async def _lookups(call: Call) -> Answer:
    chosen = views.Chosen(call.query.matchpattern, call.query.cidr)
    return paced(views.lookups(call.state, chosen, source=call.query.source, endpoint=call.endpoint))


async def _clean(call: Call) -> Answer:
    state, endpoint, connections = call.state, call.endpoint, call.query.connections == "true"
    chosen = views.Chosen(call.query.matchpattern, busy=connections)
    if call.query.dry_run == "true":
        return paced(views.lookups(state, chosen, endpoint=endpoint))
    pairs = 0
    keys = state.keys(endpoint)
    for left in state.plan.caches.expire(chosen.name, state.clock(), keys, connections=connections):
        pairs += left
        await asyncio.sleep(0)
    state.manager.collect_soon()
    return {"pairs": pairs}


async def _names(call: Call) -> Answer:
    rows = paced(views.selectors_as_cilium(call.state))
    head = b'{"DNSPollNames":null,"FQDNPolicySelectors":['
    return await _streamed(call.request, rows, head, b"\n]}\n")


async def _selectors(call: Call) -> Answer:
    return paced(views.selectors(call.state))


async def _zombies(call: Call) -> Answer:
    return paced(views.zombies(call.state, call.endpoint))


async def _why(call: Call) -> Answer:
    text = call.request.match_info["address"]
    try:
        address = addresses.from_text(text)
    except ValueError:
        hint = "`dnsproxy cache list -p NAME` shows a name"
        raise ApiError(
            400, f"{text!r} is not an IP address, such as 192.0.2.1 or 2001:db8::1; {hint}"
        ) from None
    return await _last(why(call.state, address, call.endpoint))


async def _policy(call: Call) -> Answer:
    return views.policy(call.state)


async def _rules(call: Call) -> Answer:
    return paced(views.rules(call.state, call.endpoint))


async def _status(call: Call) -> Answer:
    return views.status(call.state)


async def _conntrack(call: Call) -> Answer:
    return views.conntrack(call.state)


# -- what there is to do ------------------------------------------------------------------------------------


async def _sets(call: Call) -> Answer:
    return paced(views.sets(call.state, call.endpoint))


async def _verify(call: Call) -> Answer:
    return _verified(call.state, call.endpoint)


async def _verified(state: State, endpoint: str | None) -> AsyncGenerator[list[Row], None]:
    for spec, owner in views.specs(state, endpoint):
        try:
            row = await _compared(state, spec, owner)
        except (DnsproxyError, OSError) as error:
            row = views.unread(spec, owner, len(state.plan.applied.get(spec, ())), str(error))
        yield [{**row, "enforced": state.sets.enforces}]


async def _compared(state: State, spec: SetSpec, owner: str) -> Row:
    difference, applied = views.Difference(spec), state.plan.applied
    content = await state.sets.read(spec)
    for _ in difference.look(applied.get(spec, {}), content):
        await asyncio.sleep(0)
    if difference:
        content = await state.sets.read(spec)
        for _ in difference.confirm(applied.get(spec, {}), content):
            await asyncio.sleep(0)
    return difference.row(owner, applied.get(spec, {}), content)


async def _resync(call: Call) -> Answer:
    manager = call.state.manager
    drift = manager.drift
    try:
        await manager.resync()
    except (DnsproxyError, OSError) as error:
        raise ApiError(409, f"the sets could not be repaired: {error}") from None
    return {"repaired": True, "problem": manager.problem, "drift": manager.drift - drift}


async def _reload(call: Call) -> Answer:
    faults = list(await call.state.reload())
    if faults:
        raise ApiError(422, "files have faults; what was in force stays in force", faults)
    return {"reloaded": True, "faults": []}


async def _domains(call: Call) -> Answer:
    return paced(iter_once(list(domains.rows(call.state.domains()))))


async def _domain(call: Call) -> Answer:
    name = call.request.match_info["name"]
    found = domains.row(call.state.domains(), name)
    if found is None:
        raise ApiError(404, f"no DynDNS record {name!r}: /v1/domains lists them")
    return found


async def _domain_asked(call: Call) -> Answer:
    """Have a record forced or resumed, as the last part of the path says."""
    sync, name = call.state.domains(), call.request.match_info["name"]
    if sync is None or domains.row(sync, name) is None:
        raise ApiError(404, f"no DynDNS record {name!r}: /v1/domains lists them")
    ask = sync.force if call.request.path.endswith("/force") else sync.resume
    if (refusal := ask(name)) is not None:
        raise ApiError(409, refusal)
    return {"done": True}


async def _pass(call: Call) -> Answer:
    tracker = call.state.tracker
    if not await tracker.pass_now():
        raise ApiError(409, f"the look was not completed: {tracker.problem or 'endpoints have changed'}")
    return views.conntrack(call.state)


# -- events -------------------------------------------------------------------------------------------------


async def _events(call: Call) -> Answer:
    state, request, query, endpoint = call.state, call.request, call.query, call.endpoint
    if len(state.events) >= LOOKERS:
        raise ApiError(503, f"{LOOKERS} look on already; end one of them")
    response = web.StreamResponse(headers={"Content-Type": LINES, "Cache-Control": "no-store"})
    with state.events.subscribe() as ring:
        await response.prepare(request)
        taken = reported = 0
        while not request.app[CLOSING].is_set() and request.transport is not None:
            events = [ring.popleft() for _ in range(min(len(ring), LINES_A_TURN))]
            taken += len(events)
            lost = _lost(ring, taken + reported)
            reported += lost
            lines = [
                render(event, state.ahead())
                for event in events
                if views.wanted(event, endpoint, query.name, query.verdict)
            ]
            if lost:
                lines.append(render_lost(lost, state.wall()))
            if lines:
                await response.write("".join(lines).encode())
            await asyncio.sleep(0 if ring else PERIOD)
    return response


def _lost(ring: Ring, accounted: int) -> int:
    return ring.appended - len(ring) - accounted


# -- health -------------------------------------------------------------------------------------------------


async def _live(_: Call) -> Answer:
    return {"status": "ok"}


async def _ready(call: Call) -> Answer:
    failing = views.failing(call.state)
    row = {"status": "failing" if failing else "ok", "failing": failing, "notes": views.notes(call.state)}
    return web.json_response(row, status=503 if failing else 200)


async def _metrics(call: Call) -> Answer:
    registry = cast("CollectorRegistry", call.request.app[REGISTRY])
    text, kind = exposed(registry, call.request.headers.get("Accept", ""))
    return web.Response(body=text, headers={"Content-Type": kind})


async def _openapi(call: Call) -> Answer:
    return document(ROUTES, call.state.version)


HEALTH: Final = (
    Route("GET", "/livez", "The process answers", _live, schema.Live),
    Route("GET", "/readyz", "Ready, or which parts are not", _ready, schema.Ready, fails=(503,),
          failure=schema.Ready),
    Route("GET", "/healthz", "As /readyz", _ready, schema.Ready, fails=(503,), failure=schema.Ready),
    Route("GET", "/metrics", "Metrics for Prometheus", _metrics, None, media="text/plain"),
)  # fmt: skip

ROUTES: Final = (
    Route("GET", "/v1/endpoints", "List the endpoints", _endpoints, schema.EndpointRow, many=True),
    Route("GET", "/v1/endpoints/{namespace}/{name}", "Show an endpoint with its rules and sets",
          _endpoint_shown, schema.EndpointDetail, fails=(404,)),
    Route("GET", "/v1/lookups", "List what was learned", _lookups, schema.Lookup, schema.LookupsQuery,
          many=True, fails=(404,)),
    Route("DELETE", "/v1/lookups", "Force names out", _clean, schema.Cleaned, schema.CleanQuery,
          instead=schema.Lookup, fails=(404,)),
    Route("GET", "/v1/names", "List the selectors as Cilium does", _names, schema.CiliumNames),
    Route("GET", "/v1/selectors", "List the selectors, and how much each matches", _selectors,
          schema.Selector, many=True),
    Route("GET", "/v1/sets", "List the sets: wanted, applied, drift", _sets, schema.SetRow,
          schema.EndpointQuery, many=True, fails=(404,)),
    Route("GET", "/v1/sets/verify", "Read the sets back and compare", _verify, schema.Verified,
          schema.EndpointQuery, many=True, fails=(404,)),
    Route("POST", "/v1/sets/resync", "Repair the sets now", _resync, schema.Resynced, fails=(409,)),
    Route("GET", "/v1/zombies", "List what is kept for connections", _zombies, schema.Zombie,
          schema.EndpointQuery, many=True, fails=(404,)),
    Route("GET", "/v1/why/{address}", "Why an address is open, or is not", _why, schema.Why,
          schema.EndpointQuery, fails=(404,)),
    Route("GET", "/v1/policy", "The policy in force, in numbers, and its notes", _policy, schema.Policy),
    Route("GET", "/v1/policy/rules", "List the rules", _rules, schema.RuleRow, schema.EndpointQuery,
          many=True, fails=(404,)),
    Route("POST", "/v1/reload", "Read settings and policies again", _reload, schema.Reloaded, fails=(422,)),
    Route("GET", "/v1/conntrack", "The passes over the kernel's connections", _conntrack, schema.Conntrack),
    Route("POST", "/v1/conntrack/pass", "Look through the connections now", _pass, schema.Conntrack,
          fails=(409,)),
    Route("GET", "/v1/domains", "List the DynDNS records", _domains, schema.Domain, many=True),
    Route("GET", "/v1/domains/{name}", "Show a DynDNS record with its last events", _domain,
          schema.DomainDetail, fails=(404,)),
    Route("POST", "/v1/domains/{name}/force", "Have a record sent though nothing differs", _domain_asked,
          schema.Asked, fails=(404, 409)),
    Route("POST", "/v1/domains/{name}/resume", "End the halt of a record", _domain_asked, schema.Asked,
          fails=(404, 409)),
    Route("GET", "/v1/status", "The whole state", _status, schema.Status),
    Route("GET", "/v1/events", "Events, live, as JSON lines", _events, None, schema.EventsQuery, media=LINES,
          fails=(404, 503)),
    Route("GET", "/openapi.json", "This document", _openapi, schema.Document),
    *HEALTH,
)  # fmt: skip


# -- from a request to an answer ----------------------------------------------------------------------------


def application(
    state: State, registry: CollectorRegistry, routes: tuple[Route, ...], *guards: Callable[..., Any]
) -> web.Application:
    """Return an application that answers some routes; `guards` are middlewares that may refuse."""
    app = web.Application(middlewares=[_errors, *guards])
    app[STATE], app[REGISTRY], app[CLOSING] = state, registry, asyncio.Event()
    app.on_shutdown.append(_close)
    for route in routes:
        app.router.add_route(route.method, route.path, _handler(route))
    return app


async def _close(app: web.Application) -> None:
    app[CLOSING].set()


def _handler(route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        answer: Answer = await route.handler(Call(request, _checked(route.query, request)))
        if isinstance(answer, web.StreamResponse):
            return answer
        if isinstance(answer, dict):
            return web.json_response(answer)
        return await _streamed(request, answer)

    return handle


def _checked(model: type[schema.Model], request: web.Request) -> schema.Model:
    """Return the parameters; ApiError says which one is wrong and what was expected."""
    given = request.query
    if twice := next((key for key in given if len(given.getall(key)) > 1), None):
        raise ApiError(400, f"the parameter {twice} stands there twice")
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        known = [field.alias or name for name, field in model.model_fields.items()]
        raise ApiError(400, "; ".join(_fault(each, known) for each in error.errors())) from None


def _fault(each: Mapping[str, Any], known: list[str]) -> str:
    key = ".".join(map(str, each["loc"]))
    if each["type"] == "extra_forbidden":
        return f"there is no parameter {key!r} here; there is {', '.join(known) or 'none'}"
    if each["type"] == "missing":
        return f"the parameter {key} is missing"
    return f"{key}: {each['msg'].removeprefix('Value error, ')}"


async def _streamed(
    request: web.Request, steps: AsyncGenerator[list[Row], None], head: bytes = b"[", tail: bytes = b"\n]\n"
) -> web.StreamResponse:
    """Send rows as one JSON array, a row in each line."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Cache-Control": "no-store"})
    separator = "\n"
    async with aclosing(steps):
        async for rows in steps:
            if not response.prepared:  # only now, so that what fails at once is an error and not half a list
                await response.prepare(request)
                await response.write(head)
            if rows:
                text = ",\n".join(map(_dump, rows))
                await response.write((separator + text).encode())
                separator = ",\n"
            elif request.transport is None:
                raise ConnectionResetError
    await response.write(tail)
    return response


_dump = json.JSONEncoder(separators=(",", ":")).encode


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn whatever is raised into an answer."""
    try:
        return await handler(request)
    except ApiError as error:
        return refusal(error.status, str(error), faults=error.faults)
    except web.HTTPException as error:
        return _http_error(request, error)
    except ConnectionError:  # nobody is there any more
        return _cut_off(request)
    except Exception:
        log.exception("the admin API failed", method=request.method, path=request.path)
        if request.writer.output_size:
            return _cut_off(request)
        return refusal(500, "this is a fault of dnsproxy; its log has the details")


def _cut_off(request: web.Request) -> web.StreamResponse:
    """End an answer that has begun so that half of it does not pass for the whole."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()  # which cannot be sent any more


def refusal(
    status: int, message: str, *, faults: list[str] | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an error as JSON."""
    row = {"error": message} if faults is None else {"error": message, "faults": faults}
    return web.json_response(row, status=status, headers=headers)


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} cannot be done to {request.path}; there is {allowed}"
        return refusal(error.status, message, headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return refusal(error.status, f"there is no {request.path}; /openapi.json lists what there is")
    return refusal(error.status, error.reason)
