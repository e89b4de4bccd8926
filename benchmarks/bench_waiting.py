"""How much of what storage has for them do requests use that wait for each other?

    python benchmarks/bench_waiting.py [--prompts 40] [--tokens 401] [--at-once 1,10,20,40]
                                       [--quick] [--out FILE]

Prompts that share nothing are served and stored; then an engine begins anew, with a device of 2,048 tokens,
a host of 4,096 and empty, and gets the same prompts, so many at once: as one is answered the next arrives.
The reference engine with a small Llama of random weights, over a file store.

    used      tokens that were served from storage, of those it has for the prompts, %
    fetched   tokens that were read from storage, per token that was served from there

Beside `used`: the same engine where nothing is held for requests that wait, and all that are found in storage
are read as they arrive (`nothing held`). Writes build/bench/waiting.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_policy_e2e import MODEL, VOCABULARY, write_model  # noqa: E402
from common import Report, Row  # noqa: E402

from hiradix.apps.engine.api import EngineConfig, SamplingParams  # noqa: E402
from hiradix.apps.engine.engine import Engine  # noqa: E402
from hiradix.config import HiCacheConfig, parse_extra_config  # noqa: E402
from tests.cache.nothing_held import NothingHeld  # noqa: E402

PAGE = 16
DEVICE_TOKENS = 2048
OUT = Path("build/bench/waiting.json")


def config_of(folder: Path) -> EngineConfig:
    """Small pools over a file store; a request waits for all that is read for it."""
    keys = {"prefetch_threshold": PAGE, "file_storage_path": str(folder), "deadline_s": 60}
    cache = HiCacheConfig(
        page_size=PAGE, enable_hierarchical_cache=True, hicache_no_regret=False, hicache_ratio=2.0,
        hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=parse_extra_config(json.dumps(keys)),
    )  # fmt: skip
    return EngineConfig(
        str(write_model(MODEL)), max_total_tokens=DEVICE_TOKENS, context_length=DEVICE_TOKENS, cache=cache
    )


def serve(engine: Engine, prompts: Sequence[Sequence[int]], at_once: int) -> int:
    """Serve all, `at_once` of them at a time. The tokens that came from storage."""
    left, used, outstanding = list(enumerate(prompts)), 0, 0
    while left or outstanding:
        while left and outstanding < at_once:
            number, prompt = left.pop(0)
            engine.add_request(str(number), prompt, SamplingParams(max_new_tokens=2, temperature=0.0))
            outstanding += 1
        for output in engine.step():
            if output.finish_reason is not None:
                outstanding -= 1
                used += 0 if output.usage is None else output.usage.cached_storage
        if engine.is_blocked:
            engine.wait(1.0)
    return used


def settle(engine: Engine) -> None:
    """Let what is under way to the host and to storage end."""
    while not engine.is_idle():
        engine.wait(0.1)
        engine.step()


def measured(config: EngineConfig, prompts: Sequence[Sequence[int]], at_once: int) -> tuple[float, float]:
    """A new engine: the share of what storage has that was used, in %, and tokens fetched per token used."""
    engine = Engine(config)
    try:
        used = serve(engine, prompts, at_once)
        fetched = engine.cache.stats().prefetched
    finally:
        engine.close()
    stored = sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
    return 100 * used / stored, fetched / used if used else float("nan")


def nothing_held(config: EngineConfig, prompts: Sequence[Sequence[int]], at_once: int) -> float:
    """`measured`'s share where nothing is held for who waits."""
    from hiradix.cache import core

    own, core.Prefetcher = core.Prefetcher, NothingHeld  # type: ignore[misc]
    try:
        return measured(config, prompts, at_once)[0]
    finally:
        core.Prefetcher = own  # type: ignore[misc]


def main() -> None:
    """Store, begin anew for each number at once, and print what was used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=401)
    parser.add_argument("--at-once", default="1,10,20,40")
    parser.add_argument("--quick", action="store_true", help="12 prompts, 1 and 12 at once")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    num_prompts = 12 if args.quick else args.prompts
    numbers = [1, 12] if args.quick else [int(number) for number in args.at_once.split(",")]
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, VOCABULARY, (num_prompts, args.tokens)).tolist()
    with tempfile.TemporaryDirectory() as folder, Report(args.out, ["nothing held"]) as report:
        config = config_of(Path(folder))
        first = Engine(replace(config))
        serve(first, prompts, 1)
        settle(first)
        first.close()
        for at_once in numbers:
            used, fetched = measured(config, prompts, at_once)
            case = f"{num_prompts} prompts of {args.tokens} tokens, {at_once} at once"
            peer = {"nothing held": nothing_held(config, prompts, at_once)}
            report.add([Row(case, "used", "%", used, peer), Row(case, "fetched", "per used", fetched)])


if __name__ == "__main__":
    main()
