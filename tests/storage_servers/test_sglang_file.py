"""SGLang 0.5.23's own HiCacheFile: through the shim, and on the files of our `naming="sglang"`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hiradix.storage import GuardedStorage, PageFingerprint, StorageContext, open_storage
from hiradix.storage.backends.sglang.base import make_config
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    NamespaceContract,
    PersistentContract,
    QuotaContract,
    SharedContract,
    StorageContract,
    bytes_of,
    hits,
    keys_of,
    put,
)
from tests.storage_servers.sglang_wheel import sglang_modules

MODULE = "sglang.srt.mem_cache.hicache_storage"


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
    with sglang_modules() as module:
        yield module


class TestHiCacheFile(StorageContract, PersistentContract, NamespaceContract, SharedContract, QuotaContract):
    """Its `clear` takes the whole directory, and what it cannot do (deleting) only this handle remembers."""

    raises = False
    deletes = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        keys = {"backend_name": "file", "module_path": MODULE, "class_name": "HiCacheFile",
                "file_storage_path": str(place / "store"), "deadline_s": 30.0, "max_size": 0}  # fmt: skip
        return open_storage("dynamic", StorageContext(fingerprint, keys | config, PAGE_BYTES))

    @pytest.mark.parametrize("difference", NamespaceContract.DIFFERENCES[:-1], ids=lambda d: next(iter(d)))
    def test_any_difference_is_a_miss_and_the_same_is_a_hit(self, make: Any, difference: Any) -> None:
        """But for the last, a model's name too long for its file names."""
        super().test_any_difference_is_a_miss_and_the_same_is_a_hit(make, difference)

    def test_clear_is_scoped(self, make: Any) -> None:
        ours, theirs = make(), make(PageFingerprint("other/model"))
        put(theirs, keys_of(2))
        ours.clear()
        assert not any(hits(theirs, keys_of(2)))

    def test_deleted_pages_stay_deleted(self, make: Any) -> None:
        """It has no delete: only the handle that deleted them knows."""
        first = make()
        put(first, keys_of(2))
        first.delete(keys_of(1))
        assert hits(first, keys_of(2)) == [False, True] and hits(make(), keys_of(2)) == [True, True]

    def test_page_deleted_by_another_is_a_miss_and_can_be_put(self, make: Any) -> None:
        ours, theirs = make(), make()
        put(ours, keys_of(2))
        theirs.delete(keys_of(1))
        assert hits(ours, keys_of(2)) == [True, True] and hits(theirs, keys_of(2)) == [False, True]

    def test_delete_is_scoped(self, make: Any) -> None:
        ours, theirs = make(), make(PageFingerprint("other/model"))
        put(ours, keys_of(2))
        put(theirs, keys_of(2))
        theirs.delete(keys_of(1))
        assert hits(ours, keys_of(2)) == [True, True] and hits(theirs, keys_of(2)) == [False, True]


RANKS = [
    ({}, False),
    ({"tp_rank": 1, "tp_size": 2}, False),
    ({"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2}, False),
    ({"pp_rank": 1, "pp_size": 2}, True),
]


@pytest.fixture(params=RANKS, ids=str)
def both(request: pytest.FixtureRequest, tmp_path: Path, sglang: Any) -> tuple[GuardedStorage, Any]:
    """Our store and SGLang's on one directory, of the same model and ranks."""
    ranks, is_mla = request.param
    fingerprint = dataclasses.replace(FINGERPRINT, model_id="org/some-model", **ranks)
    folder = tmp_path / "store"
    folder.mkdir()
    keys = {
        "file_storage_path": str(folder), "naming": "sglang", "is_mla_model": is_mla, "deadline_s": 30.0,
    }  # fmt: skip
    ours = open_storage("file", StorageContext(fingerprint, keys, PAGE_BYTES))
    base = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1} | ranks
    config = make_config(
        base | {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": is_mla, "is_page_first_layout": True,
                "enable_storage_metrics": False, "model_name": "org/some-model",
                "extra_config": {"file_storage_path": str(folder)}}
    )  # fmt: skip
    return ours, sglang.HiCacheFile(config)


def test_sglang_reads_our_files(both: tuple[GuardedStorage, Any]) -> None:
    ours, theirs = both
    keys = keys_of(20)
    assert all(put(ours, keys))
    assert theirs.batch_exists([*keys, "f" * 64]) == 20
    targets = [torch.zeros(PAGE_BYTES // 4, dtype=torch.float32) for _ in keys]
    assert all(found is not None for found in theirs.batch_get(keys, targets))
    assert [bytes(target.view(torch.uint8).numpy()) for target in targets] == [bytes_of(key) for key in keys]


def test_we_read_sglangs_files(both: tuple[GuardedStorage, Any]) -> None:
    ours, theirs = both
    keys = keys_of(20)
    values = [torch.frombuffer(bytearray(bytes_of(key)), dtype=torch.uint8) for key in keys]
    assert theirs.batch_set(keys, values) is True
    assert ours.exists([*keys, "f" * 64]) == 20 and all(hits(ours, keys))


def test_neither_rewrites_the_others_pages(both: tuple[GuardedStorage, Any], tmp_path: Path) -> None:
    ours, theirs = both
    keys = keys_of(4)
    put(ours, keys)
    before = {path: path.stat().st_ino for path in (tmp_path / "store").iterdir()}
    other = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
    assert theirs.batch_set(keys, [other] * 4) is True and all(put(ours, keys))
    assert {path: path.stat().st_ino for path in (tmp_path / "store").iterdir()} == before
    assert all(hits(ours, keys))
