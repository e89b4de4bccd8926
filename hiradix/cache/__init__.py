"""The hierarchical cache: decides which pages move between device, host and storage, and books what came of it.

    core             HierarchicalCache: what an engine's prefix cache calls
    write_through    device to host            load_back    host to device
    storage_backup   host to storage           prefetch     storage to host, with reads, boundaries, waiting
    pages            allocation, eviction, and the one owner that frees
    in_flight        a record for each transfer under way
    agreement        several ranks keep identical trees
    host_index, foreign_device    the same for an engine whose device pages are its own (vLLM)

The only package that sees both the tree and the transfer controller.
"""

from hiradix.cache.agreement import Agree, RanksDiverged, least
from hiradix.cache.core import HierarchicalCache, HostTier
from hiradix.cache.pages import CacheCounters
from hiradix.transfer import PageSource

__all__ = ["Agree", "CacheCounters", "HierarchicalCache", "HostTier", "PageSource", "RanksDiverged", "least"]
