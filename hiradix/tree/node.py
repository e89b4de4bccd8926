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
    """Where pages are. Storage is no tier of the tree: it is shared and forgets on its own."""

    DEVICE = 0
    HOST = 1


DEVICE: Final = Tier.DEVICE  # looking up an enum's member takes long
HOST: Final = Tier.HOST
TIERS: Final = (DEVICE, HOST)


@dataclass(frozen=True)
class Granularity:
    """How coarse nodes may be, and what leaves without asking the policy.

    long_path: nodes an unlock must leave free before it looks for what to merge (see `merge`).
    waste: an eviction takes a node whole unless it holds more than this many times what is still wanted.
        None: as many as the order says (see `EvictionOrder`), `WASTE` where it says nothing.
    by_need: of a further component, a lock covers what its boundary needs, to the page and not to the node,
        and what no boundary needs leaves before what the policy would choose.
    """

    long_path: int = 16
    waste: int | None = None
    by_need: bool = True


class DeadLeaf(Enum):
    """What becomes of a leaf that an eviction leaves behind, where no match can end any more.

    KEEP: nothing, it ages like all others. BARE: it leaves with all its pages if it has lost a further
    component altogether, as in SGLang. UNUSABLE: it leaves whatever the reason.
    """

    KEEP = "keep"
    BARE = "bare"
    UNUSABLE = "unusable"


AS_INSERTED = Granularity(sys.maxsize, sys.maxsize, False)  # never merged; leave whole, as the policy says


@dataclass(frozen=True)
class Rules:
    """Settings of a tree: how finely it is split, and what becomes of leaves without use."""

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
    lock_ref: what keeps it out of the eviction order, see `hiradix.tree.locks`.
    hotter, colder, rank: the eviction order's.
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
    """A run of pages that branches only at its end. Readers may look at everything; only the tree writes.

    start, end: pages before it and up to its end; [start, end) never changes for the end's owner, as a
        split gives the front part to a new node.
    row: its name among `parent.children`. parent is None for the root and for a node that left the tree
        or was merged away.
    run: its tokens, (end - start) * S + lookahead of them, packed in `width` (4 or 8) bytes each.
    digests: page hashes of its leading pages, 32 bytes each; b"" if none is known yet.
    device, host: the backbone's residency; `others`: (device, host) of each further component, flat.
    successor: of a node that left the tree, the one it was merged into, or else its parent (see `merge`).
    hit_count: inserts that passed through it whole, its own included. stored: the cache's hint that
        storage has its pages; boundary_stored: and what a boundary at its end needs of further components,
        which a split leaves with the end. note: the eviction policy's, of the last use; halves of a split
        share it.
    chain: of whoever watches the tree (see `residency.Watch`); halves of a split share it.
    names: 8-byte names of its leading pages, as digests; of whoever remembers what has left the cache.
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
        """Its tokens, int32 or int64: a read-only view."""
        return unpacked(self.run, self.width)

    def residency(self, component: int, tier: int) -> Residency:
        """What the node holds of `component` in `tier`."""
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
        """Have the garbage collector look at it no more: `let_go`, or leaving the tree, breaks its cycles."""
        if ids.IS_BUILT:
            ids.untrack(self, self.device, self.host)
            if self.others:
                ids.untrack(self.others, *self.others)

    def let_go(self) -> None:
        """Refer to no other node, and have no page: of a tree that is cleared or that nobody has any more."""
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
    """What `RadixKey.row` gives for page `page` of `node`, counted from its start."""
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


class Match(NamedTuple):
    """Where a key's usable data ends. device_node is loadable_node or an ancestor of it.

    device_node: the deepest boundary usable on the device as it is. loadable_node: the deepest usable
    after a load back. `Node.end` is their length in pages. Both may be the root.
    """

    device_node: Node
    loadable_node: Node


class Lock:
    """A receipt: component c is pinned on every node of `node`'s path that starts at floors[c] or later.

    Give it back exactly once. Splits between lock and unlock do not matter: floors are depths. One that was
    given back has none.
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
    """What an insert did.

    lock: on the whole key, in the tier of the insert; the caller's to give back.
    duplicates: per component, the page ids the tree did not take: the caller's to free.
    """

    __slots__ = ("duplicates", "lock")

    def __init__(self, lock: Lock, duplicates: list[Pages]):
        self.lock = lock
        self.duplicates = duplicates


class Freed:
    """Page ids the tree gave up; the caller's to free in `tier`, exactly once, in the records' order."""

    __slots__ = ("component", "pages", "tier")

    def __init__(self, component: int, tier: Tier, pages: Pages):
        self.component = component
        self.tier = tier
        self.pages = pages

    def __repr__(self) -> str:
        return f"Freed(component {self.component}, {self.tier.name}, {self.pages})"
