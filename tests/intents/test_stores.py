"""Wishes over real stores: nothing is left in the files of what was forgotten, and all is back after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hiradix.config import ExtraConfig, HiCacheConfig
from hiradix.errors import StorageError
from hiradix.intents import IntentState, Receipt, Selector
from hiradix.memory import DevicePool, KVShape, ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    InsertParams,
    MatchPrefixParams,
    ModelIdentity,
    PrefixCache,
    build_prefix_cache,
)
from hiradix.tree import RadixKey, RadixTree
from hiradix.tree.hashing import hash_pages

PAGE = 4
SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=64, v_head_dim=64, dtype=torch.float32)
WAIT_S = 60.0


class Engine:
    """A real cache over a store in a folder, and what an engine does with it."""

    def __init__(self, folder: Path, backend: str = "disk", **keys: object) -> None:
        self.pool = DevicePool(SHAPE, num_pages=64, page_size=PAGE)
        self.slots = SlotAllocator(num_tokens=256, page_size=PAGE, device="cpu", kvcache=self.pool)
        params = CacheInitParams(False, ReqToTokenPool(8, 256), self.slots, page_size=PAGE)
        extra = {f"{backend}_storage_path": str(folder), "prefetch_threshold": 1, **keys}
        if backend == "disk":
            extra.setdefault("max_size", "16MiB")
        config = HiCacheConfig(
            page_size=PAGE, enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_no_regret=False,
            hicache_storage_backend=backend, hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_identity="these weights",
            hicache_storage_backend_extra_config=ExtraConfig.from_mapping(extra),
        )  # fmt: skip
        self.cache: PrefixCache = build_prefix_cache(config, params, self.pool, ModelIdentity("m"))

    def compute(self, tokens: list[int], salt: str | None = None) -> None:
        """A request whose pages hold its tokens."""
        key = RadixKey(tokens, cache_salt=salt)
        found = self.cache.match_prefix(MatchPrefixParams(key))
        new = self.slots.alloc(len(tokens) - len(found.device_indices))
        assert new is not None
        for slot, token in zip(new.tolist(), tokens[len(found.device_indices) :], strict=True):
            self.pool.k_buffer[0][slot] = float(token) + 0.125
            self.pool.v_buffer[0][slot] = float(token) + 0.625
        self.cache.insert(InsertParams(key, torch.cat([found.device_indices, new])))

    def until(self, receipt: Receipt) -> Receipt:
        """Go on until a wish has ended."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            self.step()
            now = self.cache.intent(receipt.id)
            assert now is not None
            if now.state.is_end or now.state is IntentState.HELD:
                return now
        raise AssertionError(f"nothing became of {now} in {WAIT_S} s")

    def step(self) -> None:
        self.cache.ready_to_load_host_cache()
        self.cache.check_hicache_events()
        time.sleep(0.001)

    def settle(self) -> None:
        assert self.cache.drain(WAIT_S)
        self.step()


def names_of(tokens: list[int], salt: str | None = None) -> list[str]:
    key = RadixKey(tokens, cache_salt=salt)
    rows = RadixTree(PAGE).rows_behind(key, key.space.seed, 0, len(tokens) // PAGE)
    return [digest.hex() for digest in hash_pages(rows)]


def traces(folder: Path, tokens: list[int], salt: str | None = None) -> list[str]:
    """Where in the files of a folder are names of these pages, as text or bytes, or bytes of theirs."""
    found = []
    wanted = [name.encode() for name in names_of(tokens, salt)]
    wanted += [bytes.fromhex(name) for name in names_of(tokens, salt)]
    for token in tokens[::PAGE]:
        wanted.append(torch.full((16,), float(token) + 0.125).numpy().tobytes())
    for path in folder.rglob("*"):
        data = str(path).encode() + (path.read_bytes() if path.is_file() else b"")
        found += [f"{path.name}: {what[:8]!r}" for what in wanted if what in data]
    return found


@pytest.mark.parametrize("backend", ["disk", "file"])
def test_nothing_is_left_in_the_files_of_what_was_forgotten(tmp_path: Path, backend: str) -> None:
    engine = Engine(tmp_path, backend)
    secret, other = list(range(1000, 1024)), list(range(3000, 3012))
    engine.compute(secret)
    engine.compute(secret + list(range(2000, 2008)))
    engine.compute(other, "bob")
    engine.settle()
    assert traces(tmp_path, secret) and traces(tmp_path, other, "bob")
    receipt = engine.until(engine.cache.forget(Selector.prefix(RadixKey(secret))))
    assert receipt.state is IntentState.DONE, receipt
    assert receipt.by_tier["storage"].pages == 8
    assert traces(tmp_path, secret + list(range(2000, 2008))) == []
    assert traces(tmp_path, other, "bob"), "another's pages are there still"
    assert engine.cache.locate(Selector.prefix(RadixKey(secret))).found["host"].tokens == 0
    engine.cache.close()
    assert traces(tmp_path, secret + list(range(2000, 2008))) == []


def test_what_continues_it_goes_from_a_disk_also_when_the_tree_has_it_no_more(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    start, more = list(range(100, 112)), list(range(200, 212))
    engine.compute(start + more)
    engine.settle()
    engine.cache.reset()
    receipt = engine.until(engine.cache.forget(Selector.prefix(RadixKey(start))))
    assert receipt.state is IntentState.DONE and not receipt.clipped, receipt
    assert receipt.by_tier["storage"].pages == 6
    assert traces(tmp_path, start + more) == []
    engine.cache.close()


def test_a_tenant_is_forgotten_in_a_store_with_an_account_of_tenants(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store", quota="8MiB", quota_path=str(tmp_path / "accounts"))
    his, others = list(range(100, 116)), list(range(500, 508))
    engine.compute(his, "alice")
    engine.compute(others, "bob")
    engine.settle()
    engine.cache.reset()  # the tree knows nothing of them
    receipt = engine.until(engine.cache.forget(Selector.tenant_of("salt:alice")))
    assert receipt.state is IntentState.DONE and not receipt.clipped, receipt
    assert receipt.by_tier["storage"].pages == 4
    assert traces(tmp_path / "store", his, "alice") == []
    assert traces(tmp_path / "store", others, "bob")
    engine.cache.close()


PERSIST = """
import json, sys
from pathlib import Path
from hiradix.intents import Selector
from tests.intents.test_stores import Engine

engine = Engine(Path(sys.argv[1]))
for prompt in json.loads(sys.argv[2]):
    engine.compute(prompt)
receipt = engine.until(engine.cache.bring(Selector.everything(), "storage"))
print(receipt.state.value, flush=True)
sys.stdin.read()
"""


def test_persist_kill_restart_all_back(tmp_path: Path) -> None:
    prompts = [list(range(100, 132)), list(range(100, 108)) + list(range(300, 320)), list(range(900, 908))]
    process = subprocess.Popen(
        [sys.executable, "-c", PERSIST, str(tmp_path), json.dumps(prompts)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline().strip() == "done"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)
    engine = Engine(tmp_path)
    for prompt in prompts:
        receipt = engine.until(engine.cache.bring(Selector.prefix(RadixKey(prompt)), "host"))
        assert receipt.state is IntentState.DONE and receipt.done.tokens == len(prompt), receipt
        found = engine.cache.match_prefix(MatchPrefixParams(RadixKey(prompt)))
        assert found.host_hit_length == len(prompt), "all from the host"
    engine.cache.close()


def test_pages_move_to_another_store_and_are_no_more_in_this_one(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    engine = Engine(here)
    prompt, stays = list(range(100, 116)), list(range(500, 508))
    engine.compute(prompt)
    engine.compute(stays)
    engine.settle()
    keys = json.dumps({"file_storage_path": str(there)})
    engine.cache.attached.add_other("cellar", engine.cache.attached.open("file", keys))
    copy = engine.until(engine.cache.bring(Selector.prefix(RadixKey(stays)), "cellar"))
    assert copy.state is IntentState.DONE and copy.done.tokens == 8, copy
    move = engine.until(engine.cache.bring(Selector.prefix(RadixKey(prompt)), "cellar", is_move=True))
    assert move.state is IntentState.DONE and move.done.tokens == 16, move
    assert traces(here, prompt) == [] and traces(here, stays)
    names = [path.name for path in there.rglob("*.page")]
    assert len(names) == 6
    engine.cache.close()
    other = Engine(there, "file")
    warmed = other.until(other.cache.bring(Selector.prefix(RadixKey(prompt)), "host"))
    assert warmed.done.tokens == 16
    other.cache.close()


def test_a_store_beside_the_attached_one_has_a_name_of_its_own(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "here")
    attached, keys = engine.cache.attached, json.dumps({"file_storage_path": str(tmp_path / "there")})
    with pytest.raises(StorageError, match="store: 'storage' is a tier"):
        attached.add_other("storage", attached.open("file", keys))
    attached.add_other("cellar", attached.open("file", keys))
    with pytest.raises(StorageError, match="a store 'cellar' is open already"):
        attached.add_other("cellar", attached.open("file", keys))
    assert attached.remove_other("cellar") and not attached.remove_other("cellar")
    engine.cache.close()
