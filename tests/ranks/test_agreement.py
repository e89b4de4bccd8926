"""One exchange: what is applied, how far, and what happens when the ranks are not what they should be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hiradix.cache.agreement import AHEAD, NUM_SHARED, WIDTH, Agreement, RanksDiverged, Vector, least
from hiradix.cache.in_flight import InFlightJob, InFlightJobs
from hiradix.cache.pages import CappedPages
from hiradix.errors import CacheError
from hiradix.memory import PageAllocator
from hiradix.transfer import JobKind, Result, Ticket
from tests.ranks.lockstep import lost

PAGES = np.arange(4, dtype=np.int32)


class Other:
    """The vector another rank brings: this rank's, changed."""

    def __init__(self) -> None:
        self.change: Callable[[Vector], None] = lambda vector: None
        self.num_calls = 0

    def __call__(self, own: Vector) -> Vector:
        assert own.shape == (WIDTH,) and own.dtype == np.int64
        self.num_calls += 1
        other = own.copy()
        self.change(other)
        return np.minimum(own, other)


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def in_flight() -> InFlightJobs:
    return InFlightJobs(lambda pages: None)


def make(other: Other, in_flight: InFlightJobs) -> Agreement:
    return Agreement(other, in_flight, lambda: (1, 2))


def launch(in_flight: InFlightJobs, kind: JobKind, count: int, first: int = 0) -> list[Ticket]:
    tickets = [Ticket(first + at) for at in range(count)]
    for ticket in tickets:
        in_flight.add(ticket, InFlightJob(kind, owns={0: PAGES}))
    return tickets


def finish(agreement: Agreement, in_flight: InFlightJobs, results: list[Result]) -> list[Result]:
    common, _ = agreement.exchange(results, True)
    for result in common:
        in_flight.apply(result)
    return common


def test_results_wait_for_their_turn_and_come_in_ticket_order(other: Other, in_flight: InFlightJobs) -> None:
    agreement = make(other, in_flight)
    first, second, third = launch(in_flight, JobKind.WRITE, 3)
    (read,) = launch(in_flight, JobKind.READ, 1, first=3)
    late = [Result(third, JobKind.WRITE, 4), Result(read, JobKind.READ, 4), Result(second, JobKind.WRITE, 4)]
    assert [r.ticket for r in finish(agreement, in_flight, late)] == [read]
    assert [r.ticket for r in finish(agreement, in_flight, [Result(first, JobKind.WRITE, 4)])] == [0, 1, 2]


def test_whole_results_need_no_room_in_the_vector_and_others_wait_for_the_next(
    other: Other, in_flight: InFlightJobs
) -> None:
    agreement = make(other, in_flight)
    tickets = launch(in_flight, JobKind.WRITE, 100)
    assert len(finish(agreement, in_flight, [Result(t, JobKind.WRITE, 4) for t in tickets])) == 100
    tickets = launch(in_flight, JobKind.WRITE, 40, first=100)
    results = [Result(t, JobKind.WRITE, 1, error="copy") for t in tickets]
    assert len(finish(agreement, in_flight, results)) == AHEAD and agreement.has_more
    assert len(finish(agreement, in_flight, [])) == AHEAD and agreement.has_more
    assert len(finish(agreement, in_flight, [])) == 40 - 2 * AHEAD and not agreement.has_more


@pytest.mark.parametrize(
    ("own", "theirs", "agreed"),
    [
        ((4, None), (2, None), (2, False)),
        ((4, None), (0, "gone"), (0, True)),
        ((3, "cut short"), (2, None), (2, False)),
        ((2, None), (2, "cut short"), (2, True)),
        ((0, "cut short"), (4, None), (0, True)),
    ],
)
def test_the_least_outcome_counts(
    other: Other,
    in_flight: InFlightJobs,
    own: tuple[int, str],
    theirs: tuple[int, str],
    agreed: tuple[int, bool],
) -> None:
    agreement = make(other, in_flight)
    (ticket,) = launch(in_flight, JobKind.READ, 1)

    def bring(vector: Vector) -> None:
        lane = WIDTH - (len(JobKind) - list(JobKind).index(JobKind.READ)) * (2 + AHEAD)
        vector[lane + 1] = 0
        vector[lane + 2] = 2 * theirs[0] + (theirs[1] is None)

    other.change = bring
    (result,) = finish(agreement, in_flight, [Result(ticket, JobKind.READ, own[0], error=own[1])])
    assert (result.num_pages, result.error is not None) == agreed


def test_shared_numbers_are_the_least_and_stay_between_exchanges(
    other: Other, in_flight: InFlightJobs
) -> None:
    agreement = make(other, in_flight)
    now, slot = [5.25], [float("inf")]
    clock, first = agreement.share(lambda: now[0]), agreement.share(lambda: slot[0])
    agreement.exchange([], True)
    assert clock() == 5.25 and first() > 1e9
    now[0], slot[0] = 9.0, 3.0
    assert clock() == 5.25
    other.change = lambda vector: vector.__setitem__(3, 7_500_000)
    agreement.exchange([], True)
    assert (clock(), first()) == (7.5, 3.0)
    with pytest.raises(AssertionError):
        agreement.share(lambda: 0.0)


def test_shares_are_limited(other: Other, in_flight: InFlightJobs) -> None:
    agreement = make(other, in_flight)
    for _ in range(NUM_SHARED):
        agreement.share(lambda: 0.0)
    with pytest.raises(AssertionError):
        agreement.share(lambda: 0.0)


def test_ok_holds_only_if_it_holds_everywhere(other: Other, in_flight: InFlightJobs) -> None:
    agreement = make(other, in_flight)
    assert agreement.exchange([], True)[1] and not agreement.exchange([], False)[1]
    other.change = lambda vector: vector.__setitem__(2, 0)
    assert not agreement.exchange([], True)[1]


def test_ranks_in_different_states_are_told_so(other: Other, in_flight: InFlightJobs) -> None:
    agreement = make(other, in_flight)

    def differ(vector: Vector) -> None:
        vector[0] += 1
        vector[1] -= 1

    other.change = differ
    with pytest.raises(RanksDiverged, match="exchange 1"):
        agreement.exchange([], True)


def test_a_lost_rank_is_an_error_at_once(in_flight: InFlightJobs) -> None:
    with pytest.raises(CacheError, match="did not answer"):
        Agreement(lost, in_flight, lambda: ()).exchange([], True)


def test_least_is_one_call_of_the_usual_shape(other: Other) -> None:
    other.change = lambda vector: vector.__setitem__(3, 4)
    assert least(other, 7, 9) == (7, 4) and other.num_calls == 1


def test_capped_pages_give_only_what_every_rank_has() -> None:
    pages = CappedPages(PageAllocator(10), 6)
    assert (pages.num_pages, pages.available) == (6, 6)
    assert pages.alloc(7) is None
    taken = pages.alloc(6)
    assert taken is not None and pages.available == 0 and pages.alloc(1) is None
    pages.free(taken[:2])
    assert pages.available == 2
