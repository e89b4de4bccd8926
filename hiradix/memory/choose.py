"""Chooses the transport for an `--hicache-io-backend` on a device."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence

import torch

from hiradix.errors import ConfigError
from hiradix.memory.calibrate import CalibratedTransport
from hiradix.memory.copy_plan import plan_copies
from hiradix.memory.dma_transport import CopyPieces, DmaTransport, cuda_pieces
from hiradix.memory.packing_transport import PackingTransport
from hiradix.memory.pools import HostPool, Pool
from hiradix.memory.prove import fault_of
from hiradix.memory.sgl_transport import SglKernelTransport, find_kernels
from hiradix.memory.transport import PageIds, PerPair, TorchTransport, Transport

logger = logging.getLogger(__name__)

IO_BACKENDS = ("kernel", "direct", "auto")

# Pieces of this size and more go to the copy engines where nothing was measured. From published measurements.
DMA_PIECE_BYTES = 32 << 10


def make_transport(
    io_backend: str, device: torch.device | str, pools: tuple[Pool, HostPool] | None = None
) -> Transport:
    """The transport for `--hicache-io-backend` (kernel, direct or auto) and pools on `device`.

    On a CPU, and where nothing else is found, that is the torch transport; its `note` says why. pools: the
    device pool and the host pool that it will serve, which hold nothing yet. On CUDA, with pools, what does
    not copy byte for byte between them is passed over (see `hiradix.memory.prove`), so that kernels are
    compiled and buffers made too; and with auto the transports are measured between them (see
    `CalibratedTransport`). Without, auto goes by the size of contiguous pieces.
    """
    device = torch.device(device)
    if io_backend not in IO_BACKENDS:
        known = ", ".join(IO_BACKENDS)
        raise ConfigError(f"--hicache-io-backend {io_backend}: not one of the transports here ({known})")
    if device.type != "cuda":
        transport: Transport = TorchTransport(f"pools on {device.type.upper()} are copied with torch")
    else:
        transport = _for_cuda(io_backend, device, pools)
    name, note = transport.name, transport.note
    logger.info("--hicache-io-backend %s on %s: %s transport, %s", io_backend, device, name, note)
    if pools is not None and isinstance(transport, CalibratedTransport):
        transport.calibrate(*pools)
    return transport


def _for_cuda(io_backend: str, device: torch.device, pools: tuple[Pool, HostPool] | None) -> Transport:
    """The first transport that works, of those there are, best first; for auto all that work."""
    pieces = _copy_engines()
    direct = _direct(pieces)
    if io_backend == "direct":
        return next(_sound([direct], pools), TorchTransport("the copy engines cannot be used"))
    is_mapped = _is_mapped(pieces, device)
    kernel, sgl = (_kernel(), _sgl()) if is_mapped else (None, None)
    packing = _packing(kernel, pieces)
    if io_backend == "kernel":
        reason = "neither triton, sgl_kernel nor the copy engines can be used"
        return next(_sound([packing, kernel, sgl, direct], pools), TorchTransport(reason))
    found = list(_sound([direct, kernel, packing, sgl], pools))
    if len(found) < 2:
        return found[0] if found else TorchTransport("there is nothing to choose from")
    small = next((each for each in (packing, kernel) if each in found), found[1])
    return CalibratedTransport(found, PieceSizeTransport(small, found[0]))


def _sound(
    transports: Sequence[Transport | None], pools: tuple[Pool, HostPool] | None
) -> Iterator[Transport]:
    """The transports that exist and copy correctly between the pools, tried one after the other."""
    for transport in transports:
        if transport is None:
            continue
        fault = None if pools is None else fault_of(transport, *pools)
        if fault is None:
            yield transport
        else:
            logger.warning("%s transport is not used: %s", transport.name, fault)


def _kernel() -> Transport | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from hiradix.memory.triton_transport import TritonTransport

    return TritonTransport("the strided copy kernel reads pinned memory in place")


def _is_mapped(pieces: CopyPieces | None, device: torch.device) -> bool:
    """Whether a kernel may read pinned memory in place; where nobody can tell, it is taken to."""
    ask = getattr(pieces, "reads_host_addresses", None)
    if ask is None or ask(device.index or 0):
        return True
    logger.warning("the device cannot use host addresses of pinned memory: no copy kernel")
    return False


def _sgl() -> Transport | None:
    kernels = find_kernels()
    return None if kernels is None else SglKernelTransport(kernels, TorchTransport(), "SGLang's copy kernels")


def _copy_engines() -> CopyPieces | None:
    return cuda_pieces()


def _direct(pieces: CopyPieces | None) -> Transport | None:
    if pieces is None:
        return None
    batched = getattr(pieces, "batched", False)
    return DmaTransport(pieces, "cudaMemcpyBatchAsync" if batched else "cudaMemcpyAsync per piece")


def _packing(kernel: Transport | None, pieces: CopyPieces | None) -> Transport | None:
    """The kernel, that packs small pieces on the device before they go to the host."""
    if kernel is None or pieces is None:
        return None
    packing = PackingTransport(kernel, pieces, "packs on the device")
    note = "the strided copy kernel; small pieces for the host are packed on the device, then moved whole"
    return PieceSizeTransport(packing, kernel, "kernel", note)


class PieceSizeTransport:
    """One transport for pools whose contiguous pieces are small, another from `DMA_PIECE_BYTES` on."""

    def __init__(self, small: Transport, large: Transport, name: str = "auto", note: str = "") -> None:
        self.name = name
        self.note = note or f"{large.name} from {DMA_PIECE_BYTES} byte pieces on, {small.name} below"
        self._small = small
        self._large = large
        self._chosen: PerPair[Transport] = PerPair()

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        chosen = self._chosen.of(src, dst, self._choose)
        chosen.copy_pages(src, dst, src_pages, dst_pages, layers)

    def _choose(self, src: Pool, dst: Pool) -> Transport:
        smallest = min(plan.collapsed().src.row_bytes for plan in plan_copies(src, dst))
        return self._large if smallest >= DMA_PIECE_BYTES else self._small
