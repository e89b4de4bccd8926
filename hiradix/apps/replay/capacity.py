"""Finds how many agents a machine carries: the most of which 95 % of the first tokens come within a bound.

Found by playing recorded sessions in the closed loop, once for every number that is tried. The cache and the
order of service are the real ones; time is the lab's model, so the answer is as good as the rates are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hiradix.apps.replay.closed_loop import ServerRates
from hiradix.apps.replay.closed_report import GIB, ClosedCell, most_agents
from hiradix.apps.replay.report import Row, millions
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.traces.crowd import Crowd, fitting, repeated
from hiradix.apps.traces.sessions import BLOCK, SessionFile
from hiradix.errors import ConfigError


@dataclass(frozen=True)
class Memory:
    """GiB of KV that each tier holds, on all devices of the server together."""

    device_gib: float
    host_gib: float = 0.0
    storage_gib: float = 0.0

    def __post_init__(self) -> None:
        for tier in ("device", "host", "storage"):
            size = getattr(self, f"{tier}_gib")
            if not 0 <= size < math.inf or (tier == "device" and not size):
                raise ConfigError(f"--{tier}-gib must be {'>' if tier == 'device' else '>='} 0, got {size:g}")
        if self.storage_gib and not self.host_gib:
            raise ConfigError("--storage-gib needs --host-gib: what storage has comes over the host")

    def tiers(self, bytes_per_token: float) -> Tiers:
        """The sizes of the tiers in tokens, rounded down to whole blocks. ConfigError where a given size
        holds no block."""
        sizes = {}
        for tier in ("device", "host", "storage"):
            size = getattr(self, f"{tier}_gib")
            sizes[tier] = int(size * GIB / bytes_per_token) // BLOCK * BLOCK
            if size and not sizes[tier]:
                raise ConfigError(
                    f"--{tier}-gib {size:g}: less than a block of {BLOCK} tokens of {bytes_per_token:g} bytes"
                )
        return Tiers(sizes["device"], sizes["host"], sizes["storage"])


@dataclass(frozen=True)
class Question:
    """The question to answer. most: agents, at most. limit_s: real seconds for all orders of service
    together.

    context_tokens: a model's longest prompt and answer; sessions with a longer one are left out.
    """

    memory: Memory
    server: ServerRates
    crowd: Crowd
    p95_s: float = 30.0
    eviction: str = "ghd"
    schedules: tuple[str, ...] = ("cached", "fcfs")
    context_tokens: int | None = None
    most: int = 512
    limit_s: float = 600.0
    is_anonymous: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.p95_s < math.inf:
            raise ConfigError(f"--p95 must be > 0, got {self.p95_s:g}")
        if self.context_tokens is not None and self.context_tokens < 1:
            raise ConfigError(f"--context must be >= 1, got {self.context_tokens}")
        if self.most < 1:
            raise ConfigError(f"--most must be >= 1, got {self.most}")
        if not 0 < self.limit_s < math.inf:
            raise ConfigError(f"--minutes must be > 0, got {self.limit_s / 60:g}")


Tried = Callable[[str, int, bool], None]


def carried(question: Question, file: SessionFile, clock: Callable[[], float], tried: Tried) -> list[Row]:
    """The answer for each order of service. clock: real seconds; tried: told order, agents, and whether they
    fit. ConfigError where no session fits the device.
    """
    tiers = question.memory.tiers(question.server.machine.bytes_per_token)
    longest = min(tiers.device, question.context_tokens or tiers.device)
    fits = fitting(file, longest)
    num_agents = len(fitting(file, 1 << 62).sessions)
    if not fits.sessions:
        raise ConfigError(
            f"{file.name}: of {num_agents} sessions long enough none stays within {longest} tokens, which is "
            f"--device-gib {question.memory.device_gib:g}, or --context"
        )
    played = repeated(fits, question.most)
    start_s, rows = clock(), list[Row]()
    for number, schedule in enumerate(question.schedules, 1):
        until_s = start_s + question.limit_s * number / len(question.schedules)
        row = _answer(question, played, tiers, schedule, partial(_is_before, clock, until_s), tried)
        rows.append({**row, "sessions": len(fits.sessions), "of": num_agents, "longest_tokens": longest})
    return rows


def _is_before(clock: Callable[[], float], until_s: float) -> bool:
    return clock() < until_s


def _answer(
    question: Question, file: SessionFile, tiers: Tiers, schedule: str, may_go_on: Callable[[], bool],
    tried: Tried,
) -> Row:  # fmt: skip
    """The row for one order of service, as far as it was found before `may_go_on` became False."""
    ran_out = False

    def has_time() -> bool:
        nonlocal ran_out
        ran_out = ran_out or not may_go_on()
        return not ran_out

    def told(agents: int, is_good: bool) -> None:
        if not ran_out:
            tried(schedule, agents, is_good)

    server, crowd = question.server, question.crowd
    cell = ClosedCell(crowd, question.eviction, tiers, schedule, server, question.is_anonymous)
    most = min(question.most, len(file.sessions))
    agents = most_agents(cell, file, question.p95_s, None, most, has_time, told)
    return {
        "trace": file.name, "source": file.source, "policy": question.eviction, "schedule_policy": schedule,
        "device_tokens": tiers.device, "host_tokens": tiers.host, "storage_tokens": tiers.storage,
        "bytes_per_token": server.machine.bytes_per_token, "p95_s": question.p95_s, "seed": crowd.seed,
        "most_agents": agents, "agents_per_gib": round(agents / cell.memory_gib, 4),
        "agents_per_device_gib": round(agents / question.memory.device_gib, 4),
        "ended_by": "most" if agents == most else "time" if ran_out else "p95",
    }  # fmt: skip


_ENDED = {
    "p95": "",
    "most": "at least: all that were tried, or that the file has",
    "time": "at least: out of --minutes",
}


def shown(rows: list[Row], server: ServerRates) -> str:
    """A line for each order, under what was played and what was assumed."""
    first, machine = rows[0], server.machine
    lines = [
        f"{first['trace']} [{first['source'][:16]}]: {first['sessions']} of {first['of']} sessions stay within "
        f"{millions(first['longest_tokens'])} tokens, seed {first['seed']}",
        f"device {millions(first['device_tokens'])}, host {millions(first['host_tokens'])}, storage "
        f"{millions(first['storage_tokens'])} tokens of {machine.bytes_per_token:g} bytes; "
        f"{machine.prefill_rate:g} tokens/s prefill, {server.decode_rate:g} tokens/s of each answer; host "
        f"{machine.host_rate:g}, storage {machine.storage_rate:g} bytes/s; {first['policy']}",
        f"  {'order':8}{'agents':>8}{'per GiB':>10}{'per GiB of device':>20}   with a p95 of "
        f"{first['p95_s']:g} s to the first token",
    ]
    for r in rows:
        lines.append(
            f"  {r['schedule_policy']:8}{r['most_agents']:8}{r['agents_per_gib']:10.3f}"
            f"{r['agents_per_device_gib']:20.3f}   {_ENDED[r['ended_by']]}".rstrip()
        )
    lines.append(
        "A model: one prefill at a time, decode beside it at a rate of its own. Measure the rates, and try "
        "another --seed."
    )
    return "\n".join(lines)
