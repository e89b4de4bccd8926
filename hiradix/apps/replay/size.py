"""hiradix size: what a model takes, how many agents a machine carries, what more memory brings for a trace."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hiradix.apps.replay.advice import advice
from hiradix.apps.replay.capacity import Memory, Question, carried, shown
from hiradix.apps.replay.closed_loop import ServerRates
from hiradix.apps.replay.closed_report import add_crowd_flags, session_file
from hiradix.apps.replay.kv_bytes import is_model, read_kv_bytes
from hiradix.apps.replay.lab import Source, check_policy
from hiradix.apps.replay.report import write_json
from hiradix.apps.replay.timing import add_machine_flags, machine_of
from hiradix.apps.traces.crowd import Crowd
from hiradix.apps.traces.sessions import SAMPLE
from hiradix.errors import CacheError, ConfigError
from hiradix.policy.admission import make_admission


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hiradix size", description=(__doc__ or "").split(": ", 1)[1])
    add = parser.add_argument
    add(
        "trace", metavar="TRACE|DIR", nargs="?",
        help="a file, such as one of `hiradix serve --record-trace`; with --device-gib one of agents' sessions "
        "(default: 102 real ones that come with the package). A model's folder: what its cache takes",
    )  # fmt: skip
    add_machine_flags(parser)
    add("--json", type=Path, metavar="FILE", help="the agents' numbers")
    group = parser.add_argument_group("how many agents", "with --device-gib, by playing sessions closed loop")
    add = group.add_argument
    add("--device-gib", type=float, metavar="GIB", help="for KV, on all devices of a server together")
    add("--host-gib", type=float, default=0.0, metavar="GIB", help="host tier (default: none)")
    add("--storage-gib", type=float, default=0.0, metavar="GIB", help="storage tier (default: none)")
    add("--model", type=Path, metavar="PATH", help="folder or config.json that tells the bytes per token")
    add("--kv-element-bytes", type=int, choices=(1, 2, 4), help="in the cache (default: as the model's type)")
    add("--context", type=int, metavar="TOKENS", help="the model's (default: what the device holds)")
    add("--p95", type=float, default=30.0, metavar="S", help="bound of the p95 to first token (default: 30)")
    add(
        "--schedule-policy", default="cached,fcfs", metavar="NAMES",
        help="who is served next (default: %(default)s)",
    )  # fmt: skip
    add("--radix-eviction-policy", default="ghd", metavar="NAME", help="of all tiers (default: ghd)")
    add("--seed", type=int, default=0, help="draws the agents (default: 0)")
    add("--most", type=int, default=512, help="agents that are tried (default: 512)")
    add("--minutes", type=float, default=10.0, help="that this may take (default: 10)")
    add_crowd_flags(group)
    group = parser.add_argument_group("what more memory would bring", "without --device-gib")
    add = group.add_argument
    add("--device-tokens", type=int, default=0, help="the device pool (default: a twentieth of the traffic)")
    add("--limit", type=int, help="requests to play")
    add("--processes", type=int, default=2, help="at work at a time (default: 2)")
    return parser


def _agents(args: argparse.Namespace) -> str:
    """The number of agents that the machine carries, as text; progress goes to stderr."""
    if args.model is not None and args.bytes_per_token is not None:
        raise ConfigError("--model and --bytes-per-token say the same")
    if args.kv_element_bytes is not None and args.model is None:
        raise ConfigError("--kv-element-bytes needs --model")
    size = None if args.model is None else read_kv_bytes(args.model, args.kv_element_bytes).most_per_token
    server = ServerRates(machine_of(args, size), args.decode_rate, args.chunk)
    memory = Memory(args.device_gib, args.host_gib, args.storage_gib)
    tiers = memory.tiers(server.machine.bytes_per_token)
    schedules = tuple(args.schedule_policy.split(","))
    for name in schedules:
        make_admission(name, tiers.device)
    check_policy(args.radix_eviction_policy, tiers)
    question = Question(
        memory, server, Crowd(1, args.turns, args.spread, args.seed), args.p95, args.radix_eviction_policy,
        schedules, args.context, args.most, args.minutes * 60, args.anonymous,
    )  # fmt: skip
    file = session_file(SAMPLE if args.trace is None else Path(args.trace), "--device-gib")
    rows = carried(question, file, time.monotonic, _print_try)
    if args.json is not None:
        write_json(args.json, rows, {"command": ["hiradix", "size", *sys.argv[2:]]})
    return shown(rows, server)


def _print_try(schedule: str, agents: int, is_good: bool) -> None:
    print(f"{schedule}: {agents} {'fit' if is_good else 'are too many'}", file=sys.stderr, flush=True)


def _more_memory(args: argparse.Namespace) -> str:
    """Advice on what more memory would bring."""
    if args.trace is None:
        raise ConfigError("a TRACE is needed, or --device-gib: how many agents a machine carries; see --help")
    if args.device_tokens < 0:
        raise ConfigError(f"--device-tokens must be >= 0, got {args.device_tokens}")
    if args.kv_element_bytes is not None:
        raise ConfigError("--kv-element-bytes needs a model's folder")
    for flag, value in (
        ("--host-gib", args.host_gib),
        ("--storage-gib", args.storage_gib),
        ("--model", args.model),
    ):
        if value:
            raise ConfigError(f"{flag} needs --device-gib")
    source = Source(args.trace, 0, args.limit)
    machine = machine_of(args, source.load().bytes_per_token)
    return advice(source, machine, args.processes, args.device_tokens)


def _model(folder: Path, element_bytes: int | None) -> str:
    """The size of a model's cache, as text."""
    found = read_kv_bytes(folder, element_bytes, flag="")
    return "\n".join([f"{folder}:", *(f"  {line}" for line in found.lines())])


def _answer(args: argparse.Namespace) -> str:
    if args.trace is not None and is_model(Path(args.trace)):
        folder = Path(args.trace)
        if args.device_gib is None:
            return _model(folder, args.kv_element_bytes)
        if args.model is not None:
            raise ConfigError(f"{folder} and --model say the same")
        args.model, args.trace = folder, None
    return _more_memory(args) if args.device_gib is None else _agents(args)


def main(arguments: Sequence[str] | None = None) -> int:
    """hiradix size: agents with --device-gib, otherwise host memory and disk for a trace."""
    args = _parser().parse_args(arguments)
    try:
        print(_answer(args))
    except CacheError as error:
        print(f"hiradix size: error: {error}", file=sys.stderr)
        return 2
    return 0
