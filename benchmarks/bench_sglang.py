"""What does the prefix cache cost and give inside SGLang 0.5.23, ours beside SGLang's own?

    make bench-sglang
    python benchmarks/bench_sglang.py [--rounds N] [--quick] [--compiled] [--out FILE] [--venv FOLDER]

Real SGLang engines on this CPU, a tiny random Llama, one request at a time, the same conversations and pool
sizes for all. One engine per way; in each round every engine plays the same turns once on an empty cache,
while the others are stopped. Medians of the rounds.

| case | engines | conversations |
|---|---|---|
| device | SGLang's default (`UnifiedRadixCache`, Rust core); hiradix | few at a time: the device holds them |
| host | the same with `--enable-hierarchical-cache` | many at a time: they fit the host pool only |

| metric | what one number is |
|---|---|
| cached tokens | of a round, as SGLang reports them in `meta_info`; more is better |
| cache CPU | microseconds of the scheduler's thread inside the cache, per turn; without page copies |
| scheduler CPU | milliseconds of the scheduler's thread per turn, the model included |
| TTFT | milliseconds until the first token of a turn, median of a round's turns |

`--compiled` takes the package that `make compiled` made: hiradix/tree compiled, the rest as it is.
`--quick`: the host case, two turns, one round.

Installs SGLang as `make test-sglang` does (build/sglang-venv). Writes build/bench/sglang.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Report, Row
from sglang_turns.worker import MARK

from tests.e2e.tiny_model import CONTEXT_LENGTH, VOCAB_SIZE, write_tiny_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEER = "sglang"
ENGINE = {
    "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "disable_cuda_graph": True,
    "skip_server_warmup": True, "mem_fraction_static": 0.6, "page_size": 64, "max_total_tokens": 8192,
    "max_running_requests": 4, "log_level": "error", "enable_cache_report": True, "sleep_on_idle": True,
    "context_length": CONTEXT_LENGTH,
}  # fmt: skip
HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_io_backend": "direct"}
OURS = {"radix_cache_backend": "hiradix"}
CASES = {"device": ({}, {"groups": 4, "together": 3}), "host": (HOST, {"groups": 1, "together": 12})}
PLAN = {"turns": 6, "new_tokens": [200, 450], "vocabulary": VOCAB_SIZE, "seed": 7}
SHOWN_METHODS = 12
PLUGIN = "[sglang.srt.plugins]\nhiradix_turn_meter = turn_meter:activate\n"


@dataclass
class Player:
    """An engine in a process group of its own, stopped while it is not asked."""

    case: str
    is_ours: bool
    process: subprocess.Popen[str]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""  # why it plays no further

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        raise RuntimeError(f"the engine of case {self.case} ended with {self.process.wait()}")

    def play(self) -> None:
        assert self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write("round\n")
        self.process.stdin.flush()
        self.rounds.append(self.answer())
        self.pause()

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    # -- figures of the rounds ------------------------------------------------------------

    def cached(self) -> float:
        return statistics.median(r["cached"] for r in self.rounds)

    def cpu_us(self) -> float:
        return statistics.median(
            sum(seconds for _, seconds in r["meter"]["methods"].values()) / len(r["first_s"]) * 1e6
            for r in self.rounds
        )

    def thread_ms(self) -> float:
        return statistics.median(r["meter"]["thread_s"] / len(r["first_s"]) * 1e3 for r in self.rounds)

    def first_ms(self) -> float:
        return statistics.median(statistics.median(r["first_s"]) for r in self.rounds) * 1e3


def stopped(number: int, frame: object) -> None:
    """Engines end with the benchmark, whoever ends it; rounds that all have played are shown."""
    raise KeyboardInterrupt


def play_rounds(players: list[Player], count: int) -> None:
    """Each player's turn in each round; who is first in one is last in the next.

    An interrupt ends it, and the round under way counts for nobody.
    """
    try:
        for number in range(count):
            for player in players if number % 2 else reversed(players):
                try:
                    player.play()
                except RuntimeError as error:
                    if player.is_ours:
                        raise
                    player.failed = str(error)
            players = [player for player in players if not player.failed]
    except KeyboardInterrupt:
        done = min(len(player.rounds) for player in players)
        print(f"interrupted after {done} rounds", flush=True)
        for player in players:
            del player.rounds[done:]
        if not done:
            raise


def start(case: str, is_ours: bool, folder: Path, args: argparse.Namespace) -> Player:
    """An engine that has played a few turns and is stopped."""
    tiers, shape = CASES[case]
    plan = PLAN | shape | ({"groups": 1, "turns": 2} if args.quick else {})
    package = ROOT / "build" / "compiled" if args.compiled else ROOT
    name = f"{case}-{'ours' if is_ours else PEER}"
    engine = ENGINE | tiers | (OURS if is_ours else {}) | {"model_path": str(folder / "model")}
    environment = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": f"{folder / 'plugin'}:{HERE / 'sglang_turns'}:{package}",
        "TURN_METER": str(folder / f"{name}.json"),
    }  # fmt: skip
    program = [str(args.venv / "bin" / "python"), str(HERE / "sglang_turns" / "worker.py")]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [*program, json.dumps(engine), json.dumps(plan)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
    player = Player(case, is_ours, process)
    try:
        ready = player.answer()
    except RuntimeError as error:
        player.close()
        raise RuntimeError((folder / f"{name}.log").read_text()[-3000:]) from error
    print(f"{name}: {ready['turns']} turns of {ready['tokens']:,} tokens in all", flush=True)
    player.pause()
    return player


def rows_of(case: str, ours: Player, peer: Player | None) -> list[Row]:
    """Ours beside the peer's, or alone where that one failed."""
    if peer is None:
        return [
            Row(case, "cached tokens", "tokens", ours.cached()),
            Row(case, "cache CPU", "us/turn", ours.cpu_us()),
            Row(case, "scheduler CPU", "ms/turn", ours.thread_ms()),
            Row(case, "TTFT p50", "ms", ours.first_ms()),
        ]
    same = sum(a == b for a, b in zip(ours.rounds[0]["outputs"], peer.rounds[0]["outputs"], strict=True))
    turns = len(ours.rounds[0]["outputs"])
    return [
        Row(case, "cached tokens", "tokens", ours.cached(), {PEER: peer.cached()}),
        Row(case, "cache CPU", "us/turn", ours.cpu_us(), {PEER: peer.cpu_us()}),
        Row(case, "scheduler CPU", "ms/turn", ours.thread_ms(), {PEER: peer.thread_ms()}),
        Row(case, "TTFT p50", "ms", ours.first_ms(), {PEER: peer.first_ms()}),
        Row(case, "same answers", "share", same / turns, {PEER: 1.0}),
    ]


def methods_of(player: Player) -> str:
    """Where the time goes: the most expensive methods, medians of the rounds in microseconds per turn."""
    figures: dict[str, list[tuple[float, float]]] = {}
    for each in player.rounds:
        turns = len(each["first_s"])
        for name, (calls, seconds) in each["meter"]["methods"].items():
            figures.setdefault(name, []).append((seconds / turns * 1e6, calls / turns))
    middle = {name: tuple(map(statistics.median, zip(*found))) for name, found in figures.items()}
    costly = sorted(middle.items(), key=lambda item: -item[1][0])[:SHOWN_METHODS]
    parts = [f"{name} {us:.0f} ({calls:.1f}x)" for name, (us, calls) in costly]
    return f"{player.case} {player.rounds[-1]['meter']['cache']}: " + ", ".join(parts)


def _form(args: argparse.Namespace) -> str:
    return "compiled" if args.compiled else "plain Python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the host case, two turns, one round")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--compiled", action="store_true", help="hiradix with its tree compiled")
    parser.add_argument("--venv", type=Path, default=ROOT / "build" / "sglang-venv")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "sglang.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stopped)
    cases = [args.only] if args.only else ["host"] if args.quick else list(CASES)
    players: list[Player] = []
    with tempfile.TemporaryDirectory() as name, Report(args.out, [PEER]) as report:
        folder = Path(name)
        (folder / "model").mkdir()
        write_tiny_model(folder / "model")
        metadata = folder / "plugin" / "hiradix_turn_meter-0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hiradix-turn-meter\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(PLUGIN)
        try:
            for case in cases:
                players.append(start(case, True, folder, args))
                try:
                    players.append(start(case, False, folder, args))
                except RuntimeError as error:
                    report.leave_out(f"{PEER}, case {case}: {error}")
            play_rounds(players, 1 if args.quick else args.rounds)
        finally:
            for player in players:
                player.close()
        report.about |= {"sglang": "0.5.23", "rounds": len(players[0].rounds), "hiradix": _form(args)}
        peers = {player.case: player for player in players if not player.is_ours and not player.failed}
        for player in players:
            if player.failed:
                report.leave_out(f"{PEER}, case {player.case}: {player.failed}")
            elif player.is_ours:
                report.add(rows_of(player.case, player, peers.get(player.case)))
    for player in players:
        if not player.failed:
            print(methods_of(player))


if __name__ == "__main__":
    main()
