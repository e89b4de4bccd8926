"""Paged attention over a device pool: the one function that replaces a transformers model's attention.

One forward pass packs all its sequences into one row of T tokens. Each layer first takes its pool buffers
(which waits on that layer's load-back gate), writes the new tokens' K and V into their slots, then attends:
every prefill chunk by itself over its gathered pages, decodes in groups of similar length. Layers with a
window may have a pool of their own, of whose pages only those that the window reaches are gathered. Of MLA
the compressed latents are kept; the module expands the gathered ones to keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from hiradix.errors import Misuse

ATTENTION_NAME = "hiradix_paged"


class KVBuffers(Protocol):
    """The part of a device pool that a forward pass uses; the getters wait on the layer's gate.

    A `DevicePool`, or with ranks the `UngatedOnceFailed` around one, whose module is above this one.
    """

    page_size: int

    def get_key_buffer(self, layer: int, /) -> torch.Tensor: ...

    def get_value_buffer(self, layer: int, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, end) of the packed pass: one sequence's next tokens, the last of its `num_tokens` so far.

    pages: int64 on the pool's device, the sequence's pages from token `first` on.
    """

    start: int
    end: int
    pages: torch.Tensor
    num_tokens: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length with one new token each, padded to the longest.

    rows: int64 [B] packed rows. pages: int64 [B, max pages], padded with page 0. lengths: int64 [B] tokens of
    the sequence, of which the pages hold those from `firsts` int64 [B] on.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor
    firsts: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A pass's part over one pool: slots int64 [T] to write, and who attends to what. Masks are made once.

    tails: int64 slots behind the last tokens of pages that the pass begins. They are gathered with their page
    and hidden; but what is hidden has to be a number, so these are set to zero.
    """

    pool: KVBuffers
    slots: torch.Tensor
    tails: torch.Tensor
    prefills: tuple[Chunk, ...]
    decodes: tuple[DecodeGroup, ...]
    masks: dict[tuple[str, int, int | None], torch.Tensor] = field(default_factory=dict)


class PagedPass:
    """One pass over all the pools of a model; each model layer has a place in one of them.

    layers: per step, the model's layers in the order of the pool's. It stands in for transformers' cache in
    models that compress their keys and values (MLA): `update` takes the new tokens' latents.
    """

    def __init__(self, steps: Sequence[PagedStep], layers: Sequence[Sequence[int]]):
        self._at = {
            layer: (step, at) for step, own in zip(steps, layers, strict=True) for at, layer in enumerate(own)
        }

    def of(self, layer: int) -> tuple[PagedStep, int]:
        """The step that model layer `layer` belongs to, and the layer's number in that step's pool."""
        return self._at[layer]

    def update(
        self, latent: torch.Tensor, rope: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write latents [1, 1, T, C] and [1, 1, T, R]; the module expands one row in vain."""
        step, at = self._at[layer]
        _write(step, step.pool.get_key_buffer(at), torch.cat([latent[0, 0], rope[0, 0]], dim=-1)[:, None])
        return latent[:, :, :1], rope[:, :, :1]


def _write(step: PagedStep, buffer: torch.Tensor, new: torch.Tensor) -> None:
    """Put the pass's new rows [T, H, D] into `buffer` [slots, H, D]."""
    buffer.index_copy_(0, step.slots, new.to(buffer.dtype))
    if len(step.tails):
        buffer.index_fill_(0, step.tails, 0)


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
        if chunk.first != 0:
            raise Misuse(f"pages from token {chunk.first} of {num_tokens}, window {window}")
        window = None
    if window is None and num_new == num_tokens:
        return None
    key = ("prefill", index, window)
    if key not in step.masks:
        device = chunk.pages.device
        query = torch.arange(num_tokens - num_new, num_tokens, device=device)[:, None]
        other = torch.arange(chunk.first, num_tokens, device=device)[None, :]
        hidden = other > query if window is None else (other > query) | (other <= query - window)
        step.masks[key] = _additive(hidden, dtype)[None, None]
    return step.masks[key]


def _decode_mask(step: PagedStep, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, 1, padded tokens] of decode group `index`."""
    key = ("decode", index, window)
    if key not in step.masks:
        group = step.decodes[index]
        width = group.pages.shape[1] * step.pool.page_size
        other = torch.arange(width, device=group.pages.device)[None, :] + group.firsts[:, None]
        length = group.lengths[:, None]
        hidden = other >= length if window is None else (other >= length) | (other < length - window)
        step.masks[key] = _additive(hidden, dtype)[:, None, None]
    return step.masks[key]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's pool buffers and constants during a pass.

    values: None where `keys` are latents, which `expand` turns into keys and values.
    """

    keys: torch.Tensor
    values: torch.Tensor | None
    expand: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None
    scale: float
    window: int | None

    def gather(self, pages: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, Hkv, N, D] and values [B, Hkv, N, Dv] of pages int64 [B, P], N = P * size."""
        batch, flat = len(pages), pages.flatten()
        keys = _gather(self.keys, flat, size).view(batch, -1, *self.keys.shape[1:]).transpose(1, 2)
        if self.values is None:
            assert self.expand is not None
            return self.expand(keys)
        values = _gather(self.values, flat, size).view(batch, -1, *self.values.shape[1:]).transpose(1, 2)
        return keys, values


def _prefill(step: PagedStep, index: int, layer: _Layer, query: torch.Tensor) -> torch.Tensor:
    """Attention of one chunk: query [T, H, D] of the whole pass -> [chunk tokens, H, Dv]."""
    chunk = step.prefills[index]
    keys, values = layer.gather(chunk.pages[None], step.pool.page_size)
    keys, values = (each[:, :, : chunk.num_tokens - chunk.first] for each in (keys, values))
    mask = _chunk_mask(step, index, layer.window, query.dtype)
    out = scaled_dot_product_attention(
        query[chunk.start : chunk.end].transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=layer.scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _decode(step: PagedStep, index: int, layer: _Layer, query: torch.Tensor) -> torch.Tensor:
    """Attention of one decode group: query [T, H, D] of the whole pass -> [B, H, Dv].

    The query heads that share a KV head become the rows of one small matrix, so K and V are never repeated.
    """
    group = step.decodes[index]
    keys, values = layer.gather(group.pages, step.pool.page_size)
    folded = query[group.rows].view(len(group.rows), keys.shape[1], -1, query.shape[-1])
    mask = _decode_mask(step, index, layer.window, query.dtype)
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=layer.scale)
    return out.flatten(1, 2)


def _layer_of(
    module: Any, step: PagedStep, at: int, new: tuple[torch.Tensor, torch.Tensor], options: dict[str, Any]
) -> _Layer:
    """The buffers of pool layer `at`, with the pass's new keys and values [1, H, T, D] written to them."""
    keys, scale, window = step.pool.get_key_buffer(at), options["scaling"], options.get("sliding_window")
    if hasattr(module, "expand_kv"):  # MLA: `PagedPass.update` has written the latents

        def expand(latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            parts = torch.split(latents, [module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
            expanded: tuple[torch.Tensor, torch.Tensor] = module.expand_kv(*parts)
            return expanded

        return _Layer(keys, None, expand, scale, window)
    values = step.pool.get_value_buffer(at)
    _write(step, keys, new[0][0].transpose(0, 1))
    _write(step, values, new[1][0].transpose(0, 1))
    return _Layer(keys, values, None, scale, window)


def paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in transformers' form: query [1, H, T, D] -> [1, T, H, Dv].

    Needs the keyword `paged`: the PagedPass, handed to the model's forward. Reads transformers'
    `scaling` and `sliding_window`; `softcap` and sinks are refused when the model is loaded.
    """
    step, at = kwargs["paged"].of(module.layer_idx)
    refused = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if refused:
        raise Misuse(f"attention options {refused} got past loading")
    layer = _layer_of(module, step, at, (key, value), kwargs)
    packed = query[0].transpose(0, 1)
    out = packed.new_empty((*packed.shape[:2], value.shape[-1]))
    for index, chunk in enumerate(step.prefills):
        out[chunk.start : chunk.end] = _prefill(step, index, layer, packed)
    for index, group in enumerate(step.decodes):
        out[group.rows] = _decode(step, index, layer, packed)
    return out[None], None
