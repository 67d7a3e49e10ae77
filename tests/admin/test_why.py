"""Why: one address, and for each endpoint the sentence that decides."""

from __future__ import annotations

import pytest
from admin_world import CI, WEB, World, rows

from dnsproxy import addresses
from dnsproxy.admin import schema
from dnsproxy.admin.why import CAUSES, why
from dnsproxy.cache import zombies
from dnsproxy.namemanager.elements import endpoint_set, key_of, named_set

TABLE = ("inet", "dnsproxy")
ADDRESS = addresses.from_text("93.184.216.34")
PORTS = endpoint_set(TABLE, CI, 4, ports=True)
HTTPS = key_of(ADDRESS, 6, 443)


@pytest.fixture
def world() -> World:
    return World()


def explained(world, endpoint: str | None = CI, address: bytes = ADDRESS) -> dict:
    (row,) = rows(why(world.state, address, endpoint))
    schema.Why.model_validate(row)
    return row


def of(world, endpoint: str = CI) -> dict:
    (row,) = explained(world, endpoint)["endpoints"]
    return row


def test_a_name_that_opens_it_with_its_rule_and_its_elements(world):
    world.learn(CI, "www.example.com", "93.184.216.34", ttl=300)
    world.plan.applied[PORTS] = {HTTPS: "www.example.com.", key_of(b"\1\2\3\4", 6, 443): "api.example.com."}
    row = of(world)
    assert row["reason"] == "open: www.example.com. leads to it"
    assert row["elements"] == [
        {"set": str(PORTS), "element": "93.184.216.34 . tcp . 443", "name": "www.example.com."}
    ]
    (lookup,) = row["lookups"]
    assert (lookup["fqdn"], lookup["ttl"], lookup["expired"]) == ("www.example.com.", 300, False)
    assert [(rule["path"], rule["ports"]) for rule in lookup["rules"]] == [
        ("spec.allow[0]", ["443/tcp", "443/udp"])
    ]
    world.now += 301
    assert of(world)["lookups"][0]["expired"]


def test_a_name_that_may_only_be_asked_for_opens_nothing(world):
    world.learn(CI, "git.corp.example", "93.184.216.34")
    assert of(world)["reason"] == (
        "not open: git.corp.example. may be asked for, but no rule lets it be connected to"
    )


def test_what_the_kernel_has_not_taken_is_not_open(world):
    world.learn(CI, "www.example.com", "93.184.216.34")
    assert of(world)["reason"].startswith("not open: www.example.com. grants it, but the kernel")


def test_a_zombie_is_kept_for_what_the_passes_say(world):
    world.learn(CI, "www.example.com", "93.184.216.34", ttl=60)
    world.now += 100
    world.collect()
    assert of(world)["reason"].startswith("kept: its lease has just ended")
    passes, mine = world.caches.passes, world.caches.zombies[CI]
    serial = passes.begin()
    for _ in mine.mark(serial, world.now, {ADDRESS}):
        pass
    passes.complete(serial, world.now)
    row = of(world)
    assert row["reason"].startswith("kept: its lease is over, and the last look at the connections saw one")
    assert row["zombie"]["state"] == "live"
    assert row["zombie"]["names"] == ["www.example.com."]


def test_what_is_gone_says_when_and_why(world):
    world.learn(CI, "www.example.com", "93.184.216.34", ttl=60)
    for _ in range(4):
        world.now += 100
        world.collect()
        world.caches.passes.complete(world.caches.passes.begin(), world.now)
    world.collect()
    row = of(world)
    assert row["departed"]["names"] == ["www.example.com."]
    assert row["departed"]["cause"] == "idle"
    assert row["reason"] == f"not open: it left at {row['departed']['at']} since its connections were over"


def test_where_connections_cannot_be_seen_it_says_until_when_it_stays(world):
    world.learn(CI, "www.example.com", "93.184.216.34", ttl=60)
    world.now += 100
    world.collect()
    world.caches.passes.observing = False
    assert of(world)["reason"] == (
        "kept: its lease is over, and connections cannot be seen here; "
        "it stays until 2001-09-09T03:05:00.000000Z (zombies.unobserved)"
    )


def test_a_private_address_says_that_it_was_answered_and_not_learned(world):
    world.learn(CI, "www.example.com", "10.9.8.7")
    row = of_address(world, "10.9.8.7")
    assert row["not-learned"] == {"fqdn": "www.example.com.", "at": "2001-09-09T02:03:20.000000Z"}
    assert row["reason"].startswith(
        "not open: answered for www.example.com. at 2001-09-09T02:03:20.000000Z and not learned: "
    )
    assert "policy.private" in row["reason"]


def test_what_was_not_learned_is_remembered_within_bounds(world, monkeypatch):
    monkeypatch.setattr("dnsproxy.namemanager.plan.UNLEARNED", 2)
    for last in (1, 2, 1, 3):
        world.learn(CI, "www.example.com", f"10.0.0.{last}", "93.184.216.34")
    assert [address[-1] for _, address in world.plan.unlearned] == [1, 3]
    assert explained(world, None, bytes((10, 0, 0, 2)))["endpoints"] == []


def test_what_is_permitted_is_not_called_not_learned(world):
    world.learn(CI, "git.example.net", "10.9.8.7")
    assert of_address(world, "10.9.8.7")["not-learned"] is None


def test_sets_that_are_only_shown_open_nothing(world):
    world.sets.enforces = False
    world.learn(CI, "www.example.com", "93.184.216.34", ttl=300)
    world.plan.applied[PORTS] = {HTTPS: "www.example.com."}
    assert of(world)["reason"] == (
        "shown as open: www.example.com. leads to it (sets are shown, not enforced)"
    )


def of_address(world, address: str) -> dict:
    (row,) = explained(world, None, addresses.from_text(address))["endpoints"]
    return row


def test_every_cause_has_its_sentence():
    assert set(CAUSES) == set(zombies.Cause.__args__)


def test_what_nobody_ever_learned(world):
    assert of(world)["reason"].startswith("not open: no answer brought this endpoint the address")
    assert explained(world, None)["endpoints"] == []


def test_an_element_that_nothing_wants_any_more(world):
    world.plan.applied[PORTS] = {HTTPS: "www.example.com."}
    assert of(world)["reason"].startswith("open, but nothing here wants it any more")


def test_only_endpoints_that_know_it_are_shown_and_shared_sets_apart(world):
    world.learn(CI, "git.example.net", "93.184.216.34")
    world.learn(WEB, "a.example.org", "93.184.216.35")
    world.plan.applied[named_set(TABLE, "git", 4)] = {ADDRESS: "git.example.net."}
    row = explained(world, None)
    assert [each["endpoint-id"] for each in row["endpoints"]] == [CI]
    assert row["shared"] == [
        {"set": "inet dnsproxy git4", "element": "93.184.216.34", "name": "git.example.net."}
    ]
    assert row["global"] == ["git.example.net."]


def test_an_address_of_the_other_family_is_in_no_set_of_this_one(world):
    six = ADDRESS + bytes(12)
    world.plan.applied[PORTS] = {HTTPS: "www.example.com."}
    row = explained(world, CI, six)
    assert row["endpoints"][0]["elements"] == []
