"""An engine's own buffers as the arrays of a device pool: all that the shape declares, byte for byte."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hiradix.errors import ConfigError
from hiradix.memory.manifest import SlotManifest
from hiradix.memory.shape import ArraySpec, CacheShape


@dataclass(frozen=True)
class EngineShape:
    """Pages of the arrays that an engine's pool has, where no attention's own shape says it.

    dtype: of the first array. page_size: of every pool of this shape. An engine whose layers have unlike
    arrays is one layer with an array for each, and of_layers says of which of the model's layers each is.
    Raises ConfigError without arrays.
    """

    num_layers: int
    arrays: tuple[ArraySpec, ...]
    page_size: int
    of_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.of_layers and (self.num_layers, len(self.of_layers)) != (1, len(self.arrays)):
            raise ConfigError(
                f"device pool: {len(self.of_layers)} layers for {len(self.arrays)} arrays of one"
            )
        if self.num_layers < 1 or self.page_size < 1 or not self.arrays:
            raise ConfigError(
                f"device pool: {self.num_layers} layers of {len(self.arrays)} arrays, pages of {self.page_size}"
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.arrays[0].dtype

    def numbers(self) -> tuple[int, ...]:
        words = "|".join(f"{spec.name}:{spec.dtype}" for spec in self.arrays)  # what the sizes do not tell
        sizes = [size for spec in self.arrays for size in (spec.num_heads, spec.head_dim, 1 + spec.per_page)]
        return (self.num_layers, self.page_size, zlib.crc32(words.encode()), *sizes, *self.of_layers)


def foreign_arrays(
    shape: CacheShape, buffers: Mapping[str, Sequence[torch.Tensor]], page_size: int
) -> list[list[torch.Tensor]]:
    """The buffers per array of `shape`, [L] of [P * S, H, D] views; see `DevicePool.wrap_arrays`."""
    SlotManifest.of(shape, page_size).require(buffers)
    arrays, page_counts = [], {}
    for spec in shape.arrays:
        layers = buffers[spec.name]
        if len(layers) != shape.num_layers:
            raise ConfigError(f"device pool: {len(layers)} layers of {spec.name}, needed {shape.num_layers}")
        arrays.append([_as_rows(buffer, spec, page_size) for buffer in layers])
        page_counts[spec.name] = sorted({len(rows) / spec.rows(page_size) for rows in arrays[-1]})
    counts = {count for found in page_counts.values() for count in found}
    if len(counts) != 1 or not min(counts).is_integer() or min(counts) < 2:
        raise ConfigError(
            f"device pool: the arrays must hold the same whole pages, two at least; they hold {page_counts}"
        )
    if len({rows.device for array in arrays for rows in array}) != 1:
        raise ConfigError("device pool: the arrays are on different devices")
    return arrays


def _as_rows(buffer: torch.Tensor, spec: ArraySpec, page_size: int) -> torch.Tensor:
    """[rows, H, D] of the array's type over a buffer of [rows, ...] or [pages, ...]."""
    num_bytes = buffer.numel() * buffer.element_size() // max(1, buffer.shape[0] if buffer.dim() else 0)
    if not buffer.is_contiguous() or num_bytes not in (spec.row_bytes, spec.rows(page_size) * spec.row_bytes):
        raise ConfigError(
            f"device pool: {spec.name} is {tuple(buffer.shape)} {buffer.dtype}, {num_bytes} bytes per entry; "
            f"needed: contiguous, {spec.row_bytes} bytes per row or {spec.rows(page_size)} rows per page"
        )
    return buffer.view(-1).view(torch.uint8).view(spec.dtype).view(-1, spec.num_heads, spec.head_dim)


def check_foreign(arrays: Sequence[Sequence[torch.Tensor]], page_size: int) -> None:
    """Refuse K and V buffers that are not contiguous, of one geometry per array, and of whole pages."""
    first = arrays[0][0] if arrays and arrays[0] else None
    if first is None or page_size < 1:
        raise ConfigError(f"device pool: no buffers to wrap, or page size {page_size} below 1")
    for buffers in arrays:
        if len(buffers) != len(arrays[0]):
            raise ConfigError(f"device pool: {len(arrays[0])} key layers but {len(buffers)} value layers")
        for layer, buffer in enumerate(buffers):
            if not _fits(buffer, buffers[0], first, page_size):
                raise ConfigError(
                    f"device pool: layer {layer} is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}; "
                    f"needed: contiguous, alike in all layers, at least two whole pages of {page_size} tokens"
                )


def _fits(buffer: torch.Tensor, like: torch.Tensor, first: torch.Tensor, page_size: int) -> bool:
    """Whether `buffer` has the geometry of its array's `like`, and pages and heads of the pool's `first`."""
    alike = (buffer.shape, buffer.dtype, buffer.device) == (like.shape, first.dtype, first.device)
    if not alike or buffer.dim() != 3 or not buffer.is_contiguous():
        return False
    slots = buffer.shape[0]
    return buffer.shape[:2] == first.shape[:2] and slots % page_size == 0 and slots >= 2 * page_size
