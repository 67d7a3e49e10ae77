"""Metrics for Prometheus, read off the live objects when somebody asks; nothing is done for them before.

Where the meaning is that of one of Cilium's metrics, the name is Cilium's behind our prefix (`dnsproxy_` for
`cilium_`), with the same labels as far as we can fill them. No label holds a domain name: names come from
packets. Series per endpoint are made only if they are asked for.

`proxy_upstream_reply_seconds` has the label `scope` as in Cilium: `upstreamTime` from the query to the usable
answer, `dataplaneTime` what an answer waited for the kernel. Cilium's label `error` is not there, which is
the same as its being empty: only usable answers are timed; what never came is in `queries_timeouts_total`.

`policy_l7_total` counts requests and responses alike, as Cilium does: each as received and as what became of
it. `parse_errors` are queries that cannot be read, and responses that we had to make because none came.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector as Source

from dnsproxy.admin import views
from dnsproxy.servers import FAILURES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from dnsproxy.admin.views import State
    from dnsproxy.histogram import Histogram

PREFIX: Final = "dnsproxy_"
STATES: Final = ("starting", views.ENFORCING, "not enforcing", views.ONLY_SHOWN)

QUERIES: Final = {  # what `Exchange.counts` counts
    "queries": "messages that came to be answered",
    "malformed": "messages that are no query that can be read",
    "strangers": "queries from an address that belongs to no endpoint",
    "denied": "queries that policy refused",
    "forwarded": "queries sent to an upstream server",
    "joined": "queries answered together with the same one in flight",
    "limited": "queries refused because too many are in flight",
    "answers": "usable answers from upstream",
    "strays": "messages from upstream that answer no question of ours",
    "broken": "answers from upstream that cannot be read",
    "retries": "queries sent to another server",
    "timeouts": "queries that no server answered in time",
    "failures": "queries ended for trouble that is not the client's",
    "held": "answers that waited for the kernel",
}


def registry_of(state: State, *, per_endpoint: bool = False) -> CollectorRegistry:
    """Return a registry of our own: the state, and what the kernel says of this process."""
    registry = CollectorRegistry()
    registry.register(Reader(state, per_endpoint=per_endpoint))
    ProcessCollector(registry=registry)
    return registry


def exposed(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return all metrics as text in a format that the asker takes, and its content type."""
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


class Reader(Source):
    """Reads all metrics off a state."""

    def __init__(self, state: State, *, per_endpoint: bool) -> None:
        self._state = state
        self._per_endpoint = per_endpoint

    def describe(self) -> Iterable[Metric]:
        """Say nothing beforehand; registering must not read anything."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with its value of now."""
        state = self._state
        manager = views.of_sets(state)
        yield _gauge("build_info", "constant 1, with the version", [({"version": state.version}, 1)])
        yield from _queries(state)
        yield from _domains(state)
        yield from _caches(state)
        yield from _sets(state, manager)
        yield from _passes(state)
        yield from _upkeep(state)
        if self._per_endpoint:
            yield from _endpoints(state)


def _queries(state: State) -> Iterator[Metric]:
    counts = state.exchange.counts
    for key, value in counts.items():
        name = "queries_total" if key == "queries" else f"queries_{key}_total"
        yield _counter(name, QUERIES.get(key, key), [({}, value)])
    verdicts = {
        "received": counts["queries"] + counts["answers"] + counts["failures"],
        "forwarded": counts["forwarded"] + counts["joined"] + counts["answers"],
        "denied": counts["denied"] + counts["strangers"],
        "parse_errors": counts["malformed"] + counts["failures"],
    }
    yield _counter(
        "policy_l7_total",
        "requests and responses, by what became of them",
        [({"rule": rule, "proxy_type": "fqdn"}, value) for rule, value in verdicts.items()],
    )
    yield _gauge("queries_in_flight", "queries waiting for upstream", [({}, state.exchange.flying)])
    yield _histogram(
        "proxy_upstream_reply_seconds",
        "time to a usable answer from upstream, and waited for the kernel",
        {"upstreamTime": state.exchange.upstream_seconds, "dataplaneTime": state.manager.hold_seconds},
    )
    yield _gauge(
        "upstream_usable",
        "whether a server answers",
        [({"server": str(each)}, int(each.failures < FAILURES)) for each in state.servers()],
    )


def _caches(state: State) -> Iterator[Metric]:
    caches, table = state.plan.caches, state.endpoints()
    endpoints = caches.endpoints.values()
    yield _gauge("endpoints", "endpoints", [({}, len(table.endpoints))])
    yield _gauge("fqdn_selectors", "selectors in force", [({}, len(state.plan.policy.selectors))])
    yield _gauge(
        "cache_names",
        "names in the caches",
        [({"cache": "endpoints"}, sum(map(len, endpoints))), ({"cache": "global"}, len(caches.global_))],
    )
    yield _gauge(
        "cache_ips",
        "pairs of name and address in the caches",
        [
            ({"cache": "endpoints"}, sum(each.pairs for each in endpoints)),
            ({"cache": "global"}, caches.global_.pairs),
        ],
    )
    deleted = state.collector.names_deleted
    yield _counter("fqdn_gc_deletions_total", "names that lost addresses in a collection", [({}, deleted)])
    zombies = sum(map(len, caches.zombies.values()))
    yield _gauge("zombies", "addresses past their lease", [({}, zombies)])
    idle, live = caches.evicted()
    yield _counter(
        "zombies_evicted_total",
        "addresses past their lease that made room, by whether the last pass saw a connection",
        [({"live": "no"}, idle), ({"live": "yes"}, live)],
    )


def _sets(state: State, manager: Mapping[str, Any]) -> Iterator[Metric]:
    states = [({"state": each}, int(each == manager["state"])) for each in STATES]
    yield _gauge("sets_state", "1 for the state that the sets are in", states)
    yield _gauge("sets_failing", "sets that cannot be filled", [({}, len(manager["failing"]))])
    yield _gauge("sets_elements", "elements that the kernel has acknowledged", [({}, manager["applied"])])
    yield _gauge("sets_doubted", "elements that may be there and do not count", [({}, manager["doubted"])])
    for key, help_ in {
        "batches": "transactions",
        "elements": "elements written or deleted",
        "repairs": "repairs",
        "drift": "elements that somebody else had taken or added",
        "failures": "calls to the kernel that failed",
    }.items():
        yield _counter(f"sets_{key}_total", help_, [({}, manager[key])])
    yield _counter(
        "sets_cut_total", "addresses and CNAME targets left out of answers", [({}, state.plan.cut)]
    )
    ended = [({"end": end}, manager[end]) for end in ("released", "timeouts", "refused")]
    yield _counter("holds_ended_total", "answers that waited for the kernel, by how it ended", ended)
    yield _gauge("holds_waiting", "answers that wait for the kernel", [({}, manager["waiting"])])
    yield _counter(
        "proxy_datapath_update_timeout_total",
        "answers for which the kernel took too long",
        [({}, manager["timeouts"])],
    )


def _passes(state: State) -> Iterator[Metric]:
    passes = state.plan.caches.passes
    tracker = state.tracker
    yield _counter("conntrack_passes_begun_total", "looks through the connections", [({}, passes.begun)])
    yield _counter("conntrack_passes_failed_total", "looks that were not completed", [({}, tracker.failures)])
    yield _gauge("conntrack_pass_seconds", "what the last one took", [({}, tracker.seconds)])
    yield _gauge("conntrack_entries", "connections that the last one saw", [({}, tracker.entries)])
    completed = passes.completed
    yield _gauge("conntrack_last_completed_pass", "serial of the last that was completed", [({}, completed)])
    yield _gauge("conntrack_observing", "whether connections can be seen", [({}, int(passes.observing))])
    if completed:
        age = max(0.0, state.clock() - passes.started_at)
        yield _gauge("conntrack_pass_age_seconds", "time since that one began", [({}, age)])


def _upkeep(state: State) -> Iterator[Metric]:
    faults = len(state.faults())
    yield _gauge("reload_faults", "files that are not in force because they have faults", [({}, faults)])
    succeeded, ended_at = state.reloaded()
    yield _gauge("reload_success", "whether the last reload succeeded", [({}, int(succeeded))])
    at = ended_at + state.ahead()
    yield _gauge("reload_timestamp_seconds", "when the last reload ended, or the start", [({}, at)])
    yield _gauge(
        "policy_notes", "parts of documents that are not enforced", [({}, len(state.plan.policy.notes))]
    )
    yield _gauge("ready", "whether /readyz says so", [({}, int(not views.failing(state)))])
    yield _gauge("event_subscribers", "who looks on at events", [({}, len(state.events))])
    store = state.store()
    if store is not None:
        yield _gauge(
            "store_problem", "whether the state cannot be written", [({}, int(bool(store["problem"])))]
        )
        if store["age"] is not None:
            yield _gauge("store_age_seconds", "age of the state on disk", [({}, store["age"])])


def _endpoints(state: State) -> Iterator[Metric]:
    caches = state.plan.caches
    yield _gauge(
        "fqdn_active_names",
        "names in the cache of an endpoint",
        [({"endpoint": key}, len(each)) for key, each in caches.endpoints.items()],
    )
    yield _gauge(
        "fqdn_active_ips",
        "pairs of name and address in the cache of an endpoint",
        [({"endpoint": key}, each.pairs) for key, each in caches.endpoints.items()],
    )
    yield _gauge(
        "fqdn_alive_zombie_connections",
        "addresses past their lease whose connections were not over at the last collection",
        [({"endpoint": key}, each.alive) for key, each in caches.zombies.items()],
    )
    yield _counter(
        "endpoint_zombies_evicted_total",
        "addresses past their lease that made room, of an endpoint",
        [({"endpoint": key}, each.evicted) for key, each in caches.zombies.items()],
    )
    yield _gauge(
        "set_elements",
        "elements in a set",
        [({"set": str(spec)}, len(content)) for spec, content in state.plan.applied.items()],
    )


Samples: TypeAlias = "Sequence[tuple[dict[str, str], float]]"


def _domains(state: State) -> Iterator[Metric]:
    """Yield what there is of DynDNS. Hosts are the operator's own few, not names that clients ask for."""
    sync = state.domains()
    if sync is None:
        return
    updates = [({"host": host, "code": code}, count) for (host, code), count in sync.updates.items()]
    yield _counter("dyndns_updates", "requests to the provider, by its answer", updates)
    checks = [
        ({"family": family, "result": result}, count) for (family, result), count in sync.checks.items()
    ]
    yield _counter("dyndns_checks", "looks for our own address, by what came of it", checks)
    views_ = sync.views()
    failed = [({"host": view.domain.hostname}, shown.consecutive_failures) for view, shown in views_]
    yield _gauge("dyndns_consecutive_failures", "requests that failed in a row", failed)
    well = [({"host": view.domain.hostname}, int(shown.last_result is True)) for view, shown in views_]
    yield _gauge("dyndns_in_sync", "whether the record is as it shall be", well)
    held = [({"host": view.domain.hostname}, int(bool(shown.held_reason))) for view, shown in views_]
    yield _gauge("dyndns_held", "whether nothing is sent for a reason that the record's status names", held)


def _gauge(name: str, help_: str, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(PREFIX + name, help_, labels=_labels(samples)), samples)


def _counter(name: str, help_: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(PREFIX + name, help_, labels=_labels(samples)), samples)


def _labels(samples: Samples) -> list[str]:
    return list(samples[0][0]) if samples else []


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def _histogram(name: str, help_: str, scopes: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, help_, labels=["scope", "protocol_l7"])
    for scope, each in scopes.items():
        bounds = [*map(str, each.bounds), "+Inf"]
        family.add_metric([scope, "dns"], list(zip(bounds, accumulate(each.counts), strict=True)), each.sum)
    return family
