"""Allocators: conservation against a plain model, and every misuse named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hiradix.errors import ConfigError
from hiradix.memory import PageAllocator, ReqToTokenPool, SlotAllocator


class PagesMachine(RuleBasedStateMachine):
    """Random allocs and frees; every page is free or out, and what was handed out never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 3
        self.allocator = PageAllocator(12, first_page=self.first)
        self.out: list[int] = []
        self.held: list[tuple[np.ndarray, list[int]]] = []

    @rule(count=st.integers(0, 14))
    def alloc(self, count: int) -> None:
        pages = self.allocator.alloc(count)
        if count > 12 - len(self.out):
            assert pages is None
            return
        assert pages is not None and pages.dtype == np.int32 and len(pages) == count
        fresh = pages.tolist()
        assert len(set(fresh)) == count and not set(fresh) & set(self.out)
        assert all(self.first <= page < self.first + 12 for page in fresh)
        self.out += fresh
        self.held.append((pages, fresh))

    @rule(data=st.data(), dtype=st.sampled_from([np.int32, np.int64, np.uint16]))
    def free(self, data: st.DataObject, dtype: type) -> None:
        some = data.draw(st.lists(st.sampled_from(self.out), unique=True) if self.out else st.just([]))
        self.allocator.free(np.array(some, dtype))
        self.out = [page for page in self.out if page not in some]

    @rule(data=st.data())
    def free_wrong(self, data: st.DataObject) -> None:
        """A bad id anywhere in the list is named, and nothing of the list is freed.

        h13: elsewhere a page freed twice is handed out twice.
        """
        free = [page for page in range(self.first - 1, self.first + 13) if page not in self.out]
        bad = data.draw(st.sampled_from(free))
        good = self.out[:2]
        with pytest.raises(AssertionError, match=rf"\[{bad}\]"):
            self.allocator.free(good + [bad])
        if good:
            with pytest.raises(AssertionError, match=rf"double free of pages \[{good[0]}\]"):
                self.allocator.free([good[0], *good])

    @rule()
    def clear(self) -> None:
        self.allocator.clear()
        self.out = []

    @invariant()
    def conserved(self) -> None:
        assert self.allocator.available == 12 - len(self.out)
        assert self.allocator.out_pages().tolist() == sorted(self.out)
        assert all(pages.tolist() == given for pages, given in self.held)


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_fresh_pages_ascend_and_freed_ones_come_back_first() -> None:
    allocator = PageAllocator(8)
    first = allocator.alloc(3)
    assert first is not None and first.tolist() == [0, 1, 2]
    allocator.free(first[:2])
    again = allocator.alloc(3)
    assert again is not None and again.tolist() == [0, 1, 3]


def test_returned_pages_are_the_callers_own() -> None:
    """h9b: elsewhere they are views that keep each old free list alive."""
    allocator = PageAllocator(4)
    pages = allocator.alloc(4)
    assert pages is not None and pages.base is None
    allocator.free(pages)
    pages[:] = 99
    again = allocator.alloc(4)
    assert again is not None and sorted(again.tolist()) == [0, 1, 2, 3]


def test_cost_is_the_pages_not_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call but clear may make an array of the pool's size. h18: elsewhere each free copies its list."""
    allocator = PageAllocator(1 << 20)
    sizes: list[int] = []
    for name in ("arange", "empty", "zeros", "asarray"):
        original = getattr(np, name)

        def watched(*args: object, _original: object = original, **kwargs: object) -> object:
            made = _original(*args, **kwargs)  # type: ignore[operator]
            sizes.append(made.size)
            return made

        monkeypatch.setattr(np, name, watched)
    for _ in range(3):
        pages = allocator.alloc(100)
        assert pages is not None
        allocator.free(pages)
    assert sizes and max(sizes) <= 100


def test_is_out() -> None:
    allocator = PageAllocator(4, first_page=1)
    allocator.alloc(2)
    assert allocator.is_out([1, 2, 3, 4]).tolist() == [True, True, False, False]


@pytest.mark.parametrize(("pages", "first"), [(0, 0), (4, -1)])
def test_bad_page_range(pages: int, first: int) -> None:
    with pytest.raises(ConfigError, match="page allocator"):
        PageAllocator(pages, first)


def test_slots_are_page_aligned_and_never_the_dummy_page() -> None:
    pool = object()
    slots = SlotAllocator(35, page_size=8, kvcache=pool)
    assert (slots.size, slots.available_size(), slots.get_kvcache() is pool) == (32, 32, True)
    given = slots.alloc(32)
    assert given is not None and given.dtype == torch.int64
    assert sorted(given.tolist()) == list(range(8, 40))
    assert (given.view(-1, 8)[:, 0] % 8 == 0).all() and slots.alloc(8) is None


def test_free_takes_any_slot_of_a_page_once() -> None:
    slots = SlotAllocator(32, page_size=8)
    given = slots.alloc(24)
    assert given is not None
    slots.free(given[[0, 3, 7, 17]])
    assert slots.available_size() == 24
    slots.free(torch.empty(0, dtype=torch.int64))
    with pytest.raises(AssertionError, match="double free"):
        slots.free(given[:1])
    with pytest.raises(AssertionError, match="foreign pages"):
        slots.free(torch.tensor([0]))
    with pytest.raises(AssertionError, match="alloc of 9 slots"):
        slots.alloc(9)
    slots.clear()
    assert slots.available_size() == 32


def test_pages_and_slots_share_one_pool() -> None:
    slots = SlotAllocator(32, page_size=8)
    pages = slots.alloc_pages(3)
    assert pages is not None and slots.available_size() == 8
    slots.free(torch.tensor(pages.astype(np.int64)) * 8 + 5)
    assert slots.available_size() == 32
    taken = slots.alloc(8)
    assert taken is not None
    slots.free_pages(taken.numpy()[:1] // 8)


def test_slot_allocator_needs_a_page() -> None:
    with pytest.raises(ConfigError, match="7 tokens hold no page of 8"):
        SlotAllocator(7, page_size=8)


def test_a_table_of_one_request_with_one_token_is_a_table() -> None:
    rows = ReqToTokenPool(1, 1)
    assert rows.alloc(1) == [0] and rows.req_to_token.shape == (1, 1)


def test_request_rows() -> None:
    rows = ReqToTokenPool(3, 16)
    assert rows.req_to_token.shape == (3, 16) and rows.req_to_token.dtype == torch.int32
    assert rows.alloc(4) is None
    assert rows.alloc(2) == [0, 1] and rows.available_size() == 1
    rows.write((1, slice(2, 5)), torch.tensor([7, 8, 9], dtype=torch.int32))
    assert rows.req_to_token[1, :6].tolist() == [0, 0, 7, 8, 9, 0]
    rows.free(0)
    with pytest.raises(AssertionError, match="request row 0"):
        rows.free([0])
    rows.free([1])
    assert rows.available_size() == 3
    rows.alloc(3)
    rows.clear()
    assert rows.available_size() == 3
    with pytest.raises(ConfigError, match="request table"):
        ReqToTokenPool(0, 16)
