"""Which page files there are, coldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

SKEW_NS = 3600 * 10**9
"""So far ahead another host's clock may be."""
BEFORE_ALL_NS = (1 << 63) - 1


def believed(used_ns: int, now_ns: int) -> int:
    """A time of use. One in the future, of a clock that was wrong, becomes one before all others: in the same
    order, and good as a time once more if it is written down."""
    return used_ns - BEFORE_ALL_NS if used_ns > now_ns + SKEW_NS else used_ns


@dataclass(frozen=True)
class Entry:
    """A page file: bytes it counts for, and when it was last used (nanoseconds, as its mtime)."""

    num_bytes: int
    used_ns: int


class LruIndex:
    """Names in order of use, with their bytes summed. Not thread-safe: its owner's lock guards it."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def use(self, name: str, entry: Entry) -> None:
        """Add `name`, or replace it; it is the hottest now."""
        self.drop(name)
        self._entries[name] = entry
        self.num_bytes += entry.num_bytes

    def renew(self, name: str) -> None:
        """`name`, if it is there, is the hottest now, as a part of what was used just before."""
        if name in self._entries:
            self._entries.move_to_end(name)

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
        return next(iter(self._entries), None)

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

        order = sorted((used_ns(name), name) for name in found)
        self._entries = OrderedDict((name, Entry(found[name].num_bytes, at_ns)) for at_ns, name in order)
        self.num_bytes = sum(entry.num_bytes for entry in found.values())
