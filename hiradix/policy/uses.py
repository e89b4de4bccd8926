"""Uses: what a request that has ended says about the nodes of its path, with ghosts.

A policy with a memory needs to know, of each node, when it was last used, by whom and how; and of what has
left the cache, that it comes back. `UseLog` keeps that: a note on each node, ghosts for what has gone.
Subclasses say which class of data a note is in.
"""

from __future__ import annotations

from collections.abc import Iterator

from hiradix.errors import Misuse
from hiradix.policy.ghosts import BLOCK_TOKENS, EMPTY, BlockNames, Ghosts, extend
from hiradix.tree import Node, OrderContext, RadixKey, RadixTree, Tier
from hiradix.tree.native import mypyc_attr
from hiradix.tree.node import Residency

HINTS = ("end_of_session", "keep_alive")
STOPS = ("tool_use", "end_turn", "length", "abort")
MIN_GHOSTS = 1 << 16  # blocks
GHOSTS_PER_BLOCK = 4


def known_hint(hint: str) -> str:
    """`hint` itself; ValueError where it is none of `HINTS`."""
    if hint not in HINTS:
        raise ValueError(f"hint: {hint!r} is not one of {', '.join(HINTS)}")
    return hint


@mypyc_attr(acyclic=True)
class Finished:
    """A request at its end, as policies learn from it.

    hint: one of `HINTS`, or None. session: the client's name of the session it belongs to; stop: why its answer
    ended, of `STOPS`; both "" where nobody knows, and other text counts as unknown. ValueError for other hints,
    TypeError for what is no text.
    """

    __slots__ = ("prompt_tokens", "output_tokens", "hint", "session", "stop")

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        hint: str | None = None,
        session: str = "",
        stop: str = "",
    ):
        if not (isinstance(session, str) and isinstance(stop, str)):
            raise TypeError(f"session and stop must be text, got {session!r:.64} and {stop!r:.64}")
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.hint = None if hint is None else known_hint(hint)
        self.session = session
        self.stop = stop

    def unhinted(self) -> Finished:
        """The same without its hint."""
        return Finished(self.prompt_tokens, self.output_tokens, None, self.session, self.stop)


@mypyc_attr(acyclic=True)
class RequestUse:
    """One request. talk: its conversation's number; turn: which of that; pages: of its prompt; blocks: of its
    whole path."""

    __slots__ = ("talk", "turn", "pages", "blocks")

    def __init__(self, talk: int, turn: int, pages: int, blocks: BlockNames):
        self.talk = talk
        self.turn = turn
        self.pages = pages
        self.blocks = blocks


@mypyc_attr(acyclic=True)
class LastUse:
    """A node's last use. Immutable, and one object for all alike nodes of a path, so that they may merge.

    clock: when, in tokens of traffic. visits: requests that came by without continuing a conversation.
    num_pages: of all that was used so. segment: the policy's.
    """

    __slots__ = ("use", "clock", "class_id", "visits", "num_pages", "segment")

    def __init__(self, use: RequestUse, clock: int, class_id: int, visits: int):
        self.use = use
        self.clock = clock
        self.class_id = class_id
        self.visits = visits
        self.num_pages = 0
        self.segment = -1


Stretch = tuple[int, LastUse | None]  # pages of a path up to the first, last used together; None: not known


class UseLog:
    """Notes and ghosts of one cache. page_tokens: tokens a page stands for. Scheduler thread only.

    clock: of traffic so far, see `passes`. ghosts: the notes of what has left, by the names of
    its blocks. A note of what is cached is its node's (`Node.note`).
    """

    def __init__(self, page_size: int, page_tokens: int):
        self.page_size = page_size
        self.page_tokens = page_tokens
        self.pages_per_block = max(1, BLOCK_TOKENS // page_tokens)
        self.clock = 0
        self._talks = 0
        self.ghosts: Ghosts[LastUse] = Ghosts(MIN_GHOSTS)
        self._made: set[tuple[str, Tier]] = set()

    # -- what subclasses say ----------------------------------------------------------------

    shared_from = 0  # visits from which on `class_of` is asked; what fewer came by is in the request's own

    def passes(self, talk: int, request: Finished) -> int:
        """The number of ticks, at least 0, by which a request of conversation number `talk` moves the clock
        on."""
        return request.prompt_tokens + request.output_tokens

    def own_class(
        self, talk: int, turn: int, away: int, num_known: int, request: Finished, key: RadixKey
    ) -> int:
        """The class of what a request uses alone. talk: its conversation's number, of which it is turn
        `turn`. num_known: its leading pages that are cached or ghosts. away: on the clock, since the last use of
        the deepest of them, 0 where there are none."""
        return 0

    def class_of(self, own: int, visits: int, gap: int | None) -> int:
        """The class of data used `gap` tokens after its last use (None: never before). own: `own_class`."""
        return own

    def was_used(self, note: LastUse, gap: int, num_pages: int) -> None:
        """A request has used these pages again, `gap` tokens after `note`; before `was_noted` of it."""

    def was_noted(self, notes: list[LastUse]) -> None:
        """A request's new notes."""

    def was_forgotten(self, note: LastUse, num_pages: int) -> None:
        """The next use of these pages will not be seen."""

    def settle(self) -> None:
        """Somebody is about to choose who leaves."""

    def make_way(self, tier: Tier, node: Node | None) -> None:
        """Say that evictions from `tier` from here on are for `node`, so that only pages worth less may
        leave; None ends this."""

    # -- a request ends ---------------------------------------------------------------------

    def finished(self, tree: RadixTree, node: Node, key: RadixKey, request: Finished) -> None:
        """A request whose path ends at `node`, still locked, has ended. Once per request.

        O(nodes of the path) + about 2 us per 512 tokens that were not on it. May split nodes.
        """
        prompt_tokens = request.prompt_tokens
        nodes, stretches = _known(tree, node)
        num_known, talk, turn, step, blocks, last = 0, 0, 0, 1, EMPTY, -1
        if stretches:
            num_known, owner = stretches[-1]
            blocks = owner.use.blocks  # type: ignore[union-attr]
        blocks = self._extended(blocks, num_known, node.end, key)
        has_ghosts = bool(self.ghosts) and self._revive(blocks, num_known, stretches)
        if stretches:
            num_known, owner = stretches[-1]
            if owner is None:
                raise Misuse("what is known has a note")
            last = owner.clock
            if num_known >= max(2, owner.use.pages - 1):
                talk, turn, step = owner.use.talk, owner.use.turn + 1, 0
        if not turn:
            talk = self._talks = self._talks + 1
        self.clock += self.passes(talk, request)
        away = self.clock - last if last >= 0 else 0
        own = 0
        if num_known < node.end:
            stretches.append((node.end, None))
            own = self.own_class(talk, turn, away, num_known, request, key)
        elif any(old.visits + step < 2 for _, old in stretches if old is not None):
            # otherwise nothing would be in it, and a class that nothing is in is not made
            own = self.own_class(talk, turn, away, num_known, request, key)
        use = RequestUse(talk, turn, -(-prompt_tokens // self.page_tokens), blocks)
        noted = self._noted(use, stretches, own, step)
        if has_ghosts:
            nodes = _cut(tree, nodes, noted)
        _write(nodes, noted)

    def _extended(self, blocks: BlockNames, num_known: int, end: int, key: RadixKey) -> BlockNames:
        """Block names of `key` up to page `end`. blocks: those of its first `num_known` pages, at least."""
        size = self.pages_per_block
        known, wanted = num_known // size, end // size
        if known < blocks.num_blocks:
            blocks = blocks.head(known)
        return extend(blocks, key, wanted, self.page_size, size) if wanted > blocks.num_blocks else blocks

    def _revive(self, blocks: BlockNames, num_known: int, stretches: list[Stretch]) -> bool:
        """Add to `stretches` what of a path follows its first `num_known` pages and is a ghost, one no more;
        whether there is any."""
        size = self.pages_per_block
        before = len(stretches)
        names = blocks.names(num_known // size, blocks.num_blocks)
        for block, name in enumerate(names, num_known // size + 1):
            note = self.ghosts.pop(name)
            if note is None:
                break
            if len(stretches) > before and stretches[-1][1] is note:
                stretches.pop()
            stretches.append((block * size, note))
        return len(stretches) > before

    def _noted(
        self, use: RequestUse, stretches: list[Stretch], own: int, step: int
    ) -> list[tuple[int, LastUse]]:
        """The path's new notes, counting the uses of the old; alike neighbours are one. step: of visits."""
        clock, shared_from = self.clock, self.shared_from
        made: list[LastUse] = []
        noted: list[tuple[int, LastUse]] = []
        start, last = 0, None
        for end, old in stretches:
            visits, gap = step, None
            if old is not None:
                visits, gap = old.visits + step, clock - old.clock
                self.was_used(old, gap, end - start)
            class_id = own if visits < shared_from else self.class_of(own, visits, gap)
            for note in made:
                if note.visits == visits and note.class_id == class_id:
                    break
            else:
                note = LastUse(use, clock, class_id, visits)
                made.append(note)
            note.num_pages += end - start
            if note is last:
                noted.pop()
            noted.append((end, note))
            start, last = end, note
        self.was_noted(made)
        return noted

    # -- data leaves ------------------------------------------------------------------------

    def left(self, entry: Residency) -> None:
        """`entry` leaves its tier: a ghost stays of what is in no other."""
        node = entry.node
        assert node is not None
        note: LastUse | None = node.note
        if note is None or (node.device if entry is node.host else node.host).pages is not None:
            return
        size = self.pages_per_block
        first, last = node.start // size, node.end // size
        unnamed = node.num_pages
        for name in note.use.blocks.names(first, last):
            unnamed -= size
            lost = self.ghosts.add(name, note)
            if lost is not None:
                self.was_forgotten(lost, size)
        if unnamed > 0:
            self.was_forgotten(note, unnamed)

    def forget_node(self, node: Node) -> None:
        """`node` has left the cache, and is to be forgotten: no ghost stays of it."""
        note: LastUse | None = node.note
        if note is not None:
            size = self.pages_per_block
            self._forget_blocks(note.use.blocks.names(node.start // size, node.end // size))

    def forget_behind(self, key: RadixKey, page: int) -> None:
        """No ghost stays of the pages of `key` from `page` on."""
        size = self.pages_per_block
        num_blocks = key.num_pages(self.page_size) // size
        blocks = extend(EMPTY, key, num_blocks, self.page_size, size)
        self._forget_blocks(blocks.names(page // size, num_blocks))

    def _forget_blocks(self, names: list[bytes]) -> None:
        for name in names:
            lost = self.ghosts.pop(name)
            if lost is not None:
                self.was_forgotten(lost, self.pages_per_block)

    @property
    def pages_remembered(self) -> int:
        """Pages that a cache may hold before it may have more ghosts than at first."""
        return MIN_GHOSTS * self.pages_per_block // GHOSTS_PER_BLOCK

    def grow(self, num_pages: int) -> None:
        """The cache holds `num_pages`: it may remember four times as much."""
        limit = GHOSTS_PER_BLOCK * num_pages // self.pages_per_block
        if limit > self.ghosts.limit:
            self.ghosts.limit = limit

    def hint(self, nodes: Iterator[Node], hint: str) -> None:
        """A client says `hint` of the conversation whose path these are."""

    def hint_prefix(self, tree: RadixTree, key: RadixKey, hint: str) -> int:
        """The same of what the cache has of `key`: its pages."""
        node = tree.match(key).loadable_node
        self.hint(tree.path(node), hint)
        return node.end

    def order_made(self, context: OrderContext) -> None:
        """An order is being made; one that was there already means that the tree was cleared."""
        what = (context.component.name, context.tier)
        if what in self._made:
            self._made.clear()
            self.forget()
        self._made.add(what)

    def forget(self) -> None:
        """The cache was emptied."""
        self.ghosts.clear()


class SecondUse(UseLog):
    """Two classes: 1 for nodes that were used before, cached or as ghosts; 0 for all others."""

    def class_of(self, own: int, visits: int, gap: int | None) -> int:
        return int(gap is not None)


def _known(tree: RadixTree, node: Node) -> tuple[list[Node], list[Stretch]]:
    """The path of `node`, deepest first; and those of its nodes that have notes as stretches, root first."""
    nodes: list[Node] = []
    found: list[Stretch] = []
    last: LastUse | None = None
    at = tree.current(node)
    while at is not None and at.parent is not None:
        nodes.append(at)
        note: LastUse | None = at.note
        if note is not last and note is not None:
            last = note
            found.append((at.end, note))
        at = at.parent
    found.reverse()
    return nodes, found


def _cut(tree: RadixTree, nodes: list[Node], noted: list[tuple[int, LastUse]]) -> list[Node]:
    """Cut the nodes of a path that reach over the end of a note; the path, deepest first."""
    ends = {node.end for node in nodes}
    for end, _ in noted:
        if end not in ends:
            tree.cut(nodes[0], end)
    return list(tree.path(nodes[0]))


def _write(nodes: list[Node], noted: list[tuple[int, LastUse]]) -> None:
    """Put the notes on the nodes, which come deepest first."""
    at = len(noted) - 1
    if at == 0:
        only = noted[0][1]
        for node in nodes:
            node.note = only
        return
    for node in nodes:
        while at and noted[at - 1][0] >= node.end:
            at -= 1
        node.note = noted[at][1]
