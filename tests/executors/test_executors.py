"""One suite of lives for both executors: the same seeds, the same moves, the same oracle.

HIRADIX_EXECUTOR_MOVES=1000000 python -m pytest tests/executors      so many moves over each

Half of the lives have full attention alone, the others windows, recurrent states or both beside it.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.executors.lives import ENGINES, KINDS, Life
from tests.seeds import is_enough, seeded, seeds

NUM_MOVES = int(os.environ.get("HIRADIX_EXECUTOR_MOVES", "10000"))
MOVES_OF_A_LIFE = 200


SHARES = {"full": 3, "window": 1, "states": 1, "both": 1}  # of the moves
COUNTED = ("hit_tokens", "loaded", "load_failed", "prefetched", "backed_up", "written")


@seeded
@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("kind", ENGINES)
def test_every_page_that_is_found_holds_what_its_tokens_say(kind: str, attention: str) -> None:
    num_moves = NUM_MOVES * SHARES[attention] // sum(SHARES.values())
    came: Counter[str] = Counter()
    for seed in seeds(-(-num_moves // MOVES_OF_A_LIFE)):
        try:
            came += Life(kind, seed, attention).play(MOVES_OF_A_LIFE)
        except BaseException as error:
            error.add_note(f"Life({kind!r}, {seed}, {attention!r}).play({MOVES_OF_A_LIFE})")
            raise
    for what in COUNTED:
        assert is_enough(came[what] > 0), (what, came)


@seeded
@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("order", [("local", "vllm"), ("vllm", "local")], ids="-".join)
def test_what_one_has_stored_the_other_finds(order: tuple[str, str], attention: str) -> None:
    found = 0
    for seed in seeds(10 if attention == "full" else 4):
        store: dict[str, bytes] = {}
        Life(order[0], seed, attention, store).play(MOVES_OF_A_LIFE)
        stored = len(store)
        other = Life(order[1], seed, attention, store)
        came = other.play(MOVES_OF_A_LIFE)
        found += came["prefetched"]
        assert len(store) >= stored
    assert is_enough(found > 0)
