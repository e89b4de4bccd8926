"""Storage classes as somebody would write them for SGLang: they know nothing of hiradix."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-not-found]
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

PLACES: dict[str, dict[str, bytes]] = {}


class TensorStore(HiCacheStorage):
    """The generic interface: flat tensors in, flat tensors out."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]):
        self.config = storage_config
        self.pages = PLACES.setdefault(str(storage_config.extra_config["place"]), {})
        self.seen: list[list[str] | None] = []

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        data = self.pages.get(key)
        return None if data is None else torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        return [self.get(key) for key in keys]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        self.pages.setdefault(key, value.numpy().tobytes())
        return True

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values))

    def exists(self, key: str) -> bool:
        return key in self.pages

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        self.seen.append(extra_info.prefix_keys if extra_info else None)
        return int(super().batch_exists(keys))

    def clear(self) -> None:
        self.pages.clear()


class ZeroCopyStore(TensorStore):
    """The zero-copy interface: reads and writes the registered pool by address."""

    lock = threading.Lock()

    def _pages(self, host_indices: Any) -> list[tuple[int, int]]:
        return list(zip(*self.mem_pool_host.get_page_buffer_meta(host_indices)))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        self.seen.append(extra_info.prefix_keys)
        ok = []
        for key, (address, size) in zip(keys, self._pages(host_indices), strict=True):
            data = self.pages.get(key)
            ok.append(data is not None and len(data) == size)
            if ok[-1]:
                ctypes.memmove(address, data, size)
        return ok

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        self.seen.append(extra_info.prefix_keys)
        for key, (address, size) in zip(keys, self._pages(host_indices), strict=True):
            self.pages.setdefault(key, ctypes.string_at(address, size))
        return [True] * len(keys)


class Faulty(TensorStore):
    """Does what `extra_config["fault"]` says."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        fault = self.config.extra_config["fault"]
        good = super().batch_get(keys)
        if fault == "raises":
            raise OSError("short read")
        return {
            "none": None,
            "short": good[:1],
            "cut": [None if page is None else page[:-1] for page in good],
            "strings": ["x"] * len(keys),
            "float": [None if page is None else page.view(torch.float32) for page in good],
        }[fault]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        if self.config.extra_config["fault"] == "raises" and self.pages.get(key, b"x")[0] % 2:
            raise OSError("short read")
        return super().get(key)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        super().batch_set(keys[:1], values[:1])
        return False


class Coded(ZeroCopyStore):
    """Stores nothing of a page whose number is odd, and says so as `extra_config["say"]` has it."""

    def _said(self, ok: list[bool]) -> Any:
        import numpy as np

        say = self.config.extra_config["say"]
        codes = [0 if good else -1 for good in ok]
        return {
            "bool": ok, "numpy": np.array(ok), "numpy list": [np.bool_(good) for good in ok],
            "tensor": torch.tensor(ok), "codes": [1 if good else -1 for good in ok], "errors": codes,
            "none": None, "too many": [*ok, True],
        }[say]  # fmt: skip

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        return self._said(super().batch_get_v1(keys, host_indices, extra_info))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        super().batch_set_v1(keys, host_indices, extra_info)
        odd = [self.pages[key][0] % 2 == 1 for key in keys]
        for key, is_odd in zip(keys, odd):
            if is_odd:
                del self.pages[key]
        return self._said([not is_odd for is_odd in odd])


class Numpy(TensorStore):
    """Its answers are numpy's, one page at a time."""

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> Any:
        import numpy as np

        return np.bool_(super().set(key, value))

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        import numpy as np

        for count, (key, target) in enumerate(zip(keys, target_locations)):
            if key not in self.pages:
                return np.int64(count)
            target.copy_(super().get(key))
        return np.int64(len(keys))

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        return [self.set(key, value) for key, value in zip(keys, values)]


class NotAStorage:
    """Inherits from nothing."""


class Unlucky(ZeroCopyStore):
    """Cannot use the memory it is given."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        raise RuntimeError("no such device")

    def close(self) -> None:
        PLACES["closed"] = {str(self.config.extra_config["place"]): b""}
        raise OSError("twice unlucky")
