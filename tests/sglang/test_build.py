"""What is put together from SGLang's flags and records: which weights are looked at, whose memory counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.pool_host import base

from hiradix.adapters.sglang import adapters, build
from hiradix.adapters.sglang.cache import HiRadixPrefixCache
from hiradix.adapters.sglang.support import Api
from hiradix.adapters.sglang.tiers import HiRadixHostCache
from hiradix.errors import ConfigError
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
        params=params, is_hybrid_swa=False, enable_hierarchical_cache=is_tiered,
        tp_worker=SimpleNamespace(register_hicache_layer_transfer_counter=lambda gate: None),
    )  # fmt: skip
    return build._build(context, SimpleNamespace(**flags | more), Api.CHECKPOINT)


@pytest.mark.parametrize("is_tiered", [False, True])
def test_weights_are_looked_at_only_where_pages_outlive_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_tiered: bool
) -> None:
    """Over the device alone neither the model's nor an adapter's: a far disk makes that a long start."""
    looked = []

    def digest(path: str, config_name: str) -> str:
        looked.append(config_name)
        return "d" * 32

    for module in (build, adapters):
        monkeypatch.setattr(module, "weights_digest", digest)
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
