"""Everything the connector and the scheduler class use of vLLM, compared with its sources before anything is
built."""

from __future__ import annotations

from hiradix.adapters.probe import Call, Contract, Has, Names, Requirement

_KV = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = f"{_KV}.base"
_EVENTS = "vllm.distributed.kv_events"
_OUTPUT = "vllm.v1.core.sched.output"
_SPECS = "vllm.v1.kv_cache_interface"
_SCHEDULER = "vllm.v1.core.sched.scheduler"

# Where vLLM calls its connector.
_CALLERS = (
    _SCHEDULER,
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm.v1.worker.gpu.kv_connector",
    "vllm.model_executor.layers.attention.kv_transfer_utils",
)

USES: tuple[Requirement, ...] = (
    Contract(
        f"{_BASE}:KVConnectorBase_V1",
        "hiradix.adapters.vllm.connector:HiRadixConnector",
        ("connector", "kv_connector"),
        _CALLERS,
    ),
    Names("vllm.config", ("VllmConfig",)),
    Names(
        _BASE,
        (
            "KVConnectorHandshakeMetadata",
            "KVConnectorMetadata",
            "KVConnectorRole",
            "KVConnectorWorkerMetadata",
        ),
    ),
    Has(f"{_BASE}:KVConnectorRole", ("SCHEDULER", "WORKER")),
    Has(f"{_BASE}:KVConnectorBase_V1", ("_vllm_config", "_kv_cache_config")),
    Call(f"{_BASE}:KVConnectorBase_V1.bind_connector_metadata", 1),
    Call(f"{_BASE}:KVConnectorBase_V1.__init__", 3),
    Call(f"{_BASE}:KVConnectorTransferResults", 3, ()),
    Call(f"{_BASE}:KVConnectorTransferResults", (), ("finished_recving", "failed_recving")),
    Call(f"{_BASE}:KVConnectorWorkerMetadata.aggregate", 1),
    Call(f"{_BASE}:SupportsHMA.request_finished_all_groups", ("request", "block_ids")),
    Names(_EVENTS, ("KVCacheEvent", "MEDIUM_CPU")),
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
            "lora_name",
            "group_idx",
        ),
    ),
    Call(f"{_EVENTS}:BlockRemoved", (), ("block_hashes", "medium", "group_idx")),
    Call("vllm.v1.core.kv_cache_utils:maybe_convert_block_hash", 1),
    Has("vllm.v1.metrics.cache_hit_source:CacheHitSource", ("HOST",)),
    Has(f"{_KV}.metrics:KVConnectorStats", ("data",)),
    Has(
        f"{_KV}.metrics:KVConnectorPromMetrics",
        ("_counter_cls", "_gauge_cls", "_labelnames", "per_engine_labelvalues"),
    ),
    Has(
        "vllm.config.vllm:VllmConfig",
        (
            "cache_config",
            "device_config",
            "kv_events_config",
            "kv_transfer_config",
            "load_config",
            "max_concurrent_batches",
            "model_config",
            "parallel_config",
        ),
    ),
    Has(
        "vllm.config.kv_transfer:KVTransferConfig",
        ("is_kv_consumer", "is_kv_producer", "kv_connector_extra_config", "kv_load_failure_policy"),
    ),
    Has("vllm.config.parallel:ParallelConfig", ("data_parallel_index", "world_size")),
    Has("vllm.config.cache:CacheConfig", ("cache_dtype", "enable_prefix_caching")),
    Has(
        "vllm.config.model:ModelConfig",
        (
            "code_revision",
            "dtype",
            "enable_sleep_mode",
            "hf_config",
            "hf_config_path",
            "hf_overrides",
            "hf_text_config",
            "is_prefix_caching_supported",
            "max_model_len",
            "model",
            "model_weights",
            "multimodal_config",
            "override_generation_config",
            "quantization",
            "quantization_config",
            "revision",
        ),
    ),
    Call("vllm.config.model:ModelConfig.try_get_generation_config"),
    Call("vllm.config.model:ModelConfig.using_transformers_backend"),
    Has("vllm.config.load:LoadConfig", ("download_dir", "load_format", "model_loader_extra_config")),
    Has("vllm.lora.request:LoRARequest", ("load_inplace", "lora_int_id", "lora_name", "lora_path")),
    Has("vllm.multimodal.inputs:MultiModalFeatureSpec", ("identifier", "mm_position")),
    Has("vllm.multimodal.inputs:PlaceholderRange", ("length", "offset")),
    Has(
        f"{_OUTPUT}:SchedulerOutput",
        (
            "kv_connector_block_state",
            "num_scheduled_tokens",
            "scheduled_cached_reqs",
            "scheduled_new_reqs",
            "has_sync_kv_loads",
            "kv_cache_block_copies",
        ),
    ),
    Has(f"{_OUTPUT}:KVConnectorBlockState", ("boundary_state_offloads", "resolve_block_ids")),
    Has(
        f"{_OUTPUT}:CachedRequestData", ("new_block_ids", "num_computed_tokens", "req_ids", "resumed_req_ids")
    ),
    Has(f"{_OUTPUT}:NewRequestData", ("block_ids", "num_computed_tokens", "req_id")),
    Has(
        "vllm.v1.outputs:KVConnectorOutput",
        ("failed_recving", "invalid_block_ids", "kv_connector_worker_meta"),
    ),
    Has(
        "vllm.v1.request:Request",
        (
            "all_token_ids",
            "block_hashes",
            "cache_salt",
            "lora_request",
            "mm_features",
            "num_computed_tokens",
            "num_tokens",
            "prompt_embeds",
            "prompt_token_ids",
            "request_id",
            "resumable",
            "skip_reading_prefix_cache",
        ),
    ),
    Call("vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids"),
    Has("vllm.v1.core.block_pool:BlockPool", ("cached_block_hash_to_block",)),
    Has(
        f"{_SPECS}:KVCacheConfig",
        ("has_mamba_layers", "kv_cache_groups", "needs_kv_cache_zeroing", "num_blocks"),
    ),
    Has(f"{_SPECS}:KVCacheGroupSpec", ("kv_cache_spec", "layer_names")),
    Has(
        f"{_SPECS}:FullAttentionSpec",
        (
            "block_size",
            "dtype",
            "head_size",
            "head_size_v",
            "kv_quant_mode",
            "num_kv_heads",
            "state_content_bytes",
            "tokens_per_state",
        ),
    ),
    Has(f"{_SPECS}:SlidingWindowSpec", ("sliding_window",)),
    Has(
        f"{_SPECS}:MambaSpec",
        ("block_size", "dtypes", "mamba_cache_mode", "mamba_type", "num_speculative_blocks", "shapes"),
    ),
    Names(_SPECS, ("MLAAttentionSpec",)),
    Call("vllm.distributed.parallel_state:get_pp_group"),
    Call("vllm.distributed.parallel_state:get_tp_group"),
    Has("vllm.distributed.parallel_state:GroupCoordinator", ("rank_in_group", "world_size")),
)

# Of the scheduler class alone: without it the connector does not need them.
SCHEDULER_USES: tuple[Requirement, ...] = (
    Contract(
        "vllm.v1.core.sched.request_queue:RequestQueue",
        "hiradix.adapters.vllm.scheduler_class:AdmissionQueue",
        ("waiting", "request_queue", "from_queue"),
        (_SCHEDULER,),
    ),
    Names("vllm.v1.core.sched.async_scheduler", ("AsyncScheduler",)),
    Has(
        f"{_SCHEDULER}:Scheduler",
        (
            "block_size",
            "cache_config",
            "connector",
            "dcp_world_size",
            "hash_block_size",
            "kv_cache_config",
            "kv_cache_manager",
            "requests",
            "running",
            "waiting",
        ),
    ),
    Call(f"{_SCHEDULER}:Scheduler.add_request", ("request",)),
    Call(f"{_SCHEDULER}:Scheduler._free_request", ("request",)),
    Call(f"{_SCHEDULER}:Scheduler.schedule"),
    Call(f"{_SCHEDULER}:Scheduler.update_from_output", 2),
    Has("vllm.v1.core.kv_cache_manager:KVCacheManager", ("block_pool",)),
    Call("vllm.v1.core.block_pool:BlockPool.get_cached_block", 2),
    Has("vllm.v1.core.block_pool:BlockPool", ("free_block_queue", "num_gpu_blocks")),
    Call("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.popleft"),
    Call("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.prepend_n", 1),
    Call("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove", 1),
    Has("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue", ("num_free_blocks",)),
    Has("vllm.v1.core.kv_cache_utils:KVCacheBlock", ("block_hash", "is_null", "ref_cnt")),
    Call("vllm.v1.core.kv_cache_utils:resolve_block_hashes", 3),
    Has(f"{_OUTPUT}:SchedulerOutput", ("num_scheduled_tokens", "total_num_scheduled_tokens")),
    Has(
        "vllm.v1.request:Request",
        (
            "arrival_time",
            "block_hashes",
            "cache_salt",
            "max_tokens",
            "num_computed_tokens",
            "num_output_tokens",
            "num_tokens",
            "request_id",
            "resumable",
            "sampling_params",
            "session_id",
            "skip_reading_prefix_cache",
            "status",
        ),
    ),
    Has(
        "vllm.v1.request:RequestStatus",
        (
            "FINISHED_ABORTED",
            "FINISHED_ERROR",
            "FINISHED_LENGTH_CAPPED",
            "RUNNING",
            "WAITING_FOR_REMOTE_KVS",
        ),
    ),
    Has("vllm.sampling_params:SamplingParams", ("extra_args",)),
    Has("vllm.config.vllm:VllmConfig", ("max_concurrent_batches", "scheduler_config")),
    Has("vllm.config.scheduler:SchedulerConfig", ("async_scheduling", "policy", "scheduler_cls")),
    Has("vllm.config.model:ModelConfig", ("is_diffusion",)),
)
