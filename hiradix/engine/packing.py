"""Packs the parts of several sequences into one forward pass: ids, positions, slots, page tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hiradix.engine.attention import Chunk, DecodeGroup, KVBuffers, PagedStep

_MAX_PADDING = 1.5


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a pass: `token_ids` to compute, at the end of its `num_tokens` tokens.

    row: int [>= num_tokens] slots of the sequence, page after page (its row of the req-to-token pool).
    """

    token_ids: Sequence[int]
    num_tokens: int
    row: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedPass:
    """token_ids, positions: int64 [T]; last_rows: int64 [sequences], the row of each one's last token."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    last_rows: torch.Tensor
    step: PagedStep


def pack(work: Sequence[Work], pool: KVBuffers, device: torch.device) -> PackedPass:
    """`work` as one pass on `device`; sequences with one new token are grouped for batched decoding."""
    assert work and all(len(part.token_ids) >= 1 for part in work), "a pass needs a token of every sequence"
    size = pool.page_size
    chunks: list[Chunk] = []
    start = 0
    for part in work:
        end = start + len(part.token_ids)
        pages = (part.row[: part.num_tokens : size] // size).to(device, torch.int64)
        chunks.append(Chunk(start, end, pages, part.num_tokens))
        start = end
    ids = torch.cat([torch.as_tensor(part.token_ids, dtype=torch.int64) for part in work])
    spans = [(part.num_tokens - len(part.token_ids), part.num_tokens) for part in work]
    slots = torch.cat([part.row[first:last] for part, (first, last) in zip(work, spans, strict=True)])
    step = PagedStep(
        pool=pool,
        slots=slots.to(device, torch.int64),
        prefills=tuple(chunk for chunk in chunks if chunk.end - chunk.start > 1),
        decodes=_group_decodes([chunk for chunk in chunks if chunk.end - chunk.start == 1]),
    )
    return PackedPass(
        token_ids=ids.to(device),
        positions=torch.cat([torch.arange(*span) for span in spans]).to(device),
        last_rows=torch.tensor([chunk.end - 1 for chunk in chunks], device=device),
        step=step,
    )


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
    )
