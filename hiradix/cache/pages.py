"""Page supply of both tiers: allocation that evicts when short, and the one owner that frees.

The tree hands back the pages it drops; everything that frees a page of either pool goes through
`PageSupply.release` or `free_*` here, so double frees and leaks have one place to look for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hiradix.cache.departed import Departed
from hiradix.errors import Misuse
from hiradix.explain import Reason
from hiradix.transfer import PageSource
from hiradix.tree import DEVICE, HOST, Freed, Lock, Node, NodePages, RadixKey, RadixTree, Tier

Pages = npt.NDArray[np.int32]
NO_PAGES: Final[Pages] = np.empty(0, np.int32)
BACKBONE: Final = 0

Share = Callable[[Callable[[], float]], Callable[[], float]]
"""Turns a function that measures something on this rank into one that gives the number all ranks agreed on. With
one rank, the function itself."""


class CappedPages:
    """A pool that gives out at most `num_pages` pages, so that ranks with larger pools fill up when the rank
    with the smallest one does."""

    def __init__(self, inner: PageSource, num_pages: int):
        if num_pages > inner.num_pages:
            raise Misuse(f"{num_pages} pages of a pool of {inner.num_pages}")
        self.num_pages = num_pages
        self._inner = inner
        self._kept_back = inner.num_pages - num_pages

    @property
    def available(self) -> int:
        return self._inner.available - self._kept_back

    @property
    def end_page(self) -> int | None:
        end: int | None = getattr(self._inner, "end_page", None)
        return end

    def alloc(self, num_pages: int) -> Pages | None:
        return self._inner.alloc(num_pages) if num_pages <= self.available else None

    def free(self, pages: Pages) -> None:
        self._inner.free(pages)


@dataclass(slots=True)
class CacheCounters:
    """Monotonic counts since start, in pages unless named otherwise. Written by the scheduler thread only."""

    evicted_device: int = 0
    evicted_host: int = 0
    written: int = 0  # device to host copies adopted
    write_failed: int = 0
    write_refused: int = 0  # worth less than the host pages that would have been evicted for them
    write_dropped: int = 0  # no host page could be had
    loaded: int = 0  # host to device
    load_failed: int = 0
    load_refused: int = 0  # no device page could be had
    load_too_slow: int = 0  # computing again was predicted to be faster
    backed_up: int = 0  # host to storage
    backup_failed: int = 0
    prefetched: int = 0  # storage to host
    prefetched_late: int = 0  # of those, pages that arrived after the last request had stopped waiting
    refetched: int = 0  # pages fetched again, as their room went to a request nearer to its turn
    unfulfilled: dict[str, int] = field(default_factory=dict)  # prefetch pages not delivered, by reason

    def miss(self, reason: str, num_pages: int) -> None:
        """Count prefetch pages that did not arrive, under the upstream reason names."""
        if num_pages:
            self.unfulfilled[reason] = self.unfulfilled.get(reason, 0) + num_pages


Sources = PageSource | Sequence[PageSource]
PagesOf = dict[int, Pages]  # by component


class PairedSource(PageSource, Protocol):
    """An engine's pool of window pages that a model reaches through backbone pages, as by SGLang's
    full-to-window map."""

    def pair(self, backbone: Pages, pages: Pages, /) -> None:
        """Pair each page of `backbone` with the page of `pages` at its place, in place of all earlier pairs."""


class PageSupply:
    """Allocates pages, evicts unlocked tree data when a pool is short, and is the only owner that frees.

    A page is in exactly one of four places: free in its pool, in the tree, held by a request (device) or owned
    by a job in flight (host). `check_conservation` adds them up.

    device, host: one source per component of the tree, or the source itself if there is one component. None, or
        (), where the tree does not manage that tier, as with an engine's own block table. `pair` of a device
        source is called when its pages move to other backbone pages (`PairedSource`). A source's `end_page`
        bounds the page ids that the tree accepts.
    num_dropped: device pages that evictions have freed since start, per component.
    """

    def __init__(self, tree: RadixTree, device: Sources, host: Sources | None, counters: CacheCounters):
        self.tree = tree
        self.device_pools = as_tuple(device)
        self.host_pools = () if host is None else as_tuple(host)
        for pools in (self.device_pools, self.host_pools):
            if len(pools) not in (0, len(tree.components)):
                raise Misuse(f"{len(pools)} pools for {tree.components}")
        for tier, pools in ((DEVICE, self.device_pools), (HOST, self.host_pools)):
            for component, pool in enumerate(pools):
                end = getattr(pool, "end_page", None)
                if end is not None:
                    tree.limit_pages(component, tier, end)
        self.host = self.host_pools[BACKBONE] if self.host_pools else None
        self.counters = counters
        self.num_dropped = [0] * len(tree.components)
        self.departed: Departed | None = None  # who remembers what leaves, if anybody does
        self._pair: list[Callable[[Pages, Pages], None] | None] = [
            getattr(pool, "pair", None) for pool in self.device_pools
        ]

    def remember(self, departed: Departed) -> None:
        """Have `departed` told why what leaves does so."""
        self.departed = departed

    def leaving(self, reason: Reason) -> AbstractContextManager[None]:
        """A context in which all that leaves the tree is remembered to have left for `reason`, not by
        eviction."""
        return nullcontext() if self.departed is None else self.departed.because(reason)

    def release(self, freed: Iterable[Freed]) -> int:
        """Free pages the tree dropped. Returns how many of them were device backbone pages."""
        before = self.num_dropped[BACKBONE]
        for drop in freed:
            component, pages = drop.component, drop.pages
            if drop.tier is HOST:
                self.free_host(pages, component)
                self.counters.evicted_host += len(pages) if component == BACKBONE else 0
            else:
                self.device_pools[component].free(pages)
                self.num_dropped[component] += len(pages)
                self.counters.evicted_device += len(pages) if component == BACKBONE else 0
        return self.num_dropped[BACKBONE] - before

    def evict(self, tier: Tier, num_pages: int, component: int = BACKBONE) -> int:
        """Evict at least `num_pages` pages, or all that is unlocked. Returns device pages freed."""
        before = self.num_dropped[component]
        self.release(self.tree.evict(component, tier, num_pages))
        return self.num_dropped[component] - before

    def demote(self, nodes: Iterable[Node], component: int = BACKBONE) -> int:
        """Drop the device pages of these nodes; of the backbone only those that are on the host too. Returns how
        many were freed."""
        before = self.num_dropped[component]
        for node in nodes:
            if self.tree.current(node) is None:
                continue
            if component == BACKBONE:
                self.release(self.tree.demote(node))
            else:
                self.release(self.tree.drop_other(node, component, DEVICE))
        return self.num_dropped[component] - before

    def give(self, key: RadixKey, pages: Sequence[Pages], at: Lock | None) -> Lock:
        """Insert device pages, one array per component, and free the duplicates.

        Where the backbone page is a duplicate but its window page is not, the window page is paired with the
        tree's backbone page before the duplicate is freed.
        """
        done = self.tree.insert(key, DEVICE, pages, at=at)
        duplicates = done.duplicates
        if len(pages) == 1:
            if len(duplicates[BACKBONE]):
                self.device_pools[BACKBONE].free(duplicates[BACKBONE])
            return done.lock
        if len(duplicates[BACKBONE]):
            own = self.tree.pages(done.lock.node, DEVICE, done.lock.node.end - len(pages[BACKBONE]))
            for pair, given, refused in zip(self._pair[1:], pages[1:], duplicates[1:], strict=True):
                if pair is not None and len(given):
                    beside, before = own[-len(given) :], pages[BACKBONE][-len(given) :]
                    moved = (beside != before) & ~np.isin(given, refused)
                    pair(beside[moved], given[moved])
        for pool, refused in zip(reversed(self.device_pools), reversed(duplicates), strict=True):
            if len(refused):
                pool.free(refused)
        return done.lock

    def take_path(self, node: Node, pages: Pages) -> None:
        """Give the tree device pages for the last part of the path to `node`, whose backbone is not on the
        device."""
        refused = self.tree.adopt(node, BACKBONE, DEVICE, pages)
        if len(refused):
            raise Misuse(f"device pages {refused} for what is resident")

    def take_beside(self, segment: NodePages, pages: Pages) -> None:
        """Give the tree device pages for `segment`, which is not on the device, paired with its backbone
        pages."""
        refused = self.tree.adopt(segment.node, segment.component, DEVICE, pages)
        if len(refused):
            raise Misuse(f"device pages {refused} for what is resident")
        pair = self._pair[segment.component]
        if pair is not None:
            pair(self.tree.pages(segment.node, DEVICE, segment.end - len(pages)), pages)

    def check_conservation(self, num_held: int, in_flight: Mapping[int, int]) -> None:
        """Assert that free pages, pages in the tree and pages owned elsewhere add up to each pool. O(1).

        num_held: backbone pages on the device that requests own and the tree does not; further components are
        not checked there. in_flight: host pages that jobs own, by component. Holds between scheduler steps.
        """
        if self.device_pools:
            self._check_pool(DEVICE, BACKBONE, self.device_pools[BACKBONE], num_held)
        for component, pool in enumerate(self.host_pools):
            self._check_pool(HOST, component, pool, in_flight[component])

    def _check_pool(self, tier: Tier, component: int, pool: PageSource, own: int) -> None:
        free, resident = pool.available, self.tree.resident_pages(tier, component)
        if free + resident + own != pool.num_pages:
            raise Misuse(
                f"{tier.name} pages of component {component}: {free} free + {resident} tree + "
                f"{own} {'in flight' if tier else 'of requests'} != {pool.num_pages}"
            )

    def free_host(self, pages: Pages, component: int = BACKBONE) -> None:
        if len(pages):
            self.host_pools[component].free(pages)

    def free_all_host(self, pages: PagesOf) -> None:
        """Free host pages of several components."""
        for component, own in pages.items():
            self.free_host(own, component)

    def host_room(self, component: int = BACKBONE) -> int:
        """Host pages that are free or evictable."""
        if not self.host_pools:
            return 0
        return self.host_pools[component].available + self.tree.evictable_pages(HOST, component)

    def alloc_host(self, num_pages: int, component: int = BACKBONE) -> Pages | None:
        """Host pages, evicting when short; None (and nothing evicted) if even that cannot give enough."""
        if not self.host_pools:
            return None
        pool = self.host_pools[component]
        pages = pool.alloc(num_pages)
        if pages is not None:
            return pages
        short = num_pages - pool.available
        if short > self.tree.evictable_pages(HOST, component):
            return None
        self.evict(HOST, short, component)
        return pool.alloc(num_pages)

    def alloc_all_host(self, num_pages: Mapping[int, int]) -> PagesOf | None:
        """Host pages of several components, all or none."""
        found: dict[int, Pages] = {}
        for component, count in num_pages.items():
            pages = self.alloc_host(count, component) if count else NO_PAGES
            if pages is None:
                self.free_all_host(found)
                return None
            found[component] = pages
        return found

    def device_room(self, component: int = BACKBONE) -> int:
        """Device pages that are free or evictable."""
        return self.device_pools[component].available + self.tree.evictable_pages(DEVICE, component)


def as_tuple(sources: Sources) -> tuple[PageSource, ...]:
    """The sources of all components."""
    return tuple(sources) if isinstance(sources, Sequence) else (sources,)


def gathered(segments: Sequence[NodePages], components: Iterable[int]) -> dict[int, Pages]:
    """The segments' pages per component, in their order."""
    return {
        component: np.concatenate([NO_PAGES, *(s.pages for s in segments if s.component == component)])
        for component in components
    }


def shared_out(pages: PagesOf, segments: Sequence[NodePages]) -> list[tuple[NodePages, Pages]]:
    """Each segment with its part of `pages`, the reverse of `gathered`: `pages` has `sizes(segments)` pages of
    each component, in the segments' order."""
    found: list[tuple[NodePages, Pages]] = []
    if not segments:
        return found
    at = dict.fromkeys(pages, 0)
    for segment in segments:
        begin = at[segment.component]
        at[segment.component] = begin + len(segment.pages)
        found.append((segment, pages[segment.component][begin : at[segment.component]]))
    return found


def sizes(segments: Iterable[NodePages]) -> dict[int, int]:
    """Pages of the segments per component; 0 for the backbone if it has none."""
    found = {BACKBONE: 0}
    for segment in segments:
        found[segment.component] = found.get(segment.component, 0) + len(segment.pages)
    return found
