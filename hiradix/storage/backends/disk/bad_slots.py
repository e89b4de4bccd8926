"""Slots that the disk cannot read or write any more, told from a disk that is away for a while."""

from __future__ import annotations

import errno
from collections.abc import Iterable

LASTING = frozenset(
    getattr(errno, name) for name in ("EIO", "ENODATA", "EBADMSG", "EREMOTEIO", "EILSEQ", "EUCLEAN")
)
"""Errors of the medium, or of the file system's own checksums, that concern the place alone."""
FAILURES = 3  # of one slot in a row: then it is bad
MOST_SLOTS = 4096  # whose failures are counted at once

Key = tuple[int, ...]


class BadSlots:
    """Counts failures in a row of each slot. Not thread-safe.

    One counts only if something else succeeded since that slot's last: where nothing does, the disk is away.
    """

    def __init__(self) -> None:
        self._num_successes = 0
        self._failed: dict[Key, tuple[int, int]] = {}  # how often, and how many successes were before

    def succeeded(self, keys: Iterable[Key]) -> None:
        """These could be read, or written."""
        self._num_successes += 1
        if self._failed:
            for key in keys:
                self._failed.pop(key, None)

    def failed(self, key: Key) -> bool:
        """This one could not; whether it is bad by now."""
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

    def written_in_vain(self, key: Key) -> bool:
        """The same of a slot that could not be written while no other was tried: each time counts."""
        self._num_successes += 1
        return self.failed(key)
