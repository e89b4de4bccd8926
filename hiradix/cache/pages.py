"""Page supply of both tiers: allocation that evicts when short, and the one owner that frees.

The tree hands back the pages it drops; everything that frees a page of either pool goes through
`PageSupply.release` or `free_*` here, so double frees and leaks have one place to look for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hiradix.tree import Freed, RadixTree, Tier

Pages = npt.NDArray[np.int32]
NO_PAGES: Pages = np.empty(0, np.int32)
BACKBONE = 0


class PageSource(Protocol):
    """A pool's free pages. Satisfied by `memory.PageAllocator` and by adapters over foreign allocators."""

    @property
    def num_pages(self) -> int: ...

    @property
    def available(self) -> int: ...

    def alloc(self, num_pages: int, /) -> Pages | None: ...

    def free(self, pages: Pages, /) -> None: ...


@dataclass(slots=True)
class Counters:
    """Monotonic counts since start, in pages unless named otherwise. Written by the scheduler thread only."""

    evicted_device: int = 0
    evicted_host: int = 0
    written: int = 0  # device to host copies adopted
    write_failed: int = 0
    write_dropped: int = 0  # no host page could be had
    loaded: int = 0  # host to device
    load_failed: int = 0
    load_refused: int = 0  # no device page could be had
    backed_up: int = 0  # host to storage
    backup_failed: int = 0
    prefetched: int = 0  # storage to host
    unfulfilled: dict[str, int] = field(default_factory=dict)  # prefetch pages not delivered, by reason

    def miss(self, reason: str, num_pages: int) -> None:
        """Count prefetch pages that did not arrive, under the upstream reason names."""
        if num_pages:
            self.unfulfilled[reason] = self.unfulfilled.get(reason, 0) + num_pages


class PageSupply:
    """Allocates pages, evicting unlocked tree data when a pool is short, and frees what the tree returns."""

    def __init__(self, tree: RadixTree, device: PageSource, host: PageSource | None, counters: Counters):
        self.tree = tree
        self.device = device
        self.host = host
        self.counters = counters

    def release(self, freed: Iterable[Freed]) -> int:
        """Free pages the tree dropped. Returns how many of them were device backbone pages."""
        num_device = 0
        for drop in freed:
            if drop.tier is Tier.HOST:
                self.free_host(drop.pages)
                self.counters.evicted_host += len(drop.pages)
            else:
                self.device.free(drop.pages)
                self.counters.evicted_device += len(drop.pages)
                num_device += len(drop.pages) if drop.component == BACKBONE else 0
        return num_device

    def evict(self, tier: Tier, num_pages: int) -> int:
        """Evict at least `num_pages` pages of `tier`, or all that is unlocked. Returns device pages freed."""
        return self.release(self.tree.evict(BACKBONE, tier, num_pages))

    def free_host(self, pages: Pages) -> None:
        if len(pages):
            assert self.host is not None, "host pages without a host pool"
            self.host.free(pages)

    def host_room(self) -> int:
        """Host pages that are free or can be made so."""
        return 0 if self.host is None else self.host.available + self.tree.evictable_pages(Tier.HOST)

    def alloc_host(self, num_pages: int) -> Pages | None:
        """Host pages, evicting when short; None (and nothing evicted) if even that cannot give enough."""
        if self.host is None:
            return None
        short = num_pages - self.host.available
        if short > 0:
            if short > self.tree.evictable_pages(Tier.HOST):
                return None
            self.evict(Tier.HOST, short)
        return self.host.alloc(num_pages)

    def device_room(self) -> int:
        """Device pages that are free or can be made so."""
        return self.device.available + self.tree.evictable_pages(Tier.DEVICE)
