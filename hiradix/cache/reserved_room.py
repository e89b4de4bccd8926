"""Host pages reserved for waiting requests until their turn, and how that room is shared out.

    order of those who wait -> room, nearest first -> held until the turn or the end

The room is a share of each component's host pool: pages locked for waiting requests and pages being read for
them; a page that several need counts once. Requests nearer to their turn come first: for them those behind let
go of their pages, the last one first. With several tenants a tenant may go beyond an equal share only once all
others have what they need, and keeps such pages until its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from hiradix.cache.pages import BACKBONE, PageSupply
from hiradix.cache.prefetch_state import Prefetch, PrefetchPhase
from hiradix.cache.waiting import WaitingOrder
from hiradix.errors import Misuse
from hiradix.tree import DEVICE, HOST, Lock, Node, RadixTree

MAX_ROOMS: Final = 4  # of one request, which lets go of them: at the last, what it waits is not counted anew

MAX_ROUNDS: Final = 3  # of sharing out room at once: who joined a prefetch that has ended may have some


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

    def add_lock(self, lock: Lock) -> list[int]:
        """Count the pages that `lock` keeps. Returns how many that adds, per component."""
        added = self._walk([(lock.node, lock.floors)], True)
        for component, more in enumerate(added):
            self.pages[component] += more
        return added

    def end_on(self, node: Node) -> int:
        """Up to which page the path of `node` is counted already. O(path)."""
        return max([n.end for n in self._tree.path(node) if n in self._seen[BACKBONE]], default=0)

    def more(self, p: Prefetch) -> list[int]:
        """The number of pages that `add` would add, by component."""
        return self._of(p, False)

    def more_at(self, *nodes: Node) -> list[int]:
        """The number of pages that locks on `nodes` would add, by component."""
        count, apart = range(len(self.pages)), dict.fromkeys(nodes)
        return self._walk([(node, [self._tree.floor(node, c) for c in count]) for node in apart], False)

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


class ReservedRoom:
    """Host pages held for requests that wait, and room set aside for what is being read for them.

    waiting: who waits, in order. running: the prefetches that have not ended, of which some read on for no
    request of their own. Both are the prefetcher's, and so are these calls: caps() is how many pages of each
    component may be held; want(p) the room that `p` needs, None if it needs none; begin(p, wish) takes it
    (see `take`) and reads, False if the host has no pages.
    num_short: prefetches whose pages were found and that have no room for them; num_held: pages of the
    backbone that are held or being read. Both as of `balance`.
    is_stale: something has happened that may let somebody have room. lacking: who may have room, and the host
    has not the pages for it.
    """

    def __init__(
        self,
        supply: PageSupply,
        waiting: WaitingOrder,
        running: list[Prefetch],
        caps: Callable[[], list[int]],
        want: Callable[[Prefetch], Wish | None],
        begin: Callable[[Prefetch, Wish], bool],
    ) -> None:
        self.num_short = self.num_held = 0
        self.is_stale = False
        self.lacking: Prefetch | None = None
        self.want = want
        self.begin = begin
        self.caps = caps
        self.tree: RadixTree = supply.tree
        self._supply = supply
        self._waiting = waiting
        self._running = running

    def may_have_changed(self) -> None:
        """Something has happened that may let somebody have room: share it out anew with the next `balance`."""
        self.is_stale = True

    def try_again(self) -> None:
        """The prefetch that the host had no pages for takes what there is: `lacking` is nobody from here on."""
        self.lacking, self.is_stale = None, True

    def clear(self) -> None:
        """Forget all holds, after a reset."""
        self.lacking = None
        self.num_short = self.num_held = 0

    def reserved_pages(self) -> list[int]:
        """Pages of each component that are held for those who wait, or being read for them. One whose pages
        exceed the cap has all of it, alone. O(held nodes)."""
        held = HeldPages(self.tree, self._holders())
        return [min(count, cap) for count, cap in zip(held.pages, self.caps(), strict=True)]

    def _holders(self) -> Iterator[Prefetch]:
        """All that have room, among them those that read on for no request of their own."""
        for p in self._waiting:
            if p.has_room:
                yield p
        for p in self._running:
            if p.has_room and not self._waiting.has(p):
                yield p

    # -- sharing it out -----------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether `next_round` may change something although nothing was asked for or has come since the last
        one. Deadlines are looked at by `Prefetcher.progress` alone."""
        return self.is_stale or self.lacking is not None

    def next_round(self) -> None:
        """The engine asks anew, from the next to run on, which of those who wait may run."""
        if self._waiting.next_round() or self.lacking is not None:
            self.is_stale = True
        self.balance()

    def balance(self) -> None:
        """Give room to those who wait for it, the nearest to its turn first. Next to nothing where nothing has
        happened since the last call."""
        if not self.is_stale:
            return
        for _ in range(MAX_ROUNDS):
            self.is_stale, self.lacking = False, None
            candidates = self._candidates()
            if not any(p.phase is PrefetchPhase.FOUND or p.wants_hold for p in candidates):
                break
            Sharing(self, list(self._holders())).share_out(candidates)
            if not self.is_stale:
                break
        self.num_short, self.num_held = 0, self.reserved_pages()[BACKBONE]
        for p in self._running:
            if p.phase is PrefetchPhase.FOUND:
                self.num_short += 1
                p.has_waited = True

    def _candidates(self) -> list[Prefetch]:
        """The prefetches that have room or may get it, nearest first. One that joined another, which waits
        for room itself, is represented by that other."""
        found: dict[Prefetch, None] = {}
        for p in self._waiting:
            other = p.waits_with
            if other is not p and other.phase is PrefetchPhase.FOUND:
                found[other] = None
            elif p.phase is not PrefetchPhase.DONE or p.lock is not None or p.wants_hold:
                found[p] = None
        return list(found)

    # -- one's room ---------------------------------------------------------------------

    def take(self, p: Prefetch, wish: Wish, is_part: bool = False) -> bool:
        """Hold what the host has of `p`, if it has pages for the rest, too. False: it has not, as others than
        those who wait have them.

        is_part: what there are pages for is enough, as for one that exceeds the room.
        """
        lock = self.tree.lock(wish.node, HOST)
        is_part = is_part or not fit(wish.coming, [0] * len(wish.coming), self.caps())
        room = [self._supply.host_room(component) for component in range(len(wish.coming))]
        if not (any(room) if is_part else fit(wish.coming, [0] * len(room), room)):
            self.tree.unlock(lock)
            self.lacking = p
            return False
        p.lock, p.anchor = lock, wish.node
        return True

    def keep(self, p: Prefetch) -> None:
        """Hold what is locked for `p` until its turn, on the host alone: nothing that the device alone has, and
        no more than the cap."""
        lock = p.lock
        if lock is None:
            raise Misuse("nothing is locked for a prefetch that keeps it")
        before, p.beside = p.beside, None
        if before is not None:
            self.tree.unlock(before)
        p.had_end, caps = lock.node.end, self.caps()
        is_whole = fit(HeldPages(self.tree).more_at(lock.node), [0] * len(caps), caps)
        if on_device_only(self.tree, lock.node) or (not is_whole and len(caps) > 1):
            self.release(p)
        elif not is_whole:
            self._keep_first(p, lock, caps[BACKBONE])

    def _keep_first(self, p: Prefetch, lock: Lock, num_pages: int) -> None:
        """Hold the first pages only of what has come."""
        node: Node | None = None
        self.tree.cut(lock.node, num_pages)
        for n in self.tree.path(lock.node):
            if n.end <= num_pages:
                node = n
                break
        p.lock = None if node is None else self.tree.lock(node, HOST)
        self.tree.unlock(lock)

    def release(self, p: Prefetch) -> None:
        """Unlock all that is held for `p`."""
        p.wants_hold = False
        locks = p.lock, p.beside
        p.lock = p.beside = None
        for lock in locks:
            if lock is not None:
                self.tree.unlock(lock)

    def let_go(self, p: Prefetch) -> None:
        """Hold nothing for `p` any more, as one that runs before it needs the room; later it is given room
        again."""
        if p.lock is None:
            raise Misuse("nothing is held for a prefetch that lets go")
        p.had_end = p.lock.node.end
        self.release(p)
        if p.goes_on:
            return
        p.has_waited = True
        if p.num_rooms < MAX_ROOMS:
            p.room_since_s = -1.0
        if p.hit is None:
            p.wants_hold = True
        else:
            p.phase = PrefetchPhase.FOUND
            self._running.append(p)

    def check(self) -> None:
        """Assert that room is held for those who wait alone, and no more than the cap of it unless one that
        exceeds it alone is being read. O(held nodes)."""
        holders, caps = list(self._holders()), self.caps()
        for p in holders:
            if p.phase is PrefetchPhase.DONE and not self._waiting.has(p):
                raise Misuse(f"{p.handle} waits no more, and pages are held for it")
        if not fit(HeldPages(self.tree, holders).pages, [0] * len(caps), caps):
            alone = [HeldPages(self.tree, [p]).pages for p in holders if p.phase is PrefetchPhase.READ]
            if all(fit(pages, [0] * len(pages), caps) for pages in alone):
                held = HeldPages(self.tree, holders).pages
                raise Misuse(f"{held} pages are held for those who wait, of {caps}")


class Sharing:
    """Shares the room out, once.

    holders: all that have some. What is being read is not let go of: its pages are on their way.
    """

    def __init__(self, room: ReservedRoom, holders: list[Prefetch]) -> None:
        self._room = room
        self._tree = room.tree
        self._caps = room.caps()
        self._holders = holders
        self._total = HeldPages(room.tree, holders)
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
                wish = self._room.want(p)
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
            wish = self._room.want(p)
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
        if not self._room.begin(p, wish):
            return False
        if p.has_room:
            self._holders.append(p)
            self._total.add(p)
        return True

    def _make_room(self, wish: Wish, free: list[Prefetch], is_all: bool) -> None:
        while free and (is_all or not fit(self._total.pages, self._needed(self._total, wish), self._caps)):
            last = free.pop()
            self._room.let_go(last)
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
