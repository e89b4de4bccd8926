"""What is asked of CUDA's runtime, through real C calls: arguments, versions, errors, registrations."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiradix.errors import CacheError
from hiradix.memory import LAYOUTS, KVShape, TorchTransport, transport
from hiradix.memory.cuda_runtime import CudaRuntime
from hiradix.memory.dma_transport import CudaPieces, DmaTransport, Pieces
from hiradix.memory.host_memory import OS_PAGE, pin_chunks
from hiradix.memory.packing_transport import PackingTransport
from tests.memory.fake_cudart import (
    NEWER_DRIVER,
    OUT_OF_MEMORY,
    FakeCudart,
    on_stream,
    pinned_pool,
)
from tests.memory.pool_cases import SHAPES, device_pool, fill, host_pool


def two_pieces(target: np.ndarray, source: np.ndarray) -> Pieces:
    """8 bytes from byte 8 to the front, and 4 from the front to byte 32."""
    begin, into = source.ctypes.data, target.ctypes.data
    return Pieces(np.array([into, into + 32]), np.array([begin + 8, begin]), np.array([8, 4]))


@pytest.mark.parametrize(
    ("runtime", "driver", "stream", "call"),
    [
        (12040, 13000, 7, "each"),
        (12080, 12080, 7, "batch"),
        (13000, 13000, 7, "batch"),
        (12080, 12040, 7, "each"),  # torch brings its runtime along, the driver is the machine's
        (13000, 13000, 0, "each"),  # the batch call refuses the legacy default stream
    ],
)
def test_copies_by_version_and_stream(
    runtime: int, driver: int, stream: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_stream(monkeypatch, stream)
    library = FakeCudart(runtime, driver)
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    CudaPieces(CudaRuntime(library))(two_pieces(target, source))
    assert target[:8].tolist() == list(range(8, 16)) and target[32:37].tolist() == [0, 1, 2, 3, 0]
    assert {name for name, _ in library.calls} == {call}
    assert {where for _, where in library.calls} == {stream or None}


@pytest.mark.parametrize("runtime", [12040, 13000])
def test_a_refused_copy_is_an_error_and_leaves_none_behind(
    runtime: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: torch's check of the thread's next kernel launch would have found the error of this copy."""
    on_stream(monkeypatch, 7)
    library, source, target = FakeCudart(runtime), np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    library.registered[target.ctypes.data + 4] = 2
    with pytest.raises(CacheError, match="failed with code 1"):
        CudaPieces(CudaRuntime(library))(two_pieces(target, source))
    assert library.last_error == 0


def test_a_driver_without_batches_gets_one_piece_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    on_stream(monkeypatch, 7)
    library = FakeCudart()
    library.refuse_batches = NEWER_DRIVER
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    pieces = CudaPieces(CudaRuntime(library))
    assert pieces.batched
    pieces(two_pieces(target, source))
    assert target[:8].tolist() == list(range(8, 16)) and not pieces.batched
    assert library.calls == [("each", 7)] * 2 and library.last_error == 0


def test_the_device_asked_about_is_the_one_named() -> None:
    pieces = CudaPieces(CudaRuntime(FakeCudart()))
    assert pieces.reads_host_addresses(3) and not pieces.reads_host_addresses(0)


def test_addresses_are_not_cut_to_32_bits_and_a_refused_registration_leaves_no_error() -> None:
    """Found: the error of a chunk that was too large stayed, though the smaller ones were accepted."""
    library = FakeCudart()
    library.max_register = 9 << 30
    begin = (1 << 46) + OS_PAGE
    addresses = pin_chunks(CudaRuntime(library), begin, 40 << 30, 1 << 20)
    assert addresses == [begin + at for at in range(0, 40 << 30, 8 << 30)]
    assert sum(library.registered.values()) == 40 << 30 and library.last_error == 0


def test_memory_that_cannot_be_registered_leaves_no_error() -> None:
    library = FakeCudart()
    library.max_register = 1
    with pytest.raises(CacheError, match=f"code {OUT_OF_MEMORY}"):
        pin_chunks(CudaRuntime(library), 0, 2 << 30, 1 << 20)
    assert library.registered == {} and library.last_error == 0


def test_memory_is_pinned_for_its_device_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeCudart()
    host = pinned_pool(monkeypatch, library, 4 * PAGE, SHAPE, NUM_PAGES, 16)
    assert sum(library.registered.values()) == host.layout.num_bytes
    assert set(library.registered_on) == {torch.device("cuda", 3)}
    del host
    gc.collect()
    assert library.registered == {} and library.last_error == 0


# -- one copy, one registration --------------------------------------------------------------------------

NUM_PAGES = 24
PAGE = OS_PAGE  # keys, and values, of 16 tokens of the shape below
SHAPE = KVShape(2, 4, 16, 16, torch.bfloat16)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    first=st.integers(0, NUM_PAGES - 1),
    length=st.integers(1, NUM_PAGES),
    chunk=st.integers(1, 6),
    packed=st.booleans(),
)
def test_no_copy_spans_two_registrations(
    layout: str, first: int, length: int, chunk: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: pages that follow each other were merged into one piece over the edge of a registration."""
    on_stream(monkeypatch, 7)
    library, pages = FakeCudart(), np.arange(first, min(NUM_PAGES, first + length))
    host = pinned_pool(monkeypatch, library, chunk * PAGE, SHAPE, NUM_PAGES, 16, layout=layout)
    assert len(library.registered) > 1 and len(host.cuts) == len(library.registered) - 1
    fill([host.buffer], 2)
    device, reference = device_pool(SHAPE, NUM_PAGES, 1, 16), host_pool(SHAPE, NUM_PAGES, layout, 2, 16)
    engines = CudaPieces(CudaRuntime(library))
    dma = PackingTransport(TorchTransport(), engines) if packed else DmaTransport(engines)
    dma.copy_pages(device, host, pages + 1, pages, None)
    TorchTransport().copy_pages(device, reference, pages + 1, pages, None)
    assert torch.equal(host.buffer, reference.buffer)
    dma.copy_pages(host, device, pages, pages[::-1] + 1, range(1, 2))


def test_pages_that_follow_each_other_are_one_piece_up_to_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    on_stream(monkeypatch, 7)
    library = FakeCudart()
    host = pinned_pool(monkeypatch, library, 6 * PAGE, SHAPE, NUM_PAGES, 16, layout="page_blob")
    device, pages = device_pool(SHAPE, NUM_PAGES, 1, 16), np.arange(4)
    twin = host_pool(SHAPE, NUM_PAGES, "page_blob", 2, 16)
    engines = CudaPieces(CudaRuntime(library))
    PackingTransport(TorchTransport(), engines).copy_pages(device, host, pages + 1, pages, None)
    assert [num_bytes for _, _, num_bytes in library.pieces] == [6 * PAGE, 2 * PAGE]
    library.pieces.clear()
    PackingTransport(TorchTransport(), engines).copy_pages(device, twin, pages + 1, pages, None)
    assert [num_bytes for _, _, num_bytes in library.pieces] == [8 * PAGE]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_torchs_runs_end_at_the_edge_of_a_registration(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = pinned_pool(monkeypatch, FakeCudart(), 5 * PAGE, SHAPE, NUM_PAGES, 16, layout=layout)
    assert host.cut_pages, "no page of it begins a registration"
    seen: list[tuple[int, int, int]] = []
    dims: set[int] = set()

    def copy_runs(source: torch.Tensor, target: torch.Tensor, runs: list[tuple[int, int, int]]) -> None:
        seen.extend(runs)
        dims.update((source.dim(), target.dim()))

    monkeypatch.setattr(transport, "_copy_runs", copy_runs)
    monkeypatch.setattr(transport, "_RUN_BYTES", 0)
    device, pages = device_pool(SHAPE, NUM_PAGES, 1, 16), np.arange(NUM_PAGES)
    TorchTransport().copy_pages(device, host, pages + 1, pages, None)
    TorchTransport().copy_pages(host, device, pages, pages + 1, None)
    assert dims == {4}, "runs of several layers at once: their layers may be in several registrations"
    to_host, to_device = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    for runs, side in ((to_host, 1), (to_device, 0)):
        for run in runs:
            inside = set(range(run[side] + 1, run[side] + run[2]))
            assert not inside & host.cut_pages, run
    assert len(host.cut_pages - {0}) == len(set(to_host)) - 1


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_kind_of_page_has_its_cuts_between_pages(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in SHAPES.items():
        host = pinned_pool(monkeypatch, FakeCudart(), 1, shape, 4096, 4, layout=layout)
        assert len(host.cuts) == 0 or host.cut_pages, name
        begin = host.buffer.data_ptr()
        assert all(set(host.layout.pages_at([cut - begin])) & host.cut_pages for cut in host.cuts), name
