"""A rank whose storage hangs: the others do not wait for it until they take it for lost."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from hiradix.apps.engine.rank_storage import MAX_OPEN_S, clear_on_ranks, open_timeout_s
from hiradix.prefix_cache import AttachedStorage

DEADLINE_S = 60.0


class Cache:
    """What of the cache a clear asks for. may: when storage is done. ends: what its clear gives or raises."""

    def __init__(self, ends: bool | Exception) -> None:
        self.may, self.ends, self.storage = threading.Event(), ends, cast(Any, self)
        self.told: list[bool] = []

    def clear(self) -> bool:
        assert self.may.wait(DEADLINE_S)
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends

    def cleared(self, ok: bool) -> bool:
        self.told.append(ok)
        return ok


@pytest.mark.parametrize("ends", [True, False, OSError("gone")])
def test_what_came_of_a_clear_is_told_to_the_others_once(ends: bool | Exception) -> None:
    cache = Cache(ends)
    cache.may.set()
    assert clear_on_ranks(cast(AttachedStorage, cache), DEADLINE_S) is (ends is True)
    assert cache.told == [ends is True]


def test_a_clear_that_hangs_is_told_as_failed_at_its_deadline() -> None:
    cache = Cache(True)
    assert not clear_on_ranks(cast(AttachedStorage, cache), 0.01)
    assert cache.told == [False]
    cache.may.set()


def test_a_backend_has_half_of_what_ranks_wait_for_each_other() -> None:
    assert (open_timeout_s(8.0), open_timeout_s(1e6)) == (4.0, MAX_OPEN_S)


def test_without_storage_there_is_nothing_to_clear_or_tell() -> None:
    cache = Cache(True)
    cache.storage = None
    assert not clear_on_ranks(cast(AttachedStorage, cache), 0.01) and cache.told == []
