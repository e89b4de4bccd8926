"""SGLang's flags and pools, put together to a cache of ours."""

from __future__ import annotations

import dataclasses
import logging
import os
from functools import partial
from typing import Any

import torch

from hiradix.adapters.admin import port_of_environment
from hiradix.adapters.rope import DYNAMIC, LONG, lengths_that_decide, unfixed
from hiradix.adapters.sglang.engine_views import ControllerView, FencedStreams
from hiradix.adapters.sglang.lora_adapters import LoraAdapters, keep_apart
from hiradix.adapters.sglang.settings import intent_limits, own_settings
from hiradix.adapters.sglang.states import StateRecords, require_known_states
from hiradix.adapters.sglang.support import (
    TESTED,
    Api,
    api_of,
    installed_version,
    refusal,
    refuse_allocator,
    refuse_flags,
)
from hiradix.adapters.sglang.weights import UNSEEN, Weights
from hiradix.config import (
    ExtraConfig,
    HiCacheConfig,
    without_host_tier,
)
from hiradix.memory.engine_pools import device_pool, layout_of, state_pools, window_pools
from hiradix.prefix_cache import (
    CacheInitParams,
    ModelIdentity,
    PrefixCache,
    build_hybrid_cache,
    build_prefix_cache,
    origin_of,
    run_with,
)
from hiradix.prefix_cache.allocator_ports import AllocatorPort, HybridPort
from hiradix.prefix_cache.upstream import (
    USUAL_FORMATS,
    as_ours,
    cache_config,
    extra_config,
    gate_pool,
    layers_of,
    load_format,
    names_are_hub,
    run_options,
)
from hiradix.storage.attach.rules import AttachRules, default_of, rules_of
from hiradix.transfer import Runtime
from hiradix.transfer.process_group import least_over, place_in

logger = logging.getLogger(__name__)


def build_cache(context: Any) -> Any:
    """The prefix cache for SGLang's TreeCacheBuildContext. Raises ConfigError naming the flag or version."""
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    if context.disable_radix_cache:
        from sglang.srt.mem_cache.registry import default_radix_cache_factory

        return default_radix_cache_factory(context)
    api, flags = api_of(BasePrefixCache), _Flags(context.server_args)
    refuse_flags(flags)
    refuse_allocator(context.params.token_to_kv_pool_allocator)
    _refuse_models(context, flags)
    if api is Api.FINISHED_REQ:
        _refuse_legacy(context, flags)
    return _build(context, flags, api)


class _Flags:
    """SGLang's options as they are in effect; what resolution and the admin API changed is in."""

    def __init__(self, server_args: Any):
        try:
            from sglang.srt import runtime_context as resolved
        except ImportError:  # older ones change their arguments in place
            resolved = None
        names = ("get_memory", "get_serving", "get_disagg", "get_lora")
        self._sources = [getattr(resolved, name)() for name in names if hasattr(resolved, name)]
        self._sources.append(server_args)

    def __getattr__(self, name: str) -> Any:
        for source in self._sources:
            if hasattr(source, name):
                return getattr(source, name)
        raise AttributeError(name)


def _refuse_models(context: Any, flags: Any) -> None:
    params = context.params
    if context.is_hybrid_ssm:
        _refuse_states(context, flags)
    if context.is_hybrid_swa:
        _refuse_windows(context)
    _refuse_ropes(context)
    if not context.enable_hierarchical_cache:
        for note in without_host_tier(_host_flags(context.server_args)):
            logger.warning("hiradix: %s", note)
        return
    sharing = "its ranks share the tokens of a page"
    steps = "the stages are at different steps, and agree on transfers at none"
    for flag, size, reason in (
        ("--pp-size", params.pp_size, steps),
        ("--attn-cp-size", params.attn_cp_size, sharing),
        ("--dcp-size", getattr(flags, "dcp_size", 1), sharing),
    ):
        if size > 1:
            raise refusal(f"{flag} {size} with --enable-hierarchical-cache", reason)
    if getattr(flags, "disaggregation_decode_enable_offload_kvcache", False):
        raise refusal("--disaggregation-decode-enable-offload-kvcache", "it needs SGLang's own host pool")


def _host_flags(args: Any) -> list[str]:
    """SGLang's flags of the host tier and below that are not as SGLang has them by itself."""
    fields = dataclasses.fields(args) if dataclasses.is_dataclass(args) else ()
    return [
        f"--{field.name.replace('_', '-')}"
        for field in fields
        if field.name.startswith("hicache_") and getattr(args, field.name, field.default) != field.default
    ]


def _refuse_windows(context: Any) -> None:
    params, allocator = context.params, context.params.token_to_kv_pool_allocator
    if context.full_tokens_per_layer == 0:
        raise refusal("This model", "all its layers are sliding windows")
    if not hasattr(params, "swa_gates_prefix_match"):
        needs = f"it needs SGLang {TESTED}, this is {installed_version()}"
        raise refusal("This model", f"it mixes full attention and sliding windows, and {needs}")
    if not params.swa_gates_prefix_match or getattr(allocator, "swa_req_ring", False):
        raise refusal("This model", "its sliding windows belong to requests, not to pages")


def _refuse_states(context: Any, flags: Any) -> None:
    require_known_states(context.params.req_to_token_pool)
    if context.is_hybrid_swa:
        raise refusal(
            "This model", "it has sliding windows and recurrent states, a tree has one beside pages"
        )
    if context.params.is_eagle:
        raise refusal("Speculative decoding of this model", "its states are ahead of what is accepted")
    if (mode := getattr(flags, "disaggregation_mode", "null")) != "null":
        raise refusal(f"--disaggregation-mode {mode} of this model", "states come from another server")


def _refuse_ropes(context: Any) -> None:
    """Raise ConfigError for a rope whose factors a batch decides.

    SGLang's `longrope` takes the long ones for all of a batch when one position in it is beyond what the
    short ones are for; Transformers' own ropes choose by the longest sequence of a pass, dynamic ones too.
    """
    config, runner = _config_of(context), getattr(context.tp_worker, "model_runner", None)
    own = type(getattr(runner, "model", None)).__name__.startswith("Transformers")
    text, length = getattr(config, "hf_text_config", None), getattr(config, "context_len", None)
    rope = unfixed(text, length, (LONG, DYNAMIC) if own else (LONG,))
    if rope is not None:
        raise refusal(
            f"This model's rope {rope.kind} with --context-length {length}",
            "its factors are chosen by the longest sequence of a batch, so no prefix has KV of its own; "
            f"--context-length {rope.trained} has all take the same",
        )


def _refuse_legacy(context: Any, flags: Any) -> None:
    """Refuse settings that need more than the older contract has."""
    needs = f"it needs SGLang {TESTED}, this is {installed_version()}"
    if context.is_hybrid_swa or context.is_hybrid_ssm:
        raise refusal("This model", f"it mixes full attention and other layers, and {needs}")
    if flags.hicache_storage_backend is not None:
        raise refusal(f"--hicache-storage-backend {flags.hicache_storage_backend}", needs)
    if context.params.enable_kv_cache_events:
        raise refusal("--kv-events-config", needs)


def _build(context: Any, flags: Any, api: Api) -> Any:
    params = context.params
    device = torch.device(params.token_to_kv_pool_allocator.device)
    streams = streams_for(device, context.tp_worker)
    # What stays on the device has no name: no adapter's weights are read for one.
    given = getattr(flags, "lora_paths", None)
    if given or getattr(flags, "enable_lora", False):
        keep_apart()
    adapters = LoraAdapters.given(given if context.enable_hierarchical_cache else None, names_are_hub())
    weights = _weights_of(context, flags) if context.enable_hierarchical_cache else UNSEEN
    port = port_of_environment(os.environ)
    explains = context.enable_hierarchical_cache and api is not Api.FINISHED_REQ and port is not None
    runtime = None if streams is None else Runtime(streams=streams)
    inner = _inner(context, flags, adapters, weights, runtime, explains)
    controller = None
    if inner.has_host:
        controller = ControllerView(inner.layer_done_counter, streams)
        gate_reads(params, context.tp_worker, inner.layer_done_counter)
    if api is Api.FINISHED_REQ:
        from hiradix.adapters.sglang.legacy import HiRadixLegacyCache

        return HiRadixLegacyCache(params, inner, controller)
    if controller is None:
        from hiradix.adapters.sglang.cache import HiRadixPrefixCache

        return HiRadixPrefixCache(params, inner)  # as in `legacy`, no page outlives an adapter's id
    from hiradix.adapters.sglang.queue_order import follow_queue
    from hiradix.adapters.sglang.tiers import HiRadixHostCache
    from hiradix.adapters.sglang.updates import watch_updates

    watch_updates()
    follow_queue()
    cache = HiRadixHostCache(params, inner, controller, adapters)
    extra = extra_config(flags)
    cache.watch(weights, extra)
    cache.read_attach_rules = partial(_attach_rules, flags.hicache_storage_backend, extra)
    cache.attach_rules = cache.read_attach_rules()
    if port is not None:
        cache.listen(port, getattr(flags, "admin_api_key", None))
    return cache


def _weights_of(context: Any, flags: Any) -> Weights:
    """The model's as they are in memory; with SGLang's memory saver they may be away."""
    runner, params = getattr(context.tp_worker, "model_runner", None), context.params
    group = params.attn_tp_cache_group or params.tp_cache_group
    place = place_in(group)
    return Weights(
        getattr(runner, "model", None),
        bool(getattr(flags, "enable_memory_saver", False)),
        place,
        least_over(group) if place[1] > 1 else None,
        getattr(_config_of(context), "dtype", None),
    )


def streams_for(device: torch.device, tp_worker: Any) -> FencedStreams | None:
    """The copies' streams on a CUDA device, behind the worker's forward stream: older SGLangs run their
    forward ahead as well, but do not set it as a fence."""
    if device.type != "cuda":
        return None
    return FencedStreams(device, getattr(getattr(tp_worker, "model_runner", None), "forward_stream", None))


def gate_reads(params: Any, tp_worker: Any, gate: Any) -> None:
    """Have a layer of SGLang's pool read only when its load back has come so far."""
    requests = params.req_to_token_pool
    gate_pool(params.token_to_kv_pool_allocator.get_kvcache(), gate)
    if hasattr(requests, "mamba_pool"):
        requests.register_layer_transfer_counter(gate)
    tp_worker.register_hicache_layer_transfer_counter(gate)


def _inner(
    context: Any,
    flags: Any,
    adapters: LoraAdapters,
    weights: Weights,
    runtime: Runtime | None,
    explains: bool,
) -> PrefixCache:
    """Our cache over SGLang's pools, device only or with host and storage."""
    params, config = context.params, _config(context, flags)
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    # What stays on the device has no name: no weights are read for one.
    is_named = config.enable_hierarchical_cache
    model = _identity(context, flags, weights) if is_named else ModelIdentity("")
    ours: dict[str, Any] = {
        "adapter_of": adapters.of,
        "explain_names": config.explain_names if explains else 0,
        "intents": intent_limits(os.environ),
    }
    if context.is_hybrid_swa:
        own = dataclasses.replace(own_params(params, HybridPort), **ours)
        return build_hybrid_cache(config, own, window_pools(kvcache), model, runtime)
    if context.is_hybrid_ssm:
        requests = params.req_to_token_pool
        records = StateRecords(requests.mamba_allocator)
        own = dataclasses.replace(own_params(params), **ours, state_records=records)
        pools = state_pools(kvcache, requests, params.page_size)
        return build_hybrid_cache(config, own, pools, model, runtime)
    pool = device_pool(kvcache, params.page_size)
    own = dataclasses.replace(own_params(params), **ours)
    return build_prefix_cache(config, own, pool, model, runtime)


def _config(context: Any, flags: Any) -> HiCacheConfig:
    """SGLang's flags under the same names. Its auto-sizing has already put a number for the ratio."""
    own = own_settings(os.environ)
    return cache_config(
        flags,
        context.params,
        extra_config(flags),
        context.enable_hierarchical_cache,
        hicache_host_memory_fraction=1.0,
        hicache_no_regret=own["hicache_no_regret"] == "on",
        hicache_storage_identity=own["hicache_storage_identity"],
        explain_names=own["explain_names"],
    )


def _attach_rules(backend: str | None, extra: ExtraConfig) -> AttachRules:
    """The rules for what requests may attach, from the variables and the file as they are now."""
    own = own_settings(os.environ)
    for note in own.notes:
        logger.info(note)
    return rules_of(own["attachable"], own["attach_allow"], own.where, default_of(backend, extra))


def own_params(params: Any, port: type[AllocatorPort] = AllocatorPort) -> CacheInitParams:
    """SGLang's CacheInitParams as ours, its allocator behind `port`; its draft's window counts too."""
    return dataclasses.replace(as_ours(params, port), disable=False, ranks_on_host=_ranks_on_host())


def _ranks_on_host() -> int:
    """SGLang's count of the ranks on this machine, data parallel ones too; 0 where it keeps none."""
    try:
        from sglang.srt.mem_cache.pool_host.base import ranks_per_host
    except ImportError:  # older ones
        return 0
    return int(ranks_per_host())


def _identity(context: Any, flags: Any, weights: Weights = UNSEEN) -> ModelIdentity:
    """The identity that keeps this model's pages apart from another's. The type of fp8 elements is not that of
    their memory.

    weights: as they are in memory; they count where their files are not here, or are not all there is.
    """
    kvcache, params = context.params.token_to_kv_pool_allocator.get_kvcache(), context.params
    tp_rank, tp_size = place_in(params.attn_tp_cache_group or params.tp_cache_group)
    revision, folder = getattr(flags, "revision", None), getattr(flags, "download_dir", None)
    origin = origin_of(flags.model_path, revision, folder, is_hub=names_are_hub())
    is_seen = origin.is_read and load_format(flags) in USUAL_FORMATS
    seen = "" if is_seen or not weights.first else f"+{weights.first}"
    model = ModelIdentity(
        model_id=flags.served_model_name or flags.model_path,
        revision=f"{origin.revision}{seen}:{kvcache.dtype}{layout_of(kvcache)}",
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
    )
    return run_with(model, _otherwise(context, flags))


def _otherwise(context: Any, flags: Any) -> dict[str, Any]:
    """Flags that make these weights give other KV than their files ask for, by name; files that they name are
    read."""
    given = run_options(flags)
    kvcache, config = context.params.token_to_kv_pool_allocator.get_kvcache(), _config_of(context)
    dtype = getattr(config, "dtype", None)
    if dtype not in (None, kvcache.dtype):  # the KV cache's says what is kept, not what it is computed in
        given["dtype"] = str(dtype)
    given["rope"] = lengths_that_decide(getattr(config, "hf_text_config", None))
    if context.params.pp_size > 1:
        given["layers"] = layers_of(kvcache)
    return given


def _config_of(context: Any) -> Any:
    """SGLang's ModelConfig."""
    return getattr(context, "model_config", None)
