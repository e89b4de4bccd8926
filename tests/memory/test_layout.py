"""Layouts against SGLang's documented shapes, byte offsets and flat pages (independent formulas)."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from hiradix.errors import ConfigError
from hiradix.memory import LAYOUTS, HostPool, KVShape, MLAShape, make_layout, page_bytes
from tests.memory.pool_cases import PAGE_SIZE, SHAPES, as_bytes, host_pool

P = 5
MHA = SHAPES["mha"]
MLA = SHAPES["mla"]
L, H, D, C = 3, 2, 16, 72

MHA_BUFFERS = {
    "layer_first": (2, L, P * PAGE_SIZE, H, D),
    "page_first": (2, P * PAGE_SIZE, L, H, D),
    "page_first_direct": (2, P, L, PAGE_SIZE, H, D),
    "page_head": (2, P, H, PAGE_SIZE, L, D),
}
MLA_BUFFERS = {
    "layer_first": (L, P * PAGE_SIZE, 1, C),
    "page_first": (P * PAGE_SIZE, L, 1, C),
    "page_first_direct": (P, L, PAGE_SIZE, 1, C),
}


def element(buffer: torch.Tensor, layout: str, slot: int, layer: int) -> torch.Tensor:
    """[H, D] of a slot and layer, read from the documented tensor shape (without the K/V dimension)."""
    page, offset = divmod(slot, PAGE_SIZE)
    match layout:
        case "layer_first":
            return buffer[layer, slot]
        case "page_first":
            return buffer[slot, layer]
        case "page_first_direct":
            return buffer[page, layer, offset]
        case "page_head":
            return buffer[page, :, offset, layer]
    raise AssertionError(layout)


@pytest.mark.parametrize("layout", MHA_BUFFERS)
def test_mha_buffer_has_the_documented_shape_and_places(layout: str) -> None:
    pool = host_pool(MHA, P, layout, seed=1)
    assert tuple(pool.kv_buffer.shape) == MHA_BUFFERS[layout]
    assert pool.kv_buffer.data_ptr() == pool.buffer.data_ptr()
    for array, buffer in enumerate((pool.k_buffer, pool.v_buffer)):
        assert as_bytes(buffer).equal(as_bytes(pool.kv_buffer[array]))
        for layer, slot in product(range(L), range(P * PAGE_SIZE)):
            page, offset = divmod(slot, PAGE_SIZE)
            seen = pool.layer_views(array)[layer][page, offset]
            assert seen.view(torch.uint8).equal(
                element(buffer, layout, slot, layer).contiguous().view(torch.uint8)
            )


@pytest.mark.parametrize("layout", MLA_BUFFERS)
def test_mla_buffer_has_the_documented_shape_and_places(layout: str) -> None:
    pool = host_pool(MLA, P, layout, seed=2)
    assert tuple(pool.kv_buffer.shape) == MLA_BUFFERS[layout]
    for layer, slot in product(range(L), range(P * PAGE_SIZE)):
        page, offset = divmod(slot, PAGE_SIZE)
        seen = pool.layer_views(0)[layer][page, offset]
        assert seen.view(torch.int16).equal(element(pool.kv_buffer, layout, slot, layer).view(torch.int16))


def documented_offset(layout: str, slot: int, layer: int, head: int) -> int:
    """Byte offset into K of a head's data, by the contract's formulas."""
    row, slots, item = H * D * 2, P * PAGE_SIZE, 2
    page, offset = divmod(slot, PAGE_SIZE)
    token = L * row
    match layout:
        case "layer_first":
            return layer * slots * row + slot * row + head * D * item
        case "page_first":
            return slot * token + layer * row + head * D * item
        case "page_first_direct":
            return page * PAGE_SIZE * token + layer * PAGE_SIZE * row + offset * row + head * D * item
        case "page_head":
            return ((page * H + head) * PAGE_SIZE + offset) * L * D * item + layer * D * item
    raise AssertionError(layout)


@pytest.mark.parametrize("layout", MHA_BUFFERS)
def test_strides_are_the_documented_offsets(layout: str) -> None:
    layout_record = make_layout(layout, MHA, P, PAGE_SIZE)
    for array, plane in enumerate(layout_record.planes):
        for slot, layer, head in product(range(P * PAGE_SIZE), range(L), range(H)):
            page, offset = divmod(slot, PAGE_SIZE)
            at = plane.layers[layer] + page * plane.page + offset * plane.token + head * plane.head
            assert at == array * (L * P * PAGE_SIZE * H * D * 2) + documented_offset(
                layout, slot, layer, head
            )


@pytest.mark.parametrize(
    ("layout", "pieces"), [("layer_first", 2 * L), ("page_first", 2), ("page_first_direct", 2)]
)
def test_page_views_joined_are_the_flat_data_page(layout: str, pieces: int) -> None:
    pool = host_pool(MHA, P, layout, seed=3)
    buffer = pool.kv_buffer.view(torch.uint8)
    for page in range(P):
        tokens = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        flat = {
            "layer_first": lambda at=tokens: buffer[:, :, at],
            "page_first": lambda at=tokens: buffer[:, at],
            "page_first_direct": lambda at=page: buffer[:, at : at + 1],
        }[layout]()
        views = pool.page_views(page)
        assert len(views) == pieces
        assert b"".join(views) == bytes(as_bytes(flat).numpy())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_pages_tile_the_buffer(layout: str, name: str) -> None:
    """Every byte of the buffer is in exactly one page view, whatever the layout."""
    shape = SHAPES[name]
    pool = HostPool(shape, P, PAGE_SIZE, layout=layout)
    assert pool.page_bytes == page_bytes(shape, PAGE_SIZE)
    assert pool.layout.num_bytes == P * pool.page_bytes == pool.buffer.numel()
    for page in range(P):
        for view in pool.page_views(page):
            view[:] = bytes([page + 1]) * len(view)
    counts = torch.bincount(pool.buffer.to(torch.int64), minlength=P + 1)
    assert counts.tolist() == [0] + [pool.page_bytes] * P
    for array in range(len(shape.arrays)):  # and a page's views hold that page's tokens of all layers
        for layer in pool.layer_views(array):
            for page in range(P):
                assert (layer[page].contiguous().view(torch.uint8) == page + 1).all()


def test_page_views_are_zero_copy_and_writable() -> None:
    pool = HostPool(MHA, P, PAGE_SIZE)
    (keys, values) = pool.page_views(2)
    keys[0], values[-1] = 7, 9
    assert pool.kv_buffer.view(torch.uint8)[0, 2 * PAGE_SIZE, 0, 0, 0] == 7
    assert pool.kv_buffer.view(torch.uint8)[1, 3 * PAGE_SIZE - 1, -1, -1, -1] == 9
    assert keys.contiguous and not keys.readonly and keys.format == "B"


def test_one_piece_in_page_blob() -> None:
    pool = HostPool(SHAPES["mha_wide_k"], P, PAGE_SIZE, layout="page_blob")
    assert [len(view) for view in pool.page_views(0)] == [pool.page_bytes]
    assert pool.kv_buffer.shape == (P * pool.page_bytes,)


def test_unequal_head_dims_have_separate_buffers() -> None:
    pool = HostPool(SHAPES["mha_wide_k"], P, PAGE_SIZE)
    assert tuple(pool.k_buffer.shape) == (P * PAGE_SIZE, 3, 2, 24)
    assert tuple(pool.v_buffer.shape) == (P * PAGE_SIZE, 3, 2, 16)


@pytest.mark.parametrize("page", [-1, P])
def test_a_page_outside_the_pool_is_our_bug(page: int) -> None:
    with pytest.raises(AssertionError, match=f"host page {page} of {P}"):
        HostPool(MHA, P, PAGE_SIZE).page_views(page)


def test_bad_geometry_is_refused() -> None:
    with pytest.raises(ConfigError, match="--hicache-mem-layout diagonal.*page_first"):
        HostPool(MHA, P, PAGE_SIZE, layout="diagonal")
    with pytest.raises(ConfigError, match="0 pages"):
        HostPool(MHA, 0, PAGE_SIZE)
    with pytest.raises(ConfigError, match="KVShape"):
        KVShape(2, 0, 8, 8, torch.float32)
    with pytest.raises(ConfigError, match="MLAShape"):
        MLAShape(2, 8, -1, torch.float32)
