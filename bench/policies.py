"""The documents that the proxy is measured with: who asks, and what they may ask for."""

from __future__ import annotations

from world import CLIENT, DOMAIN

_OTHERS = "10.{}.{}.0/24"


def documents(patterns: int = 1, endpoints: int = 1, *, domain: str = DOMAIN) -> str:
    """Return a policy of so many patterns that selects so many endpoints; one of each is the measured one."""
    kinds = ("name{}.example.com", "*.zone{}.example.net", "**.deep{}.example.org", "pre*{}.example.info")
    allowed = [f"*.{domain}", *(kinds[number % 4].format(number) for number in range(1, patterns))]
    entries = "".join(f'  - "{entry}:443/TCP"\n' for entry in allowed)
    policy = "apiVersion: dnsproxy/v1\nkind: EgressPolicy\nmetadata: {name: bench}\nspec:\n"
    selector = "  endpointSelector: {matchLabels: {app: bench}}\n"
    others = (_endpoint(f"e{at}", _OTHERS.format(at // 256, at % 256)) for at in range(1, endpoints))
    return f"{_endpoint('client', CLIENT)}{''.join(others)}{policy}{selector}  allow:\n{entries}"


def _endpoint(name: str, prefix: str) -> str:
    head = "apiVersion: dnsproxy/v1\nkind: Endpoint\n"
    return f"{head}metadata: {{name: {name}, labels: {{app: bench}}}}\nspec: {{addresses: [{prefix}]}}\n---\n"
