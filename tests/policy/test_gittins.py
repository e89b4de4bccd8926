"""Both forms of `hiradix.policy.gittins` give what a search gives, and the same to the last bit;
`make test-compiled` has the built one."""

from __future__ import annotations

import random
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.policy import gittins, gittins_numpy
from hiradix.policy.class_ranks import BUCKETS
from hiradix.policy.ghd_tables import EDGES

FORMS = [gittins_numpy, gittins.form] if gittins.IS_BUILT else [gittins_numpy]
WIDTHS = np.diff(EDGES).astype(np.float64)

over_forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
built = pytest.mark.skipif(not gittins.IS_BUILT, reason="needs `make compiled`")
hazards = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 5e-324, 1e-17, 0.5, 0.999, 1.0]))
rows = st.lists(hazards, min_size=BUCKETS, max_size=BUCKETS)


def searched(hazard: list[float]) -> list[float]:
    """The index by its definition: the best rate over all places to stop."""
    found = []
    for start in range(BUCKETS):
        alive, hits, tokens, best = 1.0, 0.0, 0.0, 0.0
        for b in range(start, BUCKETS):
            hits += alive * hazard[b]
            tokens += alive * (1 - hazard[b] / 2) * WIDTHS[b]
            alive *= 1 - hazard[b]
            best = max(best, hits / tokens)
        found.append(best)
    return found


@over_forms
@settings(max_examples=30, deadline=None)
@given(rows)
def test_the_index_is_the_best_rate_over_all_places_to_stop(form: ModuleType, hazard: list[float]) -> None:
    index, least, falls = form.index_of(np.array([hazard]), WIDTHS)
    assert index[0].tolist() == searched(hazard)
    for b in range(BUCKETS):
        assert least[0, b] == index[0, : b + 1].min()
        lesser = [later for later in range(b + 1, BUCKETS) if index[0, later] < least[0, b]]
        assert falls[0, b] == min(lesser, default=BUCKETS)


@built
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.data(), st.sampled_from("CF"))
def test_both_forms_are_the_same_to_the_last_bit(count: int, data: st.DataObject, order: str) -> None:
    drawn = data.draw(st.lists(rows, min_size=count, max_size=count))
    hazard = np.array(drawn, np.float64, order=order).reshape(count, BUCKETS)
    before = hazard.tobytes()
    for one, other in zip(*(form.index_of(hazard, WIDTHS) for form in FORMS), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape == hazard.shape
        assert one.tobytes() == other.tobytes()
    assert hazard.tobytes() == before


@built
@pytest.mark.parametrize("at", [0, 1, 40, BUCKETS - 1])
def test_both_forms_agree_on_what_is_no_number(at: int) -> None:
    hazard = np.random.default_rng(at).random((3, BUCKETS))
    hazard[1, at] = np.nan
    with np.errstate(invalid="ignore"):
        for one, other in zip(*(form.index_of(hazard, WIDTHS) for form in FORMS), strict=True):
            assert np.array_equal(one, other, equal_nan=one.dtype == np.float64)


def a_tree(rng: random.Random) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Votes, parents, curves and levels of some classes."""
    parents, curves, levels = [0, 0, 0], [0, 1, 2], [0, 0, 0]
    for number in range(3, 3 + rng.choice([0, 1, 7, 60])):
        parent = rng.randrange(1, number)
        parents.append(parent)
        levels.append(levels[parent] + 1)
        curves.append(rng.choice([parent, curves[parent]]))
    votes = np.random.default_rng(rng.randrange(1 << 30)).random((len(parents), 3, BUCKETS))
    votes *= rng.choice([1e-9, 1.0, 30.0, 1e6])
    votes[np.random.default_rng(1).random(votes.shape) < rng.choice([0.0, 0.5, 0.9])] = 0
    votes[:, 2] = votes.sum(1)
    return votes, *(np.array(column, np.int64) for column in (parents, curves, levels))


@over_forms
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_hazard_is_what_was_seen_drawn_towards_the_family(form: ModuleType, seed: int) -> None:
    votes, parents, curves, levels = a_tree(random.Random(seed))
    families = list(range(3))
    whole = votes[3:] + 0
    of_families = votes[:3].copy()
    for number in range(3, len(votes)):
        families.append(families[parents[number]])
        of_families[families[number]] += whole[number - 3]
    of_families[0] += of_families[1] + of_families[2]
    hazard = form.hazard_of(votes, parents, curves, levels)
    prior = [0.3 / 64 / (1 - 0.3 / 64 * b) for b in range(BUCKETS)]
    used, exposed = of_families[:, 0], np.maximum(of_families[:, 1], of_families[:, 0])
    expected = np.minimum((used + 10 * np.array(prior)) / (exposed + 10), 0.999)
    assert np.allclose(hazard[:3], expected, rtol=1e-9)
    assert (hazard >= 0).all() and (hazard <= 0.999).all()
    nothing = form.hazard_of(np.zeros_like(votes), parents, curves, levels)
    assert np.allclose(nothing, np.minimum(prior, 0.999), rtol=1e-6)  # as the family, which is the prior


@over_forms
@pytest.mark.parametrize("is_near", [False, True])
def test_a_class_comes_back_when_those_do_whose_curve_it_borrows(form: ModuleType, is_near: bool) -> None:
    """Class 3 comes back in bucket 9, its family in bucket 40; of class 4, which is in 3, nothing is known."""
    votes = np.zeros((5, 3, BUCKETS))
    for number, bucket, count in ((2, 40, 10_000), (3, 9, 1_000)):
        votes[number, 0, bucket] = count
        votes[number, 1, : bucket + 1] = votes[number, 2] = count
    tree = ([0, 0, 0, 2, 3], [0, 1, 2, 2, 3 if is_near else 2], [0, 0, 0, 1, 2])
    hazard = form.hazard_of(votes, *(np.array(column, np.int64) for column in tree))
    assert (hazard[4, 9] > 0.5) == is_near
    assert hazard[4, 40] > 0.5  # what lives as long comes back with the family


@pytest.mark.parametrize("is_near", [False, True])
@pytest.mark.parametrize("exposed", [5900.0, 1e5, 1e12, 1e300])
def test_what_never_comes_back_is_worth_little_and_not_no_number(exposed: float, is_near: bool) -> None:
    """Found: one minus what survives was 0 where less than 1e-16 comes back, and all that borrowed its curve
    was NaN; who leaves was not found any more."""
    votes = np.zeros((8, 3, BUCKETS))
    votes[7, 1:] = exposed
    parents = [0, 0, 0, 2, 3, 4, 5, 6]
    curves = [0, 1, 2, *(parents[3:] if is_near else [2] * 5)]
    tree = [np.array(column, np.int64) for column in (parents, curves, [0, 0, 0, 1, 2, 3, 4, 5])]
    found = [form.hazard_of(votes.copy(), *tree) for form in FORMS]
    for hazard in found:
        assert np.isfinite(hazard).all() and (hazard >= 0).all() and hazard.tobytes() == found[0].tobytes()
        index = gittins_numpy.gittins(hazard, WIDTHS)
        assert np.isfinite(index).all() and index[7].max() <= index[3].max() <= index[2].max()


@built
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30))
def test_both_forms_find_the_same_hazards_to_the_last_bit(seed: int) -> None:
    votes, *tree = a_tree(random.Random(seed))
    one, other = (form.hazard_of(votes.copy(), *tree) for form in FORMS)
    assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


@built
def test_what_is_no_tree_of_classes_is_refused_and_let_go() -> None:
    good = a_tree(random.Random(3))
    votes, parents, curves, levels = good
    for at, wrong in (
        (0, votes[:2]),
        (0, votes[:, :2].copy()),
        (0, votes.astype(np.float32)),
        (1, parents[:-1]),
        (1, parents + len(parents)),
        (1, parents - 1),
        (2, np.arange(len(curves))),
        (2, curves - 1),
        (3, levels + 1),
        (3, levels.astype(np.int32)),
        (1, np.array([0, 0, 0, *range(3, len(parents))])),  # their own parents
        (3, None),
    ):
        with pytest.raises(TypeError, match="age buckets"):
            gittins.hazard_of(*good[:at], wrong, *good[at + 1 :])  # type: ignore[arg-type]
    before = [sys.getrefcount(array) for array in good]
    for _ in range(50):
        found = gittins.hazard_of(*good)
        assert sys.getrefcount(found) == 2
    assert [sys.getrefcount(array) for array in good] == before


@over_forms
@pytest.mark.parametrize(
    "hazard",
    [
        None,
        [[0.5] * BUCKETS],
        np.zeros(BUCKETS),
        np.zeros((1, BUCKETS - 1)),
        np.zeros((1, BUCKETS + 1)),
        np.zeros((1, 1, BUCKETS)),
        np.zeros((1, BUCKETS), np.float32),
        np.zeros((1, BUCKETS), np.int64),
        np.zeros((1, BUCKETS), np.dtype(np.float64).newbyteorder()),
    ],
    ids=str,
)
def test_other_arrays_are_refused(form: ModuleType, hazard: object) -> None:
    with pytest.raises(TypeError, match="age buckets"):
        form.index_of(hazard, WIDTHS)


@over_forms
@pytest.mark.parametrize("widths", [None, np.ones(BUCKETS - 1), np.ones((1, BUCKETS)), np.ones(BUCKETS, int)])
def test_other_widths_are_refused(form: ModuleType, widths: object) -> None:
    with pytest.raises(TypeError, match="age buckets"):
        form.index_of(np.zeros((1, BUCKETS)), widths)


@over_forms
def test_what_is_given_is_let_go(form: ModuleType) -> None:
    hazard, wrong = np.full((2, BUCKETS), 0.5), np.zeros(3)
    before = [sys.getrefcount(array) for array in (hazard, WIDTHS, wrong)]
    held = (np.zeros(1),)
    for _ in range(100):
        found = form.index_of(hazard, WIDTHS)
        assert all(sys.getrefcount(found[i]) == sys.getrefcount(held[0]) for i in range(3))
        with pytest.raises(TypeError):
            form.index_of(hazard, wrong)
    assert [sys.getrefcount(array) for array in (hazard, WIDTHS, wrong)] == before
