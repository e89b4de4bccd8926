"""Transfers between tiers: jobs in, results out. Start at `controller.TransferController`.

`HiCacheController` (slots, upstream's names) needs torch and is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hiradix.transfer.controller import TransferController
from hiradix.transfer.counters import KindStats, TransferStats
from hiradix.transfer.drivers import Driver, StepDriver, ThreadDriver
from hiradix.transfer.executor import StorageExecutor
from hiradix.transfer.gate import LayerDoneCounter, LoadFailed
from hiradix.transfer.jobs import Copy, FailReason, JobKind, Result, Ticket, TrailingPages, TrailingWindow
from hiradix.transfer.runners import PoolPair
from hiradix.transfer.runtime import FOUR_WORKERS, TWO_WORKERS, Runtime, TransferLimits

if TYPE_CHECKING:
    from hiradix.transfer.hicache_controller import HiCacheController

__all__ = [
    "FOUR_WORKERS",
    "TWO_WORKERS",
    "Copy",
    "Driver",
    "FailReason",
    "HiCacheController",
    "JobKind",
    "KindStats",
    "LayerDoneCounter",
    "LoadFailed",
    "PoolPair",
    "Result",
    "Runtime",
    "StepDriver",
    "StorageExecutor",
    "TrailingPages",
    "ThreadDriver",
    "Ticket",
    "TrailingWindow",
    "TransferController",
    "TransferLimits",
    "TransferStats",
]


def __getattr__(name: str) -> Any:
    if name == "HiCacheController":
        from hiradix.transfer.hicache_controller import HiCacheController

        return HiCacheController
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
