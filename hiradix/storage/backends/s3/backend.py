"""The `s3` backend: one object per page in S3, Google Cloud Storage or Azure, through obstore.

An object is `<url>/<fingerprint>/<page key>` and holds the page's bytes. It is put in one request, never in
parts, so it is whole or not there. Room: `max_size` makes this process evict the least recently used objects
of its fingerprint; without it the bucket's lifecycle rule has to.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError

from hiradix.errors import ConfigError, StorageError, Unreachable
from hiradix.storage.backends.s3.client import connect, error_text, is_away
from hiradix.storage.backends.s3.config import S3Config
from hiradix.storage.batch import Batch
from hiradix.storage.guard.calls import FlagsWithReason
from hiradix.storage.kit.in_place import InPlacePage
from hiradix.storage.kit.lru import BEFORE_ALL_NS, LruEntry, LruIndex
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.states import StoreStates
from hiradix.storage.protocol import (
    Page,
    StorageBackend,
    StorageContext,
    Traits,
    check_keys,
    fits,
    page_bytes,
)

T = TypeVar("T")
_SLACK_SHARE = 64
STREAM_BYTES = 16 << 20
"""Longer objects are copied as their pieces come. Others the library puts together first, which costs memory
for each connection, and the processor less than to be asked for every piece."""


class S3Backend(StorageBackend):
    """Stores pages as objects of a bucket. Raises ConfigError when it cannot be listed. Thread-safe."""

    def __init__(self, context: StorageContext):
        self.config = config = S3Config.from_mapping(context.extra_config)
        self.traits = Traits(namespaced=True, ragged=True, width=config.num_connections, in_place=True)
        if config.max_bytes and context.page_bytes > config.max_bytes:
            raise ConfigError(f"{flag('max_size')} {config.max_bytes} is less than a page")
        self._folder = context.fingerprint.digest()[:32]
        self._client = connect(config)
        self._threads = ThreadPoolExecutor(config.num_connections, thread_name_prefix="hiradix-s3")
        self._index = LruIndex()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._ragged = context.ragged
        self._has_folder = False
        self._states = StoreStates("s3")
        self._closed = False
        try:
            self._open()
        except BaseError as error:
            self.close()
            kind = Unreachable if is_away(error) else ConfigError
            raise kind(f"{flag('url')}: cannot use {config.url}: {error_text(error)}") from error
        except StorageError as error:  # of what was evicted to make the cap hold
            self.close()
            raise Unreachable(f"{flag('url')}: cannot use {config.url}: {error}") from error

    # -- the protocol -------------------------------------------------------------------

    def exists(self, batch: Batch) -> int:
        self._check(batch)
        step = self.config.num_connections
        for start in range(0, len(batch), step):
            sizes = self._sizes(batch[start : start + step])
            for index, size in enumerate(sizes):
                if size is None:
                    return start + index
        return len(batch)

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        self._check(batch)
        ok = self._read_all(list(zip(batch, into, strict=True)))
        self._use(batch, into, ok)
        return ok

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        self._check(batch)
        sizes = self._sizes(batch)
        ok = [fits(size or 0, page, self._ragged) for size, page in zip(sizes, pages, strict=True)]
        self._use(batch, pages, ok)
        self._forget([key for key, size in zip(batch, sizes) if size is None])  # others may delete, too
        missing = [index for index, there in enumerate(ok) if not there]
        todo = self._reserve(missing, batch, pages)
        answers = self._write_first_alone([(batch[index], pages[index]) for index in todo])
        failed = [place for place, stored in enumerate(answers) if not stored]
        for place, size in zip(failed, self._sizes([batch[todo[place]] for place in failed])):
            answers[place] = fits(size or 0, pages[todo[place]], self._ragged)  # another writer's
        for index, stored in zip(todo, answers):
            ok[index] = stored
            if not stored:
                self._forget([batch[index]])
        self._use(batch, pages, ok)
        if len(todo) == len(missing):
            self._states.leave("full")
            return ok
        self._states.enter("full", f"{flag('max_size')} has no room for more of a call: pages are refused")
        return FlagsWithReason(ok, MissReason.FULL)

    def delete(self, keys: Sequence[str]) -> None:
        self._check(keys)
        self._has_folder = False
        self._delete([self._path(key) for key in keys])
        self._forget(keys)

    def clear(self) -> None:
        self._check(())
        self._has_folder = False
        found = self._ask(self._list)
        self._delete([entry["path"] for entry in found])
        self._forget([key_in(entry) for entry in found])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)

    def ping(self) -> None:
        self._check(())
        self._sizes(["ping"])

    def stats(self) -> Mapping[str, float]:
        with self._lock:
            known = {"files": len(self._index), "used_bytes": self._index.num_bytes}
            return {"max_bytes": self.config.max_bytes, **known, **self._counts}

    # -- requests -----------------------------------------------------------------------

    def _check(self, keys: Sequence[str]) -> None:
        if self._closed:
            raise StorageError("storage backend is closed")
        check_keys(keys)

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def _ask(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (BaseError, CancelledError, RuntimeError) as error:  # the last two: closed under our feet
            raise StorageError(f"s3: {type(error).__name__}: {error_text(error)}") from error

    def _read_all(self, items: Sequence[tuple[str, Page]]) -> list[bool]:
        return self._each(self._read, items)

    def _write_first_alone(self, items: Sequence[tuple[str, Page]]) -> list[bool]:
        """Write `items`, where the folder may be new the first of them before the others.

        S3 has no folders, but servers that keep objects as files do: where writers that begin one at once
        meet, rclone answers that all is stored and finds only some of it.
        """
        alone = 0 if self._has_folder else 1
        answers = self._write_all(items[:alone])
        self._has_folder = self._has_folder or any(answers)
        return answers + self._write_all(items[alone:])

    def _write_all(self, items: Sequence[tuple[str, Page]]) -> list[bool]:
        return self._each(self._write, items)

    def _each(self, work: Callable[..., bool], items: Sequence[tuple[Any, ...]]) -> list[bool]:
        """`work` on each item, several at once; a fault is False, and StorageError when all items failed.

        Where only some failed, those are tried once more.
        """
        answers, faults = self._all(work, items)
        if faults and len(faults) < len(items):
            failed = list(faults)
            again, faults = self._all(work, [items[index] for index in failed])
            for index, answer in zip(failed, again):
                answers[index] = answer
        elif faults:
            self._ask(lambda: _throw(faults[0]))
        return answers

    def _all(
        self, work: Callable[..., bool], items: Sequence[tuple[Any, ...]]
    ) -> tuple[list[bool], dict[int, Exception]]:
        """Answers, and what was raised in the place of some. All have ended when this returns: pages are the
        caller's again."""
        futures = [self._begun(work, item) for item in items]
        answers: list[bool] = []
        faults: dict[int, Exception] = {}
        for index, future in enumerate(futures):
            try:
                answers.append(future.result())
            except Exception as error:
                faults[index] = error
                answers.append(False)
        if faults:
            with self._lock:
                self._counts["request_errors"] += len(faults)
            self._has_folder = False  # the bucket may be another one by the time it answers again
        return answers, faults

    def _begun(self, work: Callable[..., bool], item: tuple[Any, ...]) -> Future[bool]:
        try:
            return self._threads.submit(work, *item)
        except RuntimeError as error:
            failed: Future[bool] = Future()
            failed.set_exception(error)
            return failed

    def _sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Length of each object, None where there is none. Any fault raises: absence would be a guess."""
        futures = self._ask(lambda: [self._threads.submit(self._size, key) for key in keys])
        return [self._ask(future.result) for future in futures]

    def _size(self, key: str) -> int | None:
        try:
            return int(obstore.head(self._client, self._path(key))["size"])
        except FileNotFoundError:
            return None

    def _read(self, key: str, page: Page) -> bool:
        target = page if isinstance(page, InPlacePage) else InPlacePage(page)
        target.check_wanted()
        try:
            found = obstore.get(self._client, self._path(key))
        except FileNotFoundError:
            return False
        size = found.meta["size"]
        if not fits(size, target, self._ragged):
            return False
        target.begin(size)
        pieces = found.stream(min_chunk_size=1) if size > STREAM_BYTES else [found.bytes()]
        return all(target.write(memoryview(piece)) for piece in pieces) and target.is_whole

    def _write(self, key: str, page: Page) -> bool:
        data = page[0] if len(page) == 1 else memoryview(b"".join(page))
        obstore.put(self._client, self._path(key), data, use_multipart=False)
        return True

    def _list(self) -> list[Any]:
        return [entry for part in obstore.list(self._client, self._folder + "/") for entry in part]

    def _delete(self, paths: Sequence[str]) -> None:
        futures = self._ask(lambda: [self._threads.submit(self._delete_one, path) for path in paths])
        for future in futures:
            self._ask(future.result)

    def _delete_one(self, path: str) -> None:
        try:
            obstore.delete(self._client, path)
        except FileNotFoundError:
            return

    # -- room ---------------------------------------------------------------------------

    def _open(self) -> None:
        found = self._list() if self.config.max_bytes else obstore.list(self._client, self._folder + "/")
        if not self.config.max_bytes:
            next(iter(found), None)  # says whether bucket and credentials are right
            return
        entries = {
            key_in(entry): LruEntry(int(entry["size"]), int(entry["last_modified"].timestamp() * 1e9))
            for entry in found
        }
        with self._lock:
            self._index.replace_all(entries, time.time_ns())
        self._reserve([], Batch.of(()), [])

    def _use(self, batch: Batch, pages: Sequence[Page], ok: Sequence[bool]) -> None:
        """Pages of a call that are there were used: each a little before the page in front of it. What is
        counted already keeps its length, as a buffer may be longer than what it is filled from."""
        if self.config.max_bytes:
            with self._lock:
                used_ns = self._used_ns(batch)
                for key, page, good, at_ns, front in zip(batch, pages, ok, used_ns, batch.fronts()):
                    if good:
                        size = self._index.size(key) or page_bytes(page)
                        self._index.use(key, LruEntry(size, at_ns), front)

    def _used_ns(self, batch: Batch) -> list[int]:
        """The time of use (ns) of each page of a call. Call with the lock held."""
        return batch.used_ns(self, self._index.now(time.time_ns()))

    def _forget(self, keys: Collection[str]) -> None:
        with self._lock:
            for key in keys:
                self._index.drop(key)

    def _reserve(self, todo: list[int], batch: Batch, pages: Sequence[Page]) -> list[int]:
        """The part of `todo` that fits under the cap, after evicting pages that are neither in the batch nor
        before it."""
        cap = self.config.max_bytes
        if not cap:
            return todo
        victims: dict[str, int] = {}
        fits: list[int] = []
        added: list[str] = []
        keep, fronts = frozenset(batch), batch.fronts()
        with self._lock:
            used_ns = self._used_ns(batch)
            first_ns = max(used_ns, default=BEFORE_ALL_NS - 1)
            self._index.follow(batch.after, first_ns)
            over = self._index.num_bytes - cap
            victims |= self._index.take(over, 0, keep, first_ns + 1) if over > 0 else {}
            for index in todo:
                size = page_bytes(pages[index])
                short = self._index.num_bytes + size - cap
                if short > 0:
                    victims |= self._index.take(short, cap // _SLACK_SHARE, keep, first_ns + 1)
                if self._index.num_bytes + size > cap:
                    break
                added += [] if batch[index] in self._index else [batch[index]]
                self._index.use(batch[index], LruEntry(size, used_ns[index]), fronts[index])
                fits.append(index)
            self._has_folder = self._has_folder and len(self._index) > len(fits)
        self._evict(victims, added)
        return fits

    def _evict(self, victims: Mapping[str, int], added: Sequence[str]) -> None:
        """Delete what was taken out for `added`. If that fails they change places again: nobody else would
        delete what does not count."""
        try:
            self._delete([self._path(key) for key in victims])
        except StorageError:
            self._forget(added)
            with self._lock:
                for key, num_bytes in victims.items():
                    self._index.use(key, LruEntry(num_bytes, 0))
            raise
        with self._lock:
            self._counts["evicted"] += len(victims)


def key_in(entry: Mapping[str, Any]) -> str:
    """The page key of a listed object."""
    return str(entry["path"]).rpartition("/")[2]


def _throw(error: BaseException) -> Any:
    raise error
