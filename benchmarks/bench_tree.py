"""What does one scheduler step of the prefix cache cost, beside SGLang's and vLLM's?

    make bench-tree                                   installs the peers under build/peers, then runs it all
    python benchmarks/bench_tree.py [--quick] [--full] [--peers NAME,...|none] [--only TEXT,...] [--out FILE]

Prints one table: CPU time of the calling thread, the median of five rounds in which all take turns on the
same prompts, one process each. `hiradix` is the drop-in class doing what the peer's row does; rows named
`bare tree` are the tree below it, in page ids; rows with `(compiled, ...)` run what `make compiled` built, if
that is there, rows with `(plain, ...)` Python; `lru` or `ghd` is the policy they evict by, the peers' is lru.
A peer's figure in brackets says how many times ours it is. Keys are fresh: made anew from the prompt for each
call, untimed, but for `append-only log`. `warm`: right after a call with the same prompt; `cold`: after other
memory has gone through the processor's caches.
--quick: some seconds of small cases. --full: also what takes a peer minutes. Writes build/bench/tree.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_tree_plan import PEERS, UNITS, Planned, plan
from common import Report, Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
COMPILED = ROOT / "build" / "compiled"  # made by `make compiled`
PEER_PYTHONS = [ROOT / "build" / folder / "bin" / "python" for folder in ("peers/venv", "vllm-venv")]
"""What has vLLM and all that the peers import: of this benchmark, or of `make test-vllm`."""


class Worker:
    """A peer's process. One order at a time; while one works, the others wait. policy: of ours."""

    def __init__(self, python: str, module: str, log: Any, package: Path = ROOT, policy: str = "lru"):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(package),
            "HIRADIX_BENCH_POLICY": policy,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [python, str(HERE / "peers" / "worker.py"), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.name = self._read()["name"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended: see the log")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def do(self, **order: Any) -> dict[str, Any]:
        """Send an order and wait for its answer; RuntimeError if it failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close_case(self) -> None:
        """Leave a case that failed, if the process is still there."""
        with suppress(RuntimeError, OSError):
            self.do(do="close")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


class OurWorkers:
    """Processes of ours, one for each way in which ours takes part in a case; started when first needed."""

    def __init__(self, log: Any):
        self._log = log
        self._workers: dict[tuple[bool, str, int], Worker] = {}  # (compiled, policy, which of them)

    def of(self, case: Planned) -> list[Worker]:
        """A worker for each of `case.ours`."""
        found, used = [], Counter[tuple[bool, str]]()
        for how in case.ours:
            form = how.compiled, how.policy
            key = (*form, used[form])
            used[form] += 1
            if key not in self._workers:
                package = COMPILED if how.compiled else ROOT
                self._workers[key] = Worker(sys.executable, "ours", self._log, package, how.policy)
            found.append(self._workers[key])
        return found

    def all(self) -> list[Worker]:
        """Every process started."""
        return list(self._workers.values())


def measure(
    case: Planned, ours: Sequence[Worker], peers: Sequence[Worker], leave_out: Callable[[str], None]
) -> list[Row]:
    """Prepare everyone, then rounds in which each measures once; rows for each way ours takes part.

    A peer that fails has no part in the case.
    """
    orders = [(worker, how.kind or case.kind, how.bare) for worker, how in zip(ours, case.ours)]
    orders += [(worker, case.kind, False) for worker in peers]
    failed: set[Worker] = set()

    def ask(worker: Worker, **order: Any) -> dict[str, Any]:
        """An answer, empty of a peer that failed."""
        try:
            return {} if worker in failed else worker.do(**order)
        except (RuntimeError, OSError) as error:
            if worker in ours:
                raise
            failed.add(worker)
            leave_out(f"{case.name}: {error}")
            return {}

    for worker, kind, bare in orders:
        ask(worker, do="prepare", kind=kind, bare=bare, options=case.options)
    taken: list[dict[str, list[float]]] = [{} for _ in orders]
    for _ in range(case.rounds):
        for (worker, *_), found in zip(orders, taken):
            for metric, values in ask(worker, do="measure").items():
                found.setdefault(metric, []).extend(values)
    for worker in failed:
        worker.close_case()
    for worker, *_ in orders:
        ask(worker, do="close")
    medians = [{metric: statistics.median(values) for metric, values in found.items()} for found in taken]
    of_peers = {
        worker.name: found for worker, found in zip(peers, medians[len(case.ours) :]) if worker not in failed
    }
    return [
        Row(case.name + how.name, metric, UNITS[metric], value, _of(of_peers, metric))
        for how, mine in zip(case.ours, medians)
        for metric, value in mine.items()
    ]


def _of(peers: dict[str, dict[str, float]], metric: str) -> dict[str, float]:
    return {name: found[metric] for name, found in peers.items() if metric in found}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--peers", default="all")
    parser.add_argument("--only", default="", help="cases whose name has one of these texts, comma separated")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "tree.json")
    return parser.parse_args()


def chosen_peers(text: str) -> list[str]:
    if text == "none":
        return []
    names = list(PEERS) if text == "all" else text.split(",")
    if unknown := set(names) - set(PEERS):
        raise SystemExit(f"--peers: {', '.join(sorted(unknown))} unknown, expected {', '.join(PEERS)}")
    if not any(python.exists() for python in PEER_PYTHONS):
        raise SystemExit("the peers are not installed: make bench-tree, or --peers none")
    return names


def started(names: Sequence[str], log: Any, report: Report) -> dict[str, Worker]:
    """A process for each peer; one that does not start is left out."""
    python, found = next((str(one) for one in PEER_PYTHONS if one.exists()), ""), {}
    for name in names:
        try:
            found[name] = Worker(python, PEERS[name], log)
        except (RuntimeError, OSError) as error:
            report.leave_out(f"{name}: {error}")
    return found


def main() -> None:
    """Run the plan and print and write its rows."""
    options = arguments()
    names = chosen_peers(options.peers)
    begin = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    texts = [text for text in options.only.split(",") if text]
    log = open(options.out.with_suffix(".log"), "w", encoding="utf-8")
    with log, Report(options.out, names) as report:
        report.about["peers"] = names
        ours = OurWorkers(log)
        peers = started(names, log, report)
        for case in plan(options.quick, options.full, COMPILED.exists()):
            if texts and not any(text in case.name for text in texts):
                continue
            since = time.monotonic()
            taking_part = [peers[name] for name in case.peers if name in peers]
            report.add(measure(case, ours.of(case), taking_part, report.leave_out))
            print(f"{case.name}: {time.monotonic() - since:.1f} s", file=sys.stderr, flush=True)
        for worker in (*ours.all(), *peers.values()):
            worker.close()
        report.about["seconds"] = round(time.monotonic() - begin)


if __name__ == "__main__":
    main()
