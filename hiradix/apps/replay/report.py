"""The output of an experiment: one table, one JSON file, plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hiradix.apps.replay.lab import CellResult
from hiradix.apps.replay.play import TIER_NAMES
from hiradix.apps.replay.timing import Machine, summary_ms
from hiradix.errors import ConfigError

Row = dict[str, Any]


def millions(tokens: int) -> str:
    """Tokens for people: 3M, 0.5M, 64k."""
    return f"{tokens / 1e6:.3g}M" if tokens >= 100_000 else f"{tokens / 1e3:.3g}k"


def span_of(result: CellResult, warm: float) -> slice:
    """The requests that count: all behind the first `warm` of them, which only warm the cache."""
    return slice(int(len(result.trace.calls) * warm), None)


def row(result: CellResult, warm: float, machine: Machine) -> Row:
    """One cell's numbers."""
    span, cell, played = span_of(result, warm), result.cell, result.played
    tokens = int(result.prompt_tokens[span].sum())
    shown: Row = {
        "trace": result.trace.name,
        "source": result.trace.source,
        "time_scale": cell.source.time_scale,
        "synthetic": result.trace.is_synthetic,
        "requests": len(result.trace.calls),
        "policy": cell.policy,
        "device_tokens": cell.tiers.device,
        "host_tokens": cell.tiers.host,
        "storage_tokens": cell.tiers.storage,
        "warm": warm,
        "hit_percent": round(result.rate(span), 2),
    }
    shown |= {f"{name}_percent": round(result.rate(span, name), 2) for name in TIER_NAMES}
    misses = {reason: int(count[span].sum()) for reason, count in played.misses.items()}
    shown["misses_percent"] = {reason: round(100 * n / max(tokens, 1), 2) for reason, n in misses.items()}
    shown["written_tokens"] = played.writes
    shown["ttft_ms"] = summary_ms(machine.ttft_s(result, span))
    shown["us_per_request"] = round(played.cpu_s / max(len(result.trace.calls), 1) * 1e6)
    shown["decisions"] = played.decisions
    return shown


def table(rows: Sequence[Row]) -> str:
    """Policies down, capacities across; per trace and shape of the lower tiers one block."""
    blocks = []
    seen: dict[tuple[Any, ...], list[Row]] = {}
    for r in rows:
        key = (r["trace"], r["source"], r["host_tokens"], r["storage_tokens"], r["warm"])
        seen.setdefault(key, []).append(r)
    for (trace, source, host, storage, warm), found in seen.items():
        blocks.append(_block(_heading(trace, source, host, storage, warm), found))
    return "\n\n".join(blocks)


def _heading(trace: str, source: str, host: int, storage: int, warm: float) -> str:
    lower = f", host {millions(host)}" if host else ""
    lower += f", storage {millions(storage)}" if storage else ""
    counted = f", requests behind the first {warm:.0%}" if warm else ""
    return f"{trace} [{source[:16]}]{lower}{counted}: token hit rate, %"


def _block(heading: str, rows: Sequence[Row]) -> str:
    sizes = sorted({r["device_tokens"] for r in rows})
    names = list(dict.fromkeys(r["policy"] for r in rows))
    rate = {(r["policy"], r["device_tokens"]): r["hit_percent"] for r in rows}
    width = max(map(len, [*names, "device tokens"]))
    lines = [heading, "device tokens".ljust(width) + "".join(millions(s).rjust(9) for s in sizes)]
    for name in names:
        cells = (f"{rate[name, s]:9.2f}" if (name, s) in rate else " " * 9 for s in sizes)
        lines.append(name.ljust(width) + "".join(cells))
    return "\n".join(lines)


def write_json(path: Path, rows: Sequence[Row], about: Row) -> None:
    """{"about": ..., "rows": [...]}"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Hit rate over capacity, a panel per trace; .svg or .png by the name. ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'hiradix[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(r["trace"] for r in rows))
    figure, axes = pyplot.subplots(1, len(traces), figsize=(6 * len(traces), 4.2), squeeze=False)
    for axis, trace in zip(axes[0], traces):
        mine = [r for r in rows if r["trace"] == trace]
        for policy in dict.fromkeys(r["policy"] for r in mine):
            points = sorted((r["device_tokens"], r["hit_percent"]) for r in mine if r["policy"] == policy)
            style = "k--" if policy == "belady" else "o-"
            axis.plot(*zip(*points), style, label=policy, markersize=3)
        axis.set(title=trace, xlabel="capacity, tokens", ylabel="token hit rate, %", xscale="log")
        sizes = sorted({r["device_tokens"] for r in mine})
        axis.set_xticks(sizes, [millions(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
