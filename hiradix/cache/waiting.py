"""The order in which waiting requests will run."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from hiradix.cache.prefetch_state import Prefetch, PrefetchPhase


class WaitingOrder:
    """The prefetches of waiting requests, next to run first.

    The order is the one given by `set_order`; until that is called, the one in which the engine asks for them
    (`asked`). Those it does not name stand behind, in order of arrival.
    """

    def __init__(self) -> None:
        self._order: list[Prefetch] = []
        self._by_handle: dict[Hashable, Prefetch] = {}
        self._given: list[Hashable] = []
        self._asked: dict[Hashable, None] = {}
        self._is_set = False

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Prefetch]:
        return iter(self._order)

    def handles(self) -> list[Hashable]:
        return list(self._by_handle)

    def get(self, handle: Hashable) -> Prefetch | None:
        return self._by_handle.get(handle)

    def has(self, p: Prefetch) -> bool:
        """Whether the request of `p` still waits, and for this prefetch, not a later one of the same handle."""
        return self._by_handle.get(p.handle) is p

    def add(self, p: Prefetch) -> None:
        self._by_handle[p.handle] = p
        self._order.append(p)
        self._given.clear()  # which may have named it already

    def remove(self, p: Prefetch) -> None:
        del self._by_handle[p.handle]
        self._order.remove(p)
        self._given.clear()

    def clear(self) -> None:
        self._order.clear()
        self._by_handle.clear()
        self._given.clear()
        self._asked.clear()

    def set_order(self, handles: Sequence[Hashable]) -> bool:
        """Set the order in which they will run. Returns whether it has changed; cheap if it has not."""
        self._is_set = True
        self._asked.clear()
        if len(handles) == len(self._given) and list(handles) == self._given:
            return False
        changed = self._sort(handles)
        self._given = list(handles)
        return changed

    def asked(self, p: Prefetch) -> None:
        """Note that the engine asks whether this one may run."""
        if not self._is_set:
            self._asked[p.handle] = None

    def next_round(self) -> bool:
        """The engine starts a new scheduler step: take over the order in which it asked. Returns whether that is
        another one."""
        if not self._asked:
            return False
        asked, self._asked = list(self._asked), {}
        return self._sort(asked)

    def _sort(self, handles: Iterable[Hashable]) -> bool:
        found = [self._by_handle[handle] for handle in dict.fromkeys(handles) if handle in self._by_handle]
        if found == self._order[: len(found)]:
            return False
        first = set(found)
        self._order = [*found, *(p for p in self._order if p not in first)]
        self._given.clear()
        return True

    def pages_ahead(self, p: Prefetch, most_held: int) -> int:
        """Pages to be fetched before those of `p`, as far as known, plus the pages held for requests before it,
        `most_held` at most."""
        held = total = 0
        for other in self._order:
            if other is p:
                break
            if other.lock is not None:
                held += other.lock.node.end
            if other.phase is not PrefetchPhase.DONE:
                total += other.asked_pages
        return total + min(held, most_held)
