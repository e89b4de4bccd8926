"""Calls that wait for the scheduler's turn: made once, in their order, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hiradix.adapters import scheduled_calls
from hiradix.adapters.scheduled_calls import ScheduledCalls


def served(calls: ScheduledCalls, pool: ThreadPoolExecutor, *asked: Callable[[Any], Any]) -> list[Any]:
    """What the calls gave, each handed over before the next, and all of them made by this thread."""
    futures = []
    for do in asked:
        futures.append(pool.submit(calls.ask, do))
        while calls.num_waiting < len(futures):
            threading.Event().wait(0.001)
    calls.serve([])
    return futures


def test_calls_are_made_by_whoever_serves_in_their_order() -> None:
    calls, seen = ScheduledCalls(60.0), []
    with ThreadPoolExecutor(4) as pool:
        futures = served(
            calls, pool, *(lambda _, n=n: (seen.append(n), threading.get_ident()) for n in range(4))
        )
        makers = {future.result()[1] for future in futures}
    assert seen == [0, 1, 2, 3] and makers == {threading.get_ident()}
    assert calls.num_waiting == 0


def test_what_a_call_raises_is_its_askers() -> None:
    def fail(_: Any) -> None:
        raise KeyError("what")

    calls = ScheduledCalls(60.0)
    with ThreadPoolExecutor(2) as pool:
        failed, fine = served(calls, pool, fail, lambda subject: subject)
        with pytest.raises(KeyError):
            failed.result()
        assert fine.result() == []


def test_a_call_that_waited_too_long_is_not_made_later() -> None:
    calls, seen = ScheduledCalls(0.01), []
    with pytest.raises(TimeoutError, match=r"^the scheduler took no step in 0.01 s$"):
        calls.ask(seen.append)
    calls.serve(None)
    assert seen == []


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduled_calls, "MAX_WAITING", 0)
    with pytest.raises(TimeoutError, match="^0 calls wait"):
        ScheduledCalls().ask(print)
