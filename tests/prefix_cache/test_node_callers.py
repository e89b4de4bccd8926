"""An engine that keeps nodes and no receipts, as SGLang 0.5.9 and 0.5.15 do with full attention."""

from __future__ import annotations

import random

import pytest
import torch

from hiradix.config import HiCacheConfig
from hiradix.errors import Misuse
from tests.prefix_cache.bench_engine import Bench, Request, prompt
from tests.seeds import seeded, seeds


class NodeBench(Bench):
    """Locks nodes, and gives nodes back."""

    def _admit(self, req: Request, between: object = None) -> bool:
        self._match(req)
        before = req.last_node
        self.cache.inc_lock_ref(before)
        if req.host_hit_length:
            slots, req.last_node = self.cache.init_load_back(req.last_host_node, req.host_hit_length)
            req.prefix_indices = torch.cat([req.prefix_indices, slots])
            req.cache_protected_len = len(req.prefix_indices)
        self.cache.inc_lock_ref(req.last_node)
        self.cache.dec_lock_ref(before)
        need = -(-(len(req.fill_ids) - len(req.prefix_indices)) // self.page_size) * self.page_size
        slots = self.alloc(need)
        if slots is None:
            self.cache.dec_lock_ref(req.last_node)
            return False
        req.req_pool_idx = self.rows.alloc(1)[0]
        row = torch.cat([req.prefix_indices, slots]).to(torch.int32)
        self.rows.write((req.req_pool_idx, slice(0, len(row))), row)
        return True


@seeded
@pytest.mark.parametrize("has_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("seed", seeds(2))
def test_serving_by_nodes_is_exact_and_gives_every_lock_back(seed: int, has_host: bool) -> None:
    config = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0} if has_host else {}
    bench, rng = NodeBench(HiCacheConfig(page_size=4, **config), 24, disable=False), random.Random(seed)  # type: ignore[arg-type]

    def begin() -> Request | None:
        return bench.start(prompt(rng.randint(1, 40)) + prompt(rng.randint(0, 8), 100 * rng.randint(5, 7)))

    bench.live(rng, 100, begin)
    assert bench.cache.protected_size() == 0
    req = bench.start(prompt(21))
    assert req is not None and req.swa_uuid_for_lock is None
    node = req.last_node
    bench.finish(req)
    with pytest.raises(Misuse, match="no lock is out"):
        bench.cache.dec_lock_ref(node)
    bench.close()
