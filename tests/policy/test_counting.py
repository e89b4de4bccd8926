"""Both forms of `hiradix.policy.counting` give what following each page gives, and the same to the last bit;
`make test-compiled` has the built one."""

from __future__ import annotations

import random
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.policy import counting, counting_numpy
from hiradix.policy.class_ranks import BUCKETS, EDGE_LIST

FORMS = [counting_numpy, counting.form] if counting.IS_BUILT else [counting_numpy]
over_forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
CLASSES = 4


class Life:
    """Segments that are born, used and forgotten, counted by one form now and then."""

    def __init__(self, form: ModuleType, seed: int):
        self.form, self.rng, self.clock, self.base = form, random.Random(seed), 0, 0
        self.born: list[int] = []
        self.classes: list[int] = []
        self.pages: list[int] = []
        self.left: list[float] = []
        self.known: list[int] = []  # not yet used again, nor forgotten
        self.passed = np.zeros(BUCKETS, np.int64)
        self.tables = tuple(np.zeros((CLASSES, BUCKETS)) for _ in range(3))
        self.used: list[int] = []
        self.gone: list[int] = []

    def live(self) -> None:
        """Until it is counted."""
        for _ in range(self.rng.randint(0, 12)):
            self.clock += int(10 ** self.rng.uniform(0, 5))
            self.born.append(self.clock)
            self.classes.append(self.rng.randrange(CLASSES))
            self.pages.append(self.rng.randint(1, 9))
            self.known.append(self.pages[-1])
            self.left.append(float(self.pages[-1]))
            number = self.rng.randrange(len(self.born))
            some = self.rng.randint(0, self.known[number])
            self.known[number] -= some
            if some and self.rng.random() < 0.7:
                self.used += (number, self.clock - self.born[number], some)
            elif some:
                self.gone += (number, some)

    def count(self) -> None:
        at, base = slice(self.base, None), self.base
        columns = (np.array(self.born, np.int64)[at], np.array(self.classes, np.int64)[at],
                   np.array(self.pages, float)[at], np.array(self.left)[at], self.passed)  # fmt: skip
        self.form.count((self.used, self.gone), columns, self.tables, base, self.clock)
        self.left[at] = columns[3].tolist()
        self.used, self.gone = [], []

    def forget_the_older(self) -> None:
        self.base += (len(self.born) - self.base) // 2


def lived(form: ModuleType, seed: int) -> Life:
    life = Life(form, seed)
    for _ in range(12):
        life.live()
        if life.rng.random() < 0.2:
            life.forget_the_older()
        life.count()
    return life


@over_forms
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_each_segment_has_one_vote_per_bucket(form: ModuleType, seed: int) -> None:
    """By the definition, where nothing was forgotten for want of room."""
    life = Life(form, seed)
    used, started = np.zeros((CLASSES, BUCKETS)), np.zeros((CLASSES, BUCKETS))
    for _ in range(8):
        life.live()
        uses = list(zip(life.used[::3], life.used[1::3], life.used[2::3], strict=True))
        life.count()
        for number, age, pages in uses:
            bucket = next(b for b in reversed(range(BUCKETS)) if EDGE_LIST[b] <= age)
            used[life.classes[number], bucket] += pages / life.pages[number]
    for number, born in enumerate(life.born):
        for bucket in range(BUCKETS):
            if born + EDGE_LIST[bucket + 1] <= life.clock:
                started[life.classes[number], bucket] += 1
    assert np.allclose(life.tables[0], used, atol=1e-4)
    assert np.array_equal(life.tables[2], started)
    assert (life.tables[1] >= life.tables[0] - 1e-4).all()
    most = np.bincount(life.classes, minlength=CLASSES)
    assert (life.tables[1] <= most[:, None] + 1e-4).all()


@pytest.mark.skipif(not counting.IS_BUILT, reason="needs `make compiled`")
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_both_forms_are_the_same_to_the_last_bit(seed: int) -> None:
    one, other = (lived(form, seed) for form in FORMS)
    for mine, yours in zip((*one.tables, one.passed), (*other.tables, other.passed), strict=True):
        assert mine.tobytes() == yours.tobytes()
    assert one.left == other.left


class Emptying:
    """A number that takes everything out of a list when it is asked for."""

    def __init__(self, numbers: list[Any]):
        self.numbers = numbers

    def __index__(self) -> int:
        self.numbers.clear()
        return len(self.numbers)


@pytest.mark.skipif(not counting.IS_BUILT, reason="needs `make compiled`")
def test_what_cannot_be_counted_is_refused_and_let_go() -> None:
    def columns(rows: int = 3, class_id: int = 0, passed: int = 0) -> list[np.ndarray]:
        born, classes = np.zeros(rows, np.int64), np.full(rows, class_id)
        return [born, classes, np.ones(rows), np.ones(rows), np.full(BUCKETS, passed)]

    tables = tuple(np.zeros((CLASSES, BUCKETS)) for _ in range(3))
    good = columns()
    few = np.zeros(2, np.int64)
    for at, wrong in ((0, np.zeros(3)), (1, few), (3, [1.0] * 3), (4, few)):
        with pytest.raises(TypeError):
            counting.count(([], []), (*good[:at], wrong, *good[at + 1 :]), tables, 0, 0)
    with pytest.raises(TypeError):
        counting.count(([1], []), tuple(good), tables, 0, 0)
    with pytest.raises(TypeError):
        counting.count(([], []), tuple(good), (*tables[:2], np.zeros((CLASSES + 1, BUCKETS))), 0, 0)
    for events in (([3, 0, 1], []), ([], [9, 1]), ([0, -1, 1], [])):
        with pytest.raises(AssertionError, match="segment"):
            counting.count(events, tuple(good), tables, 0, 0)
    with pytest.raises(AssertionError, match="class 4"):
        counting.count(([], []), tuple(columns(class_id=4)), tables, 0, 5000)
    with pytest.raises(AssertionError, match="rows"):
        counting.count(([], []), tuple(columns(passed=4)), tables, 0, 0)
    emptied: list[Any] = []
    emptied += [Emptying(emptied), 5, 1] * 9
    counting.count((emptied, []), tuple(good), tables, 0, 0)
    assert tables[0][0, 0] == 9 and emptied == []
    with pytest.raises(TypeError, match="'str'"):  # and no other number is asked for with that error at hand
        counting.count(([], []), tuple(good), tables, "1", Emptying([]))
    before = [sys.getrefcount(array) for array in (*good, *tables)]
    for _ in range(50):
        counting.count(([0, 5, 1], [1, 1]), tuple(good), tables, 0, 5000)
    assert [sys.getrefcount(array) for array in (*good, *tables)] == before
