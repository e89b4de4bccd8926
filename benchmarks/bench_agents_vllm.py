"""Coding agents inside vLLM: its own scheduler, first come, first served, and ours.

    make bench-agents-vllm [BENCH_FLAGS="--agents 20 --turns 12 --seeds 1,2,3"]
    python -m benchmarks.bench_agents_vllm [--quick] [--out FILE]      in the environment of `make test-vllm`

Recorded sessions, shorter by --scale in tokens and by --hurry in seconds, on a small random model: each agent
asks again when its answer is whole and it has thought as long as recorded. vLLM's blocks hold --device of the
working set (each agent's longest prompt, together), its prefix cache is on, and the connector's host tier is
--host times as large: it has what the device has, too, so with 1 both together hold no more. Each scheduler
is a vLLM of its own, one after the other, on the same requests.

    agents, seed N     time to the first token, and hits of all prompt tokens (device and host)
    agents, fits       the same where the device holds everything: nobody has to be ordered
    answers            that differ from vLLM's own scheduler's by the identity rule; ties are no difference

`vllm` is vLLM's own scheduler with the same connector; `fcfs` and `lpm` are ours with that policy.
Writes build/bench/agents_vllm.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Report, Row
from hiradix.apps.bench.agents import Smaller, draw_agents
from hiradix.apps.traces.crowd import Agent, Crowd
from tests.e2e.tiny_model import VOCAB_SIZE, write_tiny_model
from tests.vllm.player import Player, judge

SESSIONS = Path(__file__).resolve().parent / "data" / "agentic_sessions.jsonl.xz"
CLASS = "hiradix.adapters.vllm.HiRadixScheduler"
BLOCK = 32
CONTEXT = 16_384
THEIRS = "vllm"
Rows = list[dict[str, Any]]


def asked(agents: Sequence[Agent], smaller: Smaller) -> list[dict[str, Any]]:
    """What `play` is to ask."""
    return [
        {
            "name": agent.name,
            "start_s": agent.start_s / smaller.hurry,
            "turns": [
                {
                    "prompt": smaller.prompt(turn),
                    "max_tokens": smaller.answer_tokens(turn),
                    "think_s": turn.think_s / smaller.hurry,
                }
                for turn in agent.turns
            ],
        }
        for agent in agents
    ]


def play(
    model: Path, log: Path, policy: str, requests: list[dict[str, Any]], num_tokens: int, longest: int,
    args: argparse.Namespace,
) -> Rows:  # fmt: skip
    """All turns' rows of one vLLM of its own with `num_tokens` on the device, agent by agent."""
    own = {} if policy == THEIRS else {"scheduler_cls": CLASS}
    host = {"hicache_ratio": args.host, "schedule_policy": "cached" if policy == THEIRS else policy}
    player = Player(
        model, host, log, max_model_len=longest, hf_overrides={"max_position_embeddings": CONTEXT},
        block_size=BLOCK, num_gpu_blocks_override=num_tokens // BLOCK + 1, enable_prefix_caching=True,
        max_num_seqs=args.running, max_num_batched_tokens=args.chunk, **own,
    )  # fmt: skip
    try:
        player.wait()
        player.generate([list(range(10, 400)), list(range(20, 300))])  # what is made once is made
        rows = player.ask("agents", agents=requests, is_named=not args.anonymous)
    finally:
        player.kill()
    return [row for agent in rows for row in agent]


def figures(rows: Rows, num_tokens: int) -> dict[tuple[str, str], float]:
    """By metric and unit."""
    waits = sorted(row["ttft_s"] for row in rows)
    return {
        ("TTFT mean", "s"): statistics.fmean(waits),
        ("TTFT p95", "s"): waits[int(0.95 * (len(waits) - 1))],
        ("TTFT longest", "s"): waits[-1],
        ("hits", "%"): 100 * sum(row["cached"] or 0 for row in rows) / num_tokens,
    }


def rows_of(case: str, played: dict[str, Rows], num_tokens: int) -> Iterator[Row]:
    """Ours is `cached`; every other one is beside it."""
    found = {name: figures(rows, num_tokens) for name, rows in played.items()}
    ours = found.pop("cached")
    for (metric, unit), value in ours.items():
        yield Row(case, metric, unit, value, {name: own[metric, unit] for name, own in found.items()})
    identity = judge(played[THEIRS], played["cached"])
    yield Row(case, "answers", "different", float(len(identity.different)), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--turns", type=int, default=12, help="most requests of each")
    parser.add_argument("--seeds", default="1,2,3", help="of the draw")
    parser.add_argument("--scale", type=int, default=64)
    parser.add_argument("--hurry", type=float, default=24.0)
    parser.add_argument("--device", type=float, default=0.5, help="of the working set")
    parser.add_argument("--host", type=float, default=1.0, help="of the device, whose copy it has too")
    parser.add_argument("--policies", default="fcfs,lpm", help="of ours, beside cached")
    parser.add_argument("--running", type=int, default=8, help="most requests at once")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step")
    parser.add_argument("--anonymous", action="store_true", help="sessions have no names")
    parser.add_argument("--quick", action="store_true", help="a few agents, one seed, no other policy")
    parser.add_argument("--out", type=Path, default=Path("build/bench/agents_vllm.json"))
    args = parser.parse_args()
    if args.quick:
        args.agents, args.turns, args.seeds, args.policies, args.hurry = 4, 4, "1", "", 400.0
    smaller = Smaller(args.scale, args.hurry, VOCAB_SIZE)
    policies = [THEIRS, "cached", *filter(None, args.policies.split(","))]
    with Report(args.out, tuple(policies), ours="cached") as report, tempfile.TemporaryDirectory() as folder:
        report.about |= {name: str(value) for name, value in vars(args).items()}
        model = write_tiny_model(Path(folder) / "model")
        for seed in map(int, args.seeds.split(",")):
            crowd = Crowd(args.agents, args.turns, spread_s=600.0, seed=seed, shares_heads=False)
            agents = draw_agents(SESSIONS, crowd)
            requests = asked(agents, smaller)
            whole = smaller.working_set(agents)
            total = sum(len(turn["prompt"]) for agent in requests for turn in agent["turns"])
            least = (smaller.longest(agents) // BLOCK + 2) * BLOCK
            cases = [(f"agents, seed {seed}", max(least, int(args.device * whole)), policies)]
            if seed == 1:
                cases.append(("agents, fits", 2 * whole, policies[:2]))
            for case, num_tokens, names in cases:
                played = {
                    name: play(
                        model, Path(folder) / f"{case} {name}.log", name, requests, num_tokens, least, args
                    )
                    for name in names
                }
                report.add(rows_of(case, played, total))


if __name__ == "__main__":
    main()
