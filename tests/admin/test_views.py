"""Rows: what they say, what is chosen, and that a step is small."""

from __future__ import annotations

import re

import pytest
from admin_world import CI, HOST, WEB, World, rows
from cilium_vectors import VECTORS

from dnsproxy import addresses, names
from dnsproxy.admin import schema, views
from dnsproxy.admin.views import Chosen
from dnsproxy.namemanager.elements import endpoint_set, key_of
from dnsproxy.rules.pattern import match_pattern

TABLE = ("inet", "dnsproxy")


@pytest.fixture
def world() -> World:
    return World()


def fits(model, found: list[dict]) -> list[dict]:
    """Return rows that have exactly the keys and types which the API promises."""
    for row in found:
        model.model_validate(row)
    return found


def listed(world, **choice) -> list[tuple[str, str, str]]:
    chosen = Chosen(choice.pop("pattern", None), choice.pop("cidr", None))
    found = fits(schema.Lookup, rows(views.lookups(world.state, chosen, **choice)))
    return [(row["endpoint-id"], row["source"], row["fqdn"]) for row in found]


# -- lookups --------------------------------------------------------------------------------------------


def test_a_lookup_has_the_columns_of_cilium(world):
    world.learn(CI, "www.example.com", "93.184.216.34", "2606:2800::1", ttl=300)
    (row,) = rows(views.lookups(world.state, Chosen()))
    assert {**row, "ips": sorted(row["ips"])} == {
        "endpoint-id": CI,
        "source": "lookup",
        "fqdn": "www.example.com.",
        "ttl": 300,
        "lookup-time": "2001-09-09T02:03:20.000000Z",
        "expiration-time": "2001-09-09T02:08:20.000000Z",
        "ips": ["2606:2800::1", "93.184.216.34"],
        "connection": None,
    }


def test_addresses_that_came_with_different_answers_stand_in_rows_of_their_own(world):
    world.learn(CI, "www.example.com", "93.184.216.34")
    world.now += 10
    world.learn(CI, "www.example.com", "93.184.216.35")
    found = rows(views.lookups(world.state, Chosen()))
    assert sorted(row["ips"] for row in found) == [["93.184.216.34"], ["93.184.216.35"]]


def test_leases_come_first_then_connections_then_the_next_endpoint(world):
    world.learn(CI, "old.example.com", "93.184.216.34", ttl=60)
    world.now += 100
    world.collect()
    world.learn(CI, "new.example.com", "93.184.216.35")
    world.learn(WEB, "a.example.org", "93.184.216.36")
    assert [each for each in listed(world) if each[0] != HOST] == [
        (CI, "lookup", "new.example.com."),
        (CI, "connection", "old.example.com."),
        (WEB, "lookup", "a.example.org."),
    ]
    assert listed(world, source="connection") == [(CI, "connection", "old.example.com.")]
    assert listed(world, source="lookup", endpoint=WEB) == [(WEB, "lookup", "a.example.org.")]
    assert {each[2] for each in listed(world, source="global")} == {
        "new.example.com.",
        "old.example.com.",
        "a.example.org.",
    }


def test_a_connection_says_when_it_was_seen_and_when_it_will_be_looked_at(world):
    world.learn(CI, "old.example.com", "93.184.216.34", ttl=60)
    world.now += 100
    world.collect()
    world.caches.passes.complete(world.caches.passes.begin(), world.now, world.now + 30)
    (row,) = rows(views.lookups(world.state, Chosen(), source="connection"))
    assert row["ttl"] == 0
    assert row["ips"] == ["93.184.216.34"]
    assert row["lookup-time"] == "2001-09-09T02:05:00.000000Z"
    assert row["expiration-time"] == "2001-09-09T02:05:30.000000Z"


def test_what_is_chosen_by_pattern_and_range(world):
    world.learn(CI, "www.example.com", "93.184.216.34", "2606:2800::1")
    world.learn(CI, "api.example.com", "198.41.0.4")
    cidr = schema.LookupsQuery.model_validate({"cidr": "93.184.216.0/24"}).cidr
    assert listed(world, cidr=cidr) == [(CI, "lookup", "www.example.com.")]
    assert listed(world, cidr=cidr, pattern=match_pattern("api.*.com")) == []
    assert listed(world, pattern=match_pattern("API.Example.com")) == [(CI, "lookup", "api.example.com.")]
    (row,) = rows(views.lookups(world.state, Chosen(cidr=cidr)))
    assert len(row["ips"]) == 2, "a lookup is shown with all its addresses if one of them is in the range"


def test_a_star_chooses_also_names_that_no_selector_can(world):
    odd = names.from_labels([b"a b", b"example", b"com"])
    assert Chosen(match_pattern("*")).name(odd)
    assert not Chosen(match_pattern("*.example.com")).name(odd)


def test_a_range_of_one_family_has_no_address_of_the_other():
    chosen = Chosen(cidr=schema.LookupsQuery.model_validate({"cidr": "93.184.216.0/24"}).cidr)
    assert chosen.address(addresses.from_text("93.184.216.34"))
    assert not chosen.address(addresses.from_text("93.184.216.34") + bytes(12))


def test_a_listing_survives_what_comes_and_goes_meanwhile(world):
    for number in range(500):
        world.learn(CI, f"n{number}.example.com", "93.184.216.34", ttl=60)
    for number in range(500):
        world.learn(CI, f"stays{number}.example.com", "93.184.216.34")
    steps = views.lookups(world.state, Chosen())
    first = next(steps)
    world.now += 100
    world.collect()
    world.learn(CI, "late.example.com", "93.184.216.35")
    seen = {row["fqdn"] for row in (*first, *rows(steps)) if row["source"] == "lookup"}
    assert {f"stays{number}.example.com." for number in range(500)} <= seen


@pytest.mark.parametrize("addresses_", [1, 50])
def test_no_step_of_a_listing_has_more_rows_than_its_budget(world, addresses_):
    found = [f"93.184.{number}.1" for number in range(addresses_)]
    for number in range(300):
        world.learn(CI, f"n{number}.example.com", *found)
    steps = list(views.lookups(world.state, Chosen()))
    shown = [sum(1 + len(row["ips"]) for row in step) for step in steps]
    assert max(shown) <= views.BUDGET / views.SHOWN + 1 + addresses_
    assert sum(map(len, steps)) == 300


def test_a_filter_that_nothing_passes_still_works_in_steps(world):
    for number in range(5 * views.BUDGET):
        world.learn(CI, f"n{number}.example.com", "93.184.216.34")
    steps = list(views.lookups(world.state, Chosen(match_pattern("other.example.com"))))
    assert steps == [[]] * 6, "five steps that do nothing but look, and the end"


# -- endpoints and zombies ------------------------------------------------------------------------------


def test_endpoints_with_what_they_have_learned(world):
    world.learn(CI, "www.example.com", "93.184.216.34", "93.184.216.35")
    found = {row["endpoint-id"]: row for row in fits(schema.EndpointRow, rows(views.endpoints(world.state)))}
    assert list(found) == [HOST, CI, WEB]
    assert found[CI] == {
        "endpoint-id": CI,
        "labels": {"app": "ci"},
        "addresses": ["10.1.0.5/32", "fd00::5/128"],
        "deny": None,
        "restricted": True,
        "names": 1,
        "ips": 2,
        "zombies": 0,
        "evicted": 0,
    }
    assert found[WEB]["deny"] == "refused"
    assert not found[HOST]["restricted"]


def test_an_endpoint_is_found_by_its_key_or_by_a_name_that_only_one_has():
    text = "\n---\n".join(
        f"apiVersion: dnsproxy/v1\nkind: Endpoint\nmetadata: {{name: {name}, namespace: {space}}}\n"
        f"spec: {{addresses: [10.2.0.{number}]}}"
        for number, (space, name) in enumerate([("a", "ci"), ("b", "ci"), ("a", "web")])
    )
    state = World(text).state
    assert views.find(state, "web").key == "a/web"
    assert views.find(state, "b/ci").key == "b/ci"
    assert views.find(state, "ci") is None
    assert views.find(state, "none") is None


def test_a_zombie_with_the_passes_that_decide_about_it(world):
    world.learn(CI, "old.example.com", "93.184.216.34", ttl=60)
    world.now += 100
    world.collect()
    (row,) = fits(schema.Zombie, rows(views.zombies(world.state, CI)))
    assert row == {
        "endpoint-id": CI,
        "ip": "93.184.216.34",
        "names": ["old.example.com."],
        "names-total": 1,
        "state": "new",
        "alive-at": "2001-09-09T02:05:00.000000Z",
        "delete-pending-at": "2001-09-09T02:05:00.000000Z",
        "expiration-time": None,
        "since-pass": 0,
        "seen-pass": 0,
    }
    assert rows(views.zombies(world.state, WEB)) == []


def test_where_connections_cannot_be_seen_a_zombie_says_when_it_ends(world):
    world.learn(CI, "old.example.com", "93.184.216.34", ttl=60)
    world.now += 100
    world.collect()
    world.caches.passes.observing = False
    (row,) = fits(schema.Zombie, rows(views.zombies(world.state, CI)))
    assert (row["state"], row["expiration-time"]) == ("unobserved", "2001-09-09T03:05:00.000000Z")
    (row,) = fits(schema.Lookup, rows(views.lookups(world.state, Chosen(), endpoint=CI)))
    assert (row["connection"], row["expiration-time"]) == ("unobserved", "2001-09-09T03:05:00.000000Z")


def test_sets_that_are_only_shown_say_so_everywhere_and_are_ready(world):
    world.sets.enforces = False
    world.manager.ready.set()
    assert views.status(world.state)["state"] == "shown, not enforced"
    assert views.status(world.state)["sets"]["state"] == "shown, not enforced"
    assert {row["enforced"] for row in set_rows(world).values()} == {False}
    assert "sets" not in {part["part"] for part in views.failing(world.state)}
    assert views.notes(world.state) == ["sets are shown, not enforced: nothing in the kernel follows them"]
    world.sets.enforces = True
    assert views.notes(world.state) == []


def test_what_is_only_shown_and_fails_is_not_called_shown(world):
    world.sets.enforces = False
    world.manager.problem = "nobody writes"
    assert views.status(world.state)["state"] == "not enforcing"
    assert "sets" in {part["part"] for part in views.failing(world.state)}


def test_a_zombie_of_many_names_shows_the_first_and_their_number(world):
    for number in range(views.SHORT + 20):
        world.learn(CI, f"n{number}.example.com", "93.184.216.34", ttl=60)
    world.now += 100
    world.collect()
    (row,) = rows(views.zombies(world.state))
    assert (len(row["names"]), row["names-total"]) == (views.SHORT, views.SHORT + 20)


# -- what policy speaks of ------------------------------------------------------------------------------


def test_selectors_in_the_words_of_cilium(world):
    found = fits(schema.CiliumSelector, rows(views.selectors_as_cilium(world.state)))
    assert found[0] == {
        "selectorString": "MatchName: , MatchPattern: **.example.org.",
        "regexString": "^([-a-zA-Z0-9_]+([.][-a-zA-Z0-9_]+){0,})[.]example[.]org[.]$",
    }
    assert "MatchName: git.example.net., MatchPattern: " in {row["selectorString"] for row in found}


@pytest.mark.parametrize(("_", "text", "name", "matches"), VECTORS)
def test_the_expressions_mean_what_the_patterns_mean(_, text, name, matches):
    expression = views.expression(match_pattern(text).text)
    assert bool(re.fullmatch(expression, name.lower().rstrip(".") + ".")) is matches


def test_how_much_each_selector_matches(world):
    world.learn(CI, "www.example.com", "93.184.216.34", "93.184.216.35")
    world.learn(CI, "api.example.com", "93.184.216.34")
    world.learn(WEB, "www.example.com", "93.184.216.34")
    found = fits(schema.Selector, rows(views.selectors(world.state)))
    assert found == [
        {"selector": "**.example.org.", "names": 0, "ips": 0, "endpoints": 0},
        {"selector": "*.example.com.", "names": 3, "ips": 4, "endpoints": 2},
        {"selector": "git.example.net.", "names": 0, "ips": 0, "endpoints": 0},
    ]


def test_rules_say_what_they_let_through(world):
    found = fits(schema.RuleRow, rows(views.rules(world.state, CI)))
    connects = [row for row in found if row["kind"] == "connect"]
    assert connects[1] == {
        "policy": "EgressPolicy default/ci",
        "path": "spec.allow[1]",
        "text": connects[1]["text"],
        "at": connects[1]["at"],
        "kind": "connect",
        "ports": ["22/tcp", "22/udp", "443/tcp"],
        "sets": ["git"],
        "cidrs": ["10.0.0.0/8"],
        "endpoints": 1,
    }
    assert "git.example.net" in connects[1]["text"]
    assert re.fullmatch(r"policies\.yaml:\d+", connects[1]["at"])
    resolves = {row["path"] for row in found if row["kind"] == "resolve"}
    assert resolves == {"spec.allow[0]", "spec.allow[1]", "spec.resolve[0]"}
    assert {row["policy"] for row in rows(views.rules(world.state))} == {
        "EgressPolicy default/ci",
        "EgressPolicy shop/web",
    }


def test_a_denial_and_an_asking_without_names_are_rules_too():
    world = World(
        """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: host}
spec:
  endpointSelector: {matchLabels: {"reserved:host": ""}}
  egress: [{toPorts: [{ports: [{port: "53", protocol: ANY}]}]}]
  egressDeny: [{toPorts: [{ports: [{port: "25", protocol: TCP}]}]}]
"""
    )
    found = fits(schema.RuleRow, rows(views.rules(world.state)))
    assert {"deny": ["25/tcp"]}.items() <= {row["kind"]: row["ports"] for row in found}.items()
    assert [row["ports"] for row in found if row["kind"] == "resolve"] == [["53/tcp", "53/udp", "53/sctp"]]


def test_the_policy_in_numbers(world):
    world.faults = {"policies": "p.yaml:1:1: no"}
    row = views.policy(world.state)
    schema.Policy.model_validate(row)
    numbers = {key: row[key] for key in ("enforcement", "endpoints", "restricted", "selectors", "faults")}
    assert numbers == {
        "enforcement": "default",
        "endpoints": 3,
        "restricted": 2,
        "selectors": 3,
        "faults": {"policies": "p.yaml:1:1: no"},
    }


# -- sets -----------------------------------------------------------------------------------------------


def set_rows(world, endpoint=None) -> dict[str, dict]:
    return {row["set"]: row for row in fits(schema.SetRow, rows(views.sets(world.state, endpoint)))}


def test_sets_with_what_is_wanted_and_what_is_applied(world):
    spec = endpoint_set(TABLE, CI, 4, ports=True)
    world.learn(CI, "www.example.com", "93.184.216.34")
    stale = key_of(addresses.from_text("198.41.0.4"), 6, 443)
    world.plan.applied[spec] = {stale: "gone.example.com."}
    world.manager.failing[spec] = "set full"
    row = set_rows(world)[str(spec)]
    assert row == {
        "set": "inet dnsproxy ep.default.ci.port4",
        "endpoint-id": CI,
        "ours": True,
        "enforced": True,
        "wanted": 2,
        "applied": 1,
        "missing": 2,
        "extra": 1,
        "failing": "set full",
    }


def test_what_is_kept_for_connections_is_wanted_as_well(world):
    world.learn(CI, "www.example.com", "93.184.216.34", ttl=60)
    world.now += 100
    world.collect()
    assert len(world.caches.endpoints[CI]) == 0
    row = set_rows(world)[str(endpoint_set(TABLE, CI, 4, ports=True))]
    assert (row["wanted"], row["missing"]) == (2, 2)


def test_sets_of_one_endpoint_and_those_that_are_nobodys(world):
    assert {row["endpoint-id"] for row in set_rows(world, WEB).values()} == {WEB}
    assert len(set_rows(world, WEB)) == 4
    assert set_rows(world)["inet dnsproxy git4"]["endpoint-id"] == ""


def compared(world, spec, *contents) -> dict:
    """Return the row of a set that was read one or two times."""
    difference, applied = views.Difference(spec), world.plan.applied.get(spec, {})
    for step, content in zip((difference.look, difference.confirm), contents, strict=False):
        for _ in step(applied, content):
            pass
    row = difference.row(CI, applied, contents[-1])
    schema.Verified.model_validate(row | {"enforced": True})
    return row


def test_what_the_kernel_lacks_and_what_it_has_too_much(world):
    spec = endpoint_set(TABLE, CI, 4, ports=False)
    gone, kept, alien = (addresses.from_text(f"93.184.216.{last}") for last in (1, 2, 3))
    world.plan.applied[spec] = {gone: "a.example.com.", kept: "b.example.com."}
    content = {kept: "b.example.com.", alien: ""}
    row = compared(world, spec, content, content)
    assert (row["kernel"], row["applied"], row["missing"], row["extra"]) == (2, 2, 1, 1)
    assert row["examples"] == [
        {"element": "93.184.216.1", "problem": "missing", "name": "a.example.com."},
        {"element": "93.184.216.3", "problem": "extra", "name": ""},
    ]


def test_what_is_written_during_the_reading_is_no_difference(world):
    spec = endpoint_set(TABLE, CI, 4, ports=False)
    added, deleted = (addresses.from_text(f"93.184.216.{last}") for last in (1, 2))
    world.plan.applied[spec] = {added: "a.example.com."}  # counts by now, and `deleted` no more
    early, late = {deleted: "b.example.com."}, {added: "a.example.com."}
    assert [compared(world, spec, early)[key] for key in ("missing", "extra")] == [1, 1]
    assert [compared(world, spec, early, late)[key] for key in ("missing", "extra")] == [0, 0]


def test_no_more_than_some_examples(world):
    spec = endpoint_set(TABLE, CI, 4, ports=False)
    lost = {addresses.from_text(f"93.184.216.{last}"): "a." for last in range(views.EXAMPLES - 1)}
    world.plan.applied[spec] = lost
    content = {addresses.from_text(f"93.184.217.{last}"): "b." for last in range(5)}
    row = compared(world, spec, content, content)
    assert [each["problem"] for each in row["examples"]] == ["missing"] * (views.EXAMPLES - 1) + ["extra"]


def test_what_a_user_keeps_in_a_set_of_theirs_is_not_too_much(world):
    spec = endpoint_set(TABLE, CI, 4, ports=False)._replace(ours=False)
    row = compared(world, spec, {addresses.from_text("93.184.216.1"): "mine"})
    assert (row["extra"], row["examples"]) == (0, [])


# -- the whole ------------------------------------------------------------------------------------------


def test_the_status_says_it_all(world):
    world.learn(CI, "www.example.com", "93.184.216.34", "93.184.216.35")
    world.ask("www.example.com")
    row = views.status(world.state)
    schema.Status.model_validate(row)
    assert (row["names"], row["ips"], row["zombies"], row["endpoints"]) == (1, 2, 0, 3)
    assert row["state"] == "starting"
    assert row["queries"]["queries"] == 1
    assert row["upstreams"] == [{"server": "192.0.2.53:53", "failures": 0, "usable": True}]
    assert row["conntrack"]["started-at"] is None
    assert row["started-at"] == "2001-09-09T02:03:20.000000Z"


def test_every_part_that_is_not_ready_is_named(world):
    world.listening = ()
    world.server.failures = 3
    world.state.restored = lambda: False
    found = {each["part"]: each["reason"] for each in views.failing(world.state)}
    assert found == {
        "listeners": "no address is served yet",
        "restore": "what the last process knew is still being read",
        "sets": "the sets are not read back yet",
        "upstream": "no upstream server answers: 192.0.2.53:53",
    }
    world.manager.problem = "no rights"
    assert {"part": "sets", "reason": "no rights"} in views.failing(world.state)


def test_ready_is_ready_also_while_one_set_fails(world):
    world.manager.ready.set()
    world.manager.failing[endpoint_set(TABLE, CI, 4, ports=True)] = "set full"
    assert views.failing(world.state) == []


# -- events ---------------------------------------------------------------------------------------------


def request(key=CI, name="www.example.com", *, allowed=True, stranger=False):
    verdict = None if stranger else type("Verdict", (), {"allowed": allowed})
    return ("request", 1.0, key, b"\n\1\0\5", False, names.from_text(name), 1, verdict)


def response(cause="", key=CI, name="www.example.com"):
    wire = names.from_text(name)
    return ("response", 1.0, key, b"\n\1\0\5", False, wire, 1, 0, (), (), None, 0.0, 0.0, "", cause, ())


def test_events_chosen_by_endpoint_name_and_verdict():
    events = {
        "asked": request(),
        "denied": request(allowed=False),
        "stranger": request("", stranger=True),
        "answered": response(),
        "timeout": response("timeout"),
        "other": request(WEB, "a.example.org"),
    }

    def shown(endpoint=None, pattern=None, verdict=None):
        chosen = None if pattern is None else match_pattern(pattern)
        return {key for key, each in events.items() if views.wanted(each, endpoint, chosen, verdict)}

    assert shown() == set(events)
    assert shown(CI) == {"asked", "denied", "answered", "timeout"}
    assert shown(pattern="*.example.org") == {"other"}
    assert shown(verdict="allowed") == {"asked", "answered", "other"}
    assert shown(verdict="denied") == {"denied", "stranger"}
    assert shown(verdict="failed") == {"timeout"}
    assert shown(CI, "www.example.com", "allowed") == {"asked", "answered"}
