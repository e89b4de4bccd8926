"""Pages between memory and slots: past the page cache where that is faster, straight from and to the page.

    cached already           read through the page cache, at memory speed
    aligned buffers          O_DIRECT between disk and page, no copy at all
    other buffers            O_DIRECT by way of a bounce buffer
    O_DIRECT not possible    through the page cache

Pages that lie one behind the other in a file are one operation: a system call's cost is spread over them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial

from hiradix.os_memory import address_of, staging_memory
from hiradix.storage.backends.disk import kernel
from hiradix.storage.backends.disk.engines import IOEngine, Operation
from hiradix.storage.backends.disk.segments import SegmentFile
from hiradix.storage.kit.call_threads import gather, scatter
from hiradix.storage.kit.vectored import IOV_MAX, read_into, write_from
from hiradix.storage.protocol import Page

ALIGNMENT = 4096
BOUNCE_BYTES = 8 << 20
DIRECT_OPERATION_BYTES = 2 << 20
"""Longer operations past the page cache are not faster, and fewer of them run at once."""
MAX_PLAIN_CALLS = 4
"""That many reads through the page cache, and all writes, are plain calls: they copy faster than io_uring."""
CHECKED_BYTES, CHECKED_DEPTH = 16 << 20, 8
"""Of a batch whose pages are checked so much, in at least so many operations, is under way at once, and an
eighth of it is checked at a time. A disk that is asked for everything ends it all at about the same time, and
nothing is being read while it is checked."""
CHECKED_ASIDE_BYTES = 256 << 10
"""So much of a batch, or more, that has come is checked by a thread of its own, beside the next read; less is
checked sooner than handed over."""

_READ, _WRITTEN = (
    tuple(f"{verb}_{way}" for way in ("direct", "cached", "bounced")) for verb in ("read", "written")
)
Move = tuple[SegmentFile, int, Page]
"""A page's file, its offset there, its memory. Offset and room for the page are multiples of ALIGNMENT."""


class PageIO:
    """Reads and writes batches of pages of `num_bytes` each. Thread-safe.

    use_cache: look for pages in the page cache first. write_direct: O_DIRECT for writes too.
    """

    def __init__(self, engine: IOEngine, use_cache: bool, write_direct: bool):
        self._engine = engine
        self._use_cache = use_cache
        self._write_direct = write_direct
        self._bounce: list[memoryview] = []
        self._checker = ThreadPoolExecutor(1, "hiradix-disk-check")
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((*_READ, *_WRITTEN), 0)

    @property
    def counts(self) -> dict[str, int]:
        """Pages by the way they went."""
        return dict(self._counts)

    def read(
        self, moves: Sequence[Move], num_bytes: int, check: Callable[[int], bool] | None = None
    ) -> tuple[list[bool], dict[int, OSError]]:
        """Read pages; flags of those that were read whole, and errors by number. If `check` is given it
        decides on each page."""
        return self._do(_PageBatch(moves, num_bytes, check, write=False))

    def write(self, moves: Sequence[Move], num_bytes: int) -> tuple[list[bool], dict[int, OSError]]:
        """Write pages; flags of those that were written whole, and errors by number."""
        return self._do(_PageBatch(moves, num_bytes, None, write=True))

    def close(self) -> None:
        """Let go of engine and buffers. Idempotent."""
        self._engine.close()
        self._checker.shutdown(wait=False)  # reads that are under way have theirs checked all the same
        self._bounce.clear()

    # -- inside -------------------------------------------------------------------------

    def _do(self, batch: _PageBatch) -> tuple[list[bool], dict[int, OSError]]:
        direct: list[_Run] = []
        cached: list[_Run] = []
        bounced: list[int] = []
        for run in batch.runs():
            for part in self._cut(batch, run):
                if part.is_cached:
                    cached.append(part)
                elif part.is_aligned(batch.num_bytes):
                    direct.extend(part.pieces(self._together(batch)))
                else:
                    bounced.extend(part.indices)
        self._count(batch, direct, cached, len(bounced))
        with self._checked_aside(batch):
            if not direct and (batch.write or len(cached) <= MAX_PLAIN_CALLS):
                for part in cached:
                    for piece in part.pieces(self._together(batch)) if batch.aside else (part,):
                        batch.plainly(piece)
            else:
                self._run(batch, [*direct, *cached])
            if bounced:
                self._through_bounce(batch, bounced)
        return batch.ok, batch.faults

    @contextmanager
    def _checked_aside(self, batch: _PageBatch) -> Iterator[None]:
        """Have the batch's pages checked beside the reads that come in this block, all of them by its end."""
        if batch.check is None or len(batch.moves) * batch.num_bytes < 2 * CHECKED_ASIDE_BYTES:
            yield
            return
        batch.aside = aside = Aside(self._checker)
        try:
            yield
        finally:
            aside.finish()

    def _together(self, batch: _PageBatch) -> int:
        return max(1, DIRECT_OPERATION_BYTES // batch.num_bytes)

    def _cut(self, batch: _PageBatch, run: _Run) -> Iterator[_Run]:
        """The run, in parts that are in the page cache and parts that are not."""
        segment, offset, _ = batch.moves[run.indices[0]]
        if segment.direct_fd < 0 or (batch.write and not self._write_direct):
            run.is_cached = True
            yield run
        elif batch.write or not self._use_cache:
            yield run
        else:
            share = kernel.cached_share(segment.fd, offset, len(run.indices) * batch.num_bytes)
            run.is_cached = share == 1
            if share in (0, 1) or len(run.indices) == 1:
                yield run
            else:
                half = len(run.indices) // 2
                for part in (slice(None, half), slice(half, None)):
                    yield from self._cut(batch, run.part(part))

    def _run(self, batch: _PageBatch, runs: Sequence[_Run]) -> None:
        """One operation for each run; what did not end well is tried once more, page by page."""
        whole = [run for run in runs if run.num_spans <= IOV_MAX]
        for run in runs if len(whole) < len(runs) else ():
            if run.num_spans > IOV_MAX:
                batch.plainly(run)
        operations = [batch.operation(run) for run in whole]
        wave, depth = len(operations), 0
        if batch.check is not None:
            num_bytes = sum([len(run.indices) for run in whole]) * batch.num_bytes
            depth = max(CHECKED_DEPTH, CHECKED_BYTES * len(operations) // max(1, num_bytes))
            wave = depth // CHECKED_DEPTH
        if operations:
            with closing(self._engine.run(operations, batch.write, wave, depth)) as completions:
                for ended, results in completions:
                    batch.completed([(whole[i], result) for i, result in zip(ended, results)])

    def _through_bounce(self, batch: _PageBatch, indices: Sequence[int]) -> None:
        size = -(-batch.num_bytes // ALIGNMENT) * ALIGNMENT
        memory = self._take_bounce(size)
        together = len(memory) // size
        for start in range(0, len(indices), together):
            group = indices[start : start + together]
            views = [memory[at * size : (at + 1) * size] for at in range(len(group))]
            self._bounce_group(batch, group, views)
        with self._lock:
            self._bounce.append(memory)

    def _bounce_group(self, batch: _PageBatch, group: Sequence[int], views: Sequence[memoryview]) -> None:
        num_bytes, operations = batch.num_bytes, []
        for index, view in zip(group, views):
            segment, offset, page = batch.moves[index]
            if batch.write:
                gather(page, view[:num_bytes])
            spans = [(address_of(view), len(view))]
            operations.append(Operation(segment.direct_fd, offset, [view], spans))
        with closing(self._engine.run(operations, batch.write, len(operations))) as completions:
            for completion in completions:
                arrived = []
                for i, result in zip(*completion):
                    if result < num_bytes:
                        batch.again(group[i])
                        continue
                    if not batch.write:
                        scatter(views[i][:num_bytes], batch.moves[group[i]][2])
                    arrived.append(group[i])
                batch.look(arrived)

    def _take_bounce(self, num_bytes: int) -> memoryview:
        """Page-aligned memory of at least `num_bytes`, for one batch."""
        with self._lock:
            if self._bounce and len(self._bounce[-1]) >= num_bytes:
                return self._bounce.pop()
        return staging_memory(max(BOUNCE_BYTES, num_bytes))

    def _count(self, batch: _PageBatch, direct: list[_Run], cached: list[_Run], num_bounced: int) -> None:
        names = _WRITTEN if batch.write else _READ
        num_direct, num_cached = (sum([len(run.indices) for run in runs]) for runs in (direct, cached))
        with self._lock:
            for name, number in zip(names, (num_direct, num_cached, num_bounced)):
                self._counts[name] += number


class Aside:
    """Work that a thread does beside its owner, who in the end does what the thread has not begun.

    Work only computes: it must not wait for anything, nor raise. `finish` is to be called before the owner
    lets go of the memory that it looks at; what is left in the thread's queue then does and holds nothing.
    Used by its owner's thread alone.
    """

    def __init__(self, thread: ThreadPoolExecutor):
        self._thread = thread
        self._given: list[tuple[Future[None], list[Callable[[], None]]]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Have `work` done."""
        given = Future[None](), [work]
        self._given.append(given)
        with suppress(RuntimeError):  # the store is being closed, or there is no thread to be had
            self._thread.submit(_begin, *given)

    def finish(self) -> None:
        """Return when all is done; raises what work raised, after that."""
        faults: list[BaseException] = []
        for ended, work in reversed(self._given):
            if ended.cancel():
                try:
                    work.pop()()
                except BaseException as error:  # the rest still looks at the owner's memory
                    faults.append(error)
        for ended, _ in self._given:
            if not ended.cancelled() and (fault := ended.exception()) is not None:
                faults.append(fault)
        if faults:
            raise faults[0]


def _begin(ended: Future[None], work: list[Callable[[], None]]) -> None:
    """Do the work that is left, unless its owner has; the queue holds it no longer."""
    if not ended.set_running_or_notify_cancel():
        return
    try:
        work.pop()()
    except BaseException as fault:
        ended.set_exception(fault)
    else:
        ended.set_result(None)


class _Run:
    """Pages that follow each other in a file, and their places in the batch."""

    __slots__ = ("_spans", "indices", "is_cached", "pages")

    def __init__(self, indices: Sequence[int], pages: list[Page]):
        self.indices = indices
        self.pages = pages
        self.is_cached = False
        self._spans: list[list[tuple[int, int]]] | None = None

    @property
    def spans(self) -> list[list[tuple[int, int]]]:
        """Addresses and lengths of each page. Looked up when first asked for: 0.7 us a page."""
        if self._spans is None:
            self._spans = [
                [(address_of(view), view.nbytes) for view in page if view.nbytes] for page in self.pages
            ]
        return self._spans

    def part(self, where: slice) -> _Run:
        """Some of it, as a run."""
        return _Run(self.indices[where], self.pages[where])

    @property
    def num_spans(self) -> int:
        return sum(map(len, self.spans))

    def is_aligned(self, num_bytes: int) -> bool:
        """Whether the kernel can move these pages without a copy."""
        return not num_bytes % ALIGNMENT and not any(
            (address | length) & (ALIGNMENT - 1) for spans in self.spans for address, length in spans
        )

    def pieces(self, num_pages: int) -> list[_Run]:
        """The run in pieces of at most `num_pages`."""
        starts = range(0, len(self.indices), num_pages)
        return [self.part(slice(at, at + num_pages)) for at in starts]


class _PageBatch:
    """Pages on their way and what became of them."""

    def __init__(
        self, moves: Sequence[Move], num_bytes: int, check: Callable[[int], bool] | None, write: bool
    ):
        self.moves = moves
        self.num_bytes = num_bytes
        self.check = check
        self.write = write
        self.ok = [False] * len(moves)
        self.faults: dict[int, OSError] = {}  # by pages
        self.aside: Aside | None = None  # who checks the pages, None: who reads them

    def runs(self) -> Iterator[_Run]:
        """The batch's pages in the order in which they lie on disk, those that follow each other together."""
        if not self.moves:
            return
        segments, offsets, pages = zip(*self.moves)
        if self._is_one_run(segments, offsets, pages):
            yield _Run(range(len(pages)), list(pages))
            return
        limit = max(1, IOV_MAX // max(map(len, pages)))
        indices: list[int] = []
        expected = None
        fds = [segment.fd for segment in segments]
        for fd, offset, index in sorted(zip(fds, offsets, range(len(pages)))):
            if indices and ((fd, offset) != expected or len(indices) == limit):
                yield _Run(indices, [pages[at] for at in indices])
                indices = []
            indices.append(index)
            expected = fd, offset + self.num_bytes
        yield _Run(indices, [pages[at] for at in indices])

    def _is_one_run(
        self, segments: Sequence[SegmentFile], offsets: tuple[int, ...], pages: Sequence[Page]
    ) -> bool:
        """Whether each page lies behind the one before: the usual case, told without a look at each."""
        count, first, size = len(pages), offsets[0], self.num_bytes
        return (
            segments.count(segments[0]) == count
            and offsets == tuple(range(first, first + count * size, size))
            and sum(map(len, pages)) <= IOV_MAX
        )

    def operation(self, run: _Run) -> Operation:
        """A run as one operation."""
        segment, offset, _ = self.moves[run.indices[0]]
        fd = segment.fd if run.is_cached else segment.direct_fd
        views = [view for page in run.pages for view in page if view.nbytes]
        return Operation(fd, offset, views, [span for spans in run.spans for span in spans])

    def plainly(self, run: _Run) -> None:
        """Move a run with plain calls, through the page cache."""
        segment, offset, _ = self.moves[run.indices[0]]
        views = [view for page in run.pages for view in page]
        try:
            if self.write:
                done = write_from(segment.fd, views, offset)
            else:
                done = read_into(segment.fd, views, offset, len(run.indices) * self.num_bytes)
        except OSError as error:
            done = -(error.errno or 1)
        self.completed([(run, done)])

    def completed(self, runs: Sequence[tuple[_Run, int]]) -> None:
        """Runs have ended, each with so many bytes; pages that are not whole are tried again."""
        arrived: list[int] = []
        for run, num_bytes in runs:
            if self.check is None:
                self._moved(run, num_bytes)
                continue
            count = max(0, num_bytes) // self.num_bytes
            arrived += run.indices[:count]
            for index in run.indices[count:]:
                self.again(index)
        self.look(arrived)

    def look(self, indices: Sequence[int]) -> None:
        """Pages are in memory: check them, aside where that is worth it."""
        if self.aside is not None and len(indices) * self.num_bytes >= CHECKED_ASIDE_BYTES:
            self.aside.add(partial(self._look, indices))
        else:
            self._look(indices)

    def _look(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.arrived(index)

    def _moved(self, run: _Run, num_bytes: int) -> None:
        """A run of pages that nobody checks has ended."""
        if num_bytes == len(run.indices) * self.num_bytes:
            if len(run.indices) == len(self.ok):
                self.ok = [True] * len(self.ok)
                return
            for index in run.indices:
                self.ok[index] = True
            return
        for place, index in enumerate(run.indices):
            if (place + 1) * self.num_bytes <= num_bytes:
                self.arrived(index)
            else:
                self.again(index)

    def arrived(self, index: int) -> None:
        self.ok[index] = self.check is None or self.check(index)

    def again(self, index: int) -> None:
        """Move a page with plain calls, through the page cache; its faults count."""
        segment, offset, page = self.moves[index]
        try:
            done = (write_from if self.write else read_into)(segment.fd, page, offset)
        except OSError as error:
            self.faults[index] = error
            return
        if done == self.num_bytes:
            self.arrived(index)
