"""A storage class for SGLang's `dynamic` whose calls fail, damage, or take long, in turn."""

from __future__ import annotations

import itertools
import time
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile


class UnreliableStore(HiCacheFile):
    """SGLang's file class; of every ten calls some raise, some lie and some are late."""

    def __init__(self, config: Any, _: Any = None):
        super().__init__(config)
        self._calls = itertools.count()

    def _trouble(self) -> int:
        turn = next(self._calls) % 10
        if turn in (3, 7):
            raise OSError("the store is out of order")
        if turn == 5:
            time.sleep(0.3)
        return turn

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        turn = self._trouble()
        found = super().get(key, target_location, target_sizes)
        if found is not None and turn == 1:
            found.view(-1)[0] += 1
        return None if turn == 9 else found

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        return [self.get(key, target) for key, target in zip(keys, target_locations or [None] * len(keys))]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        self._trouble()
        return bool(super().set(key, value, target_location, target_sizes))

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        self._trouble()
        return len(keys)  # it has everything, it says
