"""The CustomResourceDefinition of Domain, made from the models that read the documents.

Kubernetes wants a structural schema: nothing referenced, no `anyOf` for what may be left out, no titles.
What a later version of the original would add stays out of reach; what ours add, the original leaves out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml

from dnsproxy.dyndns.documents import GROUP, VERSION, DomainSpec
from dnsproxy.dyndns.status import COLUMNS, DomainStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

HEAD: Final = "# Made by `python -m dnsproxy.dyndns.crd`; a test holds it against the models. Do not edit.\n"
_DROPPED: Final = {"title", "additionalProperties", "default"}
_KEPT_DEFAULTS: Final = (bool, int)  # of the original: enabled and interval
_FORMATS: Final = {"interval": "int32"}


def definition() -> dict[str, Any]:
    """Return the definition as plain values."""
    schema = {
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _schema(DomainSpec),
            "status": _schema(DomainStatus),
        },
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": each.title, "jsonPath": "." + ".".join(each.path), "type": each.type} for each in COLUMNS
        ],
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"domains.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {"kind": "Domain", "listKind": "DomainList", "plural": "domains", "singular": "domain"},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def text() -> str:
    """Return the definition as YAML."""
    return HEAD + yaml.safe_dump(definition(), sort_keys=False, width=100, allow_unicode=True)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    made = model.model_json_schema(by_alias=True)
    return _structural(made, made.get("$defs", {}))


def _structural(node: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema with its references written out and the ways to say nothing left out."""
    if "$ref" in node:
        node = {**parts[node["$ref"].rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}
    if "anyOf" in node:
        (wanted,) = (each for each in node["anyOf"] if each.get("type") != "null")
        node = {**{k: v for k, v in node.items() if k != "anyOf"}, **wanted}
        return _structural(node, parts)
    made = {key: value for key, value in node.items() if key not in _DROPPED and key != "$defs"}
    if type(node.get("default")) in _KEPT_DEFAULTS and node["default"]:
        made["default"] = node["default"]
    if "properties" in made:
        made["properties"] = {
            key: _structural(value, parts) | ({"format": _FORMATS[key]} if key in _FORMATS else {})
            for key, value in made["properties"].items()
        }
    if "items" in made:
        made["items"] = _structural(made["items"], parts)
    return made


if __name__ == "__main__":
    print(text(), end="")
