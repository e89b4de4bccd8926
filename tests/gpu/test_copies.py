"""Every transport there is, byte for byte as torch copies on a CPU: layouts, kinds, types, far addresses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hiradix.memory import (
    LAYOUTS,
    DevicePool,
    HostPool,
    KVShape,
    TorchTransport,
    Transport,
    host_memory,
    make_transport,
)
from hiradix.memory.dma_transport import CudaPieces, DmaTransport, cuda_pieces, memmove_pieces
from hiradix.memory.packing_transport import PackingTransport
from hiradix.memory.prove import fault_of, own_stream
from hiradix.memory.sgl_transport import SglKernelTransport, find_kernels
from tests.gpu.pools import make_pair, settle
from tests.memory.pool_cases import DTYPES, SHAPES

NUM_PAGES = 9
NAMES = ("torch", "dma", "dma one by one", "triton", "triton s1", "pack", "sgl_kernel", "auto")


def engines(device: torch.device, *, batched: bool = True) -> CudaPieces:
    """The copy engines; memmove's on a CPU."""
    if device.type == "cpu":
        return memmove_pieces  # type: ignore[return-value]
    pieces = cuda_pieces()
    assert pieces is not None, "no libcudart beside torch: --hicache-io-backend direct would be torch"
    if batched and not pieces.batched:
        pytest.skip("this driver has no cudaMemcpyBatchAsync")
    pieces.batched = batched
    return pieces


def transport_of(name: str, device: torch.device) -> Transport:
    """The transport called `name`, or a skip."""
    if name == "torch":
        return TorchTransport()
    if name.startswith("dma"):
        return DmaTransport(engines(device, batched=name == "dma"))
    if name == "sgl_kernel":
        kernels = find_kernels()
        if kernels is None:
            pytest.skip("sgl_kernel is not installed")
        return SglKernelTransport(kernels, TorchTransport())
    if name == "auto":
        return make_transport("auto", device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton is not interpreting")
    from hiradix.memory import triton_transport  # on a GPU its absence is a failure, and not a skip

    kernel: Transport = triton_transport.TritonTransport("", stages=1 if name == "triton s1" else None)
    return PackingTransport(kernel, engines(device)) if name == "pack" else kernel


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_and_kind(name: str, kind: str, layout: str, device: torch.device) -> None:
    """All layers to the host, in another order and in runs; back to other pages layer by layer."""
    pair, transport = make_pair(SHAPES[kind], NUM_PAGES, device, layout), transport_of(name, device)
    with own_stream(device):
        pair.write(transport, np.array([5, 1, 2, 3, 9], np.int32), np.array([8, 3, 4, 5, 0], np.int32))
        pair.assert_same()
        for layer in range(SHAPES[kind].num_layers):
            pair.load(transport, np.array([0, 3, 8]), np.array([4, 7, 1]), range(layer, layer + 1))
        pair.assert_same()
        pair.load(transport, np.array([1, 2]), np.array([8, 9]), None)
        pair.assert_same()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("dma", "triton", "pack"))
def test_every_type(name: str, dtype: torch.dtype, device: torch.device) -> None:
    pair = make_pair(KVShape(2, 2, 16, 16, dtype), NUM_PAGES, device)
    transport, pages = transport_of(name, device), np.array([1, 2, 7])
    with own_stream(device):
        pair.write(transport, pages, pages)
        pair.load(transport, pages, pages[::-1].copy(), None)
        pair.assert_same()


@pytest.mark.parametrize("name", ("dma", "triton", "pack"))
def test_real_sizes(name: str, device: torch.device) -> None:
    """An 8B model's pages of 64 tokens, hundreds of them; fewer on a CPU."""
    num_pages = 200 if device.type == "cuda" else 5
    shape = KVShape(4, 8, 128, 128, torch.bfloat16)
    pair, transport = make_pair(shape, num_pages, device, page_size=64), transport_of(name, device)
    order = np.random.default_rng(0).permutation(num_pages)
    with own_stream(device):
        pair.write(transport, order[::2] + 1, order[: len(order[::2])])
        pair.load(transport, order[1::2], order[: len(order[1::2])] + 1, None)
        pair.assert_same()


@pytest.mark.parametrize("name", ("dma", "triton"))
def test_addresses_beyond_4_gib(name: str, cuda: torch.device) -> None:
    """One layer of 2.6 GB each of keys and values: offsets that 32 bits do not hold, on both sides."""
    shape, num_pages = KVShape(1, 8, 128, 128, torch.bfloat16), 20_000
    pool = DevicePool(shape, num_pages, 64, cuda)
    host = HostPool(shape, num_pages, 64, layout="layer_first", device=cuda)
    transport, last = transport_of(name, cuda), num_pages - 1
    values = torch.randint(0, 255, (host.page_bytes,), dtype=torch.uint8)
    pool.layer_views(0)[0][num_pages].view(torch.uint8).view(-1).copy_(values[: host.page_bytes // 2])
    pool.layer_views(1)[0][num_pages].view(torch.uint8).view(-1).copy_(values[host.page_bytes // 2 :])
    with own_stream(cuda):
        transport.copy_pages(pool, host, np.array([num_pages]), np.array([last]), None)
        settle(cuda)
        assert b"".join(bytes(view) for view in host.page_views(last)) == values.numpy().tobytes()
        transport.copy_pages(host, pool, np.array([last]), np.array([num_pages - 1]), None)
        settle(cuda)
    for array in range(2):
        views = pool.layer_views(array)[0]
        assert torch.equal(views[num_pages - 1], views[num_pages])


@contextmanager
def small_registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_memory, "_REGISTER_CHUNK", 1 << 16)
    monkeypatch.setattr(host_memory, "_MIN_REGISTER_CHUNK", 1 << 12)
    yield


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ("torch", "dma", "dma one by one", "triton", "pack"))
def test_runs_of_pages_over_many_registrations(
    name: str, layout: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory registered in small chunks, and all pages in order: every copy has to stop at an edge."""
    with small_registrations(monkeypatch):
        pair = make_pair(KVShape(2, 4, 16, 16, torch.bfloat16), 256, cuda, layout, page_size=16)
    assert len(pair.host.cuts) > 4
    transport, pages = transport_of(name, cuda), np.arange(256)
    with own_stream(cuda):
        pair.write(transport, pages + 1, pages)
        pair.load(transport, pages, pages[::-1] + 1, None)
        pair.load(transport, pages, pages + 1, range(1, 2))
        pair.assert_same()


@pytest.mark.parametrize("io_backend", ["kernel", "direct", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_chosen_at_start_works(io_backend: str, layout: str, device: torch.device) -> None:
    pair = make_pair(KVShape(3, 8, 64, 64, torch.bfloat16), 12, device, layout, page_size=16)
    chosen = make_transport(io_backend, device, (pair.device, pair.host))
    assert chosen.name != "torch" or device.type == "cpu", chosen.note
    assert fault_of(chosen, pair.device, pair.host) is None
