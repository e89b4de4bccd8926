"""Transfers between tiers: jobs in, results out. Start at `controller.HiCacheController`."""

from __future__ import annotations

from hiradix.transfer.controller import HiCacheController
from hiradix.transfer.counters import KindStats, TransferStats
from hiradix.transfer.drivers import Driver, StepDriver, ThreadDriver
from hiradix.transfer.executor import StorageExecutor
from hiradix.transfer.gate import LayerDoneCounter, LoadFailed
from hiradix.transfer.jobs import Copy, FailReason, JobKind, Result, Ticket, TrailingPages, TrailingWindow
from hiradix.transfer.pool_pair import PoolPair
from hiradix.transfer.prefetch_operation import PrefetchOperation
from hiradix.transfer.protocols import PageSource
from hiradix.transfer.runtime import FOUR_WORKERS, TWO_WORKERS, Runtime, TransferLimits

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
    "PageSource",
    "PoolPair",
    "PrefetchOperation",
    "Result",
    "Runtime",
    "StepDriver",
    "StorageExecutor",
    "TrailingPages",
    "ThreadDriver",
    "Ticket",
    "TrailingWindow",
    "TransferLimits",
    "TransferStats",
]
