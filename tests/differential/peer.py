"""SGLang 0.5.9's classes, unmodified, in a process of their own: streams in, observations out.

    python peer.py STREAMS.json OBSERVATIONS.json

Copies are real, the clock of its LRU is a counter (so ties and slow machines change nothing), and the host
pool is not pinned. The mocks are those of the benchmarks, and never leave this process.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks" / "peers")]
import mocks  # noqa: E402
from install import FOLDER  # noqa: E402

LIGHT = (
    "IPython", "PIL", "aiohttp", "msgspec", "orjson", "prometheus_client", "pybase64", "requests",
    "setproctitle", "tqdm", "uvicorn", "zmq",
)  # fmt: skip
HEAVY = (
    "decord", "flashinfer", "sgl_kernel", "torch_memory_saver", "torchvision", "transformers", "tvm_ffi",
    "sglang.jit_kernel", "sglang.srt.configs", "sglang.srt.distributed", "sglang.srt.layers",
    "sglang.srt.metrics", "sglang.srt.model_executor", "sglang.srt.utils.custom_op",
)  # fmt: skip
mocks.install(str(FOLDER), [*HEAVY, *(name for name in LIGHT if importlib.util.find_spec(name) is None)])

import torch  # noqa: E402

mocks.patch_streams()
logging.getLogger().setLevel(logging.ERROR)

from moves import Pages, Player, RequestTable, page_stamps  # noqa: E402
from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache import hiradix_cache, memory_pool_host, radix_cache  # noqa: E402
from sglang.srt.mem_cache.allocator import (  # noqa: E402
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402

RECORDS = types.SimpleNamespace(
    RadixKey=radix_cache.RadixKey,
    MatchPrefixParams=MatchPrefixParams,
    InsertParams=InsertParams,
    EvictParams=EvictParams,
)


def _count_instead_of_time() -> None:
    """Every look at the clock is later than the one before."""
    ticks = itertools.count(1)
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: 0.0)
    radix_cache.time = hiradix_cache.time = clock


def _copy(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """sgl_kernel's transfer_kv_direct, by torch."""
    for source, target in zip(src_layers, dst_layers):
        target[dst_indices] = source[src_indices].reshape((-1, *target.shape[1:]))


def _prepare_host() -> None:
    """One rank, memory that is not pinned, copies by torch."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    memory_pool_host.transfer_kv_direct = _copy
    memory_pool_host.alloc_with_host_register = lambda dims, dtype, device, pin_memory, allocator: (
        allocator.allocate(dims, dtype=dtype, device=device)
    )
    original = memory_pool_host.HostKVCache.__init__
    signature = inspect.signature(original)

    def unpinned(self: Any, *args: Any, **options: Any) -> None:
        bound = signature.bind(self, *args, **options)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    memory_pool_host.HostKVCache.__init__ = unpinned
    cache_controller.is_dp_attention_enabled = lambda: False
    cache_controller.get_tensor_model_parallel_rank = lambda: 0
    cache_controller.get_tensor_model_parallel_world_size = lambda: 1


class PeerSide:
    """A `moves.Side` over SGLang's class: RadixCache, or HiRadixCache where `host_ratio` is not 0."""

    records = RECORDS

    def __init__(self, setup: dict[str, Any]):
        self.page_size, num_tokens = setup["page_size"], setup["num_pages"] * setup["page_size"]
        pool = MHATokenToKVPool(
            size=num_tokens, page_size=self.page_size, dtype=torch.int64, head_num=1, head_dim=1,
            layer_num=1, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        if self.page_size == 1:
            self.allocator = TokenToKVPoolAllocator(num_tokens, torch.int64, "cpu", pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                num_tokens, self.page_size, torch.int64, "cpu", pool, False
            )
        self.kv = pool.k_buffer[0].view(-1)
        self.rows = RequestTable()
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size, eviction_policy="lru", tp_cache_group=None,
        )  # fmt: skip
        self.tiered = setup["host_ratio"] > 0
        self.cache: Any = self._tiered(params, setup) if self.tiered else radix_cache.RadixCache(params)

    def _tiered(self, params: Any, setup: dict[str, Any]) -> Any:
        arguments = types.SimpleNamespace(
            hicache_io_backend="direct", hicache_mem_layout="layer_first", disable_hicache_numa_detect=True,
            hicache_ratio=setup["host_ratio"], hicache_size=0, hicache_storage_backend=None,
            hicache_storage_backend_extra_config=None, hicache_storage_prefetch_policy="best_effort",
            hicache_write_policy=setup["write_policy"], served_model_name="m", extra_metric_labels=None,
        )  # fmt: skip
        cache = hiradix_cache.HiRadixCache(params, arguments)
        taken = 1 + setup["host_taken"]  # it makes one page more than the ratio says
        cache.token_to_kv_pool_host.alloc(taken * self.page_size)
        if not setup["load_back_minimum"]:
            cache.load_back_threshold = 0
        return cache

    def before_walk(self, key: Any) -> None:
        pass

    def settle(self) -> None:
        if self.tiered:
            self.cache.ready_to_load_host_cache()
            self.cache.check_hicache_events()

    def host_free(self) -> int:
        return int(self.cache.token_to_kv_pool_host.available_size()) if self.tiered else 0

    def pages(self) -> Pages:
        found: Pages = {}
        stack = [(child, 0) for child in self.cache.root_node.children.values()]
        while stack:
            node, prior = stack.pop()
            tiers = "D" * (node.value is not None) + "H" * (node.host_value is not None)
            tokens, namespace = list(node.key.token_ids), node.key.extra_key
            for name, stamp in page_stamps(namespace, tokens, prior, self.page_size):
                found[name], prior = tiers, stamp
            stack.extend((child, prior) for child in node.children.values())
        return found


def run(stream: dict[str, Any]) -> list[dict[str, Any]]:
    """What is seen after each move; the last entry is {"error": ...} if the class raised."""
    player, seen = Player(PeerSide(stream["setup"]), stream["setup"]["page_size"]), []
    for move in stream["moves"]:
        try:
            seen.append(player.play(move))
        except Exception as error:  # the peer's own failure is an observation
            seen.append({"error": f"{type(error).__name__}: {error}"})
            break
    return seen


def main() -> None:
    torch.set_num_threads(1)
    _count_instead_of_time()
    _prepare_host()
    streams = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(stream) for stream in streams]))
    sys.stdout.flush()
    os._exit(0)  # its atexit hooks and threads are nobody's business here


if __name__ == "__main__":
    main()
