"""Conservation of device pages, asserted after every step of a checking engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hiradix.apps.engine.recurrent import NO_STATE
from hiradix.apps.engine.request import Request
from hiradix.apps.engine.scheduler import Scheduler
from hiradix.apps.engine.slots import Allocator, free_tokens, num_tokens
from hiradix.errors import Misuse
from hiradix.memory import HybridSlotAllocator, PageAllocator
from hiradix.prefix_cache import PrefixCache
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
    if len(set(own)) != len(own):
        raise Misuse(f"a page belongs to two requests: {_repeated(own)}")
    shared = cache.total_size()
    if isinstance(allocator, HybridSlotAllocator):
        _check_windows(allocator, shared[1], own)
        shared = shared[0]
    elif states is not None:
        _check_states(states, cache, scheduler.running)
        shared = shared[0]
    free, shared, total = free_tokens(allocator) // size, shared // size, num_tokens(allocator) // size
    if free + shared + len(own) != total:
        raise Misuse(
            f"of {total} device pages: {free} free, {shared} tree, {len(own)} in "
            f"{len(scheduler.running)} rows"
        )
    for request in scheduler.waiting:
        if request.req_pool_idx is not None or request.num_allocated != 0:
            raise Misuse(f"{request.rid} waits with slots")
        if request.state is not None:
            raise Misuse(f"{request.rid} waits with a state")


def _check_windows(allocator: HybridSlotAllocator, shared: int, own: Sequence[int]) -> None:
    """Check that each window page is free, the tree's (`shared` tokens), or beside one of the requests' pages
    `own`."""
    size = allocator.page_size
    beside = allocator.full_to_swa_index_mapping[torch.tensor(own, dtype=torch.int64) * size] // size
    held = beside[beside > 0].tolist()
    if len(set(held)) != len(held):
        raise Misuse(f"a window page is beside two pages: {_repeated(held)}")
    free, shared, total = allocator.swa_available_size() // size, shared // size, allocator.size_swa // size
    if free + shared + len(held) != total:
        raise Misuse(f"of {total} window pages: {free} free, {shared} tree, {len(held)} of requests")


def _check_states(states: PageAllocator, cache: PrefixCache, running: Sequence[Request]) -> None:
    """Each slot of the state pool is free, a record of the tree, or one running request's."""
    own: list[int] = []
    for request in running:
        if request.state is None:
            raise Misuse(f"{request.rid} runs without a state")
        own += [request.state.slot, *([] if request.state.record is None else [request.state.record])]
    shared = cache.tree.all_pages(Tier.DEVICE, STATE).tolist()
    both = own + shared
    if len(set(both)) != len(both):
        raise Misuse(f"a state slot is in two places: {_repeated(both)}")
    if NO_STATE in both or not bool(states.is_out(both).all()):
        raise Misuse(f"slots {both} that nobody was given")
    if states.available + len(both) != states.num_pages:
        raise Misuse(
            f"of {states.num_pages} state slots: {states.available} free, {len(shared)} tree, "
            f"{len(own)} requests"
        )


def _check_request(request: Request, row: torch.Tensor, page_size: int) -> None:
    """Row, lengths and shared part of one running request agree, and its slots are whole pages in order."""
    allocated, protected = request.num_allocated, request.cache_protected_len
    if not protected <= request.num_computed <= allocated:
        raise Misuse(
            f"{request.rid}: {protected} tokens of the tree, {request.num_computed} computed, "
            f"{allocated} allocated"
        )
    if allocated % page_size != 0 or protected % page_size != 0:
        raise Misuse(
            f"{request.rid}: {allocated} allocated, {protected} of the tree: no whole pages of {page_size}"
        )
    slots = row.view(-1, page_size)
    if not bool((slots[:, 0] % page_size == 0).all()):
        raise Misuse(f"{request.rid}: slots that start inside a page")
    whole = slots[:, :1] + torch.arange(page_size, dtype=row.dtype, device=row.device)
    if not torch.equal(slots, whole):
        raise Misuse(f"{request.rid}: slots of a page out of order")
    if not bool((slots[:, 0] >= page_size).all()):
        raise Misuse(f"{request.rid}: slots in the dummy page")


def _repeated(pages: Sequence[int]) -> list[int]:
    seen: set[int] = set()
    return sorted({page for page in pages if page in seen or seen.add(page)})  # type: ignore[func-returns-value]
