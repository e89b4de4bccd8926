"""The quantising pair, interpreted, bit for bit against torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hiradix.memory.quantise import dequantise, quantise
from hiradix.triton_kernels.page_quant import (
    QuantPlan,
    decode_e4m3,
    dequantise_pages,
    encode_bf16,
    encode_e4m3,
    make_quant_tables,
    quantise_pages,
)
from hiradix.triton_kernels.sides import Side

CPU = torch.device("cpu")


@triton.jit
def to_codes(dst, src, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, encode_e4m3(tl.load(src + at)))


@triton.jit
def to_values(dst, src, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, decode_e4m3(tl.load(src + at)))


@triton.jit
def to_bf16(dst, src, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, encode_bf16(tl.load(src + at)))


def all_bf16() -> torch.Tensor:
    """Every bf16 value there is, as f32 [65536]."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def some_f32() -> torch.Tensor:
    """f32 [2^18] over 40 powers of two, with subnormal codes and saturation among them."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-20, 20, (1 << 18,), generator=generator)
    return torch.randn(1 << 18, generator=generator) * torch.exp2(powers.float())


@pytest.mark.parametrize("values", [all_bf16(), some_f32()], ids=["all bf16", "random f32"])
def test_encoder_gives_torchs_bits(values: torch.Tensor) -> None:
    codes = torch.zeros(values.numel(), dtype=torch.uint8)
    to_codes[(1,)](codes, values, BLOCK=values.numel())
    want = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    nan = torch.isnan(values)
    assert torch.equal(codes[~nan], want.view(torch.uint8)[~nan])
    assert ((codes[nan] & 0x7F) == 0x7F).all() and torch.isnan(want.float()[nan]).all()


def test_decoder_gives_torchs_values() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = torch.zeros(256)
    to_values[(1,)](values, codes, BLOCK=256)
    want = codes.view(torch.float8_e4m3fn).float()
    nan = torch.isnan(want)
    assert nan.sum() == 2 and torch.isnan(values[nan]).all()
    assert torch.equal(values[~nan].view(torch.int32), want[~nan].view(torch.int32))


def test_bf16_rounding_is_torchs() -> None:
    values = torch.cat([some_f32(), torch.tensor([float("inf"), -float("inf"), float("nan"), 3.3e38])] * 1)
    values = torch.cat([values, torch.zeros((1 << 19) - values.numel())])
    bits = torch.zeros(values.numel(), dtype=torch.int16)
    to_bf16[(1,)](bits, values, BLOCK=values.numel())
    nan = torch.isnan(values)
    assert torch.equal(bits[~nan], values.to(torch.bfloat16).view(torch.int16)[~nan])
    assert torch.isnan(bits.view(torch.bfloat16)[nan].float()).all()


def heads_side(pages: torch.Tensor) -> Side:
    """[planes, P, S, H, D] as a side with a plane per head."""
    planes, _, rows, heads, dim = pages.shape
    plane, page, row, head, _ = (stride * pages.element_size() for stride in pages.stride())
    bases = [pages.data_ptr() + q * plane + h * head for q in range(planes) for h in range(heads)]
    return Side(tuple(bases), page, row, rows, dim * pages.element_size())


def scales_side(scales: torch.Tensor) -> Side:
    """f32 [P, planes, H] as a side with a plane per head."""
    num_planes = scales.shape[1] * scales.shape[2]
    return Side(tuple(scales.data_ptr() + 4 * at for at in range(num_planes)), 4 * num_planes, 4, 1, 4)


@pytest.mark.parametrize(("rows", "dim"), [(4, 16), (3, 48), (1, 16)])
@pytest.mark.parametrize("planes", [range(0, 4), range(2, 3), range(0, 0)])
def test_pages_there_and_back(rows: int, dim: int, planes: range) -> None:
    """Two planes of two heads; the bf16 side and the code side use other pages, orders and strides."""
    generator = torch.Generator().manual_seed(1)
    size = (2, 5, rows, 2, dim)
    powers = torch.randint(-30, 30, size, generator=generator).float()
    values = (torch.randn(size, generator=generator) * torch.exp2(powers)).to(torch.bfloat16)
    values[0, 2] = 0
    codes = torch.full((6, 2, rows, 2, dim), 0xA5, dtype=torch.uint8).permute(1, 0, 2, 3, 4)
    scales = torch.full((6, 2, 2), -1.0)
    tables = make_quant_tables(QuantPlan(heads_side(values), heads_side(codes), scales_side(scales)), CPU)
    to, at = torch.tensor([5, 0, 2]), torch.tensor([2, 4, 0])
    quantise_pages(tables, to, at, planes, num_programs=2)
    want_codes, want_scales = quantise(values[:, at])
    done = torch.zeros(4, dtype=torch.bool)
    done[planes.start : planes.stop] = True
    done = done.view(2, 2)
    for plane in range(2):
        for head in range(2):
            seen, seen_scales = codes[plane, to][..., head, :], scales[to, plane, head]
            if done[plane, head]:
                assert torch.equal(seen, want_codes[plane][..., head, :])
                assert torch.equal(seen_scales, want_scales[plane, :, head])
            else:
                assert (seen == 0xA5).all() and (seen_scales == -1).all()
    assert (codes[:, [1, 3, 4]] == 0xA5).all() and (scales[[1, 3, 4]] == -1).all()
    back = torch.zeros_like(values)
    back_tables = make_quant_tables(QuantPlan(heads_side(back), heads_side(codes), scales_side(scales)), CPU)
    dequantise_pages(back_tables, to, at, planes, num_programs=3)
    want = dequantise(codes[:, to], scales[to].transpose(0, 1))
    want[~done[:, None, None, :, None].expand_as(want)] = 0
    assert torch.equal(back[:, at].view(torch.int16), want.view(torch.int16))
    assert not back[:, [1, 3]].any()


def test_pairs_with_a_negative_id_are_skipped() -> None:
    """As in the copy kernel; nothing of their planes is read or written, and nothing beside them."""
    values = torch.randn(1, 4, 4, 2, 16, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    codes, scales = torch.full((1, 4, 4, 2, 16), 0xA5, dtype=torch.uint8), torch.full((4, 1, 2), -1.0)
    tables = make_quant_tables(QuantPlan(heads_side(values), heads_side(codes), scales_side(scales)), CPU)
    to, at = torch.tensor([1, -1, 3, 0], dtype=torch.int32), torch.tensor([2, 0, -1, 3], dtype=torch.int32)
    quantise_pages(tables, to, at, range(2), num_programs=2)
    want, want_scales = quantise(values[0, [2, 3]])
    assert torch.equal(codes[0, [1, 0]], want) and torch.equal(scales[[1, 0], 0], want_scales)
    assert (codes[0, [2, 3]] == 0xA5).all() and (scales[[2, 3]] == -1).all()
    back = torch.full_like(values, 7.0)
    tables = make_quant_tables(QuantPlan(heads_side(back), heads_side(codes), scales_side(scales)), CPU)
    dequantise_pages(tables, to, at, range(2), num_programs=2)
    assert torch.equal(back[0, [2, 3]], dequantise(want, want_scales)) and (back[0, [0, 1]] == 7.0).all()


def test_pages_of_every_bf16_value() -> None:
    """All 65282 that are no NaN, of like sizes in a page: codes, scales and values back, bit for bit."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    bits = bits[(bits & 0x7FFF) <= 0x7F80]
    size = (bits & 0x7FFF).sort(stable=True).indices  # else the small ones would all be 0 beside the large
    values = torch.zeros(64, 32, 2, 16, dtype=torch.int16)
    values.view(-1)[: len(bits)] = bits[size].to(torch.int16)
    values = values.view(torch.bfloat16)[None]
    codes, scales = torch.zeros(1, 64, 32, 2, 16, dtype=torch.uint8), torch.zeros(64, 1, 2)
    tables = make_quant_tables(QuantPlan(heads_side(values), heads_side(codes), scales_side(scales)), CPU)
    pages = torch.arange(64)
    quantise_pages(tables, pages, pages, range(2), num_programs=2)
    want, want_scales = quantise(values[0])
    assert torch.equal(scales[:, 0], want_scales) and torch.equal(codes[0], want)
    back = torch.zeros_like(values)
    back_tables = make_quant_tables(QuantPlan(heads_side(back), heads_side(codes), scales_side(scales)), CPU)
    dequantise_pages(back_tables, pages, pages, range(2), num_programs=2)
    exact, nan = dequantise(want, want_scales), torch.isnan(dequantise(want, want_scales).float())
    assert torch.equal(back[0].view(torch.int16)[~nan], exact.view(torch.int16)[~nan])
    assert torch.isnan(back[0].float()[nan]).all()


def test_the_loss_is_bounded() -> None:
    generator = torch.Generator().manual_seed(2)
    pages = torch.randn(3, 8, 2, 32, generator=generator).to(torch.bfloat16)
    codes, scales = quantise(pages)
    error = (dequantise(codes, scales).float() - pages.float()).abs()
    smallest_step = scales[:, None, :, None] * 2**-9
    assert (error <= pages.float().abs() / 16 * 1.01 + smallest_step / 2).all()
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    assert (pages.float().abs().amax((1, 3)) <= 448 * scales).all()


def test_the_scale_is_the_smallest_power_of_two_that_fits() -> None:
    """448 of it, its largest, still fits; the next bf16 value behind that does not."""
    for exponent in range(-120, 110):
        largest = torch.tensor([448.0 * 2.0**exponent]).to(torch.bfloat16)
        behind = (largest.view(torch.int16) + 1).view(torch.bfloat16)
        step = 2.0**exponent
        for value, scale in ((largest, step), (-largest, step), (behind, 2 * step)):
            assert quantise(value.reshape(1, 1, 1, 1))[1].item() == scale


@pytest.mark.parametrize("value", [float("nan"), float("-nan"), float("inf"), float("-inf")])
def test_one_bad_value_does_not_take_its_page_along(value: float) -> None:
    """Found: a NaN's scale was the smallest there is, an infinity's infinite: all else became 0 or NaN."""
    pages = torch.linspace(-3, 3, 128).view(1, 8, 1, 16).to(torch.bfloat16)
    want, _ = quantise(pages)
    pages[0, 1, 0, 3] = value
    codes, scales = quantise(pages)
    back = dequantise(codes, scales).float()[0, 1, 0, 3]
    assert back.isnan() if value != value else back == 448 * scales[0, 0] * (1 if value > 0 else -1)
    others = torch.ones_like(codes, dtype=torch.bool)
    others[0, 1, 0, 3] = False
    assert torch.equal(codes[others], want[others])
    kernel_codes, kernel_scales = torch.zeros(1, 1, 8, 1, 16, dtype=torch.uint8), torch.zeros(1, 1, 1)
    sides = heads_side(pages[None]), heads_side(kernel_codes), scales_side(kernel_scales)
    first = torch.zeros(1, dtype=torch.int64)
    quantise_pages(make_quant_tables(QuantPlan(*sides), CPU), first, first, range(1), num_programs=1)
    assert torch.equal(kernel_scales[0], scales) and torch.equal(kernel_codes[0] & 0x7F, codes & 0x7F)


def test_bad_plans_are_named() -> None:
    side = Side((0, 64), 128, 32, 4, 32)
    codes, scales = Side((0, 64), 64, 16, 4, 16), Side((0, 4), 8, 4, 1, 4)
    QuantPlan(side, codes, scales)
    with pytest.raises(AssertionError, match="rows differ"):
        QuantPlan(side, side, scales)
    with pytest.raises(AssertionError, match="planes"):
        QuantPlan(side, codes, Side((0,), 8, 4, 1, 4))
    with pytest.raises(AssertionError, match="16 bytes"):
        QuantPlan(Side((8, 64), 128, 32, 4, 32), codes, scales)
