"""The DMA transport with memmove for a copy engine: the pieces it cuts are the copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hiradix.memory import LAYOUTS, KVShape, TorchTransport, choose, dma_transport, packing_transport
from hiradix.memory.copy_plan import plan_copies
from hiradix.memory.dma_transport import DmaTransport, Pieces, cut, memmove_pieces
from hiradix.memory.packing_transport import PackingTransport
from hiradix.memory.pools import Pool
from tests.memory.pool_cases import SHAPES, contents, device_pool, host_pool

NUM_PAGES = 5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_layout_and_kind_as_torch_copies_it(layout: str, name: str) -> None:
    shape = SHAPES[name]
    device, twin = device_pool(shape, NUM_PAGES, 1), device_pool(shape, NUM_PAGES, 1)
    host, reference = host_pool(shape, NUM_PAGES, layout, 2), host_pool(shape, NUM_PAGES, layout, 2)
    dma, torch_copy = DmaTransport(memmove_pieces), TorchTransport()
    device_pages, host_pages, into = np.array([4, 5, 1], np.int32), np.array([1, 2, 0]), np.array([2, 3, 5])
    dma.copy_pages(device, host, device_pages, host_pages, None)
    torch_copy.copy_pages(device, reference, device_pages, host_pages, None)
    assert torch.equal(host.buffer, reference.buffer)
    last = range(shape.num_layers - 1, shape.num_layers)
    dma.copy_pages(host, device, host_pages, into, last)
    torch_copy.copy_pages(reference, twin, host_pages, into, last)
    assert all(seen.equal(want) for seen, want in zip(contents(device), contents(twin), strict=True))
    dma.copy_pages(host, device, host_pages[:0], into[:0], None)


def test_runs_of_pages_are_one_piece() -> None:
    """layer_first on both sides: consecutive pages of a layer are one run, of 2 arrays x 3 layers."""
    shape = SHAPES["mha"]
    device, host = device_pool(shape, NUM_PAGES, 1), host_pool(shape, NUM_PAGES, "layer_first", 2)
    (plan,) = (plan.collapsed() for plan in plan_copies(device, host))
    pieces = cut(plan, np.array([1, 2, 3, 5]), np.array([0, 1, 2, 3]), range(3)).merged()
    page_bytes = plan.src.row_bytes
    assert sorted(pieces.sizes.tolist()) == [page_bytes] * 6 + [3 * page_bytes] * 6


def test_only_what_continues_on_both_sides_is_merged() -> None:
    pieces = Pieces(np.array([0, 16, 32, 64]), np.array([100, 116, 200, 216]), np.full(4, 16)).merged()
    assert pieces.dst.tolist() == [0, 32, 64] and pieces.src.tolist() == [100, 200, 216]
    assert pieces.sizes.tolist() == [32, 16, 16]


@pytest.mark.parametrize("packed", [False, True])
def test_the_engines_are_called_with_the_pools_device_current(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, pages = SHAPES["mha"], np.array([1, 2])
    device, host = device_pool(shape, NUM_PAGES, 1), host_pool(shape, NUM_PAGES, "page_first", 2)
    inside: list[tuple[Pool, Pool]] = []
    seen: list[list[tuple[Pool, Pool]]] = []

    @contextmanager
    def device_of(src: Pool, dst: Pool) -> Iterator[None]:
        inside.append((src, dst))
        yield
        inside.pop()

    for module in (dma_transport, packing_transport):
        monkeypatch.setattr(module, "device_of", device_of)

    def engines(pieces: Pieces) -> None:
        seen.append([*inside])

    transport = PackingTransport(TorchTransport(), engines) if packed else DmaTransport(engines)
    transport.copy_pages(device, host, pages, pages, None)
    assert seen and all(pools == [(device, host)] for pools in seen)


class Recorder:
    """A transport that only remembers that it was asked."""

    note = ""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self._calls = calls

    def copy_pages(self, *args: object) -> None:
        self._calls.append(self.name)


def test_auto_goes_by_piece_size() -> None:
    """32 KiB per page and layer: one piece in page_first_direct, 2 KiB rows in page_first."""
    shape = KVShape(2, 8, 128, 128, torch.bfloat16)
    device, one = device_pool(shape, 1, 1, page_size=16), np.array([0])
    for layout, want in (("page_first_direct", "dma"), ("page_first", "kernel")):
        calls: list[str] = []
        transport = choose.PieceSizeTransport(Recorder("kernel", calls), Recorder("dma", calls))
        host = host_pool(shape, 1, layout, 2, page_size=16)
        transport.copy_pages(device, host, one, one, None)
        transport.copy_pages(host, device, one, one, range(1))
        assert calls == [want, want]


class Engines:
    """Copy engines of a device that can, or cannot, use host addresses."""

    batched = True

    def __init__(self, mapped: bool = True) -> None:
        self._mapped = mapped

    def reads_host_addresses(self, device: int) -> bool:
        return self._mapped

    def __call__(self, pieces: Pieces) -> None:
        raise AssertionError("nothing is copied here")


@pytest.mark.parametrize(
    ("io_backend", "kernel", "engines", "want"),
    [
        ("kernel", "triton", Engines(), "kernel"),
        ("kernel", "triton", None, "triton"),
        ("kernel", None, Engines(), "dma"),
        ("kernel", "triton", Engines(mapped=False), "dma"),
        ("kernel", None, None, "torch"),
        ("direct", "triton", Engines(), "dma"),
        ("direct", "triton", None, "torch"),
        ("auto", "triton", Engines(), "auto"),
        ("auto", "triton", None, "triton"),
        ("auto", "triton", Engines(mapped=False), "dma"),
        ("auto", None, Engines(), "dma"),
        ("auto", None, None, "torch"),
    ],
)
def test_cuda_takes_the_best_that_is_there(
    io_backend: str,
    kernel: str | None,
    engines: Engines | None,
    want: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose, "_kernel", lambda: None if kernel is None else Recorder(kernel, []))
    monkeypatch.setattr(choose, "_copy_engines", lambda: engines)
    monkeypatch.setattr(choose, "find_kernels", lambda: None)
    assert choose.make_transport(io_backend, "cuda").name == want
