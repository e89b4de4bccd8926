"""The quantising pair has torch's bits, as on a CPU."""

from __future__ import annotations

import pytest
import torch

from hiradix.memory.quantise import dequantise, quantise

pytest.importorskip("triton")
from hiradix.triton_kernels import page_copy
from hiradix.triton_kernels.page_quant import (
    QuantPlan,
    dequantise_pages,
    make_quant_tables,
    quantise_pages,
)
from hiradix.triton_kernels.sides import Side


def heads_side(pages: torch.Tensor) -> Side:
    """[P, S, H, D] as a side with a plane per head."""
    _, rows, heads, dim = pages.shape
    page, row, head, _ = (stride * pages.element_size() for stride in pages.stride())
    bases = tuple(pages.data_ptr() + number * head for number in range(heads))
    return Side(bases, page, row, rows, dim * pages.element_size())


def scales_side(scales: torch.Tensor) -> Side:
    """f32 [P, H], likewise."""
    heads = scales.shape[1]
    return Side(tuple(scales.data_ptr() + 4 * number for number in range(heads)), 4 * heads, 4, 1, 4)


def every_value() -> torch.Tensor:
    """Pages [64, 32, 2, 16] of all bf16 values, of like sizes in a page; infinities and NaN too."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    order = (bits & 0x7FFF).sort(stable=True).indices
    return bits[order].to(torch.int16).view(torch.bfloat16).view(64, 32, 2, 16)


def test_codes_scales_and_values_of_every_bf16_number(device: torch.device) -> None:
    if device.type == "cpu" and not page_copy.INTERPRETED:
        pytest.skip("triton is not interpreting")
    values, ids = every_value(), torch.arange(64, device=device)
    own = values.to(device)
    codes = torch.zeros(64, 32, 2, 16, dtype=torch.uint8, device=device)
    scales = torch.zeros(64, 2, device=device)
    plan = QuantPlan(heads_side(own), heads_side(codes), scales_side(scales))
    quantise_pages(make_quant_tables(plan, device), ids, ids, range(2), num_programs=8)
    want, want_scales = quantise(values)
    nan = values.float().isnan()
    assert torch.equal(scales.cpu(), want_scales)
    assert torch.equal(codes.cpu()[~nan], want[~nan]) and ((codes.cpu()[nan] & 0x7F) == 0x7F).all()
    back = torch.zeros_like(own)
    plan = QuantPlan(heads_side(back), heads_side(codes), scales_side(scales))
    dequantise_pages(make_quant_tables(plan, device), ids, ids, range(2), num_programs=8)
    exact = dequantise(want, want_scales)
    assert torch.equal(back.cpu().view(torch.int16)[~nan], exact.view(torch.int16)[~nan])
    assert back.cpu().float()[nan].isnan().all()
