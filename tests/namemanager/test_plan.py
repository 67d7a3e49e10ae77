"""The plan: what is learned, what it opens, and what it takes to make the sets so."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from ipaddress import ip_network
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy.addresses import from_text as address
from dnsproxy.cache.gc import Caches, Collector
from dnsproxy.namemanager import plan as plan_module
from dnsproxy.namemanager.elements import SetSpec, comment, key_of, key_text
from dnsproxy.namemanager.plan import Plan
from dnsproxy.names import from_labels, from_text
from dnsproxy.rules.policy import load

ENDPOINTS = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ci, labels: {app: ci}}
spec: {addresses: [192.0.2.10]}
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: web, labels: {app: web}}
spec: {addresses: [192.0.2.20]}
---
"""
POLICY = (
    ENDPOINTS
    + """
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: ci}
spec:
  endpointSelector: {matchLabels: {app: ci}}
  allow:
  - {name: www.example.com, ports: [443/TCP]}
  - {name: both.example.com, ports: [443/TCP, 53/UDP]}
  - {pattern: "*.example.com", ports: [80/TCP]}
  - {name: any.example.org}
  - {name: set.example.org, ports: [22/TCP], set: [github, "4#inet#fw4#hub", "6#inet#fw4#hub6"]}
  - {name: inside.example.org, ports: [443/TCP], cidrs: [10.0.0.0/8]}
  - {name: inside.example.org, ports: [80/TCP]}
  - {name: tail.example.net, ports: [443/TCP], cnames: true}
  - {name: plain.example.net, ports: [443/TCP]}
  resolve: ["*.lookup.test"]
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: web}
spec:
  endpointSelector: {matchLabels: {app: web}}
  allow:
  - {name: www.example.com, ports: [443/TCP]}
  - {name: set.example.org, ports: [22/TCP], set: github}
"""
)
ONE, TWO, SIX = address("93.184.216.34"), address("93.184.216.35"), address("2606:4700::6810:1")
PRIVATE = address("10.1.2.3")
OURS = ("inet", "dnsproxy")


class World:
    """A plan with one step per verb, and the endpoints by name."""

    def __init__(self, text=POLICY, private=(), **bounds):
        settings = {"minimum_ttl": 60, "addresses_per_name": 10, "names_per_endpoint": 100} | bounds
        self.endpoints, self.policy = load([("policies.yaml", text)], enforcement="default")
        self.plan = Plan(self.policy, self.endpoints, caches=Caches(**settings), private=private)

    def endpoint(self, name="ci"):
        return next(each for each in self.endpoints.endpoints if each.name == name)

    def view(self, name="ci"):
        return self.policy.view(self.endpoint(name))

    def observe(self, text, *addresses, who="ci", now=1000.0, cnames=()):
        view, name = self.view(who), from_text(text)
        targets = tuple(map(from_text, cnames))
        return self.plan.observe(view, view.verdict(name).grants, name, addresses, 0, now, targets)

    def lacking(self, *arguments, **more):
        """Observe; return what is not applied of what the answer opens."""
        return tuple(self.plan.lacking(self.observe(*arguments, **more)))

    def apply(self, elements):
        self.plan.claim(elements)
        self.plan.acknowledged((), elements)

    def swap(self, text):
        self.endpoints, self.policy = load([("policies.yaml", text)], enforcement="default")
        self.plan.set_policy(self.policy, self.endpoints)

    def wanted(self):
        found = {}
        for _ in self.plan.wanted(found):
            pass
        return {spec: content for spec, content in found.items() if content}

    def changes(self, size=1000):
        """Walk; return the transactions, none of which is acknowledged."""
        return [each for each in self.plan.changes(size) if each != ([], [])]

    def write(self, size=1000):
        """Walk, and have the kernel acknowledge each transaction; return all of them."""
        written = []
        for deletes, adds in self.plan.changes(size):
            self.plan.acknowledged(deletes, adds)
            written += [(deletes, adds)] if deletes or adds else []
        return written

    def found(self, spec, content, **more):
        return finish(self.plan.found(spec, dict(content), **more))

    def collect(self, now):
        collector = Collector(self.plan.caches)
        while not collector.step(now).done:
            pass


def finish(steps):
    """Work a generator off; return what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def said(elements):
    """What a person would say of elements: set, key, name."""
    return {f"{each.spec.name} {key_text(each.key)} {each.name}" for each in elements}


# What a name opens


def test_a_rule_with_ports_opens_each_port_in_the_set_of_the_endpoint_that_asked():
    assert said(World().observe("both.example.com", ONE)) == {
        "ep.default.ci.port4 93.184.216.34 . tcp . 443 both.example.com.",
        "ep.default.ci.port4 93.184.216.34 . udp . 53 both.example.com.",
        "ep.default.ci.port4 93.184.216.34 . tcp . 80 both.example.com.",
    }


def test_a_rule_without_ports_opens_the_address_alone_in_its_family():
    assert said(World().observe("any.example.org", ONE, SIX)) == {
        "ep.default.ci.addr4 93.184.216.34 any.example.org.",
        "ep.default.ci.addr6 2606:4700::6810:1 any.example.org.",
    }


def test_sets_that_a_rule_names_get_plain_addresses_of_their_family():
    elements = World().observe("set.example.org", ONE, SIX)
    assert {(str(each.spec), key_text(each.key), each.spec.ours) for each in elements} == {
        ("inet dnsproxy ep.default.ci.port4", "93.184.216.34 . tcp . 22", True),
        ("inet dnsproxy ep.default.ci.port6", "2606:4700::6810:1 . tcp . 22", True),
        ("inet dnsproxy github4", "93.184.216.34", True),
        ("inet dnsproxy github6", "2606:4700::6810:1", True),
        ("inet fw4 hub", "93.184.216.34", False),
        ("inet fw4 hub6", "2606:4700::6810:1", False),
    }


def test_a_set_of_the_users_form_in_our_own_table_is_ours():
    world = World(POLICY.replace("4#inet#fw4#hub", "4#inet#dnsproxy#github4"))
    assert [spec for spec in world.plan.specs() if spec.name == "github4"] == [
        SetSpec(*OURS, "github4", 4, ports=False, ours=True)
    ]


def test_a_long_name_is_cut_as_the_kernel_keeps_it():
    name = from_labels([b"a" * 63, b"b" * 63, b"c" * 63, b"example", b"com"])
    world = World(POLICY.replace('"*.example.com"', '"**.example.com"'))
    view = world.view()
    [element] = world.plan.observe(view, view.grants(name), name, (ONE,), 0, 1.0)
    assert element.name == comment(element.name)
    assert len(element.name) == 127
    world.apply([element])
    world.found(element.spec, {element.key: element.name})
    assert world.changes() == []


def test_every_set_exists_before_its_first_use_and_for_endpoints_without_rules_too():
    specs = World().plan.specs()
    assert len(set(specs)) == len(specs)
    assert {str(spec) for spec in specs} == {
        f"inet dnsproxy ep.default.{name}.{kind}{version}"
        for name in ("ci", "web", "host")
        for kind in ("addr", "port")
        for version in (4, 6)
    } | {"inet dnsproxy github4", "inet dnsproxy github6", "inet fw4 hub", "inet fw4 hub6"}


# What is learned


def test_a_name_that_opens_nothing_is_learned_all_the_same():
    world = World()
    assert world.observe("one.lookup.test", ONE) == ()
    assert world.plan.caches.of("default/ci").addresses(from_text("one.lookup.test")) == (ONE,)
    assert world.plan.caches.global_.addresses(from_text("one.lookup.test")) == (ONE,)
    assert world.wanted() == {}


def test_an_address_that_nothing_permits_is_not_learned_and_opens_nothing():
    world = World()
    assert world.observe("www.example.com", PRIVATE) == ()
    assert world.plan.caches.of("default/ci").addresses(from_text("www.example.com")) == ()
    assert world.plan.caches.global_.addresses(from_text("www.example.com")) == ()


def test_a_non_public_address_opens_only_what_the_rules_that_permit_it_say():
    world = World()
    assert said(world.observe("inside.example.org", PRIVATE)) == {
        "ep.default.ci.port4 10.1.2.3 . tcp . 443 inside.example.org."
    }
    assert len(world.observe("inside.example.org", ONE)) == 2


def test_an_embedded_address_is_judged_by_what_it_embeds():
    world = World()
    nat64 = address("64:ff9b::10.1.2.3")
    assert world.observe("www.example.com", nat64) == ()
    assert said(world.observe("inside.example.org", nat64)) == {
        "ep.default.ci.port6 64:ff9b::a01:203 . tcp . 443 inside.example.org."
    }


def test_ranges_permitted_for_all_permit_for_all_rules():
    world = World(private=(ip_network("10.0.0.0/8"),))
    assert len(world.observe("inside.example.org", PRIVATE)) == 2
    assert world.plan.permits(world.view().grants(from_text("www.example.com")), PRIVATE)
    assert not world.plan.permits(world.view().grants(from_text("www.example.com")), address("192.168.0.1"))


def test_a_cname_target_counts_only_for_rules_that_say_so():
    world = World()
    cnames = ("plain.example.net", "tail.example.net")
    assert said(world.observe("start.lookup.test", ONE, cnames=cnames)) == {
        "ep.default.ci.port4 93.184.216.34 . tcp . 443 tail.example.net."
    }
    cache = world.plan.caches.of("default/ci")
    assert set(cache.names(ONE)) == {from_text("start.lookup.test"), from_text("tail.example.net")}


def test_what_is_learned_opens_nothing_for_another_endpoint():
    world = World()
    elements = world.observe("www.example.com", ONE)
    world.apply(elements)
    assert world.observe("www.example.com", ONE) == ()
    assert {each.spec.name for each in world.observe("www.example.com", ONE, who="web")} == {
        "ep.default.web.port4"
    }
    assert len(list(world.plan.caches.of("default/web").items())) == 1


# Applied, and open


def test_an_element_counts_when_acknowledged_and_not_before():
    world = World()
    elements = world.observe("www.example.com", ONE)
    assert world.lacking("www.example.com", ONE) == elements
    world.apply(elements[:1])
    assert world.lacking("www.example.com", ONE) == elements[1:]
    world.apply(elements[1:])
    assert world.lacking("www.example.com", ONE) == ()


def test_an_answer_waits_for_all_that_it_opens_also_for_what_is_applied_already():
    world = World()
    world.apply(world.observe("start.lookup.test", ONE, cnames=["tail.example.net"]))
    world.apply(world.observe("www.example.com", ONE))
    elements = world.observe("www.example.com", ONE, TWO, cnames=["tail.example.net"])
    assert len(elements) == 6
    assert len(world.plan.lacking(elements)) == 3


def test_an_open_address_only_extends_its_lease():
    world = World()
    world.apply(world.observe("www.example.com", ONE, now=1000.0))
    world.observe("www.example.com", ONE, now=1001.0)
    grants = world.view().grants(from_text("www.example.com"))
    assert grants.open == {"default/ci": {ONE}}
    world.observe("www.example.com", ONE, now=1030.0)
    for cache in (world.plan.caches.of("default/ci"), world.plan.caches.global_):
        assert cache.lookup(from_text("www.example.com"), ONE).expiry == 1090.0


def known(names):
    """A plan with the views, grants and addresses of names that are open already, to observe once more."""
    world = World(names_per_endpoint=1_000)
    view, both = world.view(), (ONE, TWO)
    known = []
    for number in range(names):
        name = from_text(f"n{number}.example.com")
        grants = view.verdict(name).grants
        world.apply(world.plan.observe(view, grants, name, both, 60, 1000.0))
        world.plan.observe(view, grants, name, both, 60, 1000.0)
        known.append((view, grants, name, both))
    return world.plan, known


def test_what_is_known_and_open_takes_no_more_memory_with_each_answer():
    plan, answers = known(200)
    after = []
    gc.collect()
    for turn in range(1, 6):
        for at, answer in enumerate(answers):
            assert plan.observe(*answer, 60, 1000.0 + turn + at / 1000) == ()
        after.append(sys.getallocatedblocks())
    assert after[-1] - after[1] < 50  # a block an answer would be 600


def test_an_answer_that_is_known_and_open_needs_little_memory_in_passing():
    plan, answers = known(2)
    plan.observe(*answers[0], 60, 1001.0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        plan.observe(*answers[1], 60, 1002.0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most - before < 1_000  # octets; a lookup with its times is about 150


def test_one_new_address_among_known_ones_is_what_is_lacking():
    world = World()
    world.apply(world.observe("www.example.com", ONE))
    assert {each.key[:4] for each in world.lacking("www.example.com", ONE, TWO)} == {TWO}


def test_what_the_kernel_lost_is_lacking_again():
    world = World()
    elements = world.observe("www.example.com", ONE)
    world.apply(elements)
    world.observe("www.example.com", ONE)
    assert world.found(elements[0].spec, {elements[0].key: "www.example.com."}) == (1, 0)
    assert world.lacking("www.example.com", ONE) == elements[1:]


def test_a_set_that_is_gone_holds_nothing():
    world = World()
    elements = world.observe("www.example.com", ONE)
    world.apply(elements)
    world.observe("www.example.com", ONE)
    world.plan.forget(elements[0].spec)
    assert world.observe("www.example.com", ONE) == elements


def test_in_doubt_nothing_counts_until_acknowledged_or_read_back():
    world = World()
    elements = world.observe("www.example.com", ONE)
    world.apply(elements)
    world.observe("www.example.com", ONE)
    world.plan.doubt()
    assert world.lacking("www.example.com", ONE) == elements
    world.apply(elements[:1])
    assert world.lacking("www.example.com", ONE) == elements[1:]
    content = {element.key: element.name for element in elements}
    assert world.found(elements[0].spec, content) == (0, 0)
    assert world.lacking("www.example.com", ONE) == ()


def test_doubt_does_not_forget_what_was_believed():
    world = World()
    elements = world.observe("www.example.com", ONE)
    world.apply(elements)
    world.plan.doubt()
    world.plan.doubt()
    assert world.found(elements[0].spec, {ONE + b"x" * 8: "foreign"}) == (2, 1)


def test_a_takeover_that_is_abandoned_opens_nothing_that_was_not_looked_at(monkeypatch):
    """Its first step has read that TWO is gone, and has not come to it."""
    monkeypatch.setattr(plan_module, "KEYS", 1)
    world = World()
    elements = world.observe("any.example.org", ONE, TWO)
    world.apply(elements)
    assert world.observe("any.example.org", ONE, TWO) == ()
    steps = world.plan.found(elements[0].spec, {ONE: elements[0].name})
    next(steps)
    steps.close()
    assert world.lacking("any.example.org", ONE, TWO) == elements[1:]
    assert world.lacking("any.example.org", ONE) == ()


def test_an_element_stops_counting_before_its_deletion_is_sent():
    world = World()
    world.apply(world.observe("www.example.com", ONE))
    world.observe("www.example.com", ONE)
    world.collect(2000.0)
    deletes, adds = next(world.plan.changes(1000))
    assert len(deletes) == 2
    assert adds == []
    assert len(world.observe("www.example.com", ONE)) == 2


def test_the_memory_of_open_addresses_is_bounded(monkeypatch):
    monkeypatch.setattr(plan_module, "OPEN", 3)
    world = World()
    for number in range(10):
        answer = (bytes((93, 0, 0, number)),)
        world.apply(world.observe("www.example.com", *answer))
        assert world.observe("www.example.com", *answer) == ()
        grants = world.view().grants(from_text("www.example.com"))
        assert answer[0] in grants.open["default/ci"]
        assert len(grants.open["default/ci"]) <= 3


def test_the_memory_of_what_grants_open_is_bounded(monkeypatch):
    monkeypatch.setattr(plan_module, "TEMPLATES", 1)
    world = World()
    for text in ("www.example.com", "any.example.org", "set.example.org") * 2:
        world.observe(text, ONE)
    assert len(world.plan.places["default/ci"]._by_grants) == 1


# Wanted, and the difference


def test_a_name_in_the_caches_is_wanted_and_a_collected_one_is_not():
    world = World()
    world.observe("www.example.com", ONE, now=1000.0)
    world.observe("www.example.com", TWO, now=1030.0)
    world.collect(1061.5)
    assert {key[:4] for content in world.wanted().values() for key in content} == {TWO}
    world.collect(2000.0)
    assert world.wanted() == {}


def test_a_name_that_no_longer_contributes_gives_its_element_to_another_in_one_transaction():
    world = World()
    world.apply(world.observe("www.example.com", ONE, now=1000.0))
    world.observe("other.example.com", ONE, now=1050.0)
    assert world.changes() == []
    world.collect(1061.5)
    [(deletes, adds)] = world.write()
    assert said(deletes) == {
        "ep.default.ci.port4 93.184.216.34 . tcp . 80 www.example.com.",
        "ep.default.ci.port4 93.184.216.34 . tcp . 443 www.example.com.",
    }
    assert said(adds) == {"ep.default.ci.port4 93.184.216.34 . tcp . 80 other.example.com."}


def test_the_name_that_an_element_has_stays_while_it_contributes():
    world = World()
    names = ["www.example.com", "a.example.com", "b.example.com", "c.example.com"]
    for order in (names, names[::-1]):
        for text in order:
            world.apply(world.observe(text, ONE))
        assert world.changes() == []


def test_the_name_that_an_element_has_stays_whoever_is_first_in_the_walk():
    world = World()
    world.observe("a.example.com", ONE)
    world.apply(world.observe("b.example.com", ONE))
    assert world.changes() == []


def test_changes_come_in_transactions_of_bounded_size_with_renames_whole():
    world = World(addresses_per_name=1000)
    many = tuple(bytes((93, 0, 1, number)) for number in range(20))
    world.observe("plain.example.net", *many)
    spec = SetSpec(*OURS, "ep.default.ci.port4", 4, ports=True, ours=True)
    world.found(spec, {key_of(each, 6, 443): "old.example.net." for each in many[:10]})
    transactions = world.write(size=5)
    assert sum(len(deletes) for deletes, _ in transactions) == 10
    assert sum(len(adds) for _, adds in transactions) == 20
    for deletes, adds in transactions:
        assert 0 < len(deletes) + len(adds) <= 5
        assert {each.key for each in deletes} <= {each.key for each in adds}


def test_what_is_asked_again_before_its_deletion_stays():
    world = World()
    world.apply(world.observe("any.example.org", ONE, TWO))
    world.collect(2000.0)
    transactions = world.plan.changes(2)
    [[first], _] = next(transactions)
    left = ({ONE, TWO} - {first.key}).pop()
    assert world.observe("any.example.org", left, now=2000.0) == ()
    assert [deletes for deletes, _ in transactions if deletes] == []


def test_what_is_asked_again_while_its_many_names_are_looked_through_stays(monkeypatch):
    monkeypatch.setattr(plan_module, "STEP", 10)
    world = World()
    world.apply(world.observe("any.example.org", ONE))
    for number in range(50):
        world.observe(f"n{number}.lookup.test", ONE, now=1999.0)
    world.collect(2000.0)
    changes = world.plan.changes(1000)
    assert [next(changes) for _ in range(3)] == [([], [])] * 3
    assert world.observe("any.example.org", ONE, now=2000.0) == ()
    assert [deletes for deletes, _ in changes if deletes] == []
    assert world.observe("any.example.org", ONE, now=2000.0) == ()
    world.collect(2061.5)
    assert [len(deletes) for deletes, _ in world.changes()] == [1]


def test_the_names_of_an_address_are_looked_through_in_steps(monkeypatch):
    monkeypatch.setattr(plan_module, "STEP", 10)
    world = World()
    world.apply(world.observe("www.example.com", ONE))
    for number in range(50):
        world.observe(f"n{number}.lookup.test", ONE, now=1999.0)
    world.observe("last.example.com", ONE, now=1999.0)
    world.collect(2000.0)
    changes = list(world.plan.changes(1000))
    renamed = [deletes and [each.name for each in adds] for deletes, adds in changes if deletes or adds]
    assert ["last.example.com."] in renamed or len(renamed) == 2
    assert len(changes) > 5


def test_asking_for_a_name_does_not_spare_what_the_policy_took_from_it():
    world = World()
    world.apply(world.observe("both.example.com", ONE))
    world.swap(POLICY.replace("443/TCP, 53/UDP", "443/TCP"))
    world.observe("both.example.com", ONE)
    [(deletes, adds)] = world.changes()
    assert said(deletes) == {"ep.default.ci.port4 93.184.216.34 . udp . 53 both.example.com."}
    assert adds == []


def test_a_walk_is_cut_into_steps_and_survives_what_happens_between_them(monkeypatch):
    monkeypatch.setattr(plan_module, "STEP", 3)
    world = World()
    for number in range(30):
        world.observe(f"n{number}.example.com", ONE)
    found, steps = {}, 0
    for number, _ in enumerate(world.plan.wanted(found)):
        world.observe(f"m{number}.example.com", TWO)
        world.collect(1000.0)
        steps += 1
    assert steps > 10
    assert ONE in {key[:4] for content in found.values() for key in content}


# Doubt


def test_what_is_in_doubt_is_deleted_all_the_same():
    world = World()
    world.apply(world.observe("any.example.org", ONE))
    world.collect(2000.0)
    world.plan.doubt()
    [(deletes, adds)] = world.changes()
    assert said(deletes) == {"ep.default.ci.addr4 93.184.216.34 any.example.org."}
    assert adds == []


def test_a_deletion_that_failed_is_tried_again_and_an_acknowledged_one_is_not():
    world = World()
    world.apply(world.observe("any.example.org", ONE))
    world.collect(2000.0)
    [(deletes, _)] = world.changes()
    assert world.changes() == [(deletes, [])]
    assert world.plan.in_doubt() == 1
    world.plan.acknowledged(deletes, (), certain=False)
    assert world.changes() == []
    assert world.plan.in_doubt() == 0


def test_what_was_read_before_a_foreign_change_counts_for_deletions_and_for_nothing_else():
    world = World()
    [element] = world.observe("any.example.org", ONE)
    world.plan.doubt()
    assert world.found(element.spec, {ONE: element.name, TWO: "foreign"}, certain=False) == (0, 2)
    assert world.lacking("any.example.org", ONE) == (element,)
    [(deletes, _), (_, adds)] = world.write()
    assert [each.key for each in deletes] == [TWO]
    assert adds == [element]
    assert world.lacking("any.example.org", ONE) == ()
    assert world.plan.in_doubt() == 0


def test_an_acknowledgement_older_than_a_foreign_change_counts_for_deletions_only():
    world = World()
    elements = world.observe("any.example.org", ONE)
    world.plan.doubt()
    world.plan.acknowledged((), elements, certain=False)
    assert world.lacking("any.example.org", ONE) == elements
    world.collect(2000.0)
    assert world.changes() == [(list(elements), [])]


def test_what_the_user_had_first_is_not_deleted_however_busy_others_are():
    world = World()
    world.apply(world.observe("set.example.org", ONE))
    world.found(HUB, {ONE: "by hand"}, certain=False)
    world.collect(2000.0)
    assert [each for deletes, _ in world.changes() for each in deletes if each.spec == HUB] == []


# One answer


def test_one_answer_asks_for_no_more_elements_than_it_may(monkeypatch):
    monkeypatch.setattr(plan_module, "ELEMENTS", 10)
    world = World()
    many = tuple(bytes((93, 0, 0, number)) for number in range(1, 9))
    elements = world.observe("both.example.com", *many)
    assert {each.key[:4] for each in elements} == set(many[:3])
    assert set(world.plan.caches.of("default/ci").addresses(from_text("both.example.com"))) == set(many[:3])
    assert (world.plan.cut, world.plan.cut_of) == (5, ("default/ci", from_text("both.example.com")))
    world.apply(elements)
    assert world.observe("both.example.com", *many) == ()


def test_one_address_is_learned_however_many_ports_are_opened(monkeypatch):
    monkeypatch.setattr(plan_module, "ELEMENTS", 1)
    world = World()
    assert {each.key[:4] for each in world.observe("both.example.com", ONE, TWO)} == {ONE}


def test_one_answer_teaches_no_more_addresses_than_it_may():
    world = World(addresses_per_name=0)
    many = tuple(number.to_bytes(4, "big") for number in range(0x5D000000, 0x5D000000 + 4_000))
    assert {each.key for each in world.observe("any.example.org", *many)} == set(
        many[: plan_module.ADDRESSES]
    )
    assert world.observe("a.lookup.test", *many) == ()
    assert world.plan.caches.of("default/ci").pairs == 2 * plan_module.ADDRESSES


def test_targets_beyond_the_bound_are_left_out(monkeypatch):
    world = World(POLICY.replace("name: tail.example.net", 'pattern: "*.tail.test"'))
    monkeypatch.setattr(plan_module, "ELEMENTS", 4)
    targets = [f"n{number}.tail.test" for number in range(10)]
    elements = world.observe("www.example.com", ONE, TWO, cnames=targets)
    assert {each.name for each in elements} == {"www.example.com.", "n0.tail.test.", "n1.tail.test."}
    assert {each.key[:4] for each in elements} == {ONE}


# What left


def collected(world, now):
    """Collect; return the transactions for exactly what left, acknowledged."""
    collector, gone, done = Collector(world.plan.caches), {}, False
    while not done:
        step = collector.step(now)
        finish(world.plan.departed(step.removed, gone))
        done = step.done
    written = []
    for deletes, adds in world.plan.review(list(gone), 1000):
        world.plan.acknowledged(deletes, adds)
        written += [(deletes, adds)] if deletes or adds else []
    return written


def test_what_a_collection_took_leaves_the_sets_unless_another_name_or_endpoint_wants_it():
    world = World(zombies_per_endpoint=0)
    for who, text, now in [("ci", "set.example.org", 1000.0), ("web", "set.example.org", 1050.0),
                           ("ci", "any.example.org", 1000.0), ("ci", "both.example.com", 1000.0),
                           ("ci", "www.example.com", 1050.0)]:  # fmt: skip
        world.apply(world.observe(text, ONE, who=who, now=now))
    [(deletes, adds)] = collected(world, 1061.5)
    assert said(deletes) == {
        "ep.default.ci.port4 93.184.216.34 . tcp . 22 set.example.org.",
        "ep.default.ci.addr4 93.184.216.34 any.example.org.",
        "hub 93.184.216.34 set.example.org.",
        "ep.default.ci.port4 93.184.216.34 . udp . 53 both.example.com.",
        "ep.default.ci.port4 93.184.216.34 . tcp . 80 both.example.com.",
        "ep.default.ci.port4 93.184.216.34 . tcp . 443 both.example.com.",
    }
    assert said(adds) == {
        "ep.default.ci.port4 93.184.216.34 . tcp . 80 www.example.com.",
        "ep.default.ci.port4 93.184.216.34 . tcp . 443 www.example.com.",
    }
    assert world.changes() == []


def test_a_zombie_keeps_its_elements_until_it_is_given_up():
    world = World(zombies_per_endpoint=10)
    world.apply(world.observe("any.example.org", ONE))
    assert collected(world, 1061.5) == []
    assert world.changes() == []
    passes = world.plan.caches.passes
    for _ in range(2):
        passes.complete(passes.begin(), 1070.0)
    [(deletes, _)] = collected(world, 1080.0)
    assert said(deletes) == {"ep.default.ci.addr4 93.184.216.34 any.example.org."}


# The user's own sets


HUB = SetSpec("inet", "fw4", "hub", 4, ports=False, ours=False)


def test_in_a_set_of_the_users_only_what_we_added_is_ever_deleted():
    world = World()
    world.apply(world.observe("set.example.org", ONE))
    assert world.found(HUB, {ONE: "set.example.org.", TWO: "by hand", PRIVATE: ""}) == (0, 0)
    world.collect(2000.0)
    deletes = [each for change in world.changes() for each in change[0] if each.spec == HUB]
    assert [each.key for each in deletes] == [ONE]


def test_an_element_that_the_user_had_there_first_is_never_deleted():
    world = World()
    world.apply(world.observe("set.example.org", ONE))
    world.found(HUB, {ONE: "by hand"})
    assert {each.spec for each in world.lacking("set.example.org", ONE)} == {HUB}
    world.collect(2000.0)
    assert [each for change in world.changes() for each in change[0] if each.spec == HUB] == []


def test_what_was_asked_for_in_a_set_of_the_users_is_ours_whatever_became_of_the_request():
    world = World()
    lost = world.observe("set.example.org", ONE)
    world.plan.claim(lost)
    world.apply(world.observe("set.example.org", TWO))
    world.collect(2000.0)
    world.changes()  # the deletion of TWO is sent, and fails
    world.found(HUB, {ONE: "set.example.org.", TWO: "set.example.org."})
    deletes = [each for change in world.changes() for each in change[0] if each.spec == HUB]
    assert {each.key for each in deletes} == {ONE, TWO}


# Policy


def test_cached_names_are_picked_up_by_a_new_policy():
    world = World()
    world.observe("one.lookup.test", ONE)
    world.swap(POLICY + '  - {pattern: "*.lookup.test", ports: [443/TCP]}\n')
    assert world.changes() == []
    world.swap(POLICY.replace("name: plain.example.net", 'pattern: "*.lookup.test"'))
    [(_, adds)] = world.changes()
    assert said(adds) == {"ep.default.ci.port4 93.184.216.34 . tcp . 443 one.lookup.test."}


def test_a_name_that_lost_its_grant_keeps_nothing():
    world = World()
    world.apply(world.observe("any.example.org", ONE))
    world.observe("any.example.org", ONE)
    world.swap(POLICY.replace("name: any.example.org", "name: other.example.org"))
    [(deletes, adds)] = world.changes()
    assert said(deletes) == {"ep.default.ci.addr4 93.184.216.34 any.example.org."}
    assert adds == []


def test_after_a_swap_nothing_is_open_by_the_old_policy():
    world = World()
    world.apply(world.observe("www.example.com", ONE))
    view, name = world.view(), from_text("www.example.com")
    old = view.verdict(name).grants
    world.observe("www.example.com", ONE)
    assert old.open["default/ci"] == {ONE}
    world.swap(POLICY.replace("443/TCP]}", "8443/TCP]}"))
    assert old.open["default/ci"] == set()
    assert "8443" in " ".join(said(world.observe("www.example.com", ONE)))


def test_an_endpoint_that_is_gone_takes_its_cache_and_its_elements_with_it():
    world = World()
    view, name = world.view("web"), from_text("www.example.com")
    world.apply(world.observe("www.example.com", ONE, who="web"))
    endpoints = ENDPOINTS.partition("---")[0] + "---"
    world.swap(POLICY.replace(ENDPOINTS, endpoints))
    assert list(world.plan.caches.endpoints) == ["default/host", "default/ci"]
    [(deletes, adds)] = world.changes()
    assert said(deletes) == {"ep.default.web.port4 93.184.216.34 . tcp . 443 www.example.com."}
    assert adds == []
    assert not world.plan.needs(deletes)
    assert world.plan.observe(view, view.verdict(name).grants, name, (ONE,), 0, 1000.0) == ()
    world.found(deletes[0].spec, {})
    assert deletes[0].spec not in world.plan.applied


# Start


def test_what_a_set_holds_at_the_start_is_learned_if_the_policy_still_grants_it():
    world = World()
    spec = SetSpec(*OURS, "ep.default.ci.port4", 4, ports=True, ours=True)
    content = {
        key_of(ONE, 6, 443): "www.example.com.",
        key_of(TWO, 6, 22): "www.example.com.",
        key_of(address("93.184.216.36"), 6, 443): "gone.example.net.",
        key_of(address("93.184.216.37"), 6, 443): "not a name",
        key_of(address("93.184.216.38"), 6, 443): "",
        key_of(PRIVATE, 6, 443): "www.example.com.",
        key_of(address("93.184.216.39"), 6, 80): r"a\.b.example.com.",
    }
    assert finish(world.plan.adopt(spec, content, 1000.0)) == 1
    world.found(spec, content)
    [zombie] = world.plan.caches.zombies["default/ci"]
    assert (zombie.address, list(zombie.names)) == (ONE, [from_text("www.example.com")])
    assert [*world.plan.caches.zombies["default/web"]] == []
    assert [*world.plan.caches.of("default/ci").items()] == []
    [(deletes, none), (nothing, adds)] = world.changes()
    assert (none, nothing) == ([], [])
    assert {each.key for each in deletes} == content.keys() - {key_of(ONE, 6, 443)}
    assert said(adds) == {"ep.default.ci.port4 93.184.216.34 . tcp . 80 www.example.com."}


def test_what_another_instance_has_just_learned_has_a_lease():
    world = World(zombies_per_endpoint=10)
    spec = SetSpec(*OURS, "ep.default.ci.port4", 4, ports=True, ours=True)
    content = {key_of(ONE, 6, 443): "www.example.com."}
    assert finish(world.plan.adopt(spec, content, 1000.0, fresh=True)) == 1
    assert [*world.plan.caches.zombies["default/ci"]] == []
    [(name, found, lookup)] = world.plan.caches.of("default/ci").items()
    assert (name, found, lookup.expiry) == (from_text("www.example.com"), ONE, 1060.0)  # the least TTL here
    assert world.plan.caches.global_.addresses(name) == (ONE,)


def test_what_the_caches_know_at_the_start_becomes_no_zombie():
    world = World(zombies_per_endpoint=10)
    [element] = world.observe("any.example.org", ONE)
    assert finish(world.plan.adopt(element.spec, {ONE: element.name}, 1000.0)) == 1
    assert [*world.plan.caches.zombies["default/ci"]] == []


def test_what_an_earlier_process_left_in_sets_that_nothing_names_any_more_goes():
    world = World()
    old = SetSpec("inet", "fw4", "old", 4, ports=False, ours=False)
    gone = SetSpec(*OURS, "ep.default.gone.addr4", 4, ports=False, ours=True)
    world.plan.restore([(old, ONE, "www.example.com."), (HUB, TWO, "set.example.org.")], [gone, HUB])
    assert {old, gone, HUB} <= set(world.plan.sets())
    assert set(world.plan.claims()) == {(old, ONE, "www.example.com."), (HUB, TWO, "set.example.org.")}
    world.found(old, {ONE: "www.example.com.", TWO: "by hand"})
    world.found(gone, {ONE: "any.example.org."})
    [(deletes, adds)] = world.write()
    assert {(each.spec, each.key) for each in deletes} == {(old, ONE), (gone, ONE)}
    assert adds == []
    for spec in (old, gone):
        world.found(spec, {})
    assert not {old, gone} & set(world.plan.sets())


def test_a_shared_set_teaches_nothing_by_itself():
    world = World()
    shared = SetSpec(*OURS, "github4", 4, ports=False, ours=True)
    assert finish(world.plan.adopt(shared, {ONE: "set.example.org."}, 1000.0)) == 0
    assert world.wanted() == {}


# Everything together


NAMES = ["www.example.com", "both.example.com", "any.example.org", "set.example.org", "one.lookup.test"]
POOL = [ONE, TWO, SIX, PRIVATE]
STEPS = st.one_of(
    st.tuples(
        st.just("observe"),
        st.sampled_from(NAMES),
        st.lists(st.sampled_from(POOL), min_size=1, max_size=3),
        st.sampled_from(["ci", "web"]),
    ),
    st.tuples(st.just("acknowledge"), st.integers(0, 5)),
    st.tuples(st.sampled_from(["write", "half", "doubt", "swap", "expire", "look"])),
    st.tuples(st.just("found"), st.integers(0, 15), st.sets(st.integers(0, 9)), st.booleans()),
    st.tuples(st.just("forget"), st.integers(0, 15)),
)


class Model(SimpleNamespace):
    """A plan beside a model of what a kernel has told it."""

    def __init__(self):
        super().__init__(
            world=World(zombies_per_endpoint=3),
            asked=[],
            now=1000.0,
            texts=[POLICY, POLICY.replace("443/TCP", "8443/TCP")],
        )

    def observe(self, text, addresses, who):
        view, name = self.world.view(who), from_text(text)
        grants = view.verdict(name).grants
        plan = self.world.plan
        lacking = plan.observe(view, grants, name, tuple(addresses), 0, self.now)
        every = list(plan.opens(view.endpoint.key, [(grants, name)], tuple(addresses)))
        assert set(lacking) == (set(every) if plan.lacking(every) else set())
        self.asked += lacking

    def acknowledge(self, number):
        taken, self.asked = self.asked[:number], self.asked[number:]
        self.world.plan.acknowledged((), taken)

    def write(self):
        """A whole walk: one element at a time asks the same as all together."""
        self.world.write()
        applied = {spec: content for spec, content in self.world.plan.applied.items() if content}
        assert applied == self.world.wanted()
        assert self.world.plan.in_doubt() == 0

    def half(self):
        """A walk whose first transaction is sent, and no more."""
        next(self.world.plan.changes(2), None)

    def look(self):
        """Two passes that see no connection."""
        passes = self.world.plan.caches.passes
        for _ in range(2):
            passes.complete(passes.begin(), self.now)

    def doubt(self):
        self.world.plan.doubt()

    def swap(self):
        self.asked = []
        self.texts.reverse()
        self.world.swap(self.texts[0])

    def expire(self):
        self.now += 100.0
        self.world.collect(self.now)

    def found(self, place, kept, certain):
        specs = self.world.plan.specs()
        spec = specs[place % len(specs)]
        content = self.world.plan.applied.get(spec, {}) | self.world.plan.doubted.get(spec, {})
        kept = {key: name for n, (key, name) in enumerate(content.items()) if n in kept}
        self.world.found(spec, kept, certain=certain)

    def forget(self, place):
        specs = self.world.plan.specs()
        self.world.plan.forget(specs[place % len(specs)])

    def check(self):
        """Whatever is open has every element applied."""
        plan = self.world.plan
        for who in ("ci", "web"):
            view = self.world.view(who)
            for text in NAMES:
                grants = view.verdict(from_text(text)).grants
                for one in grants.open.get(view.endpoint.key, ()):
                    for each in plan.opens(view.endpoint.key, [(grants, from_text(text))], (one,)):
                        assert each.key in plan.applied[each.spec]
        memo = plan._memo.values()
        assert plan._opened == sum(len(each) if isinstance(each, list) else 1 for each in memo)
        assert not any(content.keys() & plan.doubted.get(s, {}).keys() for s, content in plan.applied.items())


@given(st.lists(STEPS, max_size=30))
def test_nothing_is_open_that_is_not_applied_whatever_happens(steps):
    model = Model()
    for verb, *arguments in steps:
        getattr(model, verb)(*arguments)
        model.check()


@pytest.mark.parametrize("cnames", [(), ("tail.example.net",)])
def test_the_hot_path_leaves_the_plan_as_it_is(cnames):
    world = World()
    for _ in range(2):
        world.apply(world.observe("www.example.com", ONE, TWO, cnames=cnames))
    before = (world.plan.applied, dict(world.plan._memo), world.wanted())
    assert world.observe("www.example.com", TWO, ONE, cnames=cnames, now=1001.0) == ()
    assert (world.plan.applied, dict(world.plan._memo), world.wanted()) == before
