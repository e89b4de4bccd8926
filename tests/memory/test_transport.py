"""The torch transport against a page-by-page model: exact bytes where asked, nothing touched elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.errors import ConfigError
from hiradix.memory import (
    LAYOUTS,
    CacheShape,
    DevicePool,
    HostPool,
    KVShape,
    TorchTransport,
    Transport,
    make_transport,
)
from hiradix.memory import transport as transport_module
from hiradix.memory.dma_transport import DmaTransport, Pieces
from hiradix.memory.packing_transport import PackingTransport
from hiradix.memory.sgl_transport import SglKernelTransport
from tests.memory.pool_cases import (
    DTYPES,
    PAGE_SIZE,
    SHAPES,
    contents,
    device_pool,
    fill,
    host_pool,
    shape_of,
)

NUM_PAGES = 6


def copied(
    src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]], layers: range
) -> list[torch.Tensor]:
    """What `dst` must be after the copy, one page and layer at a time."""
    want = [array.clone() for array in dst]
    for source, target in zip(src, want, strict=True):
        for layer in layers:
            for from_page, to_page in pairs:
                target[layer, to_page] = source[layer, from_page]
    return want


def run_copy(
    src: DevicePool | HostPool, dst: DevicePool | HostPool, pairs: list[tuple[int, int]], layers: range | None
) -> None:
    """Copy with the torch transport and compare the whole target pool with the model."""
    span = range(src.shape.num_layers) if layers is None else layers
    want = copied(contents(src), contents(dst), pairs, span)
    before = contents(src)
    src_pages = np.array([pair[0] for pair in pairs], np.int32)
    dst_pages = np.array([pair[1] for pair in pairs], np.int64)
    TorchTransport().copy_pages(src, dst, src_pages, dst_pages, layers)
    assert all(seen.equal(wanted) for seen, wanted in zip(contents(dst), want, strict=True))
    assert all(seen.equal(wanted) for seen, wanted in zip(contents(src), before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("gather", [False, True])
def test_both_directions_every_layout_and_kind(
    layout: str, name: str, gather: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not gather:
        monkeypatch.setattr(transport_module, "_RUN_BYTES", 0)
    shape = SHAPES[name]
    device = device_pool(shape, NUM_PAGES, seed=1)
    host = host_pool(shape, NUM_PAGES, layout, seed=2)
    run_copy(device, host, [(4, 0), (5, 1), (1, 5)], None)
    run_copy(host, device, [(0, 3), (2, 1), (3, 2), (5, 6)], None)
    run_copy(device, host, [(1, 4), (2, 2), (3, 3), (5, 0), (5, 1)], None)
    run_copy(host, device, [(1, 6), (4, 2)], range(shape.num_layers - 1, shape.num_layers))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_is_byte_exact_for_every_type(dtype: torch.dtype, layout: str) -> None:
    """Device to host to page bytes to another host pool and back: NaN payloads and all."""
    shape = shape_of(dtype)
    device, host = device_pool(shape, NUM_PAGES, seed=3), host_pool(shape, NUM_PAGES, layout, seed=4)
    second = host_pool(shape, NUM_PAGES, layout, seed=5)
    before = contents(device)
    copy = TorchTransport().copy_pages
    copy(device, host, np.array([2, 5]), np.array([3, 0]), None)
    for page, other in ((3, 1), (0, 4)):
        stored = [bytes(view) for view in host.page_views(page)]
        for view, data in zip(second.page_views(other), stored, strict=True):
            view[:] = data
    fill(device.k_buffer + device.v_buffer, seed=6)
    for layer in range(shape.num_layers):
        copy(second, device, np.array([1, 4]), np.array([2, 5]), range(layer, layer + 1))
    for array, old in zip(contents(device), before, strict=True):
        assert array[:, [2, 5]].equal(old[:, [2, 5]])
        assert not array[:, [1, 3, 4]].equal(old[:, [1, 3, 4]])


@st.composite
def copies(draw: st.DrawFn) -> tuple[CacheShape, str, list[tuple[int, int]], range]:
    layers = draw(st.integers(1, 3))
    shape = KVShape(
        layers,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([4, 8, 12])),
        draw(st.sampled_from([4, 8])),
        torch.float16,
    )
    targets = draw(st.lists(st.integers(0, NUM_PAGES - 1), unique=True))
    sources = [draw(st.integers(0, NUM_PAGES - 1)) for _ in targets]
    first = draw(st.integers(0, layers))
    span = range(first, draw(st.integers(first, layers)))
    return shape, draw(st.sampled_from(sorted(LAYOUTS))), list(zip(sources, targets, strict=True)), span


@settings(max_examples=60, deadline=None)
@given(copies(), st.booleans(), st.integers(1, 3), st.sampled_from([0, 1 << 20]))
def test_any_lists_and_layers(
    case: tuple[CacheShape, str, list[tuple[int, int]], range], to_host: bool, page_size: int, run_bytes: int
) -> None:
    shape, layout, pairs, span = case
    device = device_pool(shape, NUM_PAGES, seed=1, page_size=page_size)
    host = host_pool(shape, NUM_PAGES, layout, seed=2, page_size=page_size)
    src, dst = (device, host) if to_host else (host, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_module, "_RUN_BYTES", run_bytes)
        run_copy(src, dst, pairs, span)


def test_separately_allocated_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [torch.zeros((NUM_PAGES + 1) * PAGE_SIZE, 2, 16, dtype=torch.bfloat16) for _ in range(3)]
    values = [torch.zeros_like(key) for key in keys]
    device = DevicePool.wrap(keys, values, PAGE_SIZE)
    fill(keys + values, seed=1)
    assert device.stacked_view(0) is None and device.num_pages == NUM_PAGES
    host = host_pool(device.shape, NUM_PAGES, "page_first", seed=2)
    run_copy(device, host, [(6, 0), (1, 1)], None)
    monkeypatch.setattr(transport_module, "_RUN_BYTES", 0)
    run_copy(host, device, [(0, 2), (3, 4), (4, 5)], None)
    assert device.k_buffer[1] is keys[1]


def test_large_gathers_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_GATHER_BYTES", 1)
    device = device_pool(SHAPES["mha"], NUM_PAGES, seed=1)
    run_copy(
        device, host_pool(SHAPES["mha"], NUM_PAGES, "layer_first", seed=2), [(3, 0), (1, 4), (2, 5)], None
    )


def test_bad_lists_are_our_bugs() -> None:
    device, host = device_pool(SHAPES["mha"], 2, seed=1), host_pool(SHAPES["mha"], 2, "page_first", seed=2)
    copy, one = TorchTransport().copy_pages, np.array([1])
    with pytest.raises(AssertionError, match=r"source pages 3\.\.3 of a pool of 3"):
        copy(device, host, np.array([3]), one, None)
    with pytest.raises(AssertionError, match=r"target pages -1\.\.1"):
        copy(device, host, np.array([1, 2]), np.array([1, -1]), None)
    with pytest.raises(AssertionError, match="1 source pages for 2"):
        copy(device, host, one, np.array([0, 1]), None)
    with pytest.raises(AssertionError, match="layers"):
        copy(device, host, one, one, range(0, 4))
    with pytest.raises(AssertionError, match="different shape"):
        copy(device, host_pool(SHAPES["mla"], 2, "page_first", seed=1), one, one, None)
    with pytest.raises(AssertionError, match="page sizes 4 and 2"):
        copy(device, host_pool(SHAPES["mha"], 2, "page_first", seed=1, page_size=2), one, one, None)
    copy(device, host, np.array([], np.int32), np.array([], np.int32), None)


@pytest.mark.parametrize("name", ["dma", "pack", "sgl_kernel"])
def test_no_transport_reaches_outside_a_pool(name: str) -> None:
    """Addresses are taken as they are below this: a page that is not there would be another's memory."""
    transport: Transport = {
        "dma": DmaTransport(never),
        "pack": PackingTransport(TorchTransport(), never),
        "sgl_kernel": SglKernelTransport(None, TorchTransport()),
    }[name]
    device, host = device_pool(SHAPES["mha"], 2, seed=1), host_pool(SHAPES["mha"], 2, "page_first", seed=2)
    one = np.array([1])
    for sources, targets, message in (([3], [1], "source pages 3"), ([1], [2], "target pages 2")):
        with pytest.raises(AssertionError, match=message):
            transport.copy_pages(device, host, np.array(sources), np.array(targets), None)
    with pytest.raises(AssertionError, match="layers"):
        transport.copy_pages(device, host, one, one, range(1, 4))


def never(pieces: Pieces) -> None:
    raise AssertionError(f"{len(pieces.sizes)} pieces were copied")


@pytest.mark.parametrize("io_backend", ["kernel", "direct", "auto"])
def test_a_cpu_gets_the_torch_transport_and_says_so(io_backend: str) -> None:
    transport = make_transport(io_backend, "cpu")
    assert transport.name == "torch" and "CPU" in transport.note


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="--hicache-io-backend warp.*kernel"):
        make_transport("warp", "cpu")
