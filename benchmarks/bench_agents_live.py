"""Coding agents against real servers: who waits how long for the first token, by the order of service.

    make bench-agents-live
    python benchmarks/bench_agents_live.py [--rounds N] [--agents N] [--turns N] [--hurry X] [--quick]

20 real sessions, their tokens divided by 64, closed loop over HTTP (`hiradix.apps.bench.agents`), each agent
with a session of its own. `hiradix serve` with a tiny random Llama on this CPU: one process for each play, on
an empty cache; the orders take turns. Device, host and disk tier:

Each server first computes a few prompts that nothing repeats, so that it knows what computing costs.

    half      the device holds half of the agents' longest prompts, the host as much; what the disk may keep is
              as much again
    fetched   the same, and the disk keeps everything
    fits      the device holds all

Ours is `cached`, the peers are `fcfs` and `lpm`. Answers are compared with those of the first play, request by
request: `answers that differ`. Medians of the rounds; of the longest wait the longest. Writes
build/bench/agents-live.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import Report, Row  # noqa: E402

from hiradix.apps.bench.agents import AgentPlayer, AgentRun, Smaller, draw_agents  # noqa: E402
from hiradix.apps.demo.process import ServerProcess  # noqa: E402
from hiradix.apps.traces.crowd import Agent, Crowd  # noqa: E402
from tests.e2e.tiny_model import SIZES, write_tiny_tokenizer  # noqa: E402
from tests.seeded_model import seeded_model  # noqa: E402

TRACE = HERE / "data" / "agentic_sessions.jsonl.xz"
OUT = Path("build/bench/agents-live.json")
ORDERS = ("cached", "fcfs", "lpm")
CONTEXT = 32_768
PAGE = 8  # a recorded block
WARM_UP = (400, 800, 1600, 500, 1000, 2000, 700, 1200)  # tokens of prompts before the agents'
METRICS = {
    "TTFT mean": "s", "TTFT p50": "s", "TTFT p95": "s", "TTFT longest": "s", "hits": "%", "hits device": "%",
    "hits host": "%", "hits storage": "%", "took": "s",
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Device pool and host pool, in shares of the working set; of the disk the same, None: all that comes."""

    name: str
    device: float
    host: float
    disk: float | None


SETTINGS = (
    Setting("half", 0.5, 0.5, 0.5),
    Setting("fetched", 0.5, 0.5, None),
    Setting("fits", 1.3, 1.3, None),
)


@dataclass
class Bench:
    """One machine's run: a model, agents, and what they were answered first."""

    folder: Path
    agents: Sequence[Agent]
    smaller: Smaller
    is_verbose: bool
    first: dict[str, str] = field(default_factory=dict)
    num_plays: int = 0

    def model(self) -> Path:
        """A model whose prompts cost something beside the rest of a server."""
        folder = self.folder / "model"
        if not folder.exists():
            folder.mkdir()
            write_tiny_tokenizer(folder)
            fields = SIZES | {"max_position_embeddings": CONTEXT}
            seeded_model("Llama", 0, **fields, num_hidden_layers=2).save_pretrained(folder)
        return folder

    def play(self, setting: Setting, order: str) -> tuple[AgentRun, int]:
        """On a server of its own; and how many answers differ from the first play's."""
        self.num_plays += 1
        here = self.folder / f"play {self.num_plays}"
        here.mkdir()
        with ServerProcess(self._flags(setting, order, here), here / "log") as server:
            player = AgentPlayer(server.url, self.smaller)
            asyncio.run(player.warm_up(WARM_UP))
            played = asyncio.run(player.play(self.agents))
        answers = played.answers()
        self.first = self.first or answers
        differ = sum(answers[name] != answer for name, answer in self.first.items())
        if self.is_verbose:
            figures = {name: round(value, 3) for name, value in played.figures().items()}
            print(setting.name, order, json.dumps(figures), f"differ {differ}", file=sys.stderr, flush=True)
        return played, differ

    def _flags(self, setting: Setting, order: str, here: Path) -> list[str]:
        working_set = self.smaller.working_set(self.agents)
        device = int(setting.device * working_set) // PAGE * PAGE
        least = self.smaller.longest(self.agents) + 16 * PAGE
        disk: dict[str, object] = {"disk_storage_path": str(here / "pages")}
        if setting.disk is not None:
            disk["max_size"] = int(setting.disk * working_set * self._token_bytes())
        return [
            "--model-path", str(self.model()), "--page-size", str(PAGE), "--schedule-policy", order,
            "--max-total-tokens", str(max(device, least)), "--enable-hierarchical-cache",
            "--hicache-ratio", str(setting.host / setting.device),
            "--hicache-storage-backend", "disk",
            "--hicache-storage-backend-extra-config", json.dumps(disk),
            "--max-running-requests", "32", "--chunked-prefill-size", "512",
        ]  # fmt: skip

    @staticmethod
    def _token_bytes() -> int:
        return 2 * 2 * int(SIZES["num_key_value_heads"]) * int(SIZES["head_dim"]) * 4


def rows_of(setting: Setting, found: dict[str, list[tuple[AgentRun, int]]], num_agents: int) -> list[Row]:
    """A row for each metric; ours is `cached`."""
    case, rows = f"{num_agents} agents, {setting.name}", []
    for metric, unit in METRICS.items():
        pick = max if metric == "TTFT longest" else statistics.median
        values = {
            order: float(pick([played.figures()[metric] for played, _ in plays]))
            for order, plays in found.items()
        }
        rows.append(Row(case, metric, unit, values.pop("cached"), values))
    differ = {order: float(max(count for _, count in plays)) for order, plays in found.items()}
    return [*rows, Row(case, "answers that differ", "", differ.pop("cached"), differ)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spread", type=float, default=600.0)
    parser.add_argument("--hurry", type=float, default=10.0)
    parser.add_argument("--settings", default=",".join(setting.name for setting in SETTINGS))
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--quick", action="store_true", help="4 agents of 2 turns, one round")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.agents, args.turns, args.hurry, args.settings = 1, 4, 2, 1000.0, "half"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    crowd = Crowd(args.agents, args.turns, args.spread, args.seed, shares_heads=False)
    orders = args.orders.split(",")
    with (
        Report(args.out, [o for o in orders if o != "cached"], ours="cached") as report,
        tempfile.TemporaryDirectory() as folder,
    ):
        agents = draw_agents(TRACE, crowd)
        bench = Bench(Path(folder), agents, Smaller(hurry=args.hurry), args.verbose)
        for setting in (s for s in SETTINGS if s.name in args.settings.split(",")):
            found: dict[str, list[tuple[AgentRun, int]]] = {order: [] for order in orders}
            for number in range(args.rounds):
                for shift in range(len(orders)):
                    order = orders[(number + shift) % len(orders)]
                    found[order].append(bench.play(setting, order))
            report.add(rows_of(setting, found, args.agents))


if __name__ == "__main__":
    main()
