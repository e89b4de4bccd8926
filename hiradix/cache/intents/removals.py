"""The removals under way: the keys that each covers, and the nodes of the tree that are theirs.

From when a removal begins until it ends nothing that it covers is matched, entered or fetched, so it comes to an
end however many ask for it. Requests that ran when it began put nothing of it back later either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from hiradix.intents import Selector, SelectorKind
from hiradix.tree import Match, Node, RadixKey, RadixTree

MAX_PAST: Final = 1024  # removals that have ended and that requests which still run must hear of
MAX_PAST_TOKENS: Final = 1 << 22  # of their prefixes


class Branch(NamedTuple):
    """All keys that share more than the first `cut` pages with `key`: a prefix, with what continues it and what
    is its own. The pages before are others' too."""

    key: RadixKey
    cut: int

    def covers(self, key: RadixKey, page_size: int) -> bool:
        """Whether pages of `key` are among those."""
        end = (self.cut + 1) * page_size
        if len(key) < end or key.space != self.key.space:
            return False
        own, end = self.key, end + key.space.lookahead
        same = bool((own.tokens[:end] == key.tokens[:end]).all())
        return same and own.extras_of(0, self.cut + 1) == key.extras_of(0, self.cut + 1)


def branch_of(tree: RadixTree, key: RadixKey, is_whole: bool) -> Branch:
    """The branch of a prefix of one page at least: its own pages begin where another prompt leaves it, as far as
    the tree knows."""
    num_pages = key.num_pages(tree.page_size)
    return Branch(key, 0 if is_whole else min(_fork(tree, key, num_pages), num_pages - 1))


def _fork(tree: RadixTree, key: RadixKey, num_pages: int) -> int:
    """The page of `key` where the last of the prompts leaves it that do not continue it."""
    node, child, matched = tree.follow(key)
    if node.end + matched < num_pages and node.children:
        return node.end + matched
    at = node.parent if child is None else node
    while at is not None and len(at.children) <= 1:
        at = at.parent
    return 0 if at is None else at.end


class Removal:
    """The range of one wish to forget: some branches, all of a tenant's, or everything.

    number: of removals, since start. wish: the forget that it is of.
    """

    def __init__(
        self, tree: RadixTree, number: int, wish: int, selector: Selector, branches: Sequence[Branch]
    ):
        self.number = number
        self.wish = wish
        self.branches = tuple(branches)
        self._tree = tree
        self._tenant = selector.name if selector.kind is SelectorKind.TENANT else None
        self._space = None
        key = selector.key
        if key is not None and key.num_pages(tree.page_size) == 0:
            self._space = key.space
        self._is_all = selector.kind is SelectorKind.EVERYTHING

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefixes that it keeps."""
        return sum(len(branch.key) for branch in self.branches)

    def covers(self, key: RadixKey) -> bool:
        """Whether pages of `key` are to be forgotten."""
        if self._is_all or self._space == key.space or self._tenant == key.space.tenant:
            return True
        return any(branch.covers(key, self._tree.page_size) for branch in self.branches)

    def tops(self) -> Iterator[Node]:
        """Nodes of the tree that are to be forgotten with all below them. May split."""
        if self.branches:
            for branch in self.branches:
                top = self._top(branch)
                if top is not None:
                    yield top
            return
        for node in list(self._tree.root.children.values()):
            if self._takes(node):
                yield node

    def _top(self, branch: Branch) -> Node | None:
        """The node that begins where the branch's own pages do."""
        tree = self._tree
        head = branch.key.head(branch.cut + 1, tree.page_size)
        node, child, matched = tree.follow(head)
        if child is not None and matched:
            node = child
        if node.end <= branch.cut:
            return None
        if node.start < branch.cut:
            tree.cut(node, branch.cut)
        at = tree.current(node)
        while at is not None and at.start > branch.cut:
            at = at.parent
        return at

    def nodes(self) -> dict[Node, Node]:
        """All nodes of the tree that are to be forgotten, each with the topmost one on its path. May split.
        O(them)."""
        found = {top: top for top in self.tops()}
        left = list(found)
        for node in left:
            for child in node.children.values():
                found[child] = found[node]
                left.append(child)
        return found

    def owns(self, node: Node) -> Node | None:
        """The topmost node on the path of `node` that is to be forgotten; None: none is. O(path)."""
        path = list(self._tree.path(node))
        if not path:
            return None
        if not self.branches:
            return path[-1] if self._takes(path[-1]) else None
        tops = {top for branch in self.branches if (top := self._top(branch)) is not None}
        return next((at for at in reversed(list(self._tree.path(node))) if at in tops), None)

    def _takes(self, top: Node) -> bool:
        """Whether all below a child of the root is to be forgotten."""
        return self._is_all or self._space == top.space or self._tenant == top.space.tenant


class Removals:
    """Removals under way, and those that requests which still run must hear of. number: of all, since start.

    _unknown: the last of those that have ended and are not known any more.
    """

    def __init__(self, tree: RadixTree):
        self.number = 0
        self._tree = tree
        self._open: list[Removal] = []
        self._past: deque[Removal] = deque()
        self._unknown = self._num_past_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def under_way(self) -> tuple[Removal, ...]:
        """Those that have not ended, oldest first."""
        return tuple(self._open)

    def begin(self, wish: int, selector: Selector, branches: Sequence[Branch]) -> Removal:
        """Begin a removal: from here on no match finds anything that it covers."""
        self.number += 1
        removal = Removal(self._tree, self.number, wish, selector, branches)
        self._open.append(removal)
        return removal

    def end(self, removal: Removal) -> None:
        """End a removal: what it covers may be cached again, except by requests that ran when it began."""
        self._open.remove(removal)
        self._past.append(removal)
        self._num_past_tokens += removal.num_tokens
        while len(self._past) > MAX_PAST or self._num_past_tokens > MAX_PAST_TOKENS:
            oldest = self._past.popleft()
            self._num_past_tokens -= oldest.num_tokens
            self._unknown = max(self._unknown, oldest.number)

    def clear(self) -> None:
        """The tree is empty."""
        self._open.clear()

    def usable(self, match: Match) -> Match:
        """`match`, cut above what is being forgotten."""
        for removal in self._open:
            top = removal.owns(match.loadable_node)
            if top is not None and top.parent is not None:
                match = self._tree.boundaries(top.parent)
        return match

    def covering(self, key: RadixKey) -> Removal | None:
        """The first one under way that forgets pages of `key`."""
        return next((removal for removal in self._open if removal.covers(key)), None)

    def cover(self, key: RadixKey) -> bool:
        """Whether pages of `key` are being forgotten."""
        return self.covering(key) is not None

    def cover_since(self, key: RadixKey, number: int) -> bool:
        """Whether they are, or were forgotten by a removal behind that one, or may have been."""
        if self.number == number and not self._open:
            return False
        if number < self._unknown:
            return True
        past = any(removal.number > number and removal.covers(key) for removal in self._past)
        return past or self.cover(key)
