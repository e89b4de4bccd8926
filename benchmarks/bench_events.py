"""What do KV events cost the thread that schedules?

    python benchmarks/bench_events.py [--turns N] [--quick] [--out FILE]

Conversations of 200 to 600 new tokens a turn, over a full device tier: each turn matches, locks, evicts,
inserts and unlocks; page 64. One row per way, all ways measured in each round:

| way | what is done with what moves |
|---|---|
| off | nothing is noted |
| published | noted, and handed to the publisher's threads after every turn, as `hiradix serve` does |
| taken | named on the calling thread after every turn, as an engine that publishes itself does |

Microseconds of CPU per turn, medians of the rounds: of the calling thread, and of all threads. Writes
build/bench/events.json.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from common import Report, Row

from hiradix.events import KVEvents, KVEventsConfig
from hiradix.events.publisher import Publisher
from hiradix.tree import RadixKey, RadixTree, Tier

PAGE = 64
CONVERSATIONS = 60
NUM_PAGES = 6000
ROUNDS = 7
LOOPBACK = KVEventsConfig("zmq", "tcp://*:0", "tcp://*:0")


class Turns:
    """One life of a tree; `after` is called at the end of every turn."""

    def __init__(self, tree: RadixTree, after: Callable[[], object]):
        self.tree, self.after = tree, after
        self.free = list(range(NUM_PAGES))
        self.rng = np.random.default_rng(5)
        self.tokens = [self.rng.integers(0, 100_000, 0) for _ in range(CONVERSATIONS)]
        self.order = random.Random(5)
        self.num_new = 0

    def turn(self) -> None:
        """The next turn of some conversation; one that has 8,192 tokens begins anew."""
        tree, which = self.tree, self.order.randrange(CONVERSATIONS)
        if len(self.tokens[which]) > 8_192:
            self.tokens[which] = self.tokens[which][:0]
        new = self.rng.integers(0, 100_000, self.order.randint(200, 600))
        self.tokens[which] = np.concatenate([self.tokens[which], new])
        key = RadixKey(self.tokens[which]).page_aligned(PAGE)
        held = tree.lock(tree.match(key).device_node, Tier.DEVICE)
        need = key.num_pages(PAGE) - held.node.end
        if need > len(self.free):
            for drop in tree.evict(0, Tier.DEVICE, need - len(self.free)):
                self.free += drop.pages.tolist()
        self.num_new += need
        pages = np.array([self.free.pop() for _ in range(need)], np.int32)
        done = tree.insert(key, Tier.DEVICE, [pages], at=held)
        tree.unlock(held)
        tree.unlock(done.lock)
        self.after()


def nothing() -> None:
    """Events are off."""


def measured(way: str, num_turns: int) -> tuple[float, float, float]:
    """CPU microseconds per turn of this thread and of all threads, and new pages per turn."""
    tree = RadixTree(PAGE)
    publisher, after = None, nothing
    if way == "published":
        publisher = Publisher(LOOPBACK, KVEvents(tree), "127.0.0.1")
        after = publisher.flush
    elif way == "taken":
        after = KVEvents(tree).take  # type: ignore[assignment]
    turns = Turns(tree, after)
    while len(turns.free) > 20:
        turns.turn()
    gc.collect()
    turns.num_new = 0
    own, all_threads = time.thread_time(), time.process_time()
    for _ in range(num_turns):
        turns.turn()
    own = time.thread_time() - own
    if publisher is not None:
        publisher.close()
        assert publisher.num_dropped == 0, "the publisher fell behind"
    all_threads = time.process_time() - all_threads
    return own / num_turns * 1e6, all_threads / num_turns * 1e6, turns.num_new / num_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--turns", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="200 turns and one round")
    parser.add_argument("--out", type=Path, default=Path("build/bench/events.json"))
    args = parser.parse_args()
    num_turns, num_rounds = (200, 1) if args.quick else (args.turns, ROUNDS)
    found: dict[str, list[tuple[float, float, float]]] = {"off": [], "published": [], "taken": []}
    with Report(args.out, ["off"]) as report:
        for _ in range(num_rounds):
            for way, results in found.items():
                results.append(measured(way, num_turns))
        report.about |= {"policy": "lru", "new pages a turn": round(found["off"][0][2], 1)}
        off = [statistics.median(column) for column in zip(*found["off"], strict=True)]
        for way, results in found.items():
            for metric, column, without in zip(("turn", "turn, all threads"), zip(*results), off):
                report.add([Row(f"events {way}", metric, "us", statistics.median(column), {"off": without})])


if __name__ == "__main__":
    main()
