"""Slots of two pools for models that mix full attention and sliding windows, with SGLang's surface.

A request's table has full slots only. A layer with a window finds its slot through
`full_to_swa_index_mapping`, so each full page has at most one window page beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hiradix.errors import ConfigError
from hiradix.memory.allocator import SlotAllocator
from hiradix.memory.pools import DevicePool


@dataclass(frozen=True)
class HybridPools:
    """The device pools of a model that mixes kinds of layers, and which of them each has.

    other: of the layers with a sliding window, or of those that keep a recurrent state. A layer may have both
    attention and a state, or neither. Raises ConfigError unless each pool names its layers once, in order.
    """

    full: DevicePool
    other: DevicePool
    full_layers: Sequence[int]
    other_layers: Sequence[int]

    def __post_init__(self) -> None:
        for name, pool, layers in (
            ("full", self.full, self.full_layers),
            ("other", self.other, self.other_layers),
        ):
            if len(layers) != pool.shape.num_layers:
                raise ConfigError(f"{name}_layers: {len(layers)} for a pool of {pool.shape.num_layers}")
            if list(layers) != sorted({layer for layer in layers if layer >= 0}):
                raise ConfigError(
                    f"{name}_layers: {list(layers)} are not layers of a model, each once in order"
                )


class HybridSlotAllocator:
    """Full slots with window slots beside them, in pages that may lose the window and keep the rest.

    full_to_swa_index_mapping: int64 [num_full_tokens + page_size + 1] on `device`; 0: no window slot; the
        last entry maps -1 to -1.
    full_attn_allocator, swa_attn_allocator: the two pools, for who pairs pages on their own.
    """

    def __init__(
        self,
        num_full_tokens: int,
        num_window_tokens: int,
        page_size: int,
        device: torch.device | str = "cpu",
        kvcache: Any = None,
    ) -> None:
        self.full_attn_allocator = SlotAllocator(num_full_tokens, page_size, device)
        self.swa_attn_allocator = SlotAllocator(num_window_tokens, page_size, device)
        self.page_size = page_size
        self.size_full = self.full_attn_allocator.size
        self.size_swa = self.swa_attn_allocator.size
        self.size = min(self.size_full, self.size_swa)
        self.device = self.full_attn_allocator.device
        self._kvcache = kvcache
        num_slots = self.size_full + page_size
        self.full_to_swa_index_mapping = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        self.full_to_swa_index_mapping[-1] = -1

    def available_size(self) -> int:
        """Tokens that can have both."""
        return min(self.full_available_size(), self.swa_available_size())

    def full_available_size(self) -> int:
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        return self.swa_attn_allocator.available_size()

    def get_kvcache(self) -> Any:
        return self._kvcache

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """The window slots beside full slots; 0 where there is none."""
        return self.full_to_swa_index_mapping[kv_indices]

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """int64 [need_size]: whole pages' full slots, each with a window slot beside it; None if one pool
        is short, and nothing taken."""
        if need_size > self.available_size():
            return None
        full, window = self.full_attn_allocator.alloc(need_size), self.swa_attn_allocator.alloc(need_size)
        assert full is not None and window is not None
        self.full_to_swa_index_mapping[full] = window
        return full

    def alloc_full(self, need_size: int) -> torch.Tensor | None:
        """int64 [need_size]: whole pages' full slots with nothing beside them; None if fewer are free."""
        return self.full_attn_allocator.alloc(need_size)

    def missing_windows(self, full: torch.Tensor) -> int:
        """Window tokens that `open_windows` would take for these slots."""
        return len(self._pages_without(full)) * self.page_size

    def open_windows(self, full: torch.Tensor) -> bool:
        """Put a window page beside every page of these slots that has none. False: too few are free."""
        pages = self._pages_without(full)
        if len(pages) == 0:
            return True
        window = self.swa_attn_allocator.alloc(len(pages) * self.page_size)
        if window is None:
            return False
        self.full_to_swa_index_mapping[self._slots_of(pages)] = window
        return True

    def free(self, free_index: torch.Tensor) -> None:
        """Free every full page that has a slot among these, and the window pages beside them."""
        if free_index.numel():
            self.full_attn_allocator.free(free_index)  # refuses, before anything is changed
            self._close(self._pages_of(free_index))

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Free only the window pages beside these full slots' pages, where there are any."""
        self._close(self._held(free_index))

    def _close(self, pages: torch.Tensor) -> None:
        slots = self._slots_of(pages)
        window = self.full_to_swa_index_mapping[slots]
        self.swa_attn_allocator.free(window[window > 0])
        self.full_to_swa_index_mapping[slots] = 0

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        pages: torch.Tensor = slots.to(self.device, torch.int64) // self.page_size
        return pages.unique()  # type: ignore[no-any-return, no-untyped-call]

    def _held(self, slots: torch.Tensor) -> torch.Tensor:
        """The full pages of these slots. They must be out: slots below 0 are entries of the map as well."""
        pages = self._pages_of(slots)
        self.full_attn_allocator.pages.require_out(pages.tolist())
        return pages

    def _pages_without(self, full: torch.Tensor) -> torch.Tensor:
        pages = self._held(full)
        return pages[self.full_to_swa_index_mapping[pages * self.page_size] == 0]

    def _slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(self.page_size, device=self.device)
        return (pages[:, None] * self.page_size + offsets).reshape(-1)

    def clear(self) -> None:
        self.full_attn_allocator.clear()
        self.swa_attn_allocator.clear()
        self.full_to_swa_index_mapping[:-1] = 0
