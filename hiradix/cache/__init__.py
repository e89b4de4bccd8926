"""The hierarchical cache: decides which pages move between device, host and storage, and books what came of it.

    core             HierarchicalCache: what an engine's prefix cache calls
    write_through    device to host            load_back    host to device
    storage_backup   host to storage           prefetch     storage to host, with reads and boundaries
    reserved_room    host pages of requests that wait, in the order of `waiting`
    pages            allocation, eviction, and the one owner that frees
    in_flight        a record for each transfer under way
    agreement        several ranks keep identical trees
    intents          wishes of a session or router: hold, bring, locate, forget
    departed, misses why the cache has no more of a prompt
    host_index, foreign_device    the same for an engine whose device pages are its own (vLLM)

The only package that sees both the tree and the transfer controller.
"""

from hiradix.cache.agreement import Agree, RanksDiverged, least
from hiradix.cache.core import HierarchicalCache, HostTier
from hiradix.cache.pages import CacheCounters
from hiradix.transfer import PageSource

__all__ = ["Agree", "CacheCounters", "HierarchicalCache", "HostTier", "PageSource", "RanksDiverged", "least"]
