"""Does a better policy bring the first token sooner, on an engine that computes, and as the time model says?

    python benchmarks/bench_policy_e2e.py [--requests 2000] [--sizes 2000,3000] [--policies lru,ghd]
                                          [--clock cpu|wall] [--quick] [--out FILE]

The conversation trace scaled down: a block of 512 tokens is a page of 8, so a prompt of 12,000 tokens is one
of 190. The reference engine serves it, one request at a time, with a small Llama of random weights on one
core; the policies take turns at each request, an engine each. The lab plays the same scaled trace.

    hits      token hit rate of the second half, %: the engine's; beside it what the lab said
    ttft      mean time to the first token of the second half, ms: measured, and by the time model

The model knows two numbers, overhead and prefill rate. They come from 60 prompts that share nothing with the
trace or each other, served by an engine of their own now and then between the trace's, so that a machine
whose speed changes is calibrated as it is; not from what is predicted.
--clock cpu counts the engine thread's time, so that other work on the machine does not; wall, what a user
sees.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import Report, Row  # noqa: E402

from hiradix.apps.engine.api import EngineConfig, SamplingParams  # noqa: E402
from hiradix.apps.engine.engine import Engine  # noqa: E402
from hiradix.apps.replay.lab import Cell, CellResult, Source, run_cell  # noqa: E402
from hiradix.apps.replay.simulated_cache import Tiers  # noqa: E402
from hiradix.apps.replay.timing import Machine  # noqa: E402
from hiradix.apps.traces.trace import Trace, TraceRequest  # noqa: E402
from hiradix.config import HiCacheConfig  # noqa: E402

TRACE = HERE / "data" / "conversation_trace.jsonl.xz"
OUT = Path("build/bench/policy_e2e.json")
MODEL = Path("build/bench/e2e_model")
PAGE = 8
CONTEXT = 4096
VOCABULARY = 4096
CALIBRATION = 60  # prompts
WARM = 0.5

Clock = Callable[[], float]


def write_model(folder: Path) -> Path:
    """A Llama of four layers and random weights, unless it is there."""
    if not (folder / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def scaled(trace: Trace) -> Trace:
    """Its blocks as pages of `PAGE` tokens.

    Behind the last is at least one token, as an engine computes one, and no more than leave the page open
    when the answer's token is behind them: the lab caches no answers.
    """
    ratio = PAGE / trace.block_tokens

    def small(call: TraceRequest) -> TraceRequest:
        whole = len(call.blocks) * PAGE
        tail = min(max(int(call.prompt_tokens * ratio) - whole, 1), PAGE - 2)
        return call._replace(prompt_tokens=whole + tail, output_tokens=1)

    return replace(trace, name=f"{trace.name} 1/{round(1 / ratio)}", block_tokens=PAGE,
                   calls=tuple(map(small, trace.calls)))  # fmt: skip


def tokens_of(call: TraceRequest, number: int) -> list[int]:
    """A prompt: of each block tokens that its name decides, behind them what no other request has."""
    names = np.concatenate([call.blocks, [-1 - number]])
    digits = [names % VOCABULARY, names // VOCABULARY % VOCABULARY]
    digits += [(names * (2 * k + 1) * 40503 + k) % VOCABULARY for k in range(PAGE - len(digits))]
    found: list[int] = np.stack(digits, 1).reshape(-1)[: call.prompt_tokens].tolist()
    return found


@dataclass
class Served:
    """Per request: seconds to the first token, and tokens that were cached."""

    seconds: list[float]
    cached: list[int]


class Server:
    """An engine with one policy, served a prompt at a time."""

    def __init__(self, policy: str, num_blocks: int, clock: Clock):
        cache = HiCacheConfig(page_size=PAGE, radix_eviction_policy=policy)
        config = EngineConfig(
            str(write_model(MODEL)),
            max_total_tokens=num_blocks * PAGE,
            context_length=CONTEXT,
            chunked_prefill_size=None,
            cache=cache,
        )
        self._engine, self._clock = Engine(config), clock
        self.served = Served([], [])

    def serve(self, prompt: Sequence[int]) -> float:
        """Seconds to the first and only token of the answer."""
        engine, number = self._engine, len(self.served.seconds)
        begin = self._clock()
        engine.add_request(str(number), prompt, SamplingParams(max_new_tokens=1, temperature=0.0))
        outputs = engine.step()
        while not outputs:
            outputs = engine.step()
        self.served.seconds.append(self._clock() - begin)
        self.served.cached.append(outputs[-1].usage.cached_tokens)
        return self.served.seconds[-1]


class Calibration:
    """Overhead and prefill rate of prompts as long as the trace's, none of which shares anything."""

    def __init__(self, trace: Trace, clock: Clock):
        rng = np.random.default_rng(1)
        lengths = [call.prompt_tokens for call in trace.calls]
        self._count = min(CALIBRATION, len(trace.calls))
        lengths = np.quantile(lengths, np.linspace(0.02, 0.98, self._count)).astype(int)
        self._prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in rng.permutation(lengths)]
        self._server = Server("lru", 4 * CONTEXT, clock)
        for prompt in self._prompts[:5]:
            self._server.serve(prompt[::-1])  # warms up
        self._every = max(len(trace.calls) // self._count, 1)
        self._taken: list[float] = []

    def before(self, number: int) -> None:
        """A request of the trace is about to be served: now and then one of the calibration's goes first."""
        if number % self._every == 0 and len(self._taken) < self._count:
            self._taken.append(self._server.serve(self._prompts[len(self._taken)]))

    def machine(self) -> Machine:
        """What the prompts so far say."""
        lengths = [len(prompt) for prompt in self._prompts[: len(self._taken)]]
        rate, overhead = np.polyfit(lengths, self._taken, 1)
        return Machine(prefill_rate=float(1 / rate), overhead_s=max(float(overhead), 0.0))


def compare(trace: Trace, policies: Sequence[str], blocks: int, clock: Clock) -> list[Row]:
    """Serve the trace with every policy, in turn at each request; rows of measured and predicted."""
    servers = {policy: Server(policy, blocks, clock) for policy in policies}
    calibration = Calibration(trace, clock)
    for number, call in enumerate(trace.calls):
        calibration.before(number)
        prompt = tokens_of(call, number)
        for policy in policies if number % 2 else policies[::-1]:
            servers[policy].serve(prompt)
        if number % 200 == 199:
            print(f"{blocks} blocks: {number + 1} of {len(trace.calls)}", file=sys.stderr, flush=True)
    model = calibration.machine()
    print(f"{blocks} blocks: {model.prefill_rate:.0f} tokens/s, overhead {model.overhead_s * 1e3:.2f} ms")
    rows = []
    for policy, server in servers.items():
        cell = Cell(Source(str(TRACE)), policy, Tiers(blocks * PAGE))
        rows += _rows(CellResult(cell, trace, run_cell(cell, trace)), server.served, model)
    return rows


def _rows(result: CellResult, served: Served, model: Machine) -> list[Row]:
    trace, tiers = result.trace, result.cell.tiers
    span = slice(int(len(trace.calls) * WARM), None)
    hits = 100 * sum(served.cached[span]) / int(result.prompt_tokens[span].sum())
    measured, predicted = np.mean(served.seconds[span]), model.ttft_s(result, span).mean()
    case = f"{trace.name} {tiers.device // PAGE} blocks, {result.cell.policy}"
    return [
        Row(case, "hits", "%", hits, {"lab": result.rate(span)}),
        Row(case, "ttft", "ms", float(measured) * 1e3, {"model": float(predicted) * 1e3}),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of the trace")
    parser.add_argument("--sizes", default="2000,3000", help="device blocks")
    parser.add_argument("--policies", default="lru,ghd")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="16 requests, 500 blocks")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def main() -> None:
    """Calibrate, serve, compare; print and write the rows."""
    args = arguments()
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter
    if args.quick:
        args.requests, args.sizes = 16, "500"
    trace = scaled(Source(str(TRACE), limit=args.requests).load())
    with Report(args.out, ("lab", "model"), ours="engine") as report:
        report.about["clock"] = args.clock
        for size in args.sizes.split(","):
            report.add(compare(trace, args.policies.split(","), int(size), clock))


if __name__ == "__main__":
    main()
