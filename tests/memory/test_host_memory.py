"""Host memory: size, chunks, pinning order, what is free; and the sizing of the host pool."""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiradix.errors import CacheError, ConfigError
from hiradix.memory import HostPool, KVShape, host_memory, plan_host_pool, size_host_pool, size_host_pools
from hiradix.memory.host_memory import OS_PAGE, allocate, available_bytes, chunk_edges, pin_chunks
from hiradix.memory.numa import cpu_list, node_at, node_of

GIB = 1 << 30
MIB = 1 << 20


def test_memory_is_exact_zero_and_writable() -> None:
    for num_bytes in (1, 4097, 3 * MIB + 5):
        buffer, _ = allocate(num_bytes, pin=False, unit=64)
        assert buffer.shape == (num_bytes,) and buffer.dtype == torch.uint8 and not buffer.any()
        buffer.fill_(3)
        assert int(buffer.sum()) == 3 * num_bytes


def test_large_memory_is_touched_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH_CHUNK", 4 * OS_PAGE)
    buffer, _ = allocate(33 * OS_PAGE, pin=False, unit=64)
    assert not buffer.any()


def test_a_fork_does_not_take_the_memory_along() -> None:
    """Found: private memory is copied on write after a fork, and at once where it is pinned."""
    buffer, _ = allocate(3 * MIB, pin=False, unit=64)
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = int(is_mapped(buffer.data_ptr()))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0 and is_mapped(buffer.data_ptr())


def is_mapped(address: int) -> bool:
    """Whether this process has memory at the address."""
    lines = (host_memory.read_text("/proc/self/maps") or "").splitlines()
    spans = [[int(end, 16) for end in line.split(" ", 1)[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in spans)


def test_memory_that_cannot_be_mapped_is_a_cache_error() -> None:
    with pytest.raises(CacheError, match="cannot map"):
        allocate(1 << 60, pin=False, unit=64)


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 16), st.integers(1, 1 << 22))
def test_chunks_tile_and_end_on_units(num_bytes: int, unit: int, chunk: int) -> None:
    edges = chunk_edges(num_bytes, unit, chunk)
    assert edges[0][0] == 0 and edges[-1][1] == num_bytes
    assert all(a[1] == b[0] for a, b in zip(edges, edges[1:], strict=False))
    common = math.lcm(unit, OS_PAGE)
    assert all(begin % common == 0 and end - begin <= max(chunk, common) for begin, end in edges)


class Runtime:
    """A CUDA runtime that refuses registrations above `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.live: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if num_bytes > self.limit:
            return 2
        self.live[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.live[address]
        return 0


def test_pinning_halves_until_it_is_accepted() -> None:
    runtime = Runtime(9 * GIB)
    addresses = pin_chunks(runtime, OS_PAGE, 40 * GIB, 1 * MIB)
    assert addresses == [OS_PAGE + begin for begin in range(0, 40 * GIB, 8 * GIB)]
    assert sum(runtime.live.values()) == 40 * GIB


def test_failed_pinning_leaves_nothing_registered() -> None:
    runtime = Runtime(MIB)
    with pytest.raises(CacheError, match="code 2; lower --hicache-size"):
        pin_chunks(runtime, 0, 2 * GIB, MIB)
    assert runtime.live == {}


MEMINFO = "MemTotal: 64000000 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n"


def free_with(files: dict[str, str]) -> int:
    return available_bytes(({"/proc/meminfo": MEMINFO} | files).get)


def test_free_memory_is_the_machines_without_limits() -> None:
    assert free_with({}) == 16 * GIB
    unlimited = {"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/memory.max": "max\n"}
    assert free_with(unlimited | {"/sys/fs/cgroup/a/memory.current": "5\n"}) == 16 * GIB


def test_the_tightest_cgroup_counts_and_its_page_cache_is_free() -> None:
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/memory.max": str(8 * GIB),
        "/sys/fs/cgroup/a/memory.current": str(3 * GIB),
        "/sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "/sys/fs/cgroup/a/b/memory.max": str(12 * GIB),
        "/sys/fs/cgroup/a/b/memory.current": str(1 * GIB),
    }
    assert free_with(files) == 6 * GIB


def test_a_container_sees_its_limit_at_the_root() -> None:
    files = {"/proc/self/cgroup": "0::/outside\n", "/sys/fs/cgroup/memory.max": str(2 * GIB)}
    assert free_with(files | {"/sys/fs/cgroup/memory.current": str(GIB)}) == GIB


def test_cgroup_v1() -> None:
    files = {
        "/proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
        "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(4 * GIB),
        "/sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(3 * GIB),
        "/sys/fs/cgroup/memory/x/memory.stat": f"total_inactive_file {GIB // 2}\n",
    }
    assert free_with(files) == GIB + GIB // 2


def test_this_machine_has_some_memory() -> None:
    assert available_bytes() > 0


@dataclass(frozen=True)
class Flags:
    hicache_ratio: float | None = None
    hicache_size: float = 0
    hicache_host_memory_fraction: float = 0.8


def test_size_wins_over_ratio_over_fraction() -> None:
    assert plan_host_pool(MIB, 1000, Flags(hicache_ratio=1.5), 100 * GIB).num_pages == 1500
    assert plan_host_pool(MIB, 1000, Flags(hicache_ratio=1.5, hicache_size=2), 100 * GIB).num_pages == 1907
    assert plan_host_pool(MIB, 1000, Flags(hicache_size=0.5), 100 * GIB).num_pages == 476
    assert plan_host_pool(MIB, 1000, Flags(), 100 * GIB).num_pages == 2000


def test_the_default_ratio_shrinks_to_the_fraction_of_what_is_free() -> None:
    plan = plan_host_pool(MIB, 1 << 20, Flags(hicache_host_memory_fraction=0.5), 110 * GIB, num_ranks=4)
    assert plan.num_pages == int(25 * GIB * 0.5 * 0.95 / MIB)
    assert "--hicache-host-memory-fraction 0.5" in str(plan) and "x 4 ranks" in str(plan)


def test_ratio_may_be_below_one() -> None:
    assert plan_host_pool(MIB, 1000, Flags(hicache_ratio=0.25), 100 * GIB).num_pages == 250


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            Flags(hicache_size=60),
            r"--hicache-size 60 requests 60\.00 GB per rank x 2 ranks but only 107\.37 GB",
        ),
        (Flags(hicache_ratio=100), r"--hicache-ratio 100 requests 104\.86 GB"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(flags: Flags, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_host_pool(MIB, 1000, flags, 100 * GIB, num_ranks=2)


@pytest.mark.parametrize("flags", [Flags(hicache_size=0.001), Flags(hicache_ratio=0.0001), Flags()])
def test_a_pool_without_a_page_is_refused(flags: Flags) -> None:
    with pytest.raises(ConfigError, match=r"gives the host pool no page: a page needs 16777216 bytes"):
        plan_host_pool(16 * MIB, 100, flags, 10 * MIB)


def test_several_pools_keep_the_proportion_of_the_device_pools() -> None:
    """Found: 1 / 49 of 98 pages was 1, as numbers with a point have it."""
    for full in range(1, 130):
        for other in (1, 7, full, 3 * full):
            sizes = size_host_pools([64, 16], [full, other], Flags(hicache_ratio=2.0))
            assert sizes == [2 * full, 2 * other]
    assert size_host_pools([64, 16], [100, 10], Flags(hicache_ratio=0.05)) == [5, 1], "none has no page"
    pages = size_host_pools([3000, 1000], [40, 10], Flags(hicache_size=0.001))
    assert pages == [307, 76] and sum(n * size for n, size in zip(pages, [3000, 1000])) <= 1_000_000


def test_small_machines_keep_a_tenth() -> None:
    plan = plan_host_pool(MIB, 10**6, Flags(hicache_host_memory_fraction=1), 1 * GIB)
    assert 850 < plan.num_pages < 1024 * 0.9


def test_sizing_on_this_machine() -> None:
    assert size_host_pool(KVShape(2, 1, 8, 8, torch.float32), 4, 16, Flags(hicache_ratio=2)) == 32


class Steps:
    """A clock that goes on by so many seconds per look."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._now = seconds, 0.0

    def __call__(self) -> float:
        self._now += self._seconds
        return self._now


@pytest.mark.parametrize(("seconds", "want"), [(0.005, True), (1.0, False)])
def test_huge_pages_are_given_up_where_they_are_slow(
    seconds: float, want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH_CHUNK", 4 * MIB)
    asked: list[str] = []
    monkeypatch.setattr(host_memory, "advise", lambda memory, name: asked.append(name) is None)
    memory = mmap.mmap(-1, 10 * MIB)
    cells = np.frombuffer(memory, np.uint8)
    assert host_memory.prefault(memory, cells, clock=Steps(seconds)) == want
    assert asked == (["MADV_HUGEPAGE"] if want else ["MADV_HUGEPAGE", "MADV_NOHUGEPAGE"])


def test_memory_near_a_node_is_touched_from_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """By threads of its own: the caller stays where it was."""
    before, pinned = os.sched_getaffinity(0), []
    real = os.sched_setaffinity

    def note(pid: int, cpus: frozenset[int]) -> None:
        pinned.append((threading.get_ident(), set(cpus)))
        real(pid, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", note)
    cpu = max(before)
    buffer, _ = allocate(3 * MIB, pin=False, unit=64, cpus={cpu})
    assert not buffer.any() and os.sched_getaffinity(0) == before
    assert pinned and all(ident != threading.get_ident() and cpus == {cpu} for ident, cpus in pinned)


def test_a_devices_node_and_its_cpus() -> None:
    files = {
        "/sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
        "/sys/devices/system/node/node1/cpulist": "0-3,8\n",
        "/sys/bus/pci/devices/0000:5e:00.0/numa_node": "-1\n",
        "/sys/bus/pci/devices/0000:86:00.0/numa_node": "0\n",
        "/sys/devices/system/node/node0/cpulist": "100000-100007\n",
    }
    node = node_at("0000:3b:00.0", files.get)
    assert node is not None and node.number == 1
    assert node.cpus == frozenset({0, 1, 2, 3, 8}) & os.sched_getaffinity(0)
    assert node_at("0000:5e:00.0", files.get) is None, "the machine has one node"
    assert node_at("0000:86:00.0", files.get) is None, "we may not run there"
    assert node_at("0000:ff:00.0", files.get) is None
    assert node_of(torch.device("cpu")) is None
    assert cpu_list("") == frozenset() and cpu_list("4") == {4}


def test_huge_pages_are_counted_in_the_right_mapping() -> None:
    smaps = (
        "7f0000000000-7f0000400000 rw-p 00000000 00:00 0\nRss: 4096 kB\nAnonHugePages:   0 kB\n"
        "7f0000400000-7f0000c00000 rw-p 00000000 00:00 0\nRss: 8192 kB\nAnonHugePages:   4096 kB\n"
    )
    assert host_memory.huge_page_bytes(0x7F0000400000, {"/proc/self/smaps": smaps}.get) == 4 * MIB
    assert host_memory.huge_page_bytes(0x7F0000000000, {"/proc/self/smaps": smaps}.get) == 0
    assert host_memory.huge_page_bytes(0x10, {"/proc/self/smaps": smaps}.get) == 0
    assert host_memory.huge_page_bytes(0x10, {}.get) == 0


def test_the_start_up_lines_have_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    shape = KVShape(2, 1, 8, 8, torch.float32)
    with caplog.at_level(logging.INFO, "hiradix.memory"):
        num_pages = size_host_pool(shape, 4, 16, Flags(hicache_ratio=2), num_ranks=2)
        HostPool(shape, num_pages, 4)
    sized, made = (record.getMessage() for record in caplog.records[:2])
    assert sized.startswith("host pool: 32 pages, 0.00 GB per rank x 2 ranks (--hicache-ratio 2); ")
    assert made.startswith("host memory: 32 pages x 512 bytes = 0.00 GB, layout page_first, ")
    assert made.endswith("in huge pages, not pinned, NUMA node any")
