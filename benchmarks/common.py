"""What benchmarks share: what machine this is, how sure a median is, one table, one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
    """Processor, cores, memory, versions."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages * page_bytes / 2**30),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 1),
    }


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
    """`found` as JSON at `path`, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


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
