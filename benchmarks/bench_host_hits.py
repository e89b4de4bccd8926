"""From which prompt length on does a prefix on the host beat computing it again?

    python benchmarks/bench_host_hits.py [--device cuda] [--model llama-1b] [--quick] [--out FILE]

The reference engine answers each prompt three times with one token, from an idle engine: never seen, then
with its prefix evicted to the host, then with it on the device. The time is that of the steps until the token
is there. Rounds take turns over the lengths, each with prompts of its own; ratios are of pairs. Models:
`llama-1b` and `llama-tiny` have random weights; a folder is a model on disk, such as SmolLM2.

Where there is a GPU the load back and the pass run at once: `hidden` is the share of the load's own time, as
the transfer worker counts it, that a hit on the host did not take longer than one on the device. Writes
build/bench/host-hits.json; `rounds` in it are the raw numbers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from common import Report, Row, interval, need_device
from copy_bandwidth import machine

from hiradix.apps.engine import Engine, EngineConfig, SamplingParams
from hiradix.config import HiCacheConfig
from hiradix.prefix_cache import EvictParams, build_prefix_cache
from hiradix.transfer import JobKind

SIZES: dict[str, dict[str, int]] = {
    "llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "llama-tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
WAIT_S = 60.0
PEERS = ("computed", "device", "low", "high")


@dataclass(frozen=True)
class Round:
    """Seconds to the first token of one prompt, and of its load back alone; cached: tokens from the host."""

    num_tokens: int
    computed_s: float
    host_s: float
    device_s: float
    load_s: float
    cached: int


def main() -> None:
    args = parse()
    about = machine(args.device) | {"model": args.model, "dtype": args.dtype, "io_backend": args.io_backend}
    rounds: list[Round] = []
    with model_folder(args) as folder, Report(args.out, PEERS, ours="host") as report:
        report.about = about
        engine = make_engine(args, folder)
        try:
            rounds += measure(engine, args)
        finally:
            engine.close()
            report.raw["rounds"] = [asdict(one) for one in rounds]
            for num_tokens in args.tokens:
                if own := [one for one in rounds if one.num_tokens == num_tokens]:
                    report.add(rows_of(own))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    is_cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if is_cuda else "cpu")
    parser.add_argument("--model", default="llama-1b" if is_cuda else "llama-tiny", help="or a folder")
    parser.add_argument("--dtype", default="bfloat16" if is_cuda else "float32")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--io-backend", default="auto", choices=("auto", "kernel", "direct"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two short prompts, one round")
    parser.add_argument("--out", type=Path, default=Path("build/bench/host-hits.json"))
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = [128, 256], 1
    need_device(parser, args.device)
    return args


@contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[str]:
    """The model's folder; one of random weights is written to a temporary one."""
    if args.model not in SIZES:
        yield args.model
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES[args.model], max_position_embeddings=max(args.tokens) + 64)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        torch.set_default_dtype(getattr(torch, args.dtype))
        with torch.device(args.device):
            model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        del model
        yield folder


def make_engine(args: argparse.Namespace, folder: str) -> Engine:
    """With room for the longest prompt twice on the device, and for four on the host."""
    num_tokens = 2 * (max(args.tokens) + 3 * args.page_size) // args.page_size * args.page_size
    cache = HiCacheConfig(
        page_size=args.page_size,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_no_regret=False,
        hicache_io_backend=args.io_backend,
    )
    config = EngineConfig(
        folder,
        device=args.device,
        dtype=args.dtype,
        cache=cache,
        max_total_tokens=num_tokens,
        chunked_prefill_size=None,
        max_running_requests=1,
    )
    return Engine(config, build_cache=build_prefix_cache)


def measure(engine: Engine, args: argparse.Namespace) -> Iterator[Round]:
    """Rounds over all lengths; the first one warms up and does not count."""
    random = np.random.default_rng(0)
    for number in range(args.rounds + 1):
        for num_tokens in args.tokens:
            prompt = random.integers(3, engine.info().vocab_size, num_tokens).tolist()
            computed_s, _ = answer(engine, prompt)
            demote(engine)
            before = load_seconds(engine)
            host_s, cached = answer(engine, prompt)
            load_s = load_seconds(engine) - before
            device_s, _ = answer(engine, prompt)
            engine.flush()
            if number:
                yield Round(num_tokens, computed_s, host_s, device_s, load_s, cached)


def answer(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the prompt's token is there, and its tokens from the host; the engine is idle after."""
    engine.add_request("one", prompt, ONE_TOKEN)
    begin, outputs = time.perf_counter(), engine.step()
    while not any(output.finish_reason for output in outputs):
        outputs = engine.step()
    seconds = time.perf_counter() - begin
    settle(engine)
    return seconds, outputs[-1].usage.cached_host


def settle(engine: Engine) -> None:
    """Let transfers end."""
    deadline = time.monotonic() + WAIT_S
    while not engine.is_idle():
        engine.wait(0.01)
        engine.step()
        if time.monotonic() > deadline:
            raise RuntimeError(f"transfers did not end in {WAIT_S} s")


def demote(engine: Engine) -> None:
    """Have every page on the host alone."""
    engine.cache.evict(EvictParams(num_tokens=engine.info().max_total_tokens))


def load_seconds(engine: Engine) -> float:
    """What the worker has spent on load backs since start."""
    return float(engine.cache.controller.stats().kinds[JobKind.LOAD].busy_s)


def rows_of(rounds: list[Round]) -> list[Row]:
    """Of one length: medians, and the ratio of pairs with the middle 95 % of resampled medians."""
    ratios = [one.host_s / one.computed_s for one in rounds]
    low, high = interval(ratios, np.random.default_rng(0))
    hidden = [1 - max(0.0, one.host_s - one.device_s) / one.load_s for one in rounds if one.load_s > 0]
    computed, host, device = (
        statistics.median(getattr(one, name) for one in rounds) * 1e3
        for name in ("computed_s", "host_s", "device_s")
    )
    case = f"prompt of {rounds[0].num_tokens} tokens"
    ends = {"low": low, "high": high}
    return [
        Row(case, "first token", "ms", host, {"computed": computed, "device": device}),
        Row(case, "host / computed", "share", statistics.median(ratios), ends),
        Row(case, "from host", "tokens", float(min(one.cached for one in rounds))),
        *([Row(case, "load hidden", "share", max(0.0, statistics.median(hidden)))] if hidden else ()),
    ]


if __name__ == "__main__":
    main()
