"""The hierarchical cache: the only package that sees both the tree and the transfer controller."""

from hiradix.cache.agreement import Agree, RanksDiverged, least
from hiradix.cache.core import HierarchicalCache, HostTier
from hiradix.cache.pages import CacheCounters
from hiradix.transfer import PageSource

__all__ = ["Agree", "CacheCounters", "HierarchicalCache", "HostTier", "PageSource", "RanksDiverged", "least"]
