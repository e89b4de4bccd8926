"""Advice for an operator: how much host memory and disk buys how many hits and milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from hiradix.apps.replay.lab import Cell, CellResult, Source, run
from hiradix.apps.replay.report import millions, span_of
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.replay.timing import Machine, summary_ms

GB = 1e9
WARM = 0.5
_STEPS = (0.0, 0.25, 0.5, 1.0, 2.0)  # of the trace's different tokens
_DEVICE_SHARE = 0.05


def advice(source: Source, machine: Machine, processes: int, device_tokens: int = 0) -> str:
    """A table: tokens and bytes of each tier, hits and time to first token of the trace's second half, and
    what an added GB brings. Played with `ghd`. device_tokens 0: a twentieth of the trace's different tokens.
    """
    trace = source.load()
    unique = max(trace.unique_tokens, trace.block_tokens)
    device = device_tokens or max(round(unique * _DEVICE_SHARE), 64 * trace.block_tokens)
    shapes = [Tiers(device, round(unique * step)) for step in _STEPS]
    host = shapes[1].host
    shapes += [Tiers(device, host, round(unique * step)) for step in _STEPS[2:]]
    cells = [Cell(source, "ghd", tiers) for tiers in shapes]
    return _shown(run(cells, processes), machine)


def _shown(results: Sequence[CellResult], machine: Machine) -> str:
    trace = results[0].trace
    lines = [
        f"{trace.name} [{trace.source[:16]}]: {len(trace.calls)} requests, {millions(trace.unique_tokens)} "
        f"different tokens of {millions(trace.prompt_tokens)}; second half, "
        f"{machine.prefill_rate:g} tokens/s prefill",
        "   device     host  storage |  host GB  disk GB |  hits %  mean ms   p90 ms | hits per added GB",
    ]
    base = results[0]
    for result in results:
        tiers, span = result.cell.tiers, span_of(result, WARM)
        gigabytes = [size * machine.bytes_per_token / GB for size in (tiers.host, tiers.storage)]
        if tiers.storage and not base.cell.tiers.host:
            base = next(o for o in results if o.cell.tiers.host == tiers.host)
        added = sum(gigabytes) - base.cell.tiers.host * machine.bytes_per_token / GB
        gained = result.rate(span) - base.rate(span_of(base, WARM))
        worth = f"{gained / added:+.3f}" if added > 0 else ""
        ms = summary_ms(machine.ttft_s(result, span))
        lines.append(
            f"{millions(tiers.device):>9}{millions(tiers.host):>9}{millions(tiers.storage):>9} |"
            f"{gigabytes[0]:9.1f}{gigabytes[1]:9.1f} |"
            f"{result.rate(span):8.2f}{ms['mean']:9.1f}{ms['p90']:9.1f} |{worth:>10}"
        )
    return "\n".join(lines)
