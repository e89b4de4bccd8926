"""Does a better policy bring the first token sooner, on an engine that computes, and as the time model says?

    python benchmarks/bench_policy_e2e.py [--requests 2000] [--sizes 2000,3000] [--policies lru,ghd]
                                          [--clock cpu|wall]

The conversation trace scaled down: a block of 512 tokens is a page of 8, so a prompt of 12,000 tokens is one
of 190. The reference engine serves it, one request at a time, with a small Llama of random weights on one
core; the policies take turns at each request, an engine each. The lab plays the same scaled trace.

    hits      token hit rate of the second half, %: the engine's; beside it what the lab said
    ttft      mean time to the first token of the second half, ms: measured, and by the time model

The model knows two numbers, overhead and prefill rate. They come from prompts that share nothing with the
trace or each other (60 of them, before the trace's first request), not from what is predicted.
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
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import Row, machine, table, write_json  # noqa: E402

from hiradix.config import HiCacheConfig  # noqa: E402
from hiradix.engine.api import EngineConfig, SamplingParams  # noqa: E402
from hiradix.engine.engine import Engine  # noqa: E402
from hiradix.replay.lab import Cell, Outcome, Source, run_cell  # noqa: E402
from hiradix.replay.stage import Tiers  # noqa: E402
from hiradix.replay.timing import Machine  # noqa: E402
from hiradix.replay.trace import Call, Trace  # noqa: E402

TRACE = HERE / "data" / "conversation_trace.jsonl.xz"
OUT = Path("build/bench/policy_e2e.json")
MODEL = Path("build/bench/e2e_model")
PAGE = 8
CONTEXT = 4096
VOCABULARY = 4096
CALIBRATION = 60  # prompts
WARM = 0.5

Clock = Callable[[], float]
Floats = npt.NDArray[np.float64]


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

    def small(call: Call) -> Call:
        whole = len(call.blocks) * PAGE
        tail = min(max(int(call.prompt_tokens * ratio) - whole, 1), PAGE - 2)
        return call._replace(prompt_tokens=whole + tail, output_tokens=1)

    return replace(trace, name=f"{trace.name} 1/{round(1 / ratio)}", block_tokens=PAGE,
                   calls=tuple(map(small, trace.calls)))  # fmt: skip


def tokens_of(call: Call, number: int) -> list[int]:
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


def calibrate(trace: Trace, clock: Clock) -> Machine:
    """Overhead and prefill rate of prompts as long as the trace's, none of which shares anything."""
    lengths = np.quantile([call.prompt_tokens for call in trace.calls], np.linspace(0.02, 0.98, CALIBRATION))
    server, rng = Server("lru", 4 * CONTEXT, clock), np.random.default_rng(1)
    lengths = rng.permutation(lengths.astype(int))
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
    for prompt in prompts[:5]:
        server.serve(prompt[::-1])  # warms up
    taken = np.array([server.serve(prompt) for prompt in prompts])
    rate, overhead = np.polyfit(lengths, taken, 1)
    return Machine(prefill_rate=float(1 / rate), overhead_s=max(float(overhead), 0.0))


def compare(trace: Trace, policies: Sequence[str], blocks: int, timing: tuple[Machine, Clock]) -> list[Row]:
    """Serve the trace with every policy, in turn at each request; rows of measured and predicted."""
    model, clock = timing
    servers = {policy: Server(policy, blocks, clock) for policy in policies}
    for number, call in enumerate(trace.calls):
        prompt = tokens_of(call, number)
        order = policies if number % 2 else policies[::-1]
        for policy in order:
            servers[policy].serve(prompt)
        if number % 200 == 199:
            print(f"{blocks} blocks: {number + 1} of {len(trace.calls)}", file=sys.stderr, flush=True)
    span = slice(int(len(trace.calls) * WARM), None)
    rows = []
    prompts = np.array([call.prompt_tokens for call in trace.calls])[span]
    for policy, server in servers.items():
        tiers = Tiers(blocks * PAGE)
        cell = Cell(Source(str(TRACE)), policy, tiers)
        outcome = Outcome(cell, trace, run_cell(cell, trace))
        hits = 100 * np.array(server.served.cached)[span].sum() / prompts.sum()
        case = f"{trace.name} {blocks} blocks, {policy}"
        rows.append(Row(case, "hits", "%", float(hits), {"lab": outcome.rate(span)}))
        measured = float(np.mean(server.served.seconds[span])) * 1e3
        rows.append(
            Row(case, "ttft", "ms", measured, {"model": float(model.ttft_s(outcome, span).mean()) * 1e3})
        )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--sizes", default="2000,3000", help="device blocks")
    parser.add_argument("--policies", default="lru,ghd")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def main() -> None:
    """Calibrate, serve, compare; print and write the rows."""
    args = arguments()
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter
    trace = scaled(Source(str(TRACE), limit=args.requests).load())
    model = calibrate(trace, clock)
    about = machine() | {"clock": args.clock, "prefill tokens/s": round(model.prefill_rate),
                         "overhead ms": round(model.overhead_s * 1e3, 2)}  # fmt: skip
    print("  ".join(f"{name}={value}" for name, value in about.items()), flush=True)
    rows: list[Row] = []
    for size in args.sizes.split(","):
        rows += compare(trace, args.policies.split(","), int(size), (model, clock))
    print(table(rows, ("lab", "model")).replace("hiradix", " engine"))
    write_json(args.out, rows, about)


if __name__ == "__main__":
    main()
