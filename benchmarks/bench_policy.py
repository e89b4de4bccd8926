"""Which eviction policy serves how many tokens: the real tree on a real trace, beside models and the optimum.

    conversation second 3M   token hit rate of the second half of the trace, warm from the first, 3 M tokens
    times x10 ...            the same with all time stamps multiplied
    loop, agents, ...        seeded and invented: robustness, no claim about traffic; whole trace
    ... again                of two equal runs, the share whose every decision was the same
    cost                     CPU time a request of the replay takes, tree, cache and policy together

make bench-policy prints the table and writes build/bench/policy.json; --quick plays
100 requests of each trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import Report, Row  # noqa: E402

from hiradix.apps.replay.generate import KINDS  # noqa: E402
from hiradix.apps.replay.lab import Cell, CellResult, Source  # noqa: E402
from hiradix.apps.replay.main import play, tokens  # noqa: E402
from hiradix.apps.replay.report import span_of  # noqa: E402
from hiradix.apps.replay.simulated_cache import Tiers  # noqa: E402

TRACE = HERE / "data" / "conversation_trace.jsonl.xz"
SIZES = ("0.5M", "1M", "3M", "5M", "10M", "25M")
OURS = "ghd"
PEERS = ("lru", "lfu", "slru", "fifo", "2q", "arc", "s3fifo", "sieve", "belady")
SYNTHETIC_PEERS = ("lru", "2q", "belady")
SYNTHETIC_SIZES = ("0.5M", "1M", "3M", "5M")
SCALES = (0.1, 10.0)
OUT = Path("build/bench/policy.json")

Key = tuple[str, str, str]  # case, policy, size


def plan(limit: int | None) -> dict[Key, Cell]:
    """Every cell of the benchmark by what it is for."""
    conversation = Source(str(TRACE), limit=limit)
    cells: dict[Key, Cell] = {}

    def add(case: str, source: Source, policies: Sequence[str], sizes: Sequence[str]) -> None:
        for size in sizes:
            for policy in policies:
                cells[case, policy, size] = Cell(source, policy, Tiers(tokens(size)))

    add("conversation second", conversation, (OURS, *PEERS), SIZES)
    add("again", conversation, (OURS,), ("3M",))
    for scale in SCALES:
        scaled = Source(str(TRACE), limit=limit, time_scale=scale)
        add(f"conversation second, times x{scale:g},", scaled, (OURS, "lru"), ("1M", "3M", "5M"))
    for kind in KINDS:
        source = Source(f"synthetic:{kind}", seed=1, limit=limit)
        add(f"synthetic {kind}", source, (OURS, *SYNTHETIC_PEERS), SYNTHETIC_SIZES)
    return cells


def rows_of(found: dict[Key, CellResult]) -> list[Row]:
    """The rows of the report."""
    rows = []
    for case, policy, size in found:
        if policy != OURS or case == "again":
            continue
        warm = 0.5 if case.startswith("conversation") else 0.0
        rates = {
            other: outcome.rate(span_of(outcome, warm))
            for (c, other, s), outcome in found.items()
            if c == case and s == size
        }
        ours = rates.pop(OURS)
        rows.append(Row(f"{case} {size}", "token hit rate", "%", ours, rates))
    return [*rows, _again(found), *_cost(found)]


def _again(found: dict[Key, CellResult]) -> Row:
    one = found["conversation second", OURS, "3M"].played.decisions
    same = one == found["again", OURS, "3M"].played.decisions
    return Row("conversation 3M again", "same decisions", "%", 100.0 * same)


def _cost(found: dict[Key, CellResult]) -> list[Row]:
    rows = []
    for size in SIZES:
        cost = {
            policy: outcome.played.cpu_s / len(outcome.trace.calls) * 1e6
            for (case, policy, s), outcome in found.items()
            if case == "conversation second" and s == size and policy in (OURS, "lru", "lfu", "2q")
        }
        rows.append(Row(f"conversation {size} cost", "us/request", "us", cost.pop(OURS), cost))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_policy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100 requests of each trace")
    parser.add_argument("--processes", type=int, default=2, help="at work at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"rows as JSON (default: {OUT})")
    args = parser.parse_args()
    cells = plan(100 if args.quick else None)
    with Report(args.out, PEERS, ours=OURS) as report:
        found = dict(zip(cells, play(list(cells.values()), args.processes)))
        report.about["trace sha256"] = _source(found)
        report.add(rows_of(found))
    return 0


def _source(found: dict[Key, CellResult]) -> str:
    return found["conversation second", OURS, "3M"].trace.source


if __name__ == "__main__":
    sys.exit(main())
