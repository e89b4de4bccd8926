"""Host memory for a pool: exact size, touched in parallel, pinned in chunks; and how much is free."""

from __future__ import annotations

import logging
import math
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hiradix.errors import CacheError

logger = logging.getLogger(__name__)

OS_PAGE = mmap.PAGESIZE
_TOUCH_CHUNK = 64 << 20
_MAX_TOUCH_THREADS = 16
_REGISTER_CHUNK = 64 << 30
_MIN_REGISTER_CHUNK = 1 << 30

# A cgroup's limit file, usage file, and the line of memory.stat that can be dropped.
_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_NAMES = ("memory.max", "memory.current", "inactive_file")


def allocate(num_bytes: int, *, pin: bool, unit: int) -> torch.Tensor:
    """uint8 [num_bytes] on the CPU, zero, exactly as large as asked and resident when this returns.

    Begins on an OS page; transparent huge pages are asked for. pin: register with CUDA, in chunks that end on
    multiples of `unit` bytes, so that no copy of a page spans two registrations; undone when the tensor dies.
    Raises CacheError if the memory cannot be had or pinned. Costs about 1 s per GB and core.
    """
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1))
    except OSError as error:
        raise CacheError(f"host pool: cannot map {num_bytes} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            logger.debug("huge pages refused for the host pool; using small ones")
    cells = np.frombuffer(memory, np.uint8)
    touch(cells)
    buffer = torch.from_numpy(cells)[:num_bytes]
    if pin:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        addresses = pin_chunks(runtime, buffer.data_ptr(), num_bytes, unit)
        weakref.finalize(cells, _unpin, runtime, addresses)  # the tensor holds `cells`, `cells` the mapping
    return buffer


def touch(cells: npt.NDArray[np.uint8]) -> None:
    """Write a zero to every OS page of `cells`, in parallel, so that later use never faults."""
    chunks = [cells[begin : begin + _TOUCH_CHUNK : OS_PAGE] for begin in range(0, len(cells), _TOUCH_CHUNK)]
    if len(chunks) == 1:
        chunks[0].fill(0)
        return
    threads = min(len(chunks), len(os.sched_getaffinity(0)), _MAX_TOUCH_THREADS)
    with ThreadPoolExecutor(threads, "host-pool-touch") as executor:
        list(executor.map(_zero, chunks))


def _zero(cells: npt.NDArray[np.uint8]) -> None:
    cells.fill(0)


def chunk_edges(num_bytes: int, unit: int, chunk: int) -> list[tuple[int, int]]:
    """[begin, end) cuts of a buffer of about `chunk` bytes, on multiples of `unit` and of an OS page.

    Half-open, without gaps. A cut is larger than `chunk` only where one common multiple already is.
    """
    step = math.lcm(unit, OS_PAGE)
    step *= max(1, chunk // step)
    return [(begin, min(begin + step, num_bytes)) for begin in range(0, num_bytes, step)]


def pin_chunks(runtime: Any, begin: int, num_bytes: int, unit: int) -> list[int]:
    """Register [begin, begin + num_bytes) with CUDA; the addresses to unregister.

    runtime: has cudaHostRegister and cudaHostUnregister. Where it refuses, everything is undone and tried
    again in chunks of half the size, down to 1 GiB. Raises CacheError with the code and the flags to turn.
    """
    chunk = _REGISTER_CHUNK
    while True:
        addresses: list[int] = []
        failed = 0
        for start, end in chunk_edges(num_bytes, unit, chunk):
            failed = int(runtime.cudaHostRegister(begin + start, end - start, 0))
            if failed:
                break
            addresses.append(begin + start)
        if not failed:
            return addresses
        _unpin(runtime, addresses)
        if chunk <= _MIN_REGISTER_CHUNK:
            raise CacheError(
                f"host pool: cudaHostRegister of {num_bytes} bytes failed with code {failed}; "
                "lower --hicache-size or --hicache-ratio, or raise the locked-memory limit"
            )
        chunk //= 2


def _unpin(runtime: Any, addresses: list[int]) -> None:
    for address in addresses:
        runtime.cudaHostUnregister(address)


ReadText = Callable[[str], str | None]


def read_text(path: str) -> str | None:
    """The file's text, None where there is none to read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


def available_bytes(read: ReadText = read_text) -> int:
    """Memory this process can still take: the machine's, bounded by every cgroup it is in (v1 and v2).

    `read` gives a file's text or None. Page cache that can be dropped counts as free.
    """
    free = [_meminfo_available(read("/proc/meminfo") or "")]
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free += _cgroup_free("/sys/fs/cgroup", path, _V2_NAMES, read)
        elif "memory" in controllers.split(","):
            free += _cgroup_free("/sys/fs/cgroup/memory", path, _V1_NAMES, read)
    return max(0, min(free))


def _meminfo_available(text: str) -> int:
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * OS_PAGE


def _cgroup_free(root: str, path: str, names: tuple[str, str, str], read: ReadText) -> list[int]:
    """Free bytes under each limit from `path` up to the root; a container sees only the root."""
    limit_name, usage_name, cache_name = names
    free, parts = [], [part for part in path.split("/") if part]
    for depth in range(len(parts) + 1):
        folder = "/".join([root, *parts[:depth]])
        limit, usage = read(f"{folder}/{limit_name}"), read(f"{folder}/{usage_name}")
        if limit is None or usage is None or not limit.strip().isdigit():
            continue
        cached = _stat_value(read(f"{folder}/memory.stat") or "", cache_name)
        free.append(int(limit) - int(usage) + cached)
    return free


def _stat_value(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
