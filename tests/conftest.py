"""What holds for the whole suite: hypothesis profiles, the event loop, and the gate for kernel tests.

Environment:

    DNSPROXY_DEEP=1                   the deep profile of the property tests, and the tests marked `deep`
    DNSPROXY_LOOP=asyncio|uvloop      the event loop of every async test (default asyncio)
    DNSPROXY_KERNEL_TESTS=required    a skipped kernel test is a failed one (CI)
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

settings.register_profile(
    "fast", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "deep", max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("deep" if os.environ.get("DNSPROXY_DEEP") else "fast")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every async test on the one loop that was asked for.

    A factory and not a policy: pyroute2's threads make loops of their own, and under a uvloop policy
    those would be loops on which netlink sockets do not work.
    """
    name = os.environ.get("DNSPROXY_LOOP", "asyncio")
    if name == "asyncio":
        return {"asyncio": asyncio.SelectorEventLoop}
    if name == "uvloop":
        import uvloop  # noqa: PLC0415 - optional, and asked for only here

        return {"uvloop": uvloop.new_event_loop}
    raise pytest.UsageError(f"DNSPROXY_LOOP={name}: expected asyncio or uvloop")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine or this run cannot do."""
    if item.get_closest_marker("kernel") and (reason := why_no_kernel()):
        pytest.skip(reason)
    if item.get_closest_marker("deep") and not os.environ.get("DNSPROXY_DEEP"):
        pytest.skip("deep profile only: make deep")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where kernel tests are required, a skipped one is a failed one, whoever skipped it."""
    report = yield
    required = os.environ.get("DNSPROXY_KERNEL_TESTS") == "required"
    if required and report.skipped and item.get_closest_marker("kernel"):
        report.outcome = "failed"
        report.longrepr = f"a kernel test was skipped where all are required: {_reason(report.longrepr)}"
    return report


def _reason(longrepr: Any) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


@cache
def why_no_kernel() -> str | None:
    """Tell why tests with real nftables cannot run here; None if they can."""
    if os.geteuid() != 0:
        return "kernel tests need root"
    missing = [tool for tool in ("ip", "nft", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"kernel tests need {' and '.join(missing)} (Debian: nftables iproute2 util-linux)"
    command = ["unshare", "--net", "nft", "add", "table", "inet", "probe"]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no nftables in a network namespace: {probe.stderr.strip()}" if probe.returncode else None
