"""The conformance suite on NIXL: page files through POSIX, objects through OBJ, bare and guarded."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import ConfigError, StorageError
from hiradix.storage import GuardedStorage, PageFingerprint, StorageContext, open_storage
from hiradix.storage.nixl_backend import NixlBackend
from hiradix.storage.retry import RetryingStorage
from hiradix.storage.s3_backend import S3Backend
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    BoundedContract,
    Make,
    NamespaceContract,
    PersistentContract,
    SharedContract,
    SharedQuotaContract,
    StorageContract,
    bytes_of,
    content,
    hits,
    key_of,
    keys_of,
    put,
)
from tests.storage import files
from tests.storage.files import FILE_BYTES, bytes_in_ledger, open_file, page_files, path_of
from tests.storage_servers.servers import Server, make_folder, prefix_of, s3_keys


def file_context(place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> StorageContext:
    return files.context(place / "store", fingerprint, **{"buffer_size": "1MiB"} | config)


class TestNixlFiles(StorageContract, PersistentContract, NamespaceContract, SharedContract, BoundedContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        return NixlBackend(file_context(place, fingerprint, **config))

    def bounded(self, make: Make, pages: int) -> Any:
        return make(max_size=pages * FILE_BYTES)

    def used_pages(self, place: Path) -> int:
        return len(page_files(place / "store"))


class TestGuardedNixlFiles(
    StorageContract, PersistentContract, NamespaceContract, SharedContract, SharedQuotaContract
):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        return open_storage("nixl", file_context(place, fingerprint, **{"deadline_s": 30.0} | config))


class OnServer:
    """`place` becomes a prefix in the bucket: one server holds the stores of all tests."""

    server: Server

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: Server) -> None:
        self.server = s3_server

    def context(self, place: Path, fingerprint: PageFingerprint, **config: Any) -> StorageContext:
        make_folder(self.server, f"{prefix_of(place)}/{fingerprint.digest()[:32]}")
        keys = {"plugin": "OBJ", "timeout_s": 30.0, **s3_keys(self.server, prefix_of(place))}
        return StorageContext(fingerprint, keys | config, PAGE_BYTES)


class TestNixlObjects(OnServer, StorageContract, PersistentContract, NamespaceContract, SharedContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        return RetryingStorage(NixlBackend(self.context(place, fingerprint, **config)), 3, 0.01)


class TestGuardedNixlObjects(OnServer, StorageContract, NamespaceContract, SharedQuotaContract):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        keys = {"deadline_s": 30.0, "retries": 5, "retry_wait_s": 0.01}
        return open_storage("nixl", self.context(place, fingerprint, **keys | config))


def test_page_files_are_those_of_the_file_backend_and_moved_by_the_plugin(tmp_path: Path) -> None:
    nixl, plain = NixlBackend(file_context(tmp_path)), open_file(tmp_path / "store")
    put(nixl, keys_of(40))
    put(plain, keys_of(40, start=40))
    assert all(hits(plain, keys_of(80))) and all(hits(nixl, keys_of(80)))
    assert nixl.stats()["pages_copied"] == 120 and "transfer_errors" not in nixl.stats()
    nixl.close()
    plain.close()


@pytest.mark.parametrize("engine", ["use_uring", "use_aio", "use_posix_aio"])
def test_registered_memory_is_read_and_written_in_place(tmp_path: Path, engine: str) -> None:
    store = NixlBackend(file_context(tmp_path, plugin_options={engine: "true"}))
    memory = memoryview(mmap.mmap(-1, 100 * PAGE_BYTES))
    store.register(memory)
    keys = keys_of(100)
    pages = [[memory[at : at + 2000], memory[at + 2000 : at + PAGE_BYTES]]
             for at in range(0, len(memory), PAGE_BYTES)]  # fmt: skip
    for key, (head, tail) in zip(keys, pages):
        head[:], tail[:] = bytes_of(key)[:2000], bytes_of(key)[2000:]
    assert all(store.put(keys, pages))
    memory[:] = bytes(len(memory))
    assert all(store.get(keys, pages))
    assert [content(page) for page in pages] == [bytes_of(key) for key in keys]
    assert store.stats()["pages_in_place"] == 200 and "transfer_errors" not in store.stats()
    store.close()


@pytest.mark.parametrize("damage", ["flip", "short", "gone"])
def test_damaged_page_is_a_miss_alone_and_is_replaced(tmp_path: Path, damage: str) -> None:
    store = NixlBackend(file_context(tmp_path))
    put(store, keys_of(8))
    path = path_of(tmp_path / "store", key_of(3))
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-9] if damage == "short" else whole[:-9] + bytes(9))
    assert hits(store, keys_of(8)) == [index != 3 for index in range(8)]
    assert put(store, [key_of(3)]) == [True] and all(hits(store, keys_of(8)))
    store.close()


def test_page_that_a_transfer_cannot_move_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that shrinks after it was measured fails NIXL's transfer for all pages."""
    store = NixlBackend(file_context(tmp_path))
    put(store, keys_of(8))
    path = path_of(tmp_path / "store", key_of(3))
    run = store._link.run

    def shrink_and_run(write: bool, transfers: Any) -> None:
        os.truncate(path, 1000)
        run(write, transfers)

    monkeypatch.setattr(store._link, "run", shrink_and_run)
    assert hits(store, keys_of(8)) == [index != 3 for index in range(8)]
    assert store.stats()["transfer_errors"] == 1
    store.close()


def test_memory_that_nixl_does_not_take_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NixlBackend(file_context(tmp_path))

    def refuse(*_: Any) -> None:
        raise RuntimeError("too much is locked")

    with monkeypatch.context() as patch:
        patch.setattr(store._link._agent, "register_memory", refuse)
        with pytest.raises(StorageError, match="too much is locked"):
            put(store, keys_of(8))
    assert not any((tmp_path / "store" / "tmp").iterdir()) and bytes_in_ledger(tmp_path / "store") == 0
    assert all(put(store, keys_of(8))) and all(hits(store, keys_of(8)))
    store.close()


def test_objects_are_those_of_the_s3_backend_and_moved_by_the_plugin(s3_server: Server) -> None:
    keys = s3_keys(s3_server, "both")
    nixl = NixlBackend(StorageContext(FINGERPRINT, keys | {"plugin": "OBJ"}, PAGE_BYTES))
    plain = S3Backend(StorageContext(FINGERPRINT, keys, PAGE_BYTES))
    put(nixl, keys_of(6))
    put(plain, keys_of(6, start=6))
    assert all(hits(plain, keys_of(12))) and all(hits(nixl, keys_of(12)))
    assert "transfer_errors" not in nixl.stats()
    nixl.close()
    plain.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"plugin": "FLOPPY"}, "plugin: unknown value 'FLOPPY'"),
        ({"plugin": {"posix": {}}}, "plugin: unknown value"),
        ({"plugin": "GDS"}, "plugin: cannot use GDS"),
        ({"plugin_options": {"use_uring": True}}, "plugin_options must be an object of texts"),
        ({"plugin": "OBJ", "url": "gs://bucket/x"}, "plugin OBJ needs s3://bucket/prefix"),
        ({"plugin": "OBJ", "url": "s3://bucket/x", "zero_copy": True}, "zero_copy: not with plugin OBJ"),
        ({"bucket": "x"}, "bucket is no key of storage backend file"),
    ],
)
def test_bad_keys_are_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    place = {} if keys.get("plugin") == "OBJ" else file_context(tmp_path).extra_config
    with pytest.raises(ConfigError, match=message):
        NixlBackend(StorageContext(FINGERPRINT, {**place, **keys}, PAGE_BYTES))
