"""Remembers the latest prompts of each session, by its name: places in the tree, no tokens."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Final

from hiradix.tree import Node, RadixTree

MAX_ENDS: Final = 4  # prompts of one session that do not continue each other
SWEPT: Final = 8  # sessions looked at with each that is named: what has left the tree is forgotten


class Sessions:
    """A bounded table: of each session where its last prompts end, the last one first."""

    def __init__(self, tree: RadixTree, limit: int):
        self._tree = tree
        self._limit = limit
        self._ends: OrderedDict[str, list[Node]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def note(self, name: str, node: Node) -> None:
        """A session's prompt ends at `node`. O(path)."""
        if not self._limit or node.parent is None:
            return
        above = set(self._tree.path(node))
        known = [end for end in self._known(name) if end not in above]
        self._ends[name] = [node, *known[: MAX_ENDS - 1]]
        self._ends.move_to_end(name)
        for old in list(islice(self._ends, SWEPT)):
            if not self._known(old):
                del self._ends[old]
        while len(self._ends) > self._limit:
            self._ends.popitem(last=False)

    def ends(self, name: str) -> list[Node]:
        """The ends of a session's prompts that are still in the tree, the last one first."""
        return self._known(name)

    def forget(self, name: str) -> None:
        """Forget a session."""
        self._ends.pop(name, None)

    def clear(self) -> None:
        """The tree is empty."""
        self._ends.clear()

    def _known(self, name: str) -> list[Node]:
        found = (self._tree.current(node) for node in self._ends.get(name, ()))
        return [node for node in found if node is not None and node.parent is not None]
