"""Lives of both executors' engines (`tests.executors.lives`) with wishes mixed in: no page is ever wrong, no
budget is passed, no lease outlives its end, and when all has ended nothing is held.

HIRADIX_INTENT_MOVES=1000000 python -m pytest tests/intents/test_executors.py      so many moves over each
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from hiradix.cache.intents.table import Intents
from hiradix.intents import Intent, IntentState, Selector, Verb
from hiradix.tree import RadixKey
from tests.executors.lives import ENGINES, Life
from tests.seeds import is_enough, seeded, seeds

NUM_MOVES = int(os.environ.get("HIRADIX_INTENT_MOVES", "4000"))
MOVES_OF_A_LIFE = 200
WISHES_PER_STEP = 0.25


class WishingLife(Life):
    """A life in which somebody wishes something with some of the steps."""

    def start(self) -> None:
        super().start()
        self.wished: list[int] = []
        self.ends: Counter[str] = Counter()

    @property
    def intents(self) -> Intents:
        engine: Any = self.engine
        found: Intents = engine.role.intents if hasattr(engine, "role") else engine.cache.intents
        return found

    def step(self) -> None:
        if self.rng.random() < WISHES_PER_STEP:
            self.wish()
        super().step()
        self.intents.tick()
        self.intents.book.check()
        now_s = self.intents.planner.clock()
        late = [lease.id for lease in self.intents.book.leases.values() if lease.is_held and lease.is_over]
        assert not late, f"leases {late} are in force past their ends at {now_s}"

    def wish(self) -> None:
        rng, salt = self.rng, self.rng.choice([None, None, "x"])
        key = RadixKey(self._prompt(), cache_salt=salt)
        selector = rng.choice(
            [Selector.prefix(key)] * 6 + [Selector.tenant_of("salt:x"), Selector.everything()]
        )
        owner = rng.choice(["", selector.tenant])
        verb = rng.choice([Verb.LOCATE, Verb.HOLD, Verb.HOLD, Verb.HOLD, Verb.FORGET, Verb.BRING])
        tiers: tuple[str, ...] = ("device", "host", "storage")
        more: dict[str, Any] = {"wait_s": rng.choice([0.05, 5.0]), "asked_by": owner}
        if verb is Verb.HOLD:
            tiers, more["ttl_s"] = (rng.choice(tiers[:2]),), rng.choice([0.001, 0.02, 1000.0])
        elif verb is Verb.BRING:
            tiers, more["target"] = (), rng.choice(["host", "storage"])
        elif verb is Verb.FORGET:
            tiers = rng.choice([tiers, tiers[:2], tiers[1:]])
            more["is_whole"] = rng.random() < 0.3
        self.wished.append(self.intents.submit(Intent(verb, selector, tiers, **more)).id)
        if self.wished and rng.random() < 0.2:
            number = rng.choice(self.wished)
            if self.intents.receipt(number) is not None:
                self.intents.cancel(number)

    def _end(self) -> Counter[str]:
        for receipt in self.intents.receipts():
            if not receipt.state.is_end:
                self.intents.cancel(receipt.id)
        came = super()._end()
        ended = Counter(f"{r.verb.value} {r.state.value}" for r in self.intents.receipts())
        assert not any(r.state is IntentState.HELD for r in self.intents.receipts())
        return came + ended


@seeded
@pytest.mark.parametrize("kind", ENGINES)
def test_wishes_break_no_promise_in_either_executor(kind: str) -> None:
    came: Counter[str] = Counter()
    for seed in seeds(-(-NUM_MOVES // MOVES_OF_A_LIFE)):
        try:
            came += WishingLife(kind, seed).play(MOVES_OF_A_LIFE)
        except BaseException as error:
            error.add_note(f"WishingLife({kind!r}, {seed}).play({MOVES_OF_A_LIFE})")
            raise
    for what in (
        "hold expired",
        "hold cancelled",
        "hold refused",
        "forget done",
        "locate done",
        "bring done",
    ):
        assert is_enough(came[what] > 0), (what, came)
