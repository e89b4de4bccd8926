"""hiradix replay: play traces through the real tree and cache, policies by capacities, and report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hiradix.apps.replay.advice import advice
from hiradix.apps.replay.closed_report import add_closed_flags, closed_rows
from hiradix.apps.replay.closed_report import table as closed_table
from hiradix.apps.replay.lab import Cell, CellResult, Source, check_policy, run
from hiradix.apps.replay.models import MODELS
from hiradix.apps.replay.report import plot, row, table, write_json
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.replay.timing import add_machine_flags, machine_of
from hiradix.apps.traces.sessions import Fleet
from hiradix.errors import CacheError, ConfigError

POLICIES = "lru,lfu,2q,ghd,arc,s3fifo,sieve,belady"
CAPACITIES = "0.5M,1M,3M,5M,10M,25M"
_UNITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}


def tokens(text: str) -> int:
    """`3M`, `64k`, `500000` as tokens."""
    unit = _UNITS.get(text[-1:].lower(), 1)
    try:
        count = round(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens such as 3M or 64k") from None
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hiradix replay", description=(__doc__ or "").split(": ", 1)[1])
    add = parser.add_argument
    add(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="files, or synthetic:KIND (agents, chat, rag, best-of-n, ...)",
    )
    add("--policies", help=f"device+host pairs as lru+ghd (default: {POLICIES}; models only without --host)")
    add("--capacities", default=CAPACITIES, help=f"device tokens (default: {CAPACITIES})")
    add("--host", type=tokens, default=0, metavar="TOKENS", help="host tier")
    add("--storage", type=tokens, default=0, metavar="TOKENS", help="storage tier below the host")
    add("--write-policy", default="write_through", help="of the host tier (default: write_through)")
    add("--warm", type=float, default=0.0, help="share of the requests that only warm (default: 0)")
    add("--limit", type=int, help="requests of each trace to play")
    add("--seed", type=int, default=0, help="of synthetic traces and of fleets (default: 0)")
    fleet = parser.add_argument_group("fleets", "how a file of agents' sessions becomes one trace")
    fleet.add_argument("--sessions", type=int, help="how many, drawn by --seed (default: all)")
    fleet.add_argument(
        "--mean-gap", type=float, default=60.0, metavar="S",
        help="seconds between their starts (default: %(default)g)",
    )  # fmt: skip
    fleet.add_argument(
        "--share-heads", action=argparse.BooleanOptionalAction, default=True,
        help="tools and system prompts of equal model and sizes are the same blocks (default: yes)",
    )  # fmt: skip
    add("--time-scale", type=float, default=1.0, help="multiply all time stamps")
    add("--processes", type=int, default=2, help="at work at a time (default: 2)")
    add("--json", type=Path, metavar="FILE", help="every number")
    add("--plot", type=Path, metavar="FILE", help=".svg or .png; needs hiradix[plots]")
    add("--advice", action="store_true", help="what more host memory and disk would buy")
    add_machine_flags(parser)
    add_closed_flags(parser)
    return parser


def sizes_of(args: argparse.Namespace) -> list[int]:
    """Tokens of each device; ConfigError names a bad flag."""
    if args.storage and not args.host:
        raise ConfigError("--storage needs --host")
    try:
        return [tokens(text) for text in args.capacities.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--capacities: {error}") from error


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """The cells the flags ask for; ConfigError names a bad one."""
    if not 0 <= args.warm < 1:
        raise ConfigError(f"--warm must be in [0, 1), got {args.warm:g}")
    sizes = sizes_of(args)
    policies = POLICIES.split(",") if args.policies is None else args.policies.split(",")
    if args.policies is None and args.host:
        policies = [policy for policy in policies if policy not in MODELS]
    cells = []
    fleet = Fleet(args.sessions, args.mean_gap, args.seed, args.share_heads)
    for name in args.traces:
        source = Source(name, args.seed, args.limit, args.time_scale, fleet)
        for policy in policies:
            for size in sizes:
                tiers = Tiers(size, args.host, args.storage, args.write_policy)
                check_policy(policy.replace("+", ","), tiers)
                cells.append(Cell(source, policy.replace("+", ","), tiers))
    return cells


@contextmanager
def progress_bar(num_cells: int) -> Iterator[Callable[[int, int], None]]:
    """Tells a terminal how far the cells are; nothing where there is no terminal or no rich."""
    try:
        from rich.progress import Progress
    except ImportError:
        yield lambda cell, done: None
        return
    done_by: dict[int, int] = {}
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"{num_cells} cells", total=None)

        def tell(cell: int, done: int) -> None:
            done_by[cell] = max(done, done_by.get(cell, 0))
            bar.update(task, completed=sum(done_by.values()), description=f"{len(done_by)}/{num_cells} cells")

        yield tell


def play(cells: Sequence[Cell], processes: int) -> list[CellResult]:
    """All outcomes, in the order of the cells, with a bar on the terminal."""
    with progress_bar(len(cells)) as tell:
        return run(cells, processes, tell)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    args = _parser().parse_args(arguments)
    try:
        machine = machine_of(args)
        if args.closed_loop:
            rows = closed_rows(args, sizes_of(args), machine)
            print(closed_table(rows))
        else:
            rows = [row(result, args.warm, machine) for result in play(cells_of(args), args.processes)]
            print(table(rows))
        if args.advice:
            print("\n" + advice(Source(args.traces[0], args.seed, args.limit), machine, args.processes))
        about: dict[str, Any] = {"command": ["hiradix", "replay", *(arguments or sys.argv[2:])]}
        if args.json is not None:
            write_json(args.json, rows, about)
        if args.plot is not None:
            plot(args.plot, rows)
    except CacheError as error:
        print(f"hiradix replay: error: {error}", file=sys.stderr)
        return 2
    return 0
