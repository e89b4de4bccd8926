"""Python that runs for too long is ended, and nothing else is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from hiradix.apps.engine.time_limit import TimeLimit


def forever() -> None:
    while True:
        pass


def test_what_does_not_end_is_ended() -> None:
    limit = TimeLimit(0.02)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="not done within 0.02 s"):
            limit.run(forever)
        assert limit.run(lambda: 7) == 7


def test_each_thread_has_its_own_time() -> None:
    limit, ended = TimeLimit(0.02), []

    def run() -> None:
        try:
            limit.run(forever)
        except TimeoutError:
            ended.append(threading.current_thread().name)

    threads = [threading.Thread(target=run, name=str(number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("inner, then", [(forever, int), (int, forever)])
def test_a_piece_within_a_piece_lifts_no_limit(
    inner: Callable[[], object], then: Callable[[], object]
) -> None:
    limit = TimeLimit(0.02)

    def outer() -> None:
        limit.run(inner)
        then()

    with pytest.raises(TimeoutError, match="not done within 0.02 s"):
        limit.run(outer)
    assert not limit._ends


def test_errors_of_a_piece_are_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        TimeLimit(60.0).run(lambda: 1 / 0)


def test_a_piece_that_ends_just_then_ends_one_way_or_the_other() -> None:
    """The exception comes in the piece, or never: not in what the thread does next."""
    limit = TimeLimit(0.001)

    def just() -> int:
        end = time.monotonic() + 0.001
        while time.monotonic() < end:
            pass
        return 1

    for _ in range(100):
        try:
            assert limit.run(just) == 1
        except TimeoutError:
            pass
        sum(range(100))
    assert not limit._ends
