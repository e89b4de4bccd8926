"""What does it cost that ranks agree on every tick?

    python benchmarks/bench_ranks.py [--ranks 2] [--ticks 3000] [--quick] [--out FILE]

A tick with nothing to do: of one rank alone, of several ranks that agree over gloo, and the collective call
on its own, which is the limit. Wall time includes waiting for the other ranks; CPU time is the calling
thread's. Writes build/bench/ranks.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, Row

from hiradix.cache import HierarchicalCache, HostTier
from hiradix.cache.agreement import WIDTH
from hiradix.memory import DevicePool, HostPool, KVShape, PageAllocator, make_transport
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.transfer import HiCacheController
from hiradix.transfer.process_group import Membership, ProcessGroup
from hiradix.tree import RadixTree


def make_cache(agree: Any) -> HierarchicalCache:
    shape = KVShape(2, 1, 8, 8, torch.float32)
    device, host = DevicePool(shape, 64, 16), HostPool(shape, 128, 16)
    controller = HiCacheController(device, host, transport=make_transport("kernel", "cpu"))
    prefetch = PrefetchPolicy.from_name("timeout", PrefetchLimits(16))
    tier = HostTier(PageAllocator(128), controller, WritePolicy.from_name("write_through"), prefetch)
    return HierarchicalCache(RadixTree(16), PageAllocator(64, 1), tier, agree=agree)


def measure(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Median over ten rounds of (wall, thread CPU) microseconds per call."""
    rounds = []
    for _ in range(10):
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(count // 10):
            call()
        spent = (time.perf_counter() - wall, time.thread_time() - cpu)
        rounds.append([seconds / (count // 10) * 1e6 for seconds in spent])
    wall_us, cpu_us = np.median(np.array(rounds), axis=0)
    return float(wall_us), float(cpu_us)


def rank(member: Membership, count: int, results: Any) -> None:
    torch.set_num_threads(1)
    group = ProcessGroup(member)
    vector = np.zeros(WIDTH, np.int64)
    cache = make_cache(group.least)
    rows = [
        ("collective call", *measure(lambda: group.least(vector), count)),
        (f"tick, {member.size} ranks over gloo", *measure(cache.tick, count)),
    ]
    if member.rank == 0:
        results.send(rows)
    cache.close()
    group.share(None)  # nobody leaves before all have finished
    group.close()


def over_gloo(num_ranks: int, count: int) -> Sequence[tuple[str, float, float]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{Path(folder) / 'meet'}"
        members = [Membership(number, num_ranks, address) for number in range(num_ranks)]
        processes = [context.Process(target=rank, args=(member, count, theirs)) for member in members]
        for process in processes:
            process.start()
        rows: Sequence[tuple[str, float, float]] = ours.recv()
        for process in processes:
            process.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ticks", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="200 ticks")
    parser.add_argument("--out", type=Path, default=Path("build/bench/ranks.json"))
    args = parser.parse_args()
    num_ticks = 200 if args.quick else args.ticks
    with Report(args.out, ["collective call"]) as report:
        report.about |= {"torch": torch.__version__, "bytes from each rank": WIDTH * 8}
        report.add(measured(args.ranks, num_ticks))


def measured(num_ranks: int, num_ticks: int) -> list[Row]:
    """Wall and CPU time of each kind of tick, beside the collective call alone."""
    alone = make_cache(None)
    no_gloo = make_cache(lambda vector: vector)
    found = [
        ("tick, one rank", *measure(alone.tick, num_ticks)),
        ("tick, agreement without gloo", *measure(no_gloo.tick, num_ticks)),
        *over_gloo(num_ranks, num_ticks),
    ]
    alone.close()
    no_gloo.close()
    ((_, *limits),) = [each for each in found if each[0] == "collective call"]
    rows = []
    for name, *times in found:
        peers = [{"collective call": limit} if name.startswith("tick") else {} for limit in limits]
        for metric, value, beside in zip(("wall", "CPU"), times, peers, strict=True):
            rows.append(Row(name, metric, "us", value, beside))
    return rows


if __name__ == "__main__":
    main()
