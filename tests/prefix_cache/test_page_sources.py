"""Foreign slot allocators as sources of pages: sizes, refusals, and what lies beside what."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hiradix.memory import HybridSlotAllocator, SlotAllocator
from hiradix.prefix_cache.slots import AllocatorPages, pages_of, slots_of
from hiradix.prefix_cache.window_pages import FullPages, WindowPages
from tests.prefix_cache.bench_engine import ForeignAllocator
from tests.prefix_cache.swa_bench import ForeignHybridAllocator

PAGE = 3


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_slot_allocator_gives_whole_pages_or_nothing(is_foreign: bool) -> None:
    allocator = ForeignAllocator(5, PAGE, None, seed=1) if is_foreign else SlotAllocator(5 * PAGE, PAGE)
    pages = AllocatorPages(allocator, PAGE, 5)
    assert (pages.num_pages, pages.available) == (5, 5)
    assert pages.alloc(6) is None and pages.available == 5
    taken = pages.alloc(3)
    assert taken is not None and taken.dtype == np.int32 and len(set(taken.tolist())) == 3
    assert pages.available == 2 and pages.alloc(3) is None and pages.available == 2
    pages.free(taken[:0])
    pages.free(taken[1:])
    assert pages.available == 4
    pages.free(taken[:1])
    assert pages.available == 5


@pytest.mark.parametrize("kind", [HybridSlotAllocator, ForeignHybridAllocator])
def test_a_hybrid_allocator_is_two_sources(kind: type) -> None:
    sizes = (6, 4) if kind is ForeignHybridAllocator else (6 * PAGE, 4 * PAGE)
    allocator = kind(*sizes, PAGE)
    full, window = FullPages(allocator, PAGE), WindowPages(allocator, PAGE)
    assert (full.num_pages, full.available, window.num_pages, window.available) == (6, 6, 4, 4)
    assert full.alloc(7) is None and window.alloc(5) is None
    assert (full.available, window.available) == (6, 4), "and nothing is taken"
    own, beside = full.alloc(3), window.alloc(2)
    assert own is not None and beside is not None
    assert window.beside(own).tolist() == [0, 0, 0], "full pages alone"
    window.pair(own[:2], beside)
    assert window.beside(own).tolist() == [*beside.tolist(), 0]
    slots = allocator.full_to_swa_index_mapping[slots_of(own[:2], PAGE)]
    assert torch.equal(slots, slots_of(beside, PAGE)), "slot by slot"
    window.pair(own[2:], beside[:1])
    assert window.beside(own).tolist() == [0, beside[1], beside[0]], "beside one full page at a time"
    window.free(beside[:1])
    assert window.available == 3 and window.beside(own).tolist() == [0, beside[1], 0]
    full.free(own)
    assert (full.available, window.available) == (6, 4), "what lies beside goes along"
    again = window.alloc(4)
    assert again is not None
    window.free(again)
    assert window.available == 4, "what has gone along lies beside nothing when it comes again"


def test_window_pages_that_lie_beside_nothing_are_freed_alone() -> None:
    allocator = HybridSlotAllocator(6 * PAGE, 4 * PAGE, PAGE)
    window = WindowPages(allocator, PAGE)
    both = pages_of(allocator.alloc(2 * PAGE), PAGE)
    paired, alone = window.beside(both), window.alloc(2)
    assert alone is not None and window.available == 0
    window.free(np.concatenate([alone[:1], paired[:1]]))
    assert window.available == 2 and window.beside(both).tolist() == [0, paired[1]]
    again = window.alloc(2)
    assert again is not None
    window.free(again)
    window.free(alone[1:])
    assert window.available == 3, "a page that was paired once is not any more"


def test_full_pages_never_pass_the_map_by() -> None:
    """An allocator with calls for pages of its own: those know of no window."""
    freed: list[list[int]] = []
    allocator = SimpleNamespace(
        size_full=4 * PAGE, device="cpu", full_available_size=lambda: 4 * PAGE + 1,
        full_attn_allocator=SimpleNamespace(alloc=lambda size: torch.arange(PAGE, PAGE + size)),
        free=lambda slots: freed.append(slots.tolist()),
    )  # fmt: skip
    for name in ("alloc_pages", "free_pages", "available_size", "alloc"):
        setattr(allocator, name, None)
    full = FullPages(allocator, PAGE)  # type: ignore[arg-type]
    pages = full.alloc(2)
    assert pages is not None and pages.tolist() == [1, 2] and full.available == 4
    full.free(pages[1:])
    assert freed == [[2 * PAGE, 2 * PAGE + 1, 2 * PAGE + 2]]
