"""Finds the session that a prompt continues, by their common prefix, where the client does not name it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

KEPT_SHARE = 0.8  # of a prompt: what the next one of its session begins with, at least

MOST_SESSIONS = 4096  # the one heard of least recently is forgotten
MOST_BLOCKS = 1 << 19  # of all their prompts, some 110 bytes each; but for one prompt that is longer


class Continuations:
    """Sessions' last prompts, by the names of their blocks: equal names iff prompts are equal up to there.

    O(blocks) per prompt, in time and, for each session, in memory.
    """

    def __init__(self) -> None:
        self._owner: dict[Hashable, str] = {}  # the session that had a block last
        self._prompts: dict[str, Sequence[Hashable]] = {}
        self._num_blocks = 0

    def session_of(self, blocks: Sequence[Hashable], fresh: str, active: Collection[str]) -> str:
        """The session that this prompt continues, or else `fresh`; it is the last prompt of that from now on.

        active: sessions with a request that waits or runs, which nobody continues before it is answered. A
        prompt without a block continues nobody's and is not kept.
        """
        if not blocks:
            return fresh
        session = self._continued(blocks, active) or fresh
        self.forget(session)
        self._prompts[session] = blocks
        self._num_blocks += len(blocks)
        for block in blocks:
            self._owner[block] = session
        while len(self._prompts) > MOST_SESSIONS or self._num_blocks > MOST_BLOCKS and len(self._prompts) > 1:
            self.forget(next(iter(self._prompts)))
        return session

    def _continued(self, blocks: Sequence[Hashable], active: Collection[str]) -> str | None:
        for at in range(len(blocks), 0, -1):
            session = self._owner.get(blocks[at - 1])
            if session is not None and session not in active:
                return session if at >= KEPT_SHARE * len(self._prompts[session]) else None
        return None

    def holder(self, blocks: Sequence[Hashable]) -> str | None:
        """The session whose last prompt this is, with or without an answer to it; None where nobody's is. A
        beginning is nobody's: others may share it."""
        for at in range(len(blocks), 0, -1):
            session = self._owner.get(blocks[at - 1])
            if session is not None:
                return session if len(self._prompts[session]) == at else None
        return None

    def forget(self, session: str) -> None:
        """Nobody continues it any more."""
        blocks = self._prompts.pop(session, ())
        self._num_blocks -= len(blocks)
        for block in blocks:
            if self._owner.get(block) == session:
                del self._owner[block]
