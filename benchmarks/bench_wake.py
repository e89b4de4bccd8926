"""What does it cost a thread to wake another one, as the scheduler's does once in a turn over the host tier?

    python benchmarks/bench_wake.py

CPU time of one put into the queue that a sleeping thread waits for, as the transfer workers do: apart for
wakes after which that thread ran on the waker's processor, and on another. The other one is asleep, too, on a
machine with nothing else to do; to wake it takes an interrupt, which a virtual machine's host has to pass on.
So the same turn costs more there than on a busy machine.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from queue import SimpleQueue

NUM_WAKES = 4000
APART_S = 100e-6  # the waker's own work between two wakes: the other falls asleep


def main() -> None:
    """Wake, and print what that cost."""
    processor = ctypes.CDLL(None).sched_getcpu
    orders: SimpleQueue[bool] = SimpleQueue()
    answers: SimpleQueue[int] = SimpleQueue()

    def serve() -> None:
        while orders.get():
            answers.put(processor())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(NUM_WAKES):
        until = time.perf_counter() + APART_S
        while time.perf_counter() < until:
            pass
        own, begin = processor(), time.thread_time()
        orders.put(True)
        cost = time.thread_time() - begin
        taken[answers.get() != own].append(cost * 1e6)
    orders.put(False)
    thread.join()
    for elsewhere, costs in taken.items():
        where = "another processor" if elsewhere else "the waker's"
        middle = f"median {statistics.median(costs):.1f} us" if costs else "never"
        print(f"woken on {where}: {len(costs)} of {NUM_WAKES}, {middle}")


if __name__ == "__main__":
    main()
