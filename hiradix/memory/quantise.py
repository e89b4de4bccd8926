"""bf16 pages as fp8 e4m3 codes with power-of-two scales, in torch; the bits are those of the Triton pair."""

from __future__ import annotations

import torch

from hiradix.errors import Misuse

_SMALLEST_NORMAL = 1.1754943508222875e-38


def quantise(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes [..., S, H, D] and float32 scales [..., H] of bf16 pages [..., S, H, D].

    A page's and head's scale is the smallest power of two that fits its largest finite value into 448;
    infinities become 448 times that, NaN stays NaN. Lossy: a value is off by at most 1/16 of itself, or by
    half the smallest step where it is 2^15 times smaller than the largest.
    """
    if pages.dtype != torch.bfloat16:
        raise Misuse(f"quantise of {pages.dtype}")
    sizes = pages.view(torch.int16).to(torch.int32) & 0x7FFF
    largest = sizes.masked_fill_(sizes >= 0x7F80, 0).amax(dim=(-3, -1))
    scales = (largest << 16).view(torch.float32) * torch.tensor(1.0 / 448.0, dtype=torch.float32)
    scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scales = scales.clamp_min(_SMALLEST_NORMAL)
    scaled = pages.to(torch.float32) * (1.0 / scales)[..., None, :, None]
    codes = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 pages [..., S, H, D] of uint8 codes of the same shape and float32 scales [..., H]."""
    values = codes.view(torch.float8_e4m3fn).to(torch.float32) * scales[..., None, :, None]
    return values.to(torch.bfloat16)
