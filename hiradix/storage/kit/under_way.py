"""Calls under way, so that closing can wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hiradix.errors import StorageError


class UnderWay:
    """Counts the calls that are under way, until it is closed. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_calls = 0
        self._closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """The time of one call. Raises StorageError once closed."""
        with self._changed:
            if self._closed:
                raise StorageError("storage backend is closed")
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Let no call begin any more and wait for those under way: whether all have ended in time."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not self._num_calls, timeout_s)
