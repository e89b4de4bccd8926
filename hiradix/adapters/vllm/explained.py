"""Explains vLLM's requests: where each token of a prompt came from, and why what was computed had to be.

The device is vLLM's own, so a prompt is explained by what the host tier has and had of it.
"""

from __future__ import annotations

from typing import NamedTuple

from hiradix.adapters.vllm.requests import Tracked
from hiradix.cache.departed import Departed
from hiradix.cache.host_index import HostIndex
from hiradix.cache.misses import Hit, Misses, Withheld
from hiradix.cache.prefetch import Prefetcher
from hiradix.explain import Reason, RecentExplanations, public_counts


class AskedTiers(NamedTuple):
    """Host and storage, as a request found them that has no blocks yet.

    stored: first page, and number of pages, that came from storage for it. withheld: not taken, and why.
    """

    stored: tuple[int, int]
    withheld: tuple[Withheld, ...]


class HostTierExplainer:
    """Explains each request once, when vLLM first gives it blocks. vLLM's scheduler thread only.

    departed: remembers what has left the host. policy: the eviction policy's name. recent: keeps the
    explanations of the last requests.
    """

    def __init__(
        self,
        index: HostIndex,
        prefetcher: Prefetcher,
        departed: Departed,
        policy: str,
        recent: RecentExplanations,
    ):
        self._index = index
        self._prefetcher = prefetcher
        self._misses = Misses(index.tree, departed, policy)
        self._recent = recent
        index.supply.remember(departed)

    def asked(self, tracked: Tracked) -> AskedTiers | None:
        """To be called before its prefetch is given up, which forgets this. None: it is not explained, as it has
        been, or does not read the cache."""
        request, size = tracked.request, self._index.page_size
        if tracked.is_explained or request.skip_reading_prefix_cache:
            return None
        tracked.is_explained = True
        withheld = []
        num_weighed, is_worth = tracked.gated
        if num_weighed and not is_worth:
            end = tracked.local_tokens + num_weighed * size
            withheld.append(Withheld(end, Reason.PREDICTED_SLOWER, "on the host"))
        withheld += self._misses.in_storage(self._prefetcher.pop_withheld(request.request_id))
        return AskedTiers(self._prefetcher.pop_loaded_span(request.request_id), tuple(withheld))

    def explain(self, tracked: Tracked, num_loaded: int, asked: AskedTiers) -> None:
        """num_loaded: tokens that the host brings behind vLLM's own."""
        request, size, start = tracked.request, self._index.page_size, tracked.local_tokens
        num_tokens, end = len(request.prompt_token_ids or ()), start + num_loaded
        first, num_pages = asked.stored
        from_storage = max(0, min(end, (first + num_pages) * size) - max(start, first * size))
        hit = Hit(start, num_loaded - from_storage, from_storage)
        key = tracked.key((num_tokens - 1) // size, size)
        self._recent.keep(self._misses.explain(request.request_id, key, num_tokens, hit, asked.withheld))

    @property
    def figures(self) -> dict[str, int]:
        """Tokens computed since start, by the name of the figure for their reason."""
        counts = public_counts(self._misses.tokens_by_reason)
        return {f"computed_{reason}_tokens": count for reason, count in counts.items()}
