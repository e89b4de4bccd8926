"""What comes from outside: allocators of an engine, storage of whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hiradix.transfer.jobs import Pages
from hiradix.tree.hashing import PageRows

HashPages = Callable[[PageRows], list[bytes]]
Clock = Callable[[], float]
PrefixKeys = Sequence[str] | None  # of the pages before those of a call; None: not known, or not asked for
Views = Sequence[Sequence[memoryview]]


class PageSource(Protocol):
    """A pool's free pages. Satisfied by `memory.PageAllocator` and by adapters over foreign allocators."""

    @property
    def num_pages(self) -> int: ...

    @property
    def available(self) -> int: ...

    def alloc(self, num_pages: int, /) -> Pages | None: ...

    def free(self, pages: Pages, /) -> None: ...


class StorageLike(Protocol):
    """The three calls workers make. Answers are checked, not trusted: hence `object`."""

    def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] = (), /) -> object: ...

    def get(self, keys: Sequence[str], into: Views, prefix_keys: PrefixKeys = None, /) -> object: ...

    def put(self, keys: Sequence[str], pages: Views, prefix_keys: PrefixKeys = None, /) -> object: ...


class TenantStorage(Protocol):
    """The put of storage that says `wants_tenant`: whose pages they are comes last."""

    def put(self, keys: Sequence[str], pages: Views, prefix_keys: PrefixKeys, tenant: str, /) -> object: ...


class PartedStorage(Protocol):
    """Storage with a store for each component of a cache, the backbone's first."""

    @property
    def parts(self) -> Sequence[StorageLike]: ...
