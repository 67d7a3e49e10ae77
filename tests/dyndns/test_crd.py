"""The definition that is shipped is the one that the models make, and it says what they say."""

from __future__ import annotations

from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from dnsproxy.dyndns import crd, documents

FOLDER = Path(__file__).parents[2] / "config" / "dyndns"
VERSION = crd.definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
SAMPLES = [path for path in sorted(FOLDER.glob("*.yaml")) if path.name != "crd.yaml"]


def test_the_shipped_definition_is_made_of_the_models():
    assert (FOLDER / "crd.yaml").read_text() == crd.text(), "make it anew: python -m dnsproxy.dyndns.crd"


def test_the_columns_are_the_originals():
    columns = [(each["name"], each["jsonPath"]) for each in VERSION["additionalPrinterColumns"]]
    assert columns == [
        ("Fqdn", ".spec.fqdn"),
        ("IP Address", ".status.ipAddress"),
        ("Mode", ".status.mode"),
        ("Successful", ".status.lastResult"),
        ("Last Run", ".status.lastLoop"),
        ("Enabled", ".spec.enabled"),
    ]


def test_what_the_original_requires_and_defaults_is_required_and_defaulted():
    spec = SCHEMA["properties"]["spec"]
    assert spec["required"] == ["fqdn", "password"]
    defaults = {key: each["default"] for key, each in spec["properties"].items() if "default" in each}
    assert defaults == {"enabled": True, "interval": 5}
    assert (spec["properties"]["interval"]["minimum"], spec["properties"]["interval"]["format"]) == (
        5,
        "int32",
    )


def test_the_schema_is_structural():
    def walk(node):
        if isinstance(node, dict):
            assert not {"$ref", "$defs", "anyOf", "title"} & set(node)
            if "properties" in node:
                assert node["type"] == "object"
        for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            walk(each)

    walk(SCHEMA)
    jsonschema_rs.validator_for(SCHEMA)  # raises where it is no schema


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_sample_loads_and_fits_the_definition(path):
    assert documents.load([(path.name, path.read_text())]).domains
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "Domain":
            jsonschema_rs.validate(SCHEMA, document)


def test_all_samples_together_have_no_host_twice():
    assert len(documents.load((path.name, path.read_text()) for path in SAMPLES).domains) == 3


def test_a_sample_shows_every_field():
    shown = set(next(yaml.safe_load_all((FOLDER / "domain-full.yaml").read_text()))["spec"])
    fields = {each.alias for each in documents.DomainSpec.model_fields.values()}
    assert fields - shown == {"ipAddress", "ipv6Address"}


@pytest.mark.parametrize(
    "spec",
    [
        {"fqdn": "*.example.de"},
        {"fqdn": "localhost"},
        {"fqdn": "a_b.example.de"},
        {"fqdn": "www.example.de."},
        {"interval": 4},
        {"ipAddress": "01.2.3.4"},
        {"ipAddress": "2a01::1"},
        {"families": ["ipv5"]},
        {"endpoint": "http://x.example/"},
        {"password": "geheim"},
    ],
)
def test_a_cluster_refuses_what_we_refuse(spec):
    document = {"spec": {"fqdn": "www.example.de", "password": {"name": "x"}} | spec}
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(SCHEMA, document)
