"""Recurrent states of SGLang's requests: whose slots they are, and behind which tokens each was taken.

SGLang has two ways. Without extra buffers a request has one slot, whose state is that behind all it has
computed: pages are of one token, and a record is a copy of it, or at the end the slot itself. With extra
buffers passes leave the state at some boundary in a second slot, which is given away for an empty one. A
request begins with a copy of the record that its prefix ends in: SGLang makes it behind the load, before the
first layer (`mamba_cow_src_index`).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import length_hint
from typing import Any

import numpy as np
import torch

from hiradix.adapters.sglang.support import refusal
from hiradix.cache.pages import NO_PAGES
from hiradix.prefix_cache.slots import Pages, on_device

RECORDS = "MambaSlotAllocator"  # exactly that class: one that inherits from it may name slots otherwise
_ROWS = "HybridReqToTokenPool"


class StateRecords:
    """SGLang's slots of state as our tree's device records. Slot 0 is where masked writes go.

    While SGLang goes through its queue, it has a slot set aside for each request there, which its own tree
    would take at a match. Ours takes none then, so they are free for loads; what is left goes back.
    """

    def __init__(self, slots: Any):
        self._slots = slots
        self.num_pages = int(slots.size)

    @property
    def available(self) -> int:
        set_aside = getattr(self._slots, "_alloc_iter", None)
        return int(self._slots.available_size()) + length_hint(() if set_aside is None else set_aside)

    def alloc(self, num_pages: int, /) -> Pages | None:
        if num_pages > self.available:
            return None
        found = [self._slots.alloc(1) for _ in range(num_pages)]  # one by one: from those set aside first
        return np.concatenate([NO_PAGES, *(slot.cpu().numpy() for slot in found)]).astype(np.int32)

    def free(self, pages: Pages, /) -> None:
        if len(pages):
            self._slots.free(on_device(pages.astype(np.int64), self._slots.device))


class RequestStates:
    """Gives the tree the records of requests, and requests the record that they go on from.

    pool: SGLang's HybridReqToTokenPool. make_room: has a record of the tree leave the device. page_size: of
    the tree, whose boundaries are where a record may be.
    """

    def __init__(self, pool: Any, make_room: Callable[[], None], page_size: int):
        self._pool = pool
        self._slots = pool.mamba_allocator
        self._make_room = make_room
        self._page_size = page_size
        self._has_buffers = bool(pool.enable_mamba_extra_buffer)

    @property
    def grid(self) -> int:
        """Tokens between the boundaries at which a pass can leave a state behind for the tree."""
        if not self._has_buffers:
            return self._page_size
        from sglang.srt.runtime_context import mamba_checkpoint_grid

        return int(mamba_checkpoint_grid(self._page_size))

    def start(self, req: Any, record: int) -> None:
        """Have the next pass of `req` begin with a copy of `record`; 0: with an empty state.

        Said anew at each match: what an earlier one found may have left the tree since.
        """
        kv = req.kv
        if record:
            kv.mamba_cow_src_index = torch.tensor([record], dtype=torch.int64, device=self._slots.device)
            kv.mamba_needs_clear = False
        else:
            kv.mamba_cow_src_index = None
            kv.mamba_needs_clear = bool(kv.holds_mamba)

    def give(self, req: Any, num_tokens: int) -> tuple[int, int | None]:
        """(how many of the first `num_tokens` tokens a state is known behind, its record, the caller's).

        (0, None) where none is known, or is at no boundary of pages, or no slot can be had. A request that
        has ended keeps nothing.
        """
        if not req.kv.holds_mamba:
            return 0, None
        take = self._last_of if req.finished() else self._next_of
        found, record = take(req, num_tokens)
        if record is not None and (found % self._page_size or not 0 < found <= num_tokens):
            self.take_back(record)
            record = None
        return (0, None) if record is None else (found, record)

    def take_back(self, record: int) -> None:
        self._slots.free(torch.tensor([record], dtype=torch.int64, device=self._slots.device))

    def close(self, req: Any) -> None:
        """Free what a request has that the tree gets nothing of."""
        if req.kv.holds_mamba:
            self._pool.free_mamba_cache(req)

    def _next_of(self, req: Any, num_tokens: int) -> tuple[int, int | None]:
        """Of a request that goes on."""
        kv = req.kv
        if self._has_buffers:
            found = kv.mamba_last_track_seqlen
            slot = None if found is None else self._slot()
            if slot is None:
                return 0, None
            record = int(self._pool.donate_mamba_ping_pong_slot(req, slot))
            kv.mamba_last_track_seqlen = kv.mamba_prev_track_seqlen = None
            return int(found), record
        if kv.kv_committed_len != num_tokens or (slot := self._slot()) is None:
            return 0, None
        self._pool.mamba_pool.copy_from(kv.mamba_pool_idx.unsqueeze(0), slot)
        return num_tokens, int(slot)

    def _last_of(self, req: Any, num_tokens: int) -> tuple[int, int | None]:
        """Of a request that has ended: its slots are freed but for the record."""
        kv, pool = req.kv, self._pool
        if self._has_buffers:
            found, kept = self._tracked(kv, num_tokens)
            record = None if kept is None else int(kv.mamba_ping_pong_track_buffer[kept])
            if record is not None and record < 1:  # nothing is in that slot yet
                record = kept = None
            pool.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=kept)
            return found, record
        if kv.kv_committed_len != num_tokens:  # its state is of more than the tokens that are kept
            pool.free_mamba_cache(req)
            return 0, None
        record, kv.mamba_pool_idx = int(kv.mamba_pool_idx), None
        return num_tokens, record

    def _tracked(self, kv: Any, num_tokens: int) -> tuple[int, int | None]:
        """The last state among its buffers that is not beyond `num_tokens`: behind how many, and which."""
        last, before = kv.mamba_last_track_seqlen, kv.mamba_prev_track_seqlen
        kept = kv.mamba_last_track_idx
        if last is not None and last <= num_tokens:
            return int(last), int(kept)
        if before is None or before > num_tokens or self._pool.mamba_ping_pong_track_buffer_size != 2:
            return 0, None
        return int(before), int(self._pool.get_mamba_ping_pong_other_idx(kept))

    def _slot(self) -> torch.Tensor | None:
        """int64 [1]: an empty slot, for which a record of the tree may have to leave the device."""
        slot: torch.Tensor | None = self._slots.alloc(1)
        if slot is None:
            self._make_room()
            slot = self._slots.alloc(1)
        return slot


def require_known_states(pool: Any) -> None:
    """Raise ConfigError for a request pool whose slots of state are not known, by its class."""
    kind, slots = type(pool).__name__, type(getattr(pool, "mamba_allocator", None)).__name__
    if kind != _ROWS or slots != RECORDS:
        raise refusal(
            f"This model's request pool {kind} with {slots}",
            f"only {_ROWS} with {RECORDS} is known, another may name slots otherwise",
        )
    if getattr(pool, "mamba_ckpt_pool", None) is not None:
        raise refusal("--enable-int8-mamba-checkpoint", "its records are in a pool of their own")
    if not pool.enable_mamba_extra_buffer and pool.mamba_pool.replayssm_write_pos is not None:
        raise refusal("--enable-linear-replayssm", "a slot's state lags behind its tokens")
