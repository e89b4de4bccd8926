"""Packs the parts of several sequences into one forward pass: ids, positions, slots, page tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hiradix.apps.engine.attention import Chunk, DecodeGroup, KVBuffers, PagedPass, PagedStep
from hiradix.apps.engine.recurrent import SequenceRows, StatePass, StatePool
from hiradix.apps.engine.states import StateUse
from hiradix.errors import Misuse

_MAX_PADDING = 1.5


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a pass: `token_ids` to compute, at the end of its `num_tokens` tokens.

    row: int [>= num_tokens] slots of the sequence, page after page (its row of the req-to-token pool).
    state: where its recurrent state is, in models that keep one. num_logits: of its last tokens, how many
    have logits.
    """

    token_ids: Sequence[int]
    num_tokens: int
    row: torch.Tensor
    state: StateUse | None = None
    num_logits: int = 1


@dataclass(frozen=True, slots=True)
class LayerPool:
    """A pool, and the model's layers it has, in its order.

    window: tokens its layers see of a sequence, None for all; the pages behind may be missing. slot_of:
    int64 by full slot, the slot in this pool; None where it is the same.
    """

    buffers: KVBuffers
    layers: Sequence[int]
    window: int | None = None
    slot_of: torch.Tensor | None = None

    def slots(self, row: torch.Tensor) -> torch.Tensor:
        """int64: this pool's slots of a sequence's full slots."""
        wide = row.to(torch.int64)
        return wide if self.slot_of is None else self.slot_of[wide]


@dataclass(frozen=True, slots=True)
class Pools:
    """All that a pass reads and writes; states: of a model with recurrent layers."""

    paged: Sequence[LayerPool]
    states: StatePool | None = None


@dataclass(frozen=True, slots=True)
class PackedPass:
    """token_ids, positions: int64 [T]; logit_rows: int64, of the tokens that have logits, `num_logits` of each
    sequence: most often its last alone."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    paged: PagedPass
    states: StatePass | None


def pack(work: Sequence[Work], pools: Pools, device: torch.device) -> PackedPass:
    """`work` as one pass on `device`; sequences with one new token are grouped for batched decoding."""
    if not work or not all(len(part.token_ids) >= 1 for part in work):
        raise Misuse("a pass needs a token of every sequence")
    ids = torch.cat([torch.as_tensor(part.token_ids, dtype=torch.int64) for part in work])
    spans = [(part.num_tokens - len(part.token_ids), part.num_tokens) for part in work]
    ends = list(accumulate(len(part.token_ids) for part in work))
    steps = [_step(work, pool, device) for pool in pools.paged]
    return PackedPass(
        token_ids=ids.to(device),
        positions=torch.cat([torch.arange(*span) for span in spans]).to(device),
        logit_rows=torch.tensor(
            [row for part, end in zip(work, ends, strict=True) for row in range(end - part.num_logits, end)],
            device=device,
        ),
        paged=PagedPass(steps, [pool.layers for pool in pools.paged]),
        states=None if pools.states is None else _state_pass(work, pools.states, device),
    )


def _state_pass(work: Sequence[Work], pool: StatePool, device: torch.device) -> StatePass:
    """The part of a pass over the state pool."""
    ends = accumulate(len(part.token_ids) for part in work)
    return StatePass(pool, [_pieces(part, end) for part, end in zip(work, ends, strict=True)], device)


def _pieces(part: Work, end: int) -> list[SequenceRows]:
    """`part` as the packed rows up to `end`, cut where a record of its state is taken."""
    use, start = part.state, end - len(part.token_ids)
    if use is None:
        raise Misuse("a sequence without a state")
    if use.record is None:
        return [SequenceRows(start, end, use.source, (use.target,))]
    cut = end - (part.num_tokens - use.boundary)
    if not start < cut <= end:
        raise Misuse(f"a record behind token {use.boundary}, the pass ends at {part.num_tokens}")
    if cut == end:
        return [SequenceRows(start, end, use.source, (use.target, use.record))]
    return [SequenceRows(start, cut, use.source, (use.record,)), SequenceRows(cut, end, None, (use.target,))]


def _step(work: Sequence[Work], pool: LayerPool, device: torch.device) -> PagedStep:
    """The part of a pass over one pool."""
    chunks, slots, start = [], [], 0
    for part in work:
        chunks.append(_chunk(part, pool, start, device))
        slots.append(pool.slots(part.row[part.num_tokens - len(part.token_ids) : part.num_tokens]))
        start = chunks[-1].end
    tails = [tail for part in work if len(tail := _tail(part, pool.buffers.page_size))]
    return PagedStep(
        pool=pool.buffers,
        slots=torch.cat(slots).to(device),
        tails=pool.slots(torch.cat(tails) if tails else work[0].row[:0]).to(device),
        prefills=tuple(chunk for chunk in chunks if chunk.end - chunk.start > 1),
        decodes=_group_decodes([chunk for chunk in chunks if chunk.end - chunk.start == 1]),
    )


def _tail(part: Work, page_size: int) -> torch.Tensor:
    """The slots behind the last token of `part` in that one's page, if the page begins in this pass."""
    page = (part.num_tokens - 1) // page_size * page_size
    begins = part.num_tokens - len(part.token_ids) <= page
    return part.row[part.num_tokens : page + page_size if begins else part.num_tokens]


def _chunk(part: Work, pool: LayerPool, start: int, device: torch.device) -> Chunk:
    """`part` as the packed rows from `start` on, with its pages as far back as its layers look."""
    size, first, num_new = pool.buffers.page_size, 0, len(part.token_ids)
    if pool.window is not None:
        first = max(0, part.num_tokens - num_new - pool.window + 1) // size * size
    pages = pool.slots(part.row[first : part.num_tokens : size]) // size
    return Chunk(start, start + num_new, pages.to(device), part.num_tokens, first)


def _group_decodes(chunks: Sequence[Chunk]) -> tuple[DecodeGroup, ...]:
    """Groups whose longest page table is at most 1.5 times the shortest (plus a page), to bound padding."""
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: len(chunk.pages)):
        if groups and len(chunk.pages) <= _MAX_PADDING * len(groups[-1][0].pages) + 1:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return tuple(_decode_group(group) for group in groups)


def _decode_group(chunks: Sequence[Chunk]) -> DecodeGroup:
    device = chunks[0].pages.device
    return DecodeGroup(
        rows=torch.tensor([chunk.start for chunk in chunks], device=device),
        pages=torch.nn.utils.rnn.pad_sequence([chunk.pages for chunk in chunks], batch_first=True),
        lengths=torch.tensor([chunk.num_tokens for chunk in chunks], device=device),
        firsts=torch.tensor([chunk.first for chunk in chunks], device=device),
    )
