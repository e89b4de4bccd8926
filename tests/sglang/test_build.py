"""What is put together from SGLang's flags and records: which weights are looked at, whose memory counts."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import Phi3Config

from hiradix.adapters.sglang import cache_factory, lora_adapters, updates
from hiradix.adapters.sglang.cache import HiRadixPrefixCache
from hiradix.adapters.sglang.support import Api, refuse_allocator
from hiradix.adapters.sglang.tiers import HiRadixHostCache
from hiradix.errors import ConfigError
from hiradix.prefix_cache import Origin
from tests.sglang.rig import NUM_TOKENS, PAGE, Rig


def built(folder: Path, is_tiered: bool, **more: Any) -> Any:
    """The cache for SGLang's records over pools as a rig has them, with an adapter of `--lora-paths`."""
    kvcache, allocator = Rig.make_pool(None)  # type: ignore[arg-type]
    del kvcache
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(8, 2 * NUM_TOKENS, "cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
    )
    flags: dict[str, Any] = {
        "model_path": str(folder), "served_model_name": "m", "revision": None, "hicache_ratio": 2.0,
        "hicache_storage_backend": None, "hicache_storage_backend_extra_config": None,
        "lora_paths": [SimpleNamespace(lora_id="0f" * 16, lora_path=str(folder))],
    }  # fmt: skip
    context = SimpleNamespace(
        model_config=None, params=params, is_hybrid_swa=False, is_hybrid_ssm=False,
        enable_hierarchical_cache=is_tiered,
        tp_worker=SimpleNamespace(register_hicache_layer_transfer_counter=lambda gate: None),
    )  # fmt: skip
    return cache_factory._build(context, SimpleNamespace(**flags | more), Api.CHECKPOINT)


@pytest.mark.parametrize("is_tiered", [False, True])
def test_weights_are_looked_at_only_where_pages_outlive_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_tiered: bool
) -> None:
    """Over the device alone neither the model's nor an adapter's: a far disk makes that a long start."""
    looked = []

    def origin(path: str, *_: Any, config_name: str = "config.json", **__: Any) -> Origin:
        looked.append(config_name)
        return Origin("d" * 32, True)

    for module in (cache_factory, lora_adapters):
        monkeypatch.setattr(module, "origin_of", origin)
    cache = built(tmp_path, is_tiered)
    assert type(cache) is (HiRadixHostCache if is_tiered else HiRadixPrefixCache)
    assert sorted(looked) == (["adapter_config.json", "config.json"] if is_tiered else [])
    cache.release_host_resources()


def test_every_rank_on_the_machine_counts_in_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with DP attention: each data parallel rank has a host pool, and no rank beside it in its group."""
    built(tmp_path, True).release_host_resources()
    monkeypatch.setattr(base, "ranks_per_host", lambda: 1 << 40)
    with pytest.raises(ConfigError, match=rf"--hicache-ratio 2 requests .* per rank x {1 << 40} ranks"):
        built(tmp_path, True)


def test_pages_that_are_spread_over_ranks_are_refused() -> None:
    """SGLang's own allocator of them: it gives no pages by their number alone."""
    kvcache, paged = Rig.make_pool(None)  # type: ignore[arg-type]
    refuse_allocator(paged)
    spread = PageInterleavePoolAllocator(NUM_TOKENS, PAGE, 2, torch.float32, "cpu", kvcache, need_sort=False)
    with pytest.raises(ConfigError, match="PageInterleavePoolAllocator .--enable-kv-cache-sharding. is not"):
        refuse_allocator(spread)


def test_no_request_without_an_adapter_is_in_an_adapters_namespace() -> None:
    """SGLang puts the adapter's id behind what the client gave, and nothing between."""
    lora = "0f" * 16
    lora_adapters.keep_apart()
    lora_adapters.keep_apart()
    cases = [
        (None, lora),
        (lora, None),
        ("x", lora),
        ("x" + lora, None),
        (lora + "\0", None),
        ("x", None),
        (None, None),
    ]
    keys = []
    for extra_key, lora_id in cases:
        tokens = array("q", range(8))
        keys.append(Req("r", "", tokens, SamplingParams(), extra_key=extra_key, lora_id=lora_id).extra_key)
    assert len(set(keys)) == len(cases) and keys[-2:] == ["x", None]
    known = lora_adapters.LoraAdapters({lora: "d" * 32}, frozenset({lora}))
    assert [known.of(known.named(key)) for key in keys] == [lora, "", lora, "", "", "", ""]


@pytest.mark.parametrize(
    ("target", "put_in", "hook"),
    [
        (lora_adapters._REQUEST, lora_adapters.keep_apart, lora_adapters._made),
        (f"{updates._MANAGER}.end_weight_update", updates.watch_updates, updates._look),
        (f"{updates._MANAGER}.flush_cache_after_weight_update", updates.watch_updates, updates._updated),
    ],
)
def test_calls_are_heard_of_that_another_plugin_has_hooked(
    monkeypatch: pytest.MonkeyPatch, target: str, put_in: Callable[[], None], hook: Any
) -> None:
    """Before ours and after: SGLang's registry applies what it has of a call once."""
    path, _, name = target.rpartition(".")
    owner, calls = pkgutil.resolve_name(path), []
    original = inspect.unwrap(getattr(owner, name))
    monkeypatch.setattr(owner, name, original)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())

    def heard(told: Any, *_: Any) -> None:
        calls.append(told)

    @functools.wraps(original)
    def plain(*_: Any) -> str:
        return "told"

    monkeypatch.setattr(owner, name, plain)
    monkeypatch.setattr(sys.modules[hook.__module__], hook.__name__, heard)
    HookRegistry.register(target, lambda *_: None)
    HookRegistry.apply_hooks()
    put_in()
    put_in()
    assert getattr(owner, name)(SimpleNamespace(), SimpleNamespace()) == "told"
    assert calls == ["told"]


@pytest.mark.parametrize(("length", "is_refused"), [(64, False), (65, True)])
def test_a_rope_that_batches_decide_is_refused(tmp_path: Path, length: int, is_refused: bool) -> None:
    """By SGLang's own records of a Phi-3, whose short factors are for 64 tokens."""
    half = [1.0] * 8
    config = Phi3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, vocab_size=64,
        intermediate_size=64, pad_token_id=0, max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_scaling={"type": "longrope", "short_factor": half, "long_factor": [4.0] * 8},
        architectures=["Phi3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    made = ModelConfig(str(tmp_path), context_length=length)
    context = SimpleNamespace(model_config=made, tp_worker=SimpleNamespace(model_runner=None))
    if not is_refused:
        cache_factory._refuse_ropes(context)
        return
    with pytest.raises(ConfigError, match="rope longrope with --context-length 65 .*--context-length 64 "):
        cache_factory._refuse_ropes(context)
