"""Protocols of an engine's objects: its allocators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hiradix.transfer.jobs import Pages
from hiradix.tree.hashing import PageRows

HashPages = Callable[[PageRows], list[bytes]]
Clock = Callable[[], float]


class PageSource(Protocol):
    """The border to an engine's allocator: a pool's free pages. Satisfied by
    `memory.PageAllocator` and by adapters over foreign allocators."""

    @property
    def num_pages(self) -> int: ...

    @property
    def available(self) -> int: ...

    def alloc(self, num_pages: int, /) -> Pages | None: ...

    def free(self, pages: Pages, /) -> None: ...
