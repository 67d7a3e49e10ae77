"""The admin API's own description (OpenAPI 3.1), made from the routes and the models of their answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic.json_schema import models_json_schema

from dnsproxy.admin import schema

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from pydantic import BaseModel

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"

PATH_PARAMETERS: Final = {
    "address": {"type": "string", "format": "address"},
    "namespace": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
    "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
}
REASONS: Final = {
    400: "a wrong, unknown or repeated parameter",
    401: "no token, or a wrong one (over TCP)",
    403: "a request on behalf of a web page (over TCP)",
    404: "no such endpoint",
    409: "it cannot be done here and now",
    422: "files have faults; what was in force stays in force",
    503: "not ready, or too many who look on",
}


@dataclass(frozen=True, slots=True)
class Route:
    """One call: what it takes, what it gives (`answer` None: text), and how it fails beside 400, 401, 403."""

    method: str
    path: str
    summary: str
    handler: Callable[[Any], Awaitable[Any]]
    answer: type[BaseModel] | None
    query: type[schema.Model] = schema.NoQuery
    many: bool = False
    instead: type[BaseModel] | None = None  # what may come in its place, as a list
    media: str = JSON
    fails: tuple[int, ...] = ()
    failure: type[BaseModel] = schema.Error


def document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """Return the document."""
    known = list(routes)
    models = {model for each in known for model in (each.answer, each.instead, each.failure) if model}
    ordered = sorted(models | {schema.Error}, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "serialization") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for each in known:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dnsproxy", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],  # none on the unix socket
    }


def _operation(route: Route) -> dict[str, Any]:
    failures = {str(code): _failure(route, code) for code in sorted({400, 401, 403, *route.fails})}
    return {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{re.sub('[^a-z]+', '_', route.path)}".strip("_"),
        "parameters": [*_in_path(route.path), *_in_query(route.query)],
        "responses": {
            "200": {"description": "done", "content": {route.media: {"schema": _answer(route)}}},
            **failures,
        },
    }


def _failure(route: Route, code: int) -> dict[str, Any]:
    model = route.failure if code in route.fails else schema.Error
    return {"description": REASONS[code], "content": {JSON: {"schema": _reference(model)}}}


def _answer(route: Route) -> dict[str, Any]:
    if route.answer is None:
        return {"type": "string"}
    found = _array(route.answer) if route.many else _reference(route.answer)
    return {"anyOf": [found, _array(route.instead)]} if route.instead else found


def _array(model: type[BaseModel]) -> dict[str, Any]:
    return {"type": "array", "items": _reference(model)}


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _in_path(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)\}", path)
    return [{"name": name, "in": "path", "required": True, "schema": PATH_PARAMETERS[name]} for name in names]


def _in_query(query: type[schema.Model]) -> list[dict[str, Any]]:
    described = query.model_json_schema()
    required = described.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _present(each)}
        for name, each in described["properties"].items()
    ]


def _present(each: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter that is there: one that may be left out is not null."""
    kinds = each.get("anyOf")
    if kinds is None:
        return {key: value for key, value in each.items() if key not in ("title", "default")}
    found = next(kind for kind in kinds if kind.get("type") != "null")
    return {**found, **({"description": each["description"]} if "description" in each else {})}
