"""The directory of the `file` backend: names, temporary files, writers, and a scan of the pages.

    hiradix.lock                    the ledger
    writers/<writer>                one per process, locked (flock) for as long as it lives
    tmp/<writer>.<number>           pages being written, with their full length from the start
    v1-<fingerprint>/<x>/<y>/<key>.page      x, y: the first two hex digits of the key's hash

Anything else in it is left alone and not counted.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from hiradix.storage.kit.lru import LruEntry
from hiradix.storage.kit.seal import VERSION, key_digest
from hiradix.storage.protocol import is_key

SUFFIX = ".page"
BLOCK_BYTES = 4096
_NAMESPACE = f"v{VERSION}-"
_SPACE = re.compile(_NAMESPACE + "([0-9a-f]{32})")
_HEX = "0123456789abcdef"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hang us
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def footprint(num_bytes: int) -> int:
    """Bytes on disk of a file of `num_bytes`: whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class PageDir:
    """Paths and files below `root` for one fingerprint. Creates its folders unless it is `read_only`. Raises
    OSError."""

    def __init__(self, root: Path, fingerprint: str, read_only: bool = False):
        self.root = root
        self.namespace = f"{_NAMESPACE}{fingerprint[:32]}"
        self._own = os.path.join(root, self.namespace)
        self._tmp = os.path.join(root, "tmp")
        self._writers = os.path.join(root, "writers")
        self._numbers = itertools.count()
        self._writer = uuid.uuid4().hex
        self._writer_fd: int | None = None
        self._read_only = read_only
        if not read_only:
            self.make()

    def make(self) -> None:
        """Create the folders that are missing."""
        for folder in (self.root, self._tmp, self._writers):
            os.makedirs(folder, mode=0o700, exist_ok=True)

    # -- names --------------------------------------------------------------------------

    def path(self, name: str) -> str:
        """The path of a page. name: a key of this fingerprint, or (with a slash) a path below root."""
        if "/" in name:
            return os.path.join(self.root, name)
        fan = key_digest(name).hex()
        return f"{self._own}/{fan[0]}/{fan[1]}/{name}{SUFFIX}"

    def name(self, folder: str, file_name: str) -> str:
        """The name of a page's file, the inverse of `path`: its key, or the path below root for pages of other
        fingerprints and for files in the folder of another key, where no reader looks for them."""
        key, path = file_name[: -len(SUFFIX)], f"{folder}/{file_name}"
        is_ours = folder.startswith(self.namespace) and self.path(key) == os.path.join(self.root, path)
        return key if is_ours else path

    def new_temp(self, num_bytes: int) -> tuple[str, int]:
        """Path and descriptor of a new temporary file that has its final length already."""
        path = f"{self._tmp}/{self._writer}.{next(self._numbers)}"
        try:
            fd = os.open(path, _CREATE, 0o600)
        except FileNotFoundError:  # the folder was removed behind our back
            os.makedirs(self._tmp, mode=0o700, exist_ok=True)
            fd = os.open(path, _CREATE, 0o600)
        try:
            os.ftruncate(fd, num_bytes)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        return path, fd

    def publish(self, temp: str, path: str) -> None:
        """Give a finished temporary file the name of a page, at once and for all readers."""
        try:
            os.replace(temp, path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.replace(temp, path)

    def open(self, key: str) -> int:
        """A descriptor to read a page from."""
        return os.open(self.path(key), _READ)

    # -- writers ------------------------------------------------------------------------

    def enter(self) -> int:
        """Sign in as a writer, and remove the temporary files of dead writers. Returns how many. Call with the
        lock held."""
        fd = os.open(os.path.join(self._writers, self._writer), _CREATE, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._writer_fd = fd
        live = {
            name
            for name in os.listdir(self._writers)
            if name == self._writer or not self._remove_if_dead(name)
        }
        stale = [name for name in os.listdir(self._tmp) if name.partition(".")[0] not in live]
        for name in stale:
            remove(os.path.join(self._tmp, name))
        return len(stale)

    def leave(self) -> None:
        """Sign out. Idempotent."""
        if self._writer_fd is not None:
            fd, self._writer_fd = self._writer_fd, None
            remove(os.path.join(self._writers, self._writer))
            os.close(fd)

    def _remove_if_dead(self, writer: str) -> bool:
        """Whether a writer is dead, as nobody holds its lock. If so its sign-in is removed."""
        path = os.path.join(self._writers, writer)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    # -- pages --------------------------------------------------------------------------

    def scan(self) -> dict[str, LruEntry]:
        """All pages by `name`, with their bytes and last use. Call with the lock held. A read-only directory
        gives the pages of this fingerprint alone: others need no room, and may not be readable."""
        found: dict[str, LruEntry] = {}
        spaces = [self.namespace] if self._read_only else os.listdir(self.root)
        for space in filter(_SPACE.fullmatch, spaces):
            for folder in folders_of(space):
                for entry in _pages(os.path.join(self.root, folder)):
                    status = _status(entry)
                    if status is not None:
                        name = self.name(folder, entry.name)
                        found[name] = LruEntry(footprint(status.st_size), status.st_mtime_ns)
        return found

    def temp_bytes(self) -> int:
        """Bytes on disk of all temporary files. Call with the lock held."""
        try:
            with os.scandir(self._tmp) as entries:
                found = [_status(entry) for entry in entries]
        except FileNotFoundError:  # the folder was removed behind our back
            return 0
        return sum(footprint(status.st_size) for status in found if status is not None)

    def own_folders(self) -> Iterator[str]:
        """The folders below root that hold this fingerprint's pages."""
        return folders_of(self.namespace)

    def pages_in(self, folder: str) -> list[str]:
        """Paths of the pages in one of `folders`."""
        return [entry.path for entry in _pages(os.path.join(self.root, folder))]


def folders_of(space: str) -> Iterator[str]:
    """The folders below root that hold the pages of a fingerprint, whose folder is `space`."""
    return (f"{space}/{x}/{y}" for x in _HEX for y in _HEX)


def pages_below(root: str) -> Iterator[tuple[str, str, int, str]]:
    """Every page of every fingerprint, for read-only tools: (fingerprint, 32 hex digits; key; file length; path
    below root if it is misplaced, in a folder where no reader looks for its key, else "")."""
    for space in sorted(filter(_SPACE.fullmatch, os.listdir(root))):
        for folder, entry in _walk(root, space):
            if (status := _status(entry)) is not None:
                key = entry.name[: -len(SUFFIX)]
                fan = key_digest(key).hex()
                misplaced = "" if folder == f"{space}/{fan[0]}/{fan[1]}" else f"{folder}/{entry.name}"
                yield space.removeprefix(_NAMESPACE), key, status.st_size, misplaced


def _walk(root: str, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """The pages in `folder`, a path below root, and in all folders below it: (folder, entry)."""
    try:
        with os.scandir(os.path.join(root, folder)) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, f"{folder}/{entry.name}")
        elif _is_page(entry.name) and entry.is_file(follow_symlinks=False):
            yield folder, entry


def _pages(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from (e for e in entries if _is_page(e.name) and e.is_file(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return


def _is_page(name: str) -> bool:
    return name.endswith(SUFFIX) and is_key(name[: -len(SUFFIX)])


def file_footprint(path: str) -> int:
    """Bytes on disk of the file at `path`; 0 if there is none."""
    try:
        return footprint(os.lstat(path).st_size)
    except FileNotFoundError:
        return 0


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # removed behind our back
        return None


def remove(path: str) -> bool:
    """Unlink `path`. False if it is gone already: of several callers exactly one gets True."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
