"""What do transfers cost the thread that schedules, and what does a scheduler that never sleeps cost them?

    make bench-transfer
    python benchmarks/bench_transfer.py [--only TEXT,...] [--model DIRECTORY] [--quick] [--out FILE]

| case | question |
|---|---|
| tick | CPU time of `tick()` when nothing has ended |
| drain | pages a second into storage, beside a scheduler that sleeps and one that polls all the time |
| faulty | seconds that a backend which hangs adds to a request that waits for all its pages |
| no hits | CPU time that tiers add to prompts nobody asked before (bench_transfer_overhead.py) |

`limit`: the same number without the cause, the deadline, or the target. `floor`: what the bytes cost on their
own. Writes build/bench/transfer.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_transfer_overhead
import numpy as np
import torch
from bench_policy_e2e import MODEL, write_model
from common import Report, Row

from hiradix.apps.engine.smollm2 import smollm2_path
from hiradix.cache import HierarchicalCache, HostTier
from hiradix.memory import DevicePool, HostPool, KVShape, PageAllocator, make_transport
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.storage import PageFingerprint, StorageContext, Stores, open_storage, register_storage_backend
from hiradix.transfer import HiCacheController
from hiradix.tree import RadixKey, RadixTree

PAGE = 16
NUM_PAGES = 640
ROUNDS = 5
DRAINS = 15
IN_MEMORY = Path("/dev/shm")  # files there cost no disk, which varies more than the drain
DEADLINE_S = 0.5


class Hanging:
    """A backend whose every call takes for ever."""

    def __init__(self, context: StorageContext):
        self.never = threading.Event()

    def exists(self, keys: Sequence[str]) -> int:
        self.never.wait()
        return 0

    def get(self, keys: Sequence[str], into: Any) -> list[bool]:
        self.never.wait()
        return []

    put = get

    def delete(self, keys: Sequence[str]) -> None:
        """Nothing is stored."""

    def clear(self) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        self.never.set()


class Tiers:
    """A cache over real pools, threads and a backend; pages of 32 KiB."""

    def __init__(self, backend: str, options: dict[str, Any]):
        shape = KVShape(4, 2, 64, 64, torch.float32)
        device, host = DevicePool(shape, NUM_PAGES, PAGE), HostPool(shape, NUM_PAGES, PAGE)
        self.controller = HiCacheController(device, host, transport=make_transport("kernel", "cpu"))
        limits = PrefetchLimits(PAGE, threshold_tokens=PAGE)
        tier = HostTier(
            PageAllocator(NUM_PAGES),
            self.controller,
            WritePolicy.from_name("write_through"),
            PrefetchPolicy.from_name("wait_complete", limits),
        )
        self.pages = PageAllocator(NUM_PAGES, 1)
        self.cache = HierarchicalCache(RadixTree(PAGE), self.pages, tier)
        context = StorageContext(PageFingerprint("bench"), options, host.page_bytes)
        self.storage = Stores([open_storage(backend, context)])
        self.cache.attach_storage(self.storage)

    def fill(self, seed: int) -> int:
        """Give the tree prompts of 32 pages until the pool is full; the number of pages."""
        rng, count = np.random.default_rng(seed), 0
        while self.pages.available >= 32:
            key = RadixKey(rng.integers(0, 50_000, 32 * PAGE))
            self.cache.tree.unlock(self.cache.insert(key, self.pages.alloc(32)))
            count += 32
        return count

    def close(self) -> None:
        self.cache.close(2.0)
        self.storage.close(0.1)


def tick_row(quick: bool) -> Row:
    tiers = Tiers("file", {"file_storage_path": tempfile.mkdtemp(), "max_size": "1GiB"})
    num_ticks, times = 1_000 if quick else 100_000, []
    for _ in range(ROUNDS):
        start_s = time.thread_time()
        for _ in range(num_ticks):
            tiers.cache.tick()
        times.append((time.thread_time() - start_s) / num_ticks)
    tiers.close()
    return Row("tick", "nothing to do", "us", statistics.median(times) * 1e6, {"limit": 5.0})


def drained(wait: Callable[[Tiers], None], seed: int) -> float:
    """Pages a second from the device through the host into storage."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        tiers = Tiers("file", {"file_storage_path": folder, "max_size": "4GiB", "deadline_s": 30})
        start_s = time.perf_counter()
        num_pages = tiers.fill(seed)
        while len(tiers.cache.in_flight):
            wait(tiers)
            tiers.cache.tick()
        rate = num_pages / (time.perf_counter() - start_s)
        assert tiers.cache.counters.backed_up == num_pages, tiers.cache.counters
        tiers.close()
    return rate


def sleep(tiers: Tiers) -> None:
    tiers.controller.wait_any(1.0)


def poll(tiers: Tiers) -> None:
    """Straight on to the next tick."""


def drain_row(quick: bool) -> Row:
    sleeping, polling = [], []
    for seed in range(1 if quick else DRAINS):
        sleeping.append(drained(sleep, seed))
        polling.append(drained(poll, seed))
    ours, unloaded = statistics.median(polling), statistics.median(sleeping)
    return Row("drain", "beside a polling scheduler", "pages/s", ours, {"limit": unloaded})


def faulty_row(quick: bool) -> Row:
    register_storage_backend("hanging", f"{__name__}:Hanging")
    waits = []
    for seed in range(1 if quick else 3):
        tiers = Tiers("hanging", {"deadline_s": DEADLINE_S})
        key = RadixKey(np.random.default_rng(seed).integers(0, 50_000, 64 * PAGE))
        start_s = time.perf_counter()
        tiers.cache.prefetcher.start("r", key, tiers.cache.tree.root)
        while not tiers.cache.prefetcher.progress("r"):
            tiers.controller.wait_any(0.05)
            tiers.cache.tick()
        waits.append(time.perf_counter() - start_s)
        tiers.close()
    return Row("faulty", "added by a backend that hangs", "s", max(waits), {"limit": DEADLINE_S})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--quick", action="store_true", help="one round of each, a small model")
    parser.add_argument("--out", type=Path, default=Path("build/bench/transfer.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Callable[[bool], Row]] = {"tick": tick_row, "drain": drain_row, "faulty": faulty_row}

    wanted = [word for word in args.only.split(",") if word]

    def is_wanted(name: str) -> bool:
        return not wanted or any(word in name for word in wanted)

    with Report(args.out, ["limit", "floor"]) as report:
        report.about["policy"] = "lru"
        for name, make in cases.items():
            if is_wanted(name):
                report.add([make(args.quick)])
        if is_wanted("no hits"):
            path = args.model or (write_model(MODEL) if args.quick else smollm2_path())
            report.optional("no hits", lambda: bench_transfer_overhead.rows(path, args.quick))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
