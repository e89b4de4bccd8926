"""What a connector costs a vLLM that never hits: CPU time beside none, pair by pair, in one process.

    make bench-vllm [COST_FLAGS="--pairs 100"]

Every prompt runs once without a connector, once with one that does nothing, once with ours, in turns; nothing
repeats, and host memory is full, so that each save evicts. The engine's thread is what a request waits for;
the process counts what is copied in the background too. CPU time, because others' load does not count in it;
medians of ratios, with the interval that holds 95 % of medians of samples drawn anew from the pairs.
SmolLM2-135M, one torch thread, a prompt of ten blocks and an answer of sixteen tokens.
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
from typing import Any

import numpy as np

from benchmarks.common import interval, machine
from hiradix.engine.smollm2 import smollm2_path
from tests.vllm.play import FIRST, Play

LIMIT = 0.01
BLOCK_SIZE = 32
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

    def __init__(self, host_gb: float) -> None:
        engine = {
            "model": str(smollm2_path()), "dtype": "bfloat16", "max_model_len": 1024, "enforce_eager": True,
            "max_num_seqs": 4, "block_size": BLOCK_SIZE, "enable_prefix_caching": False,
            "num_gpu_blocks_override": 200,
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
    for number, prompt in zip(range(-3, num_pairs), prompts(case, num_tokens)):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            play.use(name)
            seconds = play.seconds(prompt, num_answers)
            if number >= 0:
                costs.trials[name].append(seconds)
    return costs


def report(every: dict[str, Costs]) -> str:
    rng = np.random.default_rng(1)
    lines = [f"{'overhead zero hits':40}{NONE:>14}{OURS:>29}{'limit':>7}{EMPTY:>31}"]
    for case, costs in every.items():
        for what, text in enumerate(WHAT):
            cells = [_change(costs.ratios(name, what), rng) for name in (OURS, EMPTY)]
            limit = f"{LIMIT:.0%}" if what == 0 else ""
            none = f"{costs.median_ms(NONE, what):,.1f} ms"
            lines.append(f"{case + ', ' + text:40}{none:>14}{cells[0]:>29}{limit:>7}{cells[1]:>31}")
    return "\n".join(lines)


def _change(ratios: Sequence[float], rng: np.random.Generator) -> str:
    low, high = (end - 1 for end in interval(ratios, rng))
    return f"{statistics.median(ratios) - 1:+.2%} ({low:+.2%} .. {high:+.2%})"


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


def roles(play: Switch, num_requests: int) -> str:
    """CPU time of each role per step, and of the copies, with what memcpy needs for the same bytes."""
    play.use(OURS)
    own = time.thread_time_ns
    empty = statistics.median([-own() + own() for _ in range(1000)])
    lines = [
        f"{'of which, us per step':40}{'scheduler role':>18}{'worker role':>14}{'copies':>12}{'memcpy':>10}"
    ]
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
        lines.append(f"{case:40}{scheduler:>18,.0f}{worker:>14,.0f}{copies:>12,.0f}{limit:>10,.0f}")
    return "\n".join(lines)


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
    args = parser.parse_args()
    for name, value in (FIRST | {"VLLM_LOGGING_LEVEL": "ERROR"}).items():
        os.environ.setdefault(name, value)
    play = Switch(args.host_gb)
    every = {case: measured(play, case, args.pairs) for case in CASES}
    print(report(every))
    print(roles(play, max(10, args.pairs // 3)))
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    print(f"{args.pairs} pairs; {about}")


if __name__ == "__main__":
    main()
