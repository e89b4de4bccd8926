"""Digests of large files that the processes of one host share: ranks that start together read each file once.

A note in the user's cache folder holds the digest of one file. Its name says which file, as it was: device,
inode, size, times, and a look at pieces of it. A file of which any of these has changed has another name, so
an old note is never found. The note is locked while the file is read: other processes go on with other files,
then wait, and read the file themselves when whoever holds the lock shows no life.

Writing to a mapped file changes its times when a page becomes dirty, and not again before that page was
written back; so that is done before the times are asked for. In memory file systems it never changes them:
what is in those is not shared.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hiradix.storage.identities import identities_folder, prune

logger = logging.getLogger(__name__)

MOST = 1000
SILENT_S = 30.0  # after which nobody waits any longer for a process that reads a file
SETTLED_S = 2.0
"""Since a file's last change: a later one shows in its times, whatever the file system's clock does."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POLL_S = 0.02
_SUM_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{64}")
_IN_MEMORY = frozenset((0x01021994, 0x858458F6, 0x958458F6))  # tmpfs, ramfs, hugetlbfs

Make = Callable[[Path, Callable[[], None]], bytes]
Look = Callable[[BinaryIO], bytes]


def folder() -> Path:
    """The folder of the notes."""
    return identities_folder().with_name("weights")


def digests_of(files: Iterable[Path], make: Make, look: Look = lambda stream: b"") -> dict[Path, bytes]:
    """The digest of each file, made here or by another process of this host.

    make: reads a file and gives its digest; calls its second argument now and then, as a sign of life.
    look: pieces of an open file, or their digest: a note is used only where they are the same.
    """
    found: dict[Path, bytes] = {}
    pending = {file: _Note(file, look) for file in files}
    while pending:
        before = len(pending)
        for file, note in list(pending.items()):
            digest = note.digest(make)
            if digest is not None:
                found[file] = digest
                del pending[file]
        if pending and len(pending) == before:
            time.sleep(_POLL_S)
    return found


class _Note:
    """The note of one file as it is now."""

    def __init__(self, file: Path, look: Look) -> None:
        self._file, self._look = file, look
        self._name = self._name_now()
        self._sign_of_life: tuple[int, float] | None = None

    def digest(self, make: Make) -> bytes | None:
        """The file's digest; None while another process reads the file."""
        if self._name is None:
            return make(self._file, lambda: None)
        try:
            stream = _opened(self._name)
        except OSError as error:
            return self._alone(make, error)
        with stream:
            try:
                if (noted := _text_of(stream)) is not None:
                    return noted
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                noted = _text_of(stream)  # whoever held the lock may have written it meanwhile
            except BlockingIOError:
                return make(self._file, lambda: None) if self._is_silent(stream) else None
            except OSError as error:
                return self._alone(make, error)
            try:
                return self._make(make, stream) if noted is None else noted
            finally:
                fcntl.flock(stream, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too

    def _make(self, make: Make, stream: BinaryIO) -> bytes:
        """Read the file, and note its digest if it is still as it was."""

        def show_life() -> None:
            with suppress(OSError):
                os.utime(stream.fileno())

        digest = make(self._file, show_life)
        try:
            if self._name_now() == self._name:
                stream.seek(0)
                stream.write(digest + hashlib.sha256(digest).digest())
                stream.truncate()
        except OSError as error:
            logger.debug("the digest of %s is not shared: %s", self._file, error)
        return digest

    def _alone(self, make: Make, error: OSError) -> bytes:
        logger.debug("the digest of %s is not shared: %s", self._file, error)
        return make(self._file, lambda: None)

    def _is_silent(self, stream: BinaryIO) -> bool:
        """Whether whoever holds the lock has shown no life for `SILENT_S`."""
        seen, now_s = os.fstat(stream.fileno()).st_mtime_ns, time.monotonic()
        if self._sign_of_life is None or self._sign_of_life[0] != seen:
            self._sign_of_life = seen, now_s
        return now_s - self._sign_of_life[1] >= SILENT_S

    def _name_now(self) -> str | None:
        """The note's name; None where the file or the folder is such that nothing is shared."""
        with self._file.open("rb") as stream:
            try:
                if not _shows_changes(stream):
                    return None
                os.fdatasync(stream.fileno())
                said = (BOOT_ID.read_text(), os.fsdecode(self._file.resolve()), *_stat_of(stream))
            except OSError as error:
                logger.debug("digests of weights are not shared: %s", error)
                return None
            stat = os.fstat(stream.fileno())
            if time.time() - max(stat.st_ctime, stat.st_mtime) < SETTLED_S:
                return None
            name = hashlib.sha256(os.fsencode("\0".join(said)) + b"\0" + self._look(stream)).hexdigest()
        try:
            folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            with _own_folder() as notes:
                if name not in os.listdir(notes):
                    prune(folder(), MOST, _NAME)
        except (OSError, RuntimeError) as error:  # the latter: a user without a home
            logger.debug("digests of weights are not shared: %s", error)
            return None
        return name


@contextmanager
def _own_folder() -> Iterator[int]:
    """The folder of the notes, open, so that none comes in its place. OSError: there is none, or a link, or
    others may write to it."""
    notes = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        stat = os.fstat(notes)
        if stat.st_uid != os.geteuid() or stat.st_mode & 0o022:
            raise PermissionError(f"{folder()} can be written by others")
        yield notes
    finally:
        os.close(notes)


def _opened(name: str) -> BinaryIO:
    """The note of that name, made where there is none. OSError: it is somebody else's."""
    with _own_folder() as notes:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        stream = open(os.open(name, flags, 0o600, dir_fd=notes), "r+b", buffering=0)
    if os.fstat(stream.fileno()).st_uid != os.geteuid():
        stream.close()
        raise PermissionError(f"{folder() / name} is of another user")
    return stream


def _shows_changes(stream: BinaryIO) -> bool:
    """Whether whatever writes to a file changes its times, mapped or not."""
    statfs = (ctypes.c_ulong * 64)()  # its first word is the file system's type
    if ctypes.CDLL(None).fstatfs(stream.fileno(), statfs):
        return False
    return statfs[0] & 0xFFFFFFFF not in _IN_MEMORY


def _stat_of(stream: BinaryIO) -> tuple[str, ...]:
    """Identifies an open file and its present contents. Taken from the descriptor, since a
    network file system looks again when it opens one."""
    stat = os.fstat(stream.fileno())
    return tuple(map(str, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)))


def _text_of(stream: BinaryIO) -> bytes | None:
    """A note's digest; None of one that is not written yet, or damaged."""
    stream.seek(0)
    text = stream.read()
    digest, checksum = text[:-_SUM_BYTES], text[-_SUM_BYTES:]
    return digest if digest and hashlib.sha256(digest).digest() == checksum else None
