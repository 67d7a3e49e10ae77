"""What a query costs, ours beside others', in one run and one table.

    sudo make bench                               everything, about twenty minutes
    .venv/bin/python bench/run.py --scenario a --rounds 1 --seconds 2 --only dnsproxy,floor

Needs root, since it makes a network namespace and fills nftables sets; nothing outside of it is touched.
Exit code 1: a ratio does not hold, or something could not be measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import report
from forwarders import FORWARDERS
from scenarios import SCENARIOS, Bench
from world import Workshop

from dnsproxy.demo.lab import require
from dnsproxy.errors import DnsproxyError

_ALL = "".join(SCENARIOS)


def main() -> int:
    """Measure, print, write."""
    options = _arguments()
    if os.geteuid():
        print("bench: needs root, to make a network namespace and nftables sets in it: sudo make bench")
        return 1
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # where nft, nsd and most contestants are
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is removed
    try:
        require("nsd", "dnsperf", "dig", "nft", "ip")
        with TemporaryDirectory(prefix="dnsproxy-bench-") as directory:
            bench = Bench(
                Workshop(Path(directory)), options.only, options.rounds, options.seconds, options.quick
            )
            for letter in options.scenario:
                SCENARIOS[letter](bench)
    except DnsproxyError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    whole = options.scenario == _ALL and not options.only
    return report.publish(bench, options.json, options.write if whole else None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what a query costs, ours beside others'.")
    add = parser.add_argument
    add("--scenario", type=_letters, default=_ALL, help="letters, see bench/scenarios.py (all)")
    add("--only", type=_contestants, default=(), help=f"of {', '.join(one.name for one in FORWARDERS)} (all)")
    add("--rounds", type=int, default=5, help="measurements of each, of which the median counts (5)")
    add("--seconds", type=float, default=3.0, help="of each measurement (3)")
    add("--quick", action="store_true", help="leave a million names out")
    add("--json", type=Path, default=Path("dist/bench.json"), help="file for all that was measured")
    add("--write", type=Path, help="document that gets the tables of a whole run, between its marker lines")
    return parser.parse_args()


def _letters(text: str) -> str:
    if unknown := set(text) - set(SCENARIOS):
        raise argparse.ArgumentTypeError(
            f"no scenario {', '.join(sorted(unknown))}; there are {''.join(SCENARIOS)}"
        )
    return text


def _contestants(text: str) -> list[str]:
    wanted = text.split(",")
    if unknown := set(wanted) - {one.name for one in FORWARDERS}:
        raise argparse.ArgumentTypeError(f"no contestant {', '.join(sorted(unknown))}")
    return wanted


if __name__ == "__main__":
    sys.exit(main())
