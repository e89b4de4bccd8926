"""SGLang's own CacheInitParams, out of its unpacked wheels, and server arguments: the door of our sides."""

from __future__ import annotations

import sys
import types
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any
from unittest import mock

from tests.differential.wheels import wheel_folder

OLDEST, NEWEST = "0.5.9", "0.5.23"
_EVENTS = "sglang.srt.mem_cache.events"  # what 0.5.23's file takes from another: the names of adapters


@cache
def init_params(version: str) -> Any:
    """The class CacheInitParams of a release. Its file needs torch and one name; nothing else is imported."""
    file = wheel_folder(version) / "sglang" / "srt" / "mem_cache" / "cache_init_params.py"
    spec: Any = spec_from_file_location(f"cache_init_params of {version}", file)
    module, names = module_from_spec(spec), types.ModuleType(_EVENTS)
    names.KvEventLoraNames = dict  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {_EVENTS: names, spec.name: module}):
        spec.loader.exec_module(module)
    return module.CacheInitParams


def server_args(setup: Any, **more: Any) -> Any:
    """What SGLang's ServerArgs have of the tiers, as its scheduler hands them to a cache."""
    return types.SimpleNamespace(
        served_model_name="m",
        model_path=None,
        page_size=setup.page_size,
        hicache_ratio=setup.host_ratio,
        hicache_size=0,
        hicache_write_policy=setup.write_policy,
        hicache_io_backend="kernel",
        hicache_mem_layout="layer_first",
        hicache_storage_backend=None,
        hicache_storage_backend_extra_config='{"prefetch_threshold": 1}',
        hicache_storage_prefetch_policy="wait_complete",
        disable_hicache_numa_detect=True,
        extra_metric_labels=None,
        **more,
    )
