"""StateRadixCache: the prefix cache for models whose layers are partly recurrent.

Such a layer keeps no data per token but one state, so a prefix can be continued only from where a record of
all states was taken. A record is a page of a pool of its own, with one row per layer, and belongs to the
place where a prefix ends: a match ends only where there is one.

The tree's records are never written: a request reads the one it found and keeps its own state elsewhere.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from hiradix.cache import PageSource
from hiradix.errors import ConfigError, Misuse
from hiradix.policy.uses import Finished
from hiradix.prefix_cache.hiradix import HiRadixCache
from hiradix.prefix_cache.hybrid import HybridRadixCache
from hiradix.prefix_cache.records import (
    STATE,
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    RequestLike,
    StatefulRequestLike,
)
from hiradix.prefix_cache.slots import Pages, pages_of
from hiradix.tree import DEVICE, Component, Lock, Node, RadixKey


class StateRadixCache(HybridRadixCache):
    """Caches prefixes with the recurrent state at their ends. The plain size methods speak of full tokens.

    Whenever a request's tokens enter the tree, `take_record` is asked for the state behind the last of them.

    >>> from hiradix.memory import PageAllocator, ReqToTokenPool, SlotAllocator
    >>> slots, records = SlotAllocator(num_tokens=64, page_size=4), PageAllocator(8, first_page=1)
    >>> params = CacheInitParams(False, ReqToTokenPool(8, 64), slots, page_size=4, state_records=records)
    >>> cache = StateRadixCache(params)
    >>> (record,) = records.alloc(1).tolist()
    >>> cache.insert(InsertParams(RadixKey(list(range(8))), slots.alloc(8), mamba_value=record))
    InsertResult(prefix_len=0)
    >>> hit = cache.match_prefix(MatchPrefixParams(RadixKey([*range(8), 99])))
    >>> len(hit.device_indices), cache.record(hit.last_device_node) == record
    (8, True)
    >>> hit = cache.match_prefix(MatchPrefixParams(RadixKey([0, 1, 2, 3, 99])))
    >>> len(hit.device_indices), hit.mamba_branching_seqlen  # pages are there, and no record at their end
    (0, 4)
    """

    def _further(self, params: CacheInitParams) -> tuple[Component, PageSource]:
        if params.state_records is None:
            raise ConfigError("state_records: needed by StateRadixCache")
        return Component("state", reach=1, per_page=False), params.state_records

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """As `RadixCache.match_prefix`, up to a record; and where the pages end that are there beyond it."""
        found = super().match_prefix(params)
        known = 0 if self.disable else self.tree.find(self._view(params.key)).end
        if known <= found.last_host_node.end:
            return found
        return found._replace(mamba_branching_seqlen=known * self.page_size)

    # -- sizes --------------------------------------------------------------------------

    def mamba_evictable_size(self) -> int:
        """Device records that no request and no transfer holds."""
        return self.tree.evictable_pages(DEVICE, STATE)

    def mamba_protected_size(self) -> int:
        """Device records in the tree that a request or a transfer holds."""
        return self.tree.protected_pages(DEVICE, STATE)

    def total_size(self) -> tuple[int, int]:  # type: ignore[override]
        """What the tree has on the device: tokens with full data, and records."""
        return self.tree.resident_pages(DEVICE) * self.page_size, self.tree.resident_pages(DEVICE, STATE)

    def supports_mamba(self) -> bool:
        return True

    def record(self, node: Node) -> int:
        """The device record at `node`, a boundary that is locked there; 0 at the root, where nothing was."""
        if node is self.tree.root:
            return 0
        own = node.residency(STATE, DEVICE).pages
        if own is None or len(own) != 1:
            raise Misuse(f"{node} is matched and has no record: {own}")
        return int(own[0])

    # -- writing ------------------------------------------------------------------------

    def _insert(self, key: RadixKey, pages: Pages, params: InsertParams, ended: Finished | None) -> Lock:
        given = [] if params.mamba_value is None else [params.mamba_value]
        return self.cache.insert(key, pages, others=(np.array(given, np.int32),), ended=ended)

    def _free_refused(self, pages: Pages, params: InsertParams) -> None:
        super()._free_refused(pages, params)
        if params.mamba_value is not None:
            self.cache.supply.device_pools[STATE].free(np.array([params.mamba_value], np.int32))

    def insert_row(
        self, key: RadixKey, row: torch.Tensor, req: RequestLike, ended: Finished | None = None
    ) -> Lock:
        """Insert `key` from the node `req` holds, with its record; what the tree has already is freed."""
        held = self._held(req)
        pages = pages_of(row, self.page_size, held.node.end * self.page_size, len(key))
        if self.cache.is_blocked(key):
            return self.cache.insert(key, pages, at=held)
        record = np.array([cast(StatefulRequestLike, req).take_record(len(key))], np.int32)
        return self.cache.insert(key, pages, at=held, others=(record,), ended=ended)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least so many full tokens and so many records, or all that nothing holds.

        Full pages take along the record at their end. Records leave the pages where some match can still
        use them.
        """
        if self.disable:
            return EvictResult()
        full, records = self._evicted(-(-params.num_tokens // self.page_size), 0)
        more = self._evicted(params.mamba_num - records, STATE)
        return EvictResult((full + more[0]) * self.page_size, mamba_num_evicted=records + more[1])


class StateHiRadixCache(StateRadixCache, HiRadixCache):
    """`StateRadixCache` with a host tier and storage: pages and the record of their end come back at once."""
