"""Paged attention over a device pool: the one function that replaces a transformers model's attention.

One forward pass packs all its sequences into one row of T tokens. Each layer first takes its pool buffers
(which waits on that layer's load-back gate), writes the new tokens' K and V into their slots, then attends:
every prefill chunk by itself over its gathered pages, decodes in groups of similar length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

ATTENTION_NAME = "hiradix_paged"


class KVBuffers(Protocol):
    """The part of a device pool that a forward pass uses; the getters wait on the layer's gate."""

    page_size: int

    def get_key_buffer(self, layer: int, /) -> torch.Tensor: ...

    def get_value_buffer(self, layer: int, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, end) of the packed pass: one sequence's next tokens, the last of its `num_tokens` so far.

    pages: int64 [ceil(num_tokens / page_size)] on the pool's device, all pages of the sequence.
    """

    start: int
    end: int
    pages: torch.Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length with one new token each, padded to the longest.

    rows: int64 [B] packed rows. pages: int64 [B, max pages], padded with page 0. lengths: int64 [B] tokens.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One pass over `pool`: slots int64 [T] to write, and who attends to what. Masks are made once."""

    pool: KVBuffers
    slots: torch.Tensor
    prefills: tuple[Chunk, ...]
    decodes: tuple[DecodeGroup, ...]
    masks: dict[tuple[str, int, int | None], torch.Tensor] = field(default_factory=dict)


def _gather(buffer: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of `pages` as [num_pages * page_size, H, D], copied page by page."""
    return buffer.view(-1, page_size, *buffer.shape[1:]).index_select(0, pages).flatten(0, 1)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, minus infinity where hidden."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _chunk_mask(step: PagedStep, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Additive mask [1, 1, new tokens, all tokens] of prefill `index`; None where plain causal will do."""
    chunk = step.prefills[index]
    num_new, num_tokens = chunk.end - chunk.start, chunk.num_tokens
    if window is not None and num_tokens <= window:
        window = None
    if window is None and num_new == num_tokens:
        return None
    key = ("prefill", index, window)
    if key not in step.masks:
        device = chunk.pages.device
        query = torch.arange(num_tokens - num_new, num_tokens, device=device)[:, None]
        other = torch.arange(num_tokens, device=device)[None, :]
        hidden = other > query if window is None else (other > query) | (other <= query - window)
        step.masks[key] = _additive(hidden, dtype)[None, None]
    return step.masks[key]


def _decode_mask(step: PagedStep, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, 1, padded tokens] of decode group `index`."""
    key = ("decode", index, window)
    if key not in step.masks:
        group = step.decodes[index]
        width = group.pages.shape[1] * step.pool.page_size
        other = torch.arange(width, device=group.pages.device)[None, :]
        length = group.lengths[:, None]
        hidden = other >= length if window is None else (other >= length) | (other < length - window)
        step.masks[key] = _additive(hidden, dtype)[:, None, None]
    return step.masks[key]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's pool buffers and constants during a pass."""

    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    window: int | None


def _prefill(step: PagedStep, index: int, layer: _Layer, query: torch.Tensor) -> torch.Tensor:
    """Attention of one chunk: query [T, H, D] of the whole pass -> [chunk tokens, H, Dv]."""
    chunk = step.prefills[index]
    size = step.pool.page_size
    keys = _gather(layer.keys, chunk.pages, size)[: chunk.num_tokens].transpose(0, 1)[None]
    values = _gather(layer.values, chunk.pages, size)[: chunk.num_tokens].transpose(0, 1)[None]
    mask = _chunk_mask(step, index, layer.window, query.dtype)
    out = scaled_dot_product_attention(
        query[chunk.start : chunk.end].transpose(0, 1)[None], keys, values,
        attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _decode(step: PagedStep, index: int, layer: _Layer, query: torch.Tensor) -> torch.Tensor:
    """Attention of one decode group: query [T, H, D] of the whole pass -> [B, H, Dv].

    The query heads that share a KV head become the rows of one small matrix, so K and V are never repeated.
    """
    group = step.decodes[index]
    batch, size = len(group.rows), step.pool.page_size
    flat = group.pages.flatten()
    keys = _gather(layer.keys, flat, size).view(batch, -1, *layer.keys.shape[1:]).transpose(1, 2)
    values = _gather(layer.values, flat, size).view(batch, -1, *layer.values.shape[1:]).transpose(1, 2)
    folded = query[group.rows].view(batch, keys.shape[1], -1, query.shape[-1])
    mask = _decode_mask(step, index, layer.window, query.dtype)
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=layer.scale)
    return out.flatten(1, 2)


def paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in transformers' form: query [1, H, T, D] -> [1, T, H, Dv].

    Needs the keyword `paged`: the pass's PagedStep, handed to the model's forward. Reads transformers'
    `scaling` and `sliding_window`; `softcap` and sinks are refused when the model is loaded.
    """
    step: PagedStep = kwargs["paged"]
    refused = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    assert not refused, f"attention options {refused} got past loading"
    keys = step.pool.get_key_buffer(module.layer_idx)
    values = step.pool.get_value_buffer(module.layer_idx)
    keys.index_copy_(0, step.slots, key[0].transpose(0, 1).to(keys.dtype))
    values.index_copy_(0, step.slots, value[0].transpose(0, 1).to(values.dtype))
    layer = _Layer(keys, values, kwargs["scaling"], kwargs.get("sliding_window"))
    packed = query[0].transpose(0, 1)
    out = packed.new_empty((*packed.shape[:2], values.shape[-1]))
    for index, chunk in enumerate(step.prefills):
        out[chunk.start : chunk.end] = _prefill(step, index, layer, packed)
    for index, group in enumerate(step.decodes):
        out[group.rows] = _decode(step, index, layer, packed)
    return out[None], None
