"""Pages on their way from a far store to a near one, and deletions that meet them there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Promotions:
    """Promotions under way: a page deleted meanwhile must not stay in the upper store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[set[str]] = []  # of each promotion: its keys but those deleted meanwhile
        self._deletions: list[frozenset[str] | None] = []  # under way; None: of everything

    def __len__(self) -> int:
        return len(self._under_way) + len(self._deletions)

    @contextmanager
    def promoting(self, keys: Sequence[str]) -> Iterator[list[str]]:
        """A context that lasts from before the far store is read until the near one has the pages that were
        found.

        Gives a list that has the keys to delete from the near store once this has ended.
        """
        gone: list[str] = []
        with self._lock:
            kept = {key for key in keys if not any(d is None or key in d for d in self._deletions)}
            self._under_way.append(kept)
        try:
            yield gone
        finally:
            with self._lock:
                self._under_way = [other for other in self._under_way if other is not kept]
                gone += sorted(set(keys) - kept)

    @contextmanager
    def deleting(self, keys: Sequence[str] | None) -> Iterator[None]:
        """A context that lasts while these keys, or all, are deleted from both stores."""
        deletion = None if keys is None else frozenset(keys)
        with self._lock:
            self._deletions.append(deletion)
            for kept in self._under_way:
                kept.difference_update(kept.copy() if deletion is None else deletion)
        try:
            yield
        finally:
            with self._lock:
                self._deletions.remove(deletion)
