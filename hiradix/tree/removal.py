"""What leaves the tree, and why: evicted, demoted, dropped with what is below it, or cleared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hiradix.errors import Misuse
from hiradix.tree.merge import Split
from hiradix.tree.node import BACKBONE, DEVICE, HOST, TIERS, DeadLeaf, Node, Residency, Tier
from hiradix.tree.records import Freed
from hiradix.tree.store import Dropped, Store


def evict(store: Store, split: Split, component: int, tier: Tier, num_pages: int) -> list[Freed]:
    """See `RadixTree.evict`."""
    order, out, missing = store.orders[component][tier], Dropped(store.places), num_pages
    per_page = store.components[component].per_page
    gone: Node | None = None
    while missing > 0 and (victim := order.coldest()) is not None:
        node = _node(victim)
        if per_page and node.num_pages > store.grain.waste * missing:
            node = _cut(node, split, missing, store.grain.waste, component == BACKBONE)
        missing -= node.num_pages if per_page else 1
        parent = node.parent
        store.drop(node, component, tier, out, gone is not None and gone.parent is node)
        gone = node
        if store.dead_leaf is not DeadLeaf.KEEP:
            before = store.num_resident[component][tier]
            _drop_dead(store, node if node.parent is not None else parent, out)
            missing -= before - store.num_resident[component][tier]
    return out.freed()


def _drop_dead(store: Store, node: Node | None, out: Dropped) -> None:
    """Take `node` out of the tree, and then its parents, as long as they are unlocked leaves and dead."""
    while node is not None and (parent := node.parent) is not None and not node.children:
        entries = (node.device, node.host, *node.others)
        if any(entry.lock_ref for entry in entries) or not _is_dead(store, node):
            return
        store.unlink(node, out)
        node = parent


def _is_dead(store: Store, node: Node) -> bool:
    """Whether the rule says so of a leaf. O(reach)."""
    for c in range(1, len(store.components)):
        reach = store.components[c].reach if store.dead_leaf is DeadLeaf.UNUSABLE else 1
        run, at = 0, node
        while run < reach and at.parent is not None:
            if not at.resident(DEVICE, c) and not at.resident(HOST, c):
                return True
            run, at = run + at.num_pages, at.parent
    return False


def coldest(store: Store, split: Split, component: int, tier: Tier, num_pages: int) -> list[Node]:
    """See `RadixTree.coldest`."""
    nodes = [_node(entry) for entry in store.orders[component][tier].victims(num_pages)]
    if nodes and store.components[component].per_page:
        missing = num_pages - sum(node.num_pages for node in nodes[:-1])
        nodes[-1] = _cut(nodes[-1], split, missing, store.grain.waste, component == BACKBONE)
    return nodes


def _node(entry: Residency) -> Node:
    if entry.node is None:
        raise Misuse("an entry of no node is in an order")
    return entry.node


def _cut(node: Node, split: Split, wanted: int, waste: int, keep_front: bool) -> Node:
    """The part of a victim to take: all of it, unless it has more than `waste` times the pages `wanted`.

    Halved until it has not, so that a big node that goes bit by bit costs O(1) per page. Of the backbone
    the end goes first, of others the front.
    """
    while node.num_pages > waste * wanted:
        taken = max(wanted, node.num_pages // 2)
        upper = split(node, node.num_pages - taken if keep_front else taken)
        if not keep_front:
            node = upper
    return node


def drop_other(store: Store, node: Node, component: int, tier: Tier) -> list[Freed]:
    """See `RadixTree.drop_other`."""
    out = Dropped(store.places)
    entry = node.residency(component, tier)
    if entry.pages is not None and entry.lock_ref == 0:
        store.drop(node, component, tier, out)
    return out.freed()


def demote(store: Store, node: Node) -> list[Freed]:
    """See `RadixTree.demote`."""
    out = Dropped(store.places)
    evictable = node.parent is not None and node.device.pages is not None and node.device.lock_ref == 0
    if evictable and node.host.pages is not None and node.num_device_children == 0:
        store.drop(node, BACKBONE, DEVICE, out)
        if store.dead_leaf is not DeadLeaf.KEEP:
            _drop_dead(store, node, out)
    return out.freed()


def drop(store: Store, node: Node) -> list[Freed]:
    """See `RadixTree.drop`."""
    out = Dropped(store.places)
    store.unlink(node, out)
    return out.freed()


def drop_device(store: Store, node: Node) -> list[Freed] | None:
    """See `RadixTree.drop_device`."""
    if node.parent is None or node.device.pages is None:
        return []
    below = list(_device_subtree(node))
    if any(n.device.lock_ref for n in below):
        return None
    out = Dropped(store.places)
    for n in reversed(below):
        store.drop(n, BACKBONE, DEVICE, out)
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
    out = Dropped(store.places)
    for node in list(nodes):
        for c in range(len(store.components)):
            for tier in TIERS:
                entry = node.residency(c, tier)
                if entry.pages is not None:
                    out.add(c, tier, entry.pages)
        node.let_go()
    store.reset()
    return out.freed()


def let_go(root: Node) -> None:
    """Break the cycles of a tree that nobody has any more, as no garbage collector sees them. O(tree)."""
    stack = [root]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        node.let_go()
