"""Backends that SGLang users know by name: SGLang's own classes, hosted by the shim where they can be had."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hiradix.errors import ConfigError
from hiradix.storage.backends.sglang.host import SglangBackend, load_class
from hiradix.storage.backends.sglang.pool import ArenaPool
from hiradix.storage.protocol import StorageContext

_STORAGE = "sglang.srt.mem_cache.storage"
Build = Callable[[Any, Any, ArenaPool], Any]


def _with_pool(cls: Any, config: Any, pool: ArenaPool) -> Any:
    return cls(config, pool)


def _halved(cls: Any, config: Any, pool: ArenaPool) -> Any:
    """aibrix reckons the length of a page: keys and values of one token here, whatever it holds."""
    pool.page_size, pool.head_dim = 1, pool.slot_bytes // 2
    return cls(config, pool)


def _sized(cls: Any, config: Any, pool: ArenaPool) -> Any:
    """hf3fs would close itself where the process is told to end: its signals are the server's to handle, and
    only the first thread may take them. We close it."""
    module = sys.modules[cls.__module__]
    if hasattr(module, "signal"):
        vars(module)["signal"] = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    return cls.from_env_config(pool.slot_bytes, pool.dtype, config)


@dataclass(frozen=True)
class Known:
    """A backend class of SGLang: its module, its requirements, and how SGLang makes it; v1 and latent as
    `SglangBackend` has them.

    Without a module: why it cannot be had.
    """

    module: str
    cls: str
    needs: str
    build: Build = _with_pool
    v1: bool = False
    latent: bool = True


KNOWN = {
    "hf3fs": Known(f"{_STORAGE}.hf3fs.storage_hf3fs", "HiCacheHF3FS", "a 3FS cluster, hf3fs-py-usrbio",
                   _sized, True, latent=False),
    "aibrix": Known(f"{_STORAGE}.aibrix_kvcache.aibrix_kvcache_storage", "AibrixKVCacheStorage",
                    "aibrix-kvcache", _halved),
    "eic": Known(f"{_STORAGE}.eic.eic_storage", "EICStorage", "the vendor's package eic", v1=True),
    "simm": Known(f"{_STORAGE}.simm.hicache_simm", "HiCacheSiMM", "the vendor's package simm", v1=True),
    "mori": Known(f"{_STORAGE}.umbp.umbp_store", "UMBPStore", "mori", v1=True),
    "tensorcast": Known("", "", "SGLang's class for tensorcast takes no host pools but SGLang's own"),
    "npu_memcache": Known(f"{_STORAGE}.npu_memcache.npu_memcache_store", "NpuMemcacheStore",
                          "memcache_hybrid", v1=True),
    "seaweedfs": Known(f"{_STORAGE}.seaweedfs.seaweedfs_store", "SeaweedFSStore", "boto3", v1=True),
    "infinistore": Known("", "", "SGLang has no class for infinistore"),
}  # fmt: skip
"""Names and the classes SGLang 0.5.23 has for them."""


class KnownBackend(SglangBackend):
    """Base of the classes that `__getattr__` makes; `name` says which."""

    name = ""

    def __init__(self, context: StorageContext):
        known = KNOWN[self.name]
        if not known.module:
            raise ConfigError(
                f'{known.needs}: use "dynamic" with the module_path and class_name of a HiCacheStorage of '
                "yours, or the redis, s3 or disk backend"
            )
        try:
            cls = load_class(self.name, known.module, known.cls)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; it needs SGLang's class: pip install sglang, and {known.needs}"
            ) from error
        super().__init__(context, lambda config, pool: known.build(cls, config, pool), known.v1, known.latent)


def __getattr__(name: str) -> type[KnownBackend]:
    if name not in KNOWN:
        raise AttributeError(name)
    made = type(f"Sglang_{name}", (KnownBackend,), {"name": name})
    globals()[name] = made
    return made
