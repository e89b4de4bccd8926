"""Slots that the disk cannot read or write any more, told from a disk that is away for a while."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import TypeVar

LASTING = frozenset(
    getattr(errno, name) for name in ("EIO", "ENODATA", "EBADMSG", "EREMOTEIO", "EILSEQ", "EUCLEAN")
)
"""Errors of the medium, or of the file system's own checksums, that concern the place alone."""
FAILURES = 3  # of one slot in a row: then it is bad
MOST_UNWRITABLE = 8  # slots that are given up before any page could be written again
MOST_SLOTS = 4096  # whose failures are counted at once

Key = tuple[int, ...]
_Key = TypeVar("_Key", bound=Key)


class BadSlots:
    """Counts failures in a row of each slot. Not thread-safe.

    One counts only if something else succeeded since that slot's last: where nothing does, the disk is away.
    Of writes, which try the same free slots again, a few are given up in that case too.
    """

    def __init__(self) -> None:
        self._num_successes = 0
        self._num_unwritable = 0  # since a page could be written
        self._failed: dict[Key, tuple[int, int]] = {}  # how often, and how many successes were before

    def succeeded(self, keys: Iterable[Key]) -> None:
        """Note that these slots could be read, or written."""
        self._num_successes += 1
        if self._failed:
            for key in keys:
                self._failed.pop(key, None)

    def failed(self, key: Key) -> bool:
        """Note that this slot could not be read or written; whether it is bad by now."""
        number, before = self._failed.get(key, (0, -1))
        if before != self._num_successes:
            number += 1
        if number >= FAILURES:
            self._failed.pop(key, None)
            return True
        if len(self._failed) >= MOST_SLOTS:
            self._failed.clear()
        self._failed[key] = number, self._num_successes
        return False

    def unwritable(self, keys: Sequence[_Key], others_were: bool) -> list[_Key]:
        """Note that slots could not be written; those that are bad by now. others_were: whether other slots
        were written in the same call; if none were, each failure counts."""
        self._num_successes += 1
        if others_were:
            self.written()
        bad = [key for key in keys if others_were or self.failed(key)]
        bad = bad[: MOST_UNWRITABLE - self._num_unwritable]
        self._num_unwritable += len(bad)
        return bad

    def written(self) -> None:
        """The disk takes pages."""
        self._num_unwritable = 0
