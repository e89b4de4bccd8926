"""Ranks that get the same wishes in the same order decide alike, with full attention, windows and states;
budgets hold in every component."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from hiradix.cache import HierarchicalCache
from hiradix.cache.agreement import Vector
from hiradix.cache.intents.table import Intents
from hiradix.intents import Intent, IntentState, Selector, Verb
from hiradix.intents.limits import IntentLimits
from hiradix.memory import PageAllocator
from hiradix.tree import RadixKey, RadixTree
from tests.ranks.component_ranks import ComponentRank, ComponentRanks, setup_of
from tests.ranks.world import Rank, Ranks, Setup
from tests.seeds import is_enough, seeded, seeds

SEEDS, NUM_MOVES = 12, 120
WIDE = IntentLimits(device_share=0.5, host_share=0.5, tenant_share=0.5, max_open=8)
VERBS = (Verb.LOCATE, Verb.HOLD, Verb.HOLD, Verb.HOLD, Verb.FORGET, Verb.BRING)


def widened(cache: HierarchicalCache) -> Intents:
    """The cache's wishes, with room for some in small pools."""
    if cache.intents.limits is not WIDE:
        cache.intents = Intents(cache.intents.planner, WIDE)
    return cache.intents


def wish(cache: HierarchicalCache, key: RadixKey, story: Any) -> list[Any]:
    """One wish, or the end of one; what all ranks must say of it. story: draws alike on all ranks."""
    intents = widened(cache)
    receipts = intents.receipts()
    if receipts and not story(4):
        intents.cancel(receipts[story(len(receipts))].id)
    verb, tiers = VERBS[story(len(VERBS))], ("device", "host")
    more: dict[str, Any] = {"wait_s": 0.0 if verb is Verb.FORGET else 5.0}
    more["asked_by"] = ("", key.space.tenant)[story(2)]
    if verb is Verb.HOLD:
        tiers, more["ttl_s"] = (("device",), ("host",))[story(2)], (0.01, 0.3, 100.0)[story(3)]
    elif verb is Verb.BRING:
        tiers, more["target"] = (), ("host", "storage")[story(2)]
    intents.submit(Intent(verb, Selector.prefix(key), tiers, **more))
    cache.tick()
    intents.book.check()
    return [(one.id, one.verb, one.state, one.done, one.clipped) for one in intents.receipts()]


def end_all(cache: HierarchicalCache) -> None:
    for receipt in cache.intents.receipts():
        cache.intents.cancel(receipt.id)


class WishingRank(Rank):
    """A rank whose ticks sometimes bring a wish."""

    def do_tick(self) -> None:
        if self.story.random() < 0.4:
            self.said.append(wish(self.cache, self.key(), self.story.randrange))
        super().do_tick()

    def end(self) -> None:
        end_all(self.cache)
        super().end()


class WishingRanks(Ranks):
    def _makers(self, seed: int, setup: Any) -> list[Any]:
        return [
            lambda number=number: WishingRank(number, seed, setup, self.agree_of(number), None)
            for number in range(setup.num_ranks)
        ]


def wish_of(player: Any, draw: Any) -> None:
    """A move of a rank with several components."""
    world = player.world
    world.said.append(wish(world.cache, world.key(draw), draw))


class WishingComponentRank(ComponentRank):
    moves = ComponentRank.moves | {wish_of: 6}

    def assert_drained(self) -> None:
        end_all(self.cache)
        super().assert_drained()


class WishingComponentRanks(ComponentRanks):
    rank = WishingComponentRank


def ends_of(ranks: Ranks) -> Counter[str]:
    receipts = ranks.ranks[0].cache.intents.receipts()
    return Counter(f"{one.verb.value} {one.state.value}" for one in receipts)


@seeded
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["full", "components"])
def test_ranks_decide_alike_what_becomes_of_wishes(kind: str) -> None:
    ends: Counter[str] = Counter()
    for seed in seeds(SEEDS):
        try:
            ranks = (
                WishingRanks(seed, Setup(2 + seed % 2))
                if kind == "full"
                else WishingComponentRanks(seed, setup_of(seed))
            )
            ends += ends_of(ranks.play(NUM_MOVES))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r:.2000}") from error
    for what in ("hold expired", "hold cancelled", "forget done", "locate done"):
        assert is_enough(ends[what] > 0), (what, ends)


def test_without_lower_tiers_too_a_lease_ends_by_the_ranks_common_clock() -> None:
    """One of two ranks, whose clock runs ahead: where each went by its own, their trees would differ."""
    own, other = [1000.0], [1000.0]
    pages = PageAllocator(16, 1)

    def agree(vector: Vector) -> Vector:
        theirs = vector.copy()
        theirs[theirs > 1] = round(other[0] * 1_000_000)
        return np.minimum(vector, theirs)

    cache = HierarchicalCache(RadixTree(4), pages, clock=lambda: own[0], agree=agree)
    key, own_pages = RadixKey(range(16)), pages.alloc(4)
    assert own_pages is not None
    cache.insert(key, own_pages)
    lease = cache.intents.submit(Intent(Verb.HOLD, Selector.prefix(key), ("device",), ttl_s=60.0))
    for clocks, state in (
        ((1001.0, 1001.0), IntentState.HELD),
        ((1062.0, 1050.0), IntentState.HELD),
        ((1063.0, 1062.0), IntentState.EXPIRED),
    ):
        own[0], other[0] = clocks
        cache.tick()
        cache.intents.expire()
        found = cache.intents.receipt(lease.id)
        assert found is not None and found.state is state, clocks
