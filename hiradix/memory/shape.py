"""What one token's cached data consists of: the arrays of an attention kind, their heads and element type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from hiradix.errors import ConfigError

# Element types whose bytes are moved as they are. The integer of the same size stands in for them in index
# operations, so that float8 and friends need no kernels of their own.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ArraySpec:
    """One array of a token's data (K, V, the MLA latent): `num_heads` x `head_dim` elements per layer."""

    name: str
    num_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def head_bytes(self) -> int:
        return self.head_dim * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.num_heads * self.head_bytes


class CacheShape(Protocol):
    """What pools, layouts and transports ask of an attention kind. New kinds are new records of arrays."""

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
    """Multi-head latent attention: one latent row (compressed KV, then the rope part) per token and layer."""

    num_layers: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _require_sizes(self)

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        return (ArraySpec("latent", 1, self.kv_lora_rank + self.qk_rope_head_dim, self.dtype),)

    def numbers(self) -> tuple[int, ...]:
        return (self.num_layers, self.kv_lora_rank, self.qk_rope_head_dim)


def token_bytes(shape: CacheShape) -> int:
    """Bytes of one token over all layers and arrays."""
    return shape.num_layers * sum(array.row_bytes for array in shape.arrays)


def _require_sizes(shape: CacheShape) -> None:
    if min(shape.numbers()) < 1:
        raise ConfigError(f"{type(shape).__name__}: every size must be at least 1, got {shape.numbers()}")
