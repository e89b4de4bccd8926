"""SGLang 0.5.23's own classes behind the names its users know, where they run without a vendor's cluster."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.storage_peers.install import SGLANG
from hiradix.errors import StorageError
from hiradix.storage import GuardedStorage, PageFingerprint, StorageContext, open_storage
from hiradix.storage.backends.sglang.known import KNOWN
from hiradix.storage.backends.sglang.pool import ArenaPool
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    QuotaContract,
    StorageContract,
    hits,
    keys_of,
    put,
)
from tests.storage_servers.sglang_wheel import sglang_modules

HEAVY = ("sglang.srt.mem_cache.pool_host", "sglang.srt.observability.metrics_collector")
"""Of these the classes take a name or two, and they import half of SGLang."""


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with sglang_modules() as module:
        for name in ("sglang.srt.mem_cache.storage", "sglang.srt.observability"):
            package = types.ModuleType(name)
            package.__path__ = [str(SGLANG.joinpath(*name.split(".")))]
            sys.modules[name] = package
        for name in HEAVY:
            stub = types.ModuleType(name)
            stub.HostKVCache = stub.StorageMetrics = object  # type: ignore[attr-defined]
            sys.modules[name] = stub
        if importlib.util.find_spec("orjson") is None:  # what talks to a metadata server imports it
            monkeypatch.setitem(sys.modules, "orjson", types.ModuleType("orjson"))
        yield module


def of_3fs(place: Path, fingerprint: PageFingerprint, **config: Any) -> GuardedStorage:
    """hf3fs as it is without a metadata server, with SGLang's stand-in for 3FS itself."""
    place.mkdir(parents=True, exist_ok=True)
    keys = {"use_mock_hf3fs_client": True, "deadline_s": 30.0}
    return open_storage("hf3fs", StorageContext(fingerprint, keys | config, PAGE_BYTES))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "hf3fs.json"
    files = {"file_path_prefix": str(tmp_path / "files" / "pages"), "file_size": 64 << 20}
    path.write_text(json.dumps({**files, "numjobs": 2, "entries": 8}))
    monkeypatch.setenv("SGLANG_HICACHE_HF3FS_CONFIG_PATH", str(path))
    return tmp_path / "files"


class TestHf3fs(StorageContract, QuotaContract):
    raises = False
    deletes = False

    @pytest.fixture(autouse=True)
    def _settings(self, settings: Path) -> None:
        pass

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        return of_3fs(place, fingerprint, **config)

    def test_absent_keys_leave_their_neighbours_alone(self, store: Any) -> None:
        """It gives what comes before the first hole alone."""
        keys = keys_of(9)
        put(store, keys[::2])
        assert hits(store, keys) == [True, *[False] * 8]


@pytest.mark.parametrize("page_size", [1, 48, 128])
def test_pages_of_3fs_need_not_be_a_multiple_of_their_tokens(page_size: int, settings: Path) -> None:
    store = of_3fs(settings, PageFingerprint("a/model", page_size=page_size))
    assert all(put(store, keys_of(20))) and all(hits(store, keys_of(20)))
    store.close()


def test_each_rank_has_its_own_file_of_3fs(settings: Path) -> None:
    """One process's metadata know nothing of another's pages: in one file both would take the same place."""
    ranks = [PageFingerprint("a/model", tp_rank=rank, tp_size=2) for rank in (0, 1)]
    stores = [of_3fs(settings, fingerprint) for fingerprint in ranks]
    assert all(all(put(store, keys_of(20))) for store in stores)
    assert all(all(hits(store, keys_of(20))) for store in stores)
    assert sorted(path.name for path in settings.iterdir()) == ["pages.0.bin", "pages.1.bin"]
    for store in stores:
        store.close()


def test_3fs_is_opened_on_any_thread_and_takes_no_signals(settings: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[GuardedStorage] = []
    thread = threading.Thread(target=lambda: found.append(of_3fs(settings, FINGERPRINT)))
    thread.start()
    thread.join(60)
    assert found and all(put(found[0], keys_of(3))) and all(hits(found[0], keys_of(3)))
    found[0].close()
    of_3fs(settings, FINGERPRINT).close()
    assert signal.getsignal(signal.SIGTERM) is before


class Answer:
    """aibrix's answers: a value, or an error."""

    def __init__(self, value: Any):
        self.value, self.error_code = value, None if value is not None else "NOT_FOUND"

    def is_ok(self) -> bool:
        return self.value is not None


class Blocks:
    def __init__(self, tensors: list[Any]):
        self.to_tensors = lambda: tensors

    def release(self) -> None:
        pass


class Manager:
    """What SGLang's class asks of aibrix's manager, in memory."""

    def __init__(self, spec: dict[str, Any]):
        tensor = spec["tensor_spec"]
        halves = spec["block_ntokens"], 2, len(tensor["layers"]), len(tensor["heads"]), tensor["head_size"]
        self._shape, self._dtype = halves, spec["block_dtype"]
        self._blocks: dict[str, Any] = {}
        self.metrics = types.SimpleNamespace(summary=lambda: "", reset=lambda: None)

    def acquire(self, prefix: None, asked: tuple[list[str], int]) -> Answer:
        keys, num_tokens = asked
        found = [self._blocks[key] for key in keys if key in self._blocks]
        return Answer((len(found) * num_tokens, Blocks(found)) if len(found) == len(keys) else None)

    def allocate_for(self, prefix: None, asked: tuple[list[str], int]) -> Answer:
        return Answer(Blocks([torch.empty(self._shape, dtype=self._dtype) for _ in asked[0]]))

    def put(self, prefix: None, asked: tuple[list[str], int], handle: Blocks) -> Answer:
        self._blocks.update(zip(asked[0], handle.to_tensors(), strict=True))
        return Answer(len(asked[0]) * asked[1])

    def exists(self, prefix: None, asked: tuple[list[str], int]) -> Answer:
        keys, num_tokens = asked
        found = next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))
        return Answer(found * num_tokens or None)


@pytest.fixture
def aibrix(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("aibrix_kvcache")
    module.__dict__.update(
        BaseKVCacheManager=lambda config: Manager(config["block_spec"]),
        BlockHashes=lambda keys, num_tokens: (list(keys), num_tokens),
        ModelSpec=lambda num_tokens: num_tokens,
        **{name: dict for name in ("KVCacheBlockSpec", "KVCacheConfig", "KVCacheTensorSpec")},
    )
    module.KVCacheBlockLayout = type("Layout", (str,), {"NCLD": "ncld"})  # type: ignore[attr-defined]
    logs = types.ModuleType("aibrix_kvcache.common.absl_logging")
    logs.log_every_n_seconds = lambda *_: None  # type: ignore[attr-defined]
    common = types.ModuleType("aibrix_kvcache.common")
    for one in (module, common, logs):
        monkeypatch.setitem(sys.modules, one.__name__, one)


@pytest.mark.usefixtures("aibrix")
@pytest.mark.parametrize("page_size", [1, 48, 64])
def test_aibrix_has_pages_whole(page_size: int) -> None:
    keys = {"deadline_s": 30.0}
    store = open_storage(
        "aibrix", StorageContext(PageFingerprint("a/model", page_size=page_size), keys, PAGE_BYTES)
    )
    assert all(put(store, keys_of(20))) and store.exists(keys_of(30)) == 20
    assert all(hits(store, keys_of(20)))
    store.close()


@pytest.mark.usefixtures("aibrix")
def test_a_class_that_cannot_clear_says_so() -> None:
    store = open_storage("aibrix", StorageContext(FINGERPRINT, {"deadline_s": 30.0}, PAGE_BYTES))
    assert all(put(store, keys_of(3)))
    with pytest.raises(StorageError, match="AibrixKVCacheStorage cannot clear"):
        store.backend.clear()
    assert not store.clear() and all(hits(store, keys_of(3)))
    store.close()


NEVER = {
    "get_split_heads_page_buffer_meta": "heads are never split",
    "v_buffer": "of the layout page_first_kv_split",
    "index_k_buffer": "of the same", "index_k_scale_buffer": "of the same",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(name for name, known in KNOWN.items() if known.module))
def test_the_arena_has_what_a_known_class_asks_of_a_pool(name: str) -> None:
    source = SGLANG.joinpath(*KNOWN[name].module.split(".")).with_suffix(".py").read_text()
    pool = re.compile(r"\b(?:mem_pool_host|memory_pool_host|storage_info|mem_pool)\.([a-z_]+)")
    arena = ArenaPool(1, 4096, 64)
    asked = set(pool.findall(source)) - set(NEVER)
    assert asked and sorted(one for one in asked if not hasattr(arena, one)) == []
