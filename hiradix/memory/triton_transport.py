"""Page copies by the Triton kernel: small pieces at wire speed, few SMs, host memory read in place."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import numpy as np
import torch

from hiradix.errors import ConfigError
from hiradix.memory.copy_plan import plan_copies
from hiradix.memory.pools import Pool
from hiradix.memory.transport import PageIds, TorchTransport, check_copy, checked_layers
from hiradix.triton_kernels.page_copy import INTERPRETED, Tables, launch, make_tables

logger = logging.getLogger(__name__)

# Programs (so SMs taken from the forward pass) per direction: first estimates, not yet measured on a GPU.
_TO_DEVICE_PROGRAMS = 4
_TO_HOST_PROGRAMS = 8

_TablesTo = WeakKeyDictionary[Pool, tuple[Tables, ...]]


class TritonTransport:
    """Copies with `triton_kernels.page_copy`; pools on CUDA or pinned, or any CPU pools when interpreted.

    num_programs: at most so many SMs are taken; None: an estimate per direction.
    Pairs of pools whose rows are not whole 16-byte vectors go to the torch transport, which is logged once.
    Address tables are made once per pair of pools. Raises ConfigError for CPU pools without the interpreter
    and for host memory that is not pinned.
    """

    name = "triton"

    def __init__(self, note: str = "", num_programs: int | None = None) -> None:
        self.note = note
        self._num_programs = num_programs
        self._tables: WeakKeyDictionary[Pool, _TablesTo] = WeakKeyDictionary()
        self._unaligned = TorchTransport("rows are not whole 16-byte vectors")

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        check_copy(src, dst, src_pages, dst_pages)
        span = checked_layers(src, layers)
        if len(src_pages) == 0 or len(span) == 0:
            return
        tables = self._tables_of(src, dst)
        if not tables:
            self._unaligned.copy_pages(src, dst, src_pages, dst_pages, layers)
            return
        device = tables[0].dst.device
        ids = _upload(np.stack([np.asarray(dst_pages, np.int64), np.asarray(src_pages, np.int64)]), device)
        num_programs = self._num_programs or _default_programs(dst, device)
        with torch.cuda.device(device if device.type == "cuda" else -1):
            for table in tables:
                launch(table, ids, span, num_programs)

    def _tables_of(self, src: Pool, dst: Pool) -> tuple[Tables, ...]:
        """The pair's tables, empty where the kernel cannot copy between them."""
        by_dst = self._tables.setdefault(src, WeakKeyDictionary())
        if dst not in by_dst:
            device = _kernel_device(src, dst)
            plans = plan_copies(src, dst)
            aligned = all(plan.aligned for plan in plans)
            if not aligned:
                logger.warning("page rows are not whole 16-byte vectors: copied by the torch transport")
            by_dst[dst] = tuple(make_tables(plan, device) for plan in plans) if aligned else ()
        return by_dst[dst]


def _kernel_device(src: Pool, dst: Pool) -> torch.device:
    """Where the kernel runs. It does not check addresses, so memory it cannot reach is refused here."""
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


def _upload(ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device) -> torch.Tensor:
    """The ids on `device`, in stream order. Torch reuses the pinned staging memory only after the copy."""
    host = torch.from_numpy(ids)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
