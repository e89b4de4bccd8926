"""What one may ask a tree without changing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import SupportsIndex

import numpy as np

from hiradix.errors import Misuse
from hiradix.tree import ids, removal, rows
from hiradix.tree.hashing import PageRows
from hiradix.tree.key import RadixKey
from hiradix.tree.merge import revived
from hiradix.tree.native import AtEnd
from hiradix.tree.node import (
    BACKBONE,
    DEVICE,
    HOST,
    NO_PAGES,
    TIERS,
    UNBOUNDED,
    Component,
    Node,
    Pages,
    Rules,
    Tier,
)
from hiradix.tree.order import OrderFactory
from hiradix.tree.records import Match, Segment
from hiradix.tree.render import render_tree
from hiradix.tree.runs import walk
from hiradix.tree.store import Store


class TreeView:
    """The reading half of `RadixTree`: nothing here changes what the tree holds (a node may be split)."""

    def __init__(self, page_size: int, components: Sequence[Component], order: OrderFactory, rules: Rules):
        if page_size <= 0:
            raise Misuse(f"page_size is {page_size}")
        if components[BACKBONE].reach != UNBOUNDED or not components[BACKBONE].per_page:
            raise Misuse(f"the first component must be the backbone, every page its own data: {components}")
        self.page_size = page_size
        self.components = tuple(components)
        self.order_factory = order
        self._store = Store(components, page_size, order, rules)
        self.root = self._make_root()
        self._end = AtEnd(removal.let_go, self.root)

    def _make_root(self) -> Node:
        root = Node(None, 0, 0, len(self.components) - 1)
        root.untrack()
        for tier in TIERS:
            for c in range(len(self.components)):
                root.residency(c, tier).pages = NO_PAGES
        return root

    def _split(self, node: Node, at: int) -> Node:
        raise NotImplementedError

    # -- paths ------------------------------------------------------------------------------

    def current(self, node: Node) -> Node | None:
        """The node in the tree that ends where `node` does: itself, or cut out again if it was merged away.

        None if it has left the tree. All methods that take a node go through this, so a node stays good
        for as long as its pages are there.
        """
        if node.parent is not None or node is self.root:
            return node
        return revived(node, self._split)

    def _in_tree(self, node: Node) -> Node:
        at = self.current(node)
        if at is None:
            raise Misuse(f"{node} has left the tree")
        return at

    def path(self, node: Node, floor: int = 0) -> Iterator[Node]:
        """Nodes from `node` up that start at page `floor` or later, deepest first, without the root.

        A node that reaches over `floor` is split there first. A node that has left the tree has no path.
        """
        at = self.current(node)
        while at is not None and at.parent is not None and at.end > floor:
            if at.start < floor:
                self._split(at, floor - at.start)
            yield at
            at = at.parent

    def cut(self, node: Node, page: SupportsIndex) -> None:
        """Have a node of the path of `node` begin at `page`."""
        for _ in self.path(node, index(page)):
            pass

    def floor(self, node: Node, component: int) -> int:
        """The page from which on `component` is needed for a boundary at `node`."""
        kind = self.components[component]
        if kind.reach == UNBOUNDED:
            return 0
        at = self._in_tree(node)
        if not kind.per_page:
            return at.start
        if self._store.grain.by_need:
            return max(0, at.end - kind.reach)
        while at.start > 0 and node.end - at.start < kind.reach:
            assert at.parent is not None
            at = at.parent
        return at.start

    def boundaries(self, deepest: Node) -> Match:
        """The deepest boundaries at or above `deepest` that are usable. O(path)."""
        device_node = loadable_node = self.root
        reaches = [component.reach for component in self.components]
        device_run = [UNBOUNDED] * len(reaches)  # unbroken pages behind the cursor, per component
        loadable_run = list(device_run)
        for node in reversed(list(self.path(deepest))):
            for c in range(len(reaches)):
                on_device, on_host = node.resident(DEVICE, c), node.resident(HOST, c)
                device_run[c] = extended(device_run[c], node, on_device)
                loadable_run[c] = extended(loadable_run[c], node, on_device or on_host)
            if all(run >= reach for run, reach in zip(device_run, reaches)):
                device_node = node
            if all(run >= reach for run, reach in zip(loadable_run, reaches)):
                loadable_node = node
        return Match(device_node, loadable_node)

    def find(self, key: RadixKey) -> Node:
        """The deepest node that lies on `key` whole, whatever it holds and wherever."""
        return walk(self.root, key, len(key) // self.page_size, self.page_size)[0]

    def pages(
        self, node: Node, tier: Tier, start: SupportsIndex = 0, component: int = BACKBONE
    ) -> Pages:
        """Page ids int32 [node.end - start] of the path from page `start` to the end of `node`.

        All of them must be resident in `tier`. May be a view of the tree's own: do not write into it.
        """
        parts, first = [], index(start)
        at: Node | None = self._in_tree(node)
        while at is not None and at.end > first:
            entry = at.residency(component, tier) if component else at.host if tier else at.device
            pages = entry.pages
            if pages is None:
                raise Misuse(f"component {component} of {at} is not in {tier.name}")
            parts.append(pages if at.start >= first else pages[first - at.start :])
            at = at.parent
        if len(parts) == 1:
            return parts[0]
        parts.reverse()
        return ids.joined(parts)

    def all_pages(self, tier: Tier, component: int = BACKBONE) -> Pages:
        """Every page id of `component` in `tier`. O(tree)."""
        entries = (n.residency(component, tier).pages for n in self.nodes())
        return np.concatenate([NO_PAGES, *(pages for pages in entries if pages is not None)])

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def absent_from(self, node: Node, tier: Tier) -> int:
        """The page from which on the path of `node` has no backbone in `tier`. O(what is absent)."""
        at = self._in_tree(node)
        while (at.host if tier else at.device).pages is None:
            if at.parent is None:
                raise Misuse("the root is everywhere")
            at = at.parent
        return at.end

    def missing(self, node: Node, source: Tier, target: Tier) -> list[Segment]:
        """What to copy from `source` so that `node` is usable in `target`; per component, root first.

        Splits do not invalidate segments: give their pages to `adopt` by the node they end in.
        """
        segments: list[Segment] = []
        for c in range(len(self.components)):
            found = []
            for n in self.path(node, self.floor(node, c)):
                pages = n.residency(c, source).pages
                if c == BACKBONE and target == DEVICE and n.resident(target):
                    break  # and so are all above
                if pages is not None and not n.resident(target, c):
                    found.append(Segment(n, c, n.start, n.end, pages))
            segments.extend(reversed(found))
        return segments

    def evictable_pages(self, tier: Tier, component: int = BACKBONE) -> int:
        """Pages nothing locks. O(1)."""
        return self._store.orders[component][tier].num_pages

    def resident_pages(self, tier: Tier, component: int = BACKBONE) -> int:
        """Pages in the tree. O(1)."""
        return self._store.num_resident[component][tier]

    def protected_pages(self, tier: Tier, component: int = BACKBONE) -> int:
        """Pages something locks. O(1)."""
        return self.resident_pages(tier, component) - self.evictable_pages(tier, component)

    # -- hashes -----------------------------------------------------------------------------

    def page_rows(self, node: Node, start: SupportsIndex) -> PageRows:
        """Copied rows of the path's pages [s, node.end): s <= start, the last with a known prior."""
        return rows.page_rows(self._in_tree(node), index(start), self.page_size)

    def rows(self, key: RadixKey, node: Node, start: int, end: int) -> PageRows:
        """Copied rows of `key`'s pages [s, end); `node` is on its path and ends at or behind `start`.

        s <= start is the last page whose prior is known from the path of `node`.
        """
        return rows.key_rows(key, self._in_tree(node), (start, end), self.page_size)

    def rows_behind(self, key: RadixKey, prior: bytes, start: int, end: int) -> PageRows:
        """Copied rows of `key`'s pages [start, end); `prior` is the digest of the page before them."""
        return rows.rows_behind(key, prior, (start, end), self.page_size)

    def hashes(self, node: Node) -> list[bytes] | None:
        """The node's own page hashes, or None if they are not all known."""
        return rows.hashes(self._in_tree(node))

    def path_key(self, node: Node) -> RadixKey:
        """The key that `node`'s path spells. A copy."""
        return rows.path_key(self._in_tree(node), self.page_size)

    # -- looking ----------------------------------------------------------------------------

    def render(self) -> str:
        """The tree as text: a line per node with its pages, tiers, locks and hits."""
        return render_tree(self.root, self.components)


def extended(run: int, node: Node, present: bool) -> int:
    """A run of unbroken pages on the way down, counted up to UNBOUNDED, behind `node`, present or not."""
    return min(run + node.num_pages, UNBOUNDED) if present else 0
