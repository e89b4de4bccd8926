"""Bounded retry: a call that raised is made again, a few times, each wait twice the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hiradix.errors import StorageError
from hiradix.storage.batch import Batch
from hiradix.storage.protocol import BadKey, Page, StorageBackend
from hiradix.storage.wrappers.wrapper import Wrapper

T = TypeVar("T")


class RetryingStorage(Wrapper):
    """Asks `retries` times more when the inner backend raises StorageError or OSError.

    Every call may be repeated: pages are named by their content. A miss is an answer and is not repeated, nor
    is what a bad key gives. The guard's deadline still holds for all attempts together.
    """

    def __init__(
        self,
        inner: StorageBackend,
        retries: int,
        wait_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ):
        super().__init__(inner)
        self._retries, self._wait_s, self._sleep = retries, wait_s, sleep
        self._num_retried = 0

    def exists(self, batch: Batch) -> int:
        return self._again(lambda: self.inner.exists(batch))

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        return self._again(lambda: self.inner.get(batch, into))

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        return self._again(lambda: self.inner.put(batch, pages))

    def delete(self, keys: Sequence[str]) -> None:
        self._again(lambda: self.inner.delete(keys))

    def own_stats(self) -> Mapping[str, float]:
        return {"retried_calls": self._num_retried}

    def _again(self, call: Callable[[], T]) -> T:
        for attempt in range(self._retries):
            try:
                return call()
            except BadKey:
                raise
            except (StorageError, OSError):
                self._num_retried += 1
                self._sleep(self._wait_s * 2**attempt)
        return call()
