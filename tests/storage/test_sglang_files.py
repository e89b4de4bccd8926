"""`file` with SGLang's names: the suite, its file names, and sharing a directory."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import ConfigError
from hiradix.storage import GuardedStorage, PageFingerprint, StorageContext, open_storage
from hiradix.storage.backends.file.backend import FileBackend
from hiradix.storage.backends.file.page_dir import footprint
from hiradix.storage.backends.sglang.files import FileByNaming, SglangFileBackend
from tests.contracts.chains import ChainContract
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    BoundedContract,
    Make,
    PersistentContract,
    SharedContract,
    SharedQuotaContract,
    StorageContract,
    bytes_of,
    hits,
    key_of,
    keys_of,
    put,
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)


def context(place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> StorageContext:
    keys = {"naming": "sglang", "file_storage_path": str(place / "store"), "min_free_space": 0}
    return StorageContext(fingerprint, keys | config, PAGE_BYTES)


class Bounds:
    def bounded(self, make: Make, pages: int) -> Any:
        return make(max_size=pages * footprint(PAGE_BYTES))

    def used_pages(self, place: Path) -> int:
        return sum(1 for _ in (place / "store").glob("*.bin"))


class TestSglangFiles(Bounds, StorageContract, PersistentContract, SharedContract, BoundedContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        return SglangFileBackend(context(place, fingerprint, **config))


class TestSglangFilesChains(Bounds, ChainContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        return SglangFileBackend(context(place, fingerprint, **config))


class TestGuardedSglangFiles(
    Bounds, StorageContract, PersistentContract, SharedContract, BoundedContract, SharedQuotaContract
):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        return open_storage("file", context(place, fingerprint, deadline_s=30.0, **config))


@pytest.mark.parametrize(
    ("ranks", "keys", "suffix"),
    [
        ({}, {}, "_a-model_0_1"),
        ({"tp_rank": 1, "tp_size": 2}, {}, "_a-model_1_2"),
        ({"pp_rank": 1, "pp_size": 3}, {}, "_a-model_0_1_3_1"),
        ({"tp_rank": 1, "tp_size": 2}, {"is_mla_model": True}, "_a-model"),
        ({"pp_rank": 1, "pp_size": 3}, {"is_mla_model": True}, "_a-model_3_1"),
        ({}, {"sglang_model_name": "x/y/z"}, "_x-y-z_0_1"),
        ({}, {"sglang_model_name": ""}, "__0_1"),
    ],
)
def test_names_are_sglangs(tmp_path: Path, ranks: Any, keys: Any, suffix: str) -> None:
    store = SglangFileBackend(context(tmp_path, dataclasses.replace(FINGERPRINT, **ranks), **keys))
    put(store, keys_of(1))
    (file,) = (tmp_path / "store").iterdir()
    assert file.name == f"{key_of(0)}{suffix}.bin" and file.read_bytes() == bytes_of(key_of(0))


def test_truncated_file_is_a_miss_and_is_replaced(tmp_path: Path) -> None:
    store = SglangFileBackend(context(tmp_path))
    put(store, keys_of(2))
    path = next((tmp_path / "store").glob(f"{key_of(0)}*"))
    path.write_bytes(path.read_bytes()[:100])
    assert hits(store, keys_of(2)) == [False, True] and store.stats()["read_damaged"] == 1
    assert all(put(store, keys_of(2))) and all(hits(store, keys_of(2)))


def test_clear_and_the_cap_leave_other_files_alone(tmp_path: Path) -> None:
    other = SglangFileBackend(context(tmp_path, sglang_model_name="other"))
    put(other, keys_of(3))
    (tmp_path / "store" / "notes.txt").write_text("mine")
    store = SglangFileBackend(context(tmp_path, max_size=2 * footprint(PAGE_BYTES)))
    for number in range(6):
        put(store, [key_of(number)])
    store.clear()
    assert all(hits(other, keys_of(3))) and (tmp_path / "store" / "notes.txt").exists()
    assert sum(1 for _ in (tmp_path / "store").iterdir()) == 4


def test_what_a_dead_writer_left_goes(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    for name, age_s in ((f".{'a' * 32}.tmp", 5000), (f".{'b' * 32}.tmp", 0), (".keep", 5000)):
        (folder / name).write_bytes(b"x")
        then = (folder / name).stat().st_mtime - age_s
        os.utime(folder / name, (then, then))
    SglangFileBackend(context(tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == [f".{'b' * 32}.tmp", ".keep"]


def test_files_of_another_writer_count_before_anything_is_written_over_the_cap(tmp_path: Path) -> None:
    cap = 8 * footprint(PAGE_BYTES)
    ours, theirs = (SglangFileBackend(context(tmp_path, max_size=cap)) for _ in range(2))
    put(theirs, keys_of(8))
    for number in range(100, 116):
        put(ours, [key_of(number)])
    assert sum(1 for _ in (tmp_path / "store").iterdir()) <= 8


def test_symlinks_and_folders_are_no_pages(tmp_path: Path) -> None:
    store = SglangFileBackend(context(tmp_path))
    put(store, keys_of(1))
    path = next((tmp_path / "store").iterdir())
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert hits(store, keys_of(1)) == [False]
    path.unlink()
    path.mkdir()
    assert hits(store, keys_of(1)) == [False]


def test_naming_chooses_the_backend(tmp_path: Path) -> None:
    assert isinstance(FileByNaming(context(tmp_path)), SglangFileBackend)
    own = FileByNaming(context(tmp_path, naming="hiradix"))
    assert isinstance(own, FileBackend)
    own.close()
    with pytest.raises(ConfigError, match="naming: unknown value"):
        FileByNaming(context(tmp_path, naming="vllm"))
    with pytest.raises(ConfigError, match="sglang_model_name: .* makes no file name"):
        SglangFileBackend(context(tmp_path, sglang_model_name="x" * 300))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_refuses_pages_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A user's quota is not in what the file system says is free. The third put opened the breaker."""
    store = open_storage("file", context(tmp_path, deadline_s=60.0))
    assert all(put(store, keys_of(2)))

    def full(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("hiradix.storage.backends.sglang.files.write_from", full)
    assert not any(put(store, keys_of(3, 10 * number)).count(True) for number in range(1, 6))
    assert hits(store, keys_of(2)) == [True, True] and store.stats()["breaker_opened"] == 0
    assert store.stats()["backend_put_no_room"] >= 5 and len(os.listdir(tmp_path / "store")) == 2
    store.close()


@pytest.mark.parametrize("has_grown", [True, False])
def test_a_file_that_somebody_is_writing_stays(has_grown: bool, tmp_path: Path) -> None:
    """SGLang before 0.5.23, or a copy, writes under the page's name: a miss until all of it is there."""
    store = SglangFileBackend(context(tmp_path))
    path = tmp_path / "store" / f"{key_of(0)}_a-model_0_1.bin"
    path.write_bytes(bytes_of(key_of(0))[:100])
    for _ in range(3):
        assert hits(store, keys_of(1)) == [False]
    assert path.exists() and store.exists(keys_of(1)) == 0 and store.stats()["read_damaged"] == 1
    if has_grown:
        with open(path, "ab") as file:
            file.write(bytes_of(key_of(0))[100:])
    else:
        assert all(put(store, keys_of(1)))
    assert store.exists(keys_of(1)) == 1 and hits(store, keys_of(1)) == [True]


def test_another_ranks_file_under_our_name_is_no_page(tmp_path: Path) -> None:
    ranks = [dataclasses.replace(FINGERPRINT, tp_rank=rank, tp_size=2) for rank in range(2)]
    stores = [SglangFileBackend(context(tmp_path, rank)) for rank in ranks]
    assert all(all(put(store, keys_of(1))) for store in stores)
    first, second = sorted((tmp_path / "store").iterdir())
    os.replace(first, second)
    assert hits(stores[1], keys_of(1)) == [False] and stores[1].stats()["read_damaged"] == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EPERM])
def test_a_seal_that_cannot_be_read_is_not_taken_for_none(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SglangFileBackend(context(tmp_path))
    assert all(put(store, keys_of(1)))

    def fails(*_: Any) -> bytes:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "getxattr", fails)
        assert hits(store, keys_of(1)) == [False] and store.stats()["unknown_checksum"] == 1
    assert hits(store, keys_of(1)) == [True]


def test_files_that_got_no_seal_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SglangFileBackend(context(tmp_path))

    def fails(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no attributes here")

    monkeypatch.setattr(os, "setxattr", fails)
    assert all(put(store, keys_of(3))) and all(hits(store, keys_of(3)))
    assert store.stats()["put_unsealed"] == 3
