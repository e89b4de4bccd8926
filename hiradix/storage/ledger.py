"""One lock and one number per directory: how many bytes its page files take, agreed by all processes in it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hiradix.errors import StorageError

_RECORD = struct.Struct("<4sIQ")
_MAGIC = b"HRXU"
_RETRY_S = 0.001


class Ledger:
    """The directory's lock (threads and processes) and, while one holds it, its byte count.

    A process that is killed loses its lock with its file descriptor. Bytes are entered before they are
    written and taken out after they are gone, so a crash leaves the count too high, never too low; `recount`
    mends it.
    """

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Alone in the directory. Raises StorageError when another holds the lock for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise StorageError(f"directory lock: another thread has had it for {timeout_s} s")
        try:
            self._lock_file(deadline, timeout_s)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def _lock_file(self, deadline: float, timeout_s: float) -> None:
        if self._closed:
            raise StorageError("storage backend is closed")
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StorageError(
                        f"directory lock: another process has had it for {timeout_s} s"
                    ) from None
                time.sleep(_RETRY_S)

    def read(self) -> int | None:
        """The byte count; None when there is none yet or it is damaged. Call with the lock held."""
        raw = os.pread(self._fd, _RECORD.size, 0)
        if len(raw) != _RECORD.size:
            return None
        magic, checksum, num_bytes = _RECORD.unpack(raw)
        return int(num_bytes) if magic == _MAGIC and checksum == _checksum(num_bytes) else None

    def write(self, num_bytes: int) -> None:
        """Set the byte count. Call with the lock held."""
        os.pwrite(self._fd, _RECORD.pack(_MAGIC, _checksum(num_bytes), num_bytes), 0)

    def close(self) -> None:
        """Let go of the lock file; waits for the thread that holds the lock. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)


def _checksum(num_bytes: int) -> int:
    return zlib.crc32(_MAGIC + num_bytes.to_bytes(8, "little"))
