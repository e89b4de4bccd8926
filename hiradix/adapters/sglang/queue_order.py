"""SGLang's waiting queue, when its scheduling policy has sorted it: `lpm` goes by every tier.

SGLang's own `lpm` is the longest prefix on device and host together. Here it is who has the least seconds to
its first token, as of the policy `lpm` elsewhere (`hiradix.policy.admission`): what storage has counts too,
and a short prompt before a long one. Whatever the policy, storage is read in the order of the queue.
"""

from __future__ import annotations

from typing import Any

from hiradix.adapters.sglang.hooks import after
from hiradix.policy.prices import Prices

_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"
_PUT_OFF = "_hiradix_put_off"


def follow_queue() -> None:
    """Watch this process's queue from now on, each time after it was sorted. May be called again."""
    after(f"{_POLICY}._compute_prefix_matches", _matched)
    after(f"{_POLICY}.calc_priority", _sorted)


def _matched(put_off: set[str], policy: Any, *_: Any, **__: Any) -> None:
    """Prefixes of the queue were just looked up. put_off: whose prefix another one is about to compute."""
    setattr(policy, _PUT_OFF, put_off)


def _sorted(_: None, policy: Any, waiting_queue: list[Any], *__: Any, **___: Any) -> None:
    """Sort anew what `lpm` has sorted; not the longer queues that SGLang serves as they came."""
    put_off: set[str] | None = policy.__dict__.pop(_PUT_OFF, None)
    from hiradix.adapters.sglang.tiers import HiRadixHostCache

    cache = policy.tree_cache
    if not isinstance(cache, HiRadixHostCache):
        return
    inner = cache.inner
    if put_off is not None and policy.policy.value == "lpm":
        prices = Prices(inner.cache.no_regret, cache.page_size)

        def rank(req: Any) -> tuple[bool, float]:
            fetched = inner.fetching_tokens(req.cache_request_handle)
            matched = req.num_matched_prefix_tokens
            computed = max(1, len(req.origin_input_ids) + len(req.output_ids) - matched - fetched)
            is_below = req.host_hit_length > 0 or fetched > 0  # what it waits for is there already
            return req.rid in put_off and not is_below, prices.first_token_s(
                computed, req.host_hit_length, fetched
            )

        waiting_queue.sort(key=rank)
    inner.prefetch_in_order([req.cache_request_handle for req in waiting_queue])
