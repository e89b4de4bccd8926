"""What only a GPU can show. Skipped without one.

HIRADIX_GPU_TESTS_ON=cpu runs the same tests on the CPU, where they show that they ask the right thing; with
TRITON_INTERPRET=1, for the kernels.
"""

from __future__ import annotations

import os

import pytest
import torch

ON = os.environ.get("HIRADIX_GPU_TESTS_ON", "cuda")


@pytest.fixture
def device() -> torch.device:
    """The device the tests are for, with its index; a test without one is skipped."""
    if ON == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device("cuda", torch.device(ON).index or 0)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The same, for tests that mean nothing on a CPU."""
    if device.type != "cuda":
        pytest.skip("about CUDA alone")
    return device
