"""The whole ladder of an engine: 38 needles an arm, a new interpreter wherever a process is said to be new.

    python -m tests.ladder own|vllm|sglang [--needles 38] [--family NAME ...] [--planted] [--record FILE]

Run by the Python of the engine's lane. Rows are printed as they come, and stand in build/ladder.json beside
those of other engines. --planted: the positive controls instead, which are to be wrong. Ends with 1 where a row
is not as it should be.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.ladder.climb import FAMILIES, Climb, LadderEngine, Row, climbed
from tests.ladder.controls import FAULTS, wrong_answers
from tests.ladder.needles import NUM_NEEDLES
from tests.puppet import ROOT

ENGINES = {"own": "Own", "vllm": "Vllm", "sglang": "Sglang"}
BROKE_OFF = "(broke off)"
HEAD = f"{'engine':8} {'family':12} {'arm':32} {'answers':>7} {'wrong':>6} {'ties':>5} {'hits':>8} {'s':>7}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ladder")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--needles", type=int, default=NUM_NEEDLES)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--record", type=Path, default=ROOT / "build" / "ladder.json")
    asked = parser.parse_args(arguments)
    engine = getattr(importlib.import_module(f"tests.ladder.{asked.engine}"), ENGINES[asked.engine])()
    families = asked.family or FAMILIES
    if asked.planted:
        return _planted(engine, families, asked.needles)
    print(HEAD)
    rows = []
    for row in _rows(engine, families, asked.needles):
        hits = f"{row.proven}/{row.wanted}" if row.wanted else ""
        print(
            f"{row.engine:8} {row.family:12} {row.arm:32} {row.answers:7} {row.wrong:6} {row.ties:5} {hits:>8} "
            f"{row.seconds:7} {row.note}",
            flush=True,
        )
        rows.append(row)
    _record(asked.record, engine.name, rows)
    return int(any(row.arm == BROKE_OFF or row.wrong or row.proven < row.wanted for row in rows))


def _rows(engine: LadderEngine, families: Sequence[str], count: int) -> Iterator[Row]:
    for family in families:
        with tempfile.TemporaryDirectory(prefix="hiradix-ladder-") as folder:
            try:
                yield from climbed(Climb(engine, family, Path(folder), count))
            except AssertionError as error:
                note = str(error).strip().splitlines()[0][:300] if str(error) else "an assertion failed"
                yield Row(engine.name, family, BROKE_OFF, 0, 0, 0, 0, 0, 0.0, {}, note)


def _planted(engine: LadderEngine, families: Sequence[str], count: int) -> int:
    missed = 0
    for fault, own in FAULTS.items():
        for family in own:
            if family not in families or ("groups" in fault and engine.name != "vLLM"):
                continue
            with tempfile.TemporaryDirectory(prefix="hiradix-ladder-") as folder:
                wrong = wrong_answers(Climb(engine, family, Path(folder), count), fault)
            print(f"{engine.name:8} {family:12} {fault:40} {wrong} of {count} wrong", flush=True)
            missed += wrong == 0
    return int(missed > 0)


def _record(file: Path, engine: str, rows: Sequence[Row]) -> None:
    """Put these in place of what the record has of the engine's families."""
    known = json.loads(file.read_text()) if file.exists() else []
    families = {row.family for row in rows}
    kept = [row for row in known if row["engine"] != engine or row["family"] not in families]
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps([*kept, *(asdict(row) for row in rows)], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
