"""GHD's queues against the definition: the least index at its age, then the oldest, then the deepest."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.apps.replay.generate import generate
from hiradix.apps.replay.play import Player
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.traces.readers import read_trace
from hiradix.apps.traces.trace import Trace
from hiradix.policy import ghd
from hiradix.policy.class_queues_python import FEW, ClassQueue
from hiradix.policy.class_ranks import BUCKETS, EDGE_LIST, ClassRanks
from hiradix.policy.ghd_learner import GhdLearner
from hiradix.policy.ghd_order import GhdOrder
from hiradix.policy.ghd_tables import CONVERSATION, SHARED, ClassTables
from hiradix.policy.ghosts import EMPTY
from hiradix.policy.gittins_numpy import falling
from hiradix.policy.leaves import is_blocked
from hiradix.policy.places import INFINITE, Place
from hiradix.policy.uses import Finished, LastUse, RequestUse
from hiradix.tree import OrderContext, RadixKey, RadixTree, Tier
from hiradix.tree.node import Node, Residency
from tests.seeds import seeded, seeds
from tests.simulation import world
from tests.simulation.run import play

TRACE = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "conversation_trace.jsonl.xz"
CLASS = 2


def bucket_of(age: int) -> int:
    return next(b for b in reversed(range(BUCKETS)) if EDGE_LIST[b] <= age)


def placed(used: int) -> Place:
    """A place, to be, of a node of its own that was last used at `used`."""
    return Place(Residency(Node(None, 0, 1, 0)), LastUse(RequestUse(0, 0, 0, EMPTY), used, CLASS, 0), 0)


class Life:
    """One queue, and a list of what is in it."""

    def __init__(self, rng: random.Random):
        self.rng, self.tables, self.clock = rng, ClassTables(), 0
        self.places: list[tuple[int, int, int, Place]] = []
        self.new_index()
        self.queue = ClassQueue(CLASS, self.ranks)
        self.number = 0

    def new_index(self) -> None:
        """Few values, so that ages are often equal."""
        self.tables.index[CLASS] = [self.rng.randint(1, 6) for _ in range(BUCKETS)]
        (least,), (falls,) = falling(self.tables.index[[CLASS]])
        self.ranks = ClassRanks(self.tables.index[CLASS].tolist(), least.tolist(), falls.tolist())

    def add(self) -> None:
        used = max(0, self.clock - int(self.rng.choice([0, 0, 10 ** self.rng.uniform(0, 11)])))
        place = placed(used)
        self.number += 1
        depth = -self.rng.randint(0, 3)
        before = self.queue.rank, self.queue.until
        changed = self.queue.enter(place, depth, self.clock)
        assert changed or (self.queue.rank, self.queue.until) == before
        self.places.append((used, depth, self.number, place))

    def leave(self) -> None:
        if self.places:
            item = self.rng.choice(self.places)
            self.places.remove(item)
            item[3].entry = None
            before = self.queue.rank, self.queue.until
            changed = self.queue.left(item[3], self.clock)
            assert changed or (self.queue.rank, self.queue.until) == before

    def grow_older(self) -> None:
        self.clock += int(10 ** self.rng.uniform(0, 6))
        if self.clock >= self.queue.until:
            self.queue.bound(self.clock)

    def reindex(self) -> None:
        self.new_index()
        self.queue.bound(self.clock, self.ranks)

    def check(self) -> None:
        aged = [(self.ranks.index[b], b, item) for item in self.places
                for b in [bucket_of(self.clock - item[0])]]  # fmt: skip
        if not aged:
            assert self.queue.head is None
            return
        index, _, first = min(aged, key=lambda a: (a[0], a[1], a[2][:3]))
        if self.queue.head is None:
            assert self.queue.rank <= index, "no lower bound"
        else:
            assert (self.queue.rank, self.queue.head) == (index, first[3])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_queue_knows_who_goes_first_whatever_happens_in_between(seed: int) -> None:
    rng = random.Random(seed)
    life = Life(rng)
    steps = [life.add, life.add, life.leave, life.grow_older, life.grow_older, life.reindex]
    for _ in range(120):
        rng.choices(steps, [4, 4, 3, 4, 4, 1])[0]()
        life.check()
        if rng.random() < 0.5 and life.queue.head is None:
            life.queue.choose(life.clock)
            assert (life.queue.head is None) == (not life.places) == (life.queue.rank == INFINITE)
            life.check()


class Ranked:
    """ClassQueues that say another rank."""

    def __init__(self, queues: Any, rank: float):
        self._queues = queues._queues if isinstance(queues, Ranked) else queues
        self.rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queues, name)


class Plain(GhdOrder):
    """The same order, found by looking at every leaf."""

    def _best(self, gone: Mapping[int, int]) -> Residency | None:
        while True:
            self._enter_fresh()
            ranked = []
            for entry in self:
                if entry.rank is not None:
                    note, depth = entry.rank.note, -entry.node.start  # type: ignore[union-attr]
                    bucket = bucket_of(self._log.clock - note.clock)
                    index = float(self._tables.index[note.class_id, bucket])
                    ranked.append((index, note.class_id, bucket, note.clock, depth, id(entry), entry))
            if not ranked:
                return None
            entry = min(ranked)[-1]
            self._queues = Ranked(self._queues, min(ranked)[0])
            if is_blocked(self._context, entry, gone):
                self._unseat(entry)
            elif (entry.node.note or entry.rank.note) is not entry.rank.note:  # type: ignore[union-attr]
                self._reseat(entry)
            else:
                return entry


TRACES = {
    "conversation": lambda: read_trace(TRACE, 500),
    "chat": lambda: generate("chat", 7, 500),
    "flip": lambda: generate("flip", 7, 400),
}


@pytest.mark.parametrize("tiers", [Tiers(150_000), Tiers(60_000, 250_000)], ids=["device", "host"])
@pytest.mark.parametrize("name", TRACES)
def test_every_decision_is_that_of_a_search_over_all_leaves(
    name: str, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace: Trace = TRACES[name]()
    quick = Player(trace, "ghd", tiers).play()
    monkeypatch.setattr(ghd, "GhdOrder", Plain)
    searched = Player(trace, "ghd", tiers).play()
    assert quick.decisions == searched.decisions
    assert sum(int(hits.sum()) for hits in quick.hits.values()) > 0


class Repeating(GhdOrder):
    """The same order, told of each part of a path that moves down."""

    path_moves_once = False


@pytest.mark.parametrize("name", TRACES)
def test_what_has_moved_with_its_child_need_not_move_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, tiers = TRACES[name](), Tiers(60_000, 250_000)
    once = Player(trace, "ghd", tiers).play()
    monkeypatch.setattr(ghd, "GhdOrder", Repeating)
    assert Player(trace, "ghd", tiers).play().decisions == once.decisions


class Watched(GhdOrder):
    """The same order; whenever it is asked, all that may leave is in a queue or would follow what is."""

    num_asked = 0

    def coldest(self) -> Residency | None:
        self._look()
        return super().coldest()

    def victims(self, num_pages: int) -> list[Residency]:
        self._look()
        return super().victims(num_pages)

    def _look(self) -> None:
        self._enter_fresh()
        for entry in self:
            assert is_blocked(self._context, entry) or self._stands(entry), f"{entry.node} cannot leave"
        Watched.num_asked += 1

    def _stands(self, entry: Residency) -> bool:
        if entry.rank is not None:
            return entry.rank.entry is entry and entry.rank.seat is not None
        node = entry.node
        assert node is not None
        return self._covers and any(
            child.note is node.note is not None and child.host.hotter is not None and self._stands(child.host)
            for child in node.children.values()
        )


@pytest.mark.parametrize("tiers", [Tiers(150_000), Tiers(60_000, 250_000)], ids=["device", "host"])
@pytest.mark.parametrize("name", TRACES)
def test_all_that_may_leave_is_to_be_found(name: str, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghd, "GhdOrder", Watched)
    monkeypatch.setattr(Watched, "num_asked", 0)
    Player(TRACES[name](), "ghd", tiers).play()
    assert Watched.num_asked > 100


@seeded
@pytest.mark.parametrize("seed", seeds(3))
def test_all_that_may_leave_is_to_be_found_in_lives_with_failures(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ghd, "GhdOrder", Watched)
    monkeypatch.setattr(world, "eviction_policies", lambda: ["ghd"])
    assert play(seed, 300).num_moves >= 300


DEVICE, HOST = Tier.DEVICE, Tier.HOST


class TwoTiers:
    """A tree under ghd, with everything that may happen to its nodes in either tier."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.learner = GhdLearner(1, 512)
        self.tree = RadixTree(1, order=self.order_of)
        self.talks: list[list[int]] = [[]]
        self.num_pages = 0  # given so far: each has a number of its own

    def order_of(self, context: OrderContext) -> GhdOrder:
        order = GhdOrder(context, self.learner, self.learner.tables)
        self.learner.orders.append(order)
        return order

    def request(self) -> None:
        """A talk goes on, or another begins as it did; its pages go down now, or with a later one's."""
        talk = self.rng.choice(self.talks)
        tokens = talk[: self.rng.choice([0, 2, 99])] + [self.rng.randint(0, 2) for _ in range(3)]
        self.talks.append(tokens)
        key, pages = RadixKey(tokens), np.arange(len(tokens), dtype=np.int32) + self.num_pages
        self.num_pages += len(tokens)
        done = self.tree.insert(key, DEVICE, [pages])
        self.learner.finished(self.tree, done.lock.node, key, Finished(512 * len(tokens), 100))
        if self.rng.random() < 0.5:
            self.tree.adopt(done.lock.node, 0, HOST, pages)
        self.tree.unlock(done.lock)

    def some_node(self) -> Node | None:
        nodes = [node for node in self.tree.nodes() if node.parent is not None]
        return self.rng.choice(nodes) if nodes else None

    def demote(self) -> None:
        for node in list(self.tree.nodes()):
            if self.rng.random() < 0.3:
                self.tree.demote(node)

    def evict(self) -> None:
        self.tree.evict(0, self.rng.choice([DEVICE, HOST, HOST]), self.rng.randint(1, 4))

    def drop(self) -> None:
        if (node := self.some_node()) is not None:
            self.tree.drop(node)

    def hint(self) -> None:
        if (node := self.some_node()) is not None:
            self.learner.hint(self.tree.path(node), "end_of_session")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30))
def test_whatever_became_of_its_path_all_that_is_evictable_leaves(seed: int) -> None:
    life = TwoTiers(seed)
    steps = [life.request, life.demote, life.evict, life.drop, life.hint]
    for _ in range(30):
        life.rng.choices(steps, [6, 2, 3, 1, 1])[0]()
    life.tree.check([])
    for tier in (HOST, DEVICE):
        evictable = life.tree.evictable_pages(tier)
        freed = life.tree.evict(0, tier, evictable)
        assert sum(len(f.pages) for f in freed if f.tier is tier) == evictable


def followers(*class_ids: int) -> tuple[RadixTree, list[Node]]:
    """A path of nodes in both tiers, one page each, the first two with one note: the first, which has no
    place in its queue, is to follow the second."""
    tree, path = TwoTiers(0).tree, []
    for end, class_id in enumerate(class_ids, 1):
        done = tree.insert(RadixKey(list(range(end))), DEVICE, [np.arange(end, dtype=np.int32)])
        path.append(done.lock.node)
        path[-1].note = LastUse(RequestUse(0, 0, 0, EMPTY), 0, class_id, 1)
        tree.unlock(done.lock)
    path[1].note = path[0].note
    tree.adopt(path[-1], 0, HOST, np.arange(len(path), dtype=np.int32))
    assert tree.coldest(0, HOST, 1) == [path[1]]
    return tree, path


def test_where_one_can_no_longer_leave_the_one_is_found_that_was_to_follow_him() -> None:
    """What is below the second keeps it on the host; the first is on the device too, so it may go."""
    tree, path = followers(SHARED, SHARED, CONVERSATION)
    tree.demote(path[2])
    tree.demote(path[1])
    tree.evict(0, HOST, 1)
    assert [node.resident(HOST) for node in path] == [False, True, True]


def test_where_one_was_used_again_the_one_is_found_that_was_to_follow_him() -> None:
    tree, path = followers(SHARED, SHARED)
    for node, class_id in zip(path, (SHARED, CONVERSATION), strict=True):
        node.note = LastUse(RequestUse(0, 1, 0, EMPTY), 0, class_id, 2)
    tree.evict(0, HOST, 1)
    assert [node.resident(HOST) for node in path] == [False, True]


def test_what_a_lock_covers_is_counted_once_in_whatever_order_it_comes() -> None:
    """The last of four nodes is on the host alone, the third in both tiers: for its copy on the host the
    first two, which are on the device alone, are locked there before the third is."""
    tree = TwoTiers(0).tree
    for end in (1, 2, 3, 4):
        done = tree.insert(RadixKey(list(range(end))), DEVICE, [np.arange(end, dtype=np.int32)])
        tree.unlock(done.lock)
    last = done.lock.node
    tree.adopt(last, 0, HOST, np.arange(2, dtype=np.int32))
    tree.demote(last)
    lock = tree.lock(last, DEVICE)
    assert tree.evictable_pages(DEVICE) == 0
    tree.unlock(lock)
    assert tree.evictable_pages(DEVICE) == 3


def test_who_has_left_takes_no_room_in_a_queue() -> None:
    life = Life(random.Random(0))
    queue, places = ClassQueue(CLASS, life.ranks), []
    for number in range(1000):
        place = placed(number)
        queue.enter(place, 0, number)
        places.append(place)
        if number:
            place.entry = None
    assert len(queue._places) <= 2 * FEW
    queue.choose(1000)
    assert queue.head is places[0]


def test_who_leaves_oldest_first_takes_no_room_in_a_queue() -> None:
    queue = ClassQueue(CLASS, Life(random.Random(0)).ranks)
    places = []
    for number in range(1000):
        places.append(placed(number))
        queue.enter(places[-1], 0, number)
    for left, place in enumerate(places[:990], 1):
        queue.choose(1000)
        assert queue.head is place
        place.entry = None
        queue.left(place, 1000)
        assert len(queue._places) == len(queue._used) <= 2 * (1000 - left) + FEW


def test_who_left_before_anybody_asked_waits_for_no_queue() -> None:
    life = TwoTiers(0)
    for token in range(1000):
        done = life.tree.insert(RadixKey([token]), DEVICE, [np.array([min(token, 1)], np.int32)])
        life.tree.unlock(done.lock)
        if token:
            life.tree.drop(done.lock.node)
    order = life.learner.orders[0]
    assert len(order._fresh) < 200
    assert len(life.tree.coldest(0, DEVICE, 1)) == 1


def test_a_cache_remembers_four_times_what_it_holds() -> None:
    learner = GhdLearner(1, 512)
    learner.grow(1 << 20)
    learner.grow(5)
    assert learner.ghosts.limit == 4 << 20
