"""Wishes in the simulation: with everything else that goes on, nothing that is promised breaks.

HIRADIX_INTENT_MOVES=1000000 python -m pytest tests/intents/test_simulation.py      so many moves
"""

from __future__ import annotations

import os
from collections import Counter

from tests.intents.simulation import play
from tests.seeds import is_enough, seeded, seeds

NUM_MOVES = int(os.environ.get("HIRADIX_INTENT_MOVES", "12000"))
MOVES_OF_A_SEED = 2000


@seeded
def test_wishes_break_no_promise() -> None:
    ends: Counter[str] = Counter()
    for seed in seeds(-(-NUM_MOVES // MOVES_OF_A_SEED)):
        ends += play(seed, MOVES_OF_A_SEED).ends
    for what in (
        "hold expired",
        "hold cancelled",
        "hold refused",
        "forget done",
        "bring done",
        "locate done",
    ):
        assert is_enough(ends[what] > 0), (what, ends)
