"""One side of a strided page copy, as numbers. No triton here: planners and the DMA transport use it too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

VECTOR_BYTES = 16


@dataclass(frozen=True)
class Side:
    """Where one pool's pages lie, in bytes: row r of page p of plane q is at bases[q] + p*page + r*row.

    bases: addresses, one per plane (layer x array, x head where heads are apart). A page has `rows` rows of
    `row_bytes` contiguous bytes.
    """

    bases: tuple[int, ...]
    page: int
    row: int
    rows: int
    row_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one plane."""
        return self.rows * self.row_bytes

    @property
    def aligned(self) -> bool:
        """Whether every row begins and ends on 16 bytes, as the kernel needs."""
        numbers = (*self.bases, self.page, self.row, self.row_bytes)
        return all(number % VECTOR_BYTES == 0 for number in numbers)


@dataclass(frozen=True)
class PlannedCopy:
    """One launch: every plane of `dst` from that of `src` at the same place; `per_layer` planes a layer."""

    src: Side
    dst: Side
    per_layer: int

    def __post_init__(self) -> None:
        same = (self.src.rows, self.src.row_bytes, len(self.src.bases))
        other = (self.dst.rows, self.dst.row_bytes, len(self.dst.bases))
        if same != other:
            raise AssertionError(f"sides differ: rows, row bytes, planes {same} and {other}")
        num_planes = len(self.src.bases)
        if num_planes % self.per_layer != 0:
            raise AssertionError(f"{num_planes} planes, {self.per_layer} a layer")

    @property
    def aligned(self) -> bool:
        return self.src.aligned and self.dst.aligned

    def collapsed(self) -> PlannedCopy:
        """The same copy with rows that are contiguous on both sides made one long row."""
        side = self.src
        if side.rows == 1 or side.row != side.row_bytes or self.dst.row != self.dst.row_bytes:
            return self
        long = {"row": side.page_bytes, "rows": 1, "row_bytes": side.page_bytes}
        return PlannedCopy(replace(self.src, **long), replace(self.dst, **long), self.per_layer)


@dataclass(frozen=True)
class Tile:
    """How a copy is cut for the kernel: 16-byte vectors per tile, warps per program, tiles in flight."""

    block: int
    num_warps: int
    stages: int


def pick_tile(vectors: int, *, interpreted: bool) -> Tile:
    """The tile for pages of `vectors` 16-byte vectors.

    A tile that divides a page needs one index for all its vectors. Other pages share tiles and look an index
    up per vector: two vectors a thread are as many as registers last for. Interpreted, the time is per tile:
    as large as it goes.
    """
    if interpreted:
        return Tile(block=min(1 << 16, 1 << (vectors - 1).bit_length()), num_warps=1, stages=1)
    for block in powers_of_two(2048, 512):
        if vectors % block == 0:
            return Tile(block, 8 if block > 1024 else 4, 3)
    return Tile(1024, 16, 3)


def powers_of_two(most: int, least: int) -> Iterator[int]:
    """From `most` down to `least`, both powers of two."""
    while most >= least:
        yield most
        most //= 2
