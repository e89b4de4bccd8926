"""Memory that is registered with a transfer library: host pools, and blocks of our own for the rest.

Pages within registered memory move without a copy; others pass through a block. Addresses and lengths are
what such libraries take. Beside each page goes its seal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hiradix.os_memory import address_of, staging_memory
from hiradix.storage.kit.call_threads import chunks, gather, scatter
from hiradix.storage.kit.seal import SEAL_BYTES, Sealer, Verdict
from hiradix.storage.protocol import Page, page_bytes

MAX_SPANS = 64
"""Pages in more pieces than that are faster copied into one."""
Span = tuple[int, int]
_NO_SEAL = memoryview(b"")


class RegisteredMemory:
    """Keeps the memory that is registered with a transfer library, for as long as this lives. Thread-safe.

    register: registers an address and a length with the library, or raises.
    """

    def __init__(self, block_bytes: int, register: Callable[[int, int], None]):
        self._block_bytes = block_bytes
        self._register = register
        self._known: list[tuple[int, int, memoryview]] = []
        self._idle: list[memoryview] = []
        self._lock = threading.Lock()

    def add(self, memory: memoryview) -> None:
        """Register a host pool; memory that is registered already is left as it is."""
        cells = memory.cast("B")
        begin = address_of(cells)
        with self._lock:
            if cells.nbytes and not self.holds([(begin, cells.nbytes)]):
                self._register(begin, cells.nbytes)
                self._known.append((begin, begin + cells.nbytes, cells))

    def register_again(self) -> None:
        """Register everything with a library that was started anew."""
        with self._lock:
            for begin, end, _ in self._known:
                self._register(begin, end - begin)

    def holds(self, spans: Sequence[Span]) -> bool:
        """Whether all spans lie in registered memory."""
        for start, length in spans:
            for begin, end, _ in self._known:
                if begin <= start and start + length <= end:
                    break
            else:
                return False
        return True

    def lay_out(
        self, keys: Sequence[str], pages: Sequence[Page], seal_bytes: int = SEAL_BYTES
    ) -> Iterator[LaidOut]:
        """The batch in pieces that one block is enough for. A piece is good until the next is asked for.

        seal_bytes: 0 for pages without a seal beside them.
        """
        laid: list[_Page] = []
        for key, page in zip(keys, pages, strict=True):
            spans = [(address_of(view), view.nbytes) for view in page if view.nbytes]
            in_place = len(spans) <= MAX_SPANS and self.holds(spans)
            laid.append(_Page(key, page, spans if in_place else [], seal_bytes))
        for run in chunks([one.block_bytes for one in laid], self._block_bytes):
            part = laid[run.start : run.stop]
            with self._block(sum(one.block_bytes for one in part)) as block:
                yield LaidOut(part, block)

    @contextmanager
    def _block(self, num_bytes: int) -> Iterator[memoryview]:
        """Registered memory of at least `num_bytes`, one's own for as long as the context lasts."""
        with self._lock:
            found = next((block for block in self._idle if block.nbytes >= num_bytes), None)
            if found is not None:
                self._idle = [block for block in self._idle if block is not found]
        if found is None:
            found = staging_memory(max(self._block_bytes, num_bytes))
            self.add(found)
        try:
            yield found
        finally:
            with self._lock:
                self._idle.append(found)


class _Page:
    """A page on its way. spans: where its bytes lie, empty if they have to pass through the block."""

    __slots__ = (
        "block_bytes", "body", "is_copied", "key", "num_bytes", "page", "seal", "seal_bytes", "spans",
    )  # fmt: skip

    def __init__(self, key: str, page: Page, spans: list[Span], seal_bytes: int):
        self.key = key
        self.page = self.body = page
        self.is_copied = False
        self.seal_bytes = seal_bytes
        self.num_bytes = page_bytes(page) + seal_bytes
        self.spans = spans
        self.block_bytes = seal_bytes if spans else self.num_bytes
        self.seal = _NO_SEAL

    def lay(self, block: memoryview, at: int, address: int) -> None:
        """Take this page's part of the block, which begins at `at`: room for the page, if it must be copied,
        and for the seal.

        address: of that part.
        """
        body_bytes = self.block_bytes - self.seal_bytes
        if body_bytes:
            self.body, self.is_copied = [block[at : at + body_bytes]], True
            self.spans = [(address, body_bytes)]
        if self.seal_bytes:
            self.seal = block[at + body_bytes : at + self.block_bytes]
            self.spans.append((address + body_bytes, self.seal_bytes))


class LaidOut:
    """A piece of a batch as the library moves it: of each page, its bytes and then its seal."""

    def __init__(self, pages: Sequence[_Page], block: memoryview):
        self._pages = pages
        self.num_copied = 0
        """Pages that pass through the block."""
        address, at = address_of(block), 0
        for one in pages:
            one.lay(block, at, address + at)
            at += one.block_bytes
            self.num_copied += one.is_copied

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def keys(self) -> list[str]:
        return [one.key for one in self._pages]

    @property
    def spans(self) -> list[list[Span]]:
        """For each page, the addresses and lengths to write or read in order."""
        return [one.spans for one in self._pages]

    @property
    def num_bytes(self) -> list[int]:
        """Bytes of each page, seal included."""
        return [one.num_bytes for one in self._pages]

    def gather(self) -> None:
        """Copy the pages that lie outside registered memory into the block. Call before writing."""
        for one in self._pages if self.num_copied else ():
            if one.is_copied:
                gather(one.page, one.body[0])

    def scatter(self, index: int) -> None:
        """Copy a page that has been read to the caller's buffers, if it is not there already."""
        one = self._pages[index]
        if one.is_copied:
            scatter(one.body[0], one.page)

    def seal(self, sealer: Sealer) -> None:
        """Seal every page. Call after `gather`."""
        for one in self._pages:
            one.seal[:] = sealer.seal(one.key, one.body)

    def check(self, index: int, sealer: Sealer) -> Verdict:
        """Check a page that has been read against its seal; if it is GOOD, copy it to the caller's buffers."""
        one = self._pages[index]
        verdict = sealer.check(one.seal, one.key, one.body)
        if verdict is Verdict.GOOD:
            self.scatter(index)
        return verdict
