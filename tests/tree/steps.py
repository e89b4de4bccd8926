"""What an act costs, counted and not timed, so that a slow machine changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hiradix.tree import IS_COMPILED, Node


def num_steps(act: Callable[[], object]) -> int:
    """Bytecodes that `act` executes, with those of comparing nodes, so that searching a list of nodes counts.

    Compiled code takes no steps.
    """
    count = 0

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return step

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def compared(self: object, other: object) -> bool:
        return self is other

    before = sys.gettrace()
    if not IS_COMPILED:
        Node.__eq__ = compared  # type: ignore[method-assign, assignment]
    sys.settrace(begin)
    try:
        act()
    finally:
        sys.settrace(before)
        if not IS_COMPILED:
            del Node.__eq__
    return count
