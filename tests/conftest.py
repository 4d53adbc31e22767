"""Shared by all tests: the tiers, the fixtures of the real Kubernetes, and Hypothesis without a stopwatch."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester", "tests.tiers", "tests.kube.fixtures"]

# Time limits are the tiers' business: on a busy machine Hypothesis' own deadline of 200 ms finds only the load.
settings.register_profile(
    "prebook", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("prebook")
