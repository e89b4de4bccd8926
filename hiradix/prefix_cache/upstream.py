"""SGLang's construction arguments in our terms: its CacheInitParams, its server's flags, the pools behind both.

They are told by what they have, in any version's words; SGLang is not imported. Its registry of caches says
more than these do: which weights are in memory, how many ranks a machine has, which streams copies wait for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hiradix.config import ExtraConfig, HiCacheConfig, parse_extra_config
from hiradix.config_files import load_mapping
from hiradix.errors import ConfigError
from hiradix.memory import DevicePool
from hiradix.memory.engine_pools import device_pool, layout_of, window_pools
from hiradix.prefix_cache.allocator_ports import AllocatorPort, HybridPort, NumberedSlots
from hiradix.prefix_cache.identity import ModelIdentity, run_with
from hiradix.prefix_cache.lower_tiers import LowerTiers, hybrid_tiers, lower_tiers
from hiradix.prefix_cache.records import CacheInitParams
from hiradix.prefix_cache.weight_files import origin_of
from hiradix.transfer import Runtime
from hiradix.transfer.process_group import least_over, place_in

# Of a folder that has safetensors these read the same; others say which files count, or read other places.
USUAL_FORMATS = ("", "auto", "safetensors", "fastsafetensors", "instanttensor", "layered", "runai_streamer")
_STEPS = "pipeline stages are at different steps, and agree on transfers at none"
# What SGLang's CacheInitParams may ask for and is not served, unless it is one of these.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "cache_ttl_seconds": ((None,), "entries leave by the eviction policy; ranks share no clock"),
    "enable_session_radix_cache": ((None, False), "sessions are prefixes here"),
    "swa_gates_prefix_match": ((None, True), "sliding windows that belong to requests are in no tree"),
    "decoder_swa_bounded_replay": ((None, False), "windows are kept whole"),
    "component_registry_override": ((None,), "a tree has the components of its class"),
    "mtp_draft_device_pools": ((None, ()), "pools of a draft model are not copied"),
    "sidecar_draft_device_pools": ((None, ()), "pools of a draft model are not copied"),
    "mtp_draft_mamba_pools": ((None, ()), "pools of a draft model are not copied"),
}  # fmt: skip


def cache_params(params: Any) -> CacheInitParams:
    """`params` as ours: themselves, or SGLang's CacheInitParams of any version.

    With a group of ranks, agreement over it; without an allocator, slots that are numbers only. Raises
    ConfigError naming the field that asks for what is not served.
    """
    for name, (served, reason) in _REFUSED.items():
        if (given := getattr(params, name, None)) not in served:
            raise ConfigError(f"{name} {given!r:.60} is not supported by hiradix: {reason}")
    return as_ours(params)


def as_ours(params: Any, port: type[AllocatorPort] | None = None) -> CacheInitParams:
    """Our record of SGLang's parameters, after the engine's adapter has refused what it must; `cache_params`
    without those checks. port: the allocator's."""
    names = [field.name for field in dataclasses.fields(CacheInitParams)]
    values = {name: getattr(params, name) for name in names if hasattr(params, name)}
    values["eviction_policy_config"] = dict(values.get("eviction_policy_config") or {})
    if (window := getattr(params, "swa_retain_window", None)) is not None:
        values["sliding_window_size"] = window
    group = getattr(params, "attn_tp_cache_group", None) or getattr(params, "tp_cache_group", None)
    if values.get("agree") is None and place_in(group)[1] > 1:
        values["agree"] = least_over(group)
    values["token_to_kv_pool_allocator"] = _ported(params, port)
    return CacheInitParams(**values)


def _ported(params: Any, port: type[AllocatorPort] | None) -> Any:
    """The allocator in our terms: as it is, unless it is one of SGLang's, or there is none."""
    allocator, page_size = params.token_to_kv_pool_allocator, params.page_size
    if allocator is None:
        return NumberedSlots(page_size)
    if not hasattr(allocator, "free_pages") or callable(allocator.free_pages):
        return allocator
    if port is None:
        port = HybridPort if hasattr(allocator, "full_to_swa_index_mapping") else AllocatorPort
    return port(allocator, page_size)


def server_tiers(params: CacheInitParams, server_args: Any, runtime: Runtime | None = None) -> LowerTiers:
    """Host and storage as SGLang's server arguments want them, below the pool of `params`' allocator.

    The pool's readers wait for loads, layer by layer, from here on. Raises ConfigError naming the flag.
    """
    if server_args is None:
        raise ConfigError("server_args: a cache with a host tier needs SGLang's server arguments, or a host")
    if params.pp_size > 1:
        raise ConfigError(f"pp_size {params.pp_size} with a host tier is not supported by hiradix: {_STEPS}")
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    if pool is None:
        raise ConfigError("token_to_kv_pool_allocator: a host tier needs the pool of its slots, it has none")
    config = cache_config(server_args, params, extra_config(server_args)).normalised()
    model = _model_of(server_args, params, pool)
    if params.sliding_window_size is not None and hasattr(pool, "swa_kv_pool"):
        tiers = hybrid_tiers(config, params, window_pools(pool), model, runtime)
    else:
        tiers = lower_tiers(config, params, device_pool(pool, params.page_size), model, runtime)
    if not isinstance(pool, DevicePool):  # ours has it from the controller
        gate_pool(pool, tiers.host.controller.layer_done_counter)
    return tiers


def gate_pool(pool: Any, gate: Any) -> None:
    """Have a layer of SGLang's pool read only when its load back has come so far."""
    num_layers = getattr(pool, "layer_num", 1)  # layers with unlike arrays are one of ours
    pool.register_layer_transfer_counter(gate.view([0] * num_layers) if gate.num_layers == 1 else gate)


def cache_config(
    flags: Any, params: Any, extra: ExtraConfig, is_hierarchical: bool = True, **more: Any
) -> HiCacheConfig:
    """SGLang's flags under the same names; those of the host tier where there is one."""
    names = [field.name for field in dataclasses.fields(HiCacheConfig)]
    taken = {name: getattr(flags, name) for name in names if hasattr(flags, name)}
    taken |= {
        "page_size": params.page_size,
        "enable_hierarchical_cache": is_hierarchical,
        "disable_radix_cache": False,
        "hicache_storage_backend_extra_config": extra,
        "radix_eviction_policy": params.eviction_policy,
        "radix_eviction_policy_config": dict(getattr(params, "eviction_policy_config", None) or {}),
        **more,
    }
    if not is_hierarchical:
        taken = {name: value for name, value in taken.items() if not name.startswith("hicache_")}
    return HiCacheConfig(**{name: value for name, value in taken.items() if value is not None})


def extra_config(flags: Any) -> ExtraConfig:
    """The settings in `--hicache-storage-backend-extra-config` and `--file-storage-path`."""
    extra = parse_extra_config(getattr(flags, "hicache_storage_backend_extra_config", None))
    folder = getattr(flags, "file_storage_path", None)
    if getattr(flags, "hicache_storage_backend", None) == "file" and folder:
        extra = extra.with_backend(file_storage_path=folder)
    return extra


def names_are_hub() -> bool:
    """Whether SGLang takes the names of models for Hugging Face's."""
    return os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() not in ("1", "true")


def load_format(flags: Any) -> str:
    """`--load-format`, in lower case."""
    given = getattr(flags, "load_format", None) or ""
    return str(getattr(given, "value", given)).lower()


def run_options(flags: Any) -> dict[str, Any]:
    """Flags that have the same weights give other KV than their files ask for, by name; files named are read."""
    names = ("quantization", "torchao_config", "modelopt_quant")
    given = {name: getattr(flags, name, None) for name in names}
    overrides = getattr(flags, "json_model_override_args", None) or "{}"
    given["json_model_override_args"] = load_mapping("--json-model-override-args", overrides)
    for name in ("quantization_param_path", "decrypted_config_file"):
        file = getattr(flags, name, None)
        if file and Path(file).is_file():
            given[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    if load_format(flags) not in USUAL_FORMATS:
        given["load_format"] = load_format(flags)
        given["model_loader_extra_config"] = getattr(flags, "model_loader_extra_config", None)
    return given


def layers_of(pool: Any) -> Sequence[int | None]:
    """The range of the model's layers in a pipeline stage's pool: the first, and one more than the last."""
    return [getattr(pool, "start_layer", 0), getattr(pool, "end_layer", None)]


def _model_of(flags: Any, params: CacheInitParams, pool: Any) -> ModelIdentity:
    """The identity that names pages in storage: the served model's name or its path, and a digest of its
    files."""
    path, name = getattr(flags, "model_path", None), getattr(flags, "served_model_name", None)
    if not (name or path):
        if getattr(flags, "hicache_storage_backend", None):
            raise ConfigError("served_model_name: needed to name pages in storage, as is a model_path")
        name = "unnamed"
    revision = ""
    if path:
        asked, folder = getattr(flags, "revision", None), getattr(flags, "download_dir", None)
        revision = origin_of(path, asked, folder, is_hub=names_are_hub()).revision
    tp_rank, tp_size = place_in(params.tp_cache_group)
    model = ModelIdentity(
        model_id=str(name or path),
        revision=f"{revision}:{pool.dtype}{layout_of(pool)}",
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
    return run_with(model, run_options(flags))
