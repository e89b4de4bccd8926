"""An SGLang plugin that measures, in the scheduler's process, the CPU time spent inside the prefix cache.

Every public method of whatever cache SGLang builds is timed with the thread's CPU clock, the outermost call
only. Page copies are left out: on a CPU SGLang's are made by the scheduler's thread, ours by others; on a GPU
both are queued. What the meter reads of a call that does nothing is taken off each call. `reset()` writes
what was measured since the last one to the file TURN_METER names, with the thread's CPU time as a whole.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

CALIBRATION_CALLS = 1000


class Meter:
    """Calls and seconds by method; one thread."""

    def __init__(self) -> None:
        self.figures: dict[str, list[float]] = {}
        self.copying_s = 0.0
        self.depth = 0
        self.thread_s = 0.0  # of the scheduler's thread, when figures were written last
        self.own_s = self._own_s()

    def _own_s(self) -> float:
        """What is read of a call that does nothing."""
        nothing = self.timed("nothing", lambda: None)
        for _ in range(CALIBRATION_CALLS):
            nothing()
        calls, seconds = self.figures.pop("nothing")
        return seconds / calls

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return method(*args, **kwargs)
            self.depth = 1
            copying_s, start_s = self.copying_s, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent_s = time.thread_time() - start_s - (self.copying_s - copying_s)
                self.depth = 0
                figures = self.figures.setdefault(name, [0, 0.0])
                figures[0] += 1
                figures[1] += spent_s - self.own_s

        return call

    def copy(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.copying_s += time.thread_time() - start_s

        return call

    def write(self) -> None:
        path, now_s = Path(os.environ["TURN_METER"]), time.thread_time()
        told = {"cache": self.cache, "methods": self.figures, "thread_s": now_s - self.thread_s}
        path.with_suffix(".new").write_text(json.dumps(told))
        path.with_suffix(".new").replace(path)
        self.figures, self.thread_s = {}, now_s

    cache = ""
    own_s = 0.0


def measured(cache: Any, meter: Meter) -> Any:
    """`cache` with its public methods timed."""
    kind = type(cache)
    names = {name for base in kind.__mro__ for name in vars(base) if not name.startswith("_")}
    methods = {}
    for name in names:
        method = getattr(kind, name)
        if callable(method) and not isinstance(method, type) and not isinstance(_plain(kind, name), property):
            if not isinstance(_plain(kind, name), staticmethod | classmethod):
                methods[name] = meter.timed(name, method)
    reset = kind.reset

    def reset_and_write(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = reset(self, *args, **kwargs)
        meter.write()
        return done

    methods["reset"] = reset_and_write
    meter.cache = kind.__name__
    cache.__class__ = type(kind.__name__, (kind,), methods)
    return cache


def _plain(kind: type, name: str) -> Any:
    return next(vars(base)[name] for base in kind.__mro__ if name in vars(base))


def activate() -> None:
    """Have SGLang measure the cache it builds."""
    import sglang.srt.mem_cache.kv_cache_builder as builder
    import sglang.srt.mem_cache.pool_host.mha as copies

    create, meter = builder.create_tree_cache, Meter()

    def create_measured(context: Any) -> Any:
        for name in [name for name in vars(copies) if name.startswith("transfer_kv")]:
            setattr(copies, name, meter.copy(getattr(copies, name)))
        return measured(create(context), meter)

    builder.create_tree_cache = create_measured
