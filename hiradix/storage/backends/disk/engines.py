"""Execution of a batch of reads or writes: one io_uring submission, or a few threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hiradix.storage.backends.disk.uring import (
    OPERATION,
    READ,
    READV,
    WRITE,
    WRITEV,
    Completed,
    Completions,
    RingPool,
)
from hiradix.storage.kit.vectored import read_into, write_from


@dataclass(slots=True)
class Operation:
    """Read into, or write from, buffers at an offset of a file. spans: their addresses and lengths."""

    fd: int
    offset: int
    views: list[memoryview]
    spans: list[tuple[int, int]]


class UringEngine:
    """One system call per batch. Raises OSError where io_uring is not allowed."""

    name = "io_uring"

    def __init__(self) -> None:
        self._rings = RingPool()

    def run(self, operations: Sequence[Operation], write: bool, wave: int, depth: int = 0) -> Completions:
        """Results as they come, at least `wave` at a time if possible, of at most `depth` operations at once.

        When the iterator ends or is closed, nothing is under way any more.
        """
        prepared = np.zeros(len(operations), OPERATION)
        keep = _fill(prepared, operations, write)
        yield from self._rings.run(prepared, wave, depth)
        del keep

    def close(self) -> None:
        """Let go of the rings. Idempotent."""
        self._rings.close()


def _fill(
    prepared: npt.NDArray[np.void], operations: Sequence[Operation], write: bool
) -> list[npt.NDArray[np.uint64]]:
    """Write `operations` into io_uring's form; returns what must live until they have ended."""
    keep, rows = [], []
    one, several = (WRITE, WRITEV) if write else (READ, READV)
    for operation in operations:
        spans = operation.spans
        if len(spans) == 1:
            rows.append((one, *spans[0]))
        else:
            iovecs = np.array(spans, np.uint64)
            keep.append(iovecs)
            rows.append((several, int(iovecs.ctypes.data), len(spans)))
    prepared["opcode"], prepared["address"], prepared["length"] = zip(*rows)
    prepared["fd"] = [operation.fd for operation in operations]
    prepared["offset"] = [operation.offset for operation in operations]
    return keep


class ThreadEngine:
    """preadv and pwritev on `num_threads` threads."""

    name = "threads"

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, "hiradix-disk")

    def run(self, operations: Sequence[Operation], write: bool, wave: int, depth: int = 0) -> Completions:
        share = max(1, -(-len(operations) // self._num_threads))
        if depth:  # the caller looks at what has come while the rest is read
            share = min(share, max(1, wave))
        parts = [range(at, min(at + share, len(operations))) for at in range(0, len(operations), share)]
        futures = [self._executor.submit(_move_all, operations, part, write) for part in parts]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()

    def close(self) -> None:
        """Let go of the threads. Idempotent."""
        self._executor.shutdown(wait=False)


IOEngine = UringEngine | ThreadEngine
"""Runs batches; from several threads at once."""


def _move_all(operations: Sequence[Operation], part: range, write: bool) -> Completed:
    move = write_from if write else read_into
    results = []
    for index in part:
        operation = operations[index]
        try:
            results.append(move(operation.fd, operation.views, operation.offset))
        except OSError as error:
            results.append(-(error.errno or 1))
    return list(part), results
