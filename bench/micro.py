"""What single operations cost, beside Cilium's Go package: `python bench/micro.py [--json]`.

Each figure is the median of ROUNDS rounds in one process, in microseconds or milliseconds of CPU. Where an
operation is done in steps between which answers pass, the table has its total and the longest step: that is
how long a query may have to wait for it. Memory is what the resident size of a fresh process grows by while
it learns, divided by the number of names and of set elements.

Cilium's figures are those of `pkg/fqdn` (1.19-dev), measured once on such a machine: a virtual machine with
two cores. They are told for comparison; nothing of Cilium runs here.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from dnsproxy.cache.gc import Caches, Collector
from dnsproxy.cache.lookups import LookupCache
from dnsproxy.namemanager.plan import Plan
from dnsproxy.names import from_text
from dnsproxy.rules.documents import read
from dnsproxy.rules.policy import build, load
from dnsproxy.yamldoc import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dnsproxy.endpoints import EndpointTable
    from dnsproxy.rules.policy import Policy, View

ROUNDS = 7
RULES = 1_000
MANY = 10_000  # names that expire
KNOWN = 20_000  # names of which the memory is measured, with two addresses each
ADDRESSES = 2
OWN = 632  # names of one endpoint's rules, the largest policy of Cilium's benchmark
TTL = 3_600  # seconds
POLICY = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: client, labels: {app: bench}}
spec: {addresses: [10.0.0.5]}
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: bench}
spec:
  endpointSelector: {matchLabels: {app: bench}}
  allow:
"""
ENDPOINTS = 200
ENDPOINT = """---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {{name: e{0}, labels: {{app: bench}}}}
spec: {{addresses: [10.1.{0}.0/24]}}
"""


class Row(NamedTuple):
    """One line: the operation, its unit, ours, the longest step where it is done in steps, and Cilium's."""

    what: str
    unit: str
    ours: float
    step: float | None = None
    cilium: float | None = None


def text_of(allowed: Iterable[str]) -> str:
    """Return the documents that allow names and patterns to one endpoint."""
    return POLICY + "".join(f'  - "{name}:443/TCP"\n' for name in allowed)


def view_of(text: str) -> View:
    """Return the policy in documents, as that endpoint has it."""
    return view_in(*load([("policy.yaml", text)]))


def view_in(endpoints: EndpointTable, policy: Policy) -> View:
    """Return a policy as that endpoint has it."""
    return policy.view(next(each for each in endpoints.endpoints if each.name == "client"))


def per_item(count: int, work: Callable[[], object]) -> float:
    """Return microseconds for each of the `count` things that `work` does."""
    begin = time.thread_time()
    work()
    return (time.thread_time() - begin) / count * 1e6


def timed(work: Callable[[], object]) -> float:
    """Return the milliseconds that `work` takes."""
    return per_item(1, work) / 1e3


def middle(measure: Callable[[], float]) -> float:
    """Return the median of some rounds."""
    gc.collect()
    return median(measure() for _ in range(ROUNDS))


# -- verdicts -----------------------------------------------------------------------------------------------


def verdicts(kind: str, form: str, cilium: float) -> list[Row]:
    """Measure verdicts over many rules: of names never asked for, and of known ones."""
    view = view_of(text_of(form.format(number) for number in range(RULES)))
    asked = [from_text(form.replace("*", "www").format(number)) for number in range(RULES)]

    def judge() -> list[object]:
        return [view.verdicts.get(name) or view.verdict(name) for name in asked]

    def first() -> float:
        view.verdicts.clear()
        return per_item(RULES, judge)

    return [
        Row(f"verdict over {RULES:,} {kind}, new name", "us", middle(first), None, cilium),
        Row(
            f"verdict over {RULES:,} {kind}, known name",
            "us",
            middle(lambda: per_item(RULES, judge)),
            None,
            cilium,
        ),
    ]


def rules() -> list[Row]:
    """Measure how long rules take: those of one endpoint, and many for many endpoints."""
    text = text_of(f"name{number}.example.com" for number in range(OWN))
    objects = [each for document in parse(text, "policy.yaml") for each in read(document)[0]]
    endpoints, _ = load([("policy.yaml", text)])

    def build_them() -> float:
        return timed(
            lambda: view_in(endpoints, build(objects, endpoints)).verdict(from_text("name1.example.com"))
        )

    kinds = ("name{}.example.com", "*.zone{}.example.net", "**.deep{}.example.org", "pre*{}.example.info")
    many = text_of(kinds[number % 4].format(number) for number in range(MANY))
    many += "".join(ENDPOINT.format(number) for number in range(ENDPOINTS))
    whole = f"{MANY:,} rules of {ENDPOINTS} endpoints, from text"
    return [
        Row(f"rules of one endpoint with {OWN} names, from documents", "ms", middle(build_them), None, 11),
        Row(
            f"rules of one endpoint with {OWN} names, from text",
            "ms",
            middle(lambda: timed(lambda: view_of(text))),
        ),
        Row(whole, "ms", timed(lambda: load([("policy.yaml", many)]))),
    ]


# -- caches -------------------------------------------------------------------------------------------------


def answers(count: int, first: int = 0) -> list[tuple[bytes, tuple[bytes, ...]]]:
    """Return names, each with public addresses of its own."""
    return [
        (
            from_text(f"name{at}.zone.example.com"),
            tuple(_address(at * ADDRESSES + nth) for nth in range(ADDRESSES)),
        )
        for at in range(first, first + count)
    ]


def _address(number: int) -> bytes:
    return (0x14000000 + number).to_bytes(4, "big")


def updates() -> list[Row]:
    """Measure what an answer costs a lookup cache."""
    found = answers(RULES)
    cache = LookupCache(TTL, 0, MANY)
    clock = count(1)

    def insert(into: LookupCache) -> float:
        now = float(next(clock))
        return per_item(RULES, lambda: [into.insert(name, addresses, TTL, now) for name, addresses in found])

    insert(cache)
    return [
        Row("cache update of a known name", "us", middle(lambda: insert(cache)), None, 1.8),
        Row("cache update of a new name", "us", middle(lambda: insert(LookupCache(TTL, 0, MANY))), None, 2.9),
    ]


def collections() -> list[Row]:
    """Measure rounds of collection: names into zombies, zombies that stay, zombies that go."""
    rounds = [_rounds() for _ in range(ROUNDS)]
    titles = ("names into zombies", "zombies, all kept", "zombies, all given up")
    figures = (63.0, 13.7, 13.7)
    return [
        Row(
            f"collecting {MANY:,} {title}", "ms", *(median(part) for part in zip(*steps, strict=True)), theirs
        )
        for title, steps, theirs in zip(titles, zip(*rounds, strict=True), figures, strict=True)
    ]


def _rounds() -> list[tuple[float, float]]:
    """Return total and longest step of three rounds over the same names."""
    caches = Caches(
        minimum_ttl=TTL, addresses_per_name=0, names_per_endpoint=MANY, zombies_per_endpoint=MANY * ADDRESSES
    )
    for at, (name, addresses) in enumerate(answers(MANY)):
        now = at / MANY  # within one second
        caches.of("default/client").insert(name, addresses[:1], TTL, now)
        caches.global_.insert(name, addresses[:1], TTL, now)
    collector = Collector(caches)
    found = [_round(collector, TTL + 2.0), _round(collector, TTL + 3.0)]
    for at in (TTL + 4.0, TTL + 5.0):  # two looks at the connections, which see none
        caches.passes.complete(caches.passes.begin(), at)
    found.append(_round(collector, TTL + 6.0))
    left = len(caches.of("default/client")) + len(caches.zombies["default/client"]) + len(caches.global_)
    assert not left, "all were given up"
    return found


def _round(collector: Collector, now: float) -> tuple[float, float]:
    gc.collect()
    steps, done = [], False
    while not done:
        begin = time.thread_time()
        done = collector.step(now).done
        steps.append((time.thread_time() - begin) * 1e3)
    return sum(steps), max(steps)


# -- memory -------------------------------------------------------------------------------------------------


def memory() -> list[Row]:
    """Measure octets in fresh processes: with the name's elements in a set, and without."""
    with_sets, without = (_grown(allowed) for allowed in ("*.zone.example.com", "*"))
    return [
        Row(f"memory of a known name with {ADDRESSES} addresses", "octets", without),
        Row("memory of an element, acknowledged by the kernel", "octets", (with_sets - without) / ADDRESSES),
    ]


def _grown(allowed: str) -> float:
    command = [sys.executable, __file__, "--grow", allowed]
    done = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(3)]
    return median(map(float, done))


def grow(allowed: str) -> float:
    """Learn names and return the octets that each took; with `*` they may be asked, and open nothing."""
    text = (
        text_of([allowed]) if allowed != "*" else POLICY.replace("allow:", 'resolve: ["*.zone.example.com"]')
    )
    endpoints, policy = load([("policy.yaml", text)])
    caches = Caches(minimum_ttl=TTL, addresses_per_name=1_000, names_per_endpoint=100_000)
    plan, view = Plan(policy, endpoints, caches=caches), view_in(endpoints, policy)
    gc.collect()
    before = resident()
    for at in range(KNOWN):
        ((name, addresses),) = answers(1, at)
        grants = (view.verdicts.get(name) or view.verdict(name)).grants
        elements = plan.observe(view, grants, name, addresses, TTL, at / 1_000)
        plan.acknowledged([], elements)
        plan.observe(view, grants, name, addresses, TTL, at / 1_000)
    gc.collect()
    return (resident() - before) / KNOWN


def resident() -> int:
    """Return the resident octets of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- the table ----------------------------------------------------------------------------------------------


def rows() -> list[Row]:
    """Measure everything."""
    return [
        *verdicts("patterns", "*.zone{}.example.com", 446),
        *verdicts("exact names", "name{}.example.com", 1.8),
        *rules(),
        *updates(),
        *collections(),
        *memory(),
    ]


def table(found: Iterable[Row]) -> str:
    """Return the rows in Markdown."""
    lines = ["| operation | unit | ours | longest step | Cilium's Go package |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.what} | {row.unit} | {number(row.ours)} | {number(row.step)} | {number(row.cilium)} |"
        for row in found
    ]
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Return three digits of a number."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = argparse.ArgumentParser(description="Single operations, beside Cilium's.")
    arguments.add_argument("--json", action="store_true", help="print JSON")
    arguments.add_argument("--grow", metavar="PATTERN", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.grow:
        print(grow(given.grow))
        return
    found = rows()
    print(json.dumps([row._asdict() for row in found], indent=2) if given.json else table(found))


if __name__ == "__main__":
    main()
