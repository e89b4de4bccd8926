"""All that a GPU has still to show, in order, in pieces of at most ten minutes (see docs/lab/kernels.md).

    python benchmarks/gpu_session.py                        # every piece, one after the other
    python benchmarks/gpu_session.py --piece correctness    # or one, where a command's time is limited
    python benchmarks/gpu_session.py --list                 # the commands, to run by hand
    python benchmarks/gpu_session.py --quick                # small, without a GPU; tests are only collected

Each step is a process of its own with a limit, so that a fault on the device ends that step alone. Results go
to --out (benchmarks/results), raw numbers of a step as gpu_STEP.json, and what became of the steps, with the
end of what they printed, as gpu_session_PIECE.json. --device cpu walks the same steps, small, without a GPU.
Rows are the steps' seconds beside their limits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from common import Row, machine, need_device, table, write_raw

ROOT = Path(__file__).resolve().parent.parent
TAIL = 6000
PATIENCE = 4  # times the limits for quick forms, which run beside other work
SMALL_SWEEP = ("--shape", "SmolLM2-fp32", "--layout", "page_first", "--page-size", "64", "--megabytes", "4")


@dataclass(frozen=True)
class Step:
    """A command of Python's. limit_s: it is ended then. writes: whether it takes --out FILE.
    on_cpu: what is added where there is no GPU, so that the step is small."""

    name: str
    command: tuple[str, ...]
    limit_s: int
    writes: bool = True
    on_cpu: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """What became of a step. code: its exit code, None at its limit; tail: the end of its output."""

    name: str
    command: str
    code: int | None
    seconds: float
    tail: str


def tests(*which: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=20", *which)


def bench(name: str, *options: str) -> tuple[str, ...]:
    return (f"benchmarks/{name}.py", *options)


COPIES, OVERLAP = "copy_bandwidth", ("--part", "beside")
PIECES: dict[str, tuple[Step, ...]] = {
    "correctness": (
        Step("pinning", tests("tests/gpu/test_memory.py"), 60, False),
        Step("copies", tests("tests/gpu/test_copies.py"), 240, False, ("-k", "layout_and_kind and mha_one")),
        Step("order", tests("tests/gpu/test_order.py"), 90, False),
        Step("quantise", tests("tests/gpu/test_quantise.py"), 60, False),
        Step("engine", tests("tests/gpu/test_engine.py"), 120, False, ("-k", "damaged")),
    ),
    "copies": (
        Step(
            "calibration", bench("bench_calibration"), 150, True,
            ("--shape", "SmolLM2-fp32", "--layout", "page_first", "--megabytes", "8", "--repeats", "1"),
        ),
        Step("sweep", bench(COPIES, "--part", "sweep", "--budget-s", "390"), 440, True, SMALL_SWEEP),
    ),
    "overlap": (
        Step("beside", bench(COPIES, *OVERLAP), 240, True, SMALL_SWEEP),
        Step("host_hits", bench("bench_host_hits"), 180, True, ("--tokens", "256", "--rounds", "1")),
        Step(
            "host_hits_kernel", bench("bench_host_hits", "--io-backend", "kernel"), 150, True,
            ("--tokens", "256", "--rounds", "1"),
        ),
    ),
}  # fmt: skip


def command_of(step: Step, args: argparse.Namespace) -> list[str]:
    """What to run, as arguments of the Python interpreter."""
    command = [*step.command]
    if step.writes:
        out = os.path.relpath(args.out / f"gpu_{step.name}.json", ROOT)
        command += ["--device", args.device, "--out", out]
    if args.quick:
        return [*command, *(("--quick",) if step.writes else ("--collect-only",))]
    return [*command, *(step.on_cpu if args.device == "cpu" else ())]


def run(step: Step, args: argparse.Namespace) -> Done:
    command, limit_s = command_of(step, args), step.limit_s * (PATIENCE if args.quick else 1)
    print(f"\n== {step.name}, {limit_s} s at most: python {' '.join(command)}", flush=True)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
    environment["HIRADIX_GPU_TESTS_ON"] = args.device
    begin, code = time.monotonic(), None
    log = args.out / f"gpu_{step.name}.log"
    with log.open("w", encoding="utf-8") as out:
        try:
            code = subprocess.run(
                [sys.executable, *command], cwd=ROOT, env=environment, timeout=limit_s,
                stdout=out, stderr=subprocess.STDOUT, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{step.name}: ended after {limit_s} s", flush=True)
    tail = log.read_text(encoding="utf-8", errors="replace").replace(f"{ROOT}/", "")[-TAIL:]
    log.unlink()
    print(tail, flush=True)
    return Done(step.name, " ".join(command), code, round(time.monotonic() - begin, 1), tail)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--piece", choices=("all", *PIECES), default="all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--quick", action="store_true", help="as --device cpu, and tests are collected only")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    args = parser.parse_args()
    if args.quick:
        args.device = "cpu"
    if not args.list:
        need_device(parser, args.device)
    if find_spec("hiradix") is None or find_spec("hiradix.triton_kernels") is None:
        how = "python -m pip install --no-deps --no-build-isolation -e ."
        parser.error(f"install hiradix first: {how}; or: ln -s ../triton_kernels hiradix/triton_kernels")
    return args


def main() -> None:
    args = parse()
    pieces = list(PIECES) if args.piece == "all" else [args.piece]
    if args.list:
        for piece in pieces:
            print(f"# {piece}, {sum(step.limit_s for step in PIECES[piece])} s at most")
            print(*(f"python {' '.join(command_of(step, args))}" for step in PIECES[piece]), sep="\n")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for piece in pieces:
        done: list[Done] = []
        limits = {step.name: step.limit_s for step in PIECES[piece]}
        for step in PIECES[piece]:
            done.append(run(step, args))
            rows = [
                Row(one.name, "step", "s", one.seconds, {"limit": float(limits[one.name])}) for one in done
            ]
            about = machine() | {"device": args.device}
            found = {"machine": about, "rows": [*map(asdict, rows)], "steps": [asdict(one) for one in done]}
            write_raw(args.out / f"gpu_session_{piece}.json", found)
        print(table(rows, ["limit"]), flush=True)
        failed += [one.name for one in done if one.code != 0]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nevery step ended well")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
