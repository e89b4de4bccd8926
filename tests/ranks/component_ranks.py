"""Simulated ranks of a model with windows and state records: a cache of several components on each.

The story's moves are those of `tests.cache`; each rank has its own speed, copy faults and host pools.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hiradix.cache import least
from hiradix.policy.uses import HINTS, Finished
from hiradix.transfer import JobKind
from hiradix.tree import RadixKey, Tier
from tests.cache.component_storage import StoredPlayer, StoredWorld
from tests.cache.component_world import Admitted, ComponentWorld, Draw, Setup
from tests.cache.test_components import CONFIGS, Player
from tests.ranks.world import Ranks, standing

LEARNING = ("ghd", "2q", "lru,ghd", "2q,lru")
PAGE_TOKENS = 300  # that a page stands for when a policy learns: paths have names, and leave ghosts


@dataclass(frozen=True)
class RanksSetup:
    num_ranks: int
    each: Setup


def end(player: Player, draw: Draw) -> None:
    """A running request ends, and the policy is told if it learns."""
    world = player.world
    if world.running and world.cache.learner is not None:
        one = world.running.pop(draw(len(world.running)))
        ended = Finished(len(one.key) * PAGE_TOKENS, draw(300), (None, *HINTS)[draw(3)])
        world.cache.finished(one.key, one.lock.node, ended)
        world.tree.unlock(one.lock)


class ComponentRank(ComponentWorld):
    """One rank."""

    player: type[Player] = Player
    moves: dict[Any, int] = Player.MOVES | {end: 5}

    def __init__(self, number: int, seed: int, setup: Setup, agree: Any):
        self.number, self.story, self.agree = number, random.Random(seed), agree
        own = random.Random(seed * 1009 + number + 1)
        host_pages = tuple(count + own.randint(0, 4) for count in setup.host_pages)
        super().__init__(replace(setup, host_pages=host_pages), own.getrandbits(30), agree)
        self.own, self.speed, self.said = own, own.choice([0, 1, 5]), []
        self.page_s = random.Random(seed).choice([0.0003, 0.003, 0.05])  # what computing a page takes

    def loads_came(self) -> bool:
        (agreed,) = least(self.agree, int(super().loads_came()))
        self.said.append(("pass", agreed))
        return bool(agreed)

    def admit(self, key: RadixKey, load: bool = True) -> Admitted | None:
        """As ever; but what the gate refuses is not loaded, so only what is promised is looked at."""
        cache = self.cache
        match = cache.match(key)
        self.read_loadable(key, match.loadable_node)
        loaded = cache.load_back(match) if load else None
        self.said.append(("load", loaded))
        if loaded is not None:
            assert cache.match(key).device_node.end >= match.loadable_node.end, "loaded, and not usable"
        return self.take(key, self.tree.lock(cache.match(key).device_node, Tier.DEVICE))

    def run_pass(self, batch: list[Admitted], draw: Draw) -> list[Any]:
        num_pages = sum(len(one.pages[0]) for one in batch)
        running = super().run_pass(batch, draw)
        if running:
            seconds = num_pages * self.page_s * self.own.uniform(0.7, 1.3)
            self.cache.no_regret.computed(num_pages, seconds)
        return running

    def live(self, num_moves: int) -> None:
        player = self.player.__new__(self.player)
        player.world = self
        moves = [move for move, weight in self.moves.items() for _ in range(weight)]
        for _ in range(num_moves):
            for _ in range(self.own.randint(0, 2 * self.speed)):
                self.driver.step()
            moves[self.story.randrange(len(moves))](player, self.story.randrange)
            self.check()
        while self.running:
            player.finish(self.story.randrange)
        self.assert_drained()

    def dump(self) -> list[Any]:
        """What must be the same on all ranks, in the parts `Ranks` compares."""
        cache, tree = self.cache, self.tree
        places = [(c, tier) for c in range(len(self.components)) for tier in Tier]
        nodes = [
            (n.start, n.end, n.row, n.created, n.hit_count)
            + tuple(_held(n.residency(c, tier)) for c, tier in places)
            for n in tree.nodes()
        ]
        orders = [standing(tree._residencies.orders[c][tier]) for c, tier in places]
        flights = [list(cache.in_flight.of_kind(kind)) for kind in JobKind]
        pools = (*cache.supply.device_pools, *cache.supply.host_pools)
        room = [pool.available for pool in pools]
        gate = cache.no_regret
        return [nodes, orders, flights, [], room, cache.counters, self.said, self.gates,
                (gate.num_refused, gate.num_probes)]  # fmt: skip


class StoredRank(ComponentRank, StoredWorld):
    """One rank with a store of its own: what it has, loses and fails is not what the others' do."""

    player = StoredPlayer
    moves = StoredPlayer.MOVES | {
        end: 5, StoredPlayer.peace: 0, StoredPlayer.ask: 40, StoredPlayer.restart: 7, StoredPlayer.lose: 1,
    }  # fmt: skip

    def dump(self) -> list[Any]:
        nodes, *others = super().dump()
        return [[*nodes, *((n.stored, n.boundary_stored) for n in self.tree.nodes())], *others]


def _held(residency: Any) -> tuple[int, int]:
    return residency.lock_ref, -1 if residency.pages is None else len(residency.pages)


class ComponentRanks(Ranks):
    """All ranks of one seed."""

    rank: type[ComponentRank] = ComponentRank

    def _makers(self, seed: int, setup: RanksSetup) -> list[Callable[[], Any]]:
        return [
            lambda number=number: self.rank(number, seed, setup.each, self.agree_of(number))
            for number in range(setup.num_ranks)
        ]


class StoredRanks(ComponentRanks):
    """The same with storage."""

    rank = StoredRank


def setup_of(seed: int) -> RanksSetup:
    each = CONFIGS[seed % len(CONFIGS)]
    if seed % 4 == 1:
        each = replace(each, order=LEARNING[seed // 4 % len(LEARNING)])
    return RanksSetup((2, 3, 4)[seed % 3], each)
