"""KVEvents: watches a tree, notes what enters and leaves each tier, and turns these changes into events.

Noting is the scheduler's and costs next to nothing; naming costs a hash per new page and may be done in
another thread (see `Publisher`), in the order of noting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from hiradix.events.chain import Chain, chain_of
from hiradix.events.wire_events import (
    WIRE_NAMES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Medium,
    Naming,
    Token,
)
from hiradix.tree import Node, RadixTree, Tier
from hiradix.tree.key import unpacked


class TierChange(NamedTuple):
    """Pages [start, end) of `chain` have entered or left `medium`; without a chain, everything is gone.

    run, width: what entered, as packed tokens from page `first` on; b"" for what has left.
    """

    medium: int
    chain: Chain | None
    start: int = 0
    end: int = 0
    run: bytes = b""
    width: int = 0
    first: int = 0


_CLEARED = TierChange(-1, None)


def _external() -> Medium:
    return Medium.EXTERNAL


class KVEvents:
    """Watches an empty tree from here on, and turns what enters and leaves its tiers into events.

    storage_medium: what the wire calls the storage tier there is.
    """

    def __init__(
        self,
        tree: RadixTree,
        naming: Naming | None = None,
        storage_medium: Callable[[], Medium] = _external,
    ):
        self.naming = naming or Naming()
        self._storage_medium = storage_medium
        self._tree = tree
        self._changes: list[TierChange] = []
        self._has_named_storage = False
        tree.add_watch(self)

    # -- the scheduler's thread: what the tree tells ------------------------------------------

    def stored(self, node: Node, tier: int) -> None:
        self._changes.append(
            TierChange(
                tier, node.chain or chain_of(node), node.start, node.end, node.run, node.width, node.start
            )
        )

    def removed(self, node: Node, tier: int) -> None:
        """Readers that do not tell media apart forget the blocks: they are told where else they still are."""
        self._changes.append(TierChange(tier, node.chain, node.start, node.end))
        other = 1 - tier
        if (node.host if other else node.device).pages is not None:
            self.stored(node, other)

    def cleared(self) -> None:
        self._changes = [_CLEARED]
        self._has_named_storage = False

    def backed_up(self, node: Node, start: int, end: int) -> None:
        self._has_named_storage = True
        medium = self._storage_medium()
        at: Node | None = self._tree.current(node)
        found = []
        while at is not None and at.parent is not None and at.end > start:
            if at.start < end:
                lo, hi = max(start, at.start), min(end, at.end)
                found.append(TierChange(medium, chain_of(at), lo, hi, at.run, at.width, at.start))
            at = at.parent
        self._changes += reversed(found)

    def storage_changed(self) -> None:
        if self._has_named_storage:
            self.resync()

    def resync(self) -> None:
        """Drop noted events; note a removal of everything, then the tree's present pages as stored. O(tree)."""
        self.cleared()
        for node in self._tree.nodes():
            for tier in reversed(Tier):
                if node.resident(tier):
                    self.stored(node, tier)

    def take_changes(self) -> list[TierChange]:
        """The changes noted since the last call, for `events_of`."""
        changes, self._changes = self._changes, []
        return changes

    def take(self) -> list[Event]:
        """The events since the last call: for an engine that publishes them itself."""
        return self.events_of(self.take_changes()) if self._changes else []

    # -- any one thread -----------------------------------------------------------------------

    def events_of(self, changes: Iterable[TierChange]) -> list[Event]:
        """Changes as events, neighbours joined: pages that follow each other in one medium are one event."""
        events: list[Event] = []
        for change in changes:
            chain = change.chain
            if chain is None:
                events.append(AllBlocksCleared())
                continue
            chain.name(self.naming, self._tree.page_size)
            tail = events[-1] if events else None
            if change.run:
                event = self._stored_event(change, chain)
                if not (isinstance(tail, BlockStored) and _joined(tail, event)):
                    events.append(event)
                continue
            medium, names = WIRE_NAMES[change.medium], chain.names(change.start, change.end)
            if isinstance(tail, BlockRemoved) and tail.medium == medium:
                tail.block_hashes += names
            else:
                events.append(BlockRemoved(names, medium))
        return events

    def _stored_event(self, change: TierChange, chain: Chain) -> BlockStored:
        space, size = chain.space, self._tree.page_size
        tokens = unpacked(change.run, change.width)
        lo, hi = (change.start - change.first) * size, (change.end - change.first) * size
        ids: list[Token] = tokens[lo:hi].tolist()
        if space.is_bigram:
            ids = list(map(tuple, np.stack([tokens[lo:hi], tokens[lo + 1 : hi + 1]], axis=1).tolist()))
        return BlockStored(
            chain.names(change.start, change.end),
            chain.parent_name(change.start),
            ids,
            size,
            WIRE_NAMES[change.medium],
            space.cache_salt,
            self.naming.lora_name(space.extra_key),
        )


def _joined(tail: BlockStored, event: BlockStored) -> bool:
    """Whether `event` was made a part of `tail`: it goes on where that ends, or ends where that begins."""
    if (tail.medium, tail.cache_salt, tail.lora_name) != (event.medium, event.cache_salt, event.lora_name):
        return False
    if event.parent_block_hash == tail.block_hashes[-1]:
        tail.block_hashes += event.block_hashes
        tail.token_ids += event.token_ids
        return True
    if tail.parent_block_hash == event.block_hashes[-1]:
        tail.block_hashes = event.block_hashes + tail.block_hashes
        tail.token_ids = event.token_ids + tail.token_ids
        tail.parent_block_hash = event.parent_block_hash
        return True
    return False
