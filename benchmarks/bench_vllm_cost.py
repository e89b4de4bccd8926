"""What a connector costs a vLLM that never hits: CPU time beside none, pair by pair, in one process.

    make bench-vllm [COST_FLAGS="--pairs 100"]
    python -m benchmarks.bench_vllm_cost [--pairs 100] [--quick] [--out FILE]   in vLLM's environment

Every prompt runs once without a connector, once with one that does nothing, once with ours, in turns; nothing
repeats, and host memory is full, so that each save evicts. The engine's thread is what a request waits for;
the process counts what is copied in the background too. CPU time, because others' load does not count in it;
medians of ratios, with the interval that holds 95 % of medians of samples drawn anew from the pairs.
SmolLM2-135M, one torch thread, a prompt of ten blocks and an answer of sixteen tokens. Writes
build/bench/vllm-cost.json.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Report, Row, interval
from hiradix.apps.engine.smollm2 import smollm2_path
from tests.vllm.play import FIRST, Play

LIMIT = 0.01
BLOCK_SIZE = 32
KV_BYTES = 1 << 29  # room for the blocks asked for; without it vLLM first computes the longest batch
WARM_UP = 3
VOCAB = 49_000
NONE, EMPTY, OURS = "no connector", "a connector that does nothing", "hiradix"
CASES = {"prompt of 320 tokens": (320, 1), "answer of 16 tokens": (64, 16)}
WHAT = ("engine's thread", "process", "wall")
SCHEDULER = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups", "take_events", "get_kv_connector_stats",
)  # fmt: skip
WORKER = (
    "handle_preemptions", "bind_connector_metadata", "has_connector_metadata", "start_load_kv",
    "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_transfer_results",
    "get_block_ids_with_load_errors", "get_kv_connector_stats", "build_connector_worker_meta",
    "clear_connector_metadata",
)  # fmt: skip
Seconds = tuple[float, ...]  # in the order of WHAT


@dataclass
class Costs:
    """Of one case: seconds of each of WHAT, per connector and trial."""

    trials: dict[str, list[Seconds]] = field(default_factory=dict)

    def ratios(self, name: str, what: int) -> list[float]:
        pairs = zip(self.trials[name], self.trials[NONE], strict=True)
        return [own[what] / none[what] for own, none in pairs]

    def median_ms(self, name: str, what: int) -> float:
        return statistics.median(trial[what] for trial in self.trials[name]) * 1e3


class Switch(Play):
    """An engine whose connector can be taken out and put in again between requests."""

    def __init__(self, host_gb: float, dtype: str) -> None:
        engine = {
            "model": str(smollm2_path()), "dtype": dtype, "max_model_len": 1024, "enforce_eager": True,
            "max_num_seqs": 4, "block_size": BLOCK_SIZE, "enable_prefix_caching": False,
            "num_gpu_blocks_override": 200, "kv_cache_memory_bytes": KV_BYTES,
        }  # fmt: skip
        super().__init__({"engine": engine, "connector": {"hicache_size": host_gb}})
        from vllm.distributed.kv_transfer import kv_transfer_state

        self._state = kv_transfer_state
        self.core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.hasher = self.core.request_block_hasher
        self.stats = self._scheduler.connector_prefix_cache_stats
        self.ours = self._scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
        self.connectors = {NONE: (None, None), EMPTY: _empty(*self.ours), OURS: self.ours}

    @property
    def role(self) -> Any:
        return self.ours[1].worker.role

    def use(self, name: str) -> None:
        """From the next request on. Without a connector vLLM hashes no blocks either."""
        scheduler, worker = self.connectors[name]
        self._scheduler.connector, self._state._KV_CONNECTOR_AGENT = scheduler, worker
        self._scheduler.connector_prefix_cache_stats = None if scheduler is None else self.stats
        self.core.request_block_hasher = None if scheduler is None else self.hasher

    def seconds(self, prompt: Sequence[int], num_tokens: int) -> Seconds:
        """One request, as WHAT counts it; the process until its copies are done."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        self.llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        thread, wall = time.thread_time() - thread, time.perf_counter() - wall
        while self.role._saving:
            time.sleep(0.0005)
        return thread, time.process_time() - process, wall


def _empty(scheduler: Any, worker: Any) -> tuple[Any, Any]:
    """Both roles of a connector that does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    class Empty(ExampleConnector):  # type: ignore[misc]
        def __init__(self, like: Any) -> None:
            super(ExampleConnector, self).__init__(like._vllm_config, like.role, like._kv_cache_config)

        def get_num_new_matched_tokens(self, *args: Any) -> tuple[int, bool]:
            return 0, False

        def build_connector_meta(self, *args: Any) -> KVConnectorMetadata:
            return KVConnectorMetadata()

        def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
            """Nothing, as are the following."""

        update_state_after_alloc = wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv

    return Empty(scheduler), Empty(worker)


def prompts(seed: str, num_tokens: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(10, VOCAB) for _ in range(num_tokens)]


def measured(play: Switch, case: str, num_pairs: int) -> Costs:
    """The same prompts on each, who goes first in turns."""
    num_tokens, num_answers = CASES[case]
    costs, names = Costs({name: [] for name in play.connectors}), list(play.connectors)
    for number, prompt in zip(range(-min(WARM_UP, num_pairs), num_pairs), prompts(case, num_tokens)):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            play.use(name)
            seconds = play.seconds(prompt, num_answers)
            if number >= 0:
                costs.trials[name].append(seconds)
    return costs


def rows_of(every: dict[str, Costs]) -> Iterator[Row]:
    """What ours adds, beside a connector that does nothing, the ends of the interval, and the limit."""
    rng = np.random.default_rng(1)
    for case, costs in every.items():
        for what, text in enumerate(WHAT):
            ours, empty = (costs.ratios(name, what) for name in (OURS, EMPTY))
            low, high = (100 * (end - 1) for end in interval(ours, rng))
            peers = {"does nothing": 100 * (statistics.median(empty) - 1), "low": low, "high": high}
            peers |= {"limit": 100 * LIMIT} if what == 0 else {}
            added = 100 * (statistics.median(ours) - 1)
            yield Row(f"no hits, {case}", f"added to {text}", "%", added, peers)
            times = {"none": costs.median_ms(NONE, what), "does nothing": costs.median_ms(EMPTY, what)}
            yield Row(f"no hits, {case}", text, "ms", costs.median_ms(OURS, what), times)


# -- where the time goes --------------------------------------------------------------------------


def timed(target: Any, names: Sequence[str], book: list[int]) -> Callable[[], None]:
    """Counts the CPU nanoseconds of an object's methods into `book`; what it returns ends that."""

    def wrapped(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time_ns()
        try:
            return call(*args, **kwargs)
        finally:
            book.append(time.thread_time_ns() - begin)

    for name in names:
        setattr(target, name, partial(wrapped, getattr(target, name)))

    def end() -> None:
        for name in names:
            delattr(target, name)

    return end


def roles(play: Switch, num_requests: int) -> Iterator[Row]:
    """CPU time of each role per step, and of the copies, with what memcpy needs for the same bytes."""
    play.use(OURS)
    own = time.thread_time_ns
    empty = statistics.median([-own() + own() for _ in range(1000)])
    for case, (num_tokens, num_answers) in CASES.items():
        books: list[list[int]] = [[], [], []]
        pair = play.role._controller._copies._pairs[0]
        ends = [
            timed(play.ours[0], SCHEDULER, books[0]),
            timed(play.ours[1], WORKER, books[1]),
            timed(pair.transport, ("copy_pages",), books[2]),
        ]
        for _, prompt in zip(range(num_requests), prompts(f"{case} roles", num_tokens)):
            play.seconds(prompt, num_answers)
        for end in ends:
            end()
        steps = num_requests * num_answers
        scheduler, worker, copies = ((sum(book) - len(book) * empty) / steps / 1e3 for book in books)
        pages = (num_tokens + num_answers - 1) // BLOCK_SIZE
        limit = memcpy_us(pages * pair.host.page_bytes) / num_answers
        yield Row(f"no hits, {case}", "scheduler role per step", "us", scheduler)
        yield Row(f"no hits, {case}", "worker role per step", "us", worker)
        yield Row(f"no hits, {case}", "copies per step", "us", copies, {"memcpy": limit})


def memcpy_us(num_bytes: int) -> float:
    """Of memory that no cache holds."""
    source, target = (np.ones((16, num_bytes), np.uint8) for _ in range(2))
    took = []
    for row in range(len(source)):
        begin = time.thread_time_ns()
        np.copyto(target[row], source[row])
        took.append(time.thread_time_ns() - begin)
    return statistics.median(took) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--host-gb", type=float, default=0.1)
    parser.add_argument("--quick", action="store_true", help="a pair, in float32")
    parser.add_argument("--out", type=Path, default=Path("build/bench/vllm-cost.json"))
    args = parser.parse_args()
    for name, value in (FIRST | {"VLLM_LOGGING_LEVEL": "ERROR"}).items():
        os.environ.setdefault(name, value)
    num_pairs = 1 if args.quick else args.pairs
    with Report(args.out, ("none", "does nothing", "low", "high", "limit", "memcpy")) as report:
        dtype = "float32" if args.quick else "bfloat16"  # which not every processor computes in
        report.about |= {"pairs": num_pairs, "dtype": dtype}
        play = Switch(args.host_gb, dtype)
        for case in CASES:
            report.add(rows_of({case: measured(play, case, num_pairs)}))
        num_requests = 2 if args.quick else max(10, num_pairs // 3)
        report.optional("where the time goes", lambda: roles(play, num_requests))


if __name__ == "__main__":
    main()
