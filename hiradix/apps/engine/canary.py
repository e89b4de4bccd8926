"""The canary: pages of fixed tokens, computed before anything is served, by which storage recognises the
weights.

They are the first and the last page of a short run of tokens, and one page at positions far behind it that
attends to the run repeated over and over, so that a rope that differs only far from the start shows there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hiradix.apps.engine.model import PagedModel
from hiradix.apps.engine.packing import Work
from hiradix.apps.engine.pools import EnginePools
from hiradix.apps.engine.states import StateUse
from hiradix.errors import Misuse
from hiradix.memory import HybridSlotAllocator
from hiradix.prefix_cache import ComputedPages

RUN_TOKENS = 64
"""Tokens of the run, if pages are not longer; two pages at least."""
FAR_TOKENS = 16384
"""Where the far page ends at most; earlier in models of a shorter context."""
_NO_STATE = 0  # the record of a sequence without tokens


@contextmanager
def computed_pages(model: PagedModel, pools: EnginePools) -> Iterator[ComputedPages | None]:
    """Compute the canary and give its pages in the device pools; their slots are freed on exit. None where the
    pools have no room for two pages.

    A collective call of all ranks. Costs one pass over RUN_TOKENS and one over a page.
    """
    size = pools.device.page_size
    num_pages = _run_pages(pools, model.context_length // size)
    if num_pages < 1:
        yield None
        return
    taken = _ReservedSlots(pools, num_pages + 1)
    try:
        yield _Canary(model, pools, taken).pages()
    finally:
        taken.free()


def _run_pages(pools: EnginePools, context_pages: int) -> int:
    """Pages of the run: RUN_TOKENS, or as many as pools and context have room for beside the far page."""
    size = pools.device.page_size
    room = [pools.num_tokens // size, context_pages]
    if pools.window is not None and pools.hybrid is not None:
        room.append(pools.hybrid.other.num_pages - 1)
    return min(max(2, -(-RUN_TOKENS // size)), min(room) - 1)


class _ReservedSlots:
    """The slots of `num_pages` pages, and two state records in models that have them, until `free`."""

    def __init__(self, pools: EnginePools, num_pages: int) -> None:
        self._pools = pools
        allocator, num_tokens = pools.allocator, num_pages * pools.device.page_size
        if isinstance(allocator, HybridSlotAllocator):
            slots = allocator.alloc_full(num_tokens)
            is_open = slots is not None and allocator.open_windows(slots.to(torch.int64))
            if not is_open:
                raise Misuse(f"no window pages for {num_pages} pages of fresh pools")
        else:
            slots = allocator.alloc(num_tokens)
        if slots is None:
            raise Misuse(f"no {num_pages} pages in fresh pools")
        self.slots: torch.Tensor = slots
        self.records: list[int] = []
        if pools.states is not None:
            found = pools.states.alloc(2)
            if found is None:
                raise Misuse("no two records in fresh pools")
            self.records = [int(record) for record in found]

    def free(self) -> None:
        self._pools.allocator.free(self.slots)
        if self._pools.states is not None:
            self._pools.states.free(self.records)


@dataclass
class _Canary:
    """One computation: the run fills all reserved pages but the last, the far page the last one."""

    model: PagedModel
    pools: EnginePools
    taken: _ReservedSlots

    def pages(self) -> ComputedPages:
        size, slots = self.pools.device.page_size, self.taken.slots.cpu()
        run, far = slots[:-size], slots[-size:]
        tokens = _tokens(len(slots), self.model.vocab_size)
        end = min(FAR_TOKENS, self.model.context_length) // size * size
        before = run.repeat(-(-(end - size) // len(run)))[: end - size]
        first, last = (self.taken.records + [None, None])[:2]
        self._pass(tokens[: len(run)], len(run), run, _NO_STATE, first)
        self._pass(tokens[len(run) :], end, torch.cat([before, far]), first, last)
        at = {0: (run[0], None), len(run) - size: (run[-size], first), end - size: (far[0], last)}
        names = tuple(_name(tokens, size, position) for position in at)
        return ComputedPages(names, tuple(self._pages_of(int(slot), state) for slot, state in at.values()))

    def _pass(
        self, tokens: Sequence[int], end: int, row: torch.Tensor, source: int | None, target: int | None
    ) -> None:
        state = None if source is None or target is None else StateUse(source, target)
        pools = self.pools
        self.model.forward([Work(tokens, end, row, state)], pools.of_pass(pools.all))
        self.model.commit()

    def _pages_of(self, slot: int, state: int | None) -> tuple[int | None, ...]:
        """The page in each pool of the token page that begins at `slot`, with its state record `state`."""
        pools, size = self.pools, self.pools.device.page_size
        if pools.hybrid is None:
            return (slot // size,)
        if pools.states is not None:
            return slot // size, state
        if not isinstance(pools.allocator, HybridSlotAllocator):
            raise Misuse(f"{pools.allocator} for pools with windows")
        return slot // size, int(pools.allocator.full_to_swa_index_mapping[slot]) // size


def _tokens(count: int, vocab_size: int) -> list[int]:
    """`count` token ids below `vocab_size`, the same in every process."""
    numbers = hashlib.shake_256(b"hiradix-canary-1").digest(8 * count)
    return [int.from_bytes(numbers[at : at + 8], "big") % vocab_size for at in range(0, len(numbers), 8)]


def _name(tokens: Sequence[int], page_size: int, position: int) -> str:
    """The storage name of the canary page of these tokens that begins at `position`."""
    text = f"hiradix-canary-1 {page_size} {position} {list(tokens)}"
    return hashlib.sha256(text.encode()).hexdigest()
