"""vLLM on conversations: without a cache, with its own prefix cache, with connectors, ours among them.

    make bench-vllm [BENCH_FLAGS="--rounds 5 --conversations 6 --turns 3"]
    python -m benchmarks.bench_vllm [--quick] [--out FILE]      in the environment of `make test-vllm`

Each variant is a vLLM process of its own with the same device memory, which holds about a third of the
conversations; they run in turns, round after round, on the same prompts. SmolLM2-135M on the CPU, one
request at a time. Time to first token is of the second and later turns: the first ones nobody can have.
Overhead is of prompts that nothing repeats, beside no cache at all, round by round. A case is a variant of
ours, the columns are the others.
Writes build/bench/vllm.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench_vllm_lmcache import LMCachePlayer, LMCacheServer
from benchmarks.common import Report, Row
from hiradix.apps.engine.smollm2 import smollm2_path
from tests.vllm.player import Player

BLOCK_SIZE = 32
VOCAB = 49_000
HOST_GB = 2.0
NONE, LMCACHE = "no cache", "prefix cache + LMCache 0.5.6"
QUICK = (NONE, LMCACHE, "prefix cache + hiradix")
PEERS = (NONE, "prefix cache", "ExampleConnector", LMCACHE)
Prompt = list[int]


@dataclass
class Variant:
    """One way to run vLLM. prefix: its own prefix cache is on. kind: the process it runs in."""

    name: str
    connector: dict[str, Any] | None
    prefix: bool
    kind: type[Player] = Player
    player: Player | None = None
    hits: int = 0
    later_turns: list[float] = field(default_factory=list)
    no_hits: list[float] = field(default_factory=list)  # per round, seconds of all its prompts


def variants(folder: Path, lmcache: LMCacheServer | None) -> list[Variant]:
    example = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }  # fmt: skip
    ours = {"hicache_size": HOST_GB}
    stored = {
        "hicache_storage_backend": "disk",
        "hicache_storage_backend_extra_config": {
            "disk_storage_path": str(folder / "pages"), "max_size": "4GiB",
        },
    }  # fmt: skip
    return [
        Variant(NONE, None, False),
        Variant("prefix cache", None, True),
        Variant("ExampleConnector", example, False),
        Variant("hiradix", ours, False),
        *([Variant(LMCACHE, lmcache.connector, True, LMCachePlayer)] if lmcache else []),
        Variant("prefix cache + hiradix", ours, True),
        Variant("prefix cache + hiradix + disk", ours | stored, True),
    ]


def turns_of(rng: random.Random, num_turns: int, turn_tokens: int) -> list[Prompt]:
    """A conversation's prompts: each begins with the one before."""
    tokens: Prompt = []
    prompts = []
    for _ in range(num_turns):
        tokens = tokens + [rng.randrange(10, VOCAB) for _ in range(turn_tokens)]
        prompts.append(tokens)
    return prompts


def schedule(rng: random.Random, args: argparse.Namespace) -> Iterator[tuple[int, Prompt]]:
    """(turn, prompt): all first turns, then all second ones, as people do who type in parallel."""
    talks = [turns_of(rng, args.turns, args.turn_tokens) for _ in range(args.conversations)]
    for turn in range(args.turns):
        for talk in talks:
            yield turn, talk[turn]


def play(every: list[Variant], number: int, args: argparse.Namespace, report: Report) -> None:
    """One round: the same prompts on each variant, which takes the lead in turns.

    A variant that is not ours and fails takes no further part.
    """
    talks = list(schedule(random.Random(f"talks {number}"), args))
    rng = random.Random(f"apart {number}")
    apart = [[rng.randrange(10, VOCAB) for _ in range(args.turn_tokens * 2)] for _ in range(args.apart)]
    failed = []
    for shift in range(len(every)):
        variant = every[(number + shift) % len(every)]
        try:
            play_one(variant, talks, apart)
        except (AssertionError, OSError) as error:
            if variant.name not in PEERS[1:]:
                raise
            report.leave_out(f"{variant.name}: {error}")
            failed.append(variant)
    for variant in failed:
        every.remove(variant)


def play_one(variant: Variant, talks: Sequence[tuple[int, Prompt]], apart: Sequence[Prompt]) -> None:
    """One variant's round."""
    assert variant.player is not None
    rows = variant.player.ask("first_tokens", prompts=[prompt for _, prompt in talks])
    for (turn, _), (seconds, cached) in zip(talks, rows, strict=True):
        variant.hits += cached
        if turn:
            variant.later_turns.append(seconds)
    rows = variant.player.ask("first_tokens", prompts=apart)
    assert sum(cached for _, cached in rows) == 0, f"{variant.name}: prompts that repeat nothing hit"
    variant.no_hits.append(sum(seconds for seconds, _ in rows))


def figures(variant: Variant, none: Variant, num_tokens: int) -> dict[tuple[str, str], float]:
    """By metric and unit."""
    later = sorted(variant.later_turns)
    shares = [own / base for own, base in zip(variant.no_hits, none.no_hits, strict=True)]
    return {
        ("hit tokens", "share"): variant.hits / num_tokens,
        ("TTFT p50", "ms"): statistics.median(later) * 1e3,
        ("TTFT p95", "ms"): later[min(len(later) - 1, int(len(later) * 0.95))] * 1e3,
        ("at no hits", "%"): 100 * (statistics.median(shares) - 1),
    }


def rows_of(every: Sequence[Variant], num_tokens: int) -> Iterator[Row]:
    """A case for each variant of ours, beside all that are not ours."""
    found = {variant.name: figures(variant, every[0], num_tokens) for variant in every}
    peers = {name: own for name, own in found.items() if name in PEERS}
    for name in (name for name in found if name not in peers):
        for (metric, unit), value in found[name].items():
            yield Row(name, metric, unit, value, {peer: own[metric, unit] for peer, own in peers.items()})


def started(variant: Variant, log: Path, args: argparse.Namespace) -> Player:
    """Its vLLM, with blocks for about a third of the conversations."""
    longest = max(args.turns, 2) * args.turn_tokens + 2 * BLOCK_SIZE
    third = args.conversations * args.turns * args.turn_tokens // 3
    player = variant.kind(
        smollm2_path(), variant.connector, log, dtype=args.dtype, max_model_len=longest, max_num_seqs=1,
        num_gpu_blocks_override=max(longest, third) // BLOCK_SIZE + 2, block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=variant.prefix,
    )  # fmt: skip
    return player.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=160)
    parser.add_argument("--apart", type=int, default=3, help="prompts per round that repeat nothing")
    parser.add_argument("--only", default="", help="variants whose names have one of these words, and none")
    parser.add_argument("--quick", action="store_true", help="three variants, one round of two conversations")
    parser.add_argument("--out", type=Path, default=Path("build/bench/vllm.json"))
    args = parser.parse_args()
    args.dtype = "float32" if args.quick else "bfloat16"  # which not every processor computes in
    if args.quick:
        args.rounds, args.conversations, args.turns, args.turn_tokens, args.apart = 1, 2, 2, 64, 1
    with Report(args.out, PEERS, ours="hiradix") as report, ExitStack() as ends:
        report.about |= {
            "rounds": args.rounds,
            "conversations": args.conversations,
            "turns": args.turns,
            "dtype": args.dtype,
        }
        every = ready(report, ends, args)
        for number in range(0 if args.quick else -1, args.rounds):  # the first is to warm up
            play(every, number, args, report)
            if number < 0:
                for variant in every:
                    variant.hits, variant.later_turns, variant.no_hits = 0, [], []
        turns = args.turns * (args.turns + 1) // 2 * args.turn_tokens
        report.add(rows_of(every, args.rounds * args.conversations * turns))
    print('LMCacheConnectorV1, inside the engine, does not run here: "No supported cpu connector found."')


def ready(report: Report, ends: ExitStack, args: argparse.Namespace) -> list[Variant]:
    """The variants asked for, each with its engine up; others' that do not start are left out."""
    folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
    lmcache = None
    try:
        lmcache = LMCacheServer(HOST_GB, BLOCK_SIZE, folder / "lmcache")
        ends.callback(lmcache.stop)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        report.leave_out(f"{LMCACHE}: {error}")
    words = [word for word in args.only.split(",") if word]
    every = []
    for number, variant in enumerate(variants(folder, lmcache)):
        if variant.name != NONE and words and not any(word in variant.name for word in words):
            continue
        if args.quick and variant.name not in QUICK:
            continue
        try:
            variant.player = started(variant, folder / f"log{number}", args)
        except AssertionError as error:
            if variant.name not in PEERS[1:]:
                raise
            report.leave_out(f"{variant.name}: {error}")
            continue
        ends.callback(variant.player.kill)
        every.append(variant)
    return every


if __name__ == "__main__":
    main()
