"""vLLM on conversations: without a cache, with its own prefix cache, with connectors, ours among them.

    make bench-vllm [BENCH_FLAGS="--rounds 5 --conversations 6 --turns 3"]

Each variant is a vLLM process of its own with the same device memory, which holds about a third of the
conversations; they run in turns, round after round, on the same prompts. SmolLM2-135M on the CPU, one
request at a time. Time to first token is of the second and later turns: the first ones nobody can have.
Overhead is of prompts that nothing repeats, beside no cache at all, round by round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench_vllm_lmcache import LMCachePlayer, LMCacheServer
from benchmarks.common import machine
from hiradix.engine.smollm2 import smollm2_path
from tests.vllm.player import Player

BLOCK_SIZE = 32
VOCAB = 49_000
HOST_GB = 2.0
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


def variants(folder: Path, lmcache: LMCacheServer) -> list[Variant]:
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
        Variant("no cache", None, False),
        Variant("vLLM's prefix cache", None, True),
        Variant("ExampleConnector", example, False),
        Variant("hiradix", ours, False),
        Variant("prefix cache + LMCache 0.5.6", lmcache.connector, True, LMCachePlayer),
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


def play(every: Sequence[Variant], number: int, args: argparse.Namespace) -> None:
    """One round: the same prompts on each variant, which takes the lead in turns."""
    talks = list(schedule(random.Random(f"talks {number}"), args))
    rng = random.Random(f"apart {number}")
    apart = [[rng.randrange(10, VOCAB) for _ in range(args.turn_tokens * 2)] for _ in range(args.apart)]
    for shift in range(len(every)):
        variant = every[(number + shift) % len(every)]
        assert variant.player is not None
        rows = variant.player.ask("first_tokens", prompts=[prompt for _, prompt in talks])
        for (turn, _), (seconds, cached) in zip(talks, rows, strict=True):
            variant.hits += cached
            if turn:
                variant.later_turns.append(seconds)
        rows = variant.player.ask("first_tokens", prompts=apart)
        assert sum(cached for _, cached in rows) == 0, f"{variant.name}: prompts that repeat nothing hit"
        variant.no_hits.append(sum(seconds for seconds, _ in rows))


def report(every: Sequence[Variant], num_tokens: int) -> str:
    base = every[0]
    lines = [
        f"{'':31}{'hit tokens':>16}{'TTFT p50, ms':>14}{'p95, ms':>10}{'at no hits':>12}",
    ]
    for variant in every:
        later = sorted(variant.later_turns)
        p50, p95 = statistics.median(later), later[min(len(later) - 1, int(len(later) * 0.95))]
        shares = [own / none for own, none in zip(variant.no_hits, base.no_hits, strict=True)]
        hits = f"{variant.hits:,} ({variant.hits / num_tokens:.0%})"
        lines.append(
            f"{variant.name:31}{hits:>16}{p50 * 1e3:>14,.0f}{p95 * 1e3:>10,.0f}"
            f"{statistics.median(shares) - 1:>+12.1%}"
        )
    return "\n".join(lines)


def started(variant: Variant, log: Path, args: argparse.Namespace) -> Player:
    """Its vLLM, with blocks for about a third of the conversations."""
    longest = max(args.turns, 2) * args.turn_tokens + 2 * BLOCK_SIZE
    third = args.conversations * args.turns * args.turn_tokens // 3
    player = variant.kind(
        smollm2_path(), variant.connector, log, dtype="bfloat16", max_model_len=longest, max_num_seqs=1,
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
    args = parser.parse_args()
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        lmcache = LMCacheServer(HOST_GB, BLOCK_SIZE, folder / "lmcache")
        ends.callback(lmcache.stop)
        words = [word for word in args.only.split(",") if word]
        every = variants(folder, lmcache)
        every = every[:1] + [v for v in every[1:] if not words or any(word in v.name for word in words)]
        for number, variant in enumerate(every):
            variant.player = started(variant, folder / f"log{number}", args)
            ends.callback(variant.player.kill)
        for number in range(-1, args.rounds):  # the first is to warm up
            play(every, number, args)
            if number < 0:
                for variant in every:
                    variant.hits, variant.later_turns, variant.no_hits = 0, [], []
    turns = args.turns * (args.turns + 1) // 2 * args.turn_tokens
    num_tokens = args.rounds * args.conversations * turns
    print(report(every, num_tokens))
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    print(f"{args.rounds} rounds of {args.conversations} conversations of {args.turns} turns; {about}")
    print('LMCacheConnectorV1, inside the engine, does not run here: "No supported cpu connector found."')


if __name__ == "__main__":
    main()
