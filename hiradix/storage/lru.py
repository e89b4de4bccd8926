"""Which page files there are, coldest first."""

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


class Entry(NamedTuple):
    """A page file: bytes it counts for, and when it was last used (nanoseconds, as its mtime)."""

    num_bytes: int
    used_ns: int


class LruIndex:
    """Names in order of use, with their bytes summed. Not thread-safe: its owner's lock guards it.

    A chain's use counts for each page as so much earlier as it lies behind the first, and a page of several
    chains for the latest of its uses: so none is older than what follows it in any of them, in whatever
    pieces they came, and what leaves leaves chains from their ends. A use takes O(log n).
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._order: list[tuple[int, str]] = []  # a heap; uses that later ones have replaced are in it, too
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

    def use(self, name: str, entry: Entry) -> None:
        """Add `name`, or replace it; where it was used later before, that counts."""
        before = self._entries.get(name)
        if before is not None:
            self.num_bytes -= before.num_bytes
            entry = entry._replace(used_ns=max(entry.used_ns, before.used_ns))
        self._entries[name] = entry
        self.num_bytes += entry.num_bytes
        if before is None or before.used_ns != entry.used_ns:
            heapq.heappush(self._order, (entry.used_ns, name))
            if len(self._order) > 2 * len(self._entries) + 64:
                self._reorder()

    def drop(self, name: str) -> int:
        """Forget `name`; the bytes it counted for, 0 if it was not there."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return 0
        self.num_bytes -= entry.num_bytes
        return entry.num_bytes

    def size(self, name: str) -> int:
        """The bytes `name` counts for, 0 if it is not there."""
        entry = self._entries.get(name)
        return 0 if entry is None else entry.num_bytes

    def coldest(self) -> str | None:
        """The name used longest ago."""
        while self._order:
            used_ns, name = self._order[0]
            entry = self._entries.get(name)
            if entry is not None and entry.used_ns == used_ns:
                return name
            heapq.heappop(self._order)
        return None

    def take(self, num_bytes: int, slack_bytes: int, keep: Collection[str]) -> dict[str, int]:
        """Drop the coldest until `num_bytes` are gone, and up to `slack_bytes` more; nothing of `keep`.

        What was dropped, with its bytes; less than `num_bytes` when the coldest is one to keep.
        """
        taken: dict[str, int] = {}
        freed, target = 0, num_bytes + slack_bytes
        while freed < target and (name := self.coldest()) is not None and name not in keep:
            if freed >= num_bytes and freed + self.size(name) > target:
                break
            taken[name] = self.drop(name)
            freed += taken[name]
        return taken

    def replace_all(self, found: Mapping[str, Entry], now_ns: int) -> None:
        """Become `found`, but where a name was used later than its file says, that counts."""
        seen = self._entries

        def used_ns(name: str) -> int:
            at_ns, known = believed(found[name].used_ns, now_ns), seen.get(name)
            return at_ns if known is None else max(at_ns, believed(known.used_ns, now_ns))

        self._entries = {name: Entry(found[name].num_bytes, used_ns(name)) for name in found}
        self.num_bytes = sum(entry.num_bytes for entry in self._entries.values())
        self._reorder()

    def _reorder(self) -> None:
        self._order = [(entry.used_ns, name) for name, entry in self._entries.items()]
        heapq.heapify(self._order)
