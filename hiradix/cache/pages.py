"""Page supply of both tiers: allocation that evicts when short, and the one owner that frees.

The tree hands back the pages it drops; everything that frees a page of either pool goes through
`PageSupply.release` or `free_*` here, so double frees and leaks have one place to look for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hiradix.tree import Freed, Lock, RadixKey, RadixTree, Tier

Pages = npt.NDArray[np.int32]
NO_PAGES: Pages = np.empty(0, np.int32)
BACKBONE = 0

Share = Callable[[Callable[[], float]], Callable[[], float]]
"""Makes what one rank measures a number all ranks agree on; with one rank the same function."""


class PageSource(Protocol):
    """A pool's free pages. Satisfied by `memory.PageAllocator` and by adapters over foreign allocators."""

    @property
    def num_pages(self) -> int: ...

    @property
    def available(self) -> int: ...

    def alloc(self, num_pages: int, /) -> Pages | None: ...

    def free(self, pages: Pages, /) -> None: ...


class CappedPages:
    """The first `num_pages` pages' worth of a pool: what every rank has, where one rank's pool is smaller."""

    def __init__(self, inner: PageSource, num_pages: int):
        assert num_pages <= inner.num_pages, f"{num_pages} pages of a pool of {inner.num_pages}"
        self.num_pages = num_pages
        self._inner = inner
        self._kept_back = inner.num_pages - num_pages

    @property
    def available(self) -> int:
        return self._inner.available - self._kept_back

    def alloc(self, num_pages: int) -> Pages | None:
        return self._inner.alloc(num_pages) if num_pages <= self.available else None

    def free(self, pages: Pages) -> None:
        self._inner.free(pages)


@dataclass(slots=True)
class Counters:
    """Monotonic counts since start, in pages unless named otherwise. Written by the scheduler thread only."""

    evicted_device: int = 0
    evicted_host: int = 0
    written: int = 0  # device to host copies adopted
    write_failed: int = 0
    write_refused: int = 0  # not worth what would have had to leave the host for it
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


class PairedSource(PageSource, Protocol):
    """A device pool whose pages a model finds beside the backbone's, such as a sliding window's."""

    def pair(self, backbone: Pages, pages: Pages, /) -> None:
        """`pages` lie beside these backbone pages from here on, and beside no others."""


class PageSupply:
    """Allocates pages, evicting unlocked tree data when a pool is short, and frees what the tree returns.

    device: a source per component; one with a `pair` method is told what its pages lie beside.
    num_dropped: device pages that evictions freed since start, per component.
    """

    def __init__(
        self,
        tree: RadixTree,
        device: PageSource | Sequence[PageSource],
        host: PageSource | None,
        counters: Counters,
    ):
        device = device if isinstance(device, Sequence) else (device,)
        assert len(device) == len(tree.components), f"{len(device)} device pools for {tree.components}"
        self.tree = tree
        self.device_pools = tuple(device)
        self.device = device[BACKBONE]
        self.host = host
        self.counters = counters
        self.num_dropped = [0] * len(device)
        self._pair: list[Callable[[Pages, Pages], None] | None] = [
            getattr(pool, "pair", None) for pool in device
        ]

    def release(self, freed: Iterable[Freed]) -> int:
        """Free pages the tree dropped. Returns how many of them were device backbone pages."""
        before = self.num_dropped[BACKBONE]
        for component, tier, pages in sorted(freed, reverse=True):  # what lies beside the backbone first
            if tier is Tier.HOST:
                self.free_host(pages)
                self.counters.evicted_host += len(pages)
            else:
                self.device_pools[component].free(pages)
                self.num_dropped[component] += len(pages)
                self.counters.evicted_device += len(pages)
        return self.num_dropped[BACKBONE] - before

    def evict(self, tier: Tier, num_pages: int, component: int = BACKBONE) -> int:
        """Evict at least `num_pages` pages of a tier, or all that is unlocked. Returns how many."""
        before = self.num_dropped[component]
        num_device = self.release(self.tree.evict(component, tier, num_pages))
        return self.num_dropped[component] - before if component else num_device

    def give(self, key: RadixKey, pages: Sequence[Pages], at: Lock | None) -> Lock:
        """Insert device pages, one array per component, and free what the tree has already.

        A page that the tree takes beside a backbone page of its own, instead of the one it came with, is
        paired with that before the other is freed.
        """
        done = self.tree.insert(key, Tier.DEVICE, pages, at=at)
        duplicates = done.duplicates
        if len(pages) == 1:
            if len(duplicates[BACKBONE]):
                self.device.free(duplicates[BACKBONE])
            return done.lock
        if len(duplicates[BACKBONE]):
            own = self.tree.pages(done.lock.node, Tier.DEVICE, done.lock.node.end - len(pages[BACKBONE]))
            for pair, given, refused in zip(self._pair[1:], pages[1:], duplicates[1:], strict=True):
                if pair is not None and len(given):
                    beside, before = own[-len(given) :], pages[BACKBONE][-len(given) :]
                    moved = (beside != before) & ~np.isin(given, refused)
                    pair(beside[moved], given[moved])
        for pool, refused in zip(reversed(self.device_pools), reversed(duplicates), strict=True):
            if len(refused):
                pool.free(refused)
        return done.lock

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
