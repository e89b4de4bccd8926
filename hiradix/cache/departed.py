"""Remembers which pages have left the cache, and why: their names in a table of bounded size.

A page is named by an 8-byte chain of hashes from its namespace on (`hiradix.policy.names`); names are made when
pages leave and when somebody asks, and kept on the nodes, so that a page is hashed once. A wrong match, once in
2^64, costs a wrong explanation and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hiradix.explain import Reason
from hiradix.policy.names import name_of, names_of
from hiradix.tree import DEVICE, HOST, Node, RadixKey, RadixTree, Tier
from hiradix.tree.key import NARROW, Extras, Namespace, packed, unpacked
from hiradix.tree.node import NAME_BYTES

WAYS: Final = 8  # places of a bucket
_ENTRY: Final = np.dtype(
    [("name", np.uint64), ("reason", np.uint8), ("tier", np.uint8), ("at_s", np.float32)]
)
MOST_PENDING: Final = 1024  # nodes that have left and are not in the table yet
MOST_FIRST_PAGES: Final = 1 << 14
FIRST_TOKENS: Final = 64  # of a prompt: as long a beginning in another namespace is no chance

Names = npt.NDArray[np.uint64]
_REASONS: Final = tuple(Reason)


class Departure(NamedTuple):
    """The reason why a page left, the tier it was in last, and the time, by the cache's clock."""

    reason: Reason
    tier: Tier
    at_s: float


class DepartureTable:
    """Departures by name: `num_names` of them, in buckets of `WAYS`. A full one forgets what came first.

    Uses `num_bytes`, allocated at once.
    """

    def __init__(self, num_names: int):
        self._num_buckets = max(1, num_names // WAYS)
        self._entries = np.zeros((self._num_buckets, WAYS), _ENTRY)  # a name of 0: nothing
        self._next = np.zeros(self._num_buckets, np.uint8)

    @property
    def num_bytes(self) -> int:
        return self._entries.nbytes + self._next.nbytes

    def add(self, left: Sequence[tuple[bytes, Departure]]) -> None:
        """Pages of these names have left, in this order. One that is here already gets the later departure."""
        names = np.frombuffer(b"".join(names for names, _ in left), np.uint64)
        whose = np.repeat(np.arange(len(left)), [len(names) // NAME_BYTES for names, _ in left])
        unique, last = np.unique(names[::-1], return_index=True)
        why = np.array([(0, _REASONS.index(d.reason), d.tier, d.at_s) for _, d in left], _ENTRY)
        entries = why[whose[::-1][last]]
        entries["name"] = unique
        buckets, there = self._find(unique)
        known = there.any(axis=1)
        self._entries[buckets[known], there[known].argmax(axis=1)] = entries[known]
        entries, buckets = entries[~known], buckets[~known]
        while len(entries):
            _, first = np.unique(buckets, return_index=True)  # one of each bucket at a time
            ways = self._next[buckets[first]]
            self._entries[buckets[first], ways] = entries[first]
            self._next[buckets[first]] = (ways + 1) % WAYS
            entries, buckets = np.delete(entries, first), np.delete(buckets, first)

    def leading(self, names: Names) -> list[Departure]:
        """The departures of the first of `names`, up to one that is not here."""
        buckets, there = self._find(names)
        known = there.any(axis=1)
        count = len(names) if known.all() else int(known.argmin())
        found = self._entries[buckets[:count], there[:count].argmax(axis=1)]
        return [Departure(_REASONS[reason], Tier(tier), at_s) for _, reason, tier, at_s in found.tolist()]

    def _find(self, names: Names) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The bucket of each name, and of each place in it whether that has the name."""
        buckets = (names % np.uint64(self._num_buckets)).astype(np.int64)
        return buckets, self._entries["name"][buckets] == names[:, None]


class Departed:
    """Watches a tree and remembers which pages have left all of its tiers. Scheduler thread only.

    because(reason): why what leaves meanwhile does so; else it is evicted. first_spaces: namespaces that
    beginnings of FIRST_TOKENS are in, by the plain name of their last page.
    """

    def __init__(self, tree: RadixTree, clock: Callable[[], float], num_names: int):
        self.table = DepartureTable(num_names)
        self._tree = tree
        self._clock = clock
        self._reason = Reason.EVICTED
        self._pending: list[tuple[bytes, Departure]] = []
        self._num_first = -(-FIRST_TOKENS // tree.page_size)
        self._first_spaces: dict[bytes, set[Namespace]] = {}
        tree.add_watch(self)

    @contextmanager
    def because(self, reason: Reason) -> Iterator[None]:
        """A context in which all that leaves the tree is noted with this reason."""
        before, self._reason = self._reason, reason
        try:
            yield
        finally:
            self._reason = before

    # -- what the tree says -------------------------------------------------------------

    def stored(self, node: Node, tier: int) -> None:
        if node.start < self._num_first <= node.end:
            self._note_first(node)

    def removed(self, node: Node, tier: int) -> None:
        if node.device.pages is None and node.host.pages is None:
            if node.start < self._num_first <= node.end:
                self._forget_first(node)
            names = self.names(node)
            departure = Departure(self._reason, HOST if tier else DEVICE, self._clock())
            self._pending.append((names, departure))
            if len(self._pending) >= MOST_PENDING:
                self._settle()

    def leaving_all(self, reason: Reason) -> None:
        """The tree is about to be cleared. O(tree)."""
        for node in self._tree.nodes():
            tier = HOST if node.device.pages is None else DEVICE
            self._pending.append((self.names(node), Departure(reason, tier, self._clock())))
        self._settle()

    def cleared(self) -> None:
        self._first_spaces.clear()

    def backed_up(self, node: Node, start: int, end: int) -> None:
        pass

    def storage_changed(self) -> None:
        pass

    # -- questions ----------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self._clock()

    def leading(self, node: Node, key: RadixKey, end: int, skipped: int = 0) -> list[Departure]:
        """Departures of the pages of `key` behind `node`, which is on its way, and `skipped` more, up to page
        `end` or the first that has not left."""
        if end <= node.end + skipped:
            return []
        self._settle()
        prior = self._last_name(node) or _seed(key.space)
        names = page_names(prior, key, node.end, end, self._tree.page_size)
        return self.table.leading(np.frombuffer(names, np.uint64)[skipped:])

    def is_in_other_namespace(self, key: RadixKey) -> bool:
        """Whether the first FIRST_TOKENS of `key`, in whole pages, are in another namespace, and not in its
        own."""
        if key.num_pages(self._tree.page_size) < self._num_first:
            return False
        names = page_names(b"", key, 0, self._num_first, self._tree.page_size)
        spaces = self._first_spaces.get(names[-NAME_BYTES:])
        return bool(spaces) and key.space not in spaces  # type: ignore[operator]

    # -- names --------------------------------------------------------------------------

    def names(self, node: Node) -> bytes:
        """8-byte names of the pages of `node`. Hashes those of its path that nobody has named before."""
        whole = node.num_pages * NAME_BYTES
        if len(node.names) < whole:
            unnamed = []
            at: Node | None = node
            while at is not None and at.end and len(at.names) < at.num_pages * NAME_BYTES:
                unnamed.append(at)
                at = _above(at)
            prior = at.names[-NAME_BYTES:] if at is not None and at.end else b""
            for one in reversed(unnamed):
                one.names = self._named(one, prior)
                prior = one.names[-NAME_BYTES:]
        return node.names

    def _named(self, node: Node, prior: bytes) -> bytes:
        known = len(node.names) // NAME_BYTES
        prior = node.names[-NAME_BYTES:] or prior or _seed(node.space)
        size, space = self._tree.page_size, node.space
        extras = None if node.extras is None else node.extras[known:]
        run = node.run[known * size * node.width :]
        return node.names + names_of_run(prior, run, node.width, extras, space, node.num_pages - known, size)

    def _last_name(self, node: Node) -> bytes:
        return self.names(node)[-NAME_BYTES:] if node.end else b""

    def _first_name(self, node: Node) -> bytes:
        """The plain name of the last of the first pages, which `node` has."""
        size, space, name = self._tree.page_size, node.space, b""
        path: list[Node] = []
        at: Node | None = node
        while at is not None and at.end:
            path.append(at)
            at = _above(at)
        for one in reversed(path):
            count = min(one.end, self._num_first) - one.start
            run = one.run[: (count * size + space.lookahead) * one.width]
            extras = None if one.extras is None else one.extras[:count]
            name = names_of_run(name, run, one.width, extras, space, count, size)[-NAME_BYTES:]
        return name

    def _note_first(self, node: Node) -> None:
        name = self._first_name(node)
        spaces = self._first_spaces.pop(name, None)
        if spaces is None:
            spaces = set()
            if len(self._first_spaces) >= MOST_FIRST_PAGES:
                del self._first_spaces[next(iter(self._first_spaces))]
        if len(spaces) < WAYS:
            spaces.add(node.space)
        self._first_spaces[name] = spaces

    def _forget_first(self, node: Node) -> None:
        name = self._first_name(node)
        spaces = self._first_spaces.get(name)
        if spaces is not None:
            spaces.discard(node.space)
            if not spaces:
                del self._first_spaces[name]

    def _settle(self) -> None:
        """Enter what has left into the table, in order."""
        if self._pending:
            self.table.add(self._pending)
            self._pending = []


def page_names(prior: bytes, key: RadixKey, start: int, end: int, page_size: int) -> bytes:
    """Names of pages [start, end) of `key`, the first behind `prior`."""
    space = key.space
    run, width = key.packed(start * page_size, end * page_size + space.lookahead)
    return names_of_run(prior, run, width, key.extras_of(start, end), space, end - start, page_size)


def names_of_run(
    prior: bytes, run: bytes, width: int, extras: Extras | None, space: Namespace, count: int, page_size: int
) -> bytes:
    """Names of `count` pages whose tokens are `run`, `width` bytes each. Equal tokens have equal names, however
    wide the run that they are in is."""
    step, size = page_size * NARROW, (page_size + space.lookahead) * NARROW
    if width == NARROW and extras is None:
        return names_of(prior, run, count, step, size)
    tokens, names = unpacked(run, width).astype(np.int64), []
    for page in range(count):
        first = page * page_size
        row, row_width = packed(tokens, first, first + page_size + space.lookahead)
        if row_width != NARROW:
            prior = name_of(prior, b"wide", 0, 4)
        extra = extras[page] if extras is not None and page < len(extras) else None
        if extra is not None:
            prior = name_of(prior, extra, 0, len(extra))
        prior = name_of(prior, row, 0, len(row))
        names.append(prior)
    return b"".join(names)


def _above(node: Node) -> Node | None:
    """The node before `node` on its path, also if it has just been cut off."""
    return node.parent if node.parent is not None else node.successor


def _seed(space: Namespace) -> bytes:
    return space.seed + (b"bigram" if space.is_bigram else b"")
