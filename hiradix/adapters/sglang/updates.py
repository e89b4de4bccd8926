"""Weights that SGLang puts in without a flush: heard of by hooks, as no cache is told."""

from __future__ import annotations

from typing import Any

from hiradix.adapters.sglang.hooks import after

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def watch_updates() -> None:
    """Have the cache of this process look at the weights after each update. May be called again."""
    after(f"{_MANAGER}.flush_cache_after_weight_update", _updated)
    after(f"{_MANAGER}.end_weight_update", _look)


def _updated(told: tuple[bool, str], manager: Any, request: Any, *_: Any) -> None:
    """Look at the weights again after an update. told: whether all went well, the flush too if one was asked
    for."""
    if not (request.flush_cache and told[0]):
        _look(told, manager)


def _look(_: Any, manager: Any, *__: Any) -> None:
    """Have the cache look at the weights again; also after a session of updates, as other processes may have
    written them."""
    put_in = getattr(manager.scheduler.tree_cache, "weights_put_in", None)
    if put_in is not None:
        put_in()
