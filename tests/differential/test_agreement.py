"""100 % agreement with SGLang under LRU where locks are released in access order.

Windows are compared, too: full and window data, sizes, locks and free tokens of each.

After every move: the answer (match lengths on device and host, tokens inserted, locked, evicted), the
evictable, protected and total sizes, the free tokens of both pools, which pages each tier has gained and
lost, by their tokens, and that what was matched is what was stored.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import pytest

from tests.differential import ours
from tests.differential.compare import (
    LANES,
    PEERS,
    WINDOW_PEERS,
    Lane,
    Seen,
    comparable,
    explain,
    parting,
    play_on_peer,
)
from tests.differential.ours import Manner
from tests.differential.streams import Setup, Stream

NUM_SEEDS = int(os.environ.get("HIRADIX_DIFFERENTIAL_SEEDS", "10"))


def num_seeds(lane: Lane) -> int:
    """The two cores of 0.5.23 share theirs; 0.5.15 has hardly changed, and with storage it takes a second to
    forget."""
    if lane.setup.storage:
        return max(NUM_SEEDS // 5, 1)
    return NUM_SEEDS if lane.peer == "0.5.9" else max(NUM_SEEDS // 2, 1)


@pytest.fixture(scope="module")
def theirs() -> dict[Lane, list[Seen]]:
    found: dict[Lane, list[Seen]] = {lane: [] for lane in LANES}

    def play(peer: str) -> None:
        lanes = [lane for lane in LANES if lane.peer == peer]
        streams = [(lane, stream) for lane in lanes for stream in lane.streams(num_seeds(lane))]
        for (lane, _), seen in zip(streams, play_on_peer([stream for _, stream in streams], peer)):
            found[lane].append(seen)

    with ThreadPoolExecutor() as pool:  # each peer is a process
        for _ in pool.map(play, PEERS):
            pass
    return found


@cache
def _own(kind: str, setup: Setup, manner: Manner, seeds: int, version: str) -> list[tuple[Stream, Seen]]:
    lane = Lane("", kind, setup, manner)
    return [(stream, ours.run(stream, manner, version)) for stream in lane.streams(seeds)]


@pytest.mark.parametrize("lane", LANES, ids=str)
def test_every_move_has_the_same_outcome(lane: Lane, theirs: dict[Lane, list[Seen]]) -> None:
    happened: Counter[str] = Counter()
    count = num_seeds(lane)
    for (stream, own), seen in zip(
        _own(lane.kind, lane.setup, lane.manner, count, lane.version), theirs[lane]
    ):
        at = parting(comparable(seen, lane), comparable(own, lane))
        assert at is None, explain(stream, seen, own, at)
        assert all(step["exact"] for step in own), stream.name
        for move, step in zip(stream.moves, own):
            happened[move[0]] += 1
            happened["found on device"] += move[0] in ("look", "start", "hold") and step["answer"][0] > 0
            happened["found on host"] += move[0] in ("look", "start", "hold") and step["answer"][1] > 0
            tiers = step["pages"].values()
            happened["left"] += "" in tiers or "H" in tiers
            happened["found in storage"] += move[0] == "fetch" and step["answer"][2] > 0
            happened["lost its window"] += "D" in tiers and bool(lane.setup.window)
            happened["copied down"] += "DH" in tiers or "H" in tiers
    assert happened["found on device"] > count and happened["left"] > count, happened
    assert not lane.setup.storage or happened["found in storage"] > count, happened
    assert not lane.setup.window or happened["lost its window"] > count, happened
    if lane.setup.host_ratio:
        assert happened["copied down"] > count, happened
        # Few of a conversation's nodes are used twice before they leave.
        rare = lane.setup.write_policy == "write_through_selective" and lane.kind != "held"
        assert rare or happened["found on host"] > count // 4, happened


def test_a_difference_would_be_seen(theirs: dict[Lane, list[Seen]]) -> None:
    """Positive control: without the peer's manner, streams that part anywhere do not agree."""
    for peer, is_windowed in [*product(PEERS, [False]), *product(WINDOW_PEERS, [True])]:
        lane = next(
            lane
            for lane in LANES
            if (lane.kind, lane.peer, bool(lane.setup.window)) == ("anywhere", peer, is_windowed)
        )
        apart = [
            parting(comparable(seen, lane), comparable(ours.run(stream, ours.AS_SHIPPED, lane.version), lane))
            for stream, seen in zip(lane.streams(num_seeds(lane)), theirs[lane])
        ]
        assert any(at is not None for at in apart), lane
