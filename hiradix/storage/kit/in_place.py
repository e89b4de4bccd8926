"""Pages that a backend fills in place: in the caller's own memory, while the caller may give the call up.

Bytes from a client are copied to the page at once and checksummed while they are in the processor's caches:
without staging memory and a second pass. Each copy is made under a lock that also says whether the page is still
wanted, so nothing is written to it after `withdraw`.
"""

from __future__ import annotations

import threading

from hiradix.errors import Misuse, StorageError
from hiradix.storage.kit.call_threads import scatter
from hiradix.storage.kit.seal import DEFAULT_ALGORITHM, RUNNING, SEAL_BYTES, Running, Sealer, Verdict
from hiradix.storage.protocol import Page

LOCKLESS_BYTES = 1 << 16
"""Longer pieces are copied without the interpreter lock: others that came meanwhile need not wait for it."""


class InPlacePage(list[memoryview]):
    """A page's buffers, read-only, and `write`, which fills them from the first to the last.

    sealed: the last buffer is a seal, which its checksum does not cover. One thread writes at a time; any thread
    may `withdraw` the page. Raises StorageError if it is written to after that.
    """

    def __init__(self, page: Page, sealed: bool = False):
        self._views = [view.cast("B") for view in page if view.nbytes]
        super().__init__([view.toreadonly() for view in self._views])
        self.num_bytes = sum([view.nbytes for view in self])
        self._body_bytes = self.num_bytes - SEAL_BYTES if sealed else 0
        self._lock = threading.Lock()
        self._is_wanted = True
        self.begin(self.num_bytes)

    def begin(self, num_bytes: int) -> None:
        """Start again: `num_bytes` will be written, at most the page's; earlier bytes do not count."""
        if num_bytes > self.num_bytes:
            raise Misuse(f"{num_bytes} bytes for a page of {self.num_bytes}")
        with self._lock:
            self._check()
            self._at, self._end = 0, num_bytes
            self._checksum: Running = RUNNING[DEFAULT_ALGORITHM]()

    def check_wanted(self) -> None:
        """Raise StorageError unless somebody waits for the page."""
        with self._lock:
            self._check()

    def write(self, data: memoryview) -> bool:
        """Copy the next bytes to their place. False, with nothing copied, if they are too many."""
        with self._lock:
            self._check()
            if self._at + data.nbytes > self._end:
                return False
            self._copy(data)
            if self._at < self._body_bytes:
                self._checksum.update(data[: self._body_bytes - self._at])
            self._at += data.nbytes
            return True

    def withdraw(self) -> bool:
        """Let nothing be written from here on. Returns whether all bytes had come."""
        with self._lock:
            self._is_wanted = False
            self._views = []
            return self.is_whole

    def check(self, key: str, sealer: Sealer) -> Verdict:
        """Check a complete sealed page, withdrawn before, against its seal and `key`."""
        known = DEFAULT_ALGORITHM, self._checksum.intdigest()
        return sealer.check(self[-1], key, self[:-1], known)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have come."""
        return self._at == self._end

    def _check(self) -> None:
        if not self._is_wanted:
            raise StorageError("nobody waits for the page any more")

    def _copy(self, data: memoryview) -> None:
        start = self._at
        for view in self._views:
            if start < view.nbytes:
                piece = data[: view.nbytes - start]
                part = view[start : start + piece.nbytes]
                if piece.nbytes < LOCKLESS_BYTES:
                    part[:] = piece
                else:
                    scatter(piece, [part])
                data = data[piece.nbytes :]
                if not data.nbytes:
                    return
            start = max(0, start - view.nbytes)
