"""The simulation of `tests.simulation` with wishes among its moves.

python -m tests.intents.simulation SEED [MOVES]      one seed, again
python -m tests.intents.simulation moves COUNT [FIRST]      so many moves, seed after seed, until one fails
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from typing import Any

from hiradix.cache.intents.table import Intents
from hiradix.intents import Intent, IntentState, Selector, Verb
from hiradix.intents.limits import IntentLimits
from hiradix.tree import RadixKey
from tests.simulation.memory import Broken
from tests.simulation.run import CHECK_EVERY, MOVES
from tests.simulation.world import SCOPES, World

VERBS = (Verb.LOCATE, Verb.HOLD, Verb.HOLD, Verb.HOLD, Verb.FORGET, Verb.BRING)
TIERS = ("device", "host", "storage")


class WishingWorld(World):
    """A world in which operators and tenants wish things. Drained with leases in force: requests go before."""

    def _build(self) -> None:
        super()._build()
        before, rng = self.cache.cache.intents, self.rng
        limits = IntentLimits(
            device_share=rng.choice([0.25, 0.5, 0.9]), host_share=rng.choice([0.25, 0.5]),
            tenant_share=rng.choice([0.25, 0.6]), max_open=12, pages_per_tick=rng.choice([2, 4096]),
        )  # fmt: skip
        self.cache.cache.intents = Intents(before.planner, limits)
        self.ends: Counter[str] = getattr(self, "ends", Counter())

    @property
    def intents(self) -> Intents:
        return self.cache.cache.intents

    def _table(self) -> list[tuple[Any, float]]:
        return [*super()._table(), (self.wish, 4), (self.end_wish, 0.7)]

    def wish(self) -> None:
        rng = self.rng
        scope, tokens = rng.choice(self.history) if self.history else (rng.choice(SCOPES), [1, 2, 3])
        tokens = tokens[: rng.randint(1, len(tokens))]
        prefix = Selector.prefix(RadixKey(tokens, scope.extra_key, cache_salt=scope.cache_salt))
        selector = rng.choice([prefix] * 12 + [Selector.tenant_of(prefix.tenant), Selector.everything()])
        verb, tiers = rng.choice(VERBS), TIERS
        more: dict[str, Any] = {
            "wait_s": rng.choice([0.01, 1.0, 30.0]),
            "asked_by": rng.choice(["", prefix.tenant]),
        }
        if verb is Verb.HOLD:
            tiers, more["ttl_s"] = (rng.choice(TIERS[:2]),), rng.choice([0.01, 1.0, 1000.0])
        elif verb is Verb.BRING:
            tiers, more["target"] = (), rng.choice(TIERS[1:])
        elif verb is Verb.FORGET:
            tiers, more["is_whole"] = rng.choice([TIERS, TIERS[:2], TIERS[1:]]), rng.random() < 0.3
        self.intents.submit(Intent(verb, selector, tiers, **more))

    def end_wish(self) -> None:
        receipts = self.intents.receipts()
        if receipts:
            self.intents.cancel(self.rng.choice(receipts).id)

    def check_step(self) -> None:
        super().check_step()
        self.intents.book.check()

    def check_leases(self) -> None:
        """After a tick no lease is in force whose end has come."""
        self.cache.check_hicache_events()
        late = [lease.id for lease in self.intents.book.leases.values() if lease.is_held and lease.is_over]
        assert not late, f"leases {late} are in force past their ends"

    def restart(self) -> None:
        self._tally_wishes()
        super().restart()

    def _tally_wishes(self) -> None:
        for receipt in self.intents.receipts():
            self.ends[f"{receipt.verb.value} {receipt.state.value}"] += 1

    def assert_idle(self) -> None:
        for receipt in self.intents.receipts():
            if not receipt.state.is_end:
                self.intents.cancel(receipt.id)
        self.cache.drain(1000.0)
        self._tally_wishes()
        assert not any(receipt.state is IntentState.HELD for receipt in self.intents.receipts())
        assert not self.intents.planner.removals, "something is being forgotten without end"
        super().assert_idle()


def play(seed: int, moves: int = MOVES) -> WishingWorld:
    """One seed's life, to its end. Raises AssertionError that names the seed and the move."""
    world = None
    try:
        world = WishingWorld(seed)
        for number in range(1, moves + 1):
            world.move()
            if number % 50 == 0:
                world.check_leases()
            if number % CHECK_EVERY == 0:
                world.check()
        world.check()
        world.drain()
    except (Exception, Broken) as error:
        where = f"python -m tests.intents.simulation {seed} {moves}"
        at, setup = ("the start", "") if world is None else (f"move {world.num_moves}", world.setup)
        raise AssertionError(f"{at} of [{where}]: {type(error).__name__}: {error}\n{setup}") from error
    world.tally(world.totals)
    return world


def main(arguments: list[str]) -> int:
    logging.getLogger("hiradix").setLevel(logging.CRITICAL)
    if arguments[0] != "moves":
        world = play(int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else MOVES)
        print(dict(world.totals), dict(world.ends))
        return 0
    ends, totals = Counter[str](), Counter[str]()
    first = int(arguments[2]) if len(arguments) > 2 else 0
    for seed in range(first, first + -(-int(arguments[1]) // MOVES)):
        world = play(seed)
        ends += world.ends
        totals += world.totals
    print(dict(totals), dict(ends))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
