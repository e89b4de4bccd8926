"""`file` with `naming="sglang"`: the exact files of SGLang's file backend, for sharing a directory with it.

`<directory>/<page hash><suffix>.bin` holds a page's bytes and nothing else; the suffix is the model's served
name and the ranks. So neither layout, dtype nor revision can be checked. What the bytes were is said of files
written here in an extended attribute, which SGLang does not see, and is checked; one of SGLang's own of the
right length is believed. Use it only beside SGLang servers of the same model, layout and dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import logging
import os
import re
import stat
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hiradix.errors import ConfigError, StorageError, Unreachable
from hiradix.settings import Type, read, setting, settings_of
from hiradix.storage.backends.file.backend import FileBackend
from hiradix.storage.backends.file.config import FileConfig
from hiradix.storage.backends.file.page_dir import footprint, remove
from hiradix.storage.backends.file.room import Keep
from hiradix.storage.batch import Batch
from hiradix.storage.guard.calls import FlagsWithReason
from hiradix.storage.kit.damaged_keys import MAX_KEYS
from hiradix.storage.kit.lru import LruEntry, LruIndex
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.reach import is_unreachable
from hiradix.storage.kit.read_only import refusal, said_of
from hiradix.storage.kit.seal import DEFAULT_ALGORITHM, NONE, Sealer, Verdict
from hiradix.storage.kit.states import StoreStates
from hiradix.storage.kit.vectored import NO_ROOM, read_into, write_from
from hiradix.storage.protocol import Page, StorageBackend, StorageContext, Traits, check_keys, page_bytes

logger = logging.getLogger(__name__)

NAMINGS = ("hiradix", "sglang")
SEAL_ATTRIBUTE = "user.hiradix.seal"
"""A file's seal, for any fingerprint: who shares the names after the page hash shares the pages."""
_NO_SEAL = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors by which a file has no seal; by others nobody knows."""
_TEMP = re.compile(r"\.[0-9a-f]{32}\.tmp")
_OLD_TEMP_S = 600.0
_SLACK_SHARE = 64
_DRIFT_SHARE = 16
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


_Looks = tuple[int, int, int, int]


def _looks(status: os.stat_result) -> _Looks:
    """The stat fields that change with a file's content."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _seal_of(fd: int) -> bytes | None:
    """A file's seal; None where it has none. Raises OSError where that cannot be known."""
    try:
        return os.getxattr(fd, SEAL_ATTRIBUTE)
    except OSError as error:
        if error.errno in _NO_SEAL:
            return None
        raise


@dataclass(frozen=True)
class SglangNaming:
    """Keys of the `file` backend for files that SGLang shares. None may come over HTTP: such a file says
    nothing of whose page it is, so whatever has the right length is believed."""

    naming: str = setting(
        "naming",
        Type.TEXT,
        "hiradix",
        "`sglang`: [SGLang's own files](backends.md#sglangs-files)",
        choices=NAMINGS,
    )
    model: str | None = setting(
        "sglang_model_name",
        Type.TEXT,
        None,
        "with `naming` `sglang`: the name SGLang serves the model under",
        default_text="the model's name",
    )
    is_mla: bool = setting(
        "is_mla_model",
        Type.BOOL,
        False,
        "with `naming` `sglang`: one file for all tensor parallel ranks, as SGLang does for latent attention",
    )


class FileByNaming(FileBackend):
    """`file`: makes the backend of the asked `naming`."""

    def __new__(cls, context: StorageContext) -> FileBackend:  # type: ignore[misc]
        keys = dict(context.extra_config)
        if read(SglangNaming, keys, flag).naming == "sglang":
            return SglangFileBackend(context)  # type: ignore[return-value]
        keys.pop("naming", None)
        return FileBackend(dataclasses.replace(context, extra_config=keys))


def suffix_of(context: StorageContext, model_name: str, is_mla: bool) -> str:
    """The suffix that SGLang 0.5.23 puts between a page's hash and `.bin`."""
    mark = context.fingerprint
    model = model_name.replace("/", "-")
    ranks = "" if is_mla else f"_{mark.tp_rank}_{mark.tp_size}"
    stages = f"_{mark.pp_size}_{mark.pp_rank}" if mark.pp_size > 1 else ""
    return f"_{model}{ranks}{stages}"


class SglangFileBackend(StorageBackend):
    """Reads and writes the files of SGLang's own file backend. Capped by its own LRU over the files of its
    suffix. Thread-safe.

    Other processes may write to the directory: the index is read anew before anything is evicted, and after
    every sixteenth of the cap that was written here.
    """

    traits = Traits(verifies=True, namespaced=True)

    def __init__(self, context: StorageContext, time_ns: Callable[[], int] = time.time_ns):
        naming = read(SglangNaming, context.extra_config, flag)
        model = context.fingerprint.model_id if naming.model is None else naming.model
        mine = {one.name for one in settings_of(SglangNaming)}
        rest = {name: value for name, value in context.extra_config.items() if name not in mine}
        self.config = FileConfig.from_mapping(rest)
        self.config.check_page(footprint(context.page_bytes))
        self._tail = f"{suffix_of(context, model, naming.is_mla)}.bin"
        if "\0" in model or len(self._tail.encode()) > 180:
            raise ConfigError(f"{flag('sglang_model_name')}: {model!r:.80} makes no file name")
        if context.fingerprint.codec:
            raise ConfigError(f"{flag('quantise')}: SGLang's file names do not tell such pages from its own")
        self._time_ns = time_ns
        checks = self.config.checksum
        names = hashlib.sha256(self._tail.encode()).hexdigest()
        self._sealer = Sealer(names, DEFAULT_ALGORITHM if checks else NONE, checks)
        self._bad: dict[str, _Looks] = {}  # damaged files that stay
        self._index = LruIndex()
        self._lock = threading.Lock()
        self._written = 0  # since the index was read
        self._counts: Counter[str] = Counter()
        self._states = StoreStates("file")
        self._closed = False
        self._is_refused = False  # the last write was, as the file system cannot be written any more
        try:
            self._read_only = refusal(self.config.path)
            self.config.path.mkdir(parents=True, exist_ok=True)
            with self._lock:
                self._scan()
                if self._read_only is None:
                    self._make_room(0, Keep())
                else:
                    self._states.enter("read_only", said_of(self.config.path, self._read_only))
        except OSError as error:
            kind = Unreachable if is_unreachable(error) else ConfigError
            raise kind(f"{self.config.path_source}: cannot use {self.config.path}: {error}") from error

    # -- the protocol -------------------------------------------------------------------

    def exists(self, batch: Batch) -> int:
        self._check(batch)
        for index, key in enumerate(batch):
            if not os.path.exists(self._path(key)) or self._is_bad(key):
                return index
        return len(batch)

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        self._check(batch)
        used_ns = self._used_ns(batch)
        bad: list[str] = []
        ok = [self._read(*one, bad) for one in zip(batch, into, used_ns, strict=True)]
        self._use(batch, into, ok, used_ns)
        if bad:
            return FlagsWithReason(ok, MissReason.DAMAGED, len(bad))
        self._states.leave("damaged")
        return ok

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        self._check(batch)
        if self._read_only is None and not self.config.path.is_dir():
            self._make_anew()
        used_ns = self._used_ns(batch)
        first_ns = max(used_ns, default=0)
        keep = Keep(frozenset(batch), first_ns + 1)
        ok = [self._is_there(key, page) for key, page in zip(batch, pages, strict=True)]
        self._use(batch, pages, ok, used_ns)
        if self._read_only is not None:
            return ok if all(ok) else self._refuse(ok, self._read_only)
        with self._lock:
            self._index.follow(batch.after, first_ns)
        has_room = True
        for index, (key, page, at_ns) in enumerate(zip(batch, pages, used_ns)):
            if not ok[index] and has_room:
                try:
                    ok[index] = has_room = self._store(key, page, at_ns, keep)
                except OSError as error:
                    if error.errno != errno.EROFS:
                        raise
                    self._use(batch, pages, ok, used_ns)
                    return self._refuse(ok, error)
        self._use(batch, pages, ok, used_ns)
        if self._is_refused:
            self._is_refused = False
            self._states.leave("read_only")
        if all(ok):
            self._states.leave("full")
            return ok
        self._states.enter("full", f"{self.config.path} has no room: pages are refused")
        return FlagsWithReason(ok, MissReason.FULL)

    def delete(self, keys: Sequence[str]) -> None:
        self._check(keys)
        self._check_writable()
        with self._lock:
            for key in keys:
                self._index.drop(key)
                remove(self._path(key))

    def clear(self) -> None:
        """The files of this suffix only; SGLang's own clear takes every file in the directory."""
        self._check(())
        self._check_writable()
        with self._lock:
            self._scan()
            while (key := self._index.coldest()) is not None:
                self._index.drop(key)
                remove(self._path(key))

    def close(self) -> None:
        self._closed = True

    def stats(self) -> Mapping[str, float]:
        with self._lock:
            known = {"files": len(self._index), "used_bytes": self._index.num_bytes}
            return known | {
                "max_bytes": self.config.max_bytes,
                "read_only": float(self.read_only or self._is_refused),
                **self._counts,
            }

    # -- inside -------------------------------------------------------------------------

    def _check(self, keys: Sequence[str]) -> None:
        if self._closed:
            raise StorageError("storage backend is closed")
        check_keys(keys)

    @property
    def read_only(self) -> bool:
        """Whether the directory could not be written when it was opened: until it is opened anew."""
        return self._read_only is not None

    def _refuse(self, ok: Sequence[bool], why: OSError) -> list[bool]:
        """The answer to a put in a directory that cannot be written."""
        self._states.enter("read_only", said_of(self.config.path, why))
        self._is_refused = True
        with self._lock:
            self._counts["put_read_only"] += ok.count(False)
        return FlagsWithReason(ok, MissReason.READ_ONLY)

    def _check_writable(self) -> None:
        if self.read_only:
            raise StorageError(f"{self.config.path} cannot be written")

    def _path(self, key: str) -> str:
        return os.path.join(self.config.path, key + self._tail)

    def _is_there(self, key: str, page: Page) -> bool:
        try:
            status = os.lstat(self._path(key))
        except FileNotFoundError:
            return False
        is_whole = stat.S_ISREG(status.st_mode) and status.st_size == page_bytes(page)
        return is_whole and self._bad.get(key) != _looks(status)

    def _is_bad(self, key: str) -> bool:
        """Whether the key's file is one that was found damaged and is there still."""
        if key not in self._bad:
            return False
        with contextlib.suppress(OSError):
            return self._bad.get(key) == _looks(os.lstat(self._path(key)))
        return False

    def _use(self, batch: Batch, pages: Sequence[Page], ok: Sequence[bool], used_ns: Sequence[int]) -> None:
        """Note a use of the pages of a call that are there."""
        with self._lock:
            for key, page, good, at_ns, front in zip(batch, pages, ok, used_ns, batch.fronts()):
                if good:
                    self._index.use(key, LruEntry(footprint(page_bytes(page)), at_ns), front)

    def _used_ns(self, batch: Batch) -> list[int]:
        """The time of use (ns) of each page of a call."""
        with self._lock:
            now_ns = self._index.now(self._time_ns())
        return batch.used_ns(self, now_ns)

    def _read(self, key: str, page: Page, used_ns: int, bad: list[str]) -> bool:
        """Read a page; whether it is there and intact. bad: gets the key of a page that is not intact."""
        try:
            fd = os.open(self._path(key), _READ)
        except OSError:  # absent, or nothing that can be read: no page
            with self._lock:
                self._index.drop(key)
            return False
        try:
            status = os.fstat(fd)
            if self._bad.get(key) == _looks(status):
                return False
            whole = stat.S_ISREG(status.st_mode) and status.st_size == page_bytes(page)
            if not whole or read_into(fd, page) != status.st_size:
                verdict = Verdict.DAMAGED
            else:
                verdict = self._verdict(fd, key, page)
            if verdict is Verdict.UNKNOWN:
                with self._lock:
                    self._counts["unknown_checksum"] += 1
                return False
            if verdict is not Verdict.GOOD:
                text = "is not what was stored there, which is a miss"
                self._states.enter("damaged", f"{self._path(key)} {text}")
                with self._lock:
                    self._counts["read_damaged"] += 1
                bad.append(key)
                self._drop_damaged(fd, key, status)
                return False
            is_old = abs(used_ns - status.st_mtime_ns) > self.config.touch_interval_s * 1e9
            if is_old and not self.read_only:
                self._touch(fd, used_ns)
            return True
        finally:
            os.close(fd)

    def _verdict(self, fd: int, key: str, page: Page) -> Verdict:
        """Check a page against its seal; a file without one is SGLang's, and believed."""
        try:
            seal = _seal_of(fd)
        except OSError:
            return Verdict.UNKNOWN
        return Verdict.GOOD if seal is None else self._sealer.check(seal, key, page)

    def _drop_damaged(self, fd: int, key: str, status: os.stat_result) -> None:
        """Make place for the page to be stored again, unless it was already. A file without a seal stays: it
        may be one that another process is writing. What stays is looked at again when it has changed."""
        with contextlib.suppress(OSError):
            if not self.read_only and _seal_of(fd) is not None:
                if os.path.samestat(os.lstat(self._path(key)), status):
                    remove(self._path(key))
                return
        if len(self._bad) < MAX_KEYS:
            self._bad[key] = _looks(status)

    def _touch(self, fd: int, used_ns: int) -> None:
        try:
            os.utime(fd, ns=(used_ns, used_ns))
        except OSError:  # another user's file can be read all the same; only its recency is lost
            with self._lock:
                self._counts["touch_errors"] += 1

    def _store(self, key: str, page: Page, used_ns: int, keep: Keep) -> bool:
        num_bytes = footprint(page_bytes(page))
        with self._lock:
            if not self._make_room(num_bytes, keep):
                self._counts["put_no_room"] += 1
                return False
            self._index.use(key, LruEntry(num_bytes, used_ns))
            self._written += num_bytes
        temp = os.path.join(self.config.path, f".{uuid.uuid4().hex}.tmp")
        try:
            self._write(temp, key, page, used_ns)
            os.replace(temp, self._path(key))
            self._bad.pop(key, None)
        except OSError as error:
            remove(temp)
            with self._lock:
                self._index.drop(key)
                if error.errno in NO_ROOM:
                    self._counts["put_no_room"] += 1
                    return False
            if error.errno == errno.EROFS:
                raise
            raise StorageError(f"cannot write to {self.config.path}: {error}") from error
        return True

    def _write(self, temp: str, key: str, page: Page, used_ns: int) -> None:
        fd = os.open(temp, _CREATE, 0o644)
        try:
            if write_from(fd, page) != page_bytes(page):
                raise OSError("short write")
            if self.config.checksum:
                try:
                    os.setxattr(fd, SEAL_ATTRIBUTE, self._sealer.seal(key, page))
                except OSError:  # a file system without attributes keeps pages
                    with self._lock:
                        self._counts["put_unsealed"] += 1
            os.utime(fd, ns=(used_ns, used_ns))
            if self.config.fsync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _make_anew(self) -> None:
        """The directory was removed: begin with what is there."""
        self.config.path.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._scan()
            self._counts["made_anew"] += 1
        logger.warning(
            "%s had been removed with its pages: made anew, pages are stored again", self.config.path
        )

    # -- room: call with the lock held --------------------------------------------------

    def _scan(self) -> None:
        found: dict[str, LruEntry] = {}
        oldest_ns = self._time_ns() - int(_OLD_TEMP_S * 1e9)
        with os.scandir(self.config.path) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if entry.name.endswith(self._tail) and stat.S_ISREG(status.st_mode):
                    key = entry.name.removesuffix(self._tail)
                    found[key] = LruEntry(footprint(status.st_size), status.st_mtime_ns)
                elif _TEMP.fullmatch(entry.name) and status.st_mtime_ns < oldest_ns and not self.read_only:
                    remove(entry.path)  # a writer died
        self._index.replace_all(found, self._time_ns())
        self._written = 0

    def _short(self, num_bytes: int) -> int:
        status = os.statvfs(self.config.path)
        free = status.f_bavail * status.f_frsize - self.config.min_free_bytes
        return num_bytes - min(free, self.config.max_bytes - self._index.num_bytes)

    def _make_room(self, num_bytes: int, keep: Keep) -> bool:
        if self._short(num_bytes) > 0 or self._written > self.config.max_bytes // _DRIFT_SHARE:
            self._scan()
        short = self._short(num_bytes)
        if short <= 0:
            return True
        taken = self._index.take(short, self.config.max_bytes // _SLACK_SHARE, keep.names, keep.since_ns)
        for key in taken:
            self._counts["evicted"] += remove(self._path(key))
        return sum(taken.values()) >= short
