"""The hybrid allocator: two pools, one map, and every double free named."""

from __future__ import annotations

import pytest
import torch

from hiradix.memory import HybridSlotAllocator


def test_alloc_pairs_whole_pages_of_both_pools() -> None:
    allocator = HybridSlotAllocator(32, 16, 4)
    assert (allocator.size_full, allocator.size_swa, allocator.size) == (32, 16, 16)
    full = allocator.alloc(8)
    assert full is not None
    window = allocator.translate_loc_from_full_to_swa(full)
    assert (window > 0).all() and torch.equal(window % 4, full % 4), "slot by slot, in whole pages"
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (24, 8)
    assert allocator.available_size() == 8
    assert allocator.alloc(12) is None and allocator.full_available_size() == 24
    assert allocator.full_to_swa_index_mapping[-1] == -1


def test_freeing_the_window_leaves_the_full_page() -> None:
    allocator = HybridSlotAllocator(32, 32, 4)
    full = allocator.alloc(8)
    assert full is not None
    allocator.free_swa(full[:1])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (24, 28)
    assert not allocator.translate_loc_from_full_to_swa(full[:4]).any(), "the whole page's window went"
    allocator.free_swa(full[:4])
    assert allocator.swa_available_size() == 28, "there was none left to free"
    allocator.free(full)
    assert allocator.available_size() == 32
    assert not allocator.full_to_swa_index_mapping[:-1].any()


def test_a_double_free_of_either_pool_is_named() -> None:
    allocator = HybridSlotAllocator(32, 32, 4)
    full = allocator.alloc(4)
    assert full is not None
    window = allocator.translate_loc_from_full_to_swa(full).clone()
    allocator.free(full)
    with pytest.raises(AssertionError, match="double free of pages"):
        allocator.free(full)
    with pytest.raises(AssertionError, match="double free of pages"):
        allocator.swa_attn_allocator.free(window)
    again = allocator.alloc(4)
    assert again is not None
    allocator.full_to_swa_index_mapping[again] = 0  # as if the window had been freed behind the map's back
    allocator.free(again)
    assert allocator.swa_available_size() == 28


def test_clear_forgets_all() -> None:
    allocator = HybridSlotAllocator(8, 8, 1)
    allocator.alloc(5)
    allocator.clear()
    assert allocator.available_size() == 8
    assert not allocator.full_to_swa_index_mapping[:-1].any()
