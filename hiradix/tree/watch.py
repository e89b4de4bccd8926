"""What an observer of a tree is told. See `RadixTree.watch`."""

from __future__ import annotations

from typing import Protocol

from hiradix.tree.node import Node


class Watch(Protocol):
    """Hears of the backbone's pages, as soon as the tree has them or has them no more. One thread, no errors.

    Splits and merges move no page, so they are not told; `Node.chain` is the observer's own, and both halves
    of a split have it.
    """

    def stored(self, node: Node, tier: int) -> None:
        """`node` has its pages in `tier`."""

    def removed(self, node: Node, tier: int) -> None:
        """`node` has no pages in `tier` any more; what it has in the other tier is still there."""

    def cleared(self) -> None:
        """The tree is empty."""

    def backed_up(self, node: Node, start: int, end: int) -> None:
        """Storage has pages [start, end) of the path of `node`."""

    def storage_changed(self) -> None:
        """Storage was attached, detached or cleared: what it was said to have, it may not have."""
