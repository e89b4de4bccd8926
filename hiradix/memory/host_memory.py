"""Host memory for a pool: exact size, touched in parallel, pinned in chunks; and how much is free."""

from __future__ import annotations

import logging
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hiradix.errors import CacheError
from hiradix.memory.cuda_runtime import find_runtime
from hiradix.os_memory import advise, map_private

logger = logging.getLogger(__name__)

OS_PAGE = mmap.PAGESIZE
_TOUCH_CHUNK = 64 << 20
_MAX_TOUCH_THREADS = 16
_HUGE_BYTES_PER_S = 500_000_000  # small pages come at twice that on one slow core
_REGISTER_CHUNK = 64 << 30
_MIN_REGISTER_CHUNK = 1 << 30

# A cgroup's limit file, usage file, and the line of memory.stat that can be dropped.
_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_NAMES = ("memory.max", "memory.current", "inactive_file")


def allocate(
    num_bytes: int, *, pin: bool, unit: int, cpus: Collection[int] = ()
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """uint8 [num_bytes] on the CPU, zero, exactly as large as asked and resident when this returns; and the
    addresses inside of it where one registration with CUDA ends and the next begins.

    Begins on an OS page; in huge pages where the system has them at hand. A process that is forked does not
    have it. pin: register with CUDA for the current device, in chunks that end on multiples of `unit` bytes,
    so that no copy of a page spans two registrations, which CUDA refuses; undone when the tensor dies.
    cpus: those that touch it first, which decides the NUMA node it lies on; none given: any.
    Raises CacheError if the memory cannot be had or pinned. Costs about 1 s per GB and core.
    """
    try:
        memory = map_private(max(num_bytes, 1))
    except OSError as error:
        raise CacheError(f"host pool: cannot map {num_bytes} bytes: {error}") from error
    cells = np.frombuffer(memory, np.uint8)
    prefault(memory, cells, cpus)
    buffer = torch.from_numpy(cells)[:num_bytes]
    if not pin:
        return buffer, ()
    runtime: Any = find_runtime() or torch.cuda.cudart()  # type: ignore[no-untyped-call]
    addresses = pin_chunks(runtime, buffer.data_ptr(), num_bytes, unit)
    weakref.finalize(cells, _unpin, runtime, addresses)  # the tensor holds `cells`, `cells` the mapping
    return buffer, tuple(addresses[1:])


def prefault(
    memory: mmap.mmap,
    cells: npt.NDArray[np.uint8],
    cpus: Collection[int] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Make `memory`, whose bytes are `cells`, resident; whether huge pages were asked for to its end.

    The first chunk tells what they cost: a system that has to move memory about for them (compaction) can
    take minutes for what small pages take seconds, so then the rest is in small ones.
    """
    if not advise(memory, "MADV_HUGEPAGE"):
        touch(cells, cpus)
        return False
    first = cells[:_TOUCH_CHUNK]
    begin = clock()
    touch(first, cpus)
    seconds = clock() - begin
    slow = seconds > len(first) / _HUGE_BYTES_PER_S and len(cells) > len(first)
    if slow:
        what = "host pool: huge pages took %.2f s for %d bytes; the rest is in small ones"
        logger.info(what, seconds, len(first))
        advise(memory, "MADV_NOHUGEPAGE")
    touch(cells[len(first) :], cpus)
    return not slow


def touch(cells: npt.NDArray[np.uint8], cpus: Collection[int] = ()) -> None:
    """Write a zero to every OS page of `cells`, in parallel, so that later use never faults.

    Done by threads of its own that run on `cpus` only, if any are given.
    """
    chunks = [cells[begin : begin + _TOUCH_CHUNK : OS_PAGE] for begin in range(0, len(cells), _TOUCH_CHUNK)]
    if len(chunks) <= 1 and not cpus:
        cells[::OS_PAGE] = 0
        return
    threads = max(1, min(len(chunks), len(cpus or os.sched_getaffinity(0)), _MAX_TOUCH_THREADS))
    with ThreadPoolExecutor(threads, "host-pool-touch", _stay_on, (frozenset(cpus),)) as executor:
        list(executor.map(_zero, chunks))


def _stay_on(cpus: frozenset[int]) -> None:
    """Keep the calling thread on `cpus`, if any are given."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def huge_page_bytes(address: int, read: ReadText | None = None) -> int:
    """Bytes in huge pages of the mapping that `address` is in; 0 where the system does not say."""
    inside = False
    for line in ((read or read_text)("/proc/self/smaps") or "").splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            first, _, last = head.partition("-")
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0


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
