"""The arrays of one token's cached data, by kind of attention, with their heads and element type."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch

from hiradix.errors import ConfigError, Misuse

_SCALE_SPAN = 128  # elements of an indexer key, or of a packed latent, that share a scale

# Element types whose bytes are moved as they are. The integer of the same size stands in for them in index
# operations, so that float8 and friends need no kernels of their own.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Part:
    """`count` elements of one type among those that follow each other in a row of bytes.

    scaled_by: the number of the part with their scales, each of which is for an equal share of them.
    """

    dtype: torch.dtype
    count: int
    scaled_by: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class ArraySpec:
    """One array of a page's data (K, V, the MLA latent, scales): rows of `num_heads` x `head_dim` elements.

    per_page: a page has one row per layer, not one per token: an indexer's block, a page's scales, a state.
    parts: what the bytes of a head's elements are, where they are of several types: to compare pages, which
    are moved as bytes. Empty where they are of `dtype`, or nobody knows.
    """

    name: str
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    per_page: bool = False
    parts: tuple[Part, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.parts and sum(part.num_bytes for part in self.parts) != self.head_bytes:
            raise ConfigError(f"{self.name}: parts {self.parts} of {self.head_bytes} bytes")

    @property
    def head_bytes(self) -> int:
        return self.head_dim * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (a token's, or a page's) in one layer."""
        return self.num_heads * self.head_bytes

    def rows(self, page_size: int) -> int:
        """Rows of one page in one layer."""
        return 1 if self.per_page else page_size


class CacheShape(Protocol):
    """A kind of attention, as pools, layouts and transports see it. New kinds are new records of arrays."""

    @property
    def num_layers(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The arrays in storage order. All of them make a page; a page is stored whole or not at all."""
        ...

    def numbers(self) -> tuple[int, ...]:
        """The shape as integers, for the page fingerprint."""
        ...


@dataclass(frozen=True)
class KVShape:
    """Multi-head or grouped-query attention: K and V per layer, head dims may differ.

    num_kv_heads: heads on this rank. Raises ConfigError for a size below 1.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _require_sizes(self)

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        return (
            ArraySpec("k", self.num_kv_heads, self.head_dim, self.dtype),
            ArraySpec("v", self.num_kv_heads, self.v_head_dim, self.dtype),
        )

    def numbers(self) -> tuple[int, ...]:
        return (self.num_layers, self.num_kv_heads, self.head_dim, self.v_head_dim)


@dataclass(frozen=True)
class MLAShape:
    """Multi-head latent attention: one latent row (compressed KV, then the rope part) per token and layer.

    packed: in rows of bytes as `packed_fp8` has them the number of latents, else 0.
    """

    num_layers: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype
    packed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _require_sizes(self)

    @classmethod
    def packed_fp8(cls, num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, **more: int) -> Self:
        """Rows as engines pack them: fp8 latents, a float32 scale per 128 of them, the rope part in bf16."""
        scales = kv_lora_rank // _SCALE_SPAN * 4
        sizes = kv_lora_rank + scales, 2 * qk_rope_head_dim
        return cls(num_layers, *sizes, torch.uint8, packed=kv_lora_rank, **more)

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        width = self.kv_lora_rank + self.qk_rope_head_dim
        parts: tuple[Part, ...] = ()
        if self.packed:
            scales = self.packed // _SCALE_SPAN
            parts = (
                Part(torch.float8_e4m3fn, self.packed, scaled_by=1),
                Part(torch.float32, scales),
                Part(torch.bfloat16, (width - self.packed - 4 * scales) // 2),
            )
        return (ArraySpec("latent", 1, width, self.dtype, parts=parts),)

    def numbers(self) -> tuple[int, ...]:
        return (self.num_layers, self.kv_lora_rank, self.qk_rope_head_dim)


@dataclass(frozen=True)
class SparseMLAShape(MLAShape):
    """MLA with a sparse-attention indexer (DSA, NSA) beside the latent rows, in blocks of one page.

    page_size: of every pool of this shape. A page's indexer block is opaque bytes: the fp8 keys of all its
    tokens, then a float32 scale per token and 128 elements: page_size * 132 for index_head_dim 128.
    """

    page_size: int = 64
    index_head_dim: int = 128

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        num_scales = self.page_size * (self.index_head_dim // _SCALE_SPAN)
        parts = (
            Part(torch.float8_e4m3fn, self.page_size * self.index_head_dim, scaled_by=1),
            Part(torch.float32, num_scales),
        )
        num_bytes = sum(part.num_bytes for part in parts)
        return (*super().arrays, ArraySpec("index_k", 1, num_bytes, torch.uint8, per_page=True, parts=parts))

    def numbers(self) -> tuple[int, ...]:
        return (*super().numbers(), self.page_size, self.index_head_dim)


@dataclass(frozen=True)
class ScaledKVShape:
    """Quantised K and V as bytes, with their float32 scales as planes of their own.

    scales: "token", a block [page_size, H] per page, or "page", one per page and head as the quantising
    kernels write them. page_size: of every pool of this shape. Codes are uint8; `dtype` names their encoding.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    scales: str = "page"
    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.scales not in ("token", "page"):
            raise ConfigError(f"ScaledKVShape: scales {self.scales!r}, expected token or page")
        if self.dtype.itemsize != 1:
            raise ConfigError(f"ScaledKVShape: codes of {self.dtype} are not single bytes")
        _require_sizes(self)

    @property
    def scales_per_page(self) -> int:
        """The number of scales of one head in a page."""
        return self.page_size if self.scales == "token" else 1

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        num_scales = self.scales_per_page * self.num_kv_heads
        return (
            ArraySpec("k", self.num_kv_heads, self.head_dim, torch.uint8),
            ArraySpec("v", self.num_kv_heads, self.v_head_dim, torch.uint8),
            ArraySpec("k_scale", 1, num_scales, torch.float32, per_page=True),
            ArraySpec("v_scale", 1, num_scales, torch.float32, per_page=True),
        )

    def numbers(self) -> tuple[int, ...]:
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim, self.v_head_dim)
        return (*sizes, self.page_size, self.scales_per_page)


@dataclass(frozen=True)
class StateShape:
    """Recurrent state (Mamba, linear attention): per record and layer a convolution's tail and an SSM state.

    A record is a page of its own pool (page size 1) and belongs to the end of a prefix, not to its tokens.
    conv_dim, conv_width: the tail is conv_dim x conv_width elements of `conv_dtype`. The SSM state is
    num_heads x head_dim x state_size elements of `dtype`; all three are 0 where there is a tail only.
    """

    num_layers: int
    conv_dim: int
    conv_width: int
    num_heads: int = 0
    head_dim: int = 0
    state_size: int = 0
    conv_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        ssm = (self.num_heads, self.head_dim, self.state_size)
        if min(self.num_layers, self.conv_dim, self.conv_width) < 1 or (any(ssm) and min(ssm) < 1):
            raise ConfigError(f"StateShape: every size must be at least 1, got {self.numbers()}")

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        tail = ArraySpec("conv", 1, self.conv_dim * self.conv_width, self.conv_dtype, per_page=True)
        if not self.num_heads:
            return (tail,)
        width = self.head_dim * self.state_size
        return tail, ArraySpec("ssm", self.num_heads, width, self.dtype, per_page=True)

    def numbers(self) -> tuple[int, ...]:
        tail_type = zlib.crc32(str(self.conv_dtype).encode())  # types of one size are not the same bytes
        conv = (self.conv_dim, self.conv_width, tail_type)
        return (self.num_layers, *conv, self.num_heads, self.head_dim, self.state_size)


def array_index(shape: CacheShape, name: str) -> int:
    """The index of the array called `name`; raises Misuse if there is none."""
    names = [spec.name for spec in shape.arrays]
    if name not in names:
        raise Misuse(f"{type(shape).__name__} has no {name} array, it has {names}")
    return names.index(name)


def page_bytes(shape: CacheShape, page_size: int) -> int:
    """Bytes of one page of `page_size` tokens over all layers and arrays."""
    return shape.num_layers * sum(array.rows(page_size) * array.row_bytes for array in shape.arrays)


def token_bytes(shape: CacheShape) -> int:
    """Bytes of one token over all layers and arrays. Raises Misuse if an array goes by pages."""
    if any(array.per_page for array in shape.arrays):
        raise Misuse(f"{shape}: bytes per page, not per token")
    return page_bytes(shape, 1)


def check_page_size(shape: CacheShape, page_size: int) -> None:
    """Raise ConfigError where a shape is made for pages of another size."""
    own = getattr(shape, "page_size", page_size)
    if own != page_size:
        raise ConfigError(f"--page-size {page_size}: {type(shape).__name__} is made for pages of {own}")


def _require_sizes(shape: CacheShape) -> None:
    if min(shape.numbers()) < 1:
        raise ConfigError(f"{type(shape).__name__}: every size must be at least 1, got {shape.numbers()}")
