"""Nodes of the tree, what they hold in each tier, and the records that cross the tree's boundary.

Data only; the rules are in the other files. Page arrays may be views: never write into one.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hiradix.errors import Misuse
from hiradix.tree import ids
from hiradix.tree.key import NARROW, PLAIN, Extras, Namespace, packed, unpacked

Pages = npt.NDArray[np.int32]
Ids = npt.NDArray[np.integer[Any]]  # page ids as a caller may have them
NO_PAGES: Final[Pages] = np.empty(0, np.int32)
NO_PAGES.flags.writeable = False
UNBOUNDED: Final = sys.maxsize
WASTE: Final = 4  # see `Granularity`
BACKBONE: Final = 0  # index of the component that every node has
NAME_BYTES: Final = 8  # of a page's name, see `Node.names`


class Tier(IntEnum):
    """A tier of the tree. Storage is none of them: it is shared with others and evicts on its own."""

    DEVICE = 0
    HOST = 1


DEVICE: Final = Tier.DEVICE  # looking up an enum's member takes long
HOST: Final = Tier.HOST
TIERS: Final = (DEVICE, HOST)


@dataclass(frozen=True)
class Granularity:
    """The coarseness of nodes, and which pages are evicted before the policy is asked.

    long_path: how many nodes an unlock must leave unlocked before it merges nodes (see `merge`).
    waste: an eviction takes a node as a whole unless it has more than `waste` times the pages still wanted.
        None: the order's own `waste` (see `EvictionOrder`), else `WASTE`.
    by_need: of a further component, a lock covers just the pages that its boundary needs, not whole nodes, and
        pages that no boundary needs are evicted before those the policy would choose.
    """

    long_path: int = 16
    waste: int | None = None
    by_need: bool = True


class DeadLeaf(Enum):
    """The rule for a leaf at which, after an eviction, no match can end any more.

    KEEP: it stays and ages like all others. BARE: it is dropped if it has no page of some further component
    left, as in SGLang. UNUSABLE: it is dropped whatever the reason.
    """

    KEEP = "keep"
    BARE = "bare"
    UNUSABLE = "unusable"


AS_INSERTED = Granularity(
    sys.maxsize, sys.maxsize, False
)  # never merged, evicted whole, in the policy's order


@dataclass(frozen=True)
class Rules:
    """Settings of a tree: how finely it is split, and what happens to leaves that no match can use."""

    granularity: Granularity = Granularity()
    dead_leaf: DeadLeaf = DeadLeaf.KEEP


@dataclass(frozen=True)
class Component:
    """A kind of per-prefix data, described by how far back a match boundary needs it.

    reach: pages of unbroken data behind a boundary: UNBOUNDED for full attention,
        ceil(window / page_size) for a sliding window, 1 for a recurrent state.
    per_page: whether each page has data of its own; False for a recurrent state, which has one record
        at the end of a node.
    """

    name: str
    reach: int = UNBOUNDED
    per_page: bool = True


FULL = Component("full")


class Residency:
    """One node's pages of one component in one tier, and its place in that tier's eviction order.

    pages: page ids int32 [P], root side first (one record if not per page); None: a tombstone.
    lock_ref: count of the reasons to keep it; above 0 it is not in the eviction order. See `hiradix.tree.locks`.
    hotter, colder, rank: belong to the eviction order.
    """

    __slots__ = ("node", "pages", "lock_ref", "hotter", "colder", "rank")

    def __init__(self, node: Node | None):
        self.node = node
        self.pages: Pages | None = None
        self.lock_ref = 0
        self.hotter: Residency | None = None
        self.colder: Residency | None = None
        self.rank: Any = None


NO_CHILDREN: Final[dict[Hashable, Node]] = {}  # of all nodes that have none: never written


class Node:
    """A run of pages that branches only at its end. Anyone may read the fields; only the tree writes them.

    start, end: its pages are [start, end) of the path. A split gives the front to a new node, so `end` never
        changes.
    row: its key in `parent.children`. parent: None for the root and for a node that left the tree or was merged
        away.
    run: its tokens, (end - start) * S + lookahead of them, packed in `width` (4 or 8) bytes each.
    digests: the known page hashes of its leading pages, 32 bytes each.
    device, host: the backbone's residency; `others`: (device, host) of each further component, flat.
    successor: of a node that is not in the tree any more, the node it was merged into, else its parent (see
        `merge`).
    hit_count: requests that used all of it, the insert that made it included.
    stored: the cache's hint that storage has its pages. boundary_stored: the same of the further components that
        a boundary at its end needs; a split leaves it with the lower half.
    note: the eviction policy's note of the last use. chain: the tree observer's (see `residency.Watch`). Both
        halves of a split share them.
    names: 8-byte names of its leading pages, for whoever remembers what has left the cache.
    """

    __slots__ = (
        "parent", "children", "row", "run", "width", "extras", "space", "start", "end", "digests",
        "device", "host", "others", "num_device_children",
        "hit_count", "priority", "created", "stored", "boundary_stored", "successor", "note", "chain", "names",
    )  # fmt: skip

    def __init__(self, parent: Node | None, start: int, end: int, num_others: int):
        self.parent = parent
        self.children: dict[Hashable, Node] = NO_CHILDREN
        self.row: Hashable = None
        self.run = b""
        self.width = NARROW
        self.extras: Extras | None = None
        self.space: Namespace = PLAIN
        self.start = start
        self.end = end
        self.digests = b""
        self.device = Residency(self)
        self.host = Residency(self)
        self.others = tuple(Residency(self) for _ in range(2 * num_others)) if num_others else ()
        self.num_device_children = 0
        self.hit_count = 0
        self.priority = 0
        self.created = 0
        self.stored = False
        self.boundary_stored = False
        self.successor: Node | None = None
        self.note: Any = None
        self.chain: Any = None
        self.names = b""

    def __repr__(self) -> str:
        return f"Node([{self.start}, {self.end}), children={len(self.children)})"

    @property
    def num_pages(self) -> int:
        return self.end - self.start

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The node's tokens, int32 or int64: a read-only view."""
        return unpacked(self.run, self.width)

    def residency(self, component: int, tier: int) -> Residency:
        """The node's pages of `component` in `tier`, with their lock count and place in the eviction order."""
        if component:
            return self.others[2 * component - 2 + tier]
        return self.host if tier else self.device

    def resident(self, tier: int, component: int = 0) -> bool:
        """Whether the node has pages of `component` in `tier`. True for the root."""
        return self.residency(component, tier).pages is not None

    def adopt_child(self, child: Node) -> None:
        if not self.children:
            self.children = {}
        self.children[child.row] = child
        if ids.IS_BUILT:
            ids.untrack(self.children)

    def untrack(self) -> None:
        """Take it from the garbage collector's list; `let_go`, or leaving the tree, breaks its cycles."""
        if ids.IS_BUILT:
            ids.untrack(self, self.device, self.host)
            if self.others:
                ids.untrack(self.others, *self.others)

    def let_go(self) -> None:
        """Drop all references and pages, when the tree is cleared or deleted."""
        self.parent, self.children = None, NO_CHILDREN
        for entry in (self.device, self.host, *self.others):
            entry.pages = entry.node = entry.hotter = entry.colder = entry.rank = None

    def disown_child(self, child: Node) -> None:
        if self.children[child.row] is not child:
            raise Misuse(f"{child} is no child of {self}")
        if len(self.children) == 1:
            self.children = NO_CHILDREN
        else:
            del self.children[child.row]
        child.parent = None


def row_at(node: Node, page: int, page_size: int) -> Hashable:
    """`RadixKey.row` of page `page` of `node`, counted from its start."""
    if node.start + page <= 0:
        raise Misuse("the first row of all names its namespace, which only a key knows")
    first = page * page_size * node.width
    row: Hashable = node.run[first : first + (page_size + node.space.lookahead) * node.width]
    if node.width != NARROW:
        tokens = unpacked(row, node.width)  # type: ignore[arg-type]
        row = packed(tokens, 0, len(tokens))[0]
    extra = node.extras[page] if node.extras is not None else None
    return row if extra is None else (row, extra)


def split_run(node: Node, upper: Node, page_size: int) -> None:
    """Hand the run of `node` up to `upper.end` to `upper`; both get bytes of their own."""
    at, run = upper.end - upper.start, node.run
    cut = at * page_size * node.width
    upper.row, node.row = node.row, row_at(node, at, page_size)
    upper.run, node.run = run[: cut + node.space.lookahead * node.width], run[cut:]
    upper.width = node.width
    if node.extras is not None:
        upper.extras, node.extras = _some(node.extras[:at]), _some(node.extras[at:])
    upper.digests, node.digests = node.digests[: at * 32], node.digests[at * 32 :]
    upper.names, node.names = node.names[: at * NAME_BYTES], node.names[at * NAME_BYTES :]
    node.start = upper.end


def _some(extras: tuple[bytes | None, ...]) -> tuple[bytes | None, ...] | None:
    return extras if any(extras) else None


# -- records ----------------------------------------------------------------------------


class Match:
    """The result of a match: the nodes at which a key's usable prefix ends. `Node.end` is its length in
    pages. Both may be the root.

    device_node: the deepest boundary usable on the device as it is; loadable_node or an ancestor of it.
    loadable_node: the deepest boundary usable after a load back.
    """

    __slots__ = ("device_node", "loadable_node")

    def __init__(self, device_node: Node, loadable_node: Node):
        self.device_node = device_node
        self.loadable_node = loadable_node

    def __repr__(self) -> str:
        return f"Match({self.device_node}, {self.loadable_node})"


class Lock:
    """A receipt: component c is pinned on every node of `node`'s path that starts at floors[c] or later.

    Give it back exactly once, by `RadixTree.unlock`; it has no floors from then on. Splits in between do not
    matter, as floors are depths in pages.
    """

    __slots__ = ("node", "tier", "floors")

    def __init__(self, node: Node, tier: Tier, floors: tuple[int, ...]):
        self.node = node
        self.tier = tier
        self.floors = floors

    def __repr__(self) -> str:
        return f"Lock({self.node}, {self.tier}, {self.floors})"


class NodePages(NamedTuple):
    """One node's pages of a component that are to be copied: [start, end) in pages from the root.

    pages: source page ids int32 (one record if the component is not per page).
    """

    node: Node
    component: int
    start: int
    end: int
    pages: Pages


class Insertion:
    """The result of an insert.

    lock: on the whole key, in the tier of the insert. The caller gives it back.
    duplicates: per component, the page ids that the tree did not take. The caller frees them.
    """

    __slots__ = ("duplicates", "lock")

    def __init__(self, lock: Lock, duplicates: list[Pages]):
        self.lock = lock
        self.duplicates = duplicates


class Freed:
    """Page ids that the tree has dropped. The caller frees them in `tier`, once, in the order of the records."""

    __slots__ = ("component", "pages", "tier")

    def __init__(self, component: int, tier: Tier, pages: Pages):
        self.component = component
        self.tier = tier
        self.pages = pages

    def __repr__(self) -> str:
        return f"Freed(component {self.component}, {self.tier.name}, {self.pages})"
