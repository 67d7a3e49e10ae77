"""The description of the API: whole, and true to its parameters."""

from __future__ import annotations

import json

from dnsproxy.admin import schema
from dnsproxy.admin.api import ROUTES
from dnsproxy.admin.openapi import Route, document


async def nothing(call):
    return {}


def test_every_call_is_described_once_and_every_reference_leads_somewhere():
    found = document(ROUTES, "1.2.3")
    assert {(path, method) for path, each in found["paths"].items() for method in each} == {
        (route.path, route.method.lower()) for route in ROUTES
    }
    text = json.dumps(found)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named
    assert named <= set(found["components"]["schemas"])
    operations = [each["operationId"] for path in found["paths"].values() for each in path.values()]
    assert len(set(operations)) == len(operations)


def test_a_parameter_that_may_be_left_out_is_never_null():
    route = Route("GET", "/x/{name}", "x", nothing, schema.Live, schema.LookupsQuery, fails=(404,))
    (operation,) = document([route], "1")["paths"]["/x/{name}"].values()
    found = {(each["in"], each["name"]): each for each in operation["parameters"]}
    assert set(found) == {
        ("path", "name"),
        ("query", "endpoint"),
        ("query", "matchpattern"),
        ("query", "cidr"),
        ("query", "source"),
    }
    assert found["query", "source"]["schema"]["enum"] == ["lookup", "connection", "global"]
    assert found["query", "source"]["required"] is False
    assert found["path", "name"]["required"] is True
    assert "null" not in json.dumps(operation["parameters"])
    assert set(operation["responses"]) == {"200", "400", "401", "403", "404"}


def test_what_is_needed_is_required_and_what_may_come_instead_is_said():
    route = Route("DELETE", "/x", "x", nothing, schema.Cleaned, schema.CleanQuery, instead=schema.Lookup)
    (operation,) = document([route], "1")["paths"]["/x"].values()
    assert {each["name"]: each["required"] for each in operation["parameters"]} == {
        "endpoint": False,
        "matchpattern": True,
        "dry-run": False,
        "connections": False,
    }
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer == {
        "anyOf": [
            {"$ref": "#/components/schemas/Cleaned"},
            {"type": "array", "items": {"$ref": "#/components/schemas/Lookup"}},
        ]
    }
