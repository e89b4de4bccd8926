"""What a store with room of its own does after a clock that was ahead, for `file` and `disk` alike."""

from __future__ import annotations

from collections.abc import Callable

from hiradix.storage import StorageBackend
from tests.contracts.storage import hits, key_of, keys_of, put

AHEAD_NS, RIGHT_NS = 4_000_000_000 * 10**9, 1_700_000_000 * 10**9


def check_a_clock_that_was_ahead(open_store: Callable[[Callable[[], int]], StorageBackend]) -> None:
    """Pages of that time go first, unless they are used again. open_store: one with room for three pages, by
    that clock. They stayed for ever, and each new page left at the next start."""
    clock = [AHEAD_NS]

    def restart() -> StorageBackend:
        clock[0] += 10**9
        return open_store(lambda: clock[0])

    store = restart()
    put(store, keys_of(3))
    store.close()
    clock[0] = RIGHT_NS
    store = restart()
    assert hits(store, [key_of(0)]) == [True]
    for number in (10, 11):
        store.close()
        store = restart()
        put(store, keys_of(1, number))
    assert hits(store, [*keys_of(3), *keys_of(2, 10)]) == [True, False, False, True, True]
    store.close()
