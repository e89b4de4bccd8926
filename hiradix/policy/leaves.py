"""Leaves: what may leave a tier, since nothing in the tree depends on it.

A forecast of evictions changes no tree. It counts what would have left instead: `gone`, children by `id` of
their parent.
"""

from __future__ import annotations

from hiradix.tree import Node, OrderContext
from hiradix.tree.node import Residency


def is_blocked(context: OrderContext, entry: Residency, gone: dict[int, int] | None = None) -> bool:
    """Whether something in the tree depends on the entry, of what is not `gone`. O(1)."""
    node = entry.node
    if not context.backbone or node is None:
        return False
    if context.tier:
        if node.device.pages is not None:
            return False
        count = len(node.children)
    else:
        count = node.num_device_children
    return count > (0 if gone is None else gone.get(id(node), 0))


def exposed_parent(context: OrderContext, node: Node, gone: dict[int, int]) -> Residency | None:
    """Counts `node` as gone; its parent's entry, if that is a leaf then. O(1)."""
    parent = node.parent
    if not context.backbone or parent is None or parent.parent is None:
        return None
    gone[id(parent)] = gone.get(id(parent), 0) + 1
    above = parent.residency(0, context.tier)
    return None if is_blocked(context, above, gone) else above
