"""The reference engine's device pools: one for all layers, or a second one for the layers with a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hiradix.engine.api import EngineConfig
from hiradix.engine.attention import KVBuffers
from hiradix.engine.model import Windows
from hiradix.engine.packing import LayerPool
from hiradix.engine.slots import Allocator, num_tokens
from hiradix.errors import ConfigError
from hiradix.memory import (
    CacheShape,
    DevicePool,
    HybridPools,
    HybridSlotAllocator,
    KVShape,
    ReqToTokenPool,
    SlotAllocator,
    page_bytes,
)


@dataclass(frozen=True, slots=True)
class EnginePools:
    """Device memory and who has which slot of it. hybrid, windows: of a model with a pool for its windows."""

    device: DevicePool
    allocator: Allocator
    rows: ReqToTokenPool
    hybrid: HybridPools | None = None
    windows: Windows | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that all requests together can have."""
        return num_tokens(self.allocator)

    @property
    def bytes_per_token(self) -> int:
        """Of a token that is in every pool."""
        pools = self.all
        return sum(page_bytes(pool.shape, pool.page_size) for pool in pools) // self.device.page_size

    @property
    def all(self) -> tuple[DevicePool, ...]:
        return (self.device,) if self.hybrid is None else (self.hybrid.full, self.hybrid.window)

    def layer_pools(self, buffers: Sequence[KVBuffers]) -> list[LayerPool]:
        """What a forward pass reads and writes: `buffers` of all the pools, and which layers are where."""
        if self.hybrid is None or self.windows is None:
            return [LayerPool(buffers[0], range(self.device.shape.num_layers))]
        assert isinstance(self.allocator, HybridSlotAllocator), f"{self.allocator} for pools with windows"
        mapping = self.allocator.full_to_swa_index_mapping
        return [
            LayerPool(buffers[0], self.windows.full_layers),
            LayerPool(buffers[1], self.windows.window_layers, self.windows.size, mapping),
        ]


def build_pools(
    config: EngineConfig, shape: CacheShape, windows: Windows | None, context_length: int
) -> EnginePools:
    """The pools for `config`; raises ConfigError naming the field that has a bad value."""
    size = config.cache.page_size
    num_pages = config.max_total_tokens // size
    if num_pages < 1:
        raise ConfigError(f"max_total_tokens={config.max_total_tokens}: less than a page of {size}")
    row_tokens = min(-(-context_length // size), num_pages) * size
    rows = ReqToTokenPool(config.max_running_requests, row_tokens, "cpu")
    if config.swa_full_tokens_ratio is None:
        pool = DevicePool(shape, num_pages, size, device=config.device)
        return EnginePools(pool, SlotAllocator(num_pages * size, size, config.device, pool), rows)
    if windows is None or not isinstance(shape, KVShape):
        ratio = config.swa_full_tokens_ratio
        raise ConfigError(f"swa_full_tokens_ratio={ratio}: the model does not mix full and window layers")
    num_window_pages = _num_window_pages(config, windows, num_pages, row_tokens)
    full = _pool(shape, windows.full_layers, num_pages, config)
    window = _pool(shape, windows.window_layers, num_window_pages, config)
    tokens = num_pages * size, num_window_pages * size
    allocator = HybridSlotAllocator(*tokens, size, config.device, full)
    hybrid = HybridPools(full, window, windows.full_layers, windows.window_layers)
    return EnginePools(full, allocator, rows, hybrid, windows)


def _pool(shape: KVShape, layers: Sequence[int], num_pages: int, config: EngineConfig) -> DevicePool:
    own = replace(shape, num_layers=len(layers))
    return DevicePool(own, num_pages, config.cache.page_size, device=config.device)


def _num_window_pages(config: EngineConfig, windows: Windows, num_pages: int, row_tokens: int) -> int:
    """Pages of the window pool, which must hold what one request needs at a time.

    Its lock holds a window of what it shares to its end. Beside that it has a chunk, or later a window of its
    own, and the pages that these begin and end in.
    """
    assert config.swa_full_tokens_ratio is not None
    size = config.cache.page_size
    chunk = min(config.chunked_prefill_size or row_tokens, row_tokens)
    reach = -(-windows.size // size)
    least = reach + max(reach, -(-chunk // size)) + 2
    pages = int(num_pages * config.swa_full_tokens_ratio)
    if pages < min(least, num_pages):
        raise ConfigError(
            f"swa_full_tokens_ratio={config.swa_full_tokens_ratio}: {pages} window pages of {size} tokens; a "
            f"request needs {least} (window {windows.size}, {chunk} tokens a pass)"
        )
    return pages
