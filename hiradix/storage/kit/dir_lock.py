"""One lock per directory, for the threads of this process and for all others."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hiradix.errors import StorageError

_RETRY_S = 0.001


class DirLock:
    """A lock file. A process that is killed loses its lock with its file descriptor."""

    def __init__(self, path: Path):
        self._path = path
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

    def is_in_place(self) -> bool:
        """Whether our file still is the one in the directory. Call with the lock held."""
        return is_in_place(self._fd, self._path)

    def renew(self, timeout_s: float) -> None:
        """Lock the file that is in the directory now, made where there is none, in place of the one that was
        removed from it. Call with the lock held."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        old, self._fd = self._fd, fd
        os.close(old)
        self._lock_file(time.monotonic() + timeout_s, timeout_s)

    def close(self) -> None:
        """Let go of the lock file; waits for the thread that holds the lock. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)


def is_in_place(fd: int, path: str | Path) -> bool:
    """Whether the open file `fd` still is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
