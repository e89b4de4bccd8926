"""Pages of one model by several builds are the same; those of other models are not."""

from __future__ import annotations

import math

import pytest
import torch

from hiradix.errors import ConfigError
from hiradix.memory import ArraySpec, EngineShape, KVShape, MLAShape, SparseMLAShape, StateShape
from hiradix.memory.compare import FIRST_LAYER, PageComparer, tolerance
from hiradix.memory.layout import LAYOUTS
from hiradix.memory.shape import Part

SHAPE = KVShape(4, 2, 16, 16, torch.bfloat16)
SIZE = 8
LAYERS, TOKENS = SHAPE.num_layers, SIZE


def numbers(seed: int = 0) -> torch.Tensor:
    """K and V [2, L, S, H, D]."""
    return torch.randn(2, LAYERS, TOKENS, 2, 16, generator=torch.Generator().manual_seed(seed))


def page(
    values: torch.Tensor, dtype: torch.dtype = torch.bfloat16, layout: str = "page_first_direct"
) -> list:
    """As the pieces of a host pool's page."""
    order = {"page_first": (0, 2, 1, 3, 4), "page_head": (0, 3, 2, 1, 4)}.get(layout, (0, 1, 2, 3, 4))
    data = bytes(values.permute(order).to(dtype).contiguous().view(torch.uint8).numpy().data)
    num_pieces = {"page_blob": 1, "layer_first": 2 * LAYERS}.get(layout, 2)
    step = len(data) // num_pieces
    return [memoryview(data[at : at + step]) for at in range(0, len(data), step)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_of_each_array_is_found_in_every_layout(layout: str) -> None:
    compare, plain = PageComparer(SHAPE, layout, SIZE), numbers()
    assert compare(page(plain, layout=layout), page(plain, layout=layout)).share == 0.0
    for array, name in enumerate("kv"):
        for layer in range(LAYERS):
            other = plain.clone()
            other[array, layer] = numbers(1)[array, layer]
            found = compare(page(other, layout=layout), page(plain, layout=layout))
            assert (found.array.removeprefix("scale of the "), found.layer, found.is_same) == (
                name,
                layer,
                False,
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_passes_and_more_does_not(dtype: torch.dtype) -> None:
    compare = PageComparer(KVShape(LAYERS, 2, 16, 16, dtype), "page_first", SIZE)
    plain, noise = numbers(), numbers(1)
    for times, is_same in ((0.3, True), (3.0, False)):
        other = plain + noise * FIRST_LAYER[dtype] * times
        found = compare(page(other, dtype, "page_first"), page(plain, dtype, "page_first"))
        assert found.is_same == is_same, found


def test_a_scale_that_rounding_would_hide_is_seen() -> None:
    compare, plain = PageComparer(SHAPE, "page_first_direct", SIZE), numbers()
    found = compare(page(plain * 1.005), page(plain))
    assert found.array.startswith("scale of the") and not found.is_same
    noise = numbers(1) * 0.005
    assert compare(page(plain + noise), page(plain)).is_same, "as large, and of no direction"


def test_a_layer_may_not_jump_where_those_before_agree() -> None:
    compare, plain = PageComparer(SHAPE, "page_first_direct", SIZE), numbers()
    noise = numbers(1) * 0.7 * tolerance(torch.bfloat16, 3)
    last, all_layers = plain.clone(), plain.clone()
    last[:, 3] += noise[:, 3]
    for layer in range(LAYERS):
        all_layers[:, layer] += (
            noise[:, layer] * tolerance(torch.bfloat16, layer) / tolerance(torch.bfloat16, 3)
        )
    assert not compare(page(last), page(plain)).is_same
    assert compare(page(all_layers), page(plain)).is_same


def test_layers_behind_others_may_differ_by_what_those_make() -> None:
    far = PageComparer(SHAPE, "page_first_direct", SIZE, [5, 11, 17, 23])
    near, plain = PageComparer(SHAPE, "page_first_direct", SIZE), numbers()
    other = page(plain + numbers(1) * 0.03)
    assert far(other, page(plain)).is_same and not near(other, page(plain)).is_same


def test_arrays_of_unlike_layers_are_compared_as_those_of_their_layers() -> None:
    """As the same numbers in layers of one pool: rounding grows with the layer, and does not jump."""
    specs = tuple(ArraySpec(f"{name}.{n}", 2, 16, torch.bfloat16) for name in "kv" for n in range(LAYERS))
    shape = EngineShape(1, specs, SIZE, (*range(LAYERS), *range(LAYERS)))
    unlike, alike = PageComparer(shape, "page_first", SIZE), PageComparer(SHAPE, "page_first_direct", SIZE)
    plain, noise = numbers(), numbers(1)
    for array in range(2):
        for layer in range(LAYERS):
            noise[array, layer] *= 0.7 * tolerance(torch.bfloat16, layer)
    last, scaled = plain.clone(), plain * 1.005
    last[:, 3] += noise[:, 3]
    for other, is_same in ((plain + noise, True), (last, False), (scaled, False)):
        found = unlike(page(other, layout="page_blob"), page(plain, layout="page_blob"))
        assert found.is_same == alike(page(other), page(plain)).is_same == is_same, found


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_like_itself_only(value: float) -> None:
    compare, plain, odd = PageComparer(SHAPE, "page_first_direct", SIZE), numbers(), numbers()
    odd[1, 2, 3, 0, 5] = value
    assert compare(page(odd), page(odd)).is_same
    assert compare(page(odd), page(plain)).error == math.inf
    assert compare(page(plain), page(odd)).error == math.inf


def test_nothing_is_like_nothing_only() -> None:
    compare, plain = PageComparer(SHAPE, "page_first_direct", SIZE), numbers()
    zeros = page(torch.zeros_like(plain))
    assert compare(zeros, zeros).is_same
    assert not compare(zeros, page(plain)).is_same and not compare(page(plain), zeros).is_same


def test_bytes_are_taken_for_float8() -> None:
    compare, plain = (
        PageComparer(KVShape(LAYERS, 2, 16, 16, torch.uint8), "page_first_direct", SIZE),
        numbers(),
    )
    as_codes = [
        page(values, torch.float8_e4m3fn) for values in (plain, plain + numbers(1) * 1e-3, numbers(2))
    ]
    assert compare(as_codes[1], as_codes[0]).is_same and not compare(as_codes[2], as_codes[0]).is_same


def test_a_state_in_32_bits_is_compared_as_what_it_was_computed_from() -> None:
    shape = StateShape(2, 8, 4, 2, 8, 4, torch.bfloat16, torch.float32)
    compare = PageComparer(shape, "page_first", 1, [0, 2])
    tail, state = torch.randn(2, 1, 32), torch.randn(2, 2, 32)

    def record(factor: float) -> list[memoryview]:
        parts = tail.to(torch.bfloat16), state + torch.randn(2, 2, 32) * factor
        return [memoryview(bytes(part.contiguous().view(torch.uint8).numpy().data)) for part in parts]

    assert compare(record(2e-3), record(0.0)).is_same
    assert not compare(record(0.1), record(0.0)).is_same


def packed(values: torch.Tensor) -> bytes:
    """Rows [R, N] as codes, then a scale for 128 of them each, a power of two."""
    groups = values.unflatten(-1, (-1, 128))
    scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1) / 448.0)))
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)
    rows = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=-1)
    return bytes(rows.numpy().data)


def test_codes_are_compared_with_their_scales() -> None:
    """Where rounding tips a scale over, all its codes are other ones, of numbers that are the same."""
    shape = MLAShape.packed_fp8(1, 128, 8)
    compare = PageComparer(shape, "page_first", 1)
    plain = torch.randn(1, 128)
    plain[0, 5] = 448.0 * 2**-6  # as large as the scale below has room for
    rope = torch.randn(1, 8)

    def row(latent: torch.Tensor, factor: float = 0.0) -> list[memoryview]:
        tail = (rope + factor).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        return [memoryview(packed(latent) + tail)]

    tipped = plain * (1 + 1e-6)
    own, other = row(plain), row(tipped)
    assert own[0][128:132] != other[0][128:132], "the scale is another"
    assert compare(other, own).is_same
    assert not compare(row(torch.randn(1, 128)), own).is_same
    assert not compare(row(plain, factor=0.5), own).is_same, "the rope part"


def test_an_indexers_block_is_codes_and_scales() -> None:
    shape = SparseMLAShape(1, 128, 8, torch.bfloat16, page_size=4)
    compare = PageComparer(shape, "page_first", 4)
    latents, keys = torch.randn(4, 136), torch.randn(4, 128)

    def page_of(index: torch.Tensor) -> list[memoryview]:
        scales = index.abs().amax(-1, keepdim=True) / 448.0
        codes = (index / scales).to(torch.float8_e4m3fn)
        block = [codes.view(torch.uint8).flatten(), scales.flatten().view(torch.uint8)]
        return [
            memoryview(bytes(one.contiguous().view(torch.uint8).numpy().data))
            for one in (latents.to(torch.bfloat16), torch.cat(block))
        ]

    assert compare(page_of(keys * (1 + 1e-5)), page_of(keys)).is_same
    assert not compare(page_of(torch.randn(4, 128)), page_of(keys)).is_same


def test_bytes_of_several_types_are_each_what_they_are() -> None:
    """As vLLM keeps a recurrent layer's tail and state in one block."""
    parts = (Part(torch.bfloat16, 32), Part(torch.float32, 64))
    spec = ArraySpec("state", 1, 320, torch.uint8, per_page=True, parts=parts)
    compare = PageComparer(EngineShape(2, (spec,), 1), "page_first", 1)
    tail, state = torch.randn(2, 32), torch.randn(2, 64)

    def record(of_tail: float = 0.0, of_state: float = 0.0) -> list[memoryview]:
        own = (tail + torch.randn(2, 32) * of_tail).to(torch.bfloat16), state + torch.randn(2, 64) * of_state
        rows = torch.cat([part.contiguous().view(torch.uint8) for part in own], dim=1)
        return [memoryview(bytes(rows.numpy().data))]

    assert compare(record(of_tail=2e-3, of_state=2e-3), record()).is_same
    assert not compare(record(of_tail=0.1), record()).is_same
    assert not compare(record(of_state=0.1), record()).is_same
    with pytest.raises(ConfigError, match="state: parts"):
        ArraySpec("state", 1, 300, torch.uint8, per_page=True, parts=parts)
