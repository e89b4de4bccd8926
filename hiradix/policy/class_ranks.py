"""Ages in buckets, and how leaves of one class rank by age: GHD's index as its queues ask for it."""

from __future__ import annotations

from typing import Final

BUCKETS: Final = 64


def _edges() -> list[int]:
    edges = [0, 1024]
    while len(edges) <= BUCKETS:
        edges.append(edges[-1] * 13 // 10)
    return edges


EDGE_LIST: Final = _edges()  # tokens; bucket b is [edge b, edge b + 1), the last one open: 10**10 tokens


class ClassRanks:
    """One class's index by age as plain numbers, and what follows from it, some of it when first asked for.

    least: up to each age, the least index. falls: the next age with a lesser one; BUCKETS if there is none.
    """

    __slots__ = ("index", "least", "falls", "_younger", "_entries")

    def __init__(self, index: list[float], least: list[float], falls: list[int]):
        self.index = index
        self.least = least
        self.falls = falls
        self._younger: dict[int, list[int]] = {}
        self._entries: dict[int, list[int]] = {}

    def younger(self, bucket: int) -> list[int]:
        """Younger ages that go before `bucket`, first to go first."""
        found = self._younger.get(bucket)
        if found is None:
            index = self.index
            better = [b for b in range(bucket) if index[b] <= index[bucket]]
            found = self._younger[bucket] = sorted(better, key=index.__getitem__)
        return found

    def entries(self, bucket: int) -> list[int]:
        """The age buckets in which a leaf, growing older, comes to rank before `bucket`; youngest first."""
        found = self._entries.get(bucket)
        if found is None:
            index, least = self.index, self.index[bucket]
            better = [x < least or (x == least and b < bucket) for b, x in enumerate(index)]
            found = [b for b in range(1, BUCKETS) if better[b] and not better[b - 1]]
            self._entries[bucket] = found
        return found
