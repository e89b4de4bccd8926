"""Runs streams on both sides and says where they part.

python -m tests.differential.compare [seeds]     the table of docs/differences.md
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiradix.tree import DeadLeaf
from tests.differential import ours
from tests.differential.door import NEWEST, OLDEST
from tests.differential.ours import AS_SHIPPED, Manner
from tests.differential.streams import Setup, Stream, draw

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900.0
Seen = list[dict[str, Any]]

LIKE_PEER = Manner(as_inserted=True)
LIKE_PEER_TOUCHING = Manner(as_inserted=True, touch_rest=True)
LIKE_PEER_WINDOWS = Manner(as_inserted=True, touch_rest=True, touch_windows=True, dead_leaf=DeadLeaf.BARE)
LIKE_NEW_PEER_WINDOWS = Manner(
    as_inserted=True, touch_rest=True, window_leaves=True, by_last_walk=True, with_window=True,
    dead_leaf=DeadLeaf.KEEP,
)  # fmt: skip


@dataclass(frozen=True)
class Lane:
    """Streams of one kind for one cache of one peer, and what of the peer's manner they need to agree."""

    peer: str
    kind: str
    setup: Setup
    manner: Manner

    @property
    def version(self) -> str:
        """Of SGLang, by whose records our side is built: the peer's, or the older one's that are like them."""
        return NEWEST if self.peer.startswith(NEWEST) else OLDEST

    def streams(self, num_seeds: int) -> list[Stream]:
        return list(draw(self.kind, self.setup, range(num_seeds)))

    def __str__(self) -> str:
        tier = self.setup.write_policy if self.setup.host_ratio else "device only"
        if self.setup.window:
            tier = f"window {self.setup.window}"
        if self.setup.storage:
            tier += ", storage"
        return f"{self.peer}, {self.kind}, page {self.setup.page_size}, {tier}"


OLD_PEERS = ("0.5.9", "0.5.15")  # whose class with a host tier is HiRadixCache; the second is 0.5.15.post1
WINDOW_PEERS = ("0.5.9", "0.5.23 python", "0.5.23 rust")
PEERS = (*OLD_PEERS, *WINDOW_PEERS[1:])
PAGE_SIZES = (1, 4, 16)
KINDS = (("turns", 80, LIKE_PEER), ("held", 40, LIKE_PEER), ("anywhere", 80, LIKE_PEER_TOUCHING))


def _lanes() -> Iterator[Lane]:
    for peer in PEERS:
        old = peer in OLD_PEERS
        for policy in ("", "write_through", "write_back", "write_through_selective"):
            kinds = KINDS if not old or policy != "write_through_selective" else COUNTING
            for kind, num_pages, manner in kinds:
                for size in PAGE_SIZES:
                    if policy:
                        setup = Setup(size, num_pages, 30.0, policy, chunked=not old)
                    else:
                        setup = Setup(size, num_pages)
                    yield Lane(peer, kind, setup, manner)


def _storage_lanes() -> Iterator[Lane]:
    for size in PAGE_SIZES:
        setup = Setup(size, 80, 30.0, "write_through", chunked=False, storage=True)
        yield Lane("0.5.15", "stored", setup, LIKE_PEER_TOUCHING)


WINDOWS = {1: (1, 8), 4: (1, 4, 12), 16: (5, 16, 48)}  # page size: tokens below, equal to and above it


def _window_lanes() -> Iterator[Lane]:
    for peer in WINDOW_PEERS:
        for kind in ("turns", "anywhere"):
            for size, windows in WINDOWS.items():
                for window in windows:
                    setup = Setup(size, 80, window=window, num_window_pages=45)
                    manner = LIKE_PEER_WINDOWS if peer == "0.5.9" else LIKE_NEW_PEER_WINDOWS
                    yield Lane(peer, kind, setup, manner)


COUNTING = (("inserted", 80, LIKE_PEER_TOUCHING),)  # of requests, old peers count other things as a use
LANES = [*_lanes(), *_storage_lanes(), *_window_lanes()]


def play_on_peer(streams: Sequence[Stream], peer: str = "0.5.9") -> list[Seen]:
    """What SGLang's classes of a version show, one list per stream, from a process of their own."""
    version, *core = peer.replace(".", "_").split()
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "streams.json"), Path(scratch, "seen.json")
        source.write_text(json.dumps([stream.record() for stream in streams]))
        command = [
            sys.executable,
            "-m",
            f"tests.differential.peer_{version}",
            str(source),
            str(target),
            *core,
        ]
        subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_S)
        seen: list[Seen] = json.loads(target.read_text())
    return seen


def parting(theirs: Seen, own: Seen) -> int | None:
    """The first move whose outcome differs, None if there is none."""
    for i, (one, other) in enumerate(zip(theirs, own, strict=False)):
        if one != other:
            return i
    return None if len(theirs) == len(own) else min(len(theirs), len(own))


def comparable(seen: Seen, lane: Lane) -> Seen:
    """Of 0.5.9's windows not whether what was matched is what was stored: it is not (differences, 9)."""
    if lane.setup.window and lane.peer == "0.5.9":
        return [{k: v for k, v in s.items() if k != "exact"} for s in seen]
    return seen


def explain(stream: Stream, theirs: Seen, own: Seen, at: int) -> str:
    """The parting move with the three before it, for a failing test's message."""
    lines = [stream.name]
    for i in range(max(0, at - 3), at + 1):
        lines.append(f"move {i}: {json.dumps(stream.moves[i])[:200]}")
    return "\n".join([*lines, f"theirs: {theirs[at:][:1]}", f"ours:   {own[at:][:1]}"])


def found_tokens(stream: Stream, seen: Seen) -> int:
    """Tokens that matches of the stream found, in either tier."""
    matching = ("look", "hold", "start")
    answers = [s["answer"] for s, move in zip(seen, stream.moves) if move[0] in matching]
    return sum(answer[0] + answer[1] for answer in answers)


def main() -> None:
    num_seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"{'lane':60} {'streams':>7} {'moves':>6} {'agree':>6} | as shipped: {'agree':>6} {'hits':>7}")
    for lane in LANES:
        streams = lane.streams(num_seeds)
        theirs = play_on_peer(streams, lane.peer)
        agree, shipped, hits, their_hits = 0, 0, 0, 0
        for stream, seen in zip(streams, theirs):
            seen = comparable(seen, lane)
            agree += parting(seen, comparable(ours.run(stream, lane.manner, lane.version), lane)) is None
            own = comparable(ours.run(stream, AS_SHIPPED, lane.version), lane)
            shipped += parting(seen, own) is None
            hits, their_hits = hits + found_tokens(stream, own), their_hits + found_tokens(stream, seen)
        share = f"{100 * hits / max(their_hits, 1):.1f} %"
        num_moves = sum(len(stream.moves) for stream in streams)
        print(f"{lane!s:60} {num_seeds:7} {num_moves:6} {agree:6} | {shipped:18} {share:>8}", flush=True)


if __name__ == "__main__":
    main()
