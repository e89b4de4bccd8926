"""Negative cache: a page that was not there is not asked for again for a while."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from hiradix.storage.batch import Batch
from hiradix.storage.guard.calls import as_answered, has_failed
from hiradix.storage.protocol import Page, StorageBackend
from hiradix.storage.wrappers.wrapper import Wrapper

MAX_KEYS = 1 << 16


class NegativeCache(Wrapper):
    """Remembers absent keys for `ttl_s` seconds, at most `MAX_KEYS` of them, oldest out.

    What another process stores meanwhile is found only after that time; what is stored here, at once.
    """

    def __init__(self, inner: StorageBackend, ttl_s: float, clock: Callable[[], float] = time.monotonic):
        super().__init__(inner)
        self._ttl_s, self._clock = ttl_s, clock
        self._absent: OrderedDict[str, float] = OrderedDict()  # key -> when it is asked for again
        self._asked: list[set[str]] = []  # of lookups under way: their keys but those put meanwhile
        self._lock = threading.Lock()
        self._num_saved = 0

    def exists(self, batch: Batch) -> int:
        asked = batch[: self._leading(batch)]
        if not asked:
            return 0
        with self._asking(asked) as not_put:
            found = self.inner.exists(asked)
            if found < len(asked):
                self._remember(asked[found : found + 1], not_put)
        return found

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        absent = self._known_absent(batch)
        wanted = [index for index in range(len(batch)) if index not in absent]
        ok = [False] * len(batch)
        if wanted or not batch:
            asked = batch.pick(wanted)
            with self._asking(asked) as not_put:
                answers = self.inner.get(asked, [into[i] for i in wanted])
                for index, good in zip(wanted, answers, strict=True):
                    ok[index] = good
                if not has_failed(answers):  # else some may be there
                    self._remember([key for key, good in zip(asked, answers) if not good], not_put)
            return as_answered(ok, answers)
        return ok

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        try:
            return super().put(batch, pages)
        finally:
            self._forget(batch)

    def own_stats(self) -> Mapping[str, float]:
        return {"negative_keys": len(self._absent), "negative_hits": self._num_saved}

    def _leading(self, keys: Sequence[str]) -> int:
        absent = self._known_absent(keys)
        return min(absent, default=len(keys))

    def _known_absent(self, keys: Sequence[str]) -> set[int]:
        now_s = self._clock()
        with self._lock:
            found = {index for index, key in enumerate(keys) if self._absent.get(key, -1.0) > now_s}
            self._num_saved += len(found)
            return found

    @contextmanager
    def _asking(self, keys: Sequence[str]) -> Iterator[set[str]]:
        """A context that lasts while the store is asked for `keys`; gives the set of those that were not put
        meanwhile."""
        not_put = set(keys)
        with self._lock:
            self._asked.append(not_put)
        try:
            yield not_put
        finally:
            with self._lock:
                self._asked = [other for other in self._asked if other is not not_put]

    def _remember(self, keys: Sequence[str], not_put: Collection[str]) -> None:
        until_s = self._clock() + self._ttl_s
        with self._lock:
            for key in filter(not_put.__contains__, keys):
                self._absent[key] = until_s
                self._absent.move_to_end(key)
            while len(self._absent) > MAX_KEYS:
                self._absent.popitem(last=False)

    def _forget(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._absent.pop(key, None)
            for asked in self._asked:
                asked.difference_update(keys)
