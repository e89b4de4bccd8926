"""The gate: what is predicted slower than computing is not moved, and it finds out when that changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from hiradix.policy.no_regret import PROBE_SHARE, GatedTransfer, NoRegret, Source
from tests.seeds import seeded, seeds


def measured(computing: float, loading: float, troubles: Sequence[int] = (0, 0, 0)) -> NoRegret:
    """A gate that has measured these rates, in pages per second."""
    gate = NoRegret(troubles=lambda: (troubles[0], troubles[1], troubles[2]))
    for _ in range(100):
        gate.computed(computing, 1.0)
        gate.moved(GatedTransfer.LOAD, 100, 100 / loading)
    return gate


def test_cold_it_takes_every_transfer() -> None:
    gate = NoRegret()
    assert gate.takes(GatedTransfer.LOAD, 10) and gate.takes(GatedTransfer.FETCH, 10)
    gate.computed(100, 1.0)
    assert gate.takes(GatedTransfer.LOAD, 10), "nothing was loaded yet"
    gate.moved(GatedTransfer.LOAD, 10, 1.0)
    assert not gate.takes(GatedTransfer.LOAD, 10) and gate.takes(GatedTransfer.FETCH, 10)


def test_what_moves_is_known_before_what_computes() -> None:
    """A cache that was filled before it started loads first."""
    gate = NoRegret()
    gate.moved(GatedTransfer.LOAD, 10, 1.0)
    gate.moved(GatedTransfer.FETCH, 10, 1.0)
    assert gate.takes(GatedTransfer.LOAD, 1000) and gate.takes(GatedTransfer.FETCH, 1000)
    assert gate.num_refused == {GatedTransfer.LOAD: 0, GatedTransfer.FETCH: 0}


def test_only_a_transfer_of_less_than_half_of_what_was_predicted_makes_the_tier_a_new_one() -> None:
    for seconds, is_new in ((0.49, True), (0.51, False), (0.9, False)):
        gate = measured(200, 100)
        gate.moved(GatedTransfer.LOAD, 100, seconds)
        assert (abs(gate.rates()["load"] - 100 / seconds) < 1e-6) == is_new


def test_the_faster_of_both_is_taken() -> None:
    assert measured(100, 200).takes(GatedTransfer.LOAD, 1000)
    gate = measured(200, 100)
    assert not gate.takes(GatedTransfer.LOAD, 1000)
    assert gate.num_refused == {GatedTransfer.LOAD: 1000, GatedTransfer.FETCH: 0}


def test_off_it_takes_everything() -> None:
    gate = measured(200, 100)
    gate.enabled = False
    assert gate.takes(GatedTransfer.LOAD, 1000) and not gate.num_refused[GatedTransfer.LOAD]


def test_a_tier_that_became_fast_is_found_out() -> None:
    gate = measured(200, 100)
    taken = [gate.takes(GatedTransfer.LOAD, 1) for _ in range(round(1 / PROBE_SHARE) + 1)]
    assert taken.count(True) == 1 == gate.num_probes
    gate.moved(GatedTransfer.LOAD, 1000, 1.0)
    assert gate.takes(GatedTransfer.LOAD, 1)


def test_the_slower_the_tier_the_rarer_are_probes() -> None:
    gate = measured(200, 2)
    assert not any(gate.takes(GatedTransfer.LOAD, 1) for _ in range(round(99 / PROBE_SHARE) - 1))
    assert gate.takes(GatedTransfer.LOAD, 1) or gate.takes(GatedTransfer.LOAD, 1)


def test_measurements_without_length_or_duration_say_nothing() -> None:
    gate = measured(200, 100)
    gate.moved(GatedTransfer.LOAD, 0, 5.0)
    gate.moved(GatedTransfer.LOAD, 5, 0.0)
    assert abs(gate.rates()["load"] - 100) < 1e-6


def test_a_transfer_that_failed_at_once_does_not_make_the_tier_fast() -> None:
    gate = NoRegret()
    for num_pages in (10, 200, 40, 100):
        gate.computed(num_pages, num_pages / 100)
        gate.moved(GatedTransfer.FETCH, num_pages, 2.0 + num_pages / 50)
    gate.moved(GatedTransfer.FETCH, 0, 0.001)
    assert gate.rates()["fetch"] > 0 and not gate.takes(GatedTransfer.FETCH, 50)


def test_a_transfer_too_short_for_its_latency_is_not_taken() -> None:
    gate = NoRegret()
    for num_pages in (10, 200, 40, 100):
        gate.computed(num_pages, num_pages / 100)
        gate.moved(GatedTransfer.LOAD, num_pages, 0.5 + num_pages / 1000)
    # 0.55 against 0.5, 0.56 against 0.6
    assert not gate.takes(GatedTransfer.LOAD, 50) and gate.takes(GatedTransfer.LOAD, 60)


def test_what_a_forward_costs_in_any_case_is_not_saved_by_a_hit() -> None:
    gate = NoRegret()
    for num_pages in (10, 200, 40, 100):
        gate.computed(num_pages, 0.5 + num_pages / 1000)
        gate.moved(GatedTransfer.LOAD, num_pages, num_pages / 500)
    assert gate.rates()["compute"] < gate.rates()["load"]
    assert not gate.takes(GatedTransfer.LOAD, 50)


def test_a_fetch_must_be_worth_its_load_too() -> None:
    gate = measured(100, 150)
    gate.moved(GatedTransfer.FETCH, 150, 1.0)
    assert gate.takes(GatedTransfer.LOAD, 10) and not gate.takes(GatedTransfer.FETCH, 10)


@seeded
def test_promise_seven_on_virtual_time() -> None:
    """Whatever a tier does, all requests together take at most 2 % longer than computing everything again."""
    for seed in seeds(40):
        rng = random.Random(seed)
        gate, spent, recomputed = NoRegret(), 0.0, 0.0
        computing = 1000.0
        gate.computed(1000, 1.0)
        loading = 10 ** rng.uniform(1, 4)
        for request in range(20_000):
            if request % 7000 == 6999:
                loading = 10 ** rng.uniform(1, 4)
            num_pages = rng.randint(1, 200)
            recomputed += num_pages / computing
            if gate.takes(GatedTransfer.LOAD, num_pages):
                spent += num_pages / loading
                gate.moved(GatedTransfer.LOAD, num_pages, num_pages / loading)
            else:
                spent += num_pages / computing
            gate.computed(num_pages, num_pages / computing)
        assert spent <= recomputed * 1.02, (seed, spent / recomputed)


# -- storage that brings nothing ------------------------------------------------------------


def test_a_fetch_that_brought_nothing_is_charged() -> None:
    gate = measured(100, 1000)
    for _ in range(2):
        gate.fetched(100, 100, 0.1)
    assert gate.takes(GatedTransfer.FETCH, 100)
    for _ in range(3):
        gate.fetched(100, 0, 5.0)
    assert not gate.takes(GatedTransfer.FETCH, 100)
    gate.fetched(100, 100, 0.1)
    assert not gate.takes(GatedTransfer.FETCH, 100), "one that brings something does not make up for them"


def test_a_fetch_that_brought_a_part_is_charged_for_that() -> None:
    gate = measured(100, 1000)
    gate.fetched(100, 5, 0.5)
    assert not gate.takes(GatedTransfer.FETCH, 100), "ten pages a second"


def test_failures_in_a_row_are_for_the_breaker() -> None:
    """What failed is charged when a call of the same kind has not failed after it; never once it opened."""
    troubles = [0, 0, 0]
    gate = measured(100, 1000, troubles)
    gate.fetched(100, 100, 0.1)
    for _ in range(2):
        troubles[2] += 1
        gate.fetched(100, 0, 5.0)
    gate.answered(100, 100, 0.001)
    assert gate.takes(GatedTransfer.FETCH, 100), "the third may open it"
    troubles[0], troubles[2] = 1, 3
    gate.fetched(100, 0, 5.0)
    gate.fetched(100, 100, 0.1)
    assert gate.takes(GatedTransfer.FETCH, 100), "that is all that is known of storage now"
    for _ in range(4):
        troubles[2] += 1
        gate.fetched(100, 0, 5.0)
        gate.fetched(100, 100, 0.1)
    assert not gate.takes(GatedTransfer.FETCH, 100), "one in two fails, and no breaker opens"


def test_fetches_that_bring_nothing_become_rare_where_computing_is_not_measured() -> None:
    gate, taken = NoRegret(), []
    for _ in range(300):
        if gate.takes(GatedTransfer.FETCH, 10):
            taken.append(True)
            gate.ended(10, 0, 0.1)
        else:
            taken.append(False)
    assert taken[:6] == [True, True, True, False, True, False] and 9 <= taken.count(True) <= 20
    while not gate.takes(GatedTransfer.FETCH, 10):
        pass
    gate.ended(10, 10, 0.1)
    assert all(gate.takes(GatedTransfer.FETCH, 10) for _ in range(100))


def taken(gate: NoRegret, num_pages: int, seconds: float) -> int:
    """How many of 100 fetches of ten pages are taken, each of which brings so many in so long."""
    count = 0
    for _ in range(100):
        if gate.takes(GatedTransfer.FETCH, 10):
            count += 1
            gate.fetched(10, num_pages, seconds)
            gate.ended(10, num_pages, seconds)
    return count


@pytest.mark.parametrize(
    ("num_pages", "seconds", "is_worth_it"),
    [
        (10, 0.9, True), (10, 1.1, False), (9, 0.5, True), (9, 0.95, False), (6, 0.59, True),
        (6, 0.61, False), (4, 0.01, True), (4, 0.39, True), (4, 0.41, False), (1, 0.05, True),
        (1, 0.2, False), (0, 0.0, False),
    ],
)  # fmt: skip
def test_without_a_measured_cost_of_computing_a_part_is_worth_its_part_of_a_hit(
    num_pages: int, seconds: float, is_worth_it: bool
) -> None:
    count = taken(NoRegret(), num_pages, seconds)
    assert count == 100 if is_worth_it else count < 12


@pytest.mark.parametrize(
    ("asked", "num_pages", "seconds", "is_worth_it"),
    [
        (256, 256, 0.9, True), (256, 256, 1.1, False), (1024, 1024, 3.9, True), (1024, 1024, 4.1, False),
        (2048, 2048, 5.0, True), (2048, 1024, 3.9, True), (2048, 1024, 4.1, False), (2048, 0, 0.1, False),
        (1, 1, 0.9, True),
    ],
)  # fmt: skip
def test_a_long_hit_is_worth_more_than_a_short_one(
    asked: int, num_pages: int, seconds: float, is_worth_it: bool
) -> None:
    """Of pages of 64 tokens: no engine computes 131,072 tokens in a second."""
    count, gate = 0, NoRegret(page_size=64)
    for _ in range(100):
        if gate.takes(GatedTransfer.FETCH, asked):
            count += 1
            gate.ended(asked, num_pages, seconds)
    assert count == 100 if is_worth_it else count < 12


@pytest.mark.parametrize(
    ("num_pages", "seconds", "is_worth_it"),
    [
        (4, 0.004, True),
        (1, 0.009, True),
        (4, 0.06, False),
        (10, 0.09, True),
        (10, 0.2, False),
        (0, 0.001, False),
    ],
)
def test_a_part_is_compared_with_what_computing_it_takes(
    num_pages: int, seconds: float, is_worth_it: bool
) -> None:
    """100 pages are computed a second."""
    count = taken(measured(100, 1e6), num_pages, seconds)
    assert count == 100 if is_worth_it else count < 12


def test_ranks_leave_out_the_same_fetches() -> None:
    """By the one for which they were dry, though for the others they were not."""
    told: list[list[Source]] = [[], []]

    def agreed(number: int) -> Callable[[Source], Source]:
        def share(source: Source) -> Source:
            place = len(told[number])
            told[number].append(source)
            return lambda: min(sources[place]() for sources in told)

        return share

    quick, slow = NoRegret(share=agreed(0)), NoRegret(share=agreed(1))
    decisions = []
    for _ in range(60):
        decisions.append((quick.takes(GatedTransfer.FETCH, 10), slow.takes(GatedTransfer.FETCH, 10)))
        if decisions[-1][0]:
            quick.ended(10, 10, 0.01)
            slow.ended(10, 10, 1.5)
    assert all(one == other for one, other in decisions) and (False, False) in decisions


def test_other_storage_is_not_blamed_for_what_the_one_before_did_not_bring() -> None:
    gate = NoRegret()
    for _ in range(8):
        gate.ended(10, 0, 0.1)
    assert not gate.takes(GatedTransfer.FETCH, 10)
    gate.attached()
    assert all(gate.takes(GatedTransfer.FETCH, 10) for _ in range(3))


def test_a_lookup_that_takes_more_than_lookups_save_is_not_made() -> None:
    gate = measured(100, 1000)
    gate.answered(10, 10, 0.09)
    assert gate.asks(10), "it has saved a tenth of a second"
    for _ in range(50):
        gate.answered(10, 0, 0.09)
    assert not gate.asks(10) and gate.asks(1000), "a lookup is nothing beside so long a prompt"
    assert gate.num_unasked == 10
    assert any(gate.asks(10) for _ in range(1000)), "now and then it is tried"
    gate.answered(10, 0, 0.001)
    assert gate.asks(10)
