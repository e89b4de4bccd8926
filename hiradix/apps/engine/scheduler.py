"""Continuous batching: who computes which tokens in the next pass, and where their KV goes.

    plan()      admit what fits, give decodes their next page, cut the pass into parts
    computed()  after the pass: share what was computed, chunk by chunk
    answered()  the request's next token was sampled
    finish()    a request ended: its slots go to the prefix cache
    retract()   a request gives its pages back and waits again, first in line

Who waits for its first token is served in the order of `turns`, prefills under way among them; one whose
prefetch is under way is passed over until it is done. Where a request is, is which container it is in:
`waiting` or `running` (oldest admission first).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum

import torch

from hiradix.apps.engine.api import FINISH_ABORT
from hiradix.apps.engine.request import Request
from hiradix.apps.engine.slots import Allocator, SlotSupply
from hiradix.apps.engine.states import NO_STATES, NoStates, StateSlots
from hiradix.apps.engine.turns import STOPS, Turns
from hiradix.cache.misses import Hit
from hiradix.errors import Misuse
from hiradix.memory import ReqToTokenPool
from hiradix.prefix_cache import MatchPrefixParams, PrefixCache
from hiradix.tree import RadixKey

_MIN_RESERVE = 0.2  # share of a running request's remaining answer that admission keeps free
_RESERVE_DECAY = 0.98  # per plan, back to the minimum after a retraction
_MAX_SCORED = 256  # tokens of a prompt with logits in one pass: a row of the vocabulary each
_MAX_FAILED_PASSES = 2  # a request whose admissions failed so often with a load computes what is on the host


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """`request` computes its next `num_tokens` tokens; `admitted`: in the plan that admitted it."""

    request: Request
    num_tokens: int
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes the scheduler keeps to: requests, tokens per pass, tokens per page.

    window: tokens that layers with a window look back, where those have a pool of their own.
    """

    max_running: int
    max_waiting: int
    chunk_tokens: int | None
    page_size: int
    window: int | None = None


class _Admission(Enum):
    DONE = "admitted"
    PREFETCHING = "passed over"
    FULL = "no room"


class Scheduler:
    """Owns the requests and their slots; the prefix cache owns the shared ones. One thread.

    turns: who is served next. states: of a model with recurrent layers.
    """

    def __init__(
        self, cache: PrefixCache, allocator: Allocator, rows: ReqToTokenPool, limits: SchedulerLimits,
        turns: Turns, states: StateSlots | NoStates = NO_STATES,
    ):  # fmt: skip
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_retractions = 0
        self.limits = limits
        self.turns = turns
        self._cache = cache
        self._slots = SlotSupply(cache, allocator, limits.page_size, turns.ends)
        if self._slots.has_windows != (limits.window is not None):
            raise Misuse(f"window {limits.window}, {allocator}")
        self._rows = rows
        self._states = states
        self._reserve = _MIN_RESERVE

    # -- arrival ------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the waiting queue is at its cap."""
        return len(self.waiting) >= self.limits.max_waiting

    def add(self, request: Request) -> None:
        """Queue a request and start fetching its prefix from storage while it waits."""
        if self.is_full:
            raise Misuse(f"{len(self.waiting)} requests wait already")
        self.waiting.append(request)
        self.turns.arrived(request)
        if self._cache.enable_storage and not request.num_unscored:
            self._match(request)
            matched = len(request.prefix_indices) + request.host_hit_length
            missing = request.tokens(matched, request.num_tokens - 1)
            self._cache.prefetch_from_storage(request.rid, request.last_host_node, missing, req=request)

    def find(self, rid: str) -> Request | None:
        """The request with this id, waiting or running."""
        return next((r for queue in (self.waiting, self.running) for r in queue if r.rid == rid), None)

    def remove(self, rid: str) -> Request | None:
        """Take a request out wherever it is and give all it holds back; None if there is none."""
        request = self.find(rid)
        if request is None:
            return None
        if request.req_pool_idx is None:
            self.waiting.remove(request)
            self._cache.release_aborted_request(rid)
            self.turns.ended(request, STOPS[FINISH_ABORT])
        else:
            self.finish(request, FINISH_ABORT)
        return request

    # -- one step -----------------------------------------------------------------------

    def plan(self) -> list[ScheduledTokens]:
        """Parts of the next pass, at most `chunk_tokens` together (each running decode gets its one)."""
        self._reserve = max(_MIN_RESERVE, self._reserve * _RESERVE_DECAY)
        self.turns.begin()
        ready = self._grow_running()
        parts = [ScheduledTokens(r, 1) for r in ready if r.num_uncomputed == 1]
        self._plan_prefills(parts, [r for r in ready if r.num_uncomputed > 1])
        self.turns.planned([(part.request, part.num_tokens) for part in parts])
        return parts

    def computed(self, part: ScheduledTokens) -> bool:
        """Record a finished part; True when the request's next token can be sampled.

        A prefill's tokens are given to the prefix cache at once, chunk by chunk; decoded ones at the end.
        """
        request = part.request
        was_prefill = request.num_computed < len(request.origin_input_ids) or part.admitted
        self._states.computed(request, part.num_tokens)
        request.num_computed += part.num_tokens
        is_whole = request.num_uncomputed == 0
        if was_prefill:
            self._cache.cache_unfinished_req(request, chunked=not is_whole)
        return is_whole

    def answered(self, request: Request) -> None:
        """A token was sampled for a request that is computed."""
        self.turns.answered(request)

    def finish(self, request: Request, reason: str) -> None:
        """A running request ended (answered or aborted): its computed tokens stay in the prefix cache.

        reason: one of `api.FINISH_*`.
        """
        request.session_stop = STOPS.get(reason, "")
        self._release(request, is_insert=True)
        self.turns.ended(request, request.session_stop)

    def retract(self, request: Request) -> None:
        """Stop a running request and free its own pages; it waits first in line and computes them again."""
        self._release(request, is_insert=False)
        self.waiting.appendleft(request)
        self.num_retractions += 1
        self._reserve = 1.0

    def undo_admission(self, request: Request) -> None:
        """The pass that admitted a request failed: it waits again, first in line, as if never admitted."""
        self._release(request, is_insert=False)
        self.waiting.appendleft(request)
        request.num_admissions -= 1
        request.num_failed_passes += 1

    # -- prefills -----------------------------------------------------------------------

    def _plan_prefills(self, parts: list[ScheduledTokens], under_way: list[Request]) -> None:
        """Add prompts to the decodes of a pass, under way and new ones, as their turn is. Where decodes leave
        nothing, one under way gets a token all the same."""
        budget = self.limits.chunk_tokens
        remaining = None if budget is None else max(1, budget - len(parts))
        may_admit = budget is None or budget > len(parts)
        room = self._room_beside_answers()
        for request in self._in_turn(under_way, remaining):
            if remaining == 0:
                return
            is_new = request.req_pool_idx is None
            if is_new:
                if not may_admit or len(self.running) >= self.limits.max_running:
                    continue
                admission = self._admit(request, room)
                if admission is _Admission.FULL:
                    self._refuse_stuck(request)
                    may_admit = self.turns.passes_over
                if admission is not _Admission.DONE:
                    continue
                room = self._room_beside_answers()
            part = self._next_part(request, remaining, admitted=is_new)
            parts.append(part)
            remaining = None if remaining is None else remaining - part.num_tokens

    def _in_turn(self, under_way: list[Request], remaining: int | None) -> list[Request]:
        """The requests that may compute their prompts, next first: those that were answered before they were
        retracted, then as `turns` has them. A prefill under way that it leaves out comes last."""
        known = {r.rid: r for r in (*under_way, *self.waiting)}
        max_new = self.limits.max_running - len(self.running)
        max_tokens = math.inf if remaining is None else remaining
        resumed = [r for r in known.values() if r.output_ids]
        ordered = [known[rid] for rid in self.turns.order(max_new, max_tokens) if rid in known]
        taken = {r.rid for r in (*resumed, *ordered)}
        return [*resumed, *ordered, *(r for r in under_way if r.rid not in taken)]

    def _refuse_stuck(self, request: Request) -> None:
        """Misuse, where nothing will ever give pages back."""
        if not self.running and not self._cache.is_transferring:
            raise Misuse(f"an empty engine has no room for {request.rid}: {self._slots.room} tokens")

    # -- running requests ---------------------------------------------------------------

    def _grow_running(self) -> list[Request]:
        """Give every running request room for its known tokens, oldest first; returns those that have it.

        When no page can be had, the youngest request is retracted. The only one left skips this pass while
        transfers, which hold pages, are under way.
        """
        ready = []
        queue = deque(self.running)
        while queue:
            request = queue.popleft()
            while not self._grow(request):
                youngest = self.running[-1]
                if len(self.running) == 1:
                    room = self._slots.room
                    if not self._cache.is_transferring:
                        raise Misuse(f"no page for {request.rid} alone: {room}")
                    break
                self.retract(youngest)
                if youngest is request:
                    break
                queue.pop()
            else:
                ready.append(request)
        return ready

    def _grow(self, request: Request) -> bool:
        if request.num_allocated < request.num_tokens:
            size = self.limits.page_size
            slots = self._slots.alloc(-(-(request.num_tokens - request.num_allocated) // size) * size)
            if slots is None:
                return False
            self._write_row(request, slots)
        return self._open_next(request)

    def _open_next(self, request: Request) -> bool:
        """The memory beside full pages that the next pass needs for a running request."""
        return self._open_windows(request) and self._states.open(request, self._most_next(request))

    def _most_next(self, request: Request) -> int:
        """The most tokens that the next pass may compute of a running request."""
        return min(request.num_uncomputed, self.limits.chunk_tokens or request.num_uncomputed)

    def _open_windows(self, request: Request) -> bool:
        """Window pages for what the next pass may compute of a running request, those behind given back."""
        size, window = self.limits.page_size, self.limits.window
        if window is None:
            return True
        own = request.cache_protected_len
        # a match may end at the last whole page: it needs the window behind that
        behind = (request.num_computed // size - -(-window // size)) * size
        if behind > max(own, request.num_slid):
            self._slots.close_windows(self.row(request)[max(own, request.num_slid) : behind])
            request.num_slid = behind
        start, end = max(own, request.num_computed // size * size), request.num_computed
        return self._slots.open_windows(self.row(request)[start : end + self._most_next(request)])

    def _next_part(self, request: Request, remaining: int | None, *, admitted: bool) -> ScheduledTokens:
        """The request's next chunk of at most `remaining` tokens, ending on a page boundary where it can.

        It ends where the request parts from others, if there is no record: the next one finds one there.
        """
        count, done, size = request.num_uncomputed, request.num_computed, self.limits.page_size
        if request.num_unscored:
            remaining = min(count if remaining is None else remaining, _MAX_SCORED)
        if remaining is not None and count > remaining:
            aligned = (done + remaining) // size * size - done
            count = aligned if aligned > 0 else remaining
        if done < request.num_known < (done + count) // size * size:
            count = request.num_known - done
        return ScheduledTokens(request, count, admitted)

    # -- admission ----------------------------------------------------------------------

    def _admit(self, request: Request, room: int) -> _Admission:
        """Match, load back, lock and allocate for a waiting request; all of it or nothing.

        Who does not fit into `room` by what was found of it last is not looked up: each that waits is asked at
        each step.
        """
        if not self._cache.check_prefetch_progress(request.rid):
            return _Admission.PREFETCHING
        if request.num_tokens - self.turns.found_on_device(request) > room:
            return _Admission.FULL
        request.storage_hit_length += self._cache.pop_prefetch_loaded_tokens(request.rid)
        self._match(request)
        held = self._cache.inc_lock_ref(request.last_node)
        try:
            if not self._fits(request) or not self._take_slots(request):
                return _Admission.FULL
        finally:
            self._cache.dec_lock_ref(held)
        self._cache.release_aborted_request(request.rid)
        self.waiting.remove(request)
        self.running.append(request)
        request.num_admissions += 1
        self.turns.started(request)
        return _Admission.DONE

    def _match(self, request: Request) -> None:
        """Look the request's tokens up, all but the last: one token must be computed to have logits. A prompt
        whose log probabilities are asked for is computed whole."""
        tokens = request.tokens(0, 0 if request.num_unscored else request.num_tokens - 1)
        key = RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)
        match = self._cache.match_prefix(MatchPrefixParams(key=key))
        request.prefix_indices = match.device_indices
        request.last_node = match.last_device_node
        request.last_host_node = match.last_host_node
        request.host_hit_length = match.host_hit_length
        request.num_known = match.mamba_branching_seqlen or 0
        request.cache_protected_len = len(match.device_indices)

    def _room_beside_answers(self) -> int:
        """Tokens that are free or can be made so, beside a share of the running answers."""
        kept = 0
        for other in self.running:
            expected = self._reserve * (other.max_new_tokens - len(other.output_ids))
            kept += max(0, int(other.num_tokens + expected) - other.num_allocated)
        return self._slots.room - kept

    def _fits(self, request: Request) -> bool:
        """Whether the request's tokens fit beside the running answers. The match is locked."""
        size = self.limits.page_size
        need = -(-request.num_tokens // size) * size - len(request.prefix_indices)
        return need <= self._room_beside_answers()

    def _take_slots(self, request: Request) -> bool:
        """Load the host part back, lock the prefix, fill the request's row; False leaves nothing held."""
        loaded, wanted = 0, request.host_hit_length
        if request.host_hit_length > 0 and request.num_failed_passes < _MAX_FAILED_PASSES:
            indices, node = self._cache.init_load_back(request.last_host_node, request.host_hit_length)
            loaded = len(indices)
            request.prefix_indices = torch.cat([request.prefix_indices, indices])
            request.last_node = node
            request.cache_protected_len = len(request.prefix_indices)
        request.lock = self._cache.inc_lock_ref(request.last_node)
        size, prefix = self.limits.page_size, len(request.prefix_indices)
        slots = self._slots.alloc(-(-(request.num_tokens - prefix) // size) * size)
        rows = self._rows.alloc(1) if slots is not None else None
        if rows is not None:
            assert slots is not None
            request.req_pool_idx = rows[0]
            self._write_row(request, torch.cat([request.prefix_indices, slots]))
            request.num_computed = prefix
        if slots is None or rows is None or not self._open_next(request):
            self._states.close(request)
            if rows is not None:
                self._rows.free(rows)
            if slots is not None:
                self._slots.free(slots)
            self._cache.dec_lock_ref(request.lock)
            request.leave_row()
            return False
        self._count_cached(request, prefix - loaded, loaded, refused=wanted - loaded)
        return True

    def _count_cached(self, request: Request, from_device: int, loaded: int, refused: int) -> None:
        """Usage by source, at the first admission only: a retracted request finds its own tokens again."""
        if request.num_admissions > 0:
            return
        storage = min(request.storage_hit_length, loaded)
        hit = Hit(from_device, loaded - storage, storage)
        request.usage = replace(
            request.usage,
            cached_device=hit.device,
            cached_host=hit.host,
            cached_storage=hit.storage,
            explanation=self._cache.explain(request, hit, refused, 0 if request.num_unscored else None),
        )

    # -- slots --------------------------------------------------------------------------

    def _write_row(self, request: Request, slots: torch.Tensor) -> None:
        start, end = request.num_allocated, request.num_allocated + len(slots)
        self._rows.write((request.req_pool_idx, slice(start, end)), slots.to(torch.int32))
        request.num_allocated = end

    def row(self, request: Request) -> torch.Tensor:
        """int32 [num_allocated]: the request's slots, a view."""
        view: torch.Tensor = self._rows.req_to_token[request.req_pool_idx, : request.num_allocated]
        return view

    def _release(self, request: Request, *, is_insert: bool) -> None:
        """Give a running request's slots, lock and row back, pages past its computed tokens too."""
        size = self.limits.page_size
        covered = -(-request.num_computed // size) * size
        unused = self.row(request)[covered:].to(torch.int64, copy=True)
        self._cache.cache_finished_req(request, is_insert=is_insert)
        if len(unused):
            self._slots.free(unused)
        self._states.close(request)
        assert request.req_pool_idx is not None
        self._rows.free(request.req_pool_idx)
        self.running.remove(request)
        request.leave_row()
