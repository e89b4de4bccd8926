"""Settings for every test: hypothesis judges results, not speed, because the machine may be shared.

Here and not beside the tree's tests: only this file is loaded where the workers' reports come together.
"""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared-machine",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("shared-machine")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_terminal_summary(terminalreporter) -> None:
    """How much was tried: what tests tell by `record_property("told", ...)`, and the tree's random lives."""
    runs, moves, drawn = 0, 0, Counter()
    for report in terminalreporter.getreports("passed"):
        properties = dict(report.user_properties)
        runs += properties.get("tree_runs", 0)
        moves += properties.get("tree_moves", 0)
        drawn.update(properties.get("tree_drawn", {}))
        if "told" in properties:
            terminalreporter.write_line(properties["told"])
    if runs:
        values = ", ".join(f"{value} {count}" for value, count in sorted(drawn.items()))
        terminalreporter.write_line(f"tree against page map: {runs} runs, {moves} moves ({values})")
