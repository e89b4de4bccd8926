"""Decides which device blocks of requests that have ended are saved to the host, and when (scheduler side).

With the next step (`NextStepSaves`), or under write_back when vLLM takes the blocks (`WriteBackSaves`). vLLM
tells no connector what it evicts. But it evicts a block when it hands it out again, and a step's requests say
which blocks they are the first to write to. What an ended request left in one of those is saved then, and the
step waits for that copy: with it goes all else of the request that is still there, up to the first page that
is not, as a page on the host is found only behind those before it. vLLM takes a prompt's last blocks first:
one copy saves it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from hiradix.adapters.vllm.requests import Tracked
from hiradix.cache.foreign_device import NULL_BLOCK
from hiradix.cache.host_index import HostIndex
from hiradix.policy.uses import Finished

Blocks = tuple[tuple[int, ...], ...]  # of each KV cache group


@dataclass
class FinishedRequest:
    """Blocks of a request that has ended, to be saved: its first pages, the blocks of each KV cache group.

    ended: what a policy may learn of it once they are saved; None: it has, or there is none that learns.
    """

    tracked: Tracked
    num_pages: int
    table: Blocks
    ended: Finished | None = None

    def without(self, written: set[int]) -> FinishedRequest:
        """The same request with the blocks in `written` replaced by the null block."""
        gone = [tuple(NULL_BLOCK if b in written else b for b in blocks) for blocks in self.table]
        return replace(self, table=tuple(gone))


@dataclass
class NextStepSaves:
    """The requests that ended since the last step, to be saved with the next one. No step waits for these
    copies."""

    _pending: list[FinishedRequest] = field(default_factory=list)

    def leave(self, pending: FinishedRequest) -> None:
        """A request has ended."""
        self._pending.append(pending)

    def taken(self, written: Iterable[int]) -> list[FinishedRequest]:
        """All of it, once, less the blocks that this step writes to."""
        if not self._pending:
            return []
        pending, self._pending = self._pending, []
        blocks = set(written)
        return [one.without(blocks) for one in pending]

    def forget(self, covers: Callable[[FinishedRequest], bool]) -> None:
        """Drop the requests for which `covers` is true: they are not saved."""
        self._pending = [one for one in self._pending if not covers(one)]

    def forget_all(self) -> None:
        """Drop every request; called when vLLM has emptied its prefix cache."""
        self._pending.clear()


@dataclass(eq=False)
class FinishedBlocks:
    """Blocks of an ended request as it left them. turns: how often each had been written to before."""

    pending: FinishedRequest
    turns: Blocks
    is_saved: bool = False


@dataclass
class WriteBackSaves:
    """The ended requests whose blocks are still on the device, to be saved when vLLM reuses a block. Holds at
    most as many requests as the device has blocks."""

    _turns: dict[int, int] = field(default_factory=dict)
    _latest: dict[int, FinishedBlocks] = field(default_factory=dict)

    def leave(self, pending: FinishedRequest) -> None:
        """A request has ended; its blocks stay as they are until somebody writes to them.

        Those behind its last whole page matter to nobody, and vLLM takes them first.
        """
        table = tuple(blocks[: pending.num_pages] for blocks in pending.table)
        pending = replace(pending, table=table)
        turns = tuple(tuple(self._turns.get(block, 0) for block in blocks) for blocks in pending.table)
        left = FinishedBlocks(pending, turns)
        for blocks in pending.table:
            self._latest.update((block, left) for block in blocks if block != NULL_BLOCK)

    def taken(self, written: Iterable[int]) -> list[FinishedRequest]:
        """The requests that lose a block to a step which writes to `written`: each is returned once, without
        the blocks that have been overwritten by now."""
        if not self._latest:
            return []
        found: list[FinishedBlocks] = []
        blocks = sorted(written)
        for block in blocks:
            left = self._latest.pop(block, None)
            if left is not None and not left.is_saved:
                left.is_saved = True
                found.append(left)
        pending = [replace(one.pending, table=self._there(one)) for one in found]
        for block in blocks:
            self._turns[block] = self._turns.get(block, 0) + 1
        return pending

    def _there(self, left: FinishedBlocks) -> Blocks:
        """The table with NULL_BLOCK for what has been written to since."""
        rows = zip(left.pending.table, left.turns, strict=True)
        return tuple(
            tuple(
                block if self._turns.get(block, 0) == turn else NULL_BLOCK
                for block, turn in zip(blocks, turns, strict=True)
            )
            for blocks, turns in rows
        )

    def forget(self, covers: Callable[[FinishedRequest], bool]) -> None:
        """Drop the requests for which `covers` is true: they are not saved. O(blocks)."""
        gone = {left for left in set(self._latest.values()) if covers(left.pending)}
        self._latest = {block: left for block, left in self._latest.items() if left not in gone}

    def forget_all(self) -> None:
        """Drop every request; called when vLLM has emptied its prefix cache."""
        self._latest.clear()


def learn(index: HostIndex, tracked: Tracked, num_pages: int, ended: Finished | None) -> None:
    """Tell the host's policy of a request that has ended and used so many pages; None: nothing to tell."""
    if ended is not None and num_pages and index.is_open:
        index.used(tracked.key(num_pages, index.page_size), ended)
