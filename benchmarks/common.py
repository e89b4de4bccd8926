"""What benchmarks share: what machine this is, how sure a median is, one table, one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """One number of ours and the same number of each peer that has it. Smaller is better unless hits."""

    case: str
    metric: str
    unit: str
    ours: float
    peers: dict[str, float] = field(default_factory=dict)


def median_and_best(case: str, unit: str, found: Mapping[str, Sequence[float]]) -> list[Row]:
    """Rates of each by round, ours as `hiradix`: a row of their medians, and one of each one's best round."""
    made = []
    for what, pick in (("", statistics.median), (", best", max)):
        rates = {name: float(pick(values)) for name, values in found.items()}
        ours = rates.pop("hiradix")
        made.append(Row(f"{case}{what}", "rate", unit, ours, rates))
    return made


def interval(values: Sequence[float], random: np.random.Generator) -> tuple[float, float]:
    """Where 95 % of the medians lie of as many values drawn from these."""
    drawn = random.choice(np.array(values), (4000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def need_device(parser: argparse.ArgumentParser, device: str) -> None:
    """End the program with its usage where `device` is not the CPU and torch sees no CUDA device."""
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch {torch.__version__} sees no CUDA device here")


def machine() -> dict[str, object]:
    """Processor, cores, memory, versions, and which form of hiradix is measured where no row says so."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages * page_bytes / 2**30),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 1),
        "hiradix": _form(),
    }


def _form() -> str:
    """ "compiled" or "plain Python", by the file that holds the tree."""
    spec = find_spec("hiradix.tree.tree") if find_spec("hiradix") else None
    return "compiled" if spec is not None and str(spec.origin).endswith(".so") else "plain Python"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write_json(path: Path, rows: Sequence[Row], about: dict[str, object]) -> None:
    """{"machine": ..., "rows": [...]} at `path`, whose folder is made."""
    write_raw(path, {"machine": about, "rows": [asdict(row) for row in rows]})


def write_raw(path: Path, found: Mapping[str, Any]) -> None:
    """`found` as JSON at `path`, whose folder is made; ValueError for what is no finite number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def shown(value: float) -> str:
    """Three figures or more, thousands apart."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def table(rows: Sequence[Row], peers: Sequence[str]) -> str:
    """A line per row: ours, then each peer with how many times ours it is."""
    head = ["case", "metric", "hiradix", *peers]
    lines = [head]
    for row in rows:
        line = [row.case, f"{row.metric}, {row.unit}", shown(row.ours)]
        for peer in peers:
            value = row.peers.get(peer)
            if value is None:
                line.append("-")
            else:
                times = f" ({value / row.ours:.2f}x)" if row.ours > 0 and row.unit != "share" else ""
                line.append(shown(value) + times)
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join(left + right).rstrip()


class Report:
    """Rows as they come. The table is printed and the JSON written however the run ends, by an error too.

    peers: columns of the table. ours: the heading of our column. raw: beside the rows in the JSON.
    Where a step failed (`attempt`) the program ends with code 1; without a peer (`leave_out`) it ends well.
    """

    def __init__(
        self,
        out: Path,
        peers: Sequence[str],
        *,
        ours: str = "hiradix",
        table: Callable[[Sequence[Row], Sequence[str]], str] = table,
    ) -> None:
        self.out, self.peers, self.rows = out, list(peers), list[Row]()
        self.about, self.left_out, self.raw = machine(), list[str](), dict[str, Any]()
        self._ours, self._table, self._shown, self._has_failed = ours, table, 0, False

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.show()
        self.write()
        if self._has_failed and kind is None:
            raise SystemExit(1)

    def add(self, rows: Iterable[Row]) -> None:
        """Keep these rows, in the file at once: a run that is killed leaves what it has."""
        self.rows += rows
        self.write()

    def optional(self, what: str, make: Callable[[], Iterable[Row]]) -> None:
        """Print what there is, then add rows that the others do without."""
        self.show()
        self.attempt(what, make)

    def attempt(self, what: str, make: Callable[[], Iterable[Row]]) -> None:
        """Add rows; an error leaves them out, by name."""
        try:
            self.add(make())
        except Exception as error:
            self._has_failed = True
            self.leave_out(f"{what}: {type(error).__name__}: {error}")

    def leave_out(self, what: str) -> None:
        """Say on standard error and in the JSON what is missing, and why."""
        self.left_out.append(what)
        print(f"left out: {what}", file=sys.stderr, flush=True)

    def show(self) -> None:
        """Print the rows that were not printed yet."""
        rows, self._shown = self.rows[self._shown :], len(self.rows)
        if rows:
            print(" ".join(f"{name}={value}" for name, value in self.about.items()))
            print(self._table(rows, self.peers).replace("hiradix", self._ours.rjust(7), 1), flush=True)

    def write(self) -> None:
        """The JSON file as of now."""
        about = self.about | ({"left_out": self.left_out} if self.left_out else {})
        write_raw(self.out, {"machine": about, "rows": [asdict(row) for row in self.rows], **self.raw})
