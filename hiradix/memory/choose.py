"""Which transport serves an `--hicache-io-backend` on a device."""

from __future__ import annotations

import importlib.util
import logging
from weakref import WeakKeyDictionary

import torch

from hiradix.errors import ConfigError
from hiradix.memory.copy_plan import plan_copies
from hiradix.memory.dma_transport import DmaTransport, cuda_pieces
from hiradix.memory.pools import Pool
from hiradix.memory.transport import PageIds, TorchTransport, Transport

logger = logging.getLogger(__name__)

IO_BACKENDS = ("kernel", "direct", "auto")

# Pieces of this size and more go to the copy engines. From published measurements; not calibrated here.
DMA_PIECE_BYTES = 32 << 10


def choose_transport(io_backend: str, device: torch.device) -> Transport:
    """See `make_transport`."""
    if io_backend not in IO_BACKENDS:
        known = ", ".join(IO_BACKENDS)
        raise ConfigError(f"--hicache-io-backend {io_backend}: not one of the transports here ({known})")
    if device.type != "cuda":
        transport: Transport = TorchTransport(f"pools on {device.type.upper()} are copied with torch")
    else:
        transport = _for_cuda(io_backend)
    name, note = transport.name, transport.note
    logger.info("--hicache-io-backend %s on %s: %s transport, %s", io_backend, device, name, note)
    return transport


def _for_cuda(io_backend: str) -> Transport:
    kernel = _kernel() if io_backend != "direct" else None
    copy_engines = _copy_engines() if io_backend != "kernel" or kernel is None else None
    if kernel is not None and copy_engines is not None:
        return PieceSizeTransport(kernel, copy_engines)
    return kernel or copy_engines or TorchTransport("neither triton nor a CUDA runtime library was found")


def _kernel() -> Transport | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from hiradix.memory.triton_transport import TritonTransport

    return TritonTransport("the strided copy kernel reads pinned memory in place")


def _copy_engines() -> Transport | None:
    pieces = cuda_pieces()
    if pieces is None:
        return None
    return DmaTransport(pieces, "cudaMemcpyBatchAsync" if pieces.batched else "cudaMemcpyAsync per piece")


class PieceSizeTransport:
    """The copy engines for pools whose contiguous pieces are large, the kernel for the rest."""

    name = "auto"

    def __init__(self, kernel: Transport, copy_engines: Transport) -> None:
        self.note = f"copy engines from {DMA_PIECE_BYTES} byte pieces on, the kernel below (not calibrated)"
        self._kernel = kernel
        self._copy_engines = copy_engines
        self._chosen: WeakKeyDictionary[Pool, WeakKeyDictionary[Pool, Transport]] = WeakKeyDictionary()

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        by_dst = self._chosen.setdefault(src, WeakKeyDictionary())
        if dst not in by_dst:
            smallest = min(plan.collapsed().src.row_bytes for plan in plan_copies(src, dst))
            by_dst[dst] = self._copy_engines if smallest >= DMA_PIECE_BYTES else self._kernel
        by_dst[dst].copy_pages(src, dst, src_pages, dst_pages, layers)
