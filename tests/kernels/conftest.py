"""Kernels are interpreted on the CPU here. Triton reads the switch when a kernel's module is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
