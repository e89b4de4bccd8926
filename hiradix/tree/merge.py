"""Long paths: runs of single children are merged, so that a conversation of a thousand turns is a few nodes.

When an unlock leaves a long path unlocked, consecutive nodes in the same state become one: the deepest of them,
as locks, jobs and matches refer to a node's end. From the deepest upwards, a node joins the one below it while
it is at most twice as big. So sizes along a path at least double towards the root, a path has O(log pages)
nodes, and a page is copied O(log pages) times.

A node that was merged away keeps its `end` and its successor. When a caller uses it again, `revived` cuts it out
again, even if the end of the successor has been evicted since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hiradix.tree import ids
from hiradix.tree.hashing import DIGEST_BYTES
from hiradix.tree.node import NAME_BYTES, TIERS, Node
from hiradix.tree.residency import Residencies

RATIO: Final = 2

Split = Callable[[Node, int], Node]


def merge_path(residencies: Residencies, node: Node) -> None:
    """Merge nodes on the path of `node`, deepest first. O(path + pages copied)."""
    group, num_pages = [node], node.num_pages
    while (parent := group[-1].parent) is not None and parent.parent is not None:
        small = parent.num_pages <= RATIO * num_pages
        if small and _is_alike(parent, group[-1], residencies):
            group.append(parent)
            num_pages += parent.num_pages
            continue
        if len(group) > 1:
            _merge(residencies, group)
        group, num_pages = [parent], parent.num_pages
    if len(group) > 1:
        _merge(residencies, group)


def _is_alike(parent: Node, child: Node, residencies: Residencies) -> bool:
    """Whether the two may become one: an only child, both unlocked, resident in the same tiers, with the same
    hints."""
    if len(parent.children) != 1 or parent.width != child.width or parent.stored != child.stored:
        return False
    if parent.note is not child.note:
        return False
    for c, component in enumerate(residencies.components):
        for tier in TIERS:
            up, low = parent.residency(c, tier), child.residency(c, tier)
            if up.lock_ref or low.lock_ref:
                return False
            if component.per_page:
                if (up.pages is None) != (low.pages is None):
                    return False
                if c and residencies.is_unneeded(up, c, tier) != residencies.is_unneeded(low, c, tier):
                    return False
            elif up.pages is not None:
                return False  # a record at the parent's end would lose its place
    return True


def _merge(residencies: Residencies, group: Sequence[Node]) -> None:
    """Make one node of `group`, a path from the bottom up. The bottom one stays."""
    bottom, down = group[0], list(reversed(group))
    pushed = []
    for c, component in enumerate(residencies.components):
        for tier in TIERS:
            entries = [node.residency(c, tier) for node in down]
            own = entries[-1]
            if own.pages is None:
                continue
            residencies.orders[c][tier].remove([entry for entry in entries if entry.pages is not None])
            if component.per_page:
                own.pages = np.concatenate([entry.pages for entry in entries if entry.pages is not None])
            pushed.append((c, tier, own))
    _merge_runs(bottom, down)
    above = down[0].parent
    assert above is not None
    bottom.row, bottom.start, bottom.parent = down[0].row, down[0].start, above
    above.adopt_child(bottom)  # under the same row: takes the place of the topmost
    for node in down[:-1]:
        _detach(node, bottom, len(residencies.components))
    for c, tier, own in pushed:
        residencies.push_taken([own], c, tier)


def _merge_runs(bottom: Node, down: Sequence[Node]) -> None:
    """Tokens, extras, digests and counts of a path become the bottom node's."""
    overlap = bottom.space.lookahead * bottom.width
    bottom.run = b"".join([*(node.run[: len(node.run) - overlap] for node in down[:-1]), bottom.run])
    if any(node.extras is not None for node in down):
        bottom.extras = tuple(e for node in down for e in node.extras or (None,) * node.num_pages)
    bottom.digests = _leading(
        [node.digests for node in down], [node.num_pages * DIGEST_BYTES for node in down]
    )
    bottom.names = _leading([node.names for node in down], [node.num_pages * NAME_BYTES for node in down])
    bottom.hit_count = max(node.hit_count for node in down)
    bottom.priority = max(node.priority for node in down)
    bottom.created = min(node.created for node in down)


def _leading(parts: Sequence[bytes], whole: Sequence[int]) -> bytes:
    """The parts up to the first that is shorter than `whole`: what is known behind it would have no place."""
    found = b""
    for part, size in zip(parts, whole, strict=True):
        found += part
        if len(part) < size:
            break
    return found


def _detach(node: Node, successor: Node, num_components: int) -> None:
    """Empty a node that was merged into `successor`."""
    node.parent, node.successor = None, successor
    for c in range(num_components):
        for tier in TIERS:
            entry = node.residency(c, tier)
            entry.pages = entry.node = None
            ids.track(entry)  # an order may still refer to it, and it to the order's record


def revived(node: Node, split: Split) -> Node | None:
    """The node of the tree that ends where `node`, which is not in it, did; None if those pages are gone."""
    at = node
    while at.parent is None:
        successor = at.successor
        if successor is None or (successor.end <= at.start < node.end):
            return None  # the root of a tree that was cleared, or `at` was dropped with its pages
        at = successor
    while at.start >= node.end:
        assert at.parent is not None
        at = at.parent
    return at if at.end == node.end else split(at, node.end - at.start)
