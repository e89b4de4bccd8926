"""Events of the host tier in vLLM's block hashes, so that routers see one name per block in every tier.

Named from the request that brought a page in. The connector gives it vLLM's event types, so that it can be
tested without vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hiradix.adapters.vllm.requests import Tracked
from hiradix.tree import Pages


@dataclass(frozen=True)
class Stored:
    """Blocks that are on the host from now on: consecutive, of one request."""

    hashes: Sequence[bytes]
    parent: bytes | None
    token_ids: Sequence[int]
    lora: Any


@dataclass
class HostEvents:
    """Collects events between two `take`s. ratio: vLLM's hashes per page.

    stored, removed: make the engine's events.
    """

    page_size: int
    ratio: int
    stored: Callable[[Stored], Any]
    removed: Callable[[Sequence[bytes]], Any]
    _names: dict[int, bytes] = field(default_factory=dict)
    _events: list[Any] = field(default_factory=list)

    def record_stored(self, tracked: Tracked, start: int, pages: Pages) -> None:
        """Host pages hold the request's pages from page `start` on. Those that are known already are not
        reported again."""
        known = next((at for at, page in enumerate(pages.tolist()) if page not in self._names), len(pages))
        start, pages = start + known, pages[known:]
        hashes = tracked.request.block_hashes
        first, end = start * self.ratio, (start + len(pages)) * self.ratio
        if not len(pages) or len(hashes) < end:
            return
        names = [bytes(name) for name in hashes[first + self.ratio - 1 : end : self.ratio]]
        self._names.update(zip(pages.tolist(), names, strict=True))
        parent = bytes(hashes[first - 1]) if first else None
        tokens = tracked.request.all_token_ids[start * self.page_size : (start + len(pages)) * self.page_size]
        self._events.append(self.stored(Stored(names, parent, list(tokens), tracked.request.lora_request)))

    def record_removed(self, dropped: Sequence[Pages]) -> None:
        """Record that host pages are free again: an event with the names of those that had one."""
        names = [self._names.pop(page) for pages in dropped for page in pages.tolist() if page in self._names]
        if names:
            self._events.append(self.removed(names))

    def take(self) -> list[Any]:
        """Events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
