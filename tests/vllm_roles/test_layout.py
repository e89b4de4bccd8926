"""vLLM's cache tensors and groups as our layouts and components, and settings as our configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.adapters.vllm.layout import (
    Blocks,
    Interior,
    Latent,
    StateTensors,
    group_layers,
    grouping,
    layer_order,
    pool_of,
    shape_of,
    states_of,
)
from hiradix.adapters.vllm.settings import check_write_policy, parse_settings
from hiradix.errors import ConfigError
from hiradix.memory import HostPool, MLAShape, TorchTransport
from hiradix.tree import UNBOUNDED

BLOCKS, S, HEADS = 6, 8, 2


class Mode(Enum):
    NONE = 0
    FP8_PER_TENSOR = 1
    NVFP4 = 2
    INT8_PER_TOKEN_HEAD = 3
    FP8_PER_TOKEN_HEAD = 4


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = S
    num_kv_heads: int = HEADS
    head_size: int = 4
    head_size_v: int = 4
    dtype: torch.dtype = torch.float32
    kv_quant_mode: Mode = Mode.NONE
    tokens_per_state: int = 1
    state_content_bytes: int | None = None


class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 17


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 17


@dataclass(frozen=True)
class MambaSpec:
    """Of a layer whose state is a convolution's tail and a matrix, as vLLM's prefix cache keeps it."""

    block_size: int = S
    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (2, 2, 4))
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    mamba_type: str = "MAMBA2"
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0


class CrossAttentionSpec(FullAttentionSpec):
    pass


def round_trip(
    spec: Any,
    caches: list[torch.Tensor],
    latent: Latent | None = None,
    interior: Interior = Interior.TOKENS,
) -> None:
    """Blocks 1 and 4 to the host and back into 2 and 0, compared with the tensors themselves."""
    shape = shape_of(spec, len(caches), latent)
    pool = pool_of(shape, Blocks(S, BLOCKS, interior), caches)
    host = HostPool(shape, 3, S)
    before = [logical(cache).clone() for cache in caches]
    TorchTransport().copy_pages(pool, host, np.array([1, 4]), np.array([2, 0]))
    TorchTransport().copy_pages(host, pool, np.array([2, 0]), np.array([3, 0]))
    for cache, was in zip(caches, before, strict=True):
        now = logical(cache)
        assert torch.equal(now[3], was[1]) and torch.equal(now[0], was[4])
        assert torch.equal(now[[1, 2, 4, 5]], was[[1, 2, 4, 5]])


def logical(cache: torch.Tensor) -> torch.Tensor:
    """[B, S, H, C] by tokens, however the block is cut."""
    blocks, heads, tokens, content = cache.shape
    return cache.permute(0, 2, 1, 3).reshape(BLOCKS, blocks * tokens // BLOCKS, heads, content)


def test_heads_outside_tokens_as_on_cpus() -> None:
    round_trip(FullAttentionSpec(), [torch.randn(BLOCKS, HEADS, S, 8) for _ in range(3)])


def test_cpu_kernels_keep_keys_transposed_before_values() -> None:
    """The page on the host is what any engine would have: [S, H, D] of K, then of V."""
    spec, caches = FullAttentionSpec(), [torch.zeros(BLOCKS, HEADS, S, 8) for _ in range(2)]
    keys, values = torch.randn(2, 2, S, HEADS, 4)
    for layer, cache in enumerate(caches):
        inside = cache.view(BLOCKS, HEADS, 2, S * 4)
        inside[4, :, 0] = keys[layer].permute(1, 2, 0).reshape(HEADS, -1)
        inside[4, :, 1] = values[layer].permute(1, 0, 2).reshape(HEADS, -1)
    pool = pool_of(shape_of(spec, 2, None), Blocks(S, BLOCKS, Interior.K_THEN_V), caches)
    host = HostPool(shape_of(spec, 2, None), 1, S)
    TorchTransport().copy_pages(pool, host, np.array([4]), np.array([0]))
    assert torch.equal(host.k_buffer.permute(1, 0, 2, 3), keys)
    assert torch.equal(host.v_buffer.permute(1, 0, 2, 3), values)
    round_trip(spec, [torch.randn(BLOCKS, HEADS, S, 8) for _ in range(3)], interior=Interior.K_THEN_V)
    with pytest.raises(AssertionError, match="no planes"):
        pool.planes()


def test_tokens_outside_heads_cut_into_kernel_blocks() -> None:
    memory = [torch.randn(BLOCKS * 2, S // 2, HEADS, 8) for _ in range(2)]
    round_trip(FullAttentionSpec(), [one.permute(0, 2, 1, 3) for one in memory])


def test_layers_side_by_side_in_a_block() -> None:
    memory = torch.randn(BLOCKS, 3, S, HEADS, 8)
    round_trip(FullAttentionSpec(), [memory[:, layer].permute(0, 2, 1, 3) for layer in range(3)])


def test_values_of_another_size_than_keys() -> None:
    round_trip(FullAttentionSpec(head_size_v=6), [torch.randn(BLOCKS, HEADS, S, 10) for _ in range(2)])


def test_a_latent() -> None:
    spec = MLAAttentionSpec(num_kv_heads=1, head_size=12, head_size_v=0)
    latent = Latent(8, 4)
    assert isinstance(shape_of(spec, 2, latent), MLAShape)
    round_trip(spec, [torch.randn(BLOCKS, 1, S, 12) for _ in range(2)], latent)
    with pytest.raises(ConfigError, match="latent attention"):
        shape_of(spec, 2, None)


def test_heads_outside_tokens_cannot_be_cut() -> None:
    shape = shape_of(FullAttentionSpec(), 1, None)
    with pytest.raises(ConfigError, match="--block-size 4"):
        pool_of(shape, Blocks(S, BLOCKS), [torch.randn(BLOCKS * 2, HEADS, S // 2, 8)])


def test_scales_beside_the_data_are_refused() -> None:
    for spec in (FullAttentionSpec(kv_quant_mode=Mode.NVFP4), FullAttentionSpec(state_content_bytes=9)):
        with pytest.raises(ConfigError, match="--kv-cache-dtype"):
            shape_of(spec, 1, None)
    shape_of(FullAttentionSpec(kv_quant_mode=Mode.FP8_PER_TENSOR, dtype=torch.float8_e4m3fn), 1, None)


def test_scales_inside_of_a_tokens_cell_are_moved_with_it() -> None:
    """As heads or tokens come first in memory, cut into kernel blocks or not: K, its scale, V, its scale."""
    modes = [Mode.INT8_PER_TOKEN_HEAD, Mode.FP8_PER_TOKEN_HEAD]
    specs = [FullAttentionSpec(kv_quant_mode=mode, state_content_bytes=16) for mode in modes]
    for spec in specs:
        memory = [torch.randint(-128, 127, (BLOCKS, HEADS, S, 16), dtype=torch.int8) for _ in range(2)]
        round_trip(spec, memory)
        tokens_first = [torch.randint(-128, 127, (BLOCKS * 2, S // 2, HEADS, 16), dtype=torch.int8)]
        round_trip(spec, [one.permute(0, 2, 1, 3) for one in tokens_first])
    assert len({shape_of(spec, 2, None).numbers() for spec in specs}) == 2


def test_groups_become_components_the_first_full_one_in_front() -> None:
    found = grouping([SlidingWindowSpec(), FullAttentionSpec(), SlidingWindowSpec(sliding_window=9)])
    assert found.groups == (1, 0, 2) and found.page_size == S
    assert [component.reach for component in found.components] == [UNBOUNDED, 2, 1]
    assert grouping([SlidingWindowSpec()]).components[0].reach == UNBOUNDED


def test_states_are_of_a_boundary_and_chunks_look_back_as_far_as_they_are_long() -> None:
    found = grouping([MambaSpec(), ChunkedLocalAttentionSpec(), FullAttentionSpec(), MambaSpec()])
    assert found.groups == (2, 0, 1, 3)
    assert [(one.reach, one.per_page) for one in found.components[1:]] == [(1, False), (2, True), (1, False)]


def test_without_full_attention_the_widest_window_names_prefixes() -> None:
    """It is kept from the start on: more than its layers look at, and never less."""
    found = grouping([SlidingWindowSpec(sliding_window=9), MambaSpec(), SlidingWindowSpec(sliding_window=33)])
    assert found.groups == (2, 0, 1)
    assert [component.reach for component in found.components] == [UNBOUNDED, 1, 1]


def test_states_are_copied_whole_and_what_pads_their_blocks_is_left_alone() -> None:
    shape = shape_of(MambaSpec(), 2, None)
    assert isinstance(shape, StateTensors) and shape.num_bytes == 3 * 4 * 2 + 2 * 2 * 4 * 4
    caches = [torch.randint(0, 255, (BLOCKS, 1, 1, 200), dtype=torch.uint8) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    pool = states_of(shape, BLOCKS, [cache[..., : shape.num_bytes].view(torch.int8) for cache in caches])
    host = HostPool(shape, 3, 1)
    TorchTransport().copy_pages(pool, host, np.array([1, 4]), np.array([2, 0]))
    TorchTransport().copy_pages(host, pool, np.array([2, 0]), np.array([3, 0]))
    for cache, was in zip(caches, before, strict=True):
        own = slice(0, shape.num_bytes)
        assert torch.equal(cache[[3, 0], ..., own], was[[1, 4], ..., own])
        assert torch.equal(cache[..., shape.num_bytes :], was[..., shape.num_bytes :])
        assert torch.equal(cache[[1, 2, 4, 5]], was[[1, 2, 4, 5]])
    with pytest.raises(ConfigError, match="recurrent states of"):
        states_of(shape, BLOCKS, caches)


def test_states_of_other_tensors_are_other_pages() -> None:
    """Also where they are as many bytes."""
    specs = [
        MambaSpec(),
        MambaSpec(dtypes=(torch.float16, torch.float32)),
        MambaSpec(shapes=((4, 3), (2, 2, 4))),
        MambaSpec(shapes=((3, 4), (4, 4))),
        MambaSpec(shapes=((2, 2, 4), (3, 4)), dtypes=(torch.float32, torch.bfloat16)),
    ]
    numbers = [shape_of(spec, 2, None).numbers() for spec in specs]
    assert len(set(numbers)) == len(specs)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([MambaSpec()], "no KV cache group of attention"),
        ([MambaSpec(mamba_cache_mode="none"), FullAttentionSpec()], "--enable-prefix-caching"),
        ([MambaSpec(num_speculative_blocks=2), FullAttentionSpec()], "--speculative-config"),
        ([CrossAttentionSpec(), FullAttentionSpec()], "CrossAttentionSpec"),
        ([FullAttentionSpec(), FullAttentionSpec(block_size=16)], "different block sizes"),
    ],
)
def test_groups_that_are_refused(specs: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grouping(specs)


def test_layers_in_the_models_order() -> None:
    names = ["model.layers.10.attn", "model.layers.2.attn", "model.layers.0.attn"]
    order = layer_order(names)
    assert order == names[::-1]
    caches = dict.fromkeys(names, torch.empty(0))
    assert group_layers(order, names[:2], caches) == [1, 2]
    with pytest.raises(ConfigError, match="layers.3"):
        group_layers(order, ["model.layers.3.attn"], caches)


def test_settings_have_the_flags_names_and_defaults() -> None:
    settings = parse_settings({"hicache_size": 2, "radix_eviction_policy": "slru"}, 32)
    assert settings.cache.page_size == 32 and settings.cache.hicache_write_policy == "write_through"
    assert settings.load_mode == "auto" and settings.admin_port is None
    extra = {"prefetch_threshold": 32, "file_storage_path": "/x"}
    with_store = parse_settings(
        {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": extra}, 32
    )
    assert with_store.cache.hicache_storage_backend_extra_config.backend == {"file_storage_path": "/x"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hicache_sizes": 1}, "unknown key 'hicache_sizes'"),
        ({"load_mode": "later"}, "load_mode"),
        ({"admin_port": 70_000}, "admin_port"),
        ({"storage_after_reset": "gone"}, "storage_after_reset"),
        ({"hicache_storage_backend_extra_config": "{}"}, "must be an object"),
        ({"radix_eviction_policy": None}, "radix_eviction_policy must be text"),
        ({"radix_eviction_policy": ["lru"]}, "radix_eviction_policy must be text"),
        ({"radix_eviction_policy_config": "x"}, "radix_eviction_policy_config must be an object"),
        ({"served_model_name": ["m"]}, "served_model_name must be text"),
        ({"admin_api_key": 5}, "admin_api_key must be text"),
        ({"admin_api_key": ""}, "admin_api_key is empty"),
    ],
)
def test_bad_settings_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_settings(values, 32)


def test_each_data_parallel_rank_has_an_admin_port_of_its_own() -> None:
    """They are processes of one host with one configuration."""
    settings = parse_settings({"admin_port": 65_534}, 32)
    assert [settings.admin_port_of(rank) for rank in (0, 1)] == [65_534, 65_535]
    with pytest.raises(ConfigError, match="admin_port 65534.* rank 2 is 65536"):
        settings.admin_port_of(2)
    for values, port in (({}, None), ({"admin_port": 0}, 0)):
        assert parse_settings(values, 32).admin_port_of(3) == port


def test_write_back_needs_vllms_prefix_cache() -> None:
    settings = parse_settings({"hicache_write_policy": "write_back"}, 32)
    check_write_policy(settings, True)
    with pytest.raises(ConfigError, match="write_back.*prefix"):
        check_write_policy(settings, False)
    check_write_policy(parse_settings({}, 32), False)


def test_the_gate_is_on_unless_it_is_switched_off() -> None:
    assert parse_settings({}, 32).cache.hicache_no_regret is True
    assert parse_settings({"hicache_no_regret": "off"}, 32).cache.hicache_no_regret is False
    with pytest.raises(ConfigError, match="hicache_no_regret"):
        parse_settings({"hicache_no_regret": "maybe"}, 32)
