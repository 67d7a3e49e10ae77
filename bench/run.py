"""What a query costs, ours beside others', in one run and one table.

    make bench                                                    everything, about a quarter of an hour
    bench/run.py --scenario a --rounds 1 --seconds 2 --only dnsproxy,floor                 parts of it

Needs root, since it makes a network namespace and fills nftables sets; nothing outside of it is touched.
"""

from __future__ import annotations

import argparse
import os
import sys
from statistics import median

from forwarders import FORWARDERS, Run
from load import ask
from world import DOMAIN, KNOWN, World

from dnsproxy.demo.lab import Lab, require
from dnsproxy.errors import DnsproxyError


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description="Measure what a query costs.")
    parser.add_argument("--scenario", default="a")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", default="", help="contestants by name, with commas")
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    options = arguments()
    if os.geteuid():
        print(
            "make bench needs root: it makes a network namespace and fills nftables sets; try sudo make bench"
        )
        return 1
    try:
        require("nsd", "nsd-control", "dnsperf", "dig", "nft", "cc")
        with Lab() as lab:
            known(World(lab), options)
    except DnsproxyError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def known(world: World, options: argparse.Namespace) -> None:
    """Measure allowed names whose addresses are known."""
    wanted = options.only.split(",") if options.only else [forwarder.name for forwarder in FORWARDERS]
    queries = world.queries("known", [f"n{number}.{DOMAIN}" for number in range(KNOWN)])
    runs = [Run(f, world, world.directory / f"run-{f.name}") for f in FORWARDERS if f.name in wanted]
    costs: dict[str, list[float]] = {run.forwarder.name: [] for run in runs}
    for run in runs:
        run.start()
        idle = run.tree().resident()
        ask(run, queries)
        print(f"{run.forwarder.title}: {idle:.1f} MB idle, {run.tree().resident():.1f} MB at {KNOWN} names")
    for number in range(options.rounds):
        for run in runs[number % len(runs) :] + runs[: number % len(runs)]:
            load = ask(run, queries, seconds=options.seconds)
            costs[run.forwarder.name].append(load.cost)
            print(f"{run.forwarder.title}: {load.cost:.1f} us/query, {load.rate:.0f}/s, lost {load.lost}")
    for name, all_of_it in costs.items():
        print(f"{name:12} {median(all_of_it):6.1f} us/query")


if __name__ == "__main__":
    sys.exit(main())
