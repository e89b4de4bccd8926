"""What leaves the tree, and why: evicted, demoted, dropped with what is below it, or cleared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hiradix.tree.node import BACKBONE, Node, Tier
from hiradix.tree.records import Freed
from hiradix.tree.store import Dropped, Store


def evict(store: Store, component: int, tier: Tier, num_pages: int) -> list[Freed]:
    """See `RadixTree.evict`."""
    order, out, count = store.orders[component][tier], Dropped(), 0
    while count < num_pages and (victim := order.coldest()) is not None:
        assert victim.node is not None and victim.pages is not None
        count += len(victim.pages)
        store.drop(victim.node, component, tier, out)
    return out.freed()


def demote(store: Store, node: Node) -> list[Freed]:
    """See `RadixTree.demote`."""
    out = Dropped()
    evictable = node.parent is not None and node.device.pages is not None and node.device.lock_ref == 0
    if evictable and node.host.pages is not None and node.num_device_children == 0:
        store.drop(node, BACKBONE, Tier.DEVICE, out)
    return out.freed()


def drop(store: Store, node: Node) -> list[Freed]:
    """See `RadixTree.drop`."""
    out = Dropped()
    store.unlink(node, out)
    return out.freed()


def drop_device(store: Store, node: Node) -> list[Freed] | None:
    """See `RadixTree.drop_device`."""
    if node.parent is None or node.device.pages is None:
        return []
    below = list(_device_subtree(node))
    if any(n.device.lock_ref for n in below):
        return None
    out = Dropped()
    for n in reversed(below):
        store.drop(n, BACKBONE, Tier.DEVICE, out)
    return out.freed()


def _device_subtree(node: Node) -> Iterator[Node]:
    """`node` and its descendants on the device, parents first."""
    stack = [node]
    while stack:
        at = stack.pop()
        yield at
        stack.extend(child for child in at.children.values() if child.device.pages is not None)


def clear(store: Store, nodes: Iterable[Node]) -> list[Freed]:
    """See `RadixTree.clear`."""
    out = Dropped()
    for node in list(nodes):
        node.parent = None
        for c in range(len(store.components)):
            for tier in Tier:
                entry = node.residency(c, tier)
                if entry.pages is not None:
                    out.add(c, tier, entry.pages)
                entry.pages = entry.node = entry.hotter = entry.colder = None
    store.reset()
    return out.freed()
