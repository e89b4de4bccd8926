"""The one page-copy kernel, for every pair of layouts, both directions, one layer or all of them.

For every plane q, every list entry i, every row r of a page and every 16-byte vector c of that row:

    dst_tab[q] + dst_idx[i]*dst_page + r*dst_row + 16c   <-   src_tab[q] + src_idx[i]*src_page + r*src_row +
    16c

A plane is a base address in a table: a layer's K or V, of one head where a layout keeps heads apart. Bytes
are moved, never values, so there is one kernel for all element types. The addresses are not checked on the
device: `launch` asserts what it can, and its caller has checked the page ids.

Importing this needs triton. With TRITON_INTERPRET=1 at import time it runs on CPU memory.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hiradix.triton_kernels.sides import VECTOR_BYTES, PlannedCopy, Tile, pick_tile


@triton.jit
def tile_pages(tile, dst_idx, src_idx, num_idx, PER: tl.constexpr, BLOCK: tl.constexpr):
    """Of each vector of a tile: its number in the page, the two pages as int64, and whether to copy it."""
    if PER % BLOCK == 0:  # a tile never leaves its page: one index per tile
        entry = tile // (PER // BLOCK)
        at = (tile % (PER // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
        src = tl.load(src_idx + entry)
        dst = tl.load(dst_idx + entry)
        # not `vector & scalar`: the interpreter of triton 3.9.0 refuses such a mask
        mask = at < tl.where((src >= 0) & (dst >= 0), PER, 0)
    else:
        vector = tile * BLOCK + tl.arange(0, BLOCK)
        inside = vector < num_idx * PER
        at = vector % PER
        src = tl.load(src_idx + vector // PER, mask=inside, other=-1)
        dst = tl.load(dst_idx + vector // PER, mask=inside, other=-1)
        mask = inside & (src >= 0) & (dst >= 0)
    return at, dst.to(tl.int64), src.to(tl.int64), mask


# Without these lists every new page count, plane count or stride could compile another variant while serving.
@triton.jit(
    do_not_specialize=["first_plane", "num_planes", "num_idx", "dst_page", "src_page", "dst_row", "src_row"],
    do_not_specialize_on_alignment=["dst_idx", "src_idx"],
)
def page_copy_kernel(
    dst_tab,  # int64 [planes]: base addresses
    src_tab,
    dst_idx,  # int64 or int32 [num_idx]: page (or token) ids; a pair with a negative one is skipped
    src_idx,
    first_plane: tl.int32,
    num_planes: tl.int32,
    num_idx: tl.int32,
    dst_page: tl.int64,  # bytes between pages, and between rows of a page
    src_page: tl.int64,
    dst_row: tl.int64,
    src_row: tl.int64,
    ROWS: tl.constexpr,
    VPR: tl.constexpr,  # 16-byte vectors per row
    BLOCK: tl.constexpr,  # vectors per tile, a power of two
    STAGES: tl.constexpr,  # above 1 the loads of the next tiles are in flight, in shared memory
):
    num_tiles = tl.cdiv(num_idx * (ROWS * VPR), BLOCK)  # of one plane
    lane = tl.arange(0, 2)[None, :]  # two int64 are one vector
    for work in tl.range(tl.program_id(0), num_tiles * num_planes, tl.num_programs(0), num_stages=STAGES):
        plane = first_plane + work // num_tiles
        at, dst, src, mask = tile_pages(work % num_tiles, dst_idx, src_idx, num_idx, ROWS * VPR, BLOCK)
        src_at = src * src_page + (at % VPR) * 16
        dst_at = dst * dst_page + (at % VPR) * 16
        if ROWS > 1:
            src_at += (at // VPR).to(tl.int64) * src_row
            dst_at += (at // VPR).to(tl.int64) * dst_row
        # The hint counts only on the pointer: on the loaded address it is lost, accesses are 8 bytes.
        src_ptr = tl.multiple_of((tl.load(src_tab + plane) + src_at).to(tl.pointer_type(tl.int64)), 16)
        dst_ptr = tl.multiple_of((tl.load(dst_tab + plane) + dst_at).to(tl.pointer_type(tl.int64)), 16)
        data = tl.load(src_ptr[:, None] + lane, mask=mask[:, None], other=0)
        tl.store(dst_ptr[:, None] + lane, data, mask=mask[:, None])


INTERPRETED = not isinstance(page_copy_kernel, triton.runtime.JITFunction)

_INTERPRETER = threading.Lock()


def one_at_a_time() -> contextlib.AbstractContextManager[object]:
    """Held around every launch: the interpreter swaps functions of triton.language while a kernel runs."""
    return _INTERPRETER if INTERPRETED else contextlib.nullcontext()


@dataclass(frozen=True)
class Tables:
    """A planned copy with its base tables where the kernel reads them: int64 [planes] each."""

    plan: PlannedCopy
    dst: torch.Tensor
    src: torch.Tensor


def make_tables(plan: PlannedCopy, device: torch.device) -> Tables:
    """The plan, rows collapsed, with tables on `device`; make them once per pool pair."""
    if not plan.aligned:
        raise AssertionError(
            f"rows must begin and end on {VECTOR_BYTES} bytes: {plan.src.row_bytes} and strides"
        )
    plan = plan.collapsed()
    dst = torch.tensor(plan.dst.bases, dtype=torch.int64, device=device)
    src = torch.tensor(plan.src.bases, dtype=torch.int64, device=device)
    return Tables(plan, dst, src)


def launch(
    tables: Tables, pages: torch.Tensor, layers: range, num_programs: int, tile: Tile | None = None
) -> None:
    """Copy page pages[1, i] to page pages[0, i] in `layers`, on the current CUDA device and stream.

    pages: int64 or int32 [2, n] where the tables are; pairs with a negative id are skipped, no target twice.
    num_programs: programs at most; each keeps one SM busy. Returns at once when compiled.
    """
    plan, num_idx = tables.plan, pages.shape[1]
    if pages.shape[0] != 2:
        raise AssertionError(f"pages {tuple(pages.shape)}: needed are targets and sources")
    if num_idx == 0 or len(layers) == 0:
        return
    vectors = plan.src.page_bytes // VECTOR_BYTES
    tile = tile or pick_tile(vectors, interpreted=INTERPRETED)
    num_planes = len(layers) * plan.per_layer
    num_tiles = -(-num_idx * vectors // tile.block) * num_planes
    last = max(num_idx * vectors + tile.block, num_tiles + num_programs)  # the kernel counts in int32
    if last >= 1 << 31:
        raise AssertionError(f"{num_idx} pages of {vectors} vectors in one copy")
    with one_at_a_time():
        page_copy_kernel[(min(num_programs, num_tiles),)](
            tables.dst, tables.src, pages[0], pages[1],
            layers.start * plan.per_layer, num_planes, num_idx,
            plan.dst.page, plan.src.page, plan.dst.row, plan.src.row,
            plan.src.rows, plan.src.row_bytes // VECTOR_BYTES, tile.block, tile.stages,
            num_warps=tile.num_warps,
        )  # fmt: skip
