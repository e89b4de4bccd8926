"""io_uring through system calls: many reads and writes with one of them, no C extension.

The kernel and we share two rings of records; they are numpy arrays over its memory. Records are prepared as
one structured array (`OPERATION`), copied in, and handed over with a single `io_uring_enter`, which also
waits.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from hiradix.errors import Misuse
from hiradix.storage.backends.disk import kernel

READV, WRITEV, READ, WRITE = 1, 2, 22, 23
OPERATION = np.dtype(
    [
        ("opcode", "u1"), ("flags", "u1"), ("priority", "u2"), ("fd", "i4"), ("offset", "u8"),
        ("address", "u8"), ("length", "u4"), ("rw_flags", "u4"), ("user_data", "u8"), ("rest", "u8", 3),
    ]
)  # fmt: skip
_COMPLETION = np.dtype([("user_data", "u8"), ("result", "i4"), ("flags", "u4")])
if OPERATION.itemsize != 64 or _COMPLETION.itemsize != 16:
    raise Misuse("the kernel's records have another length")

_SQES_OFFSET = 0x10000000
_SINGLE_MMAP = 1
_BUSY = (errno.EINTR, errno.EAGAIN, errno.EBUSY)
_Array = npt.NDArray[Any]
Completed = tuple[list[int], list[int]]
"""Which operations of a batch have ended, and how each: bytes moved, or less than 0."""
Completions = Generator[Completed, None, None]


class _Offsets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in "abcdefgh"] + [("user", ctypes.c_uint64)]


class _Parameters(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("sq", "cq", "flags", "cpu", "idle", "features", "wq")),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq_off", _Offsets),  # a head, b tail, c mask, d entries, e flags, f dropped, g array
        ("cq_off", _Offsets),  # a head, b tail, c mask, d entries, e overflow, f records
    ]


class Ring:
    """One io_uring for one thread at a time. Raises OSError where the kernel does not allow it."""

    def __init__(self, num_entries: int = 256):
        parameters = _Parameters()
        self._fd = kernel.io_uring_setup(num_entries, parameters)
        if not parameters.features & _SINGLE_MMAP:
            self.close()
            raise OSError(errno.ENOSYS, "io_uring of a kernel older than 5.4")
        sq, cq = parameters.sq_off, parameters.cq_off
        self.num_entries = int(parameters.sq)
        size = max(sq.g + 4 * parameters.sq, cq.f + 16 * parameters.cq)
        shared, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
        rings = mmap.mmap(self._fd, size, flags, shared)
        records = mmap.mmap(self._fd, 64 * parameters.sq, flags, shared, offset=_SQES_OFFSET)
        words = np.frombuffer(rings, np.uint32, size // 4)
        self._sq_head, self._sq_tail = words[sq.a // 4 :][:1], words[sq.b // 4 :][:1]
        self._cq_head, self._cq_tail = words[cq.a // 4 :][:1], words[cq.b // 4 :][:1]
        self._sq_mask, self._cq_mask = int(words[sq.c // 4]), int(words[cq.c // 4])
        self._completions = np.frombuffer(rings, _COMPLETION, parameters.cq, cq.f)
        self._operations: _Array = np.frombuffer(records, OPERATION)
        words[sq.g // 4 :][: self.num_entries] = np.arange(self.num_entries)
        self._fence = threading.Lock()

    def run(self, operations: _Array, wave: int, depth: int = 0) -> Completions:
        """Do all `operations` and give (indices, results) as they end, at least `wave` at a time.

        depth: at most so many are under way, also while the caller looks at results; 0: the ring's length.
        A result is a byte count, or a negative errno. When this generator ends or is closed, the kernel has
        let go of all memory. `user_data` is overwritten.
        """
        operations["user_data"] = np.arange(len(operations))
        depth = min(depth or self.num_entries, self.num_entries)
        given, done = self._give(operations, depth), 0
        try:
            while done < len(operations):
                self._enter(min(wave, given - done))
                ended, results = self._take()
                done += len(ended)
                more = self._give(operations[given:], depth - (given - done))
                if more:
                    given += more
                    self._enter(0)
                yield ended, results
        finally:
            while done < given:
                self._enter(given - done)
                done += len(self._take()[0])

    def close(self) -> None:
        """Give the ring back. Not while `run` is under way. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give(self, operations: _Array, room: int) -> int:
        count = min(len(operations), room)
        if count:
            tail = int(self._sq_tail[0])
            self._operations[(tail + np.arange(count)) & self._sq_mask] = operations[:count]
            self._barrier()
            self._sq_tail[0] = (tail + count) & 0xFFFFFFFF
        return count

    def _enter(self, num_wait: int) -> None:
        while True:
            waiting = (int(self._sq_tail[0]) - int(self._sq_head[0])) & 0xFFFFFFFF
            try:
                kernel.io_uring_enter(self._fd, waiting, num_wait)
                return
            except OSError as error:
                if error.errno not in _BUSY:
                    raise
                if self._cq_head[0] != self._cq_tail[0]:
                    return

    def _take(self) -> Completed:
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        self._barrier()
        count = (tail - head) & 0xFFFFFFFF
        found = self._completions[(head + np.arange(count)) & self._cq_mask]
        self._cq_head[0] = tail
        return found["user_data"].tolist(), found["result"].tolist()

    def _barrier(self) -> None:
        """Orders our accesses to the shared memory: taking a lock is an atomic operation."""
        with self._fence:
            pass


class RingPool:
    """Rings for several threads: each has one to itself for the time of a batch."""

    def __init__(self, num_entries: int = 256):
        self._num_entries = num_entries
        self._idle = [Ring(num_entries)]
        self._closed = False

    def run(self, operations: _Array, wave: int, depth: int = 0) -> Completions:
        """`Ring.run` on a ring that is free, or new."""
        try:
            ring = self._idle.pop()
        except IndexError:
            ring = Ring(self._num_entries)
        try:
            yield from ring.run(operations, wave, depth)
        finally:
            if self._closed:
                ring.close()
            else:
                self._idle.append(ring)

    def close(self) -> None:
        """Close idle rings now, the others when their batch ends."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
