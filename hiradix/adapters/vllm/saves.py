"""Device to host, the scheduler's half: which blocks, onto which host pages, and when they may be reused.

Blocks belong to vLLM, which frees them when it likes. A save is ordered while its blocks hold what is to be
saved, and stays in `in_flight` until every worker has copied them. Should vLLM hand one of them out again
before that, the step that writes to it carries a fence: its workers wait for that one copy first. So no
request is ever held back from ending, and nothing is read after it was overwritten. A block's bytes are the
same in all KV cache groups, which take turns with it, so a fence asks for the block alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hiradix.adapters.vllm.index import ARRIVING, HostIndex
from hiradix.adapters.vllm.orders import GroupCopy, SaveOrder, Ticket
from hiradix.adapters.vllm.requests import Tracked
from hiradix.errors import Misuse
from hiradix.tree import BACKBONE, Lock, Node, PageRows, Pages, RadixKey, Tier

NULL_BLOCK = 0  # vLLM's id for "no block here": a sliding window has gone past it
BlockTable = Sequence[Sequence[int]]  # block ids of each KV cache group


@dataclass(eq=False)
class InFlightSave:
    """A save that some worker may still be doing. pages: what the tree took, per component."""

    owner: Tracked
    key: RadixKey
    start: int
    lock: Lock
    pages: tuple[Pages, ...]
    copies: tuple[GroupCopy, ...]
    is_stored: bool  # goes on to storage
    hashes: Sequence[bytes] = ()


@dataclass
class SaveTracker:
    """All saves under way, and the device blocks they read."""

    index: HostIndex
    groups: Sequence[int]  # KV cache group of each component
    in_flight: dict[Ticket, InFlightSave] = field(default_factory=dict)
    reading: dict[int, Ticket] = field(default_factory=dict)
    num_dropped: int = 0  # pages without a host page

    def plan(self, tracked: Tracked, table: BlockTable, num_pages: int, ticket: Ticket) -> SaveOrder | None:
        """Order what the host lacks of a request's first `num_pages` pages; None if there is nothing to do.

        As many leading ones as host pages can be had for.
        """
        size = self.index.page_size
        key = tracked.key(num_pages, size)
        node = self.index.resident_end(key)
        tracked.num_saved = num_pages
        start, end = node.end, _unbroken(table[self.groups[BACKBONE]], node.end, num_pages)
        if end <= start:
            self.index.touch(node)
            return None
        path = self.index.tree.lock(node, Tier.HOST)
        pages = self.index.alloc(end - start)
        self.num_dropped += end - start - len(pages)
        end = start + len(pages)
        if end == start:
            self.index.unlock(path)
            return None
        key = tracked.key(end, size)
        parts, sources = [pages], [_blocks(table[self.groups[BACKBONE]], start, end)]
        for component in range(1, len(self.groups)):
            begin = self._lacking(node, component, start, end)
            blocks = _trailing_blocks(table[self.groups[component]], begin, end)
            own = self.index.alloc(len(blocks), component)
            parts.append(own)
            sources.append(blocks[len(blocks) - len(own) :])
        copies = tuple(
            GroupCopy(group, source, own)
            for group, source, own in zip(self.groups, sources, parts, strict=True)
            if len(own)
        )
        lock, taken = self.index.insert(key, parts, ARRIVING)
        self.index.unlock(path)
        if not all(len(own) == len(took) for own, took in zip(parts, taken, strict=True)):
            raise Misuse(f"pages {parts} went to {taken}")
        self._enter(ticket, InFlightSave(tracked, key, start, lock, taken, copies, False))
        return SaveOrder(ticket, copies)

    def _lacking(self, node: Node, component: int, start: int, end: int) -> int:
        """From which page on the host lacks what a boundary at `end` needs of a window, without a gap."""
        floor = max(0, end - self.index.tree.components[component].reach)
        for at in self.index.tree.path(node, min(floor, start)):
            if start <= floor or at.resident(Tier.HOST, component):
                break
            start = at.start
        return start

    def _enter(self, ticket: Ticket, job: InFlightSave) -> None:
        self.in_flight[ticket] = job
        for copy in job.copies:
            for block in copy.device.tolist():
                self.reading[block] = ticket

    def rows(self, job: InFlightSave) -> PageRows:
        """The tokens of a job's pages of all components, with what their hash chain needs."""
        node = job.lock.node
        return self.index.tree.page_rows(node, node.end - max(len(pages) for pages in job.pages))

    def fences(self, written: Iterable[int]) -> tuple[Ticket, ...]:
        """The saves that read any of these blocks, for whichever group it was."""
        if not self.reading:
            return ()
        return tuple(sorted({self.reading[at] for at in written if at in self.reading}))

    def end_reading(self, job: InFlightSave, ticket: Ticket) -> None:
        """No worker reads the job's blocks any more."""
        for copy in job.copies:
            for block in copy.device.tolist():
                if self.reading.get(block) == ticket:
                    del self.reading[block]


def _blocks(table: Sequence[int], start: int, end: int) -> Pages:
    return np.array(table[start:end], np.int32)


def _unbroken(table: Sequence[int], start: int, end: int) -> int:
    """Up to where the table has blocks without a gap."""
    end = min(end, len(table))
    for page in range(start, end):
        if table[page] == NULL_BLOCK:
            return page
    return end


def _trailing_blocks(table: Sequence[int], start: int, end: int) -> Pages:
    """The blocks of the longest run without a gap that ends at page `end`."""
    first = end
    while first > start and first <= len(table) and table[first - 1] != NULL_BLOCK:
        first -= 1
    return _blocks(table, first, end)
