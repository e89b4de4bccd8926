"""Transfers between tiers: jobs in, results out. Start at `controller.TransferController`."""

from hiradix.transfer.controller import FOUR_WORKERS, TWO_WORKERS, Runtime, TransferController, TransferLimits
from hiradix.transfer.counters import KindStats, TransferStats
from hiradix.transfer.drivers import Driver, StepDriver, ThreadDriver
from hiradix.transfer.gate import LayerDoneCounter, LoadFailed
from hiradix.transfer.jobs import FailReason, JobKind, Result, Ticket

__all__ = [
    "FOUR_WORKERS",
    "TWO_WORKERS",
    "Driver",
    "FailReason",
    "JobKind",
    "KindStats",
    "LayerDoneCounter",
    "LoadFailed",
    "Result",
    "Runtime",
    "StepDriver",
    "ThreadDriver",
    "Ticket",
    "TransferController",
    "TransferLimits",
    "TransferStats",
]
