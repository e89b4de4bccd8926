"""Plays a trace on a simulated cache: what each request found in which tier, and why not the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt

from hiradix.apps.replay.simulated_cache import SimulatedCache, Tiers
from hiradix.apps.traces.trace import Trace, TraceRequest
from hiradix.errors import Misuse
from hiradix.policy.uses import Finished
from hiradix.tree import RadixKey, Tier

TIER_NAMES = ("device", "host", "storage")
REASONS = ("first use", "evicted", "partial block")


@dataclass
class Played:
    """Per request, tokens: hits by tier, misses by reason. decisions: a digest of all that was decided."""

    hits: dict[str, npt.NDArray[np.int64]]
    misses: dict[str, npt.NDArray[np.int64]]
    writes: dict[str, int] = field(default_factory=dict)
    decisions: str = ""
    cpu_s: float = 0.0

    def rate(self, prompt_tokens: npt.NDArray[np.int64], span: slice, tier: str | None = None) -> float:
        """Token hit rate, %, of the requests of `span`; of one tier or of all."""
        names = TIER_NAMES if tier is None else (tier,)
        hit = sum(int(self.hits[name][span].sum()) for name in names)
        return 100 * hit / max(int(prompt_tokens[span].sum()), 1)


class Player:
    """Plays requests one after the other. A prompt longer than the device keeps what fits of it."""

    def __init__(self, trace: Trace, policy: str, tiers: Tiers, config: Mapping[str, Any] | None = None):
        self.trace = trace
        self.simulated = SimulatedCache(policy, tiers, trace.block_tokens, config)
        self._tiers = tiers
        count = len(trace.calls)
        self.played = Played(
            {name: np.zeros(count, np.int64) for name in TIER_NAMES},
            {name: np.zeros(count, np.int64) for name in REASONS},
        )
        self._seen: set[int] = set()
        self._digest = hashlib.sha256()

    def play(self, progress: Callable[[int], None] = lambda done: None, every: int = 500) -> Played:
        """All of it. `progress` is told now and then how many requests are done."""
        started = process_time()
        for number, call in enumerate(self.trace.calls):
            self._request(number, call)
            if number % every == every - 1:
                progress(number + 1)
        self.played.cpu_s = process_time() - started
        counters = self.simulated.cache.counters
        size = self.trace.block_tokens
        self.played.writes = {"host": counters.written * size}
        if self.simulated.store is not None:
            self.played.writes["storage"] = self.simulated.store.written * size
        self.played.decisions = self._digest.hexdigest()
        return self.played

    def _request(self, number: int, call: TraceRequest) -> None:
        simulated, tree, cache = self.simulated, self.simulated.tree, self.simulated.cache
        cache.tick()
        key = RadixKey(call.blocks)
        fetched = simulated.fetch(key, number)
        match = cache.match(key)
        device_pages = match.device_node.end
        node = match.device_node
        if match.loadable_node is not node and cache.load_back(match):
            node = match.loadable_node
            cache.start_loading()
        lock = tree.lock(node, Tier.DEVICE)
        cache.count_use(node)
        simulated.settle()
        fit = min(len(key), node.end + simulated.cache.supply.device_room())
        if fit < len(key):
            key = key[:fit]
        short = len(key) - node.end
        cache.make_room(short)
        pages = simulated.device.alloc(short) if short else np.empty(0, np.int32)
        if pages is None:
            raise Misuse(f"{short} of {simulated.device.available} device blocks")
        ended = Finished(call.prompt_tokens, call.output_tokens, call.hint, call.session, call.stop)
        done = cache.insert(key, pages, at=lock, ended=ended)
        simulated.settle()
        tree.unlock(lock)
        tree.unlock(done)
        self._count(number, call, device_pages, node.end, fetched)

    def _count(self, number: int, call: TraceRequest, on_device: int, found: int, fetched: int) -> None:
        size, played = self.trace.block_tokens, self.played
        played.hits["device"][number] = on_device * size
        stored = min(fetched, found - on_device)
        played.hits["host"][number] = (found - on_device - stored) * size
        played.hits["storage"][number] = stored * size
        names = call.blocks.tolist()
        again = sum(name in self._seen for name in names[found:])
        self._seen.update(names)
        played.misses["evicted"][number] = again * size
        played.misses["first use"][number] = (len(names) - found - again) * size
        played.misses["partial block"][number] = call.prompt_tokens - len(names) * size
        self._digest.update(b"%d %d %d " % (on_device, found, self.simulated.cache.counters.evicted_device))
