"""The prefetcher without its promise: for the positive control of what waits, and beside it in the benchmark."""

from __future__ import annotations

from hiradix.cache.prefetch import Prefetcher
from hiradix.cache.prefetch_state import Prefetch
from hiradix.tree import Lock


class NothingHeld(Prefetcher):
    """Reads for all at once, and keeps nothing of it until they run."""

    @property
    def caps(self) -> list[int]:
        return [1 << 40 for _ in self._supply.host_pools]

    def _keep_held(self, p: Prefetch, lock: Lock) -> None:
        self._unlock(p)
