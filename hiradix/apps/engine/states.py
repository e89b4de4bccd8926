"""Recurrent states of running requests: a slot of its own for each, and records for the prefix cache.

The pool's slots are handed out by one allocator, to requests and to the tree. A request

    reads    the record it found, in its first pass, then its own slot
    writes   its own slot, after each pass, and a record, whenever a pass crosses the end of a page

so what it has computed can enter the tree up to its last whole page, whenever it ends. The record is taken
in the middle of a pass where that is where the page ends: no pass is cut short for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hiradix.apps.engine.request import Request, RequestState
from hiradix.errors import Misuse
from hiradix.memory import PageAllocator
from hiradix.prefix_cache import EvictParams, PrefixCache

# what one request may need at a time: its own slot, the record it takes, the one that its prefix is locked
# by, and while a longer prefix is loaded back for it, that one's
LEAST_RECORDS = 4


@dataclass(frozen=True, slots=True)
class StateUse:
    """A pass reads the state of a sequence from `source` and leaves it in `target`.

    record: also that behind the first `boundary` tokens of the sequence, which the pass crosses; or None.
    """

    source: int
    target: int
    boundary: int = 0
    record: int | None = None


class NoStates:
    """In place of `StateSlots` in models without recurrent layers."""

    def open(self, request: Request, num_tokens: int) -> bool:
        return True

    def use(self, request: Request, num_tokens: int) -> None:
        return None

    def computed(self, request: Request, num_tokens: int) -> None:
        return None

    def close(self, request: Request) -> None:
        return None


NO_STATES = NoStates()


class StateSlots:
    """The pool's slots, and who has which. `page_size`: tokens from one possible boundary to the next."""

    def __init__(self, cache: PrefixCache, slots: PageAllocator, page_size: int):
        self._cache = cache
        self._slots = slots
        self._page_size = page_size

    def open(self, request: Request, num_tokens: int) -> bool:
        """See that `request`, which is running or about to be, has what its next pass needs.

        num_tokens: at most so many are computed. False, when no slot can be had: nothing more was taken.
        """
        if request.state is None:
            slot = self._alloc()
            if slot is None:
                return False
            request.state = RequestState(slot, self._cache.record(request.last_node))
        if request.state.record is None and self._boundary(request, num_tokens):
            request.state.record = self._alloc()
            return request.state.record is not None
        return True

    def use(self, request: Request, num_tokens: int) -> StateUse:
        """The slots that a pass over the next `num_tokens` tokens reads its state from and writes it to."""
        state = request.state
        if state is None:
            raise Misuse("a running request without a state")
        boundary = self._boundary(request, num_tokens)
        return StateUse(state.source, state.slot, boundary, state.record if boundary else None)

    def computed(self, request: Request, num_tokens: int) -> None:
        """A pass is done that has computed the `num_tokens` tokens after `num_computed`."""
        state = request.state
        if state is None:
            raise Misuse("a running request without a state")
        state.source = state.slot
        state.record_tokens = self._boundary(request, num_tokens) or state.record_tokens

    def close(self, request: Request) -> None:
        """Take back what a request has; nothing if it has nothing."""
        if request.state is not None:
            own = [request.state.slot, *([] if request.state.record is None else [request.state.record])]
            self._slots.free(own)
            request.state = None

    def _boundary(self, request: Request, num_tokens: int) -> int:
        """The end of the last page that the next `num_tokens` tokens fill; 0: none, or nobody asks."""
        if self._cache.disable:
            return 0
        end = (request.num_computed + num_tokens) // self._page_size * self._page_size
        return end if end > request.num_computed else 0

    def _alloc(self) -> int | None:
        """A slot, for which a record of the tree may have to leave the device."""
        if not self._slots.available:
            self._cache.evict(EvictParams(num_tokens=0, mamba_num=1))
        found = self._slots.alloc(1)
        return None if found is None else int(found[0])
