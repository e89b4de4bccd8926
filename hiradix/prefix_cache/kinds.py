"""Kinds of attention: what a prefix cache keeps beside the pages of full attention, and where it gets it.

A cache has full attention and at most one kind beside it: sliding windows or recurrent states. To the tree
that is a component of its own, so what differs between kinds is said here and nowhere else.
"""

from __future__ import annotations

from abc import abstractmethod
from operator import index
from typing import Any, cast

import numpy as np

from hiradix.cache import PageSource
from hiradix.errors import ConfigError
from hiradix.prefix_cache.records import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    HybridAllocatorLike,
    InsertParams,
    RequestLike,
    SlotAllocatorLike,
    StatefulRequestLike,
)
from hiradix.prefix_cache.slots import AllocatorPages, Pages
from hiradix.prefix_cache.window_pages import FullPages, WindowPages
from hiradix.tree import Component
from hiradix.tree.node import NO_PAGES

_HYBRID_SURFACE = ("full_to_swa_index_mapping", "full_attn_allocator", "swa_attn_allocator", "free_swa")


def full_pages(params: CacheInitParams) -> AllocatorPages:
    """The pages of full attention, where the allocator has slots of nothing else."""
    allocator, page_size = params.token_to_kv_pool_allocator, index(params.page_size)
    size = getattr(allocator, "size", None)
    num_slots = int(allocator.available_size() if size is None else size)
    return AllocatorPages(allocator, page_size, -(-num_slots // page_size))


class AttentionKind:
    """The kind beside full attention.

    full: the pages of full attention in its allocator. pages: its own device pages, one to a record of state.
    unit: how many tokens one of them counts as in sizes; 1, where sizes are in records.
    """

    def __init__(self, component: Component, full: AllocatorPages, pages: PageSource, unit: int):
        self.component = component
        self.full = full
        self.pages = pages
        self.unit = unit

    @abstractmethod
    def given(self, full: Pages, record: int | None) -> tuple[Pages, Pages]:
        """The further component's pages that enter the tree with these full pages; and those before a gap in
        them.

        The latter, 0 for none, is freed after the insert as far as the tree does not hold it.
        """

    def record_of(self, req: RequestLike, num_tokens: int) -> int | None:
        """The record of `req` behind its first `num_tokens` tokens, taken from it; None for other kinds."""
        return None

    def free_refused(self, params: InsertParams) -> None:
        """Free what came with an insert that is refused, beside the full pages."""

    def forget(self, full: Pages) -> None:
        """Forget the pages beside these full pages, as they have been freed."""

    @abstractmethod
    def num_asked(self, params: EvictParams) -> int:
        """The number of this component's pages that an eviction asks for."""

    @abstractmethod
    def evicted(self, num_tokens: int, num_pages: int) -> EvictResult:
        """The result of an eviction of so many tokens of full attention and so many further pages."""

    @abstractmethod
    def available_and_evictable_str(self, allocator: SlotAllocatorLike, evictable: int, own: int) -> str:
        """The free and evictable amounts as text for an out-of-memory message. evictable: tokens of full
        attention; own: this component's tokens or records."""


class SlidingWindows(AttentionKind):
    """Sliding windows: layers that look back so many tokens, with a pool of their own.

    A request's table has full slots; the allocator's map gives the window slots beside them. To the tree both
    are page ids of their own, so a prefix may keep its full pages after its window pages have gone, and gets
    them back from the next request that computes it.
    """

    pages: WindowPages

    def __init__(self, params: CacheInitParams):
        given, size = params.sliding_window_size, index(params.page_size)
        if not given or given < 1:
            raise ConfigError(f"sliding_window_size: {given}, needed by SWARadixCache")
        window = index(given)
        allocator = params.token_to_kv_pool_allocator
        if lacking := [name for name in _HYBRID_SURFACE if not hasattr(allocator, name)]:
            raise ConfigError(f"token_to_kv_pool_allocator: a hybrid one is needed, this has no {lacking}")
        hybrid = cast(HybridAllocatorLike, allocator)
        component = Component("window", reach=-(-window // size))
        super().__init__(component, FullPages(hybrid, size), WindowPages(hybrid, size), size)

    def given(self, full: Pages, record: int | None) -> tuple[Pages, Pages]:
        window = self.pages.beside(full)
        gaps = np.flatnonzero(window == 0)
        first = int(gaps[-1]) + 1 if len(gaps) else 0
        return window[first:], window[:first]

    def forget(self, full: Pages) -> None:
        self.pages.unpair(full)

    def num_asked(self, params: EvictParams) -> int:
        return -(-index(params.swa_num_tokens) // self.unit)

    def evicted(self, num_tokens: int, num_pages: int) -> EvictResult:
        return EvictResult(num_tokens, swa_num_tokens_evicted=num_pages * self.unit)

    def available_and_evictable_str(self, allocator: SlotAllocatorLike, evictable: int, own: int) -> str:
        hybrid = cast(HybridAllocatorLike, allocator)
        full, window = hybrid.full_available_size(), hybrid.swa_available_size()
        return (
            f"Available full tokens: {full + evictable} "
            f"(full_available_size={full} + full_evictable={evictable})\n"
            f"Available swa tokens: {window + own} "
            f"(swa_available_size={window} + swa_evictable={own})\n"
        )


class RecurrentStates(AttentionKind):
    """Recurrent states: layers that keep no data per token but one state.

    So a prefix can be continued only from where a record of all states was taken. A record is a page of a
    pool of its own, with one row per layer, and belongs to the place where a prefix ends: a match ends only
    where there is one. The tree's records are never written: a request reads the one it found and keeps its
    own state elsewhere.
    """

    def __init__(self, params: CacheInitParams):
        if params.state_records is None:
            raise ConfigError("state_records: needed by StateRadixCache")
        component = Component("state", reach=1, per_page=False)
        super().__init__(component, full_pages(params), params.state_records, 1)

    def given(self, full: Pages, record: int | None) -> tuple[Pages, Pages]:
        return NO_PAGES if record is None else np.array([record], np.int32), NO_PAGES

    def record_of(self, req: RequestLike, num_tokens: int) -> int | None:
        return cast(StatefulRequestLike, req).take_record(num_tokens)

    def free_refused(self, params: InsertParams) -> None:
        if params.mamba_value is not None:
            self.pages.free(np.array([params.mamba_value], np.int32))

    def num_asked(self, params: EvictParams) -> int:
        return index(params.mamba_num)

    def evicted(self, num_tokens: int, num_pages: int) -> EvictResult:
        return EvictResult(num_tokens, mamba_num_evicted=num_pages)

    def available_and_evictable_str(self, allocator: SlotAllocatorLike, evictable: int, own: int) -> str:
        return tokens_str(allocator, evictable)


def tokens_str(allocator: SlotAllocatorLike, evictable: int) -> str:
    """The line for an out-of-memory message about full attention alone."""
    free: Any = allocator.available_size()
    return f"Available tokens: {free + evictable} (available_size={free} + evictable_size={evictable})\n"
