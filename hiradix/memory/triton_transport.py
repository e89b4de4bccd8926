"""Page copies by the Triton kernel: small pieces at wire speed, few SMs, host memory read in place."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch

from hiradix.errors import ConfigError
from hiradix.memory.copy_plan import plan_by_arrays
from hiradix.memory.pools import Pool
from hiradix.memory.transport import PageIds, PerPair, TorchTransport, checked_copy
from hiradix.memory.upload import upload
from hiradix.triton_kernels.page_copy import INTERPRETED, Tables, launch, make_tables
from hiradix.triton_kernels.sides import VECTOR_BYTES, Tile, pick_tile

logger = logging.getLogger(__name__)

# Programs (so SMs taken from the forward pass) per direction: first estimates, not yet measured on a GPU.
_TO_DEVICE_PROGRAMS = 4
_TO_HOST_PROGRAMS = 8


@dataclass(frozen=True)
class _Pair:
    """The copy plan from one pool to another: launches, and the arrays the kernel cannot move."""

    device: torch.device
    tables: tuple[Tables, ...]
    rest: TorchTransport | None


class TritonTransport:
    """Copies with `triton_kernels.page_copy`; pools on CUDA or pinned, or any CPU pools when interpreted.

    num_programs: at most so many SMs are taken; None: an estimate per direction. stages: tiles in flight
    per program; None: by the tile.
    Arrays whose rows are not whole 16-byte vectors go to the torch transport, which is logged per pool pair.
    Address tables are made once per pair of pools. Raises ConfigError for CPU pools without the interpreter
    and for host memory that is not pinned.
    """

    name = "triton"

    def __init__(self, note: str = "", num_programs: int | None = None, stages: int | None = None) -> None:
        self.note = note
        self._num_programs = num_programs
        self._stages = stages
        self._pairs: PerPair[_Pair] = PerPair()

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        span = checked_copy(src, dst, src_pages, dst_pages, layers)
        if not span:
            return
        pair = self._pairs.of(src, dst, _make_pair)
        if pair.tables:
            device = pair.device
            ids = np.stack([np.asarray(dst_pages, np.int64), np.asarray(src_pages, np.int64)])
            on_device = upload(torch.from_numpy(ids), device)
            num_programs = self._num_programs or _default_programs(dst, device)
            with torch.cuda.device(device if device.type == "cuda" else -1):
                for table in pair.tables:
                    launch(table, on_device, span, num_programs, self._tile(table))
        if pair.rest is not None:
            pair.rest.copy_pages(src, dst, src_pages, dst_pages, layers)

    def _tile(self, table: Tables) -> Tile | None:
        """The kernel's own choice, or that with other stages."""
        if self._stages is None:
            return None
        vectors = table.plan.src.page_bytes // VECTOR_BYTES
        return replace(pick_tile(vectors, interpreted=INTERPRETED), stages=self._stages)


def _make_pair(src: Pool, dst: Pool) -> _Pair:
    device = _kernel_device(src, dst)
    plans = plan_by_arrays(src, dst)
    odd = [array for arrays, plan in plans.items() if not plan.aligned for array in arrays]
    if odd:
        names = ", ".join(src.shape.arrays[array].name for array in odd)
        logger.warning("rows of %s are not whole 16-byte vectors: copied by torch", names)
    tables = tuple(make_tables(plan, device) for plan in plans.values() if plan.aligned)
    return _Pair(device, tables, TorchTransport("odd rows", odd) if odd else None)


def _kernel_device(src: Pool, dst: Pool) -> torch.device:
    """The kernel's device. It does not check addresses, so memory it cannot reach is refused here."""
    cuda = [pool.device for pool in (src, dst) if pool.device.type == "cuda"]
    if not cuda:
        if not INTERPRETED:
            raise ConfigError("--hicache-io-backend kernel: no CUDA pool, and triton is not interpreting")
        return torch.device("cpu")
    if INTERPRETED:
        raise ConfigError("--hicache-io-backend kernel: TRITON_INTERPRET is set; it cannot reach CUDA pools")
    for pool in (src, dst):
        if not pool.reachable:
            raise ConfigError("--hicache-io-backend kernel: the host pool is not pinned")
    return cuda[0]


def _default_programs(dst: Pool, device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return _TO_DEVICE_PROGRAMS if dst.device.type == "cuda" else _TO_HOST_PROGRAMS
