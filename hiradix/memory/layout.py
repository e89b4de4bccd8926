"""Layouts as data: where each byte of a pool lies, as strides. A new layout is a new function here.

The byte of (array, layer, page, token, head) begins at

    array.layers[layer] + page * array.page + token * array.token + head * array.head

and `head_bytes` bytes are contiguous from there; an array with one row per page has token 0 only. Device
pools and every host layout say it in these terms, so one copy loop, one kernel and one view serve them all.
Offsets and shapes are SGLang's, byte for byte.

`pieces` is the same data as storage sees it: a page is the concatenation of its pieces, in order. One piece
per array where a page's layers lie together, one per array and layer in layer_first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from hiradix.errors import ConfigError
from hiradix.memory.shape import ArraySpec, CacheShape


@dataclass(frozen=True)
class Plane:
    """One array of a pool: its spec and where it lies, all in bytes.

    layers: begin of each layer, as an offset into the pool's buffer or as an address. page, token, head:
    strides.
    """

    spec: ArraySpec
    layers: tuple[int, ...]
    page: int
    token: int
    head: int

    def moved(self, num_bytes: int) -> Plane:
        """The same plane `num_bytes` further: from offsets to addresses."""
        return replace(self, layers=tuple(begin + num_bytes for begin in self.layers))


@dataclass(frozen=True)
class PageRun:
    """A contiguous run of a page: `num_bytes` from `offset` + page * `page`, in bytes."""

    offset: int
    page: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """The addresses of every array in a pool of `num_pages` pages that is one buffer of `num_bytes` bytes.

    array_shapes: tensor shape of each array; none where arrays interleave. joint: its arrays have one shape
    and follow each other, so that they are also one tensor with a leading dimension (SGLang's kv_buffer).
    """

    name: str
    num_pages: int
    num_bytes: int
    planes: tuple[Plane, ...]
    pieces: tuple[PageRun, ...]
    array_shapes: tuple[tuple[int, ...], ...]
    joint: bool

    @property
    def page_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def cut_unit(self) -> int:
        """Bytes at whose multiples the buffer may be cut without cutting a piece of a page."""
        unit = math.lcm(*(piece.page for piece in self.pieces))
        return unit if all(piece.offset % unit == 0 for piece in self.pieces) else self.num_bytes

    def pages_at(self, offsets: Iterable[int]) -> Iterator[int]:
        """The pages of which a piece begins at one of these bytes."""
        for offset in offsets:
            for piece in self.pieces:
                page, inside = divmod(offset - piece.offset, piece.page)
                if inside == 0 and 0 <= page < self.num_pages:
                    yield page


@dataclass(frozen=True)
class Extent:
    """The counts an array is placed for: L layers, P pages, S rows per page (its tokens, or one)."""

    num_layers: int
    num_pages: int
    rows: int

    @staticmethod
    def of(spec: ArraySpec, shape: CacheShape, num_pages: int, page_size: int) -> Extent:
        return Extent(shape.num_layers, num_pages, spec.rows(page_size))


# One array's plane from offset 0, with its tensor shape.
Placement = tuple[Plane, tuple[int, ...]]


def _place_layer_first(spec: ArraySpec, at: Extent) -> Placement:
    """[L, slots, H, D]"""
    slots = at.num_pages * at.rows
    layers = range(0, at.num_layers * slots * spec.row_bytes, slots * spec.row_bytes)
    plane = Plane(spec, tuple(layers), at.rows * spec.row_bytes, spec.row_bytes, spec.head_bytes)
    return plane, (at.num_layers, slots, spec.num_heads, spec.head_dim)


def _place_page_first(spec: ArraySpec, at: Extent) -> Placement:
    """[slots, L, H, D]"""
    token = at.num_layers * spec.row_bytes
    layers = range(0, token, spec.row_bytes)
    plane = Plane(spec, tuple(layers), at.rows * token, token, spec.head_bytes)
    return plane, (at.num_pages * at.rows, at.num_layers, spec.num_heads, spec.head_dim)


def _place_page_first_direct(spec: ArraySpec, at: Extent) -> Placement:
    """[P, L, S, H, D]"""
    layer = at.rows * spec.row_bytes
    layers = range(0, at.num_layers * layer, layer)
    plane = Plane(spec, tuple(layers), at.num_layers * layer, spec.row_bytes, spec.head_bytes)
    return plane, (at.num_pages, at.num_layers, at.rows, spec.num_heads, spec.head_dim)


def _place_page_head(spec: ArraySpec, at: Extent) -> Placement:
    """[P, H, S, L, D]"""
    token = at.num_layers * spec.head_bytes
    layers = range(0, token, spec.head_bytes)
    plane = Plane(spec, tuple(layers), spec.num_heads * at.rows * token, token, at.rows * token)
    return plane, (at.num_pages, spec.num_heads, at.rows, at.num_layers, spec.head_dim)


def _placed(
    place: Callable[[ArraySpec, Extent], Placement], shape: CacheShape, num_pages: int, page_size: int
) -> list[Placement]:
    """Each array of `shape` placed by itself."""
    return [place(spec, Extent.of(spec, shape, num_pages, page_size)) for spec in shape.arrays]


def layer_first(shape: CacheShape, num_pages: int, page_size: int) -> Layout:
    """SGLang's (2, L, slots, H, D): a page is one piece per array and layer."""
    arrays = _placed(_place_layer_first, shape, num_pages, page_size)
    return _joined("layer_first", num_pages, arrays, lambda plane: plane.layers, lambda plane: plane.page)


def page_first(shape: CacheShape, num_pages: int, page_size: int) -> Layout:
    """SGLang's (2, slots, L, H, D): a page is one piece per array."""
    return _paged("page_first", num_pages, _placed(_place_page_first, shape, num_pages, page_size))


def page_first_direct(shape: CacheShape, num_pages: int, page_size: int) -> Layout:
    """SGLang's (2, P, L, S, H, D): as page_first, with a layer's tokens contiguous."""
    arrays = _placed(_place_page_first_direct, shape, num_pages, page_size)
    return _paged("page_first_direct", num_pages, arrays)


def page_head(shape: CacheShape, num_pages: int, page_size: int) -> Layout:
    """SGLang's (2, P, H, S, L, D): as page_first, with a head's data contiguous."""
    return _paged("page_head", num_pages, _placed(_place_page_head, shape, num_pages, page_size))


def page_blob(shape: CacheShape, num_pages: int, page_size: int) -> Layout:
    """One piece per page: each page holds its arrays one after another, each [L, S, H, D]."""
    planes = [plane for plane, _ in _placed(_place_page_first_direct, shape, num_pages, page_size)]
    begins = list(accumulate((plane.page for plane in planes), initial=0))
    page = begins[-1]
    planes = [replace(plane.moved(begin), page=page) for plane, begin in zip(planes, begins, strict=False)]
    for plane in planes:
        _require_aligned("page_blob", plane)
    return Layout(
        "page_blob", num_pages, num_pages * page, tuple(planes), (PageRun(0, page, page),), (), False
    )


Maker = Callable[[CacheShape, int, int], Layout]
LAYOUTS: dict[str, Maker] = {
    "layer_first": layer_first,
    "page_first": page_first,
    "page_first_direct": page_first_direct,
    "page_head": page_head,
    "page_blob": page_blob,
}


def make_layout(name: str, shape: CacheShape, num_pages: int, page_size: int) -> Layout:
    """The layout called `name`. Raises ConfigError naming the flag and the layouts there are."""
    if name not in LAYOUTS:
        known = ", ".join(sorted(LAYOUTS))
        raise ConfigError(f"--hicache-mem-layout {name}: not one of the layouts here ({known})")
    if num_pages < 1 or page_size < 1:
        raise ConfigError(f"{num_pages} pages of {page_size} tokens: both must be at least 1")
    return LAYOUTS[name](shape, num_pages, page_size)


def array_views(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Each array as a tensor of the layout's shape over the uint8 buffer; none where they interleave."""
    views = []
    for plane, shape in zip(layout.planes, layout.array_shapes, strict=False):
        begin = plane.layers[0]
        flat = buffer[begin : begin + _num_bytes(shape, plane.spec)]
        views.append(flat.view(plane.spec.dtype).view(shape))
    return views


def layers_view(buffer: torch.Tensor, plane: Plane, at: Extent) -> torch.Tensor:
    """`plane` as one strided tensor [L, P, S, H, D] over a uint8 buffer, zero copy.

    `plane.layers` are offsets into `buffer` with one distance between them.
    """
    spec = plane.spec
    item = spec.dtype.itemsize
    whole = buffer[: len(buffer) // item * item]
    layer = plane.layers[1] - plane.layers[0] if len(plane.layers) > 1 else 0
    strides = [layer // item, plane.page // item, plane.token // item, plane.head // item, 1]
    sizes = [at.num_layers, at.num_pages, at.rows, spec.num_heads, spec.head_dim]
    return whole.view(spec.dtype).as_strided(sizes, strides, plane.layers[0] // item)


def _paged(name: str, num_pages: int, arrays: Sequence[Placement]) -> Layout:
    """Arrays one after another, each with a page's data in one piece."""
    return _joined(name, num_pages, arrays, lambda plane: plane.layers[:1], lambda plane: plane.page)


def _joined(
    name: str,
    num_pages: int,
    arrays: Sequence[Placement],
    begins: Callable[[Plane], Sequence[int]],
    piece_bytes: Callable[[Plane], int],
) -> Layout:
    """Arrays one after another; a page's pieces begin at `begins` of each plane, `piece_bytes` long."""
    planes, shapes, offset = [], [], 0
    for plane, shape in arrays:
        planes.append(plane.moved(offset))
        _require_aligned(name, planes[-1])
        shapes.append(shape)
        offset += _num_bytes(shape, plane.spec)
    pieces = tuple(PageRun(at, plane.page, piece_bytes(plane)) for plane in planes for at in begins(plane))
    joint = len({(shape, plane.spec.dtype) for shape, plane in zip(shapes, planes, strict=True)}) == 1
    return Layout(name, num_pages, offset, tuple(planes), pieces, tuple(shapes), joint)


def _require_aligned(layout: str, plane: Plane) -> None:
    """Refuse an array whose rows would begin inside an element."""
    item = plane.spec.dtype.itemsize
    if any(number % item for number in (*plane.layers, plane.page, plane.token, plane.head)):
        raise ConfigError(
            f"--hicache-mem-layout {layout}: rows of {plane.spec.name} ({plane.spec.dtype}) would not begin "
            f"on {item} bytes beside the other arrays; use layer_first"
        )


def _num_bytes(shape: Sequence[int], spec: ArraySpec) -> int:
    return torch.Size(shape).numel() * spec.dtype.itemsize
