"""Comparison of two pages of one shape: whether the same weights computed both.

Two builds of the same kernels, other thread counts, chunk sizes and batches give the same page but for
rounding; other weights, ropes, scales, quantisations or adapters do not. Pages are compared layer by layer,
by the relative error |a - b| / |b| of a layer's numbers (L2):

- A layer may differ by so much as rounding makes it (`tolerance`). Of 16 bit numbers that grows with the
  layer, as each rounds what the one before has rounded.
- It does not jump: where the layers before agree, one that does not was computed by other weights.
- In the model's first layer the error has no direction: a scale, or an epsilon, is all direction (`bias`).

benchmarks/bench_canary.py measures what builds differ by, and what other models do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hiradix.memory.foreign import EngineShape
from hiradix.memory.layout import Extent, layers_view, make_layout
from hiradix.memory.shape import CacheShape, Part

Views = Sequence[memoryview]
"""A page as its buffers, in order."""

FIRST_LAYER: dict[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-4,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
"""Most that the first layer's relative error may be, by the type of the numbers."""
EIGHT_BITS = 2.2e-2
"""The same for types of one byte, and for pages that storage keeps as such (lossy compression)."""
GROWTH_LAYERS, MOST_GROWTH = 1.5, 10.0
"""Of numbers of 16 bits and less: so many more layers add as much error as the first makes, up to so many
times that."""
MOST_EIGHT_BITS = 0.09
MOST_JUMP = 4.0
"""A layer's error is at most so many times that of the layers before, or what the layers in between make."""
BIAS_SHARE = 8
"""The share of the first layer's tolerance that its numbers may be longer or shorter by, all together."""
BEHIND_OTHERS = 1 << 20
"""The number of a layer of which nobody knows how many are before it."""


@dataclass(frozen=True)
class Apart:
    """The largest difference of two pages. error: of that layer, relative to its size; most: its tolerance."""

    array: str
    layer: int
    error: float
    most: float

    @property
    def is_same(self) -> bool:
        """Whether rounding explains it."""
        return self.error <= self.most

    @property
    def share(self) -> float:
        """The error as a share of what it may be."""
        return self.error / self.most

    def __str__(self) -> str:
        where = f"the {self.array} of layer {self.layer}"
        return f"{where} by {self.error:.2g}, where rounding makes {self.most:.2g}"


def tolerance(dtype: torch.dtype, layer: int) -> float:
    """Most that model layer `layer` of numbers of that type may differ between builds."""
    first = FIRST_LAYER.get(dtype, EIGHT_BITS)
    if dtype.itemsize > 2:
        return first
    grown = first * min(MOST_GROWTH, 1 + layer / GROWTH_LAYERS)
    return grown if dtype in FIRST_LAYER else min(MOST_EIGHT_BITS, grown)


class PageComparer:
    """Compares pages of a host pool of `shape` and `layout`; any thread.

    layers: the model's number of each layer; None: they are all the model's.
    """

    def __init__(
        self, shape: CacheShape, layout: str, page_size: int, layers: Sequence[int] | None = None
    ) -> None:
        self._layout = make_layout(layout, shape, 1, page_size)
        self._extents = [Extent.of(spec, shape, 1, page_size) for spec in shape.arrays]
        self._layers = _of_model(shape, range(shape.num_layers) if layers is None else layers)
        # A state that is kept in 32 bits has been computed from what is rounded as its neighbour is.
        types = [part.dtype for spec in shape.arrays for part in (spec.parts or (spec,))]
        self._dtype = max(types, key=lambda dtype: tolerance(dtype, 0))

    def __call__(self, own: Views, stored: Views, is_rounded: bool = False) -> Apart:
        """The largest difference relative to its tolerance. is_rounded: storage has coded both with loss."""
        return max(self.all(own, stored, is_rounded), key=lambda apart: apart.share)

    def all(self, own: Views, stored: Views, is_rounded: bool = False) -> list[Apart]:
        """Each layer of each array, in the order of layers, and the bias of the first."""
        dtype = torch.uint8 if is_rounded else self._dtype
        buffers = self._buffer(own), self._buffer(stored)
        arrays: list[list[_Difference]] = []  # of each array that of its parts
        for plane, extent in zip(self._layout.planes, self._extents, strict=True):
            parts = [_numbers(layers_view(buffer, plane, extent), plane.spec.parts) for buffer in buffers]
            arrays.append([_Difference.of(plane.spec.name, *pair) for pair in zip(*parts, strict=True)])
        found: list[Apart] = []
        before, known = 0.0, None
        for layer, rows in self._layers:
            most = tolerance(dtype, layer)
            if known is not None:  # no jump: what the layers before differ by, or rounding since them makes
                most = min(most, max(MOST_JUMP * before, tolerance(dtype, layer - known)))
            apart = [
                Apart(part.name, layer, part.errors[row], most)
                for array, row in rows
                for part in arrays[array]
            ]
            before, known = max(before, *(one.error for one in apart)), layer
            found += apart
        if self._layers[0][0] == 0 and not is_rounded and dtype in FIRST_LAYER:
            for part in (part for array, _ in self._layers[0][1] for part in arrays[array]):
                # Of few numbers rounding leans further.
                share = max(1 / BIAS_SHARE, 2 / math.sqrt(part.count))
                found.append(Apart(f"scale of the {part.name}", 0, part.bias, FIRST_LAYER[dtype] * share))
        return found

    def _buffer(self, page: Views) -> torch.Tensor:
        """The page in a pool of its own."""
        buffer = torch.zeros(self._layout.num_bytes, dtype=torch.uint8)
        data, at = torch.frombuffer(bytearray().join(page), dtype=torch.uint8), 0
        for piece in self._layout.pieces:
            buffer[piece.offset : piece.offset + piece.num_bytes] = data[at : at + piece.num_bytes]
            at += piece.num_bytes
        return buffer


def _of_model(shape: CacheShape, layers: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """The model's layers in order: the number of each, and the (array, row) of what a page has of it."""
    arrays = range(len(shape.arrays))
    of = shape.of_layers if isinstance(shape, EngineShape) else ()
    if of:
        return [(layer, [(array, 0) for array in arrays if of[array] == layer]) for layer in sorted(set(of))]
    return [(layer, [(array, row) for array in arrays]) for row, layer in enumerate(layers)]


@dataclass(frozen=True)
class _Difference:
    """The difference of one array, or of a part of one: the error of each layer, and the bias of the first.
    count: numbers in a layer."""

    name: str
    errors: list[float]
    bias: float
    count: int

    @staticmethod
    def of(name: str, one: torch.Tensor, other: torch.Tensor) -> _Difference:
        return _Difference(name, _relative(one, other), _bias(one[0], other[0]), one.shape[1])


def _numbers(values: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """float64 [layers, numbers] of each of the parts that bytes consist of, but for scales.

    Codes are taken times their scales, as which of both has rounded says nothing. Other bytes are taken for
    float8 codes, which they are in engines' fp8 caches.
    """
    if not parts:
        plain = values.contiguous()
        if plain.dtype is torch.uint8:
            plain = plain.view(torch.float8_e4m3fn)
        return [plain.to(torch.float64).flatten(1)]
    rows = values.contiguous().view(torch.uint8)
    rows = rows.reshape(len(values), -1, sum(part.num_bytes for part in parts))
    found, begin = [], 0
    for part in parts:
        own = rows[..., begin : begin + part.num_bytes].contiguous().view(part.dtype)
        found.append(own.to(torch.float64))
        begin += part.num_bytes
    scales = {part.scaled_by for part in parts}
    return [
        _scaled(found[number], found[part.scaled_by])
        if part.scaled_by is not None
        else found[number].flatten(1)
        for number, part in enumerate(parts)
        if number not in scales
    ]


def _scaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[layers, numbers] of codes [layers, rows, C] and scales [layers, rows, S], each for C / S codes."""
    return (codes.reshape(*scales.shape, -1) * scales[..., None]).flatten(1)


def _relative(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """|a - b| / |b| of each row; a number that is none in one of both is as far away as can be."""
    is_odd = ~(torch.isfinite(one) & torch.isfinite(other))
    differs = (is_odd & ~((one == other) | (one.isnan() & other.isnan()))).any(1)
    one, other = (torch.where(is_odd, 0.0, values) for values in (one, other))
    apart, size = (one - other).norm(dim=1), torch.maximum(one.norm(dim=1), other.norm(dim=1))
    errors = torch.where(size > 0, apart / size.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    return [math.inf if bad else float(error) for bad, error in zip(differs.tolist(), errors.tolist())]


def _bias(one: torch.Tensor, other: torch.Tensor) -> float:
    """The difference in length of two rows along the direction of `other`, as a share of its length."""
    size = float(other @ other)
    return abs(float((one - other) @ other)) / size if 0 < size < math.inf else 0.0
