"""Explains SGLang's requests: where each token of a prompt came from, and why what was computed had to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hiradix.cache.misses import Hit, Misses, Withheld
from hiradix.cache.prefetch import Prefetcher
from hiradix.explain import Reason, RecentExplanations, public_counts
from hiradix.tree import RadixKey


class RequestExplainer:
    """Explains each request once, when it first gives what it has computed. Scheduler thread only.

    recent: of the last requests, for other threads. num_explained: since start.
    """

    def __init__(self, misses: Misses, prefetcher: Prefetcher):
        self.recent = RecentExplanations()
        self.num_explained = 0
        self._misses = misses
        self._prefetcher = prefetcher

    @staticmethod
    def refused(req: Any, end: int, reason: Reason | None) -> None:
        """Note that tokens up to `end` of its prompt are on the host and were not loaded. A later lookup, which
        makes another key, is not about them."""
        req.hiradix_refused = (
            getattr(req, "hiradix_key", None),
            Withheld(end, reason or Reason.DAMAGED, "on the host"),
        )

    def explain(self, req: Any, handle: Any, make_key: Callable[[Any], RadixKey]) -> None:
        """Explain `req`, before what it has computed enters the tree; after the first time it does nothing.

        make_key: gives the key of the part of its prompt that was looked up. handle: of its prefetch.
        """
        if getattr(req, "hiradix_explained", False) or not hasattr(req, "cached_tokens_device"):
            return
        req.hiradix_explained = True
        withheld = []
        key, refused = getattr(req, "hiradix_refused", (None, None))
        if refused is not None and key is getattr(req, "hiradix_key", None):
            withheld.append(refused)
        req.hiradix_refused = None, None
        withheld += self._misses.in_storage(self._prefetcher.pop_withheld(handle))
        hit = Hit(req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage)
        num_tokens = len(req.origin_input_ids)
        self.recent.keep(self._misses.explain(req.rid, make_key(req), num_tokens, hit, withheld))
        self.num_explained += 1

    @property
    def computed_tokens(self) -> Counter[str]:
        """Tokens computed since start, by reason, for anybody."""
        return public_counts(self._misses.tokens_by_reason)
