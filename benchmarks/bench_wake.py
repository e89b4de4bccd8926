"""What does it cost a thread to wake another one, as the scheduler's does once in a turn over the host tier?

    python benchmarks/bench_wake.py [--quick] [--out FILE]

CPU time of one put into the queue that a sleeping thread waits for, as the transfer workers do: apart for
wakes after which that thread ran on the waker's processor, and on another. The other one is asleep, too, on a
machine with nothing else to do; to wake it takes an interrupt, which a virtual machine's host has to pass on.
So the same turn costs more there than on a busy machine. `nobody sleeps` is the put alone, into a queue for
which nobody waits: the limit. A row that did not happen says so by its share. Writes build/bench/wake.json.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Report, Row

NUM_WAKES = 4000
APART_S = 100e-6  # the waker's own work between two wakes: the other falls asleep


def wakes(num_wakes: int) -> dict[bool, list[float]]:
    """us of each put, by whether the woken thread ran on another processor than the waker."""
    processor = ctypes.CDLL(None).sched_getcpu
    orders: SimpleQueue[bool] = SimpleQueue()
    answers: SimpleQueue[int] = SimpleQueue()

    def serve() -> None:
        while orders.get():
            answers.put(processor())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(num_wakes):
        until = time.perf_counter() + APART_S
        while time.perf_counter() < until:
            pass
        own, begin = processor(), time.thread_time()
        orders.put(True)
        cost = time.thread_time() - begin
        taken[answers.get() != own].append(cost * 1e6)
    orders.put(False)
    thread.join()
    return taken


def plain_puts(num_wakes: int) -> float:
    """us of a put that wakes nobody."""
    queue: SimpleQueue[bool] = SimpleQueue()
    costs = []
    for _ in range(num_wakes):
        begin = time.thread_time()
        queue.put(True)
        costs.append((time.thread_time() - begin) * 1e6)
    return statistics.median(costs)


def main() -> None:
    """Wake, and print what that cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the wakes")
    parser.add_argument("--out", type=Path, default=Path("build/bench/wake.json"))
    args = parser.parse_args()
    num_wakes = NUM_WAKES // 10 if args.quick else NUM_WAKES
    with Report(args.out, ["nobody sleeps"]) as report:
        limit = {"nobody sleeps": plain_puts(num_wakes)}
        for elsewhere, costs in wakes(num_wakes).items():
            case = f"woken on {'another processor' if elsewhere else 'the processor of the waker'}"
            rows = [Row(case, "of all wakes", "share", len(costs) / num_wakes)]
            if costs:
                rows.append(Row(case, "put, median", "us", statistics.median(costs), limit))
            report.add(rows)


if __name__ == "__main__":
    main()
