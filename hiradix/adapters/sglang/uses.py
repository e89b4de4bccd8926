"""Everything the adapter uses of SGLang, one table per contract; SGLang's sources are compared with it at
start."""

from __future__ import annotations

from hiradix.adapters.probe import AnyField, Call, Contract, Has, Names, Requirement

_CACHE = "sglang.srt.mem_cache"
BASE = f"{_CACHE}.base_prefix_cache"
REGISTRY = f"{_CACHE}.registry"
_POOLS = f"{_CACHE}.memory_pool"
_ALLOCATORS = f"{_CACHE}.allocator"
_BATCH = "sglang.srt.managers.schedule_batch"
_PARTS = "sglang.srt.managers.scheduler_components"
_METRICS = "sglang.srt.observability.metrics_collector"
_EVENTS = "sglang.srt.disaggregation.kv_events"
_QUEUE = "sglang.srt.managers.schedule_policy:SchedulePolicy"
_WORKER = "sglang.srt.managers.tp_worker:TpModelWorker"

# Where SGLang calls the cache it has. The modules of disaggregated prefill and decode are left out.
CALLERS = (
    f"{_CACHE}.allocation",
    f"{_CACHE}.common",
    f"{_CACHE}.flush_cache",
    f"{_CACHE}.kv_cache_builder",
    f"{_CACHE}.prefill_budget",
    "sglang.srt.managers.cache_controller",
    _BATCH,
    "sglang.srt.managers.schedule_policy",
    "sglang.srt.managers.scheduler",
    f"{_PARTS}.batch_result_processor",
    f"{_PARTS}.invariant_checker",
    f"{_PARTS}.metrics_reporter",
    f"{_PARTS}.pool_stats_observer",
    f"{_PARTS}.weight_updater",
    "sglang.srt.session.session_controller",
)
# What SGLang asks of its own trees alone: with recurrent state, sessions or pools that are refused here.
_OF_ITS_OWN = frozenset(
    {
        "bind_prefetch_ticket",
        "components",
        "dec_host_lock_ref",
        "dec_swa_lock_only",
        "ensure_session_generation",
        "finish_external_linker_loads",
        "has_pending_cache_operations",
        "host_pool_group",
        "inc_host_lock_ref",
        "linker",
        "open_radix_session",
        "register_sidecar_pool",
        "release_swa_prefix_lock",
        "sidecar_pool_specs",
        "tree_core",
        "validate_retraction_host_capacity",
    }
)


# Beside those, with a cache that has no storage and no sliding windows.
_OF_STORAGE = frozenset(
    {
        "check_prefetch_progress",
        "pop_prefetch_loaded_tokens",
        "prefetch_from_storage",
        "sliding_window_size",
        "terminate_prefetch",
    }
)


def _contract(ours: str, unasked: frozenset[str] = frozenset()) -> Contract:
    return Contract(f"{BASE}:BasePrefixCache", ours, ("tree_cache",), CALLERS, _OF_ITS_OWN | unasked)


# With either contract, over the device and the host.
_ANY: tuple[Requirement, ...] = (
    Call(f"{REGISTRY}:register_radix_cache_backend", 2),
    Call(f"{REGISTRY}:registered_radix_cache_backends"),
    Call(f"{REGISTRY}:default_radix_cache_factory", 1),
    Has(
        f"{REGISTRY}:TreeCacheBuildContext",
        (
            "server_args",
            "params",
            "is_hybrid_swa",
            "is_hybrid_ssm",
            "enable_hierarchical_cache",
            "disable_radix_cache",
            "tp_worker",
            "model_config",
            "full_tokens_per_layer",
        ),
    ),
    Has(
        f"{_CACHE}.cache_init_params:CacheInitParams",
        (
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "page_size",
            "is_eagle",
            "eviction_policy",
            "tp_cache_group",
            "attn_tp_cache_group",
            "attn_cp_size",
            "pp_rank",
            "pp_size",
            "enable_kv_cache_events",
        ),
    ),
    Has("sglang.srt.configs.model_config:ModelConfig", ("context_len", "dtype", "hf_text_config")),
    Has("sglang.srt.model_executor.model_runner:ModelRunner", ("model",)),
    Has("sglang.srt.lora.lora_registry:LoRARef", ("lora_id", "lora_path")),
    Has(f"{_BATCH}:Req", ("extra_key", "lora_id")),
    Has(f"{BASE}:MatchPrefixParams", ("key",)),
    Has(f"{BASE}:EvictParams", ("num_tokens",)),
    Has(f"{BASE}:InitLoadBackParams", ("best_match_node", "host_hit_length", "mem_quota")),
    Call(f"{BASE}:EvictResult", ("num_tokens_evicted",)),
    Call(f"{BASE}:IncLockRefResult", (), ("delta",)),
    Call(f"{BASE}:DecLockRefResult", (), ("delta",)),
    Has(f"{_CACHE}.radix_cache:RadixKey", ("token_ids", "extra_key", "is_bigram", "limit")),
    Has(f"{_POOLS}:ReqToTokenPool", ("req_to_token",)),
    Call(f"{_POOLS}:ReqToTokenPool.write", 2),
    Has(f"{_ALLOCATORS}.base:BaseTokenToKVPoolAllocator", ("size", "device", "get_kvcache")),
    Has(f"{_ALLOCATORS}.paged:PagedTokenToKVPoolAllocator", ("free_pages", "merge_and_sort_free")),
    Call(f"{_ALLOCATORS}.paged:PagedTokenToKVPoolAllocator.available_size"),
    Call(f"{_ALLOCATORS}.paged:PagedTokenToKVPoolAllocator.alloc", 1),
    Call(f"{_ALLOCATORS}.paged:PagedTokenToKVPoolAllocator.free", 1),
    Has(
        f"{_POOLS}:MHATokenToKVPool",
        ("size", "dtype", "head_num", "head_dim", "v_head_dim", "k_buffer", "v_buffer"),
    ),
    Has(f"{_POOLS}:MLATokenToKVPool", ("kv_buffer", "kv_lora_rank")),
    Has(f"{_POOLS}:KVCache", ("start_layer", "end_layer")),
    Call(f"{_POOLS}:KVCache.register_layer_transfer_counter", 1),
    Call(f"{_WORKER}.register_hicache_layer_transfer_counter", 1),
    Has(_WORKER, ("model_runner",)),
    AnyField(
        (
            "sglang.srt.server_args",
            *(f"sglang.srt.arg_groups.fields.{name}" for name in ("memory", "model", "serving", "lora")),
        ),
        (
            "hicache_storage_backend",
            "hicache_storage_backend_extra_config",
            "download_dir",
            "enable_lora",
            "json_model_override_args",
            "load_format",
            "lora_paths",
            "model_path",
            "quantization",
            "revision",
            "served_model_name",
        ),
    ),
)

FINISHED_REQ: tuple[Requirement, ...] = (
    *_ANY,
    _contract("hiradix.adapters.sglang.legacy:HiRadixLegacyCache", _OF_STORAGE),
    Call(
        f"{BASE}:MatchResult",
        ("device_indices", "last_device_node", "last_host_node", "best_match_node", "host_hit_length"),
    ),
    Has(
        f"{_BATCH}:Req",
        (
            "rid",
            "origin_input_ids",
            "output_ids",
            "extra_key",
            "priority",
            "last_node",
            "prefix_indices",
            "req_pool_idx",
            "cache_protected_len",
            "pop_committed_kv_cache",
        ),
    ),
)

CHECKPOINT: tuple[Requirement, ...] = (
    *_ANY,
    _contract("hiradix.adapters.sglang.tiers:HiRadixHostCache"),
    Has(
        f"{_CACHE}.cache_init_params:CacheInitParams",
        (
            "enable_metrics",
            "dynamo_kv_event_format",
            "kv_event_lora_names",
            "sliding_window_size",
        ),
    ),
    Call(
        f"{BASE}:MatchResult",
        (
            "device_prefix_len",
            "last_device_node",
            "last_host_node",
            "best_match_node",
            "host_hit_length",
            "swa_host_hit_length",
        ),
        ("mamba_host_hit_length", "mamba_branching_seqlen"),
    ),
    Has(f"{BASE}:MatchPrefixParams", ("req", "cow_mamba")),
    Has(f"{BASE}:EvictParams", ("swa_num_tokens", "mamba_num")),
    Has(f"{BASE}:InitLoadBackParams", ("req",)),
    Call(f"{BASE}:EvictResult", ("num_tokens_evicted", "swa_num_tokens_evicted", "mamba_num_evicted")),
    Call(f"{BASE}:DecLockRefParams"),
    Call(f"{BASE}:TreeLock", ("node", "receipt")),
    Call(f"{BASE}:BasePrefixCache.free_kv_row", ("kv", "ranges")),
    Call(f"{BASE}:BasePrefixCache.init_metrics_collector"),
    Call(f"{BASE}:BasePrefixCache.update_eviction_metrics", 2),
    Has(f"{BASE}:BasePrefixCache", ("metrics_collector",)),
    Has(f"{_CACHE}.radix_cache:RadixKey", ("cache_salt",)),
    Has(
        f"{_BATCH}:Req",
        (
            "rid",
            "origin_input_ids",
            "output_ids",
            "full_untruncated_fill_ids",
            "extra_key",
            "cache_salt",
            "priority",
            "last_node",
            "prefix_len",
            "host_hit_length",
            "num_matched_prefix_tokens",
            "cache_request_handle",
            "lock",
            "kv",
        ),
    ),
    Call(f"{_BATCH}:Req.finished"),
    Has(
        f"{_BATCH}:ReqKvInfo",
        (
            "req_pool_idx",
            "cache_protected_len",
            "cache_inserted_len",
            "kv_committed_len",
            "mamba_pool_idx",
            "mamba_cow_src_index",
            "mamba_needs_clear",
            "mamba_last_track_seqlen",
            "mamba_prev_track_seqlen",
            "mamba_last_track_idx",
            "mamba_ping_pong_track_buffer",
            "holds_mamba",
        ),
    ),
    Has(
        f"{_POOLS}:HybridReqToTokenPool",
        ("mamba_pool", "mamba_allocator", "enable_mamba_extra_buffer", "mamba_ping_pong_track_buffer_size"),
    ),
    Call(f"{_POOLS}:HybridReqToTokenPool.free_mamba_cache", 1, ("mamba_ping_pong_track_buffer_to_keep",)),
    Call(f"{_POOLS}:HybridReqToTokenPool.donate_mamba_ping_pong_slot", 2),
    Call(f"{_POOLS}:HybridReqToTokenPool.get_mamba_ping_pong_other_idx", 1),
    Call(f"{_POOLS}:HybridReqToTokenPool.copy_mamba_state", 2),
    Has(f"{_POOLS}:MambaPool", ("mamba_layer_ids", "mamba_cache", "replayssm_write_pos", "_slot_siblings")),
    Call(f"{_POOLS}:MambaPool.copy_from", 2),
    Has(f"{_POOLS}:MambaPool.State", ("conv", "temporal")),
    Has(f"{_POOLS}:HybridLinearKVPool", ("full_kv_pool", "full_attention_layer_id_mapping")),
    Call(f"{_ALLOCATORS}.mamba:MambaSlotAllocator.alloc", 1),
    Call(f"{_ALLOCATORS}.mamba:MambaSlotAllocator.free", 1),
    Call("sglang.srt.runtime_context:mamba_checkpoint_grid", 1),
    Call(f"{_ALLOCATORS}.base:BaseTokenToKVPoolAllocator.free_segment", 1, ("start_pos",)),
    Has(
        f"{_ALLOCATORS}.swa:SWATokenToKVPoolAllocator",
        ("full_to_swa_index_mapping", "full_attn_allocator", "swa_attn_allocator", "size_full", "size_swa"),
    ),
    Call(f"{_ALLOCATORS}.swa:SWATokenToKVPoolAllocator.full_available_size"),
    Call(f"{_ALLOCATORS}.swa:SWATokenToKVPoolAllocator.swa_available_size"),
    Call(f"{_ALLOCATORS}.swa:SWATokenToKVPoolAllocator.free_full", 1),
    Call(f"{_ALLOCATORS}.swa:SWATokenToKVPoolAllocator.free_swa", 1),
    Has(
        f"{_CACHE}.swa_memory_pool:SWAKVPool", ("page_size", "layers_mapping", "full_kv_pool", "swa_kv_pool")
    ),
    Call(
        f"{_EVENTS}:BlockStored",
        (),
        (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "cache_salt",
            "lora_name",
        ),
    ),
    Call(f"{_EVENTS}:BlockRemoved", (), ("block_hashes", "medium")),
    Call(f"{_EVENTS}:AllBlocksCleared"),
    Has(f"{_CACHE}.events:LoRANameTable", ("resolve",)),
    Names(_METRICS, ("STAT_LOGGER_ROLE_STORAGE",)),
    Call(f"{_METRICS}:radix_cache_metric_labels", 3),
    Call(f"{_METRICS}:resolve_collector_class", 2),
    Call(f"{_METRICS}:StorageMetricsCollector", (), ("labels",)),
    Has(f"{_METRICS}:StorageMetricsCollector", ("labels", "_gauge_cls")),
    Has(f"{_METRICS}:RadixCacheMetricsCollector", ("labels", "_counter_cls")),
    Call(f"{_METRICS}:StorageMetricsCollector.log_prefetched_tokens", 1),
    Call(f"{_METRICS}:StorageMetricsCollector.log_backuped_tokens", 1),
    Call(f"{_METRICS}:StorageMetricsCollector.log_storage_prefetch_unfulfilled_tokens", 2),
    Call(f"{_METRICS}:RadixCacheMetricsCollector.increment_load_back_num_tokens", 2),
    Call(f"{_METRICS}:RadixCacheMetricsCollector.increment_load_back_num_bytes", 1),
    Call(f"{_METRICS}:RadixCacheMetricsCollector.observe_load_back_duration", 1),
    Call(f"{_METRICS}:RadixCacheMetricsCollector.increment_backup_num_tokens", 2),
    Call(f"{_METRICS}:RadixCacheMetricsCollector.increment_backup_num_bytes", 1),
    Call(f"{_METRICS}:RadixCacheMetricsCollector.observe_backup_duration", 1),
    Call("sglang.srt.layers.dp_attention:is_dp_attention_enabled"),
    Call("sglang.srt.runtime_context:get_observability"),
    Call("sglang.srt.runtime_context:get_parallel"),
    Call(f"{_QUEUE}.calc_priority", ("waiting_queue",)),
    Call(f"{_QUEUE}._compute_prefix_matches", 2),
    Has(_QUEUE, ("policy", "tree_cache")),
    Has(
        f"{_PARTS}.weight_updater:SchedulerWeightUpdaterManager",
        ("scheduler", "flush_cache_after_weight_update", "end_weight_update"),
    ),
)
