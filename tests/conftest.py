"""Hypothesis profiles: the default one always tries the same examples, ``HYPOTHESIS_PROFILE=deep`` many new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, suppress_health_check=QUIET)
settings.register_profile("deep", deadline=None, max_examples=400, suppress_health_check=QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
