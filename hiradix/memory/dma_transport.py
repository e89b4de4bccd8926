"""Page copies by the copy engines: contiguous pieces handed over as one list, no SMs taken."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from hiradix.errors import CacheError, ConfigError
from hiradix.memory.copy_plan import plan_copies
from hiradix.memory.cuda_runtime import NEEDS_NEWER_DRIVER, Addresses, CudaRuntime, find_runtime
from hiradix.memory.pools import Pool
from hiradix.memory.transport import PageIds, PerPair, checked_copy
from hiradix.triton_kernels.sides import PlannedCopy, Side

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pieces:
    """Copies of `sizes[i]` bytes from address src[i] to address dst[i]; int64 [n] each, in no order."""

    dst: Addresses
    src: Addresses
    sizes: Addresses

    def merged(self, cuts: Sequence[int] = ()) -> Pieces:
        """Neighbours that continue each other on both sides made one piece, but for those that begin at an
        address of `cuts`: no copy may go over the edge of a registration."""
        if len(self.sizes) == 0:
            return self
        joins = (self.dst[1:] == self.dst[:-1] + self.sizes[:-1]) & (
            self.src[1:] == self.src[:-1] + self.sizes[:-1]
        )
        if cuts:
            joins &= ~(np.isin(self.dst[1:], cuts) | np.isin(self.src[1:], cuts))
        heads = np.flatnonzero(np.concatenate([[True], ~joins]))
        return Pieces(self.dst[heads], self.src[heads], np.add.reduceat(self.sizes, heads))


CopyPieces = Callable[[Pieces], None]


class DmaTransport:
    """Cuts a copy into contiguous pieces and hands them to `copy_pieces`, on the current stream."""

    name = "dma"

    def __init__(self, copy_pieces: CopyPieces, note: str = "") -> None:
        self.note = note
        self._copy_pieces = copy_pieces
        self._plans: PerPair[tuple[PlannedCopy, ...]] = PerPair()

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        span = checked_copy(src, dst, src_pages, dst_pages, layers)
        if not span:
            return
        cuts = (*src.cuts, *dst.cuts)
        with device_of(src, dst):
            for plan in self._plans.of(src, dst, _collapsed_plans):
                self._copy_pieces(cut(plan, src_pages, dst_pages, span).merged(cuts))


def device_of(src: Pool, dst: Pool) -> AbstractContextManager[object]:
    """The pools' CUDA device made current, whose current stream is meant; nothing on a CPU."""
    found = [pool.device for pool in (src, dst) if pool.device.type == "cuda"]
    return torch.cuda.device(found[0]) if found else nullcontext()


def _collapsed_plans(src: Pool, dst: Pool) -> tuple[PlannedCopy, ...]:
    on_device = "cuda" in (src.device.type, dst.device.type)
    if on_device and not (src.reachable and dst.reachable):
        raise ConfigError("--hicache-io-backend direct: the host pool is not pinned")
    return tuple(plan.collapsed() for plan in plan_copies(src, dst))


def cut(plan: PlannedCopy, src_pages: PageIds, dst_pages: PageIds, layers: range) -> Pieces:
    """The pieces of a copy: one per plane, page and row."""
    planes = slice(layers.start * plan.per_layer, layers.stop * plan.per_layer)
    dst, src = _addresses(plan.dst, dst_pages, planes), _addresses(plan.src, src_pages, planes)
    return Pieces(dst, src, np.full(len(dst), plan.src.row_bytes, np.int64))


def _addresses(side: Side, pages: PageIds, planes: slice) -> Addresses:
    """The address of every row, by plane, page, row."""
    bases = np.array(side.bases[planes], np.int64)[:, None, None]
    at = np.asarray(pages, np.int64)[None, :, None] * side.page
    rows = np.arange(side.rows, dtype=np.int64)[None, None, :] * side.row
    addresses: Addresses = (bases + at + rows).reshape(-1)
    return addresses


def memmove_pieces(pieces: Pieces) -> None:
    """Copy on the CPU, done on return. One call per piece: for tests and small copies."""
    for dst, src, num_bytes in zip(
        pieces.dst.tolist(), pieces.src.tolist(), pieces.sizes.tolist(), strict=True
    ):
        ctypes.memmove(dst, src, num_bytes)


class CudaPieces:
    """Copies pieces on the current CUDA stream: one cudaMemcpyBatchAsync, or a cudaMemcpyAsync per piece.

    The batch call takes no legacy default stream. batched: whether it is used; no more once it was refused
    for want of a newer driver. Raises CacheError with the code.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self.batched = runtime.has_batches

    def reads_host_addresses(self, device: int) -> bool:
        """Whether kernels on the device may use the host's own address of registered memory."""
        return self._runtime.reads_host_addresses(device)

    def __call__(self, pieces: Pieces) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if self.batched and stream != 0 and len(pieces.sizes) > 1:
            self._copy_batch(pieces, stream)
        else:
            self._copy_each(pieces, stream)

    def _copy_batch(self, pieces: Pieces, stream: int) -> None:
        code = self._runtime.copy_batch(pieces.dst, pieces.src, pieces.sizes, stream)
        if code in NEEDS_NEWER_DRIVER:
            logger.warning("cudaMemcpyBatchAsync: code %d, pieces are copied one by one", code)
            self.batched = False
            self._copy_each(pieces, stream)
        elif code:
            raise CacheError(f"cudaMemcpyBatchAsync of {len(pieces.sizes)} pieces failed with code {code}")

    def _copy_each(self, pieces: Pieces, stream: int) -> None:
        for dst, src, num_bytes in zip(
            pieces.dst.tolist(), pieces.src.tolist(), pieces.sizes.tolist(), strict=True
        ):
            code = self._runtime.copy(dst, src, num_bytes, stream)
            if code:
                raise CacheError(f"cudaMemcpyAsync of {num_bytes} bytes failed with code {code}")


def cuda_pieces() -> CudaPieces | None:
    """The copy engines through the CUDA runtime that torch has loaded; None where there is none."""
    runtime = find_runtime()
    return None if runtime is None else CudaPieces(runtime)
