"""SGLang 0.5.15.post1's RadixCache and HiRadixCache, the last release that has the latter, unmodified.

In a process of its own, as `peer_0_5_9`: copies are real, the clock of its LRU is a counter, the host pool is
not pinned.
"""

from __future__ import annotations

import os
import tempfile
import types
from array import array
from typing import Any

from tests.differential.wheels import share_drivers

share_drivers()
from mocks import install_sglang  # noqa: E402

install_sglang("0.5.15.post1")

import sglang_parts as parts  # noqa: E402
import torch  # noqa: E402
from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache import hiradix_cache, memory_pool_host, radix_cache  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.pool_host import base as host_base  # noqa: E402

from tests.differential.old_peers import OldSide  # noqa: E402
from tests.differential.peer_main import copy, count_instead_of_time, main  # noqa: E402
from tests.differential.sides import Found, Request  # noqa: E402

FOLDER = ""  # where storage is, by stream
RECORDS = types.SimpleNamespace(InsertParams=InsertParams, EvictParams=EvictParams)


def prepare() -> None:
    """One rank, memory that is not pinned, real copies, and a clock of which every look is later."""
    parts.one_rank()
    parts.unpin(host_base.HostKVCache)
    memory_pool_host.transfer_kv_direct = copy
    cache_controller.is_dp_attention_enabled = lambda: False
    for kind in ("tensor", "pipeline"):
        setattr(cache_controller, f"get_{kind}_model_parallel_rank", lambda: 0)
        setattr(cache_controller, f"get_{kind}_model_parallel_world_size", lambda: 1)
    count_instead_of_time(radix_cache, hiradix_cache)


class PeerSide(OldSide):
    """A side over RadixCache, or HiRadixCache where `host_ratio` is not 0."""

    records = RECORDS

    def flags(self, setup: dict[str, Any]) -> Any:
        if not setup["storage"]:
            return super().flags(setup)
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = tempfile.mkdtemp(dir=FOLDER)
        return parts.server_args(
            setup["host_ratio"], setup["write_policy"], "direct", hicache_storage_backend="file",
            hicache_storage_backend_extra_config='{"prefetch_threshold": 1}',
            hicache_storage_prefetch_policy="wait_complete",
        )  # fmt: skip

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
        super().settle()
        if self.tiered:
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
