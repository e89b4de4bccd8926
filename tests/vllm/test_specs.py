"""Every class of vLLM's KV cache specs: described, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hiradix.adapters.vllm.layout import Latent, grouping, shape_of
from hiradix.errors import ConfigError
from hiradix.tree import UNBOUNDED

BLOCK = 16
ATTENTION: dict[str, Any] = {
    "block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32
}  # fmt: skip
FULL = specs.FullAttentionSpec(**ATTENTION)
STATES: dict[str, Any] = {
    "block_size": BLOCK, "shapes": ((3, 8), (2, 4, 4)), "dtypes": (torch.bfloat16, torch.float32),
    "mamba_type": MambaAttentionBackendEnum.GDN_ATTN, "mamba_cache_mode": "align",
}  # fmt: skip
SERVED = {
    specs.FullAttentionSpec: (FULL, UNBOUNDED),
    specs.MLAAttentionSpec: (specs.MLAAttentionSpec(**ATTENTION | {"num_kv_heads": 1}), UNBOUNDED),
    specs.SlidingWindowSpec: (specs.SlidingWindowSpec(**ATTENTION, sliding_window=40), 3),
    specs.ChunkedLocalAttentionSpec: (
        specs.ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64),
        4,
    ),
    specs.MambaSpec: (specs.MambaSpec(**STATES), 1),
}


def subclasses(kind: type) -> list[type]:
    return [found for one in kind.__subclasses__() for found in (one, *subclasses(one))]


@pytest.mark.parametrize("kind", SERVED, ids=lambda kind: kind.__name__)
def test_what_is_served_becomes_a_component_and_arrays(kind: type) -> None:
    spec, reach = SERVED[kind]
    found = grouping([FULL, spec])
    assert found.page_size == BLOCK and found.groups == (0, 1)
    assert found.components[1].reach == reach
    assert found.components[1].per_page == (kind is not specs.MambaSpec)
    latent = Latent(6, 2) if kind is specs.MLAAttentionSpec else None
    rows = 1 if kind is specs.MambaSpec else BLOCK
    arrays = shape_of(spec, 3, latent).arrays
    assert sum(rows * array.row_bytes for array in arrays) == spec.page_size_bytes


@pytest.mark.parametrize(
    "kind",
    [kind for kind in subclasses(specs.KVCacheSpec) if kind not in SERVED],
    ids=lambda kind: kind.__name__,
)
def test_every_other_class_is_refused_by_name(kind: type) -> None:
    spec = object.__new__(kind)
    object.__setattr__(spec, "block_size", BLOCK)
    with pytest.raises(ConfigError, match=kind.__name__):
        grouping([FULL, spec])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mamba_cache_mode": "none"}, "--enable-prefix-caching"),
        ({"num_speculative_blocks": 1}, "speculative"),
    ],
)
def test_states_that_are_not_final_at_a_blocks_end_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grouping([FULL, specs.MambaSpec(**STATES | changed)])
