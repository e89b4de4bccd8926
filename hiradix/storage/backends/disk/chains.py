"""Orders the pages of a shelf for eviction: those used longest ago first, and none before the pages that
follow it in its chain.

A use of a page is one of all in front of it in its chain. That is seen to when one of these is met at the
cold end: it then waits for the time at which what follows it was used. So a conversation is not gone through
at each of its turns.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from hiradix.storage.backends.disk.entry import IndexEntry
from hiradix.storage.backends.disk.record import Name


class Waiting:
    """Pages of a shelf that are in no order of use: when they count as used. Not thread-safe."""

    def __init__(self) -> None:
        self.parting: dict[Name, dict[Name, None]] = {}  # pages that several are, or were, behind, and which
        self.latest_ns = 0  # of the times waited for
        self._at: dict[Name, int] = {}
        self._heap: list[tuple[int, int, Name]] = []  # of `_at`, and of some no longer in it

    def add(self, label: Name, page: IndexEntry, used_ns: int) -> None:
        """The page counts as used then."""
        page.used_ns = self._at[label] = used_ns
        self.latest_ns = max(self.latest_ns, used_ns)
        heapq.heappush(self._heap, (used_ns, page.version, label))

    def has(self, label: Name, page: IndexEntry) -> bool:
        """Whether it waits: it was not used since."""
        return self._at.get(label) == page.used_ns

    def end(self) -> None:
        """None waits any more."""
        self.latest_ns = 0
        self._at.clear()
        self._heap.clear()

    def drop(self, label: Name, page: IndexEntry) -> None:
        """The page is gone."""
        self._at.pop(label, None)
        self.parting.pop(label, None)
        if page.front in self.parting:
            self.parting[page.front].pop(label, None)

    def coldest(self, pages: Mapping[Name, IndexEntry], count: int, keep: Collection[Name]) -> list[Name]:
        """At most `count` of those that wait, the coldest first, and none of `keep`."""
        found: list[Name] = []
        seen: list[tuple[int, int, Name]] = []
        while self._heap and len(found) < count:
            item = heapq.heappop(self._heap)
            used_ns, version, label = item
            page = pages.get(label)
            if page is None or self._at.get(label) != used_ns or page.version != version:
                continue
            if not self.has(label, page):
                del self._at[label]
                continue
            if not seen or seen[-1] != item:
                seen.append(item)
                if label not in keep:
                    found.append(label)
        for item in seen:
            heapq.heappush(self._heap, item)
        return found


def behind(pages: Mapping[Name, IndexEntry], names: Collection[Name]) -> list[IndexEntry]:
    """The pages that continue one of these in a chain, as far as is known what is in front of them. O(pages)."""
    after: dict[Name, list[Name]] = {}
    for name, page in pages.items():
        if page.front is not None:
            after.setdefault(page.front, []).append(name)
    found: dict[Name, IndexEntry] = {}
    waiting = list(names)
    while waiting:
        for name in after.get(waiting.pop(), ()):
            if name not in found:
                found[name] = pages[name]
                waiting.append(name)
    return [page for name, page in found.items() if name not in names]


def link(pages: Mapping[Name, IndexEntry], waiting: Waiting, label: Name, front: Name) -> None:
    """A page is used, and `front` is in front of it. What was known before is kept."""
    page = pages.get(label)
    if page is None or label == front:
        return
    page.front = front if page.front is None else page.front
    before = pages.get(page.front)
    if before is None:
        return
    if page.front in waiting.parting:
        waiting.parting[page.front][label] = None
    elif before.next is not None and before.next != label and before.next in pages:
        waiting.parting[page.front] = {before.next: None, label: None}
    before.next = label


def coldest(
    pages: OrderedDict[Name, IndexEntry],
    waiting: Waiting,
    count: int,
    keep: Collection[Name],
    front: Name | None,
) -> list[Name]:
    """At most `count` labels, the coldest first: none of `keep`, nor `front`, nor what is in front of any of
    these in its chain."""
    kept = {*keep} if front is None else {*keep, front}
    while True:
        cold = list(islice(_in_order(pages, waiting, kept), count))
        due = waiting.coldest(pages, count, kept)
        found = list(heapq.merge(cold, due, key=lambda label: pages[label].used_ns))
        if _are_in_order(pages, waiting, found, kept):
            return found[:count]


def _are_in_order(
    pages: OrderedDict[Name, IndexEntry], waiting: Waiting, labels: Sequence[Name], kept: set[Name]
) -> bool:
    """Whether these may leave, the coldest first: none was used when something behind it was, nor is one to
    be kept."""
    settled: set[Name | None] = set()
    all_are = True
    for label in labels:
        if label in waiting.parting:
            _look_behind(pages, waiting, label, kept)
        if label in kept or (pages[label].next not in settled and _may_not(pages, waiting, label, kept)):
            all_are = False
        else:
            settled.add(label)
    return all_are


def _may_not(pages: OrderedDict[Name, IndexEntry], waiting: Waiting, label: Name, kept: set[Name]) -> bool:
    return _renew(pages, waiting, label, kept) or label in kept


def _look_behind(
    pages: OrderedDict[Name, IndexEntry], waiting: Waiting, label: Name, kept: set[Name]
) -> None:
    """Find out which page behind one is the latest: that which was used last may be gone, or another is to
    be kept."""
    known = waiting.parting[label]
    there = [behind for behind in known if behind in pages and pages[behind].front == label]
    if len(there) < 2:
        del waiting.parting[label]
    elif len(there) < len(known):
        waiting.parting[label] = dict.fromkeys(there)
    if there:
        pages[label].next = max(there, key=lambda behind: pages[behind].used_ns)
    if not kept.isdisjoint(there):
        kept.add(label)


def _in_order(
    pages: OrderedDict[Name, IndexEntry], waiting: Waiting, kept: Collection[Name]
) -> Iterator[Name]:
    for label, page in pages.items():
        if label not in kept and not waiting.has(label, page):
            yield label


def _renew(pages: OrderedDict[Name, IndexEntry], waiting: Waiting, label: Name, kept: set[Name]) -> bool:
    """Let each page of a chain count as used after those behind it; whether this one was used later so.

    All of the chain, from its end to its beginning: it is not gone through again for each of its pages. What
    is in front of one of `kept` is added to these.
    """
    path, end = {label}, label
    while (behind := pages[end].next) is not None and behind in pages:
        if behind in path:  # a caller made a ring of what is no chain
            pages[end].next = None
            break
        path.add(behind)
        end = behind
    if end == label:
        return False
    before_ns, at_ns, is_kept, seen = pages[label].used_ns, None, False, set[Name]()
    at: Name | None = end
    while at is not None and at in pages and at not in seen:
        page = pages[at]
        is_kept = is_kept or at in kept
        if is_kept:
            kept.add(at)
        if at_ns is not None and page.used_ns <= at_ns:
            waiting.add(at, page, at_ns + 1)
            pages.move_to_end(at)
        elif at not in path and not is_kept:
            break  # what is in front of it is later yet
        at_ns = page.used_ns
        seen.add(at)
        at = page.front
    return pages[label].used_ns > before_ns
