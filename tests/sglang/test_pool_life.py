"""Pools with scales and indexers, of which SGLang runs no model on a CPU, through the life of a cache over them.

SGLang's real pool classes, allocator and records; what a forward would leave in a page is made of its tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from hiradix.adapters.sglang.cache_factory import own_params
from hiradix.config import HiCacheConfig
from hiradix.memory import DevicePool
from hiradix.memory.engine_pools import device_pool
from hiradix.prefix_cache import ModelIdentity, RadixCache, build_prefix_cache
from hiradix.transfer import Runtime
from tests.sglang.rig import Rig, explained
from tests.sglang.test_pools import SERVED, Described, bytes_of, sizes_of_the_cpu  # noqa: F401

KINDS = [name for name in SERVED if any(word in name for word in ("FP4", "MXFP8", "DSA", "fp4", "Sparse"))]


class PoolRig(Rig):
    """The rig over a pool of SGLang's, whose pages hold bytes that follow from their tokens."""

    pool: DevicePool

    def __init__(self, described: Described, storage: Path | None = None, **flags: Any):
        self._described = described
        super().__init__(storage, **flags)

    def make_pool(self) -> tuple[Any, Any]:
        kvcache = self._described.make()
        self.page = kvcache.page_size
        return kvcache, PagedTokenToKVPoolAllocator(
            kvcache.size, self.page, kvcache.dtype, "cpu", kvcache, need_sort=False
        )

    def make_inner(self, config: HiCacheConfig, params: Any, runtime: Runtime) -> RadixCache:
        self.pool = device_pool(self.kvcache, self.page)
        return build_prefix_cache(
            config, explained(own_params(params)), self.pool, ModelIdentity("rig"), runtime
        )

    def fill(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Whole pages alone: of others nothing is kept."""
        for first in range(0, len(slots) - self.page + 1, self.page):
            tokens = [int(value) for value in values[first : first + self.page]]
            for array in range(len(self.pool.shape.arrays)):
                for layer, view in enumerate(self.pool.layer_views(array)):
                    target = view[int(slots[first]) // self.page]
                    target.copy_(made_of(tokens, array, layer, target))

    def is_right(self, tokens: Sequence[int], node: Any) -> bool:
        """Whether the device has what these tokens' pages hold, for the path of `node`."""
        slots = self.cache.path_device_indices(node)
        assert len(slots) == len(tokens) // self.page * self.page
        found = [bytes_of(self.pool, int(slot) // self.page) for slot in slots[:: self.page]]
        self.fill(slots, torch.tensor(tokens, dtype=torch.float32))
        return found == [bytes_of(self.pool, int(slot) // self.page) for slot in slots[:: self.page]]

    def evict_all(self) -> None:
        super().evict_all()
        for array in range(len(self.pool.shape.arrays)):
            for view in self.pool.layer_views(array):
                view.view(torch.uint8).zero_()


def made_of(tokens: Sequence[int], array: int, layer: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes for a page's part in an array and layer."""
    seed = zlib.crc32(repr((list(tokens), array, layer)).encode())
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (like.numel() * like.element_size(),), generator=generator)
    return raw.to(torch.uint8).view(like.dtype).view(like.shape)


@pytest.mark.parametrize("name", KINDS)
def test_what_a_page_holds_comes_back_from_host_and_storage(name: str, tmp_path: Path) -> None:
    rig = PoolRig(SERVED[name], tmp_path, hicache_storage_identity="rig")
    size = rig.page
    known, other = ([first + n % 50 for n in range(2 * size)] for first in (3, 60))
    rig.run([*known, 5])
    rig.settle()
    rig.evict_all()
    req = rig.request([*known, 5])
    assert rig.admit(req).host_hit_length == 2 * size
    rig.settle()
    assert rig.is_right(known, req.last_node)
    rig.finish(req)
    rig.run([*other, 5])
    rig.settle()

    after = PoolRig(SERVED[name], tmp_path, hicache_storage_identity="rig")
    for prompt in (other, known):
        req = after.request([*prompt, 5])
        handle = after.prefetch(req)
        after.settle()
        assert after.cache.check_prefetch_progress(handle)
        assert after.cache.pop_prefetch_loaded_tokens(handle) == 2 * size
        assert after.admit(req).host_hit_length == 2 * size
        after.settle()
        assert after.is_right(prompt, req.last_node)
        after.finish(req)
        after.settle()
        after.evict_all()
    req = rig.request([*known, 5])
    rig.admit(req)
    rig.settle()
    spoilt = rig.cache.path_device_indices(req.last_node)[0] // size
    rig.pool.layer_views(0)[-1][int(spoilt)].view(torch.uint8).add_(1)
    assert not rig.is_right(known, req.last_node), "the control"
