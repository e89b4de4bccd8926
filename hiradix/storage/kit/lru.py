"""An index of page files, coldest first."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import NamedTuple

SKEW_NS = 3600 * 10**9
"""So far ahead another host's clock may be."""
BEFORE_ALL_NS = (1 << 63) - 1


def believed(used_ns: int, now_ns: int) -> int:
    """A time of use. One in the future, of a clock that was wrong, becomes one before all others: in the same
    order, and good as a time once more if it is written down."""
    return used_ns - BEFORE_ALL_NS if used_ns > now_ns + SKEW_NS else used_ns


class LruEntry(NamedTuple):
    """A page file: bytes it counts for, and when it was last used (nanoseconds, as its mtime)."""

    num_bytes: int
    used_ns: int


class LruIndex:
    """Names in order of use, with their bytes summed. Not thread-safe: its owner's lock guards it.

    A chain's use counts for each page as so much earlier as it lies behind the first, and a page of several
    chains for the latest of its uses: so none is older than what follows it in any of them, in whatever
    pieces they came, and what leaves leaves chains from their ends. A use takes O(log n).

    What is stored or read by itself makes all of its chain that is in front of it used, too. That is seen to
    when one of these pages is the coldest: so a conversation is not gone through at each of its turns.
    """

    def __init__(self) -> None:
        self._entries: dict[str, LruEntry] = {}
        self._order: list[tuple[int, str]] = []  # a heap; uses that later ones have replaced are in it, too
        self._fronts: dict[str, str] = {}  # name -> the page in front of it in its chain
        self._next: dict[str, str] = {}  # name -> of those it is in front of, the one used last
        self._parting: dict[str, dict[str, None]] = {}  # name -> what is, or was, behind it: several
        self._followed: dict[str, int] = {}  # name -> when a page behind it was asked to be stored
        self._latest_ns = -BEFORE_ALL_NS
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def now(self, now_ns: int) -> int:
        """The time of a use that begins now: later than all before, also where the clock was set back."""
        if self._latest_ns > now_ns + SKEW_NS:
            self._latest_ns = now_ns
            self.replace_all(self._entries, now_ns)
        self._latest_ns = max(self._latest_ns + 1, now_ns)
        return self._latest_ns

    def use(self, name: str, entry: LruEntry, front: str = "") -> None:
        """Add `name`, or replace it; where it was used later before, that counts.

        front: the page in front of it in its chain, where that is known. What was known before is kept.
        """
        before = self._entries.get(name)
        if before is not None:
            self.num_bytes -= before.num_bytes
            entry = entry._replace(used_ns=max(entry.used_ns, before.used_ns))
        self._entries[name] = entry
        self.num_bytes += entry.num_bytes
        if before is None or before.used_ns != entry.used_ns:
            self._put_in_order(name, entry.used_ns)
        if front:
            front = self._fronts.setdefault(name, front)
            behind = self._next.get(front, name)
            if front in self._parting:
                self._parting[front][name] = None
            elif behind != name and behind in self._entries:
                self._parting[front] = {behind: None, name: None}
            self._next[front] = name

    def follow(self, name: str, used_ns: int) -> None:
        """Pages that follow `name` in its chain are about to be stored, and count as used at that time."""
        if name in self._entries:
            self._followed[name] = max(used_ns + 1, self._followed.get(name, used_ns))

    def drop(self, name: str) -> int:
        """Forget `name`; the bytes it counted for, 0 if it was not there."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return 0
        front = self._fronts.get(name)
        if front is not None and front in self._parting:
            self._parting[front].pop(name, None)
        for known in (self._fronts, self._next, self._followed, self._parting):
            known.pop(name, None)
        self.num_bytes -= entry.num_bytes
        return entry.num_bytes

    def size(self, name: str) -> int:
        """The bytes `name` counts for, 0 if it is not there."""
        entry = self._entries.get(name)
        return 0 if entry is None else entry.num_bytes

    def coldest(self, before_ns: int = BEFORE_ALL_NS) -> str | None:
        """The name used longest ago, if that was before then."""
        while self._order:
            used_ns, name = self._order[0]
            entry = self._entries.get(name)
            if entry is None or entry.used_ns != used_ns:
                heapq.heappop(self._order)
            elif not self._renew(name):
                return name if used_ns < before_ns else None
        return None

    def take(
        self, num_bytes: int, slack_bytes: int, keep: Collection[str], before_ns: int = BEFORE_ALL_NS
    ) -> dict[str, int]:
        """Drop the coldest until `num_bytes` are gone, and up to `slack_bytes` more; nothing of `keep`, and
        nothing that was used at `before_ns` or later.

        What was dropped, with its bytes; less than `num_bytes` when the coldest is one to keep.
        """
        taken: dict[str, int] = {}
        freed, target = 0, num_bytes + slack_bytes
        while freed < target and (name := self.coldest(before_ns)) is not None and name not in keep:
            if freed >= num_bytes and freed + self.size(name) > target:
                break
            taken[name] = self.drop(name)
            freed += taken[name]
        return taken

    def replace_all(self, found: Mapping[str, LruEntry], now_ns: int) -> None:
        """Become `found`, but where a name was used later than its file says, that counts."""
        seen = self._entries

        def used_ns(name: str) -> int:
            at_ns, known = believed(found[name].used_ns, now_ns), seen.get(name)
            return at_ns if known is None else max(at_ns, believed(known.used_ns, now_ns))

        self._entries = {name: LruEntry(found[name].num_bytes, used_ns(name)) for name in found}
        self._fronts = {name: front for name, front in self._fronts.items() if name in found}
        self._next = {name: behind for name, behind in self._next.items() if name in found}
        self._parting = {name: behind for name, behind in self._parting.items() if name in found}
        followed = self._followed.items()
        self._followed = {name: believed(at_ns, now_ns) for name, at_ns in followed if name in found}
        self.num_bytes = sum(entry.num_bytes for entry in self._entries.values())
        self._reorder()

    def _renew(self, name: str) -> bool:
        """Let each page of a chain count as used after those behind it; whether `name` was used later so.

        All of the chain, from its end to its beginning: it is not gone through again for each of its pages.
        """
        if name in self._parting:
            self._look_behind(name)
        path = {name}
        end = name
        while (behind := self._next.get(end)) in self._entries and behind is not None:
            if behind in path:  # a caller made a ring of what is no chain
                del self._next[end]
                break
            path.add(behind)
            end = behind
        before_ns, at_ns, seen = self._entries[name].used_ns, -BEFORE_ALL_NS, set[str]()
        page: str | None = end
        while page is not None and page not in seen and (entry := self._entries.get(page)) is not None:
            at_ns = max(at_ns + 1, self._followed.pop(page, at_ns))
            if at_ns > entry.used_ns:
                self._entries[page] = entry._replace(used_ns=at_ns)
                self._put_in_order(page, at_ns)
            elif page not in path:
                break  # what is in front of it is later yet
            at_ns = max(at_ns, entry.used_ns)
            seen.add(page)
            page = self._fronts.get(page)
        return self._entries[name].used_ns > before_ns

    def _look_behind(self, name: str) -> None:
        """Find out which page behind one is the latest: that which was used last may be gone, or others are
        to be stored behind another."""
        known = self._parting[name]
        there = [page for page in known if page in self._entries and self._fronts.get(page) == name]
        if len(there) < 2:
            del self._parting[name]
        elif len(there) < len(known):
            self._parting[name] = dict.fromkeys(there)
        if there:
            used = {page: self._entries[page].used_ns for page in there}
            self._next[name] = max(there, key=lambda page: max(used[page], self._followed.get(page, 0)))

    def _put_in_order(self, name: str, used_ns: int) -> None:
        heapq.heappush(self._order, (used_ns, name))
        if len(self._order) > 2 * len(self._entries) + 64:
            self._reorder()

    def _reorder(self) -> None:
        self._order = [(entry.used_ns, name) for name, entry in self._entries.items()]
        heapq.heapify(self._order)
