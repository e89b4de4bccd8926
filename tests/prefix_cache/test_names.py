"""The drop-in names: one class below them, and what each is made with and refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hiradix.prefix_cache as drop_in
from hiradix.config import HiCacheConfig
from hiradix.errors import Misuse
from hiradix.memory import PageAllocator, ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    HiRadixCache,
    PrefixCache,
    RadixCache,
    StateHiRadixCache,
    StateRadixCache,
    SWAHiRadixCache,
    SWARadixCache,
)
from tests.prefix_cache.bench_engine import Bench
from tests.prefix_cache.swa_bench import SwaBench
from tests.project.repo import ROOT

NAMES = (RadixCache, HiRadixCache, SWARadixCache, SWAHiRadixCache, StateRadixCache, StateHiRadixCache)
HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}


def state_cache() -> PrefixCache:
    rows: Any = ReqToTokenPool(2, 64)
    records = PageAllocator(8, first_page=1)
    return StateRadixCache(CacheInitParams(False, rows, SlotAllocator(64, 4), 4, state_records=records))


MAKE: dict[str, Any] = {
    "full": lambda: Bench(HiCacheConfig(page_size=4), 16, disable=False).cache,
    "windows": lambda: SwaBench(16, 16, 4, 8).cache,
    "states": state_cache,
    "full, host": lambda: Bench(HiCacheConfig(page_size=4, **HOST), 16, disable=False).cache,
    "windows, host": lambda: SwaBench(16, 16, 4, 8, config=HOST).cache,
}


@pytest.fixture(params=MAKE)
def cache(request: pytest.FixtureRequest) -> Iterator[PrefixCache]:
    made = MAKE[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_step_from_the_one_class_and_has_nothing_of_its_own(name: type) -> None:
    assert name.__mro__[1:] == (PrefixCache, object)
    own = {attribute for attribute in vars(name) if not attribute.startswith("__")}
    assert own == ({"create_simulated"} if name is RadixCache else set()), "upstream's constructor of tests"
    assert name.__name__ in drop_in.__all__


def test_sizes_of_kinds_that_a_cache_does_not_have_are_nothing(cache: PrefixCache) -> None:
    has_windows, has_states = cache.supports_swa(), cache.supports_mamba()
    assert not (has_windows and has_states)
    slots: Any = cache.token_to_kv_pool_allocator.alloc(16)
    record = {"mamba_value": int(cache._beside.pages.alloc(1)[0])} if has_states else {}  # type: ignore[union-attr, index]
    cache.insert(drop_in.InsertParams(drop_in.RadixKey(list(range(16))), slots, **record))
    assert cache.drain(60.0)
    assert (cache.swa_evictable_size() > 0) == has_windows
    assert (cache.mamba_evictable_size() > 0) == has_states
    assert isinstance(cache.total_size(), tuple) == (has_windows or has_states)
    stats = cache.stats()
    assert (stats.window is not None, stats.state is not None) == (has_windows, has_states)
    node = cache.match_prefix(drop_in.MatchPrefixParams(drop_in.RadixKey(list(range(16))))).last_device_node
    if has_states:
        assert cache.record(node) == record["mamba_value"]
    else:
        with pytest.raises(Misuse, match="has no record"):
            cache.record(node)


def test_an_engine_asks_every_cache_the_same(cache: PrefixCache) -> None:
    """Without a host tier nothing is there; what only a host tier has is refused by name."""
    name, root = type(cache).__name__, cache.root_node
    assert cache.has_host == ("Hi" in name) == (cache.layer_done_counter is not None)
    cache.check_hicache_events()
    cache.note_prefill(8, 0.1)
    cache.set_wakeup(lambda: None)
    assert cache.ready_to_load_host_cache() == -1
    slots, node = cache.init_load_back(root, 0)
    assert slots.dtype == torch.int64 and len(slots) == 0 and node is root
    req: Any = SimpleNamespace(extra_key=None, fill_ids=[1, 2, 3, 4, 5])
    assert not cache.prefetch_from_storage("r", root, [1, 2, 3, 4], req=req)
    assert cache.check_prefetch_progress("r") and cache.pop_prefetch_loaded_tokens("r") == 0
    cache.terminate_prefetch("r")
    cache.release_aborted_request("r")
    assert not cache.is_transferring and cache.num_in_flight == 0
    assert not cache.enable_storage and cache.storage_name is None and not cache.clear_storage_backend()
    if cache.has_host:
        assert cache.attached.storage is None and cache.controller is cache.cache.controller
        return
    for part in ("attached", "controller"):
        with pytest.raises(Misuse, match=f"^{name} has no "):
            getattr(cache, part)
        assert not hasattr(cache, part) and getattr(cache, part, None) is None, "engines ask so"
    refused = (False, "Hierarchical cache is not enabled.")
    assert cache.attach_storage_backend("file") == refused == cache.detach_storage_backend()


MISTAKES = """
import torch
from hiradix.errors import Misuse
from hiradix.memory import ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams, EvictParams, InsertParams, MatchPrefixParams, RadixCache, RadixKey
)

assert not __debug__ or 1 / 0


def refused(name, call):
    try:
        print(name, "was taken:", call())
    except Misuse:
        pass
    except Exception as error:
        print(name, "ended in", repr(error))


slots = SlotAllocator(64, 4)
cache = RadixCache(CacheInitParams(False, ReqToTokenPool(2, 64), slots, 4))
key = RadixKey(list(range(16)))
cache.insert(InsertParams(key, slots.alloc(16)))
node = cache.match_prefix(MatchPrefixParams(key)).last_device_node
kept, gone = cache.inc_lock_ref(node), cache.inc_lock_ref(node)
refused("a node, for a receipt", lambda: cache.dec_lock_ref(node))
cache.dec_lock_ref(gone)
refused("a receipt given back twice", lambda: cache.dec_lock_ref(gone))
refused("a node that is nobody's", lambda: cache.dec_lock_ref(node))
refused("no receipt at all", lambda: cache.dec_lock_ref(None))
refused("a record", lambda: cache.record(node))
refused("a part of a page", lambda: cache.init_load_back(node, 3))
refused("more than there is", lambda: cache.init_load_back(node, 20))
refused("storage", lambda: cache.attached)
if cache.evict(EvictParams(64)).num_tokens_evicted or cache.dec_lock_ref(kept) != 16:
    print("a lock was lost")
"""


def test_mistakes_are_refused_without_asserts() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", MISTAKES], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
