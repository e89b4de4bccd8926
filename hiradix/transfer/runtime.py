"""The environment of a controller: driver, clock, streams, caps and deadlines. A simulation replaces all of
it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hiradix.transfer.drivers import Driver, ThreadDriver
from hiradix.transfer.jobs import JobKind
from hiradix.transfer.protocols import Clock, HashPages
from hiradix.transfer.streams import Streams
from hiradix.tree.hashing import hash_pages

FOUR_WORKERS: Mapping[str, tuple[JobKind, ...]] = MappingProxyType(
    {
        "load": (JobKind.LOAD,),
        "write": (JobKind.WRITE,),
        "fetch": (JobKind.QUERY, JobKind.READ),
        "store": (JobKind.STORE, JobKind.DELETE),  # what is to be forgotten has been stored by then
    }
)
TWO_WORKERS: Mapping[str, tuple[JobKind, ...]] = MappingProxyType(
    {
        "copy": (JobKind.LOAD, JobKind.WRITE),
        "storage": (JobKind.QUERY, JobKind.READ, JobKind.STORE, JobKind.DELETE),
    }
)


@dataclass(frozen=True)
class TransferLimits:
    """Caps and deadlines.

    queued_jobs: jobs per kind that may wait; one more is refused with a failed Result.
    batch_pages: pages per storage call. copy_pages: pages per step of a device-to-host copy.
    gate_timeout_s: longest wait for a layer, and for a producer slot.
    """

    queued_jobs: int = 1024
    batch_pages: int = 128
    copy_pages: int = 256
    gate_timeout_s: float = 30.0
    num_load_slots: int = 3


@dataclass(frozen=True)
class Runtime:
    """The environment that a controller runs in; replace all of it to simulate. `streams` None means: by the
    pool's device.

    workers: which worker serves which kinds, most urgent first.
    """

    driver: Driver = field(default_factory=ThreadDriver)
    clock: Clock = time.monotonic
    limits: TransferLimits = TransferLimits()
    workers: Mapping[str, tuple[JobKind, ...]] = field(default_factory=lambda: FOUR_WORKERS)
    hash_pages: HashPages = hash_pages
    streams: Streams | None = None
