"""SGLang 0.5.15.post1's RadixCache and HiRadixCache, the last release that has the latter, unmodified.

In a process of its own, as `peer_0_5_9`: copies are real, the clock of its LRU is a counter, the host pool is
not pinned.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import tempfile
import types
from array import array
from typing import Any

from tests.differential.wheels import share_drivers

share_drivers()
from install import wheel_folder  # noqa: E402
from mocks import install, patch_streams  # noqa: E402

install(
    str(wheel_folder("0.5.15.post1")),
    [
        "IPython", "sgl_kernel", "flashinfer", "torchvision", "transformers", "decord", "torch_memory_saver",
        "tvm_ffi", "sglang.srt.layers", "sglang.srt.distributed", "sglang.srt.model_executor",
        "sglang.srt.configs", "sglang.jit_kernel", "sglang.srt.utils.custom_op", "sglang.srt.observability",
        "sglang.srt.metrics", "sglang.srt.utils.hf_transformers_patches", "sglang.srt.server_args",
        "sglang.srt.managers.schedule_batch", "sglang.srt.mem_cache.deepseek_v4_memory_pool",
    ],
)  # fmt: skip

import torch  # noqa: E402

patch_streams()
logging.getLogger().setLevel(logging.ERROR)

from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache import hiradix_cache, memory_pool_host, radix_cache  # noqa: E402
from sglang.srt.mem_cache.allocator import (  # noqa: E402
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import base as host_base  # noqa: E402

from tests.differential.peer_main import copy, main  # noqa: E402
from tests.differential.sides import (  # noqa: E402
    Found,
    Pages,
    Request,
    RequestTable,
    Side,
    pages_of_nodes,
)

FOLDER = ""  # where storage is, by stream
RECORDS = types.SimpleNamespace(InsertParams=InsertParams, EvictParams=EvictParams)


def prepare() -> None:
    """One rank, memory that is not pinned, real copies, and a clock of which every look is later."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    original = host_base.HostKVCache.__init__
    signature = inspect.signature(original)

    def unpinned(self: Any, *args: Any, **options: Any) -> None:
        bound = signature.bind(self, *args, **options)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    host_base.HostKVCache.__init__ = unpinned
    memory_pool_host.transfer_kv_direct = copy
    cache_controller.is_dp_attention_enabled = lambda: False
    for kind in ("tensor", "pipeline"):
        setattr(cache_controller, f"get_{kind}_model_parallel_rank", lambda: 0)
        setattr(cache_controller, f"get_{kind}_model_parallel_world_size", lambda: 1)
    ticks = itertools.count(1)
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: 0.0)
    radix_cache.time = hiradix_cache.time = clock


def flags(setup: dict[str, Any]) -> Any:
    """What HiRadixCache reads of the server's flags."""
    ratio, write_policy, storage = setup["host_ratio"], setup["write_policy"], setup["storage"]
    if storage:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = tempfile.mkdtemp(dir=FOLDER)
    return types.SimpleNamespace(
        hicache_io_backend="direct", hicache_mem_layout="layer_first", hicache_ratio=ratio, hicache_size=0,
        hicache_storage_backend="file" if storage else None,
        hicache_storage_backend_extra_config='{"prefetch_threshold": 1}' if storage else None,
        hicache_storage_prefetch_policy="wait_complete", hicache_write_policy=write_policy,
        served_model_name="m", extra_metric_labels=None,
    )  # fmt: skip


class PeerSide(Side):
    """A side over RadixCache, or HiRadixCache where `host_ratio` is not 0."""

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
            sizes = num_tokens, self.page_size
            self.allocator = PagedTokenToKVPoolAllocator(*sizes, torch.int64, "cpu", pool, False)
        self.kv = pool.k_buffer[0].view(-1)
        self.rows = RequestTable()
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size, eviction_policy="lru", tp_cache_group=None,
        )  # fmt: skip
        self.tiered = setup["host_ratio"] > 0
        self.cache: Any = self._tiered(params, setup) if self.tiered else radix_cache.RadixCache(params)

    def _tiered(self, params: Any, setup: dict[str, Any]) -> Any:
        cache = hiradix_cache.HiRadixCache(params, flags(setup))
        free = cache.token_to_kv_pool_host.available_size()
        spare = free - int(setup["num_pages"] * setup["host_ratio"]) * self.page_size
        self.taken = spare + setup["host_taken"] * self.page_size
        cache.token_to_kv_pool_host.alloc(self.taken)
        if not setup["load_back_minimum"]:
            cache.load_back_threshold = 0
        return cache

    # -- the calls ------------------------------------------------------------------------

    def key(self, namespace: str | None, tokens: list[int]) -> Any:
        return radix_cache.RadixKey(array("q", tokens), namespace)

    def match(self, namespace: str | None, tokens: list[int]) -> Found:
        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(namespace, tokens)))
        node = found.last_device_node
        return Found(found.device_indices, node, found.best_match_node, found.host_hit_length)

    def unlock(self, receipt: Any) -> int:
        return int(self.cache.dec_lock_ref(receipt).delta)

    def load(self, found: Found) -> tuple[torch.Tensor, Any]:
        params = InitLoadBackParams(best_match_node=found.host_node, host_hit_length=found.num_host)
        slots, node = self.cache.init_load_back(params)
        self.cache.ready_to_load_host_cache()
        return slots, node

    def share(self, request: Request, chunked: bool) -> None:
        own = OwnRequest(request)
        self.cache.cache_unfinished_req(own, chunked=chunked)
        own.give_back()

    def finish(self, request: Request, is_insert: bool) -> None:
        self.cache.cache_finished_req(OwnRequest(request), is_insert=is_insert)

    def forget(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        self.cache.token_to_kv_pool_host.alloc(self.taken)

    def fetch(self, namespace: str | None, tokens: list[int], found: Found) -> int:
        node, cache = found.host_node, self.cache
        rest = array("q", tokens[len(found.slots) + found.num_host :])
        cache.prefetch_from_storage("r", node, rest, node.get_last_hash_value())
        while "r" in cache.ongoing_prefetch:
            cache.check_hicache_events()
            cache.check_prefetch_progress("r")
        return int(cache.pop_prefetch_loaded_tokens("r"))

    # -- what is seen ---------------------------------------------------------------------

    def settle(self) -> None:
        if self.tiered:
            self.cache.ready_to_load_host_cache()
            self.cache.check_hicache_events()
            while self.cache.ongoing_backup or self._has_host_pages_under_way():
                self.cache.check_hicache_events()

    def _has_host_pages_under_way(self) -> bool:
        """Whether its threads have not given back yet what a prefetch did not need."""
        if self.cache.cache_controller.storage_backend_type is None:
            return False
        host, nodes, used = self.cache.token_to_kv_pool_host, [self.cache.root_node], self.taken
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            used += len(node.host_value) if node.host_value is not None else 0
        return bool(host.available_size() + used != host.size)

    def host_free(self) -> int:
        return int(self.cache.token_to_kv_pool_host.available_size()) if self.tiered else 0

    def tiers(self, node: Any) -> str:
        return "D" * (node.value is not None) + "H" * (node.host_value is not None)

    def pages(self) -> Pages:
        return pages_of_nodes(self.cache.root_node, self.page_size, self.tiers)


GIVEN_BACK = ("last_node", "cache_protected_len", "prefix_indices")


class OwnRequest:
    """A request as this version has it: tokens in arrays."""

    session_id = session = None
    priority = 0

    def __init__(self, request: Request):
        self._request = request
        for name in ("rid", "extra_key", "req_pool_idx", *GIVEN_BACK):
            setattr(self, name, getattr(request, name))
        self.origin_input_ids = array("q", request.origin_input_ids)
        self.output_ids = array("q", request.output_ids)

    def get_fill_ids(self) -> array[int]:
        return array("q", self._request.fill_ids)

    def pop_committed_kv_cache(self) -> int:
        return len(self._request.fill_ids)

    def give_back(self) -> None:
        """Have the stream's request know what the cache has set."""
        for name in GIVEN_BACK:
            setattr(self._request, name, getattr(self, name))


if __name__ == "__main__":
    prepare()
    with tempfile.TemporaryDirectory() as FOLDER:
        main(PeerSide)
