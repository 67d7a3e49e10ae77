"""Metrics: names that users look for, values of now, and nothing that comes out of packets."""

from __future__ import annotations

import re
import threading

import pytest
from admin_world import AHEAD, CI, WEB, World
from prometheus_client.parser import text_string_to_metric_families

from dnsproxy import addresses
from dnsproxy.admin.metrics import QUERIES, exposed, registry_of
from dnsproxy.exchange import COUNTS
from dnsproxy.namemanager.elements import endpoint_set


@pytest.fixture
def world() -> World:
    return World()


def read(world, *, per_endpoint=False) -> dict[tuple, float]:
    """Return every sample as (name without prefix, values in the order of their labels) -> value."""
    text, kind = exposed(registry_of(world.state, per_endpoint=per_endpoint), "")
    assert kind.startswith("text/plain")
    return {
        (
            sample.name.removeprefix("dnsproxy_"),
            *(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_the_names_of_cilium_with_their_meaning(world):
    world.learn(CI, "www.example.com", "93.184.216.34", "93.184.216.35")
    world.learn(CI, "old.example.com", "198.41.0.4", ttl=60)
    world.now += 100
    world.collect()
    world.manager.timeouts = 7
    found = read(world, per_endpoint=True)
    expected = {
        ("fqdn_gc_deletions_total",): 1,
        ("fqdn_selectors",): 3,
        ("fqdn_active_names", CI): 1,
        ("fqdn_active_ips", CI): 2,
        ("fqdn_alive_zombie_connections", CI): 1,
        ("fqdn_active_names", WEB): 0,
        ("proxy_datapath_update_timeout_total",): 7,
    }
    assert {key: found[key] for key in expected} == expected


def test_queries_by_what_became_of_them(world):
    world.ask("www.example.com")
    world.ask("evil.test")
    world.ask("evil.test", source="192.0.2.99")
    world.exchange.query(b"\0" * 13, b"\n\1\0\5", world.out, None, world.now, stream=False)
    found = read(world)
    verdicts = {rule: found["policy_l7_total", "fqdn", rule] for rule in ("received", "forwarded", "denied")}
    assert verdicts == {"received": 5, "forwarded": 1, "denied": 2}  # no server: one response
    assert found["policy_l7_total", "fqdn", "parse_errors"] == 2
    assert found["queries_total",] == 4
    assert found["queries_strangers_total",] == 1


def test_a_response_counts_like_a_request(world):
    world.exchange.counts |= {"queries": 3, "forwarded": 2, "joined": 1, "answers": 2, "failures": 1}
    found = read(world)
    verdicts = {rule: found["policy_l7_total", "fqdn", rule] for rule in ("received", "forwarded", "denied")}
    assert verdicts == {"received": 6, "forwarded": 5, "denied": 0}
    assert found["policy_l7_total", "fqdn", "parse_errors"] == 1


def test_evictions_are_not_forgotten_with_their_endpoint(world):
    world.learn(CI, "www.example.com", "93.184.216.34")
    zombies = world.caches.zombies[CI]
    zombies.evicted, zombies.evicted_live = 5, 2
    before = read(world)
    world.caches.drop(CI)
    after = read(world)
    for live, count in (("no", 3), ("yes", 2)):
        assert before["zombies_evicted_total", live] == after["zombies_evicted_total", live] == count


def test_alive_are_those_of_which_nobody_could_say_that_they_are_over(world):
    for name, address in (("a.example.com", "93.184.216.34"), ("b.example.com", "93.184.216.35")):
        world.learn(CI, name, address, ttl=60)
    world.learn(CI, "a.example.com", "93.184.216.36", ttl=60)
    world.now += 100
    world.collect()
    for _ in range(2):
        world.now += 1
        serial = world.caches.passes.begin()
        for _step in world.caches.zombies[CI].mark(serial, world.now, {bytes((93, 184, 216, 34))}):
            pass
        world.caches.passes.complete(serial, world.now)
    world.collect()
    assert len(world.caches.zombies[CI]) == 2  # a sibling stays with it
    assert read(world, per_endpoint=True)["fqdn_alive_zombie_connections", CI] == 1


def test_the_last_reload_and_when_it_was(world):
    world.reloaded_well = False
    found = read(world)
    assert found["reload_success",] == 0
    assert found["reload_timestamp_seconds",] == 999.0 + AHEAD


def test_everything_that_is_counted_is_told_and_explained(world):
    assert set(COUNTS) <= set(QUERIES)
    found = read(world)
    assert {f"queries_{key}_total" for key in COUNTS if key != "queries"} <= {key[0] for key in found}


def test_histograms_are_cumulative(world):
    for seconds in (0.0005, 0.003, 100.0):
        world.exchange.upstream_seconds.observe(seconds)
    found = read(world)
    bucket = "proxy_upstream_reply_seconds_bucket"
    assert found[bucket, "0.001", "dns", "upstreamTime"] == 1
    assert found[bucket, "0.005", "dns", "upstreamTime"] == 2
    assert found[bucket, "+Inf", "dns", "upstreamTime"] == 3
    assert found["proxy_upstream_reply_seconds_count", "dns", "upstreamTime"] == 3
    assert found["proxy_upstream_reply_seconds_sum", "dns", "upstreamTime"] == pytest.approx(100.0035)
    assert ("proxy_upstream_reply_seconds_count", "dns", "dataplaneTime") in found


def test_the_state_of_sets_passes_store_and_files(world):
    world.manager.drift = 5
    world.plan.cut = 6
    world.manager.failing[endpoint_set(("inet", "dnsproxy"), CI, 4, ports=True)] = "set full"
    world.faults = {"policies": "no"}
    passes = world.caches.passes
    passes.complete(passes.begin(), world.now)
    world.now += 12
    found = read(world)
    expected = {
        ("sets_state", "starting"): 1,
        ("sets_state", "enforcing"): 0,
        ("sets_failing",): 1,
        ("sets_drift_total",): 5,
        ("sets_cut_total",): 6,
        ("conntrack_pass_age_seconds",): 12,
        ("store_age_seconds",): 2.5,
        ("reload_faults",): 1,
        ("ready",): 0,
        ("build_info", "1.2.3"): 1,
        ("upstream_usable", "192.0.2.53:53"): 1,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["process_resident_memory_bytes",] > 1_000_000


def test_without_a_store_there_is_no_age(world):
    world.state.store = lambda: None
    assert not [key for key in read(world) if key[0].startswith("store")]


def test_no_label_holds_what_came_in_a_packet(world):
    world.learn(CI, "secret-name.example.com", "93.184.216.34")
    world.ask("secret-name.example.com")
    world.plan.applied[endpoint_set(("inet", "dnsproxy"), CI, 4, ports=False)] = {
        addresses.from_text("93.184.216.34"): "secret-name.example.com."
    }
    for per_endpoint in (False, True):
        text, _ = exposed(registry_of(world.state, per_endpoint=per_endpoint), "")
        assert b"secret-name" not in text
        assert b"93.184" not in text


def test_series_per_endpoint_only_if_asked_for(world):
    assert not [key for key in read(world) if CI in key]
    assert [key for key in read(world, per_endpoint=True) if CI in key]


def test_names_and_units_are_as_prometheus_wants_them(world):
    text, _ = exposed(registry_of(world.state, per_endpoint=True), "")
    families = [f for f in text_string_to_metric_families(text.decode()) if f.name.startswith("dnsproxy_")]
    assert all(family.documentation for family in families)
    assert all(re.fullmatch(r"dnsproxy_[a-z0-9_]+", family.name) for family in families)


def test_a_scraper_that_asks_for_openmetrics_gets_it(world):
    text, kind = exposed(registry_of(world.state), "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_nothing_is_done_before_somebody_asks(world):
    before = threading.active_count()
    world.state.faults = lambda: pytest.fail("read although nobody asked")
    registry_of(world.state)
    assert threading.active_count() == before
