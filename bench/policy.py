"""How long an allow list takes to load, and what a verdict costs with few and with many rules.

    python bench/policy.py

Prints seconds of CPU for loading patterns and 200 endpoints from text, and microseconds of CPU per verdict:
the first that a pattern decides, a new name of a pattern that decided before, and a known name. Verdicts are
kept, so the first two are paid once per pattern and once per name.
"""

from __future__ import annotations

import time

from dnsproxy.names import from_text
from dnsproxy.rules.policy import load

ENDPOINTS = 200
NAMES = 5_000
ASKED = ("?.zone{}.example.net", "?.x.deep{}.example.org", "pre?{}.example.info")


def documents(patterns: int) -> str:
    """Return endpoints and one policy that selects them all."""
    kinds = ("name{}.example.com", "*.zone{}.example.net", "**.deep{}.example.org", "pre*{}.example.info")
    entries = "\n".join(f'  - "{kinds[number % 4].format(number)}:443/TCP"' for number in range(patterns))
    endpoints = "".join(
        f"apiVersion: dnsproxy/v1\nkind: Endpoint\nmetadata: {{name: e{number}, labels: {{app: x}}}}\n"
        f"spec: {{addresses: [10.0.{number}.0/24]}}\n---\n"
        for number in range(ENDPOINTS)
    )
    policy = "apiVersion: dnsproxy/v1\nkind: EgressPolicy\nmetadata: {name: all}\nspec:\n"
    return f"{endpoints}{policy}  endpointSelector: {{matchLabels: {{app: x}}}}\n  allow:\n{entries}\n"


def measured(patterns: int) -> tuple[float, float, float, float]:
    """Return seconds to load, and microseconds for the first, a new and a known verdict."""
    text = documents(patterns)
    start = time.process_time()
    endpoints, policy = load([("policies.yaml", text)])
    loaded = time.process_time() - start
    view = policy.view(endpoints.endpoints[1])
    costs = []
    for letter in "abb":
        kinds = (
            f"{letter}.zone{{}}.example.net",
            f"{letter}.x.deep{{}}.example.org",
            f"pre{letter}{{}}.example.info",
        )
        asked = [from_text(kinds[n % 3].format(n % patterns // 4 * 4 + n % 3 + 1)) for n in range(NAMES)]
        asked = list(dict.fromkeys(asked))
        start = time.process_time()
        for name in asked:
            view.verdicts.get(name) or view.verdict(name)
        costs.append((time.process_time() - start) / len(asked) * 1e6)
    return loaded, *costs


def main() -> None:
    """Print the table."""
    print("patterns  load s  first us  new us  known us")
    for patterns in (12, 100, 1_000, 10_000):
        loaded, first, new, known = measured(patterns)
        print(f"{patterns:8}  {loaded:6.2f}  {first:8.2f}  {new:6.2f}  {known:8.2f}")


if __name__ == "__main__":
    main()
