"""Segment files: preallocated rows of page slots of one size.

A file's descriptors live as long as somebody holds the `SegmentFile`: a read that is under way never finds
its descriptor closed, or someone else's.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hiradix.storage.backends.disk import kernel
from hiradix.storage.backends.file.page_dir import remove
from hiradix.storage.kit.vectored import NO_ROOM

SUFFIX = ".pages"
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class SegmentFile:
    """An open segment file: `fd` goes through the page cache, `direct_fd` past it (-1: not possible)."""

    def __init__(self, path: str, direct: bool, read_only: bool = False):
        flags = _LOOK if read_only else _OPEN
        self.fd = self.direct_fd = -1
        self.fd = os.open(path, flags)
        if direct:
            self.direct_fd = os.open(path, flags | os.O_DIRECT)

    @property
    def num_bytes(self) -> int:
        """The file's length."""
        return kernel.file_size(self.fd)

    def __del__(self) -> None:
        for fd in (self.fd, self.direct_fd):
            if fd >= 0:
                os.close(fd)


class SegmentFolder:
    """Segment files below `root`, by number. What is made or removed here must be in the log."""

    def __init__(self, root: Path, direct: bool, read_only: bool = False):
        self._root = root
        self._direct = direct
        self._read_only = read_only
        self._open: dict[int, SegmentFile] = {}

    def path(self, number: int) -> str:
        return os.path.join(self._root, f"segment-{number:010d}{SUFFIX}")

    def get(self, number: int) -> SegmentFile:
        """The segment, opened when first asked for. Raises OSError."""
        segment = self._open.get(number)
        if segment is None:
            try:
                segment = SegmentFile(self.path(number), self._direct, self._read_only)
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise
                # not kept: for as long as that lasts
                return SegmentFile(self.path(number), self._direct, True)
            self._open[number] = segment
        return segment

    def create(self, number: int, num_bytes: int) -> bool:
        """A new file with all its blocks; False when the disk or a quota has no room. Raises OSError."""
        path = self.path(number)
        remove(path)  # an unfinished one, whose maker died before it was in the log
        fd = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            remove(path)
            if error.errno not in NO_ROOM:
                raise
            return False
        finally:
            os.close(fd)
        return True

    def forget(self, number: int) -> None:
        """Let go of a segment's file."""
        self._open.pop(number, None)

    def remove(self, number: int) -> None:
        """Delete a segment's file; its blocks are free at once, whoever still has it open. A link goes alone."""
        self.forget(number)
        path = self.path(number)
        try:
            fd = os.open(path, _OPEN)
            try:
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        remove(path)

    def numbers(self) -> list[int]:
        """The segments that have a file, sorted."""
        names = [name for name in os.listdir(self._root) if name.endswith(SUFFIX)]
        digits = [name.removeprefix("segment-").removesuffix(SUFFIX) for name in names]
        return sorted(int(text) for text in digits if text.isdecimal())

    def size(self, number: int) -> int:
        """Length of a segment's file, 0 if there is none."""
        try:
            return os.lstat(self.path(number)).st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Let go of all files."""
        self._open.clear()
