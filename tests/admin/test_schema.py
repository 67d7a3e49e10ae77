"""Parameters: what they mean, and what is said about wrong ones."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from pydantic import ValidationError

from dnsproxy.admin import schema


def test_parameters_become_what_they_mean():
    query = schema.LookupsQuery.model_validate(
        {
            "matchpattern": "*.Example.com",
            "cidr": "192.0.2.1/24",
            "source": "global",
            "endpoint": "default/ci",
        }
    )
    assert query.matchpattern.text == "*.example.com."
    assert query.cidr == ip_network("192.0.2.0/24")
    assert (query.source, query.endpoint) == ("global", "default/ci")
    assert schema.CleanQuery.model_validate({"matchpattern": "*", "dry-run": "true"}).dry_run == "true"


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (schema.LookupsQuery, {"matchpattern": "a..b"}, "has an empty label"),
        (schema.LookupsQuery, {"cidr": "192.0.2.0/33"}, "'192.0.2.0/33' is not an address or a range"),
        (schema.LookupsQuery, {"source": "all"}, "'lookup', 'connection' or 'global'"),
        (schema.LookupsQuery, {"endpoint": ""}, "at least 1 character"),
        (schema.LookupsQuery, {"dry-run": "true"}, "Extra inputs"),
        (schema.CleanQuery, {}, "Field required"),
        (schema.EventsQuery, {"verdict": "maybe"}, "'allowed', 'denied' or 'failed'"),
    ],
)
def test_wrong_parameters_say_what_was_expected(model, given, message):
    with pytest.raises(ValidationError, match=message):
        model.model_validate(given)
