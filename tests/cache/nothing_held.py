"""The prefetcher without its promise: for the positive control of what waits, and beside it in the benchmark."""

from __future__ import annotations

from typing import Any

from hiradix.cache.prefetch import Prefetcher
from hiradix.cache.prefetch_state import Prefetch
from hiradix.cache.reserved_room import ReservedRoom


class KeepsNothing(ReservedRoom):
    def keep(self, p: Prefetch) -> None:
        self.release(p)


class NothingHeld(Prefetcher):
    """Reads for all at once, and keeps nothing of it until they run."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.room.__class__ = KeepsNothing

    @property
    def caps(self) -> list[int]:
        return [1 << 40 for _ in self._supply.host_pools]
