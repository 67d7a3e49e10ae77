"""What was measured, as tables, and whether the ratios hold that the project promises.

A ratio is taken within each round, and the median of these counts: what disturbs a round disturbs both sides.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from os import cpu_count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from forwarders import FORWARDERS, OURS, Forwarder

from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latency import Delays
    from load import Load
    from scenarios import Bench, Results

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_TOGETHER = {"a", "b", "c", "f"}  # scenarios in which contestants stand beside each other
_OURS_ALONE = {"d", "e", "g"}  # those in which we stand beside ourselves
_WAITS = "an answer with new addresses leaves after"
_VERSIONS = {
    "nsd": ["nsd", "-v"],
    "dnsperf": ["dnsperf", "-h"],
    "nft": ["nft", "--version"],
    "dnsdist": ["dnsdist", "--version"],
    "smartdns": ["smartdns", "-v"],
    "dnsmasq": ["dnsmasq", "--version"],
    "unbound": ["unbound", "-V"],
}


@dataclass(frozen=True)
class Check:
    """One promise: a value that may be at most `limit`."""

    text: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Tell whether it is kept."""
        return self.value <= self.limit

    def __str__(self) -> str:
        return f"{'pass' if self.holds else 'FAIL'}  {self.value:8.3f}  at most {self.limit:<6g} {self.text}"


def publish(bench: Bench, file: Path, document: Path | None) -> int:
    """Print tables and checks, write the JSON file and the document; return the exit code."""
    results, about = bench.results, _about(bench)
    found = checks(results)
    text = "\n".join([*about, "", *tables(results), "```text", *map(str, found), "```"])
    print(f"\n{text}")
    file.parent.mkdir(parents=True, exist_ok=True)
    promises = [{**asdict(check), "holds": check.holds} for check in found]
    kept = {"about": about, "results": asdict(results), "checks": promises}
    file.write_text(json.dumps(kept, indent=1))
    if document is not None:
        _write(document, text)
    return 0 if all(check.holds for check in found) else 1


def _write(document: Path, text: str) -> None:
    """Put the text between the marker lines of a document."""
    before, found, rest = document.read_text().partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise DnsproxyError(f"{document} has no lines {BEGIN} and {END} to write between")
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


# --- the promises


def checks(results: Results) -> list[Check]:
    """Return the promises for which everything was measured."""
    ours = OURS.name
    ratios = [
        ("a: CPU per query to that of the C floor", ("a", ours), ("a", "floor"), 2.0),
        ("a: ... to that of SmartDNS", ("a", ours), ("a", "smartdns"), 0.75),
        ("a: ... to that of SmartDNS with nftset", ("a", ours), ("a", "smartdns-nft"), 0.45),
        ("a: ... to that of dnsmasq with nftset", ("a", ours), ("a", "dnsmasq-nft"), 0.15),
        ("b: first-seen, to SmartDNS with nftset", ("b", ours), ("b", "smartdns-nft"), 1.0),
        ("c: rotating, to SmartDNS with nftset", ("c", ours), ("c", "smartdns-nft"), 1.0),
        ("d: denied to known", ("d", "denied"), ("d", "known"), 0.5),
        ("e: 10,000 patterns, 200 endpoints to 1, 1", ("e", "10,000 patterns"), ("e", "one pattern"), 1.05),
    ]
    values = [(text, _ratio(results, mine, other), limit) for text, mine, other, limit in ratios]
    found = [Check(text, value, limit) for text, value, limit in values if value is not None]
    return [
        *found,
        *_growth_checks(results),
        *_delay_checks(results),
        *_memory_checks(results),
        *_loss_checks(results),
    ]


def _ratio(results: Results, left: tuple[str, str], right: tuple[str, str]) -> float | None:
    ours = results.loads.get(left[0], {}).get(left[1])
    theirs = results.loads.get(right[0], {}).get(right[1])
    if not ours or not theirs:
        return None
    return median(one.cost / other.cost for one, other in zip(ours, theirs, strict=True))


def _growth_checks(results: Results) -> list[Check]:
    found = []
    for scenario in ("g rules", "g names", "g elements"):
        costs = [_middle(loads) for loads in results.loads.get(scenario, {}).values()]
        if costs:
            found.append(Check(f"{scenario}: dearest to cheapest", max(costs) / min(costs), 1.15))
    return found


def _delay_checks(results: Results) -> list[Check]:
    known, first, ours = results.delays.get("known", {}), results.delays.get("first", {}), OURS.name
    found = []
    if ours in known and "floor" in known:
        more = _slowest(known[ours]) - _slowest(known["floor"])
        found.append(Check("l: ms of p99 at 100 queries/s beyond the floor's", more, 1.0))
    if ours in known and ours in first:
        more = _slowest(first[ours]) - _slowest(known[ours])
        found.append(Check("l: ms of p99 at 1,000 first-seen/s beyond that of known names", more, 1.0))
    return found


def _memory_checks(results: Results) -> list[Check]:
    if OURS.name not in results.memory:
        return []
    return [Check("MB resident at 20,000 known names", results.memory[OURS.name].known, 100)]


def _loss_checks(results: Results) -> list[Check]:
    """Every query of ours is answered, and as expected."""
    failed: dict[str, int] = {}
    for scenario, by_label in results.loads.items():
        where = scenario if scenario[0] == "h" else "a to g"
        for label, loads in by_label.items():
            if label == OURS.name or scenario[0] in _OURS_ALONE:
                lost = sum(load.failed(_expected(label)) for load in loads)
                failed[where] = failed.get(where, 0) + lost
    return [Check(f"{where}: queries of ours lost or failed", lost, 0) for where, lost in failed.items()]


def _expected(label: str) -> str:
    return "NXDOMAIN" if label == "denied" else "NOERROR"


def _middle(loads: Sequence[Load]) -> float:
    return median(load.cost for load in loads)


def _slowest(delays: Sequence[Delays]) -> float:
    return median(delay.p99 for delay in delays)


# --- the tables


def tables(results: Results) -> list[str]:
    """Return the lines of all tables for which something was measured."""
    return [
        *_beside_others(results),
        *_ours(results),
        *_growth(results),
        *_losses(results),
        *_first_seen(results),
    ]


def _beside_others(results: Results) -> list[str]:
    measured = {label for scenario in _TOGETHER for label in results.loads.get(scenario, {})}
    shown = [one for one in FORWARDERS if one.name in measured | set(results.delays.get("known", {}))]
    costs = [
        "CPU us per query",
        "a known (least-most)",
        "to floor",
        "b first-seen",
        "c rotating",
        "f TCP",
        _WAITS,
    ]
    rest = ["", "a answers/s", "p50 ms added", "p99 ms added", "MB idle", "MB at 20,000 names"]
    return [
        *_table(costs, [_costs(results, one) for one in shown]),
        *_table(rest, [_rest(results, one) for one in shown]),
    ]


def _costs(results: Results, one: Forwarder) -> list[str]:
    known, *others = (_cost(results.loads.get(scenario, {}).get(one.name, [])) for scenario in "abcf")
    ratio = _ratio(results, ("a", one.name), ("a", "floor"))
    return [one.title, known, f"{ratio:.2f}" if ratio else "", *others, one.sets]


def _rest(results: Results, one: Forwarder) -> list[str]:
    rates = [load.rate for load in results.loads.get("a", {}).get(one.name, [])]
    memory = results.memory.get(one.name)
    sizes = [f"{memory.idle:.0f}", f"{memory.known:.0f}"] if memory else ["", ""]
    return [one.title, f"{median(rates):,.0f}" if rates else "", *_added(results, one.name), *sizes]


def _cost(loads: Sequence[Load]) -> str:
    """Return the median cost with its spread, marked where queries failed."""
    if not loads:
        return ""
    costs = [load.cost for load in loads]
    failed = sum(load.failed() for load in loads) / sum(load.sent for load in loads)
    mark = f", {failed:.1%} failed" if failed else ""
    return f"{median(costs):.1f} ({min(costs):.1f}-{max(costs):.1f}{mark})"


def _added(results: Results, name: str) -> list[str]:
    """Return what a forwarder adds to the time that NSD takes itself."""
    known = results.delays.get("known", {})
    if name not in known:
        return ["", ""]
    pairs = list(zip(known[name], known["NSD"], strict=True))
    p50 = median(one.p50 - nsd.p50 for one, nsd in pairs)
    p99 = median(one.p99 - nsd.p99 for one, nsd in pairs)
    return [f"{p50:.3f}", f"{p99:.3f}"]


def _ours(results: Results) -> list[str]:
    rows = []
    for scenario in ("d", "e", "g rules", "g names", "g elements"):
        by_label = results.loads.get(scenario, {})
        for label, loads in by_label.items():
            first = _middle(next(iter(by_label.values())))
            costs = [load.cost for load in loads]
            spread = f"{min(costs):.1f}-{max(costs):.1f}"
            rows.append([scenario, label, f"{median(costs):.1f}", spread, f"{median(costs) / first:.2f}"])
    return _table(["dnsproxy", "", "CPU us per query", "least-most", "to the first"], rows)


def _growth(results: Results) -> list[str]:
    """Return what a name and an element take, from the smallest and the largest run that were measured."""
    grown = [
        (int(label.split()[0].replace(",", "")), m) for label, m in results.memory.items() if "names" in label
    ]
    if len(grown) < 2:
        return []
    (few, small), (many, large) = grown[0], grown[-1]
    octets = ((large.known - large.idle) - (small.known - small.idle)) * 1e6 / (many - few)
    sizes = f"{few:,} to {many:,} names of two addresses"
    return [f"Resident memory, {sizes}: {octets:,.0f} octets per name, {octets / 2:,.0f} per element.", ""]


def _losses(results: Results) -> list[str]:
    kinds = [kind for kind in results.loads if kind.startswith("h ")]
    rows = []
    for one in FORWARDERS:
        cells = [_lost(results.loads[kind].get(one.name, [])) for kind in kinds]
        if any(cells):
            rows.append([one.title, *cells])
    return _table(["queries lost or failed, in flight:", *(kind.removeprefix("h ") for kind in kinds)], rows)


def _lost(loads: Sequence[Load]) -> str:
    if not loads:
        return ""
    codes: dict[str, int] = {}
    for load in loads:
        for code, count in load.codes.items():
            codes[code] = codes.get(code, 0) + count
    failed = sum(load.failed() for load in loads)
    wrong = "".join(f", {count:,} {code}" for code, count in codes.items() if code != "NOERROR")
    return f"{failed:,} of {sum(load.sent for load in loads):,}{wrong}"


def _first_seen(results: Results) -> list[str]:
    titles = {one.name: one.title for one in FORWARDERS}
    rows = [
        [titles[label], f"{median(d.p50 for d in delays):.3f}", f"{_slowest(delays):.3f}", _missing(delays)]
        for label, delays in results.delays.get("first", {}).items()
    ]
    return _table(["1,000 first-seen names per second", "p50 ms", "p99 ms", "not answered"], rows)


def _missing(delays: Sequence[Delays]) -> str:
    return f"{sum(delay.missing for delay in delays):,}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table that reads well as it is and in Markdown; nothing without rows."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return [*(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines), ""]


# --- where and with what


def _about(bench: Bench) -> list[str]:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    missing = [one.title for one in FORWARDERS if not one.installed()]
    machine = f"{cpu_count()} CPUs ({model[1] if model else platform.machine()}), Linux {platform.release()}"
    ours = f"Python {platform.python_version()}, {_ours_version()}"
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {machine}, {ours}; {bench.rounds} rounds of {bench.seconds:g} s.",
        "; ".join(filter(None, map(_version, _VERSIONS))) + ".",
    ]
    return [*lines, f"Not installed, so left out: {', '.join(missing)}."] if missing else lines


def _ours_version() -> str:
    with_loop = f"uvloop {version('uvloop')}" if "uvloop" in OURS.title else "no uvloop"
    return f"dnsproxy {version('dnsproxy')}, {with_loop}"


def _version(program: str) -> str:
    """Return the name of a program with its version, as it says it itself; nothing if it is not there."""
    try:
        done = subprocess.run(_VERSIONS[program], capture_output=True, text=True, timeout=5, check=False)
    except OSError:
        return ""
    found = re.search(r"\d+(\.\d+)+|(?<=smartdns )\S+", done.stdout + done.stderr)
    return f"{program} {found[0]}" if found else ""
