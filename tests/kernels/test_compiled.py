"""The kernels as sm_90 machine code, compiled ahead of time in a process of its own: no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAX_REGISTERS = 128
CONTROL = "without the hint"
FEW_CODES = ("quantise, page 1", "dequantise, page 1")  # 128 in all, not 16 for each thread of a warp
pytestmark = pytest.mark.timeout(600)  # 50 s to compile them all, where others compile too


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of aot.py. Its process must not have seen TRITON_INTERPRET."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = Path(__file__).with_name("aot.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=590
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def is_wide(kernel: dict[str, Any]) -> bool:
    """Whether pages are read and written 16 bytes at a time; narrow loads may only be of ids and tables."""
    loads = kernel["async_loads"] + kernel["loads"].get("16", 0)
    narrow_stores = sum(count for width, count in kernel["stores"].items() if width != "16")
    return loads > 0 and kernel["stores"].get("16", 0) > 0 and narrow_stores <= 1


def test_pages_move_in_16_byte_accesses_without_spills(compiled: dict[str, Any]) -> None:
    kernels = [kernel for kernel in compiled["reports"] if kernel["name"] != CONTROL]
    assert len(kernels) >= 22
    for kernel in kernels:
        assert is_wide(kernel) or kernel["name"] in FEW_CODES, kernel
        assert kernel["local"] == 0 and kernel["registers"] <= MAX_REGISTERS, kernel


def test_copies_keep_loads_in_flight(compiled: dict[str, Any]) -> None:
    """At least 16 KiB per program in the shared-memory ring, so that few programs fill the bus."""
    copies = [kernel for kernel in compiled["reports"] if "quantise" not in kernel["name"]]
    for kernel in copies:
        if kernel["name"] != CONTROL:
            assert kernel["async_loads"] > 0 and kernel["shared_bytes"] >= 16 << 10, kernel


def test_subnormal_numbers_are_numbers(compiled: dict[str, Any]) -> None:
    """Scales and codes have the CPU's bits only where no instruction takes the smallest numbers for 0."""
    for kernel in compiled["reports"]:
        assert kernel["flushing"] == 0, kernel


def test_the_check_sees_a_missing_hint(compiled: dict[str, Any]) -> None:
    (control,) = [kernel for kernel in compiled["reports"] if kernel["name"] == CONTROL]
    assert not is_wide(control), control


def test_one_variant_per_index_type(compiled: dict[str, Any]) -> None:
    """Page counts, layers, strides and offsets of the id list never compile another kernel while serving."""
    variants = compiled["variants"]
    assert len(set(variants.values())) == 2
    assert [name for name, variant in variants.items() if variant != variants["usual"]] == ["int32 ids"]
