"""What does one scheduler step of the prefix cache cost, beside SGLang's and vLLM's?

    make bench-tree                                   installs the peers under build/peers, then runs it all
    python benchmarks/bench_tree.py [--quick] [--full] [--peers NAME,...|none] [--only TEXT,...] [--out FILE]

Prints one table: CPU time of the calling thread, the median of five rounds in which all take turns on the
same prompts, one process each. `hiradix` is the drop-in class doing what the peer's row does; rows named
`bare tree` are the tree below it, in page ids; rows with `(compiled)` run what `make compiled` built, if that
is there. A peer's figure in brackets says how many times ours it is.
--quick: a few seconds of small cases. --full: also what takes a peer minutes. Writes build/bench/tree.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_tree_plan import PEERS, UNITS, Planned, plan
from common import Row, machine, table, write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
COMPILED = ROOT / "build" / "compiled"  # made by `make compiled`
PEER_PYTHON = ROOT / "build" / "peers" / "venv" / "bin" / "python"


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

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


class OurWorkers:
    """Processes of ours, one for each way in which ours takes part in a case; started when first needed."""

    def __init__(self, log: Any):
        self._log = log
        self._workers: dict[tuple[bool, int], Worker] = {}  # (compiled, which of them)

    def of(self, case: Planned) -> list[Worker]:
        """A worker for each of `case.ours`."""
        found, used = [], {False: 0, True: 0}
        for how in case.ours:
            key = (how.compiled, used[how.compiled])
            used[how.compiled] += 1
            if key not in self._workers:
                package = COMPILED if how.compiled else ROOT
                self._workers[key] = Worker(sys.executable, "ours", self._log, package)
            found.append(self._workers[key])
        return found

    def all(self) -> list[Worker]:
        """Every process started."""
        return list(self._workers.values())


def measure(case: Planned, ours: Sequence[Worker], peers: Sequence[Worker]) -> list[Row]:
    """Prepare everyone, then rounds in which each measures once; rows for each way ours takes part."""
    orders = [(worker, how.kind or case.kind, how.bare) for worker, how in zip(ours, case.ours)]
    orders += [(worker, case.kind, False) for worker in peers]
    for worker, kind, bare in orders:
        worker.do(do="prepare", kind=kind, bare=bare, options=case.options)
    taken: list[dict[str, list[float]]] = [{} for _ in orders]
    for _ in range(case.rounds):
        for (worker, *_), found in zip(orders, taken):
            for metric, values in worker.do(do="measure").items():
                found.setdefault(metric, []).extend(values)
    for worker, *_ in orders:
        worker.do(do="close")
    medians = [{metric: statistics.median(values) for metric, values in found.items()} for found in taken]
    of_peers = dict(zip((worker.name for worker in peers), medians[len(case.ours) :]))
    return [
        Row(case.name + how.suffix, metric, UNITS[metric], value, _of(of_peers, metric))
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
    if not PEER_PYTHON.exists():
        raise SystemExit("the peers are not installed: make bench-tree, or --peers none")
    return names


def main() -> None:
    """Run the plan and print and write its rows."""
    options = arguments()
    names = chosen_peers(options.peers)
    begin, rows = time.monotonic(), []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    texts = [text for text in options.only.split(",") if text]
    with open(options.out.with_suffix(".log"), "w", encoding="utf-8") as log:
        ours = OurWorkers(log)
        peers = {name: Worker(str(PEER_PYTHON), PEERS[name], log) for name in names}
        for case in plan(options.quick, options.full, COMPILED.exists()):
            if texts and not any(text in case.name for text in texts):
                continue
            since = time.monotonic()
            rows += measure(case, ours.of(case), [peers[name] for name in case.peers if name in peers])
            print(f"{case.name}: {time.monotonic() - since:.1f} s", file=sys.stderr, flush=True)
            write_json(options.out, rows, machine() | {"peers": names})  # a broken run leaves what it has
        for worker in (*ours.all(), *peers.values()):
            worker.close()
    about = machine() | {"seconds": round(time.monotonic() - begin), "peers": names}
    print(" ".join(f"{name}={value}" for name, value in about.items()))
    print(table(rows, names))
    write_json(options.out, rows, about)


if __name__ == "__main__":
    main()
