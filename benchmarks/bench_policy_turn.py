"""What does the eviction policy add to a turn of the tree benchmark?

    python benchmarks/bench_policy_turn.py [--policy ghd] [--only TEXT,...] [--rounds 7] [--quick] ...

The cases of `bench_tree.py` that serve turns, with `lru` and with the policy, a process each: they alternate
every 50 turns, so that a machine whose speed changes is as fast for both. CPU time of the calling thread.
`us/turn` are medians of the rounds; `times lru` is the median of the rounds' ratios, between the least and
the largest. Rows with `(compiled)` run what `make compiled` built, if that is there; `(plain)` ones, Python.
`request calls` are what a scheduler makes; `bare turns` are match, lock, insert and unlock alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_tree import COMPILED, ROOT, Worker
from common import Report, Row

PART = 50  # turns that one does before it is the other's turn
OUT = Path("build/bench/policy_turn.json")


@dataclass(frozen=True)
class Planned:
    """A case of the tree benchmark."""

    name: str
    kind: str
    options: dict[str, object]

    @property
    def num_turns(self) -> int:
        count = self.options["count"]
        assert isinstance(count, int)
        return count * 8


def plan(quick: bool) -> Iterator[Planned]:
    few = {"count": 20}
    for page in (64,) if quick else (1, 64):
        turns: dict[str, object] = {"page": page, "turns": 8}
        yield Planned(f"request calls, page {page}", "requests", turns | (few if quick else {"count": 200}))
        yield Planned(f"bare turns, page {page}", "multi-turn", turns | (few if quick else {"count": 500}))
        for kind in ("round robin", "sliding"):
            options: dict[str, object] = {"page": page, "kind": kind, "count": 20 if quick else 150}
            yield Planned(f"host-tier {kind}, page {page}", "host-tier", options)


def a_round(workers: tuple[Worker, Worker], num_turns: int, number: int) -> list[float]:
    """Microseconds per turn of each."""
    seconds = [0.0, 0.0]
    for worker in workers:
        worker.do(do="begin")
    for part in range(-(-num_turns // PART)):
        for i in (0, 1) if (part + number) % 2 else (1, 0):
            seconds[i] += workers[i].do(do="some", count=PART)["seconds"]
    for worker in workers:
        worker.do(do="some", count=1)  # there is none: the round ends, and its threads
    return [s / num_turns * 1e6 for s in seconds]


def measure(case: Planned, form: str, workers: tuple[Worker, Worker], num_rounds: int) -> list[Row]:
    """workers: with the policy, with lru."""
    for worker in workers:
        worker.do(do="prepare", kind=case.kind, bare=False, options=case.options)
    rounds = [a_round(workers, case.num_turns, number) for number in range(num_rounds)]
    for worker in workers:
        worker.do(do="close")
    ours, lru = (statistics.median(costs) for costs in zip(*rounds))
    times = [cost / least for cost, least in rounds]
    spread = {"least": min(times), "largest": max(times)}
    name = case.name + form
    return [
        Row(name, "us/turn", "us", ours, {"lru": lru}),
        Row(name, "times lru", "x", statistics.median(times), spread),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", default="ghd")
    parser.add_argument("--only", default="", help="cases whose name has one of these texts, comma separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="twenty conversations, one round, pages of 64")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def main() -> None:
    """Measure; print and write the rows."""
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    texts = [text for text in args.only.split(",") if text]
    forms = {" (plain)": ROOT} | ({" (compiled)": COMPILED} if COMPILED.exists() else {})
    log = open(args.out.with_suffix(".log"), "w", encoding="utf-8")
    with log, Report(args.out, ("lru", "least", "largest"), ours=args.policy) as report:
        report.about["policy"] = args.policy
        workers: dict[str, tuple[Worker, Worker]] = {
            form: (_worker(log, package, args.policy), _worker(log, package, "lru"))
            for form, package in forms.items()
        }
        for case in plan(args.quick):
            for form, pair in workers.items():
                if not texts or any(text in case.name + form for text in texts):
                    report.add(measure(case, form, pair, 1 if args.quick else args.rounds))
                    print(f"{case.name}{form}", file=sys.stderr, flush=True)
        for pair in workers.values():
            for worker in pair:
                worker.close()


def _worker(log: Any, package: Path, policy: str) -> Worker:
    return Worker(sys.executable, "ours", log, package, policy)


if __name__ == "__main__":
    main()
