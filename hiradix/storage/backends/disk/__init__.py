"""The `disk` backend: a store of pages on a local disk, at the disk's speed, shared by processes of one host.

backend     the protocol: what a call does
store       the directory: lock, log, segments, room, eviction
log, record, index    what is where, agreed by all processes and recovered after a crash
moves, engines, uring, kernel    bytes between slots and memory
config, probe    what was asked for, and what this machine can do
"""

from __future__ import annotations

from hiradix.storage.backends.disk.backend import DiskBackend
from hiradix.storage.backends.disk.config import DiskConfig, size_for

__all__ = ["DiskBackend", "DiskConfig", "size_for"]
