"""Closed loops side by side: what each order of service makes agents wait, and how many agents fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor
from pathlib import Path
from typing import Any

from hiradix.apps.replay.closed_loop import Answered, ClosedLoop, ServerRates
from hiradix.apps.replay.report import Row, millions
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.replay.timing import Machine
from hiradix.apps.traces.crowd import Crowd, working_set_tokens
from hiradix.apps.traces.records import open_records
from hiradix.apps.traces.sessions import SessionFile, is_sessions, read_folder, read_sessions
from hiradix.errors import ConfigError
from hiradix.policy.admission import AdmissionPolicy, admission_policies, make_admission

GIB = 1 << 30
Make = Callable[[int], AdmissionPolicy]  # by the capacity in tokens


@dataclass(frozen=True)
class ClosedCell:
    """One run: agents, an eviction policy, tiers and who is served next."""

    crowd: Crowd
    eviction: str
    tiers: Tiers
    schedule: str
    server: ServerRates
    is_anonymous: bool = False

    def play(
        self, file: SessionFile, make: Make | None = None,
        gives_up: Callable[[ClosedLoop], bool] | None = None,
    ) -> Answered:  # fmt: skip
        """make: the policy, where it is none of `hiradix.policy.admission`. gives_up: see `ClosedLoop`."""
        capacity = max(self.tiers.device, self.tiers.host)  # the host has what the device has, too
        policy = make_admission(self.schedule, capacity) if make is None else make(capacity)
        agents = self.crowd.drawn(file)
        loop = ClosedLoop(agents, self.eviction, self.tiers, policy, self.server, self.is_anonymous)
        return loop.play(gives_up)

    @property
    def memory_gib(self) -> float:
        """GiB of the device and host tiers together."""
        return (self.tiers.device + self.tiers.host) * self.server.machine.bytes_per_token / GIB


@dataclass
class Late:
    """Whether a run's p95 wait can still be `p95_s`, and whether there is time to find out (`may_go_on`)."""

    p95_s: float
    may_go_on: Callable[[], bool]
    num_seen: int = 0
    num_late: int = 0
    gave_up: bool = False

    def gives_up(self, loop: ClosedLoop) -> bool:
        new = loop.waits[self.num_seen :]
        self.num_seen += len(new)
        self.num_late += sum(wait_s > self.p95_s for wait_s, _, _ in new)
        most = loop.num_turns - floor(
            0.95 * (loop.num_turns - 1)
        )  # so many late ones are on both sides of p95
        self.gave_up = self.num_late >= most or not self.may_go_on()
        return self.gave_up


def most_agents(
    cell: ClosedCell, file: SessionFile, p95_s: float, make: Make | None = None, most: int = 1 << 16,
    may_go_on: Callable[[], bool] = lambda: True, tried: Callable[[int, bool], None] = lambda agents, good: None,
) -> int:  # fmt: skip
    """The largest number of agents, up to `most` and as far as the file has sessions, that wait at most
    `p95_s` for 95 % of their first tokens: doubled until they do not, then bisected. A run ends as soon as
    the bound is out of reach. may_go_on: once it is False, the most that were found to fit. tried: called for
    every run."""

    def is_good(agents: int) -> bool:
        if agents > most or not may_go_on():
            return False
        late = Late(p95_s, may_go_on)
        try:
            found = replace(cell, crowd=replace(cell.crowd, agents=agents)).play(file, make, late.gives_up)
        except ConfigError:  # no more sessions, or one too long for the device
            return False
        good = not late.gave_up and found.waits()["p95"] <= p95_s
        tried(agents, good)
        return good

    good, bad = 0, 1
    while is_good(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if is_good(middle) else (good, middle)
    return good


def row(cell: ClosedCell, file: SessionFile, p95_s: float | None) -> Row:
    """One cell's numbers; the most agents only where a `p95_s` is asked for."""
    found = cell.play(file)
    shown: Row = {
        "trace": file.name, "source": file.source, "agents": cell.crowd.agents, "seed": cell.crowd.seed,
        "working_set_tokens": working_set_tokens(cell.crowd.drawn(file)),
        "policy": cell.eviction, "schedule_policy": cell.schedule, "device_tokens": cell.tiers.device,
        "host_tokens": cell.tiers.host, "storage_tokens": cell.tiers.storage, "requests": len(found.wait_s),
        "hit_percent": round(found.hit_percent, 2),
    }  # fmt: skip
    for tier, tokens in found.hit_tokens.items():
        shown[f"{tier}_percent"] = round(100 * tokens / max(found.prompt_tokens, 1), 2)
    shown["ttft_s"] = {name: round(seconds, 2) for name, seconds in found.waits().items()}
    shown |= {"makespan_s": round(found.makespan_s, 1), "decisions": found.decisions}
    if p95_s is not None:
        most = most_agents(cell, file, p95_s)
        shown |= {"p95_s": p95_s, "most_agents": most, "agents_per_gib": round(most / cell.memory_gib, 4)}
    return shown


def table(rows: Sequence[Row]) -> str:
    """A line for each run."""
    head = f"{'device':>8}{'host':>8}{'storage':>8}  {'policies':16}{'hits %':>7}"
    times = "".join(f"{name:>9}" for name in ("mean s", "p50", "p95", "p99", "longest"))
    lines = []
    for r in rows:
        title = (
            f"{r['trace']} [{r['source'][:16]}]: {r['agents']} agents, seed {r['seed']}, working set "
            f"{millions(r['working_set_tokens'])} tokens: seconds to the first token"
        )
        if title not in lines:
            lines += [title, head + times + f"{'makespan':>10}" + ("  agents" if "p95_s" in r else "")]
        sizes = "".join(f"{millions(r[f'{tier}_tokens']):>8}" for tier in ("device", "host", "storage"))
        waits = "".join(f"{seconds:9.1f}" for seconds in r["ttft_s"].values())
        name = f"{r['policy']}, {r['schedule_policy']}"
        line = f"{sizes}  {name:16}{r['hit_percent']:7.1f}{waits}{r['makespan_s']:10.0f}"
        if "p95_s" in r:
            line += f"  {r['most_agents']} at p95 {r['p95_s']:g} s, {r['agents_per_gib']:.3f} per GiB"
        lines.append(line)
    return "\n".join(lines)


# -- the command's flags --------------------------------------------------------------------


def add_closed_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a closed loop; `closed_rows` reads them."""
    group = parser.add_argument_group(
        "closed loop", "--sessions agents that wait for their answers, on a server with these rates"
    )
    add = group.add_argument
    add("--closed-loop", action="store_true", help="play it so; --seed draws the agents")
    add(
        "--schedule-policy", default=",".join(admission_policies()), metavar="NAMES",
        help="who is served next (default: %(default)s)",
    )  # fmt: skip
    add_crowd_flags(group)
    add("--p95", type=float, metavar="S", help="also how many agents have this p95 time to first token")


def add_crowd_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags on how agents arrive and what serves them."""
    add = group.add_argument
    add("--turns", type=int, default=40, help="of each agent, at most (default: 40)")
    add("--spread", type=float, default=600.0, metavar="S", help="in which agents start (default: 600)")
    add("--decode-rate", type=float, default=40.0, help="tokens/s of each answer (default: 40)")
    add("--chunk", type=int, default=8192, metavar="TOKENS", help="of prefill at a time (default: 8192)")
    add("--anonymous", action="store_true", help="requests do not say of which session they are, or its last")


def closed_rows(args: argparse.Namespace, sizes: Sequence[int], machine: Machine) -> list[Row]:
    """The rows of the runs that the flags ask for; ConfigError names a bad flag."""
    if args.p95 is not None and not 0 < args.p95 < float("inf"):
        raise ConfigError(f"--p95 must be > 0, got {args.p95:g}")
    if args.sessions is None:
        raise ConfigError("--closed-loop needs --sessions")
    crowd = Crowd(args.sessions, args.turns, args.spread, args.seed, args.share_heads)
    server = ServerRates(machine, args.decode_rate, args.chunk)
    rows = []
    for name in args.traces:
        file = session_file(Path(name), "--closed-loop")
        for cell in _cells(args, sizes, crowd, server):
            rows.append(row(cell, file, args.p95))
    return rows


def _cells(args: Any, sizes: Sequence[int], crowd: Crowd, server: ServerRates) -> Iterator[ClosedCell]:
    for size in sizes:
        tiers = Tiers(size, args.host, args.storage, args.write_policy)
        for eviction in (args.policies or "lru").split(","):
            for schedule in args.schedule_policy.split(","):
                make_admission(schedule, size)
                yield ClosedCell(crowd, eviction.replace("+", ","), tiers, schedule, server, args.anonymous)


def session_file(path: Path, flag: str) -> SessionFile:
    """The sessions in a file or a folder; ConfigError names the flag that needs them where there are none."""
    if path.is_dir():
        return read_folder(path)
    records = open_records(path)
    if not is_sessions(records.first):
        raise ConfigError(f"{path}: {flag} needs sessions, an object with requests a line")
    return read_sessions(records)
