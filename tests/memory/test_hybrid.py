"""The hybrid allocator: two pools, one map, and every double free named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hiradix.errors import ConfigError
from hiradix.memory import DevicePool, HybridPools, HybridSlotAllocator, KVShape


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


FOREIGN = (-1, -4, 0, 36, 1000, 5)  # of the sentinel, the dummy page, behind the end, of a page that is free


@pytest.mark.parametrize("slot", FOREIGN)
@pytest.mark.parametrize("call", ["free", "free_swa", "open_windows", "missing_windows"])
def test_slots_of_pages_nobody_has_are_refused_and_nothing_is_changed(call: str, slot: int) -> None:
    """Found: -1 freed the last page's window, which a request had, and overwrote the map's last entry."""
    allocator = HybridSlotAllocator(32, 32, 4)
    full = allocator.alloc(32)
    assert full is not None
    allocator.free(full[:4])  # page 1
    before = allocator.full_to_swa_index_mapping.clone()
    ask = getattr(allocator, call)
    with pytest.raises(AssertionError, match=r"pages \["):
        ask(torch.cat([full[-4:], torch.tensor([slot])]))
    assert torch.equal(allocator.full_to_swa_index_mapping, before)
    assert allocator.full_available_size() == allocator.swa_available_size() == 4
    allocator.free(full[4:])
    assert allocator.available_size() == 32


def test_clear_forgets_all() -> None:
    allocator = HybridSlotAllocator(8, 8, 1)
    allocator.alloc(5)
    allocator.clear()
    assert allocator.available_size() == 8
    assert not allocator.full_to_swa_index_mapping[:-1].any()


class HybridMachine(RuleBasedStateMachine):
    """Full pages taken with or without window pages, windows opened and closed, both freed, against sets."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.num_full, self.num_window = 3, 10, 6
        self.allocator = HybridSlotAllocator(self.num_full * 3, self.num_window * 3, 3)
        self.full: set[int] = set()
        self.open: set[int] = set()  # full pages with a window page

    def slots(self, pages: list[int]) -> torch.Tensor:
        return torch.tensor([page * self.size + 1 for page in pages], dtype=torch.int64)

    @rule(count=st.integers(0, 5))
    def alloc(self, count: int) -> None:
        slots = self.allocator.alloc(count * self.size)
        fits = count <= min(self.num_full - len(self.full), self.num_window - len(self.open))
        assert (slots is not None) == fits
        if slots is not None:
            pages = set((slots // self.size).tolist())
            self.full |= pages
            self.open |= pages

    @rule(count=st.integers(0, 5))
    def alloc_full(self, count: int) -> None:
        slots = self.allocator.alloc_full(count * self.size)
        assert (slots is not None) == (count <= self.num_full - len(self.full))
        if slots is not None:
            self.full |= set((slots // self.size).tolist())

    @rule(data=st.data())
    def open_windows(self, data: st.DataObject) -> None:
        pages = self.some(data)
        missing = set(pages) - self.open
        assert self.allocator.missing_windows(self.slots(pages)) == len(missing) * self.size
        opened = self.allocator.open_windows(self.slots(pages))
        assert opened == (len(missing) <= self.num_window - len(self.open))
        if opened:
            self.open |= missing

    @rule(data=st.data())
    def close_windows(self, data: st.DataObject) -> None:
        pages = self.some(data)
        self.allocator.free_swa(self.slots(pages))
        self.open -= set(pages)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.some(data)
        self.allocator.free(self.slots(pages))
        self.full -= set(pages)
        self.open -= set(pages)

    def some(self, data: st.DataObject) -> list[int]:
        held = sorted(self.full)
        return data.draw(st.lists(st.sampled_from(held), unique=True) if held else st.just([]))

    @invariant()
    def the_map_and_the_counts_agree(self) -> None:
        allocator, size = self.allocator, self.size
        assert allocator.full_available_size() == (self.num_full - len(self.full)) * size
        assert allocator.swa_available_size() == (self.num_window - len(self.open)) * size
        window = allocator.full_to_swa_index_mapping[: (self.num_full + 1) * size].view(-1, size)
        beside = {page for page in range(self.num_full + 1) if window[page, 0] > 0}
        assert beside == self.open and len({int(row[0]) for row in window if row[0] > 0}) == len(self.open)
        for page in beside:
            first = int(window[page, 0])
            assert first % size == 0 and window[page].tolist() == list(range(first, first + size))


TestHybrid = HybridMachine.TestCase
TestHybrid.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_pool_of_a_model_names_each_of_its_layers_once() -> None:
    full, other = (DevicePool(KVShape(layers, 1, 4, 4, torch.float32), 4, 2) for layers in (2, 1))
    assert HybridPools(full, other, (0, 2), (1,)).other_layers == (1,)
    assert HybridPools(full, other, (0, 2), (2,)).other_layers == (2,)  # attention and a state side by side
    for full_layers, other_layers in (((0, 0), (1,)), ((1, 0), (2,)), ((0, 1), (-1,))):
        with pytest.raises(ConfigError, match="are not layers of a model, each once in order"):
            HybridPools(full, other, full_layers, other_layers)
    with pytest.raises(ConfigError, match="full_layers: 3 for a pool of 2"):
        HybridPools(full, other, (0, 1, 2), (3,))
    with pytest.raises(ConfigError, match="other_layers: 2 for a pool of 1"):
        HybridPools(full, other, (0, 1), (2, 3))
