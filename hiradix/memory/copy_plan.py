"""From the planes of two pools to the fewest strided copies that move everything between them."""

from __future__ import annotations

from collections.abc import Sequence

from hiradix.errors import Misuse
from hiradix.memory.layout import Plane
from hiradix.memory.pools import Pool
from hiradix.triton_kernels.sides import PlannedCopy, Side

Pair = tuple[Plane, Plane]


def plan_copies(src: Pool, dst: Pool) -> tuple[PlannedCopy, ...]:
    """The copies that move a page, whole: see `plan_by_arrays`."""
    return tuple(plan_by_arrays(src, dst).values())


def plan_by_arrays(src: Pool, dst: Pool) -> dict[tuple[int, ...], PlannedCopy]:
    """One copy for all arrays of one geometry: one for K and V, two where their head dims differ, one more
    for scales or an indexer; under the numbers of its arrays.

    Planes are ordered layer by layer, so a range of layers is a range of planes. Heads become planes of their
    own where either side keeps a token's heads apart.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    pairs: list[Pair] = list(zip(src.planes(), dst.planes(), strict=True))
    for array, (source, target) in enumerate(pairs):
        if source.spec != target.spec:
            raise Misuse(f"arrays {source.spec} and {target.spec}")
        spec = source.spec
        counts = (spec.rows(src.page_size), spec.row_bytes, spec.num_heads)
        geometry = (*counts, *_strides(source), *_strides(target))
        groups.setdefault(geometry, []).append(array)
    return {
        tuple(arrays): _plan([pairs[array] for array in arrays], src.page_size) for arrays in groups.values()
    }


def _plan(pairs: Sequence[Pair], page_size: int) -> PlannedCopy:
    spec = pairs[0][0].spec
    rows = spec.rows(page_size)
    apart = spec.num_heads > 1 and any(plane.head != spec.head_bytes for pair in pairs for plane in pair)
    num_heads = spec.num_heads if apart else 1
    row_bytes = spec.head_bytes if apart else spec.row_bytes
    sides = [
        Side(_bases([pair[side] for pair in pairs], num_heads), first.page, first.token, rows, row_bytes)
        for side, first in enumerate(pairs[0])
    ]
    return PlannedCopy(sides[0], sides[1], per_layer=len(pairs) * num_heads)


def _bases(planes: Sequence[Plane], num_heads: int) -> tuple[int, ...]:
    """Layer by layer, then array by array, then head by head."""
    return tuple(
        plane.layers[layer] + head * plane.head
        for layer in range(len(planes[0].layers))
        for plane in planes
        for head in range(num_heads)
    )


def _strides(plane: Plane) -> tuple[int, int, int]:
    return plane.page, plane.token, plane.head
