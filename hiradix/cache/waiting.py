"""Who waits, in which order they will run, and the host room that is theirs until then.

    arrival -> order (as set, or as the engine asks) -> room, nearest first -> held until the turn or the end

Room is a share of each component's host pool. It counts what is locked for those who wait and what is being
read for them; a page of several counts once. Who is nearer to its turn is served first: for it those behind
let go of what was fetched for them, the last one first. With several tenants who beyond an equal share of the
room gets more only once all others have what they want; what has come for it stays until its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hiradix.cache.pages import BACKBONE
from hiradix.cache.prefetch_state import Prefetch, PrefetchPhase
from hiradix.tree import DEVICE, HOST, Lock, Node, RadixTree


class WaitingOrder:
    """Those who wait, next to run first: as set, else as the engine asks for them; behind these, in order of
    arrival, those of which it says nothing."""

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
        """Whether the request of `p` still waits, and for this one."""
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
        """The order in which they will run. Whether it is another than before; cheap if it is not."""
        self._is_set = True
        self._asked.clear()
        if len(handles) == len(self._given) and list(handles) == self._given:
            return False
        changed = self._sort(handles)
        self._given = list(handles)
        return changed

    def asked(self, p: Prefetch) -> None:
        """The engine asks whether this one may run."""
        if not self._is_set:
            self._asked[p.handle] = None

    def next_round(self) -> bool:
        """The engine begins to ask anew: whether those it has asked for stood in another order."""
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
        """Pages that are to be fetched before those of `p`, as far as that is known, and those, `most_held` at
        most, that are held for who runs before it."""
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
    """Host pages that are kept or will be filled for some who wait, of each component; each counts once."""

    def __init__(self, tree: RadixTree, holders: Iterable[Prefetch] = ()) -> None:
        self.pages = [0] * len(tree.components)
        self._tree = tree
        self._seen: list[set[Node]] = [set() for _ in tree.components]
        for p in holders:
            self.add(p)

    def add(self, p: Prefetch) -> list[int]:
        """Count what is held for `p`. What that adds."""
        added = self._of(p, True)
        for component, more in enumerate(added):
            self.pages[component] += more
        return added

    def add_lock(self, lock: Lock) -> list[int]:
        """Count what `lock` keeps. What that adds."""
        added = self._walk([(lock.node, lock.floors)], True)
        for component, more in enumerate(added):
            self.pages[component] += more
        return added

    def end_on(self, node: Node) -> int:
        """Up to which page the path of `node` is counted already. O(path)."""
        return max([n.end for n in self._tree.path(node) if n in self._seen[BACKBONE]], default=0)

    def more(self, p: Prefetch) -> list[int]:
        """What `add` would add."""
        return self._of(p, False)

    def more_at(self, *nodes: Node) -> list[int]:
        """What locks on `nodes` would add."""
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
    """Whether a lock on `node` would keep pages of the device, as the host has not got all that it needs."""
    for component in range(len(tree.components)):
        for n in tree.path(node, tree.floor(node, component)):
            if n.residency(component, HOST).pages is None:
                return True
    return False


def fit(have: Sequence[int], more: Sequence[int], caps: Sequence[int]) -> bool:
    """Whether `more` pages of each component fit beside those that are there."""
    return all(a + b <= cap for a, b, cap in zip(have, more, caps, strict=True))


class Wish(NamedTuple):
    """Room for one who waits: for what the path of `node` has on the host, a boundary, and for so many pages
    of each component that are read to it. beside: where what is kept meanwhile ends, in no boundary."""

    node: Node
    beside: Node
    coming: list[int]


class Calls(NamedTuple):
    """want(p): the room `p` needs, None if it needs none. begin(p, wish): it has it; False: the host has no
    pages. let_go(p): nothing is held for `p` any more."""

    want: Callable[[Prefetch], Wish | None]
    begin: Callable[[Prefetch, Wish], bool]
    let_go: Callable[[Prefetch], None]


class Sharing:
    """Shares the room out, once.

    caps: pages of each component. holders: all that have room. What is being read is not let go of: its pages
    are on their way.
    """

    def __init__(self, tree: RadixTree, caps: Sequence[int], holders: list[Prefetch], calls: Calls) -> None:
        self._tree = tree
        self._caps = caps
        self._holders = holders
        self._calls = calls
        self._total = HeldPages(tree, holders)
        self._near: list[Prefetch] = []  # have room, and keep it whoever asks next
        self._beyond: list[Prefetch] = []  # have room beyond their tenant's share

    def share_out(self, candidates: Sequence[Prefetch]) -> None:
        """Give room to those of `candidates`, nearest first, who need some and can have it. It ends at the
        first who cannot: what is left is kept for him."""
        tenants = {p.key.space.tenant for p in candidates}
        share = [cap // max(1, len(tenants)) for cap in self._caps]
        near, used = HeldPages(self._tree), dict[str, list[int]]()
        later: list[Prefetch] = []
        over: set[str] = set()  # whose next one does not fit its share
        expected = 0  # pages that those nearer may need, which are still being asked for
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
        """Give `p` its room, for which those behind it let go, the last one first. False: it cannot have it.

        may_exceed: where its pages alone exceed the cap it has it all, once nobody else has any.
        """
        if not fit(self._total.pages, self._needed(self._total, wish), self._caps):
            alone = self._needed(HeldPages(self._tree), wish)
            exceeds = not fit(alone, [0] * len(alone), self._caps)
            free = [q for q in behind if q.lock is not None and q.phase is PrefetchPhase.DONE]
            kept = set(self._holders).difference(free)
            if exceeds and (kept or not may_exceed):
                return False
            left = HeldPages(self._tree, kept)
            if not exceeds and not fit(left.pages, self._needed(left, wish), self._caps):
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
    """Those of `some` that stand behind `p`."""
    at = order.index(p)
    return [q for q in some if order.index(q) > at]
