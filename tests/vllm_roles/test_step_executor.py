"""The executor whose orders travel with steps: one Result for all workers, and none lost on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hiradix.adapters.vllm.scheduler_plan import StepRequest
from hiradix.adapters.vllm.step_meter import StepMeter
from hiradix.errors import Misuse
from hiradix.policy.no_regret import NoRegret
from hiradix.transfer import Copy, FailReason, JobKind, Result, StorageExecutor, Ticket
from hiradix.transfer.jobs import StorePayload, TrailingPages
from hiradix.transfer.step_executor import StepExecutor
from hiradix.tree.hashing import PageRows
from tests.vllm_roles.mini_vllm import MiniVLLM, S, World
from tests.vllm_roles.test_life import request

ROWS = PageRows(b"", np.arange(12, dtype=np.int64).reshape(-1, 2))
PAGES = np.arange(3, dtype=np.int32)


def told(executor: StepExecutor, ticket: Ticket, *outcomes: tuple[int, str | None]) -> list[Result]:
    for num_pages, error in outcomes:
        executor.answer(Result(ticket, JobKind.READ, num_pages, error=error, duration_s=float(num_pages)))
    return executor.poll()


def test_a_result_is_the_least_of_all_workers_and_as_slow_as_the_slowest() -> None:
    executor: StepExecutor = StepExecutor(3)
    whole: StorageExecutor = executor
    ticket = whole.read([b"a", b"b", b"c"], PAGES)
    assert told(executor, ticket, (3, None), (1, "gone")) == [] and not executor.is_idle
    (result,) = told(executor, ticket, (2, None))
    assert (result.num_pages, result.error, result.duration_s) == (1, "gone", 3.0)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(
    "outcomes,least", [(((4, 0), (2, 4)), (2, 4)), (((1, 0), (2, 4)), (1, 0)), (((2, 5), (3, 4)), (2, 4))]
)
def test_damage_reaches_as_far_as_all_workers_have_pages_or_know_of_damage(
    outcomes: tuple[tuple[int, int], ...], least: tuple[int, int], is_turned: bool
) -> None:
    """Whichever worker answers last."""
    executor = StepExecutor(2)
    ticket = executor.query(ROWS)
    for num_pages, damaged_end in reversed(outcomes) if is_turned else outcomes:
        executor.answer(Result(ticket, JobKind.QUERY, num_pages, damaged_end=damaged_end))
    (result,) = executor.poll()
    assert (result.num_pages, result.damaged_end) == least


def test_an_order_that_does_not_fit_its_pages_is_refused() -> None:
    executor = StepExecutor(1)
    with pytest.raises(Misuse, match="2 hashes for 3 pages"):
        executor.read([b"a", b"b"], PAGES)
    with pytest.raises(Misuse, match="7 pages of 6 rows"):
        executor.query(ROWS, 7)
    with pytest.raises(Misuse, match="for 6 rows"):
        executor.write_storage(ROWS, np.arange(7, dtype=np.int32))
    assert executor.is_idle and executor.num_asked == 0


def test_a_step_takes_each_order_once() -> None:
    executor = StepExecutor(1)
    query, read = (
        executor.query(ROWS, 2),
        executor.read([b"a", b"b", b"c"], PAGES, chain=(b"x",) * 1000, after=b"x"),
    )
    write, follows = executor.save((Copy(PAGES, PAGES),), StorePayload(ROWS, (TrailingPages(PAGES),)))
    load = executor.load("r", (Copy(PAGES, PAGES),), True)
    jobs = executor.take()
    assert [job.ticket for job in jobs.storage_jobs] == [query, read]
    assert [job.kind for job in jobs.storage_jobs] == [JobKind.QUERY, JobKind.READ]
    assert [(save.ticket, save.store and save.store.ticket) for save in jobs.saves] == [(write, follows)]
    assert [one.ticket for one in jobs.loads] == [load] and not executor.take()
    assert jobs.storage_jobs[1].payload.chain is None, "it would be sent once for each batch"  # type: ignore[union-attr]
    assert jobs.storage_jobs[1].payload.after == b"x"  # type: ignore[union-attr]
    assert len({query, read, write, follows, load}) == 5 and executor.num_asked == 2


def test_what_is_cancelled_before_a_step_took_it_ends_at_once() -> None:
    executor = StepExecutor(2)
    ticket, later = executor.query(ROWS), executor.query(ROWS)
    executor.cancel(ticket)
    (result,) = executor.poll()
    assert (result.ticket, result.kind, result.reason) == (ticket, JobKind.QUERY, FailReason.CANCELLED)
    assert [job.ticket for job in executor.take().storage_jobs] == [later]
    executor.cancel(later)
    executor.cancel(later)
    assert executor.poll() == [] and executor.take().cancels == (later,)


def test_a_lookup_of_more_pages_than_it_names_is_refused() -> None:
    with pytest.raises(Misuse, match="7 pages"):
        StepExecutor(1).query(ROWS, 7)


def test_what_storage_was_not_asked_for_it_was_not_found_to_have() -> None:
    executor = StepExecutor(1)
    for known, found in ((2, 5), (6, 4), (0, 1)):
        ticket = executor.query(ROWS, known=known)
        executor.answer(Result(ticket, JobKind.QUERY, found))
    executor.cancel(executor.query(ROWS, known=1))
    assert (executor.num_asked, executor.num_found) == (4 + 0 + 6 + 5, 3 + 0 + 1)
    assert not executor._known


def test_faults_of_storage_are_counted_once_for_all_workers() -> None:
    executor = StepExecutor(2)
    executor.attach()
    for kind, reason in (
        (JobKind.READ, FailReason.BACKEND),
        (JobKind.READ, FailReason.CANCELLED),
        (JobKind.READ, None),
        (JobKind.QUERY, FailReason.BACKEND),
        (JobKind.STORE, FailReason.BACKEND),
    ):
        ticket = executor.read([b"a", b"b", b"c"], PAGES)
        error = None if reason is None else "gone"
        executor.answer(Result(ticket, kind, 3))
        executor.answer(Result(ticket, kind, 0, error=error, reason=reason))
    assert executor.storage_troubles == (1, 1, 1)


def test_what_is_stored_is_known_when_all_workers_know_it() -> None:
    executor = StepExecutor(2)
    executor.attach()
    for counts, known in (((1, 0), 0), ((1, 2), 1), ((0, 1), 1), ((3, 3), 3)):
        ticket = executor.read([b"a", b"b", b"c"], PAGES)
        for count in counts:
            executor.answer(Result(ticket, JobKind.STORE, 3, num_adopted=count))
        assert executor.num_adopted == known
    executor.attach()
    assert executor.num_adopted == 0, "another storage has compared nothing yet"


def test_a_read_that_failed_is_not_charged_before_one_that_has_not() -> None:
    """Failures in a row are for the breaker: what they took is none of storage's costs."""
    executor = StepExecutor(1)
    gate = NoRegret(troubles=lambda: executor.storage_troubles)
    executor.answer(Result(executor.read([b"a", b"b", b"c"], PAGES), JobKind.READ, 3))
    gate.fetched(3, 3, 0.01)
    ticket = executor.read([b"a", b"b", b"c"], PAGES)
    executor.answer(Result(ticket, JobKind.READ, 0, error="gone", reason=FailReason.BACKEND))
    gate.fetched(3, 0, 30.0)
    assert gate._waste_s == 0.0
    executor.answer(Result(executor.read([b"a", b"b", b"c"], PAGES), JobKind.READ, 3))
    gate.fetched(3, 3, 0.01)
    assert gate._waste_s > 1.0


class Gate(NoRegret):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, float]] = []

    def computed(self, num_pages: float, seconds: float) -> None:
        self.told.append((num_pages, seconds))


def measured(num_overlapping: int, steps: list[tuple[float, int, bool]]) -> list[tuple[float, float]]:
    """What the gate is told of steps: when each is planned, its tokens, and whether it is of prompts."""
    now, gate = [0.0], Gate()
    meter = StepMeter(gate, lambda: now[0], 4, num_overlapping)
    for now[0], num_tokens, is_prompt in steps:
        if num_tokens or meter.is_open:
            meter.planned(num_tokens, is_prompt)
    return gate.told


@pytest.mark.parametrize(
    ("num_overlapping", "steps", "wanted"),
    [
        (1, [(1.0, 400, True), (3.0, 1, False), (9.0, 1, False)], [(100, 2.0)]),
        (1, [(1.0, 400, True), (3.0, 40, True), (4.0, 0, False)], [(100, 2.0), (10, 1.0)]),
        (2, [(1.0, 400, True), (1.1, 4, False), (3.0, 1, False)], [(101, 2.0)]),
        (1, [(1.0, 1, False), (3.0, 1, False)], []),
    ],
)
def test_a_prompt_has_taken_until_the_step_behind_those_under_way_is_planned(
    num_overlapping: int, steps: Any, wanted: Any
) -> None:
    assert measured(num_overlapping, steps) == wanted


def test_a_pause_of_the_engine_is_no_computing() -> None:
    gate = Gate()
    meter = StepMeter(gate, lambda: 0.0, 4, 1)
    meter.planned(400, True)
    meter.forget()
    meter.planned(1, False)
    assert gate.told == []


def test_tokens_of_a_draft_are_no_prompt() -> None:
    vllm = MiniVLLM(World())
    told: list[tuple[float, float]] = []
    vllm.role.no_regret.computed = lambda pages, seconds: told.append((pages, seconds))  # type: ignore[method-assign]
    prompt = request("a", 2)
    vllm.add(prompt)
    for computed, num_tokens in (
        (0, prompt.num_tokens),
        (prompt.num_tokens - 1, 5),
        (prompt.num_tokens - 1, 5),
    ):
        prompt.num_computed_tokens = computed
        vllm.role.step([StepRequest("a", num_tokens, ())], lambda _: [[1, 2, 3, 4]])
        vllm.now_s += 1.0
    assert told == [(prompt.num_tokens / S, 1.0)]
