"""Both forms of `hiradix.policy.class_queues` give the leaf that a search over all leaves finds.

`make test-compiled` has the one in C.
"""

from __future__ import annotations

import gc
import random
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.policy import class_queues, class_queues_python
from hiradix.policy.class_ranks import BUCKETS, EDGE_LIST
from hiradix.policy.ghd_tables import MAX_CLASSES, ClassTables
from hiradix.policy.ghosts import EMPTY
from hiradix.policy.gittins_numpy import falling
from hiradix.policy.places import Place
from hiradix.policy.uses import LastUse, RequestUse
from hiradix.tree.node import Node, Residency

FORMS = [class_queues_python, class_queues.form] if class_queues.IS_BUILT else [class_queues_python]
over_forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
CLASSES = (0, 2, 3, MAX_CLASSES - 1)


class Tables(ClassTables):
    """An index of few values, so that ages and classes are often equal."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self._rng = rng

    def change(self) -> None:
        self.recompute()
        for class_id in CLASSES:
            self.index[class_id] = [self._rng.randint(1, 5) for _ in range(BUCKETS)]
            (self._least[class_id],), (self._falls[class_id],) = falling(self.index[[class_id]])


def place_of(used: int, class_id: int) -> Place:
    return Place(Residency(Node(None, 0, 1, 0)), LastUse(RequestUse(0, 0, 0, EMPTY), used, class_id, 0), 0)


class Life:
    """ClassQueues of one form, and a list of what is in them."""

    def __init__(self, form: ModuleType, seed: int):
        self.rng = random.Random(seed)
        self.tables = Tables(self.rng)
        self.tables.change()
        self.queues = form.ClassQueues(self.tables)
        self.clock = self.number = 0
        self.places: list[tuple[int, int, int, Place]] = []
        self.merged: list[Place] = []

    def enter(self) -> None:
        age = self.rng.choice([0, 0, 10 ** self.rng.uniform(0, 11), 10 ** self.rng.uniform(0, 4)])
        used, class_id = max(0, self.clock - int(age)), self.rng.choice(CLASSES)
        place, depth = place_of(used, class_id), -self.rng.randint(0, 3)
        self.number += 1
        self.queues.settle(self.clock)
        place.seat = self.queues.enter(place, class_id, used, depth)
        self.places.append((used, depth, self.number, place))

    def leave(self, place: Place | None = None) -> None:
        if self.places:
            items = [item for item in self.places if item[3] is place] or [self.rng.choice(self.places)]
            self.places.remove(items[0])
            items[0][3].entry = None
            self.queues.left(items[0][3], items[0][3].seat)

    def leave_first(self) -> None:
        self.leave(self.check())

    def merge(self) -> None:
        """A node is merged away: the queues may find out, or give it still."""
        if self.places:
            item = self.rng.choice(self.places)
            self.places.remove(item)
            assert item[3].entry is not None
            item[3].entry.node = None
            self.merged.append(item[3])

    def grow_older(self) -> None:
        self.clock += int(10 ** self.rng.uniform(0, 7))

    def reindex(self) -> None:
        self.tables.change()

    def check(self) -> Place | None:
        """Who goes first, which is who is to."""
        while (found := self.queues.first(self.clock)) is not None and found.entry.node is None:
            self.merged.remove(found)
            found.entry = None
            self.queues.left(found, found.seat)
        wanted, index = self._searched()
        assert found is wanted
        if wanted is not None:
            assert self.queues.rank == index
        return wanted

    def _searched(self) -> tuple[Place | None, float]:
        ranked = []
        for used, depth, number, place in self.places:
            class_id = place.note.class_id
            bucket = next(b for b in reversed(range(BUCKETS)) if EDGE_LIST[b] <= self.clock - used)
            index = float(self.tables.index[class_id, bucket])
            ranked.append(((index, class_id, bucket, used, depth, number), place))
        least = min(ranked, default=None, key=lambda one: one[0])
        return (None, 0.0) if least is None else (least[1], least[0][0])


@over_forms
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30))
def test_who_goes_next_is_who_a_search_finds(form: ModuleType, seed: int) -> None:
    life = Life(form, seed)
    steps = [life.enter, life.leave, life.leave_first, life.merge, life.grow_older, life.reindex]
    weights = life.rng.choice([[6, 2, 2, 1, 4, 1], [6, 1, 0, 3, 3, 1], [4, 3, 4, 0, 6, 0]])
    for _ in range(200):
        life.rng.choices(steps, weights)[0]()
        if life.rng.random() < 0.6:
            life.check()
    while life.places:
        life.leave_first()
    assert life.check() is None


@over_forms
def test_who_has_left_takes_no_room(form: ModuleType) -> None:
    life = Life(form, 0)
    for _ in range(2000):
        life.enter()
        if len(life.places) > 10:
            life.rng.choice([life.leave, life.merge, life.leave_first])()
    assert len(life.queues) <= 4 * (2 * 20 + 64)
    assert len(life.places) == 10
    life.check()


@over_forms
def test_what_is_in_no_queue_any_more_is_let_go(form: ModuleType) -> None:
    life = Life(form, 1)
    for _ in range(300):
        life.enter()
    place = life.places[0][3]
    before = sys.getrefcount(place)
    for _ in range(len(life.places)):
        life.leave_first()
    life.places.clear()
    assert sys.getrefcount(place) <= before - 2
    kept = [place_of(0, 2) for _ in range(50)]
    counts = [sys.getrefcount(one) for one in kept]
    for one in kept:
        life.queues.enter(one, 2, 0, 0)
    life.queues.first(life.clock)
    del life, one
    gc.collect()
    assert [sys.getrefcount(one) for one in kept] == counts


@pytest.mark.skipif(not class_queues.IS_BUILT, reason="needs `make compiled`")
def test_what_is_no_table_no_class_and_no_number_is_refused() -> None:
    class Wrong:
        version = 0

        def rows(self) -> object:
            return np.zeros((MAX_CLASSES, BUCKETS)), np.zeros((MAX_CLASSES, BUCKETS)), np.zeros((3, BUCKETS))

    with pytest.raises(TypeError, match="age buckets"):
        class_queues.ClassQueues(Wrong())
    some = class_queues.ClassQueues(ClassTables())
    place = place_of(0, 2)
    for class_id in (-1, MAX_CLASSES):
        with pytest.raises(AssertionError, match="class"):
            some.enter(place, class_id, 0, 0)
    with pytest.raises(TypeError):
        some.enter(place, "2", 0, 0)
    with pytest.raises(TypeError):
        some.enter(place, 2)
    with pytest.raises(TypeError):
        class_queues.ClassQueues.__new__(class_queues.ClassQueues)  # of no tables
    some.left(place, 7)  # it has no such seat
    assert some.first(0) is None and sys.getrefcount(place) == 2
