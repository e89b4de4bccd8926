"""Waiting requests: the order in which they will run, and the host pages reserved for them until then.

    arrival -> order (as set, or as the engine asks) -> room, nearest first -> held until the turn or the end

The room is a share of each component's host pool: pages locked for waiting requests and pages being read for
them; a page that several need counts once. Requests nearer to their turn come first: for them those behind let
go of their pages, the last one first. With several tenants a tenant may go beyond an equal share only once all
others have what they need, and keeps such pages until its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hiradix.cache.pages import BACKBONE
from hiradix.cache.prefetch_state import Prefetch, PrefetchPhase
from hiradix.tree import DEVICE, HOST, Node, RadixTree


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


class HeldPages:
    """Host pages that are held, or being filled, for a set of waiting requests: counts per component, each page
    once."""

    def __init__(self, tree: RadixTree, holders: Iterable[Prefetch] = ()) -> None:
        self.pages = [0] * len(tree.components)
        self._tree = tree
        self._seen: list[set[Node]] = [set() for _ in tree.components]
        for p in holders:
            self.add(p)

    def add(self, p: Prefetch) -> list[int]:
        """Count the pages held for `p`. Returns how many that adds, per component."""
        added = self._of(p, True)
        for component, more in enumerate(added):
            self.pages[component] += more
        return added

    def more(self, p: Prefetch) -> list[int]:
        """How many pages `add` would add."""
        return self._of(p, False)

    def more_at(self, *nodes: Node) -> list[int]:
        """How many pages locks on `nodes` would add."""
        count = range(len(self.pages))
        return self._walk([(node, [self._tree.floor(node, c) for c in count]) for node in nodes], False)

    def _of(self, p: Prefetch, is_kept: bool) -> list[int]:
        locks = [(lock.node, lock.floors) for lock in (p.lock, p.beside) if lock is not None]
        added = self._walk(locks, is_kept)
        if p.phase is PrefetchPhase.READ:
            for component, count in enumerate(p.coming):
                added[component] += count if component else p.coming_pages
        return added

    def _walk(self, locks: Sequence[tuple[Node, Sequence[int]]], is_kept: bool) -> list[int]:
        added = [0] * len(self.pages)
        for component, seen in enumerate(self._seen):
            new: set[Node] = set()
            for node, floors in locks:
                floor = floors[component] if component < len(floors) else 0
                for n in self._tree.path(node, floor if component else 0):
                    if n in seen or n in new:
                        if component == BACKBONE:
                            break
                        continue
                    new.add(n)
                    pages = n.residency(component, HOST).pages
                    if component == BACKBONE:
                        added[component] += n.num_pages  # where the host has not got it yet, it may soon
                    elif pages is not None:
                        added[component] += len(pages)
                    elif (pages := n.residency(component, DEVICE).pages) is not None:
                        added[component] += len(pages)
            if is_kept:
                seen |= new
        return added


def on_device_only(tree: RadixTree, node: Node) -> bool:
    """Whether a HOST lock on `node` would keep device pages, as some of its path have no host copy."""
    for component in range(len(tree.components)):
        for n in tree.path(node, tree.floor(node, component)):
            if n.residency(component, HOST).pages is None:
                return True
    return False


def fit(have: Sequence[int], more: Sequence[int], caps: Sequence[int]) -> bool:
    """Whether `have` plus `more` pages stay within `caps`, for every component."""
    return all(a + b <= cap for a, b, cap in zip(have, more, caps, strict=True))


class Wish(NamedTuple):
    """The room one waiting request needs: the host pages on the path of `node`, a boundary, and `coming` pages
    per component that are to be read. beside: the node up to which resident pages are kept while they are read;
    it need not be a boundary."""

    node: Node
    beside: Node
    coming: list[int]


class Calls(NamedTuple):
    """What `Sharing` has the prefetcher do. want(p): the room `p` needs, None if none. begin(p, wish): hold and
    read; False if the host has no pages for it. let_go(p): release the pages held for `p`."""

    want: Callable[[Prefetch], Wish | None]
    begin: Callable[[Prefetch, Wish], bool]
    let_go: Callable[[Prefetch], None]


class Sharing:
    """One round of sharing the room out.

    caps: pages per component. holders: all that have room. A request whose pages are being read never lets go:
    they are in flight.
    """

    def __init__(self, tree: RadixTree, caps: Sequence[int], holders: list[Prefetch], calls: Calls) -> None:
        self._tree = tree
        self._caps = caps
        self._holders = holders
        self._calls = calls
        self._total = HeldPages(tree, holders)
        self._near: list[Prefetch] = []  # have room and keep it in this round
        self._beyond: list[Prefetch] = []  # have room beyond their tenant's share

    def share_out(self, candidates: Sequence[Prefetch]) -> None:
        """Give room to `candidates` that need it, nearest first. Ends at the first for which there is not
        enough: what remains is kept for that one."""
        tenants = {p.key.space.tenant for p in candidates}
        share = [cap // max(1, len(tenants)) for cap in self._caps]
        near, used = HeldPages(self._tree), dict[str, list[int]]()
        later: list[Prefetch] = []
        over: set[str] = set()  # tenants whose next request does not fit their share
        expected = 0  # pages that nearer requests may need, of which storage is still being asked
        for at, p in enumerate(candidates):
            tenant = p.key.space.tenant
            if p.has_room:
                mine = used.get(tenant)
                if len(tenants) > 1 and mine is not None and not fit(mine, near.more(p), share):
                    self._beyond.append(p)
                else:
                    used[tenant] = _sum(mine, near.add(p))
                    self._near.append(p)
            elif p.phase is PrefetchPhase.QUERY:
                expected += p.asked_pages
            elif p.phase is PrefetchPhase.JOINED:
                expected += p.apart_pages
            elif tenant in over:
                later.append(p)
            else:
                wish = self._calls.want(p)
                if wish is None:
                    continue
                need, mine = _sum(near.more_at(wish.node, wish.beside), wish.coming), used.get(tenant)
                if len(tenants) > 1 and mine is not None and not fit(mine, need, share):
                    over.add(tenant)
                    later.append(p)
                    continue
                need[BACKBONE] += expected
                is_first = not any(near.pages) and not expected
                if not (is_first or fit(near.pages, need, self._caps)):
                    return
                if not self._give(p, wish, candidates[at + 1 :], is_first):
                    return
                if p.has_room:
                    used[tenant] = _sum(mine, near.add(p))
                    self._near.append(p)
        for p in later:
            wish = self._calls.want(p)
            if wish is not None and not self._give(p, wish, _behind(p, self._beyond, candidates), False):
                return

    def _give(self, p: Prefetch, wish: Wish, behind: Sequence[Prefetch], may_exceed: bool) -> bool:
        """Give `p` its room; requests behind it let go for that, the last one first. False: not possible.

        may_exceed: a request whose pages alone exceed the cap may have all of it, once nobody else has any.
        """
        if not fit(self._total.pages, self._needed(self._total, wish), self._caps):
            alone = self._needed(HeldPages(self._tree), wish)
            exceeds = not fit(alone, [0] * len(alone), self._caps)
            free = [q for q in behind if q.lock is not None and q.phase is PrefetchPhase.DONE]
            kept = set(self._holders).difference(free)
            if exceeds and (kept or not may_exceed):
                return False
            remaining = HeldPages(self._tree, kept)
            if not exceeds and not fit(remaining.pages, self._needed(remaining, wish), self._caps):
                return False
            self._make_room(wish, free, exceeds)
        if not self._calls.begin(p, wish):
            return False
        if p.has_room:
            self._holders.append(p)
            self._total.add(p)
        return True

    def _make_room(self, wish: Wish, free: list[Prefetch], is_all: bool) -> None:
        while free and (is_all or not fit(self._total.pages, self._needed(self._total, wish), self._caps)):
            last = free.pop()
            self._calls.let_go(last)
            self._holders.remove(last)
            self._total = HeldPages(self._tree, self._holders)

    def _needed(self, held: HeldPages, wish: Wish) -> list[int]:
        return _sum(held.more_at(wish.node, wish.beside), wish.coming)


def _sum(one: Sequence[int] | None, other: Sequence[int]) -> list[int]:
    return list(other) if one is None else [a + b for a, b in zip(one, other, strict=True)]


def _behind(p: Prefetch, some: Sequence[Prefetch], order: Sequence[Prefetch]) -> list[Prefetch]:
    """The prefetches in `some` that stand behind `p` in `order`."""
    at = order.index(p)
    return [q for q in some if order.index(q) > at]
