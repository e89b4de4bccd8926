"""What a turn costs inside our cache when a model runs between its calls: SGLang's own pools, and no model.

    build/sglang-venv/bin/python benchmarks/sglang_turns/replay.py device|host [--hot]

Makes the calls of SGLang's scheduler in this process, in their order, for the turns that `bench_sglang.py`
plays, and prints CPU time of the calling thread per turn, the median of four rounds. Where a forward pass
would be, it does other work: calls then find their code and data out of the processor's caches, as in an
engine. --hot: it does nothing there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import turn_meter
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from worker import trace

from hiradix.adapters.sglang.cache_factory import own_params
from hiradix.adapters.sglang.engine_views import ControllerView
from hiradix.config import HiCacheConfig
from hiradix.memory.engine_pools import device_pool
from hiradix.prefix_cache import HiRadixCache, ModelIdentity, build_prefix_cache
from tests.sglang.rig import Request

PAGE, NUM_TOKENS, ROUNDS, DECODES = 64, 8192, 5, 3
SHAPES = {"device": {"groups": 4, "together": 3}, "host": {"groups": 1, "together": 12}}
PLAN = {"turns": 6, "new_tokens": [200, 450], "vocabulary": 4096, "seed": 7}


class OtherWork:
    """What takes the processor's caches as a forward pass does: many kinds of calls, arrays and objects."""

    def __init__(self, is_on: bool):
        self._is_on = is_on
        self._weights = [torch.randn(256, 256) for _ in range(24)]
        self._start, self._array = torch.randn(64, 256), torch.randn(6, 1 << 20)
        self._objects = [{f"a{i}": (i, str(i))} for i in range(60000)]

    def __call__(self) -> None:
        if not self._is_on:
            return
        x = self._start
        for weight in self._weights:
            q = torch.nn.functional.linear(x, weight)
            k = torch.nn.functional.layer_norm(q, (256,))
            x = torch.nn.functional.silu(torch.softmax(k @ q.T, -1) @ x)
            x = torch.cat([x[:32], x[32:]]).clamp(-1, 1)[torch.randint(0, 64, (64,))]
        self._array.add_(1.0)
        sum(value[0] for objects in self._objects[::7] for value in objects.values())


class Replay:
    """A cache of ours over `NUM_TOKENS` device tokens, its methods timed."""

    def __init__(self, has_host: bool, work: OtherWork):
        kvcache = MHATokenToKVPool(
            NUM_TOKENS, PAGE, torch.float32, 2, 16, 2, "cpu", enable_memory_saver=False
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            NUM_TOKENS, PAGE, torch.float32, "cpu", kvcache, need_sort=False
        )
        self.rows = ReqToTokenPool(8, 2 * NUM_TOKENS, "cpu", enable_memory_saver=False)
        params = CacheInitParams(False, self.rows, self.allocator, PAGE)
        config = HiCacheConfig(page_size=PAGE, enable_hierarchical_cache=has_host, hicache_ratio=4.0)
        pool = device_pool(kvcache, PAGE)
        inner = build_prefix_cache(config, own_params(params), pool, ModelIdentity("replay"))
        self.meter, self.work, self.has_host = turn_meter.Meter(), work, has_host
        self.cache = turn_meter.measured(self._front(params, inner), self.meter)

    def _front(self, params: Any, inner: Any) -> Any:
        if isinstance(inner, HiRadixCache):
            from hiradix.adapters.sglang.tiers import HiRadixHostCache

            return HiRadixHostCache(params, inner, ControllerView(inner.layer_done_counter))
        from hiradix.adapters.sglang.cache import HiRadixPrefixCache

        return HiRadixPrefixCache(params, inner)

    def turn(self, number: int, tokens: list[int]) -> None:
        """One request from its match to its end."""
        req = Request(f"r{number}", array("q", tokens))
        if self.has_host:
            self.cache.check_hicache_events()
        self.admit(req)
        end = len(tokens)
        self.work()
        self.cache.checkpoint(req, up_to=end)
        for _ in range(DECODES):
            if self.has_host:
                self.cache.check_hicache_events()
            self.cache.evictable_size()
            self.put(req, end, self.decoded(req, end))
            req.output_ids.append(5)
            req.refresh_fill_ids()
            end += 1
            self.work()
        req.is_finished = True
        self.cache.checkpoint(req, up_to=end)
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, end)])
        self.cache.unlock(req.lock)
        self.cache.on_release(req, checkpointed=True)
        self.rows.free_slots.append(req.kv.req_pool_idx)

    def admit(self, req: Request) -> None:
        """Match, load back, lock, make room, allocate."""
        req.refresh_fill_ids()
        key = RadixKey(req.full_untruncated_fill_ids, limit=len(req.origin_input_ids) - 1)
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.prefix_len, req.last_node = found.device_prefix_len, found.last_device_node
        lock = self.cache.lock(req.last_node)
        if found.host_hit_length:
            params = InitLoadBackParams(found.best_match_node, found.host_hit_length, None, req)
            num_loaded, req.last_node = self.cache.init_load_back(params)
            req.prefix_len += num_loaded
        req.lock = self.cache.lock(req.last_node)
        self.cache.unlock(lock)
        if self.has_host:
            self.cache.ready_to_load_host_cache()
        self.cache.evictable_size()
        start, end = req.prefix_len, len(req.origin_input_ids)
        self.allocator.evict_to_free_tokens(self.cache, end - start + PAGE)
        prefix = self.cache.prefix_device_indices(req)
        req.kv = ReqKvInfo(req_pool_idx=self.rows.free_slots.pop(), cache_protected_len=start)
        last = prefix[-1:] if start else torch.tensor([-1])
        sizes = torch.tensor([start]), torch.tensor([end])
        slots = self.allocator.alloc_extend(sizes[0], sizes[0], sizes[1], sizes[1], last, end - start)
        self.rows.write((req.kv.req_pool_idx, slice(0, start)), prefix)
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots)

    def decoded(self, req: Request, end: int) -> torch.Tensor:
        sizes = torch.tensor([end + 1])
        last = self.rows.req_to_token[req.kv.req_pool_idx, end - 1 : end].to(torch.int64)
        slots: torch.Tensor = self.allocator.alloc_decode(sizes, sizes, last)
        return slots

    def put(self, req: Request, at: int, slots: torch.Tensor) -> None:
        self.rows.write((req.kv.req_pool_idx, slice(at, at + 1)), slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("case", choices=SHAPES)
    parser.add_argument("--hot", action="store_true", help="no other work between the calls")
    args = parser.parse_args()
    torch.set_num_threads(1)
    replay, prompts = Replay(args.case == "host", OtherWork(not args.hot)), trace(PLAN | SHAPES[args.case])
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        replay.meter.figures = {}
        for number, tokens in enumerate(prompts):
            replay.turn(number, tokens)
        rounds.append({name: s / len(prompts) * 1e6 for name, (_, s) in replay.meter.figures.items()})
        time.sleep(0.3)  # copies end
        if replay.has_host:
            replay.cache.check_hicache_events()
        replay.cache.inner.reset()
    middle = {name: statistics.median(each.get(name, 0.0) for each in rounds[1:]) for name in rounds[-1]}
    print(f"{args.case}, {'hot' if args.hot else 'cold'}: {sum(middle.values()):.0f} us per turn")
    for name, spent_us in sorted(middle.items(), key=lambda item: -item[1]):
        print(f"  {name:28} {spent_us:7.1f}")
    replay.cache.release_host_resources()


if __name__ == "__main__":
    main()
