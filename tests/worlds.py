"""Small worlds for tests: the real core, put together as the product does it."""

from __future__ import annotations

from dnsproxy.cache.gc import Caches
from dnsproxy.namemanager.plan import Plan


def make_plan(endpoints, policy, *, private=()):
    caches = Caches(minimum_ttl=3600, addresses_per_name=1000, names_per_endpoint=100_000)
    return Plan(policy, endpoints, caches=caches, table=("inet", "dnsproxy"), private=private)
