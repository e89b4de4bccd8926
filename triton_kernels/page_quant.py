"""The quantising pair: bf16 pages to fp8 e4m3 codes with one scale per page, plane and head, and back.

Each head is a plane of its own here, so a scale belongs to (page, plane). The scale is the smallest power of
two that fits the page's largest finite value into 448, so scaling itself is exact and the only loss is the
rounding to e4m3 (to nearest, ties to even, saturating; NaN stays NaN). All rounding is done on integers,
because the interpreter's own fp8 and bf16 casts are wrong; so CPU and GPU give the same bits.
`hiradix.memory.quantise` is the same in torch.

Lossy: pages stored this way carry a fingerprint of their own and stand outside "miss or exact".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hiradix.triton_kernels.page_copy import one_at_a_time
from hiradix.triton_kernels.sides import VECTOR_BYTES, Side

_COUNTS = [
    "first_plane",
    "num_planes",
    "num_idx",
    "codes_page",
    "values_page",
    "codes_row",
    "values_row",
    "scales_page",
]
_IDS = ["codes_idx", "values_idx"]


@triton.jit
def encode_e4m3(x):
    """f32 to e4m3 codes: to nearest, ties to even, saturating at 448, NaN to NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448.0
    # Below 2^-6 codes are steps of 2^-9: adding 2^14, whose own step is 2^-9, rounds to one.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 120 << 3: the exponents' biases apart
    code = tl.where(size < 0x3C800000, small, normal)  # 2^-6
    return (tl.where(nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """e4m3 codes to f32, exact; 0x7F and 0xFF to NaN."""
    code = code.to(tl.int32)
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # 2^-9
    bits = tl.where(size == 0x7F, 0x7FC00000, value.to(tl.int32, bitcast=True)) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_bf16(x):
    """f32 to bf16 bits, to nearest, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).to(tl.int16)


@triton.jit
def scale_of(bits):
    """The smallest power of two, f32, by which the largest number of a tile of bf16 bits fits into e4m3."""
    size = bits & 0x7FFF  # bf16 sizes are ordered as integers are; infinities and NaN do not count
    largest = tl.max(tl.max(tl.where(size < 0x7F80, size, 0), axis=1), axis=0)
    scale = (largest << 16).to(tl.float32, bitcast=True) * (1.0 / 448.0)
    scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(scale, 1.1754943508222875e-38)  # the smallest normal: a page of zeros


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_IDS)
def page_quantise_kernel(
    codes_tab,  # int64 [planes]: addresses of uint8 codes, of f32 scales, of bf16 values
    scales_tab,
    values_tab,
    codes_idx,  # int64 or int32 [num_idx]: pages of both sides, skipped if one is < 0
    values_idx,
    first_plane: tl.int32,
    num_planes: tl.int32,
    num_idx: tl.int32,
    codes_page: tl.int64,  # bytes between pages, and between rows of a page
    values_page: tl.int64,
    codes_row: tl.int64,
    values_row: tl.int64,
    scales_page: tl.int64,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS_TILE: tl.constexpr,  # the next powers of two
    DIM_TILE: tl.constexpr,
):
    row = tl.arange(0, ROWS_TILE).to(tl.int64)[:, None]
    col = tl.arange(0, DIM_TILE)[None, :]
    for work in tl.range(tl.program_id(0), num_idx * num_planes, tl.num_programs(0)):
        plane = first_plane + work // num_idx
        to = tl.load(codes_idx + work % num_idx).to(tl.int64)
        at = tl.load(values_idx + work % num_idx).to(tl.int64)
        wanted = (to >= 0) & (at >= 0)
        mask = (row < tl.where(wanted, ROWS, 0)) & (col < DIM)
        address = tl.load(values_tab + plane) + at * values_page + row * values_row
        values = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), (16, 16))
        bits = tl.load(values + col, mask=mask, other=0).to(tl.int32) & 0xFFFF
        scale = scale_of(bits)
        code = encode_e4m3((bits << 16).to(tl.float32, bitcast=True) * tl.div_rn(1.0, scale))
        address = tl.load(codes_tab + plane) + to * codes_page + row * codes_row
        codes = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), (16, 16))
        tl.store(codes + col, code, mask=mask)
        into = (tl.load(scales_tab + plane) + to * scales_page).to(tl.pointer_type(tl.float32))
        tl.store(into, scale, mask=wanted)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_IDS)
def page_dequantise_kernel(
    codes_tab,
    scales_tab,
    values_tab,
    codes_idx,
    values_idx,
    first_plane: tl.int32,
    num_planes: tl.int32,
    num_idx: tl.int32,
    codes_page: tl.int64,
    values_page: tl.int64,
    codes_row: tl.int64,
    values_row: tl.int64,
    scales_page: tl.int64,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    row = tl.arange(0, ROWS_TILE).to(tl.int64)[:, None]
    col = tl.arange(0, DIM_TILE)[None, :]
    for work in tl.range(tl.program_id(0), num_idx * num_planes, tl.num_programs(0)):
        plane = first_plane + work // num_idx
        at = tl.load(codes_idx + work % num_idx).to(tl.int64)
        to = tl.load(values_idx + work % num_idx).to(tl.int64)
        wanted = (to >= 0) & (at >= 0)
        mask = (row < tl.where(wanted, ROWS, 0)) & (col < DIM)
        address = tl.load(codes_tab + plane) + at * codes_page + row * codes_row
        codes = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), (16, 16))
        found = (tl.load(scales_tab + plane) + at * scales_page).to(tl.pointer_type(tl.float32))
        scale = tl.load(found, mask=wanted, other=1.0)
        value = decode_e4m3(tl.load(codes + col, mask=mask, other=0)) * scale
        address = tl.load(values_tab + plane) + to * values_page + row * values_row
        values = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), (16, 16))
        tl.store(values + col, encode_bf16(value), mask=mask)


@dataclass(frozen=True)
class QuantPlan:
    """Three sides of equal planes and rows: bf16 values, uint8 codes, and one f32 scale per page."""

    values: Side
    codes: Side
    scales: Side

    def __post_init__(self) -> None:
        planes = {len(side.bases) for side in (self.values, self.codes, self.scales)}
        if len(planes) != 1:
            raise AssertionError(f"planes of values, codes and scales differ: {planes}")
        rows = (self.values.rows, self.values.row_bytes) == (self.codes.rows, 2 * self.codes.row_bytes)
        if not rows or self.scales.page_bytes != 4:
            raise AssertionError(f"rows differ: {self.values}, {self.codes}, {self.scales}")
        if not self.values.aligned or not self.codes.aligned:
            raise AssertionError("rows of values and codes must be on 16 bytes")


@dataclass(frozen=True)
class QuantTables:
    """A plan with its base tables where the kernels read them."""

    plan: QuantPlan
    bases: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_quant_tables(plan: QuantPlan, device: torch.device) -> QuantTables:
    """Base tables of codes, scales and values on `device`."""
    sides = (plan.codes, plan.scales, plan.values)
    bases = [torch.tensor(side.bases, dtype=torch.int64, device=device) for side in sides]
    return QuantTables(plan, (bases[0], bases[1], bases[2]))


def quantise_pages(
    tables: QuantTables, codes_idx: torch.Tensor, values_idx: torch.Tensor, planes: range, num_programs: int
) -> None:
    """Pages values_idx[i] of the bf16 side become codes and scales at codes_idx[i]; pairs with a negative id
    are skipped."""
    _launch(page_quantise_kernel, tables, (codes_idx, values_idx), planes, num_programs)


def dequantise_pages(
    tables: QuantTables, codes_idx: torch.Tensor, values_idx: torch.Tensor, planes: range, num_programs: int
) -> None:
    """The way back: codes and scales of codes_idx[i] become bf16 values at values_idx[i]."""
    _launch(page_dequantise_kernel, tables, (codes_idx, values_idx), planes, num_programs)


@dataclass(frozen=True)
class QuantTile:
    """One head's page as a program works on it: rows and elements, and warps per program."""

    rows: int
    dim: int
    num_warps: int


def pick_quant_tile(rows: int, dim: int) -> QuantTile:
    """The tile for pages of `rows` rows of `dim` elements: two rows at least, since triton does not compile
    an alignment hint of two numbers on what is one; so many warps that each thread has 16 codes to store.
    From 2^16 elements on a thread has more values than registers."""
    tile = max(2, triton.next_power_of_2(rows)), triton.next_power_of_2(dim)
    return QuantTile(*tile, max(1, min(8, tile[0] * tile[1] // (32 * VECTOR_BYTES))))


def _launch(
    kernel: triton.runtime.JITFunction,
    tables: QuantTables,
    ids: tuple[torch.Tensor, torch.Tensor],
    planes: range,
    num_programs: int,
) -> None:
    plan, num_idx = tables.plan, ids[0].numel()
    if num_idx != ids[1].numel():
        raise AssertionError(f"{ids[1].numel()} pages of values for {num_idx} of codes")
    total = num_idx * len(planes)
    if total == 0:
        return
    rows, dim = plan.codes.rows, plan.codes.row_bytes
    tile = pick_quant_tile(rows, dim)
    with one_at_a_time():
        kernel[(min(num_programs, total),)](
            *tables.bases, *ids, planes.start, len(planes), num_idx,
            plan.codes.page, plan.values.page, plan.codes.row, plan.values.row, plan.scales.page,
            rows, dim, tile.rows, tile.dim,
            num_warps=tile.num_warps,
        )  # fmt: skip
