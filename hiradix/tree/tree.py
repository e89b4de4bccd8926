"""A radix tree over pages of tokens: which pages hold which prefix, in which tier.

Token rows and page ids only: no tensors, threads, requests or policy numbers. The tree owns no memory: page ids
that it drops are returned to the caller, who frees them. One thread.

Invariants, checked by `RadixTree.check` under these numbers:
  1. The device backbone residency is a subtree that contains the root; below it every node has host
     backbone data. So a match is a device part, then a host part.
  2. A node exists iff its backbone is resident in some tier.
  3. Other components are resident in a tier only where the backbone is.
  4. A residency is in its eviction order iff it has pages and lock_ref == 0.
  5. The next victim of a backbone order has no device descendants (device) or no children, unless it is
     on the device too (host); in LRU order because an ancestor is hotter than its descendants.
  6. lock_ref is what `locks` says; a lock never loses the only copy of what it covers.
  7. Runs: a child starts where its parent ends, is found by its first row, differs from its siblings
     there, and holds exactly its pages' tokens and ids, in arrays of its own.
  8. num_pages of the orders, num_resident and num_device_children equal what a walk counts.
  9. Known page hashes are those of the path from the root.
  10. A page id is in one place of a component and tier, and `Residencies.places` has those that are in one.
     What enters is held against them, so one page under two prefixes is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, Final, SupportsIndex

import numpy as np

from hiradix.errors import Misuse
from hiradix.tree import ids
from hiradix.tree.check import check_tree, render_tree
from hiradix.tree.hashing import DIGEST_BYTES, PageRows
from hiradix.tree.key import NARROW, RadixKey
from hiradix.tree.locks import pins_of_split
from hiradix.tree.merge import merge_path, revived
from hiradix.tree.native import AtEnd
from hiradix.tree.node import (
    BACKBONE,
    DEVICE,
    FULL,
    HOST,
    NO_PAGES,
    TIERS,
    UNBOUNDED,
    Component,
    DeadLeaf,
    Freed,
    Granularity,
    Ids,
    Insertion,
    Lock,
    Match,
    Node,
    NodePages,
    Pages,
    Residency,
    Rules,
    Tier,
    split_run,
)
from hiradix.tree.order import LruOrder, OrderFactory
from hiradix.tree.page_hashes import known_prior, path_extras, path_tokens, windows
from hiradix.tree.residency import Dropped, Residencies, Watch, Watches
from hiradix.tree.walk import walk

_INT32: Final = np.dtype(np.int32)
_WHOLE_PATH: Final = (0,)
_CLAIMED: Final = (True,)
_GIVEN_BACK: Final[tuple[int, ...]] = ()
_GRANULARITY: Final = Granularity()


class RadixTree:
    """Maps prefixes to pages in device and host tiers. components[0] is the backbone: full attention, every
    page its own data.

    Ownership: page ids that `insert` or `adopt` takes belong to the tree until they come back, exactly once, as
    duplicates or in a `Freed` record. A lock belongs to the caller, who gives it back once. Tokens are copied.

    A node reference stays valid as long as the node's pages are in the tree, whatever is split or merged in
    between: each method that takes a node looks up what has become of it (`current`).

    root: has no pages; its children are the first nodes of all prefixes, of all namespaces.
    _residencies: which pages the nodes have in each tier, the eviction orders, and in `pins` the lock counts.

    >>> tree = RadixTree(page_size=2)
    >>> done = tree.insert(RadixKey([1, 2, 3, 4, 5, 6]), DEVICE, [np.array([7, 8, 9])])  # three pages
    >>> match = tree.match(RadixKey([1, 2, 3, 4, 9, 9]))  # the first two are shared
    >>> tree.pages(match.device_node, DEVICE).tolist()
    [7, 8]
    >>> tree.evict(BACKBONE, DEVICE, 1)  # all three are locked
    []
    >>> tree.unlock(done.lock)
    >>> [freed.pages.tolist() for freed in tree.evict(BACKBONE, DEVICE, 1)]
    [[9]]
    """

    def __init__(
        self, page_size: SupportsIndex, components: Sequence[Component] = (FULL,), *,
        order: OrderFactory = LruOrder, granularity: Granularity = _GRANULARITY,
        dead_leaf: DeadLeaf = DeadLeaf.KEEP,
    ):  # fmt: skip
        self.page_size = index(page_size)
        if self.page_size <= 0:
            raise Misuse(f"page_size is {page_size}")
        if components[BACKBONE].reach != UNBOUNDED or not components[BACKBONE].per_page:
            raise Misuse(f"the first component must be the backbone, every page its own data: {components}")
        self.components = tuple(components)
        self.order_factory = order
        self._residencies = Residencies(components, self.page_size, order, Rules(granularity, dead_leaf))
        self._pins = self._residencies.pins
        self._is_plain = len(components) == 1
        self._created = 0
        self.storage_epoch = 0  # grows with each `forget_stored`
        self.root = self._make_root()
        self._end = AtEnd(_let_go_of_tree, self.root)

    # -- reading ----------------------------------------------------------------------------

    def match(self, key: RadixKey) -> Match:
        """The deepest usable boundaries of `key`'s whole pages. At most splits the node that it ends in.
        O(nodes of the path + bytes compared)."""
        node = self._walk(self.root, key)
        if self._is_plain and node.device.pages is not None:
            return Match(node, node)
        return self.boundaries(node)

    # -- nodes and paths --------------------------------------------------------------------

    def current(self, node: Node) -> Node | None:
        """The node in the tree that ends where `node` does: itself, or cut out again if it was merged away. None
        if it has left the tree."""
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
        """Split the node on the path of `node` that contains `page`, so that a node begins there."""
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
        if self._residencies.granularity.by_need:
            return max(0, at.end - kind.reach)
        while at.start > 0 and node.end - at.start < kind.reach:
            assert at.parent is not None
            at = at.parent
        return at.start

    def boundaries(self, deepest: Node) -> Match:
        """The deepest usable boundaries at or above `deepest`; the root, if that has left the tree.

        O(path); with full attention alone, O(nodes that are not on the device)."""
        if self._is_plain:
            at = node = self.current(deepest) or self.root
            while at.device.pages is None:
                assert at.parent is not None
                at = at.parent
            return Match(at, node)
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
        """The deepest node that lies on `key` as a whole, whatever is resident there."""
        return walk(self.root, key, len(key) // self.page_size, self.page_size)[0]

    def follow(self, key: RadixKey) -> tuple[Node, Node | None, int]:
        """Walk down `key` without splitting or counting a use: the last node that is whole on it; that node's
        child that lies on it in part, or None; and how many pages of that child do."""
        return walk(self.root, key, len(key) // self.page_size, self.page_size)

    def pages(self, node: Node, tier: Tier, start: SupportsIndex = 0, component: int = BACKBONE) -> Pages:
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
        """The page from which on the path of `node` has no backbone in `tier`. O(absent nodes)."""
        at = self._in_tree(node)
        while (at.host if tier else at.device).pages is None:
            if at.parent is None:
                raise Misuse("the root is everywhere")
            at = at.parent
        return at.end

    def missing(self, node: Node, source: Tier, target: Tier) -> list[NodePages]:
        """The pages to copy from `source` so that `node` is usable in `target`; per component, root first.

        Splits do not invalidate the segments: `adopt` takes their pages by the node in which they end.
        """
        segments: list[NodePages] = []
        for c in range(len(self.components)):
            found = []
            for n in self.path(node, self.floor(node, c)):
                pages = n.residency(c, source).pages
                if c == BACKBONE and target == DEVICE and n.resident(target):
                    break  # and so are all above
                if pages is not None and not n.resident(target, c):
                    found.append(NodePages(n, c, n.start, n.end, pages))
            segments.extend(reversed(found))
        return segments

    # -- counts -----------------------------------------------------------------------------

    def evictable_pages(self, tier: Tier, component: int = BACKBONE) -> int:
        """Pages that no lock keeps. O(1)."""
        return self._residencies.orders[component][tier].num_pages

    def resident_pages(self, tier: Tier, component: int = BACKBONE) -> int:
        """Pages in the tree. O(1)."""
        return self._residencies.num_resident[component][tier]

    def protected_pages(self, tier: Tier, component: int = BACKBONE) -> int:
        """Pages that a lock keeps. O(1)."""
        return self.resident_pages(tier, component) - self.evictable_pages(tier, component)

    # -- locking ----------------------------------------------------------------------------

    def lock(self, node: Node, tier: Tier) -> Lock:
        """Keep everything that makes `node` usable in `tier` until `unlock`. O(path not yet locked).

        Data that the path has in the other tier only is kept there: so a HOST lock keeps `node` loadable, and a
        DEVICE lock also keeps host pages that are still to be loaded.
        """
        if node.parent is None:
            node = self._in_tree(node)
        pins = self._pins
        pins.pin(node, tier)
        if self._is_plain:
            return Lock(node, tier, _WHOLE_PATH)
        floors = tuple(self.floor(node, c) for c in range(len(self.components)))
        for c in range(1, len(floors)):
            for n in self.path(node, floors[c]):
                pins.pin_other(n, c, tier)
        return Lock(node, tier, floors)

    def unlock(self, lock: Lock) -> None:
        """Give a lock back; what nothing else locks becomes evictable, as the hottest. Once per lock.

        Nodes of a path that is long and free now may be merged. Locks from before a `clear` are void:
        unlocking them does nothing.
        """
        node, tier, floors = lock.node, lock.tier, lock.floors
        if not floors:
            raise Misuse(f"{lock} is given back twice")
        lock.floors = _GIVEN_BACK
        if not self._is_plain:
            for c in range(1, len(floors)):
                for n in reversed(list(self.path(node, floors[c]))):
                    self._pins.unpin_other(n, c, tier)
        if self._pins.unpin(node, tier) > self._residencies.granularity.long_path:
            merge_path(self._residencies, node)

    # -- writing ----------------------------------------------------------------------------

    def insert(
        self, key: RadixKey, tier: Tier, pages: Sequence[Ids], at: Lock | None = None,
        priority: SupportsIndex | None = None, found: Node | None = None,
    ) -> Insertion:  # fmt: skip
        """Add `key`'s whole pages; pages[c] are component c's ids of the last len(pages[c]) of them.

        at: a lock the caller holds on a prefix of `key`; the walk starts there, so the cost does not depend
            on the prefix's length. It stays the caller's.
        found: the `loadable_node` of a match of `key` just before: what it has walked is not walked again.
        pages[0] must reach back to what the tree has in `tier` (DEVICE) or at all (HOST).
        Where the tree has other pages already, the given ones come back as duplicates; the tree's own pages
        given again are no duplicates. Returns a lock on the whole key. Counts a hit, and `priority` (see
        `prioritise`; None: unknown), on the nodes below `at`. Raises Misuse, with nothing changed, for a page
        that another prefix has, that is named twice or that is not in the pool (see `limit_pages`).
        """
        raised = None if priority is None else index(priority)
        start = at.node if at is not None else self.root
        num_pages = len(key) // self.page_size
        if num_pages < start.end:
            raise Misuse(f"a key of {num_pages} pages continued from page {start.end}")
        same = start.parent is None or start.space is key.space or start.space == key.space
        if not same:
            raise Misuse(f"{key} continued from {start.space}")
        node = self._walk(start, key) if found is None else found
        known = self._refuse_unfit(node, num_pages, tier, pages)
        claimed = self._claimed_all(node, num_pages, known, tier, pages)
        if node.end < num_pages:
            node = self._grow(node, key, num_pages)
        lock = self.lock(node, tier)
        duplicates = [self._adopt(node, c, tier, pages[c], claimed[c]) for c in range(len(pages))]
        first = start.end
        while node.start >= first and node.parent is not None:
            node.hit_count += 1
            if raised is not None:
                _prioritise(node, raised)
            node = node.parent
        return Insertion(lock, duplicates)

    def prioritise(self, lock: Lock, priority: SupportsIndex, start: SupportsIndex = 0) -> None:
        """Note a request's priority on the path that it locks, from page `start` on. A node keeps the largest
        priority of its requests; of a single one, the latest."""
        raised, first = index(priority), index(start)
        at = self.current(lock.node)
        while at is not None and at.end > first:
            _prioritise(at, raised)
            at = at.parent

    def hit(self, node: Node, priority: SupportsIndex = 0) -> None:
        """Count a request that uses the path of `node` (an insert counts only below its `at`)."""
        raised = index(priority)
        at = self.current(node)
        while at is not None and at.parent is not None:
            at.hit_count += 1
            _prioritise(at, raised)
            at = at.parent

    def adopt(self, node: Node, component: int, tier: Tier, pages: Ids) -> Pages:
        """Give `pages`, which end where `node` ends, to it and its ancestors, where they have none in `tier`.

        Returns the ids that were not needed; a node's own ids given again are not among them. Splits a node that
        has none if `pages` begin inside it. Copies the ids, but for an array over its own `bytes` that one node
        takes as a whole. Raises Misuse as `insert` does.
        """
        if not len(pages):
            return NO_PAGES
        if node.parent is None:
            node = self._in_tree(node)
        per_page = self.components[component].per_page
        if not (len(pages) <= node.end and (per_page or len(pages) == 1)):
            raise Misuse(f"{len(pages)} pages end at page {node.end}")
        if component == BACKBONE and tier == DEVICE:
            start, known = node.end - len(pages), self.absent_from(node, tier)
            if start > known:
                raise Misuse(f"device pages from page {start} on; from page {known} on there are none")
        claimed = self._claimed(node, node.end, component, tier, pages)
        return self._adopt(node, component, tier, pages, claimed)

    def _adopt(self, node: Node, component: int, tier: Tier, pages: Ids, claimed: bool) -> Pages:
        """`adopt` after the checks. claimed: `Residencies.places` has all of `pages`; else none of the new
        ones."""
        if not len(pages):
            return NO_PAGES
        residencies, per_page = self._residencies, self.components[component].per_page
        start = node.end - len(pages) if per_page else node.start
        taken, refused = [], []
        at: Node | None = node
        while at is not None and at.end > start:
            entry = at.residency(component, tier) if component else at.host if tier else at.device
            if entry.pages is None and (component == BACKBONE or at.resident(tier)):
                if at.start < start:
                    self._split(at, start - at.start)  # `at` keeps the part that the pages cover
                first, last = (at.start - start, at.end - start) if per_page else (0, 1)
                own = _kept(pages, first, last)
                if not claimed:
                    residencies.places[component][tier].claim(own)
                if residencies.take(at, component, tier, own):
                    taken.append(entry)
            elif entry.pages is not None:
                lo = max(at.start, start)
                given = pages[lo - start : at.end - start] if per_page else pages
                refused.append(given[given != entry.pages[lo - at.start :][: len(given)]])
            else:
                refused.append(pages[max(at.start - start, 0) : at.end - start] if per_page else pages)
            at = at.parent if per_page else None
        if taken:
            residencies.push_taken(taken, component, tier)
        if not refused:
            return NO_PAGES
        parts = [ids.copied(part) for part in refused]
        return parts[0] if len(parts) == 1 else ids.joined(parts)

    def limit_pages(self, component: int, tier: Tier, end: SupportsIndex) -> None:
        """Refuse page ids of a component and tier from `end` on. Call it while the tree is empty."""
        if self.root.children:
            raise Misuse("the pages of a tree are limited from the beginning or not at all")
        self._residencies.places[component][tier].limit(index(end))

    # -- removing ---------------------------------------------------------------------------

    def evict(self, component: int, tier: Tier, num_pages: SupportsIndex) -> list[Freed]:
        """Drop the coldest unlocked data until `num_pages` pages are out, or nothing evictable remains.

        A node leaves as a whole, unless it has many more pages than are wanted (see `Granularity`). Returns
        exactly the pages dropped. With a backbone node go its other components in that tier; with a device node
        that has no host copy, its descendants on the host; and leaves where no match can end any more (see
        `DeadLeaf`).
        """
        residencies, out, missing = self._residencies, Dropped(self._residencies.places), index(num_pages)
        order, per_page = residencies.orders[component][tier], self.components[component].per_page
        waste = residencies.waste[component][tier]
        gone: Node | None = None
        while missing > 0 and (victim := order.coldest()) is not None:
            node = _node_of(victim)
            if per_page:
                if node.end - node.start > waste * missing:
                    node = self._cut_victim(node, component, missing, waste)
                missing -= node.end - node.start
            else:
                missing -= 1
            parent = node.parent
            residencies.drop(node, component, tier, out, gone is not None and gone.parent is node)
            gone = node
            if residencies.dead_leaf is not DeadLeaf.KEEP:
                before = residencies.num_resident[component][tier]
                residencies.drop_dead(node if node.parent is not None else parent, out)
                missing -= before - residencies.num_resident[component][tier]
        return out.freed()

    def coldest(self, component: int, tier: Tier, num_pages: SupportsIndex) -> list[Node]:
        """The nodes that `evict` would take for `num_pages`, first victim first, without dead leaves. Splits the
        last one if it is too big. Drops nothing."""
        wanted = index(num_pages)
        nodes = [_node_of(entry) for entry in self._residencies.orders[component][tier].victims(wanted)]
        if nodes and self.components[component].per_page:
            missing = wanted - sum(node.num_pages for node in nodes[:-1])
            waste = self._residencies.waste[component][tier]
            nodes[-1] = self._cut_victim(nodes[-1], component, missing, waste)
        return nodes

    def _cut_victim(self, node: Node, component: int, wanted: int, waste: int) -> Node:
        """The part of a victim to evict: all of it, unless it has more than `waste` times the pages `wanted`.

        It is halved until it has not, so that evicting a big node bit by bit costs O(1) per page. Of the
        backbone the end is taken, of other components the front.
        """
        keep_front = component == BACKBONE
        while node.num_pages > waste * wanted:
            taken = max(wanted, node.num_pages // 2)
            upper = self._split(node, node.num_pages - taken if keep_front else taken)
            if not keep_front:
                node = upper
        return node

    def drop_other(self, node: Node, component: int, tier: Tier) -> list[Freed]:
        """Drop a further component's data of `node` alone, unless it is locked."""
        at, out = self._in_tree(node), Dropped(self._residencies.places)
        entry = at.residency(component, tier)
        if entry.pages is not None and entry.lock_ref == 0:
            self._residencies.drop(at, component, tier, out)
        return out.freed()

    def demote(self, node: Node) -> list[Freed]:
        """Drop `node`'s device copy if it has a host copy, no child on the device and no lock; else do
        nothing."""
        at, out = self._in_tree(node), Dropped(self._residencies.places)
        is_free = at.parent is not None and at.device.pages is not None and at.device.lock_ref == 0
        if is_free and at.host.pages is not None and at.num_device_children == 0:
            self._residencies.drop(at, BACKBONE, DEVICE, out)
            if self._residencies.dead_leaf is not DeadLeaf.KEEP:
                self._residencies.drop_dead(at, out)
        return out.freed()

    def drop(self, node: Node) -> list[Freed]:
        """Take `node` and its descendants out of the tree. None of them may be locked."""
        out = Dropped(self._residencies.places)
        self._residencies.unlink(self._in_tree(node), out)
        return out.freed()

    def drop_device(self, node: Node) -> list[Freed] | None:
        """Drop the device data of `node` and its descendants; None, with nothing dropped, while any of it is
        locked.

        Nodes with a host copy stay as host nodes, unless an ancestor without one leaves the tree.
        """
        at = self.current(node)
        if at is None or at.parent is None or at.device.pages is None:
            return []
        below = list(_device_subtree(at))
        if any(n.device.lock_ref for n in below):
            return None
        out = Dropped(self._residencies.places)
        for n in reversed(below):
            self._residencies.drop(n, BACKBONE, DEVICE, out)
        return out.freed()

    def drop_own(self, node: Node, tier: Tier) -> list[Freed]:
        """Drop what `node` alone has in `tier`, unless something locks it or is there only by it. Of a device
        node without a host copy, its host-only descendants too."""
        at, out = self.current(node), Dropped(self._residencies.places)
        if at is None or at.parent is None:
            return []
        entry = at.host if tier else at.device
        is_needed = bool(at.children) and at.device.pages is None if tier else at.num_device_children > 0
        if entry.pages is not None and entry.lock_ref == 0 and not is_needed:
            self._residencies.drop(at, BACKBONE, tier, out)
        return out.freed()

    def clear(self) -> list[Freed]:
        """Drop everything, locked or not. Earlier locks and node references are void."""
        out = Dropped(self._residencies.places)
        for node in list(self.nodes()):
            for c in range(len(self.components)):
                for tier in TIERS:
                    entry = node.residency(c, tier)
                    if entry.pages is not None:
                        out.add(c, tier, entry.pages)
            node.let_go()
        self._residencies.reset()
        self.root.let_go()
        self.root = self._end.root = self._make_root()
        if self._residencies.watch is not None:
            self._residencies.watch.cleared()
        return out.freed()

    # -- page hashes ------------------------------------------------------------------------

    def page_rows(self, node: Node, start: SupportsIndex) -> PageRows:
        """The rows to hash for the path's pages [s, node.end), copied. s: the last page up to `start` whose
        preceding hash is known."""
        at = self._in_tree(node)
        first, prior = known_prior(at, index(start))
        space, tokens = at.space, path_tokens(at, first, self.page_size)
        rows = windows(tokens, at.end - first, self.page_size, space)
        whose = space.tenant, space.extra_key
        return PageRows(prior or space.seed, rows, path_extras(at, first), space.is_bigram, first, *whose)

    def rows(self, key: RadixKey, node: Node, start: int, end: int) -> PageRows:
        """The rows to hash for `key`'s pages [s, end), copied. node: on its path, ends at page `start` or later.
        s: the last page up to `start` whose preceding hash is known there."""
        at = self._in_tree(node)
        if not (start <= at.end or at.parent is None):
            raise Misuse(f"pages from {start} on, known up to {at.end}")
        first, prior = known_prior(at, start)
        return self.rows_behind(key, prior or key.space.seed, first, end)

    def rows_behind(self, key: RadixKey, prior: bytes, start: int, end: int) -> PageRows:
        """The rows to hash for `key`'s pages [start, end), copied. prior: the hash of the page before them."""
        size, space = self.page_size, key.space
        tokens = key.tokens[start * size : end * size + space.lookahead]
        rows, extras = windows(tokens, end - start, size, space), key.extras_of(start, end)
        return PageRows(prior, rows, extras, space.is_bigram, start, space.tenant, space.extra_key)

    def set_hashes(self, node: Node, start: SupportsIndex, digests: Sequence[bytes]) -> None:
        """Note the hashes of the path's pages [start, node.end). O(nodes they span)."""
        at, first = self._in_tree(node), index(start)
        if first + len(digests) != at.end:
            raise Misuse(f"{len(digests)} hashes from page {first} to {at.end}")
        while at.parent is not None and at.end > first:
            known = len(at.digests) // DIGEST_BYTES
            if at.start + known >= first:  # else a gap would be left
                given = digests[at.start + known - first : at.end - first]
                at.digests += b"".join(given)
            at = at.parent

    def hashes(self, node: Node) -> list[bytes] | None:
        """The node's own page hashes, or None if they are not all known."""
        at = self._in_tree(node)
        if len(at.digests) < at.num_pages * DIGEST_BYTES:
            return None
        return [at.digests[i : i + DIGEST_BYTES] for i in range(0, len(at.digests), DIGEST_BYTES)]

    def path_key(self, node: Node) -> RadixKey:
        """The key of the path to `node`, with copied tokens."""
        at = self._in_tree(node)
        space = at.space
        return RadixKey(
            path_tokens(at, 0, self.page_size),
            space.extra_key,
            space.is_bigram,
            cache_salt=space.cache_salt,
            page_extras=path_extras(at, 0),
        )

    def forget_stored(self) -> None:
        """Reset all nodes' hints that storage has their pages, and start a new `storage_epoch`. O(tree)."""
        self.storage_epoch += 1
        for node in self.nodes():
            node.stored = node.boundary_stored = False
        if self._residencies.watch is not None:
            self._residencies.watch.storage_changed()

    # -- watching and checking --------------------------------------------------------------

    @property
    def watch(self) -> Watch | None:
        """The observer of pages entering and leaving the tiers, or None. Set it while the tree is empty."""
        return self._residencies.watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        if self.root.children:
            raise Misuse("a tree is watched from the beginning or not at all")
        self._residencies.watch = watch

    def add_watch(self, watch: Watch) -> None:
        """Have one more told. Misuse, unless the tree is empty."""
        before = self.watch
        self.watch = watch if before is None else Watches(before, watch)

    def check(self, locks: Iterable[Lock] | None = None) -> None:
        """Assert the module's invariants. O(tree). locks: all locks not given back, to check the counts
        exactly."""
        covered = None if locks is None else [entry for lock in locks for entry in self._covered(lock)]
        check_tree(self.root, list(self.nodes()), self._residencies, covered)

    def render(self) -> str:
        """The tree as text: a line per node with its pages, tiers, locks and hits."""
        return render_tree(self.root, self.components)

    # -- inside -----------------------------------------------------------------------------

    def _covered(self, lock: Lock) -> Iterator[Residency]:
        """The residencies that count a lock: the backbone's at its node, and those of other components from its
        floor on."""
        for c, floor in enumerate(lock.floors):
            nodes = [lock.node] if c == BACKBONE else self.path(lock.node, floor)
            for node in nodes:
                yield node.residency(c, lock.tier)

    def _make_root(self) -> Node:
        root = Node(None, 0, 0, len(self.components) - 1)
        root.untrack()
        for tier in TIERS:
            for c in range(len(self.components)):
                root.residency(c, tier).pages = NO_PAGES
        return root

    def _walk(self, node: Node, key: RadixKey) -> Node:
        """The deepest node below `node` on `key`; a node that lies on it in part is split."""
        mark = key.bookmark
        if mark.node is not None and node is self.root:
            node = self._resumed(mark.node, key)
        node, child, matched = walk(node, key, len(key) // self.page_size, self.page_size)
        if child is not None:
            node = self._split(child, matched)
        mark.node = node
        return node

    def _resumed(self, marked: Node, key: RadixKey) -> Node:
        """The node where a walk along `key` may start: that of its bookmark, or the root if it is not in this
        tree."""
        at = self.current(marked) if self._is_ours(marked) else None
        while at is not None and at.end > len(key) // self.page_size:
            at = at.parent
        return self.root if at is None else at

    def _is_ours(self, node: Node) -> bool:
        """Whether `node`, or the node that it was merged into, is in this tree. O(path)."""
        above = node.parent or node.successor
        while above is not None:
            node, above = above, above.parent or above.successor
        return node is self.root

    def _refuse_unfit(self, node: Node, end: int, tier: Tier, pages: Sequence[Ids]) -> int:
        """Raise Misuse, before anything changes, unless `pages` fit a key of `end` pages that is in the tree up
        to `node`. Returns the page from which on `tier` has no backbone."""
        for c in range(1, len(pages)):
            most = end if self.components[c].per_page else 1
            if len(pages[c]) > most:
                raise Misuse(f"{len(pages[c])} of component {c} for a key of {end} pages")
        while tier == DEVICE and node.device.pages is None:
            assert node.parent is not None
            node = node.parent
        first = end - len(pages[BACKBONE])
        if not 0 <= first <= node.end:
            raise Misuse(f"pages from {first} to {end} behind those up to {node.end}")
        return node.end

    def _claimed_all(
        self, node: Node, end: int, known: int, tier: Tier, pages: Sequence[Ids]
    ) -> Sequence[bool]:
        """`_claimed` for the pages of each component, all or none. known: from `_refuse_unfit`."""
        if len(pages) == 1 and end - len(pages[BACKBONE]) >= known:
            self._residencies.places[BACKBONE][tier].claim(pages[BACKBONE])
            return _CLAIMED
        claimed: list[bool] = []
        try:
            for c, given in enumerate(pages):
                claimed.append(self._claimed(node, end, c, tier, given))
        except BaseException:  # the C form raises its own errors for values that are no ids
            for c in range(len(claimed)):
                if claimed[c]:
                    self._residencies.places[c][tier].leave(pages[c])
            raise
        return claimed

    def _claimed(self, node: Node, end: int, component: int, tier: Tier, pages: Ids) -> bool:
        """Mark `pages`, which end at page `end` of a key that is in the tree up to `node`, as taken in
        `Residencies.places` if the tree will take all of them; else only check that it may take the new ones.
        Returns whether they were marked. Raises Misuse, with nothing marked.
        """
        if not len(pages):
            return False
        places = self._residencies.places[component][tier]
        per_page = self.components[component].per_page
        start = end - len(pages) if per_page else end - 1
        own: Pages | None = None  # the tree's pages in the place of `pages`; -1: none
        will_take, at = True, node
        while at.parent is not None and at.end > start:
            entry = at.residency(component, tier) if component else at.host if tier else at.device
            found = entry.pages
            if found is not None and not per_page:
                own = found if at.end == end else own
            elif found is not None:
                if own is None:
                    own = np.full(len(pages), -1, np.int32)
                lo = max(at.start, start)
                own[lo - start : at.end - start] = found[lo - at.start :]
            elif component != BACKBONE and not at.resident(tier):
                will_take = False
            at = at.parent
        if own is None:
            places.claim(pages)
            if not will_take:
                places.leave(pages)
            return will_take
        new = pages[(pages != own) | (pages < 0)]  # -1, where the tree has nothing, is no page of its own
        places.claim(new)
        places.leave(new)
        return False

    def _grow(self, parent: Node, key: RadixKey, end: int) -> Node:
        start, size = parent.end, self.page_size
        leaf = Node(parent, start, end, len(self.components) - 1)
        leaf.untrack()
        leaf.run, leaf.width = key.packed(start * size, end * size + key.space.lookahead)
        if key.extras is not None:
            leaf.extras = key.extras_of(start, end)
        leaf.space = parent.space if start else key.space
        leaf.row = key.row(start, size)
        self._created += 1
        leaf.created = self._created
        parent.adopt_child(leaf)
        return leaf

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node`'s first `at` pages off into a new parent, and return that."""
        parent = node.parent
        if parent is None or not 0 < at < node.num_pages:
            raise Misuse(f"{node} cannot be split at page {at}")
        upper = Node(parent, node.start, node.start + at, len(self.components) - 1)
        upper.untrack()
        self._residencies.split(node, upper, at)
        pins_of_split(node, upper, len(self.components))
        split_run(node, upper, self.page_size)
        upper.space, upper.note, upper.chain = node.space, node.note, node.chain
        upper.hit_count, upper.priority = node.hit_count, node.priority
        upper.created, upper.stored = node.created, node.stored
        upper.num_device_children = int(node.device.pages is not None)
        upper.adopt_child(node)
        parent.adopt_child(upper)
        node.parent = upper
        self._residencies.link_split(node, upper)
        return upper


def _prioritise(node: Node, priority: int) -> None:
    if priority > node.priority or node.hit_count <= 1:
        node.priority = priority


def _kept(pages: Ids, first: int, last: int) -> Pages:
    """Ids [first, last) in an array that nobody else writes to and that keeps no larger one alive."""
    under: Any = pages.base
    if type(under) is bytes and pages.dtype is _INT32 and (last - first) * NARROW == len(under):
        return pages  # type: ignore[return-value]
    return ids.copied(pages, first, last)


def extended(run: int, node: Node, present: bool) -> int:
    """The length of the unbroken run that ends with `node`, UNBOUNDED at most, where `run` led to it."""
    return min(run + node.num_pages, UNBOUNDED) if present else 0


def _node_of(entry: Residency) -> Node:
    if entry.node is None:
        raise Misuse("an entry of no node is in an order")
    return entry.node


def _device_subtree(node: Node) -> Iterator[Node]:
    """`node` and its descendants on the device, parents first."""
    stack = [node]
    while stack:
        at = stack.pop()
        yield at
        stack.extend(child for child in at.children.values() if child.device.pages is not None)


def _let_go_of_tree(root: Node) -> None:
    """Break the reference cycles of a tree that nobody refers to: its nodes are untracked, so the garbage
    collector does not. O(tree)."""
    stack = [root]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        node.let_go()
