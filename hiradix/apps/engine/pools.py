"""The reference engine's device pools: one for all layers, or a second one for layers of another kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hiradix.apps.engine.api import EngineConfig
from hiradix.apps.engine.model import Windows
from hiradix.apps.engine.packing import LayerPool, Pools
from hiradix.apps.engine.recurrent import StatePool, States
from hiradix.apps.engine.slots import Allocator, num_tokens
from hiradix.apps.engine.states import LEAST_RECORDS
from hiradix.apps.engine.tensor_parallel import PassBuffers
from hiradix.errors import ConfigError, Misuse
from hiradix.memory import (
    CacheShape,
    DevicePool,
    HybridPools,
    HybridSlotAllocator,
    KVShape,
    PageAllocator,
    ReqToTokenPool,
    SlotAllocator,
    StateShape,
    page_bytes,
)


@dataclass(frozen=True, slots=True)
class EnginePools:
    """Device memory and who has which slot of it.

    hybrid: of a model with a second pool. window: tokens that the layers in it look back. states: the slots
    of that pool, where its layers keep a recurrent state.
    """

    device: DevicePool
    allocator: Allocator
    rows: ReqToTokenPool
    hybrid: HybridPools | None = None
    window: int | None = None
    states: PageAllocator | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that all requests together can have."""
        return num_tokens(self.allocator)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all pools that go by tokens."""
        pools = (self.device,) if self.states is not None else self.all
        return sum(page_bytes(pool.shape, pool.page_size) for pool in pools) // self.device.page_size

    @property
    def all(self) -> tuple[DevicePool, ...]:
        return (self.device,) if self.hybrid is None else (self.hybrid.full, self.hybrid.other)

    def of_pass(self, buffers: Sequence[PassBuffers]) -> Pools:
        """The pools as a forward pass reads and writes them: `buffers` of each, and which layers it has."""
        hybrid = self.hybrid
        if hybrid is None:
            return Pools([LayerPool(buffers[0], range(self.device.shape.num_layers))])
        full, shape = LayerPool(buffers[0], hybrid.full_layers), hybrid.other.shape
        if isinstance(shape, StateShape):
            return Pools([full], StatePool(buffers[1], hybrid.other_layers, shape))
        if not isinstance(self.allocator, HybridSlotAllocator):
            raise Misuse(f"{self.allocator} for pools with windows")
        mapping = self.allocator.full_to_swa_index_mapping
        return Pools([full, LayerPool(buffers[1], hybrid.other_layers, self.window, mapping)])


def build_pools(
    config: EngineConfig, shape: CacheShape, kinds: Windows | States | None, context_length: int
) -> EnginePools:
    """The pools for `config`; raises ConfigError naming the field that has a bad value.

    kinds: what the model mixes with full attention.
    """
    size = config.cache.page_size
    num_pages = config.max_total_tokens // size
    if num_pages < 1:
        raise ConfigError(f"max_total_tokens={config.max_total_tokens}: less than a page of {size}")
    row_tokens = min(-(-context_length // size), num_pages) * size
    rows = ReqToTokenPool(config.max_running_requests, row_tokens, "cpu")
    ratio, num_records = config.swa_full_tokens_ratio, config.max_mamba_cache_size
    if ratio is not None and not isinstance(kinds, Windows):
        raise ConfigError(f"swa_full_tokens_ratio={ratio}: the model does not mix full and window layers")
    if num_records is not None and not isinstance(kinds, States):
        raise ConfigError(f"max_mamba_cache_size={num_records}: the model keeps no recurrent state")
    if isinstance(kinds, States):
        return _with_states(config, shape, kinds, rows)
    if isinstance(kinds, Windows) and ratio is not None:
        return _with_windows(config, shape, kinds, rows)
    pool = DevicePool(shape, num_pages, size, device=config.device)
    return EnginePools(pool, SlotAllocator(num_pages * size, size, config.device, pool), rows)


def _with_windows(
    config: EngineConfig, shape: CacheShape, windows: Windows, rows: ReqToTokenPool
) -> EnginePools:
    size = config.cache.page_size
    num_pages = config.max_total_tokens // size
    num_window_pages = _num_window_pages(config, windows, num_pages, rows.max_context_len)
    full = _pool(shape, windows.full_layers, num_pages, config)
    window = _pool(shape, windows.other_layers, num_window_pages, config)
    tokens = num_pages * size, num_window_pages * size
    allocator = HybridSlotAllocator(*tokens, size, config.device, full)
    hybrid = HybridPools(full, window, windows.full_layers, windows.other_layers)
    return EnginePools(full, allocator, rows, hybrid, window=windows.size)


def _with_states(
    config: EngineConfig, shape: CacheShape, states: States, rows: ReqToTokenPool
) -> EnginePools:
    size = config.cache.page_size
    num_records = config.max_mamba_cache_size or LEAST_RECORDS * config.max_running_requests
    if num_records < LEAST_RECORDS:
        raise ConfigError(f"max_mamba_cache_size={num_records}: a request needs {LEAST_RECORDS} at a time")
    full = _pool(shape, states.full_layers, config.max_total_tokens // size, config)
    records = DevicePool(states.shape, num_records, 1, device=config.device)
    allocator = SlotAllocator(full.size, size, config.device, full)
    hybrid = HybridPools(full, records, states.full_layers, states.other_layers)
    return EnginePools(full, allocator, rows, hybrid, states=PageAllocator(num_records, first_page=1))


def _pool(shape: CacheShape, layers: Sequence[int], num_pages: int, config: EngineConfig) -> DevicePool:
    """A pool of some of the model's layers."""
    if not isinstance(shape, KVShape):
        raise Misuse(f"{shape} of a model that mixes kinds of layers")
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
