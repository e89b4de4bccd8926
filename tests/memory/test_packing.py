"""Packing before the copy engines: with memmove for engines, byte for byte what torch copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.memory import LAYOUTS, KVShape, TorchTransport
from hiradix.memory.dma_transport import Pieces, memmove_pieces
from hiradix.memory.packing_transport import PackingTransport
from tests.memory.pool_cases import SHAPES, contents, device_pool, host_pool

NUM_PAGES = 7


class Engine:
    """memmove that remembers how many pieces it was given at a time, and of which sizes."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, pieces: Pieces) -> None:
        self.calls.append(pieces.sizes.tolist())
        memmove_pieces(pieces)


@pytest.mark.parametrize("staging_pages", [1, 3, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_packed_pages_are_those_torch_copies(name: str, layout: str, staging_pages: int) -> None:
    shape = SHAPES[name]
    device = device_pool(shape, NUM_PAGES, 1)
    host, reference = (host_pool(shape, NUM_PAGES, layout, 2) for _ in range(2))
    engine = Engine()
    packing = PackingTransport(TorchTransport(), engine, staging_bytes=staging_pages * host.page_bytes)
    device_pages, host_pages = np.array([5, 1, 2, 7], np.int32), np.array([0, 4, 2, 3])
    packing.copy_pages(device, host, device_pages, host_pages, None)
    TorchTransport().copy_pages(device, reference, device_pages, host_pages, None)
    assert host.buffer.equal(reference.buffer)
    assert len(engine.calls) == -(-4 // min(staging_pages, NUM_PAGES))
    smallest = min(piece.num_bytes for piece in host.layout.pieces)
    assert min(size for call in engine.calls for size in call) >= smallest, "whole pieces of pages only"


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(sorted(LAYOUTS)), st.integers(1, 5))
def test_any_lists(data: st.DataObject, layout: str, staging_pages: int) -> None:
    shape = KVShape(2, 2, 8, 4, torch.float16)
    targets = data.draw(st.lists(st.integers(0, NUM_PAGES - 1), unique=True))
    sources = [data.draw(st.integers(0, NUM_PAGES)) for _ in targets]
    device = device_pool(shape, NUM_PAGES, 1)
    host, reference = (host_pool(shape, NUM_PAGES, layout, 2) for _ in range(2))
    packing = PackingTransport(
        TorchTransport(), memmove_pieces, staging_bytes=staging_pages * host.page_bytes
    )
    pages = np.array(sources, np.int64), np.array(targets, np.int64)
    packing.copy_pages(device, host, *pages, None)
    TorchTransport().copy_pages(device, reference, *pages, None)
    assert host.buffer.equal(reference.buffer)


def test_loads_and_single_layers_are_the_kernels() -> None:
    shape, engine = SHAPES["mha"], Engine()
    device, twin = (device_pool(shape, NUM_PAGES, 1) for _ in range(2))
    host = host_pool(shape, NUM_PAGES, "page_first", 2)
    packing, two = PackingTransport(TorchTransport(), engine), np.array([3, 1])
    packing.copy_pages(host, device, two, two, None)
    packing.copy_pages(device, host, two, np.array([0, 5]), range(1, 2))
    TorchTransport().copy_pages(host, twin, two, two, None)
    assert engine.calls == []
    assert all(seen.equal(want) for seen, want in zip(contents(device), contents(twin), strict=True))


def test_the_staging_buffer_is_made_once_and_dies_with_its_pool() -> None:
    device, host = device_pool(SHAPES["mha"], 3, 1), host_pool(SHAPES["mha"], 3, "page_first", 2)
    packing, one = PackingTransport(TorchTransport(), memmove_pieces), np.array([1])
    packing.copy_pages(device, host, one, one, None)
    made = packing._staging[host]
    packing.copy_pages(device, host, one, one, None)
    assert packing._staging[host] is made and made.num_pages == 3
    del host
    assert len(packing._staging) == 0
