"""vLLM's KV caches in our terms.

vLLM gives each layer's cache as one logical tensor [B, H, N, C]: blocks, heads, tokens of a block, and C the
concatenation of a token's K and V (or the latent alone, for latent attention). Its layouts, on CPU and CUDA
alike, differ only in the order these axes, and the layers, have in memory: in strides. So K is `[..., :D]`
and V is `[..., D:]` of the same tensor, and one description serves all of them.

All but the CPU kernels: what they keep in the N * C numbers of a block and head is not [N, C]. The usual one
("vec") has K there, transposed to [D, N], and then V as [N, D]; strides again. What others do is their own
affair: such a block is taken as it is, and its layout has another name, so that no other engine reads it.

Of recurrent layers (Mamba, gated delta) a block is no tokens but one state: [B, 1, 1, C] bytes, in which a
layer's tensors follow each other, each of a type of its own. What vLLM pads a block to is behind them.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from hiradix.errors import ConfigError
from hiradix.memory import CacheShape, KVShape, MLAShape, StridedPool
from hiradix.memory.shape import ArraySpec, Part
from hiradix.tree import FULL, Component

QUANTISED = "these scales are in no place that is known; use another --kv-cache-dtype"
SCALED = ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD")  # of KVQuantMode: a token's scales are in its cell
STATES = "MambaSpec"  # vLLM's name for groups that keep a recurrent state


@dataclass(frozen=True)
class StateTensors:
    """A recurrent state as vLLM's layers keep it: the bytes of several tensors, one after the other.

    tensors: the shape and type of each, of one state. A record is a page of a pool of its own.
    """

    num_layers: int
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_bytes) < 1:
            raise ConfigError(f"recurrent states of {self.num_layers} layers with tensors {self.tensors}")

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer's state."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[-1][1]

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        parts = tuple(Part(dtype, math.prod(shape)) for shape, dtype in self.tensors)
        return (ArraySpec("state", 1, self.num_bytes, torch.uint8, per_page=True, parts=parts),)

    def numbers(self) -> tuple[int, ...]:
        found = [self.num_layers]
        for shape, dtype in self.tensors:  # types of one size are not the same bytes
            found += [zlib.crc32(str(dtype).encode()), len(shape), *shape]
        return tuple(found)


@dataclass(frozen=True)
class ScaledCells:
    """Quantised K and V with a scale behind each, as vLLM packs a token's of one head: bytes, moved as they are.

    head_bytes: of such a cell. mode: vLLM's name for what they mean.
    """

    num_layers: int
    num_heads: int
    head_bytes: int
    mode: str
    dtype: torch.dtype = torch.uint8

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        return (ArraySpec("cells", self.num_heads, self.head_bytes, torch.uint8),)

    def numbers(self) -> tuple[int, ...]:
        return (self.num_layers, self.num_heads, self.head_bytes, zlib.crc32(self.mode.encode()))


@dataclass(frozen=True)
class Latent:
    """Sizes of a latent attention model's row: the compressed KV and its rope part."""

    kv_lora_rank: int
    qk_rope_head_dim: int


class Interior(Enum):
    """The order of the bytes within one block of one head."""

    TOKENS = "tokens"  # [N, K | V], all but CPU kernels
    K_THEN_V = "k-then-v"  # K as [D, N], then V as [N, D]
    OWN = "own"  # the kernel's own: bytes that only the same kernel understands


@dataclass(frozen=True)
class Grouping:
    """KV cache groups as the index's components: groups[c] is the group of components[c]."""

    page_size: int
    groups: tuple[int, ...]
    components: tuple[Component, ...]


def grouping(specs: Sequence[Any]) -> Grouping:
    """Sort vLLM's KV cache groups into a backbone and further components, by their specs. Raises ConfigError
    for kinds not known here."""
    sizes = {spec.block_size for spec in specs}
    if len(sizes) != 1:
        raise ConfigError(f"--block-size: KV cache groups of different block sizes {sorted(sizes)}")
    (page_size,) = sizes
    components = [_component(number, spec, page_size) for number, spec in enumerate(specs)]
    if len(specs) == 1 and components[0].per_page:
        return Grouping(page_size, (0,), (FULL,))
    first = _backbone(specs, components)
    components[first] = Component(components[first].name)
    order = [first, *(number for number in range(len(specs)) if number != first)]
    return Grouping(page_size, tuple(order), tuple(components[number] for number in order))


def _backbone(specs: Sequence[Any], components: Sequence[Component]) -> int:
    """The group whose pages name a prefix: of full attention, else of what looks back furthest, which is kept
    from the start on as if it were that."""
    reach, least = max((one.reach if one.per_page else 0, -number) for number, one in enumerate(components))
    if not reach:
        raise ConfigError("no KV cache group of attention: a prefix has no pages that could name it")
    return -least


def _component(number: int, spec: Any, page_size: int) -> Component:
    kind = type(spec).__name__
    name = f"group{number}"
    if kind in ("FullAttentionSpec", "MLAAttentionSpec"):
        return Component(name)
    if (tokens := looks_back(spec)) is not None:
        behind = tokens - 1 + getattr(spec, "extra_retained_tokens", 0)
        return Component(name, max(1, math.ceil(behind / page_size)))
    if kind == STATES:
        _refuse_states(spec)
        return Component(name, reach=1, per_page=False)
    raise ConfigError(
        f"KV cache group {number} is a {kind}: full attention, latent attention, sliding windows, chunks of "
        f"local attention and recurrent states are supported"
    )


def looks_back(spec: Any) -> int | None:
    """Tokens that a layer looks back at most, the newest included: its window, or its chunk, which ends sooner
    for most tokens. None: all of them, or it keeps none."""
    kind = type(spec).__name__
    if kind == "SlidingWindowSpec":
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if kind == "ChunkedLocalAttentionSpec" else None


def _refuse_states(spec: Any) -> None:
    """Raise ConfigError where vLLM keeps no state of a block's end, or none that is final after a step."""
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"mamba_cache_mode {spec.mamba_cache_mode}: one state is written over in place, and none kept where "
            f"a block ends; use --enable-prefix-caching"
        )
    if spec.num_speculative_blocks:
        raise ConfigError(
            "--speculative-config with recurrent states: vLLM corrects a block's state for the drafts that were "
            "taken after it has asked the connector to save it"
        )


def shape_of(spec: Any, num_layers: int, latent: Latent | None) -> CacheShape:
    """The cache shape of `num_layers` layers of a group. Raises ConfigError for quantisations and layouts not
    known here."""
    if type(spec).__name__ == STATES:
        tensors = zip(spec.shapes, spec.dtypes, strict=True)
        return StateTensors(num_layers, tuple((tuple(shape), dtype) for shape, dtype in tensors))
    mode = str(getattr(spec.kv_quant_mode, "name", "NONE"))
    if mode in SCALED and spec.tokens_per_state == 1 and spec.state_content_bytes:
        return ScaledCells(num_layers, spec.num_kv_heads, spec.state_content_bytes, mode)
    if mode not in ("NONE", "FP8_PER_TENSOR"):
        raise ConfigError(f"--kv-cache-dtype: {mode}: {QUANTISED}")
    if spec.tokens_per_state != 1 or spec.state_content_bytes is not None:
        raise ConfigError(f"--kv-cache-dtype: {QUANTISED}")
    if spec.head_size_v:
        return KVShape(num_layers, spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype)
    if latent is None or latent.kv_lora_rank + latent.qk_rope_head_dim != spec.head_size:
        raise ConfigError(f"latent attention with rows of {spec.head_size}: not {latent}")
    return MLAShape(num_layers, latent.kv_lora_rank, latent.qk_rope_head_dim, spec.dtype)


@dataclass(frozen=True)
class Blocks:
    """The geometry of a group's blocks: `num_blocks` of `page_size` tokens each, and the order of bytes
    within one."""

    page_size: int
    num_blocks: int
    interior: Interior = Interior.TOKENS


def pool_of(shape: CacheShape, blocks: Blocks, caches: Sequence[torch.Tensor]) -> StridedPool:
    """The device pool over a group's layers, each [B, H, N, C]; page p is block p."""
    if blocks.interior is Interior.K_THEN_V and len(shape.arrays) == 2:
        return StridedPool(shape, _keys_then_values(shape, blocks, caches))
    if isinstance(shape, ScaledCells):
        caches = [cache.view(torch.uint8) for cache in caches]
    pages = [_in_blocks(cache, blocks.page_size, blocks.num_blocks) for cache in caches]
    arrays, begin = [], 0
    for spec in shape.arrays:
        arrays.append([page[..., begin : begin + spec.head_dim] for page in pages])
        begin += spec.head_dim
    if begin != pages[0].shape[3]:
        raise ConfigError(f"a cache of {tuple(caches[0].shape)}: {begin} numbers per head and token expected")
    return StridedPool(shape, arrays)


def states_of(shape: StateTensors, num_blocks: int, caches: Sequence[torch.Tensor]) -> StridedPool:
    """The device pool over a group's states, per layer [B, 1, 1, C] bytes; record r is block r."""
    wanted = (num_blocks, 1, 1, shape.num_bytes)
    for cache in caches:
        if tuple(cache.shape) != wanted or cache.element_size() != 1 or cache.stride(3) != 1:
            raise ConfigError(
                f"recurrent states of {tuple(cache.shape)} {cache.dtype}: bytes {wanted} expected"
            )
    return StridedPool(shape, [[cache.view(torch.uint8) for cache in caches]])


def _keys_then_values(
    shape: CacheShape, blocks: Blocks, caches: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """[P, S, H, D] views of K, which is kept transposed, and of V behind it."""
    keys, values = shape.arrays
    size, wanted = blocks.page_size, (blocks.num_blocks, keys.num_heads, blocks.page_size)
    arrays: list[list[torch.Tensor]] = [[], []]
    for cache in caches:
        page, head, token, number = cache.stride()
        if cache.shape[:3] != wanted or (token, number) != (cache.shape[3], 1):
            raise ConfigError(f"a cache of {tuple(cache.shape)} with strides {cache.stride()} for {wanted}")
        sizes, begin = (blocks.num_blocks, size, keys.num_heads), cache.storage_offset()
        arrays[0].append(cache.as_strided((*sizes, keys.head_dim), (page, 1, head, size), begin))
        begin += size * keys.head_dim
        strides = (page, values.head_dim, head, 1)
        arrays[1].append(cache.as_strided((*sizes, values.head_dim), strides, begin))
    return arrays


def _in_blocks(cache: torch.Tensor, page_size: int, num_blocks: int) -> torch.Tensor:
    """[P, S, H, C] over [B, H, N, C], where a block may be cut into kernel blocks that follow each other."""
    kernel_blocks, heads, tokens, content = cache.shape
    pages = cache.permute(0, 2, 1, 3)
    if kernel_blocks == num_blocks and tokens == page_size:
        return pages
    ratio = page_size // tokens
    if kernel_blocks != num_blocks * ratio or pages.stride(0) != tokens * pages.stride(1):
        raise ConfigError(
            f"--block-size {page_size}: the attention backend cuts blocks into {tokens} tokens each with "
            f"heads outside tokens; use --block-size {tokens}"
        )
    page, token, head, number = pages.stride()
    return pages.as_strided((num_blocks, page_size, heads, content), (page * ratio, token, head, number))


def layer_order(names: Sequence[str]) -> list[str]:
    """Layer names in the order the model runs them: by the first number in each, then as given."""
    return sorted(names, key=_number)


def layer_numbers(names: Sequence[str]) -> list[int]:
    """The model's numbers of layers, ascending."""
    return sorted(map(_number, names))


def _number(name: str) -> int:
    found = re.search(r"\d+", name)
    return int(found.group()) if found else 0


def group_layers(order: Sequence[str], names: Sequence[str], caches: Mapping[str, torch.Tensor]) -> list[int]:
    """The numbers of a group's layers in `order`, the model's. Raises ConfigError for a layer without a KV
    cache."""
    missing = [name for name in names if name not in caches]
    if missing:
        raise ConfigError(f"vLLM registered no KV cache for layer {missing[0]}")
    return [order.index(name) for name in layer_order(names)]
