"""The whole cache under seeds: requests, faults, administrators, in one thread and virtual time.

make test-faults                                        at least a million moves, on two cores
HIRADIX_SIM_OPS=10000000 make test-faults               the soak, with the slope of resident memory
HIRADIX_SIM_SECONDS=3600 make test-faults               goes on beyond the million until an hour is over
python -m tests.simulation.run SEED                     replays one seed
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from hiradix.transfer import storage_runner
from tests.seeds import FIRST, is_enough, seeded
from tests.simulation.run import MOVES, first_failure, play

NUM_SHARDS = 2
FLOOR_MOVES = int(os.environ.get("HIRADIX_SIM_OPS", "1000000"))
BUDGET_S = float(os.environ.get("HIRADIX_SIM_SECONDS", "0"))  # goes on beyond the floor until this is over
FIRST_SEED = int(os.environ.get("HIRADIX_SIM_SEED", str(FIRST)))
MEBIBYTE = 1 << 20
WARM_SEEDS = 50


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """Resident bytes over moves: the slope is what a leak looks like."""

    def __init__(self) -> None:
        self.points: list[tuple[int, int]] = []

    def note(self, num_moves: int) -> None:
        """What is held now: garbage, and freed memory that the C library keeps, would hide a slope."""
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)(0)
        self.points.append((num_moves, resident_bytes()))

    @property
    def mib_per_million(self) -> float:
        if len(self.points) < 2:
            return 0.0
        (x0, y0), (x1, y1) = self.points[0], self.points[-1]
        return (y1 - y0) / MEBIBYTE / ((x1 - x0) / 1e6)


@seeded
@pytest.mark.long(60)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_every_promise_holds_under_every_fault(
    shard: int, record_property: Callable[[str, object], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "hiradix")  # until its end: the tests behind it read what is logged
    totals: Counter[str] = Counter()
    memory, seed = Memory(), FIRST_SEED + shard
    start_s = time.monotonic()
    while totals["moves"] < FLOOR_MOVES // NUM_SHARDS or time.monotonic() - start_s < BUDGET_S:
        totals.update(play(seed).totals)
        totals["seeds"] += 1
        seed += NUM_SHARDS
        if totals["seeds"] % WARM_SEEDS == 0:
            memory.note(totals["moves"])
    record_property(
        "told",
        f"simulation shard {shard}: {dict(totals)} in {time.monotonic() - start_s:.0f} s; "
        f"resident memory {memory.mib_per_million:+.2f} MiB per million moves",
    )
    for what in ("loaded", "prefetched", "backed_up", "written", "load_failed", "retracted"):
        assert is_enough(totals[what] > 0), f"no page was ever {what}: {totals}"


def test_a_seed_replays() -> None:
    def story(seed: int) -> Any:
        world = play(seed)
        return world.totals, world.driver.now(), world.history

    assert story(3) == story(3)
    assert story(3) != story(4)


@pytest.mark.long(9)
def test_a_planted_fault_is_seen_and_its_seed_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: what storage does not have is taken for a hit; somebody reads it."""

    def all_good(task: Any, answer: list[bool]) -> bool:
        task.num_pages += len(answer)
        return True

    monkeypatch.setattr(storage_runner, "_all_done", all_good)
    message = first_failure(range(200))
    assert "python -m tests.simulation.run" in message, "200 seeds did not see it"
    seed, moves = (int(word) for word in message.split("[")[1].split("]")[0].split()[-2:])
    assert moves == MOVES
    with pytest.raises(AssertionError) as again:
        play(seed)
    assert str(again.value) == message
