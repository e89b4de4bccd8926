"""Pages on their way through a worker's staging memory, with their seals: copied, checked, and copied out.

A long batch passes in chunks. While one is being read the chunk before it is checked and copied out; while
one is stored the chunk after it is copied and sealed. So neither network nor processor wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hiradix.errors import Misuse
from hiradix.storage.guard.calls import PageMove, ThreadSession
from hiradix.storage.kit.call_threads import gather, scatter
from hiradix.storage.kit.damaged_keys import DamagedKeys
from hiradix.storage.kit.in_place import InPlacePage
from hiradix.storage.kit.seal import REASONS, SEAL_BYTES, Sealer, Verdict
from hiradix.storage.protocol import Page

Work = Callable[[range, Sequence[Page]], Callable[[], object]]
"""The backend's call for a chunk of the batch, whose bytes are in or go to those pages."""
_Read = tuple[range, list[memoryview], list[bool]]
_Write = tuple[range, Callable[[], object], Collection[str]]


class Staged:
    """Thread-safe. sealer: for pages whose backend does not verify them, else None.

    delete: removes names in the store during a put; False where it could not.
    """

    def __init__(self, sealer: Sealer | None, delete: Callable[[ThreadSession, Sequence[str]], bool]):
        self._sealer = sealer
        self._delete = delete
        self._damaged_keys = DamagedKeys()
        self.seal_bytes = 0 if sealer is None else SEAL_BYTES

    def read(self, session: ThreadSession, moved: PageMove, runs: Sequence[range], work: Work) -> None:
        """Read the chunks `runs`. What was read before a fault is in the batch's pages, if it is good."""
        before: _Read | None = None
        try:
            for number, chunk in enumerate(runs):
                views = session.stage(moved, chunk, self.seal_bytes, number % 2)
                ended = session.start(work(chunk, [[view] for view in views]))
                try:
                    done, before = before, None
                    self._take(moved, done)
                finally:
                    answer = ended()
                before = chunk, views, moved.flags(chunk, answer)
        finally:
            self._take(moved, before)

    def read_in_place(
        self, session: ThreadSession, moved: PageMove, runs: Sequence[range], work: Work
    ) -> None:
        """Read the chunks `runs` straight into the batch's pages. Pages that are complete and pass the check
        before a fault count; no page is written to after the return."""
        for chunk in runs:
            seals = memoryview(bytearray(len(chunk) * SEAL_BYTES))
            targets = [
                InPlacePage(
                    [*moved.pages[index], seals[at * SEAL_BYTES : (at + 1) * SEAL_BYTES]], sealed=True
                )
                for at, index in enumerate(chunk)
            ]
            flags = [True] * len(chunk)
            try:
                flags = moved.flags(chunk, session.run(work(chunk, targets)))
            finally:
                whole = [target.withdraw() for target in targets]
                self._look(moved, chunk, targets, [ok and all_came for ok, all_came in zip(flags, whole)])

    def write(self, session: ThreadSession, moved: PageMove, runs: Sequence[range], work: Work) -> None:
        """Store the chunks `runs`; bad pages that were read under their names are deleted before.

        Where they cannot be deleted they stay noted, and are not stored: the store would keep what it has.
        """
        before: _Write | None = None
        try:
            for number, chunk in enumerate(runs):
                views = session.stage(moved, chunk, self.seal_bytes, number % 2)
                self._fill(moved, chunk, views)
                done, before = before, None
                _answer(moved, done)
                damaged = self._damaged_keys.take(moved.names[chunk.start : chunk.stop])
                kept = self._remove(session, damaged) if damaged else ()
                before = chunk, session.start(work(chunk, [[view] for view in views])), kept
        finally:
            _answer(moved, before)

    def _remove(self, session: ThreadSession, damaged: Sequence[str]) -> Collection[str]:
        """Delete these; those that are still there."""
        removed = False
        try:
            removed = self._delete(session, damaged)
        finally:
            if not removed:
                self._damaged_keys.note(damaged)
        return () if removed else frozenset(damaged)

    def _fill(self, moved: PageMove, chunk: range, views: Sequence[memoryview]) -> None:
        """Copy a chunk's pages to the staging memory, each with its seal."""
        for index, view in zip(chunk, views):
            payload = view[: len(view) - self.seal_bytes]
            gather(moved.pages[index], payload)
            if self._sealer is not None:
                view[-SEAL_BYTES:] = self._sealer.seal(moved.keys[index], [payload])

    def _look(
        self, moved: PageMove, chunk: range, targets: Sequence[InPlacePage], came: Sequence[bool]
    ) -> None:
        """Check the pages that came."""
        if self._sealer is None:
            raise Misuse("pages that are not checked passed the staging memory by")
        for index, target, ok in zip(chunk, targets, came):
            if ok:
                moved.ok[index] = self._is_good(moved, index, target.check(moved.keys[index], self._sealer))

    def _take(self, moved: PageMove, read: _Read | None) -> None:
        """Check what was read, and copy to the batch's pages what is good."""
        for index, view, ok in zip(*read) if read is not None else ():
            if ok and self._is_good(moved, index, self._check(moved.keys[index], view)):
                scatter(view[: len(view) - self.seal_bytes], moved.pages[index])
                moved.ok[index] = True

    def _is_good(self, moved: PageMove, index: int, verdict: Verdict) -> bool:
        """Whether the page may be used; takes down why not."""
        if verdict is not Verdict.GOOD:
            reason = REASONS[verdict]
            moved.refused[reason] = moved.refused.get(reason, 0) + 1
            if verdict is not Verdict.UNKNOWN:
                self._damaged_keys.note([moved.names[index]])
        return verdict is Verdict.GOOD

    def _check(self, key: str, view: memoryview) -> Verdict:
        if self._sealer is None:
            return Verdict.GOOD
        return self._sealer.check(view[-SEAL_BYTES:], key, [view[:-SEAL_BYTES]])


def _answer(moved: PageMove, write: _Write | None) -> None:
    """Wait for a chunk's call, and take its answers."""
    if write is not None:
        chunk, ended, kept = write
        moved.answered(chunk, ended())
        for index in chunk if kept else ():
            moved.ok[index] &= moved.names[index] not in kept
