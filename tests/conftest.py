"""Settings for every test: hypothesis judges results, not speed, because the machine may be shared."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared-machine",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("shared-machine")
os.environ.setdefault("OMP_NUM_THREADS", "1")
