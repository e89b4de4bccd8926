"""Page copies by the copy engines: contiguous pieces handed over as one list, no SMs taken."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hiradix.errors import CacheError, ConfigError
from hiradix.memory.copy_plan import plan_copies
from hiradix.memory.pools import Pool
from hiradix.memory.transport import PageIds, PerPair, checked_copy
from hiradix.triton_kernels.sides import PlannedCopy, Side

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Copies of `sizes[i]` bytes from address src[i] to address dst[i]; int64 [n] each, in no order."""

    dst: Addresses
    src: Addresses
    sizes: Addresses

    def merged(self) -> Pieces:
        """Neighbours that continue each other on both sides made one piece."""
        if len(self.sizes) == 0:
            return self
        joins = (self.dst[1:] == self.dst[:-1] + self.sizes[:-1]) & (
            self.src[1:] == self.src[:-1] + self.sizes[:-1]
        )
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
        for plan in self._plans.of(src, dst, _collapsed_plans):
            self._copy_pieces(cut(plan, src_pages, dst_pages, span))


def _collapsed_plans(src: Pool, dst: Pool) -> tuple[PlannedCopy, ...]:
    on_device = "cuda" in (src.device.type, dst.device.type)
    if on_device and not (src.reachable and dst.reachable):
        raise ConfigError("--hicache-io-backend direct: the host pool is not pinned")
    return tuple(plan.collapsed() for plan in plan_copies(src, dst))


def cut(plan: PlannedCopy, src_pages: PageIds, dst_pages: PageIds, layers: range) -> Pieces:
    """The pieces of a copy, merged; one per plane, page and row at most."""
    planes = slice(layers.start * plan.per_layer, layers.stop * plan.per_layer)
    dst, src = _addresses(plan.dst, dst_pages, planes), _addresses(plan.src, src_pages, planes)
    return Pieces(dst, src, np.full(len(dst), plan.src.row_bytes, np.int64)).merged()


def _addresses(side: Side, pages: PageIds, planes: slice) -> Addresses:
    """Of every row, by plane, page, row."""
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


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("src", _Location),
        ("dst", _Location),
        ("flags", ctypes.c_uint),
    ]


_ORDER_STREAM = 1  # cudaMemcpySrcAccessOrderStream: sources are read in stream order
_HOST_POINTER_ATTRIBUTE = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_COPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses


class CudaPieces:
    """Copies pieces on the current CUDA stream: one cudaMemcpyBatchAsync, or a cudaMemcpyAsync per piece.

    The batch call exists from CUDA 12.8 on and takes no legacy default stream. Raises CacheError with the
    code.
    """

    def __init__(self, runtime: Any, cuda_version: tuple[int, int]) -> None:
        self._runtime = runtime
        self._takes_fail_index = cuda_version < (13, 0)
        self.batched = cuda_version >= (12, 8) and hasattr(runtime, "cudaMemcpyBatchAsync")

    def reads_host_addresses(self, device: int) -> bool:
        """Whether kernels on the device may use the host's own address of registered memory."""
        value = ctypes.c_int(0)
        code = self._runtime.cudaDeviceGetAttribute(
            ctypes.byref(value), ctypes.c_int(_HOST_POINTER_ATTRIBUTE), ctypes.c_int(device)
        )
        return code == 0 and value.value == 1

    def __call__(self, pieces: Pieces) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if self.batched and stream != 0 and len(pieces.sizes) > 1:
            self._copy_batch(pieces, stream)
        else:
            self._copy_each(pieces, stream)

    def _copy_batch(self, pieces: Pieces, stream: int) -> None:
        dst, src, sizes = (np.ascontiguousarray(part) for part in (pieces.dst, pieces.src, pieces.sizes))
        attributes, first = _Attributes(order=_ORDER_STREAM), ctypes.c_size_t(0)
        fail = [ctypes.byref(ctypes.c_size_t(0))] if self._takes_fail_index else []
        code = self._runtime.cudaMemcpyBatchAsync(
            *(ctypes.c_void_p(part.ctypes.data) for part in (dst, src, sizes)),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *fail,
            ctypes.c_void_p(stream),
        )
        if code:
            raise CacheError(f"cudaMemcpyBatchAsync of {len(sizes)} pieces failed with code {code}")

    def _copy_each(self, pieces: Pieces, stream: int) -> None:
        for dst, src, num_bytes in zip(
            pieces.dst.tolist(), pieces.src.tolist(), pieces.sizes.tolist(), strict=True
        ):
            code = self._runtime.cudaMemcpyAsync(
                ctypes.c_void_p(dst),
                ctypes.c_void_p(src),
                ctypes.c_size_t(num_bytes),
                ctypes.c_int(_COPY_DEFAULT),
                ctypes.c_void_p(stream),
            )
            if code:
                raise CacheError(f"cudaMemcpyAsync of {num_bytes} bytes failed with code {code}")


def cuda_pieces() -> CudaPieces | None:
    """The copy engines through the CUDA runtime that torch has loaded; None where there is none."""
    if torch.version.cuda is None:
        return None
    major, minor = (int(part) for part in torch.version.cuda.split(".")[:2])
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        logger.warning("no CUDA runtime library for the copy engines: %s", error)
        return None
    return CudaPieces(runtime, (major, minor))
