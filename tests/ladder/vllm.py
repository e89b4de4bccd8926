"""vLLM on the ladder, on its CPU build.

Its own prefix cache is the device's tier. Where a model has recurrent layers it stays on without the connector,
too: steps then end where they do with it, and rounding in bfloat16 depends on that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.tiny_model import write_tiny_model
from tests.ladder import store
from tests.ladder.climb import LadderEngine, Life, PuppetLife, Run, Start
from tests.puppet import Puppet
from tests.seeded_model import seeded_model
from tests.vllm.player import KV_BYTES

BLOCK = 32
STATE_BLOCK = 128  # vLLM's least on CPUs that makes the blocks of all groups as large
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
WIDE = {"hidden_size": 128, "num_key_value_heads": 4}
STATES: dict[str, Any] = {"max_model_len": 1024}
HYBRID: dict[str, Any] = {
    "skip_tokenizer_init": True, "enable_prefix_caching": True, "block_size": None,
    "disable_hybrid_kv_cache_manager": False,
}  # fmt: skip


def _model(kind: str, dtype: str = "float32", **fields: Any) -> Callable[[Path], None]:
    """Writes a seeded model of transformers' class `kind`."""

    def write(folder: Path) -> None:
        import torch

        seeded_model(kind, 3, **SIZES | fields).to(getattr(torch, dtype)).save_pretrained(folder)

    return write


RUNS = {
    "full": Run(
        write_tiny_model, BLOCK, {"enable_prefix_caching": True},
        {"num_gpu_blocks_override": 28, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    ),
    "window": Run(
        _model(
            "Gemma3", head_dim=32, query_pre_attn_scalar=32, sliding_window=64, num_hidden_layers=7,
            layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"],
        ),
        BLOCK, HYBRID | {"block_size": BLOCK},
        {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    ),
    # the kernel for any processor: what those with AMX have takes no float32; its blocks are of 16 tokens
    "latent": Run(
        _model(
            "DeepseekV2", num_hidden_layers=2, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, head_dim=64, first_k_dense_replace=2,
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1,
        ),
        16,
        {
            "skip_tokenizer_init": True, "max_num_seqs": 1, "attention_backend": "CPU_MLA",
            "enable_prefix_caching": True, "block_size": 16,
        },
        {"max_num_batched_tokens": 64},
        own_hits=True,
        alone="the kernel answers otherwise where prompts share a step, without a connector too",
    ),
    "gated delta": Run(
        _model(
            "Qwen3Next", "bfloat16", **WIDE, head_dim=128, linear_num_key_heads=1, linear_num_value_heads=2,
            linear_key_head_dim=128, linear_value_head_dim=128, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64, shared_expert_intermediate_size=64, full_attention_interval=4,
        ),
        STATE_BLOCK, HYBRID | STATES | {"dtype": "bfloat16", "max_num_batched_tokens": 1024},
        {"num_gpu_blocks_override": 32, "max_num_seqs": 8},
    ),
    # The CPU kernels of Mamba 2 leave no state behind inside of a step, so no step goes over a block's end.
    "mamba 2": Run(
        _model(
            "GraniteMoeHybrid", **WIDE, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=32, mamba_n_groups=1,
            mamba_expand=2, layer_types=["mamba", "mamba", "attention", "mamba"], num_local_experts=4,
            num_experts_per_tok=2, shared_intermediate_size=64,
        ),
        STATE_BLOCK, HYBRID | STATES | {"max_num_batched_tokens": STATE_BLOCK},
        {"num_gpu_blocks_override": 32, "max_num_seqs": 8},
        alone="a prefill takes whole steps, as these are of one block",
    ),
}  # fmt: skip


class VllmProcess(Puppet):
    module = "tests.ladder.vllm_play"


class WarmVllmProcess(VllmProcess):
    is_warm = True


class Vllm(LadderEngine):
    name = "vLLM"
    runs = RUNS

    def start(self, run: Run, model: Path, start: Start) -> Life:
        engine: dict[str, Any] = {
            "model": str(model), "dtype": "float32", "max_model_len": 512, "enforce_eager": True,
            "max_num_seqs": 16, "block_size": BLOCK, "kv_cache_memory_bytes": KV_BYTES,
        }  # fmt: skip
        connector = None
        if start.pages is not None:
            connector = {
                "hicache_size": 0.3, "hicache_storage_backend": store.NAME,
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": store.keys(start.pages, run.page),
                "hicache_storage_identity": "ladder", "served_model_name": "tiny", "drain_timeout_s": 60.0,
                "storage_after_reset": "same",
            }  # fmt: skip
            if start.layout:
                connector["hicache_mem_layout"] = start.layout
        own = dict(run.engine)
        is_cached = start.pages is not None or run.own_hits or own.get("block_size", BLOCK) is None
        own["enable_prefix_caching"] = is_cached
        setup = {
            "engine": engine | own | dict(start.settings), "connector": connector, "fault": str(start.fault)
        }  # fmt: skip
        return PuppetLife((VllmProcess if start.is_new else WarmVllmProcess)(setup, start.log))
