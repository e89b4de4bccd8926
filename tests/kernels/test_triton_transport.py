"""The kernel behind copy_pages, byte for byte as the torch transport: every layout, kind and type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiradix.memory import LAYOUTS, CacheShape, KVShape, TorchTransport
from hiradix.memory.copy_plan import plan_copies
from hiradix.memory.triton_transport import TritonTransport, _make_pair
from tests.memory.pool_cases import DTYPES, SHAPES, contents, device_pool, fill, host_pool

NUM_PAGES = 5


def check_pair(shape: CacheShape, layout: str, page_size: int = 4) -> None:
    """All layers to the host in another order, then back to other pages layer by layer."""
    device = device_pool(shape, NUM_PAGES, 1, page_size)
    host, reference = (host_pool(shape, NUM_PAGES, layout, 2, page_size) for _ in range(2))
    kernel, torch_copy = TritonTransport(), TorchTransport()
    device_pages, host_pages = np.array([5, 1, 2], np.int32), np.array([0, 4, 2], np.int32)
    kernel.copy_pages(device, host, device_pages, host_pages, None)
    torch_copy.copy_pages(device, reference, device_pages, host_pages, None)
    assert torch.equal(host.buffer, reference.buffer)
    into = np.array([3, 4, 1], np.int64)
    twin = device_pool(shape, NUM_PAGES, 1, page_size)
    for layer in range(shape.num_layers):
        kernel.copy_pages(host, device, host_pages, into, range(layer, layer + 1))
        torch_copy.copy_pages(reference, twin, host_pages, into, range(layer, layer + 1))
        assert all(seen.equal(want) for seen, want in zip(contents(device), contents(twin), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_layout_and_attention_kind(layout: str, name: str) -> None:
    check_pair(SHAPES[name], layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type(dtype: torch.dtype) -> None:
    check_pair(KVShape(2, 2, 16, 16, dtype), "page_first")


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_sizes(page_size: int) -> None:
    check_pair(KVShape(2, 3, 16, 16, torch.bfloat16), "page_first", page_size)


@pytest.mark.parametrize(
    ("name", "layout", "launches"),
    [
        ("mha", "page_first", 1),
        ("mha", "page_head", 1),
        ("mha_wide_k", "page_first", 2),
        ("mla", "layer_first", 1),
    ],
)
def test_keys_and_values_go_in_one_launch(name: str, layout: str, launches: int) -> None:
    shape = SHAPES[name]
    device, host = device_pool(shape, 2, 1), host_pool(shape, 2, layout, 2)
    assert len(plan_copies(device, host)) == launches
    assert len(plan_copies(host, device)) == launches


def test_pages_in_one_piece_are_copied_as_one_row() -> None:
    shape = SHAPES["mha"]
    device = device_pool(shape, 2, 1)
    for layout, rows in (("layer_first", 1), ("page_first_direct", 1), ("page_blob", 1), ("page_first", 4)):
        (table,) = _make_pair(device, host_pool(shape, 2, layout, 2)).tables
        assert table.plan.src.rows == rows


def test_rows_of_odd_size_fall_back_to_torch() -> None:
    shape = KVShape(2, 1, 4, 4, torch.bfloat16)
    device, host = device_pool(shape, NUM_PAGES, 1), host_pool(shape, NUM_PAGES, "page_first", 2)
    assert not plan_copies(device, host)[0].aligned
    check_pair(shape, "page_first")


@pytest.mark.parametrize("stages", [1, 3])
def test_the_sweeps_of_the_benchmark_copy_the_same(stages: int) -> None:
    shape = SHAPES["mha"]
    device, host = device_pool(shape, NUM_PAGES, 1), host_pool(shape, NUM_PAGES, "page_first", 2)
    reference, pages = host_pool(shape, NUM_PAGES, "page_first", 2), np.array([2, 4])
    TritonTransport(num_programs=2, stages=stages).copy_pages(device, host, pages, pages, None)
    TorchTransport().copy_pages(device, reference, pages, pages, None)
    assert torch.equal(host.buffer, reference.buffer)


def test_tables_are_made_once_and_die_with_their_pools() -> None:
    transport = TritonTransport()
    device, host = device_pool(SHAPES["mha"], 2, 1), host_pool(SHAPES["mha"], 2, "page_first", 2)
    one = np.array([1])
    transport.copy_pages(device, host, one, one, None)
    made = transport._pairs.get(device, host)
    transport.copy_pages(device, host, one, one, range(1))
    assert made is not None and transport._pairs.get(device, host) is made
    del device
    assert len(transport._pairs) == 0


def test_pages_outside_the_pool_never_reach_the_kernel() -> None:
    device, host = device_pool(SHAPES["mha"], 2, 1), host_pool(SHAPES["mha"], 2, "page_first", 2)
    before = host.buffer.clone()
    for bad in (-1, 2):
        with pytest.raises(AssertionError, match="target pages"):
            TritonTransport().copy_pages(device, host, np.array([1]), np.array([bad]), None)
    assert torch.equal(host.buffer, before)
    fill([host.buffer], 9)
