"""The protocol of a storage backend: batches of pages under opaque string keys.

Rules for every backend, held by `tests/contracts/storage.py`:
1. A `True` from `get` means the buffer holds exactly the bytes once put under that key. All else is a miss.
2. A `True` from `put` means the page can be read from now on; only a later miss may take it away.
3. Answers have one entry per key, in order; an entry never depends on another key's fate.
4. All calls may come from several threads at once; `close` is idempotent.
5. A key is a name (see `check_key`), never a path. `clear` touches only this fingerprint's pages.
6. Faults of the world raise `StorageError` or `OSError`; the guard turns them into misses. In a constructor
   they say that the store does not answer now (`reach`), ConfigError that a value is wrong.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from hiradix.errors import ConfigError, StorageError
from hiradix.storage.batch import Batch
from hiradix.storage.fingerprint import PageFingerprint

Page = Sequence[memoryview]
"""One page as buffers in order: C-contiguous, writable where it is read into. Sizes are the caller's."""

MAX_KEY_CHARS = 200
PAGE_HASH_CHARS = 64
_KEY = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.\-]{{0,{MAX_KEY_CHARS - 1}}}")


class BadKey(StorageError):
    """A caller's key is none; the store was not asked."""


def check_key(key: object) -> str:
    """`key` when it is 1 to 200 of `A-Za-z0-9_.-` and starts with a letter or digit; else BadKey."""
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise BadKey(f"not a storage key: {key!r:.80}")
    return key


def is_key(name: str) -> bool:
    """Whether `check_key` takes it."""
    return _KEY.fullmatch(name) is not None


def check_keys(keys: Sequence[str]) -> None:
    """`check_key` of each; page hashes are looked at together, in 5 us for 128."""
    try:
        alike = list(map(len, keys)).count(PAGE_HASH_CHARS) == len(keys) > 0
        if alike and "".join(keys).encode("ascii").isalnum():
            return
    except (TypeError, UnicodeEncodeError):
        pass  # one of them is no key: the loop says which
    for key in keys:
        check_key(key)


def page_bytes(page: Page) -> int:
    """Length of a page over all its buffers."""
    return page[0].nbytes if len(page) == 1 else sum([view.nbytes for view in page])


def sizes_of(pages: Sequence[Page]) -> list[int]:
    """`page_bytes` of each."""
    return [page[0].nbytes if len(page) == 1 else page_bytes(page) for page in pages]


def fits(num_bytes: int, page: Page, ragged: bool) -> bool:
    """Whether a stored value of that length may be read into `page`."""
    return num_bytes == page_bytes(page) or (ragged and 0 < num_bytes < page_bytes(page))


@dataclass(frozen=True)
class Traits:
    """Checks and limits that a backend takes care of itself, so that the guard need not.

    verifies: `get` checks identity and checksum of what it read. Otherwise the guard adds a seal to each
    page. namespaced: keys of different fingerprints cannot meet. Otherwise the guard puts the fingerprint in
    the key. direct: `exists`, `get` and `put` run on the caller's thread with the caller's own buffers, which
    saves a copy and two changes of thread; for local stores that verify, whose calls the kernel ends. Such a
    call is never abandoned: one that is past its deadline makes all others misses until it ends. ragged: the
    backend does as it is told by `StorageContext.ragged`. width: requests that it has under way at once; a
    call gets at least so many pages of a batch, staging memory growing with it. deletes: `delete` gives the
    page's bytes back. checks_keys: it raises BadKey itself, before it does anything else; otherwise the guard
    looks at all keys first, which takes 5 us for 128. in_place: `get` fills a page that is a `InPlacePage` by
    that one's methods alone, never by its buffers or addresses; the guard then gives it the caller's own pages,
    without a copy, and takes them back when it gives the call up. guarded: it passes calls on to guards of
    its own, whose breakers tell what is slow or hangs: that a call of the whole took long is no failure of
    the whole.
    """

    verifies: bool = False
    namespaced: bool = False
    direct: bool = False
    ragged: bool = False
    width: int = 1
    deletes: bool = True
    checks_keys: bool = False
    in_place: bool = False
    guarded: bool = False


@dataclass(frozen=True)
class StorageContext:
    """The arguments a backend is made with.

    extra_config: the backend's keys of `--hicache-storage-backend-extra-config`.
    page_bytes: length of every page in bytes.
    ragged: pages may be stored shorter than the buffers they are read into, and are then read into the head
    of those. Only for backends with that trait.
    elements: the one type that pages are made of, such as "bfloat16"; "" where they are not, or nobody knows.
    required: whether a store that does not answer is an error, Unreachable, for whoever opens it; else it is
    joined later.
    """

    fingerprint: PageFingerprint
    extra_config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    page_bytes: int = 0
    ragged: bool = False
    elements: str = ""
    required: bool = True

    def __post_init__(self) -> None:
        if self.page_bytes <= 0:
            raise ConfigError(f"page_bytes must be positive, got {self.page_bytes}")


class StorageBackend(Protocol):
    """The border to stores, and the base of backends; made as `cls(context)`. `register`, `ping`, `stats`,
    `traits`, `scrub` and the two `forget_...` have defaults.

    A batch is the sequence of its keys, and says what is known of them besides: see `Batch`.

    >>> class DictBackend(StorageBackend):
    ...     def __init__(self, context):
    ...         self._pages = {}
    ...     def exists(self, batch):
    ...         return next((i for i, key in enumerate(batch) if key not in self._pages), len(batch))
    ...     def get(self, batch, into):
    ...         for key, page in zip(batch, into):
    ...             page[0][:] = self._pages.get(key, page[0])
    ...         return [key in self._pages for key in batch]
    ...     def put(self, batch, pages):
    ...         for key, page in zip(batch, pages):
    ...             self._pages.setdefault(key, bytes(page[0]))
    ...         return [True] * len(batch)
    ...     def delete(self, keys):
    ...         for key in keys:
    ...             self._pages.pop(key, None)
    ...     def clear(self):
    ...         self._pages.clear()
    ...     def close(self):
    ...         self._pages = {}
    >>> backend, page = DictBackend(None), bytearray(4)
    >>> backend.put(Batch.of(["a"]), [[memoryview(b"KVKV")]]), backend.exists(Batch.of(["a", "b"]))
    ([True], 1)
    >>> backend.get(Batch.of(["a"]), [[memoryview(page)]]), page
    ([True], bytearray(b'KVKV'))
    """

    traits: Traits = Traits()

    @abstractmethod
    def exists(self, batch: Batch) -> int:
        """The number of leading keys that are present: a hint, a later miss is normal."""
        ...

    @abstractmethod
    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        """Read pages into `into`. False: absent or damaged, and that buffer's contents are undefined."""
        ...

    @abstractmethod
    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        """Store pages. A key that is there already is a success and keeps its bytes. False: not stored."""
        ...

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Forget keys; absent ones are ignored."""
        ...

    @abstractmethod
    def clear(self) -> None:
        """Forget every page of this fingerprint, and nothing else."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Later calls raise StorageError; closing again does nothing."""
        ...

    def forget_tenant(self, tenant: str) -> int | None:
        """Forget every page of a tenant: how many there were. None: this store cannot tell whose they are."""
        return None

    def forget_behind(self, batch: Batch) -> int | None:
        """Forget every page that continues one of these in its chain: how many there were. None: this
        store cannot tell which those are."""
        return None

    def scrub(self) -> None:
        """Leave no bytes and no names of pages that were deleted; for stores that do so later by themselves."""
        return None

    def stats(self) -> Mapping[str, float]:
        """Figures for metrics, by name. Cheap: no I/O."""
        return {}

    def ping(self) -> None:
        """Raise unless the store can be reached now."""
        return None

    def register(self, memory: memoryview) -> None:
        """Told once of each host pool, for engines that read and write registered memory."""
        return None
