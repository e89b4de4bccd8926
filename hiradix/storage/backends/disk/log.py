"""The log: one append-only file that all processes in a directory read, and write under the directory's lock.

Whoever applies its records in order has the same index. Order is what makes reuse of slots safe: FREE of a
slot is in the log before the slot is written, PUT after it was; so a page whose slot was reused is known to
be gone by everyone who looks at the log's length after reading it, and at recovery no PUT ever names a slot
with another page's bytes. When it has grown too long, it gets a MOVED record, a new log with only what is
alive takes its place, and the old file is cut to nothing.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hiradix.errors import StorageError
from hiradix.storage.backends.disk.entry import IndexEntry
from hiradix.storage.backends.disk.index import Index
from hiradix.storage.backends.disk.kernel import file_size
from hiradix.storage.backends.disk.record import (
    FORMAT_VERSION,
    NO_NAMESPACE,
    RECORD_BYTES,
    Kind,
    Record,
    header_of,
    pack,
    unpack,
)
from hiradix.storage.kit.dir_lock import is_in_place
from hiradix.storage.kit.vectored import write_from

logger = logging.getLogger(__name__)

NAME = "log"
RECORDS_PER_SLOT, SPARE_RECORDS = 4, 256
KNOWN_BYTES = 32 * RECORD_BYTES
"""So much before the place up to where a log was read is compared with it when there is more: else it was cut
short, or put back to an old state, in place."""
READ_TRIES = 100
"""Of those that only look, while others replace the log."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class WrongFolder(StorageError):
    """The folder is somebody else's, or of another format: it is no use to wait."""


class NoHeader(StorageError):
    """A log that does not begin as one, because it is damaged or none."""


class Log:
    """The log in `root` and the index it makes. Not thread-safe.

    open, append, rewrite and settle need the directory's lock; refresh and look do not. num_damaged: records
    that were unreadable with readable ones behind them, in what was read since the last rewrite. read_only:
    the file is not to be written; of the calls only refresh, look and close are.
    """

    def __init__(
        self,
        root: Path,
        namespace: bytes,
        time_ns: Callable[[], int] = time.time_ns,
        read_only: bool = False,
    ):
        self._path = os.path.join(root, NAME)
        self._flags = _LOOK if read_only else _FLAGS
        self._namespace = namespace
        self._time_ns = time_ns
        self._fd = -1
        self._number = 0
        self._length = 0  # records read
        self._last = b""  # the last of them, as they are in the file
        self._moved = False  # the last record we saw is MOVED
        self.index = Index(namespace)
        self.num_damaged = 0
        self.num_rewrites = 0

    @property
    def num_bytes(self) -> int:
        """Length of what was read of the log."""
        return self._length * RECORD_BYTES

    @property
    def state(self) -> tuple[int, int]:
        """Changes with every record that is read or written."""
        return self._number, self._length

    def open(self) -> None:
        """Read the log, or begin one: a log without a beginning is replaced. Raises StorageError for one of
        another format."""
        try:
            self._load()
        except (FileNotFoundError, NoHeader) as error:
            if isinstance(error, NoHeader):
                logger.warning("%s: the store begins empty", error)
            self.close()
            dropped = list(self.index.segments)
            self.index = Index(self._namespace)
            self.index.dropped = dropped
            self.index.next_segment = secrets.randbits(31)  # no number that somebody may have a file open of
            self._replace([])
        self.settle()

    def look(self) -> None:
        """`open` of a log that others may write and this process must not. Raises OSError, StorageError."""
        for _ in range(READ_TRIES):
            self._load()
            if not self._has_moved():
                return
        raise StorageError(f"{self._path} was replaced {READ_TRIES} times while it was read")

    def refresh(self) -> bool:
        """Apply what others have written since; whether that was anything. One short system call if not.

        Raises StorageError or OSError when the log is gone.
        """
        size = file_size(self._fd)
        if size == self._length * RECORD_BYTES:
            return False
        if not self._is_continued():
            self._load()
            return True
        before = self._length
        self._apply(_read(self._fd, self.num_bytes, size), self.index)
        if self._has_moved():
            self.look()
            return True
        return self._length != before

    def settle(self) -> None:
        """`refresh` of a log that is in its place, and cut off what a dying writer left: half a record, or
        MOVED and nothing to move to."""
        self._apply(_read(self._fd, self.num_bytes, file_size(self._fd)), self.index)
        if file_size(self._fd) > self.num_bytes:
            os.ftruncate(self._fd, self.num_bytes)
        self._moved = False

    def append(self, records: Sequence[Record]) -> None:
        """Write `records` and apply them; all or none. Call after `settle`. Raises OSError."""
        if not records:
            return
        if self._length + len(records) > RECORDS_PER_SLOT * self.index.num_slots + SPARE_RECORDS:
            self.rewrite()
        raw = pack(records, self._number, self._length)
        try:
            written = write_from(self._fd, [raw], self.num_bytes)
            if written != len(raw):
                raise OSError(errno.ENOSPC, f"log: wrote {written} of {len(raw)} bytes")
        except OSError:
            os.ftruncate(self._fd, self.num_bytes)
            raise
        self._length += len(records)
        self._note(raw)
        for record in records:
            self.index.apply(record)

    def rewrite(self) -> None:
        """Put a log with only what is alive in place of this one."""
        self._replace(list(self.index.snapshot()))
        self.num_rewrites += 1

    def sync(self) -> None:
        """Make what was appended survive a power failure."""
        os.fdatasync(self._fd)

    def is_in_place(self) -> bool:
        """Whether our file still is the one in the directory, and goes on from what we have read."""
        return is_in_place(self._fd, self._path) and self._is_continued()

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- inside -------------------------------------------------------------------------

    def _has_moved(self) -> bool:
        """Whether another log has taken the place of ours. While none has, though ours says that one is to
        come, nothing has changed: its writer is about to, or died there."""
        return self._moved and not is_in_place(self._fd, self._path)

    def _is_continued(self) -> bool:
        return _read(self._fd, self.num_bytes - len(self._last), self.num_bytes) == self._last

    def _load(self) -> None:
        """Read all of the log that is in the directory now."""
        fd = os.open(self._path, self._flags)
        raw = _read(fd, 0, file_size(fd))
        try:
            number = _number_of(raw, self._path)
        except StorageError:
            os.close(fd)
            raise
        self.close()
        self._fd, self._number, self._length, self._last = fd, number, 0, b""
        index, self.num_damaged, self._moved = Index(self._namespace), 0, False
        with _no_collection():
            self._apply(raw, index)
            index.adopt(self.index)
            index.sort(self._time_ns())
        index.dropped += list(self.index.segments)
        self.index = index

    def _apply(self, raw: bytes, index: Index) -> None:
        """Let what `raw`, which begins where we are, says happen."""
        num_bad, before = 0, self._length
        for record in unpack(raw, self._number, self._length):
            if record is None:
                num_bad += 1
                continue
            if record.kind == Kind.MOVED:
                self._moved = True
                break
            index.apply(record)
            self.num_damaged += num_bad
            self._length += num_bad + 1
            num_bad = 0
        self._note(raw[: (self._length - before) * RECORD_BYTES])

    def _note(self, raw: bytes) -> None:
        """Remember `raw`, the bytes that were read or written last."""
        if raw:
            self._last = (self._last + raw[-KNOWN_BYTES:])[-KNOWN_BYTES:]

    def _retire(self) -> None:
        """Tell those who read the old log, if it is one, that it ends here."""
        if self._fd >= 0:
            write_from(self._fd, [pack([Record(Kind.MOVED)], self._number, self._length)], self.num_bytes)
        elif os.path.exists(self._path):
            os.truncate(self._path, 0)

    def _replace(self, records: list[Record]) -> None:
        number, new_path = secrets.randbits(63), self._path + ".new"
        index = self.index
        header = Record(
            Kind.HEADER, index.next_segment, version=number,
            num_bytes=FORMAT_VERSION, checksum=index.next_version,
        )  # fmt: skip
        fd = os.open(new_path, _FLAGS | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            raw = pack([header, *records], number, 0)
            if write_from(fd, [raw]) != len(raw):
                raise OSError(errno.ENOSPC, f"{new_path}: short write")
            self._retire()
            os.replace(new_path, self._path)
        except OSError:
            os.close(fd)
            os.unlink(new_path)
            raise
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
        self.close()
        self._fd, self._number, self._length, self.num_damaged = fd, number, 1 + len(records), 0
        self._last = raw[-KNOWN_BYTES:]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch the garbage collector off: many objects are made here, which would start it, and no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read(fd: int, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file, fewer if it ends before."""
    parts = []
    while start < end:
        part = os.pread(fd, end - start, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _read_in_place(path: str) -> bytes:
    """The log, read once more where another took its place meanwhile: what is replaced is cut to nothing."""
    for _ in range(READ_TRIES):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            raw = _read(fd, 0, file_size(fd))
            if is_in_place(fd, path):
                return raw
        finally:
            os.close(fd)
    raise StorageError(f"{path} was replaced {READ_TRIES} times while it was read")


def _number_of(raw: bytes, path: str) -> int:
    """The number of a log of this format. Raises NoHeader, or StorageError for another format."""
    found = header_of(raw)
    if found is None:
        raise NoHeader(f"{path} is no log of a disk store, or its first record is damaged")
    number, version = found
    if version != FORMAT_VERSION:
        raise WrongFolder(f"{path} is of format {version}, this is {FORMAT_VERSION}; take another folder")
    return number


def require_own(root: Path) -> None:
    """Raise StorageError where `root` has a file of the log's name that is none; for folders new to us."""
    path = os.path.join(root, NAME)
    try:
        with open(path, "rb") as file:
            _number_of(file.read(RECORD_BYTES), path)
    except FileNotFoundError:
        return
    except NoHeader:
        raise WrongFolder(f"{path} is no log of a disk store; take another folder") from None


def pages_in(root: Path) -> list[IndexEntry]:
    """The pages of every fingerprint that the log in `root` names, for those that only look.

    Takes no lock and changes nothing. Raises OSError or StorageError where there is no log.
    """
    path = os.path.join(root, NAME)
    raw = _read_in_place(path)
    number = _number_of(raw, path)
    index = Index(NO_NAMESPACE)
    for record in unpack(raw, number, 0):
        if record is not None:
            index.apply(record)
    return list(index.by_place.values())
