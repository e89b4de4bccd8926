"""Locks: counts that keep data out of the eviction orders. Locking costs only the part of the path it changes.

    backbone   lock_ref = locks that end at the node + children with lock_ref > 0 + holds
    others     lock_ref = locks that cover the node + holds
    hold       a node locked in one tier that has its pages only in the other holds them there: each of its
               components by itself, and the backbone of that tier with it

So a lock keeps its data in whichever tier that is, a locked node's ancestors are locked, and the walk of a lock
ends at the first ancestor that is locked already.
"""

from __future__ import annotations

from collections.abc import Sequence

from hiradix.errors import Misuse
from hiradix.tree.node import BACKBONE, Node, Residency
from hiradix.tree.order import EvictionOrder

Changed = tuple[list[Residency], list[Residency]]  # per tier: backbone entries, deepest first


def pin_backbone(node: Node, tier: int, no_longer_evictable: Changed) -> None:
    """Add a reason to keep `node`. Entries that this makes unevictable are added to `no_longer_evictable`."""
    found = no_longer_evictable[tier]
    while (parent := node.parent) is not None:
        entry = node.host if tier else node.device
        if entry.lock_ref:
            entry.lock_ref += 1
            return
        entry.lock_ref = 1
        if entry.pages is not None:
            found.append(entry)
        elif (node.device if tier else node.host).pages is not None:
            pin_backbone(node, 1 - tier, no_longer_evictable)
        node = parent


def unpin_backbone(node: Node, tier: int, evictable: Changed) -> None:
    """Undo one `pin_backbone`. Entries that this makes evictable are added to `evictable`."""
    found = evictable[tier]
    while (parent := node.parent) is not None:
        entry = node.host if tier else node.device
        if entry.lock_ref <= 0:
            raise Misuse(f"{node} unlocked once too often in tier {tier}")
        entry.lock_ref -= 1
        if entry.lock_ref:
            return
        if entry.pages is not None:
            found.append(entry)
        elif (node.device if tier else node.host).pages is not None:
            unpin_backbone(node, 1 - tier, evictable)
        node = parent


class Pinning:
    """Applies pins and keeps the orders in step. orders[component][tier]."""

    def __init__(self, orders: Sequence[Sequence[EvictionOrder]]):
        self._orders = orders

    def pin(self, node: Node, tier: int) -> None:
        """Lock the backbone from `node` to the root. O(path not yet locked)."""
        entry = node.host if tier else node.device
        if entry.lock_ref:
            entry.lock_ref += 1
            return
        pinned: Changed = ([], [])
        pin_backbone(node, tier, pinned)
        device, host = pinned
        orders = self._orders[BACKBONE]
        if device:
            orders[0].remove(device)
        if host:
            orders[1].remove(host)

    def unpin(self, node: Node, tier: int) -> int:
        """Undo one `pin`. Returns how many backbone entries became evictable."""
        entry = node.host if tier else node.device
        if entry.lock_ref > 1:
            entry.lock_ref -= 1
            return 0
        unpinned: Changed = ([], [])
        unpin_backbone(node, tier, unpinned)
        device, host = unpinned
        orders = self._orders[BACKBONE]
        if device:
            orders[0].push(device)
        if host:
            orders[1].push(host)
        return len(device) + len(host)

    def pin_other(self, node: Node, component: int, tier: int) -> None:
        """Lock a further component on `node` alone."""
        entry = node.residency(component, tier)
        entry.lock_ref += 1
        if entry.lock_ref > 1:
            return
        if entry.pages is not None:
            self._orders[component][tier].remove((entry,))
        elif node.resident(1 - tier, component):
            self.hold(node, component, 1 - tier)

    def unpin_other(self, node: Node, component: int, tier: int) -> None:
        entry = node.residency(component, tier)
        if entry.lock_ref <= 0:
            raise Misuse(f"component {component} of {node} unlocked once too often in tier {tier}")
        entry.lock_ref -= 1
        if entry.lock_ref:
            return
        if entry.pages is not None:
            self._orders[component][tier].push((entry,))
        elif node.resident(1 - tier, component):
            self.release(node, component, 1 - tier)

    def hold(self, node: Node, component: int, tier: int) -> None:
        """Keep a node's pages in `tier`: they are the only copy of data that is locked in the other tier."""
        if component != BACKBONE:
            entry = node.residency(component, tier)
            entry.lock_ref += 1
            if entry.lock_ref == 1:
                self._orders[component][tier].remove((entry,))
        self.pin(node, tier)

    def release(self, node: Node, component: int, tier: int) -> None:
        """Undo one `hold`: the locked tier has its own copy now, or is no longer locked."""
        if component != BACKBONE:
            entry = node.residency(component, tier)
            if entry.lock_ref <= 0:
                raise Misuse(f"component {component} of {node} released once too often")
            entry.lock_ref -= 1
            if entry.lock_ref == 0:
                self._orders[component][tier].push((entry,))
        self.unpin(node, tier)


def held(node: Node, component: int, tier: int) -> bool:
    """Whether the pages of `component` in `tier` are held for a lock in the other tier."""
    entry, twin = node.residency(component, tier), node.residency(component, 1 - tier)
    return entry.pages is not None and twin.pages is None and twin.lock_ref > 0


def pins_of_split(node: Node, upper: Node, num_components: int) -> None:
    """Set the lock_refs of `upper`, just cut off the front of `node`; all pages are in place.

    A further component's locks cover both parts (floors are node starts, so none lies in between).
    """
    for tier in (0, 1):
        for c in range(1, num_components):
            low = node.residency(c, tier)
            upper.residency(c, tier).lock_ref = low.lock_ref - held(node, c, tier)
    for tier in (0, 1):
        for c in range(1, num_components):
            upper.residency(c, tier).lock_ref += held(upper, c, tier)
        backbone = upper.residency(BACKBONE, tier)
        backbone.lock_ref = int(node.residency(BACKBONE, tier).lock_ref > 0)
        backbone.lock_ref += sum(held(upper, c, tier) for c in range(1, num_components))
    for tier in (0, 1):
        upper.residency(BACKBONE, tier).lock_ref += held(upper, BACKBONE, tier)
