"""One tiny model a test run, and how often the random tests repeat."""

from __future__ import annotations

import os

import pytest

from tests.e2e.conftest import tiny_model

__all__ = ["tiny_model"]


@pytest.fixture(scope="session")
def num_runs() -> int:
    """How often kill and abort tests repeat: `HIRADIX_FAULT_RUNS=100 make test-faults` for more."""
    return int(os.environ.get("HIRADIX_FAULT_RUNS", "6"))
