"""Conservation of device pages, asserted after every step of a checking engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hiradix.engine.ports import PrefixCache
from hiradix.engine.recurrent import NO_STATE
from hiradix.engine.request import Request
from hiradix.engine.scheduler import Scheduler
from hiradix.engine.slots import Allocator, free_tokens, num_tokens
from hiradix.memory import HybridSlotAllocator, PageAllocator
from hiradix.prefix_cache.records import STATE
from hiradix.tree import Tier


def check_conservation(
    cache: PrefixCache, allocator: Allocator, scheduler: Scheduler, states: PageAllocator | None = None
) -> None:
    """Each device page, of either pool, is in exactly one of: free, the tree, one running request.

    states: the slots of the pool of recurrent states, where there is one.
    Pages of device transfers are the tree's (locked there), host pages are the cache's to check. O(pool).
    """
    cache.check()
    size = scheduler.limits.page_size
    own: list[int] = []
    for request in scheduler.running:
        _check_request(request, scheduler.row(request), size)
        own.extend((scheduler.row(request)[request.cache_protected_len :: size] // size).tolist())
    assert len(set(own)) == len(own), f"a page belongs to two requests: {_repeated(own)}"
    shared = cache.total_size()
    if isinstance(allocator, HybridSlotAllocator):
        _check_windows(allocator, shared[1], own)
        shared = shared[0]
    elif states is not None:
        _check_states(states, cache, scheduler.running)
        shared = shared[0]
    free, shared, total = free_tokens(allocator) // size, shared // size, num_tokens(allocator) // size
    assert free + shared + len(own) == total, (
        f"of {total} device pages: {free} free, {shared} tree, {len(own)} in {len(scheduler.running)} rows"
    )
    for request in scheduler.waiting:
        assert request.req_pool_idx is None and request.num_allocated == 0, f"{request.rid} waits with slots"
        assert request.state is None, f"{request.rid} waits with a state"


def _check_windows(allocator: HybridSlotAllocator, shared: int, own: Sequence[int]) -> None:
    """Of the window pages: `shared` tokens are the tree's, those beside the pages `own` the requests'."""
    size = allocator.page_size
    beside = allocator.full_to_swa_index_mapping[torch.tensor(own, dtype=torch.int64) * size] // size
    held = beside[beside > 0].tolist()
    assert len(set(held)) == len(held), f"a window page is beside two pages: {_repeated(held)}"
    free, shared, total = allocator.swa_available_size() // size, shared // size, allocator.size_swa // size
    assert free + shared + len(held) == total, (
        f"of {total} window pages: {free} free, {shared} tree, {len(held)} of requests"
    )


def _check_states(states: PageAllocator, cache: PrefixCache, running: Sequence[Request]) -> None:
    """Each slot of the state pool is free, a record of the tree, or one running request's."""
    own: list[int] = []
    for request in running:
        assert request.state is not None, f"{request.rid} runs without a state"
        own += [request.state.slot, *([] if request.state.record is None else [request.state.record])]
    shared = cache.tree.all_pages(Tier.DEVICE, STATE).tolist()
    both = own + shared
    assert len(set(both)) == len(both), f"a state slot is in two places: {_repeated(both)}"
    assert NO_STATE not in both and bool(states.is_out(both).all()), f"slots {both} that nobody was given"
    assert states.available + len(both) == states.num_pages, (
        f"of {states.num_pages} state slots: {states.available} free, {len(shared)} tree, {len(own)} requests"
    )


def _check_request(request: Request, row: torch.Tensor, page_size: int) -> None:
    """Row, lengths and shared part of one running request agree, and its slots are whole pages in order."""
    allocated, protected = request.num_allocated, request.cache_protected_len
    assert protected <= request.num_computed <= allocated, (protected, request.num_computed, allocated)
    assert allocated % page_size == 0 and protected % page_size == 0, (allocated, protected, page_size)
    slots = row.view(-1, page_size)
    assert bool((slots[:, 0] % page_size == 0).all()), f"{request.rid}: slots that start inside a page"
    whole = slots[:, :1] + torch.arange(page_size, dtype=row.dtype, device=row.device)
    assert torch.equal(slots, whole), f"{request.rid}: slots of a page out of order"
    assert bool((slots[:, 0] >= page_size).all()), f"{request.rid}: slots in the dummy page"


def _repeated(pages: Sequence[int]) -> list[int]:
    seen: set[int] = set()
    return sorted({page for page in pages if page in seen or seen.add(page)})  # type: ignore[func-returns-value]
