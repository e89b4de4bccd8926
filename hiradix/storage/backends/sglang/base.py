"""The base module that SGLang's storage classes import, for machines without SGLang.

Its names and signatures are SGLang's, so that a class written for `sglang.srt.mem_cache.hicache_storage` runs
unmodified; where SGLang is installed its own module is used and this one is not.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

MODULE = "sglang.srt.mem_cache.hicache_storage"
BASE_CLASS = "HiCacheStorage"


@dataclass
class HiCacheStorageConfig:
    """The model, ranks and layout that store: SGLang 0.5.23's fields."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

    @property
    def is_storage_writer(self) -> bool:
        """Whether this rank writes: of a latent cache only the first does."""
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class HiCacheStorageExtraInfo:
    """prefix_keys and a call's keys are one chain from the start of the sequence."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class HiCacheStorage(ABC):
    """The base of storage classes."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        raise NotImplementedError

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        raise NotImplementedError

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        for index, key in enumerate(keys):
            if not self.exists(key):
                return index
        return len(keys)

    def clear(self) -> Any:
        return None

    def get_stats(self) -> Any:
        return None


_OURS = {"HiCacheStorage": HiCacheStorage, "HiCacheStorageConfig": HiCacheStorageConfig,
         "HiCacheStorageExtraInfo": HiCacheStorageExtraInfo}  # fmt: skip


def base_module() -> types.ModuleType:
    """SGLang's module, or ours under its name. Raises ImportError when an installed SGLang does not load."""
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    if "sglang" in sys.modules or importlib.util.find_spec("sglang") is not None:
        return importlib.import_module(MODULE)
    parent = ""
    for part in MODULE.split("."):
        name = f"{parent}.{part}" if parent else part
        module = types.ModuleType(name, "Stands for SGLang's, which is not installed.")
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], part, module)
        parent = name
    vars(sys.modules[MODULE]).update(_OURS)
    return sys.modules[MODULE]


def make_config(values: Mapping[str, Any]) -> Any:
    """A config of the SGLang at hand, by keyword; fields it does not have are left out."""
    cls = base_module().HiCacheStorageConfig
    known = {entry.name for entry in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in known})


def inherits(cls: type) -> bool:
    """Whether a class descends from a HiCacheStorage, of whatever module."""
    return any(base.__name__ == BASE_CLASS for base in cls.__mro__[1:])


def is_inherited(cls: type, name: str) -> bool:
    """Whether HiCacheStorage is where a class has that from: its own methods of this kind do nothing."""
    found = next((base for base in cls.__mro__ if name in vars(base)), None)
    return found is None or found.__name__ == BASE_CLASS
