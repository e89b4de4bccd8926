"""Shapes, types and filled pools that the memory tests share."""

from __future__ import annotations

import numpy as np
import torch

from hiradix.memory import (
    CacheShape,
    DevicePool,
    HostPool,
    KVShape,
    MLAShape,
    ScaledKVShape,
    SparseMLAShape,
    StateShape,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
PAGE_SIZE = 4

SHAPES: dict[str, CacheShape] = {
    "mha": KVShape(3, 2, 16, 16, torch.bfloat16),
    "mha_wide_k": KVShape(3, 2, 24, 16, torch.bfloat16),
    "mha_one_layer": KVShape(1, 1, 8, 8, torch.float32),
    "mla": MLAShape(3, 64, 8, torch.bfloat16),
    "dsa": SparseMLAShape(3, 64, 8, torch.bfloat16, page_size=PAGE_SIZE),
    "fp8_token_scales": ScaledKVShape(3, 2, 16, 16, PAGE_SIZE, "token"),
    "fp8_page_scales": ScaledKVShape(3, 2, 16, 32, PAGE_SIZE, "page"),
    "state": StateShape(3, 24, 3, 2, 8, 4),
    "state_tail": StateShape(3, 24, 2),
}


def shape_of(dtype: torch.dtype) -> KVShape:
    return KVShape(2, 2, 16, 16, dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's data in order as uint8 [n], a copy where it is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def fill(tensors: list[torch.Tensor], seed: int) -> None:
    """Random bytes into every (contiguous) tensor."""
    random = np.random.default_rng(seed)
    for tensor in tensors:
        flat = as_bytes(tensor)
        flat.copy_(torch.from_numpy(random.integers(0, 256, flat.numel(), np.uint8)))


def device_pool(shape: CacheShape, num_pages: int, seed: int, page_size: int = PAGE_SIZE) -> DevicePool:
    """A device pool of random bytes, its dummy page too."""
    pool = DevicePool(shape, num_pages, page_size)
    for array in range(len(shape.arrays)):
        fill(pool.layer_views(array), seed + array)
    return pool


def host_pool(
    shape: CacheShape, num_pages: int, layout: str, seed: int, page_size: int = PAGE_SIZE
) -> HostPool:
    """A host pool of random bytes."""
    pool = HostPool(shape, num_pages, page_size, layout=layout)
    fill([pool.buffer], seed)
    return pool


def contents(pool: DevicePool | HostPool) -> list[torch.Tensor]:
    """A copy of everything: [L, P, S, H, bytes per head] per array, as uint8."""
    arrays = []
    for array, spec in enumerate(pool.shape.arrays):
        layers = [view.contiguous().view(torch.uint8) for view in pool.layer_views(array)]
        arrays.append(torch.stack(layers).clone())
        assert arrays[-1].shape[-1] == spec.head_bytes
    return arrays
