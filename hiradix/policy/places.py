"""A leaf's place in a queue of its class, and what queues count with."""

from __future__ import annotations

from typing import Final

from hiradix.policy.uses import LastUse
from hiradix.tree.node import Residency

NEVER: Final = 1 << 60
INFINITE: Final = 1e300  # beyond every index


class Place:
    """A leaf's place in a queue, or on its way there (seat None). entry None: void, to be skipped.

    start: where the leaf's node began when it was given the place. seat, depth: the queues'.
    """

    __slots__ = ("entry", "note", "start", "seat", "depth")

    def __init__(self, entry: Residency, note: LastUse, start: int):
        self.entry: Residency | None = entry
        self.note = note
        self.start = start
        self.seat: object = None
        self.depth = 0
