"""Profiles, and the gate for tests that need the kernel."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("fast", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("deep" if os.environ.get("DNSPROXY_DEEP") else "fast")
