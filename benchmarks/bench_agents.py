"""Coding agents whose prompts do not all fit the cache: what eviction serves, and what the order of service.

    fleet 240 2M             token hit rate of 240 real sessions, one per minute, warm from the first 30 % of
                             their requests, 2 M tokens; open loop: each request at its recorded time
    40 agents over 2M, ...   closed loop: agents that wait for their answers, one server of 20,000 tokens/s of
                             prefill, the real cache (lru) and the real admission policies; hits, and seconds
                             to the first token. `admit`: whole sessions admitted first come, first served
    ... all seeds            means of the three; of the longest wait the longest
    most agents, ...         agents for each GiB of memory with a p95 time to first token of 30 seconds

make bench-agents prints the table and writes build/bench/agents.json; --quick plays few agents of few turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import Report, Row  # noqa: E402

from hiradix.apps.replay.closed_loop import Answered, ServerRates  # noqa: E402
from hiradix.apps.replay.closed_report import ClosedCell, most_agents  # noqa: E402
from hiradix.apps.replay.lab import Cell, Source  # noqa: E402
from hiradix.apps.replay.main import play, tokens  # noqa: E402
from hiradix.apps.replay.report import span_of  # noqa: E402
from hiradix.apps.replay.simulated_cache import Tiers  # noqa: E402
from hiradix.apps.replay.timing import Machine  # noqa: E402
from hiradix.apps.traces.crowd import Crowd  # noqa: E402
from hiradix.apps.traces.records import open_records  # noqa: E402
from hiradix.apps.traces.sessions import Fleet, SessionFile, read_sessions  # noqa: E402
from hiradix.policy.admission import AdmissionPolicy, WaitingRequest  # noqa: E402

TRACE = HERE / "data" / "agentic_sessions.jsonl.xz"
OUT = Path("build/bench/agents.json")
WARM = 0.3
EVICTION = ("ghd", "lru", "2q", "belady")
SIZES = ("1M", "2M", "8M")
SETTINGS = ((40, 600.0, "2M"), (40, 60.0, "3M"), (80, 600.0, "4M"), (40, 600.0, "8M"))
SEEDS = (1, 2, 3)
ORDERS = ("cached", "fcfs", "lpm", "admit")
SERVER = ServerRates(Machine(prefill_rate=20_000.0))
P95_S = 30.0
METRICS = (("hits", "%"), ("mean", "s"), ("p95", "s"), ("longest", "s"))


class SessionAdmission(AdmissionPolicy):
    """Whole sessions enter first come, first served while their footprints fit; whoever idles for 30 s leaves
    when another wants to enter. Those inside are served first come, first served."""

    name = "admit"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.inside: dict[str, int] = {}
        self.idle_since_s: dict[str, float] = {}
        self.num_running = 0

    def add(self, request: WaitingRequest) -> None:
        super().add(request)
        self.idle_since_s.pop(request.session, None)

    def start(self, rid: str, now_s: float) -> None:
        super().start(rid, now_s)
        request = self.waiting[rid]
        self.num_running += 1
        for name in self._leavers(request, now_s):
            del self.inside[name]
        self.inside[request.session] = max(self.inside.get(request.session, 0), request.footprint)

    def end(self, session: str, now_s: float, stop: str = "") -> None:
        self.num_running -= 1
        self.idle_since_s[session] = now_s

    def forget(self, session: str) -> None:
        self.inside.pop(session, None)
        self.idle_since_s.pop(session, None)

    def order(self, now_s: float, prices: Mapping[str, float]) -> list[str]:
        waiting = list(self.waiting.values())
        under_way = [r.rid for r in waiting if r.has_started]
        inside = [r.rid for r in waiting if r.session in self.inside and not r.has_started]
        first = next((r for r in waiting if r.session not in self.inside), None)
        if first is None or inside or under_way:
            return under_way + inside
        leaving = self._leavers(first, now_s)
        used = sum(n for name, n in self.inside.items() if name not in leaving)
        return [first.rid] if used + first.footprint <= self.capacity or not self.num_running else []

    def _leavers(self, request: WaitingRequest, now_s: float) -> list[str]:
        used, leaving = sum(self.inside.values()), []
        for since_s, name in sorted((t, name) for name, t in self.idle_since_s.items()):
            if request.session in self.inside or used + request.footprint <= self.capacity:
                break
            if name in self.inside and now_s - since_s > 30.0:
                leaving.append(name)
                used -= self.inside[name]
        return leaving


def fleet_rows(is_quick: bool, processes: int) -> Iterator[Row]:
    """Open loop: eviction alone."""
    fleet = Fleet(8 if is_quick else 240, 60.0, 7)
    source = Source(str(TRACE), limit=200 if is_quick else None, fleet=fleet)
    cells = [Cell(source, policy, Tiers(tokens(size))) for size in SIZES for policy in EVICTION]
    found = play(cells, processes)
    for size in SIZES:
        rates = {
            outcome.cell.policy: outcome.rate(span_of(outcome, WARM))
            for outcome in found
            if outcome.cell.tiers.device == tokens(size)
        }
        yield Row(f"fleet {fleet.sessions} {size}", "token hit rate", "%", rates.pop("ghd"), rates)


def closed_rows(file: SessionFile, is_quick: bool) -> Iterator[Row]:
    """Closed loop: each order of service in each setting, by seed and over all seeds."""
    for num_agents, spread_s, size in SETTINGS:
        crowd = Crowd(4, 4, 10.0) if is_quick else Crowd(num_agents, 40, spread_s)
        case = f"{num_agents} agents over {size}"
        by_seed: list[dict[str, dict[str, float]]] = []
        for seed in SEEDS[:1] if is_quick else SEEDS:
            drawn = replace(crowd, seed=seed, shares_heads=False)
            found = {order: figures(play_closed(drawn, size, order, file)) for order in ORDERS}
            by_seed.append(found)
            yield from rows_of(f"{case}, seed {seed}", found)
        yield from rows_of(
            f"{case}, all seeds", {order: over_seeds([f[order] for f in by_seed]) for order in ORDERS}
        )


def play_closed(crowd: Crowd, size: str, order: str, file: SessionFile) -> Answered:
    """One run with `lru` on a device of this size."""
    cell = ClosedCell(crowd, "lru", Tiers(tokens(size)), order, SERVER)
    return cell.play(file, SessionAdmission if order == "admit" else None)


def figures(found: Answered) -> dict[str, float]:
    """By metric."""
    waits = found.waits()
    return {"hits": found.hit_percent, **{name: waits[name] for name, _ in METRICS[1:]}}


def over_seeds(found: list[dict[str, float]]) -> dict[str, float]:
    """Means, and the longest of all waits."""
    means = {name: sum(f[name] for f in found) / len(found) for name, _ in METRICS}
    return means | {"longest": max(f["longest"] for f in found)}


def rows_of(case: str, found: dict[str, dict[str, float]]) -> Iterator[Row]:
    """A row of each metric."""
    for name, unit in METRICS:
        of = {order: f[name] for order, f in found.items()}
        metric = name if name == "hits" else f"TTFT {name}"
        yield Row(case, metric, unit, of.pop("cached"), of)


def most_rows(file: SessionFile, is_quick: bool) -> Iterator[Row]:
    """How many agents a memory carries."""
    size = "2M"
    crowd = Crowd(1, 4 if is_quick else 40, 10.0 if is_quick else 600.0, seed=SEEDS[0], shares_heads=False)
    found = {}
    for order in ORDERS:
        cell = ClosedCell(crowd, "lru", Tiers(tokens(size)), order, SERVER)
        most = most_agents(
            cell, file, P95_S, SessionAdmission if order == "admit" else None, 4 if is_quick else 256
        )
        found[order] = most / cell.memory_gib
    yield Row(f"most agents, {size}, p95 {P95_S:g} s", "agents", "per GiB", found.pop("cached"), found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_agents", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few agents of few turns")
    parser.add_argument("--processes", type=int, default=2, help="at work at a time on fleets (default: 2)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"rows as JSON (default: {OUT})")
    args = parser.parse_args()
    with Report(args.out, (*EVICTION[1:], *ORDERS[1:])) as report:
        file = read_sessions(open_records(TRACE))
        report.about["trace sha256"] = file.source
        report.add(closed_rows(file, args.quick))
        report.add(most_rows(file, args.quick))
        report.add(fleet_rows(args.quick, args.processes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
