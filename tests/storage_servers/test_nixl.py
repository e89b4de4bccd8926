"""The conformance suite on NIXL: page files through POSIX, objects through OBJ, bare and guarded."""

from __future__ import annotations

import mmap
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import ConfigError, StorageError
from hiradix.os_memory import address_of
from hiradix.storage import Batch, GuardedStorage, PageFingerprint, StorageContext, open_storage
from hiradix.storage.backends.file import backend as file
from hiradix.storage.backends.nixl.backend import NixlBackend
from hiradix.storage.backends.nixl.config import NixlConfig
from hiradix.storage.backends.nixl.link import POSIX_ENGINES, NixlLink, Transfer
from hiradix.storage.backends.s3.backend import S3Backend
from hiradix.storage.wrappers.retry import RetryingStorage
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
from tests.storage_servers.objects import OnServer, SharedOnServer
from tests.storage_servers.servers import Server, s3_keys


def file_context(place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> StorageContext:
    return files.context(place / "store", fingerprint, **{"buffer_size": "1MiB"} | config)


def object_context(
    server: Server, folder: str, fingerprint: PageFingerprint = FINGERPRINT, **config: Any
) -> StorageContext:
    keys = {"plugin": "OBJ", **s3_keys(server, folder)}
    return StorageContext(fingerprint, keys | config, PAGE_BYTES)


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


class OnObjects(OnServer):
    def context(self, place: Path, fingerprint: PageFingerprint, **config: Any) -> StorageContext:
        return object_context(self.server, self.prefix(place, fingerprint), fingerprint, **config)


class TestNixlObjects(OnObjects, SharedOnServer, StorageContract, PersistentContract, NamespaceContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        return RetryingStorage(NixlBackend(self.context(place, fingerprint, **config)), 3, 0.01)


class TestGuardedNixlObjects(OnObjects, StorageContract, NamespaceContract, SharedQuotaContract):
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


@pytest.mark.parametrize("engine", POSIX_ENGINES)
def test_registered_memory_is_read_and_written_in_place(tmp_path: Path, engine: str) -> None:
    store = NixlBackend(file_context(tmp_path, plugin_options={engine: "true"}))
    memory = memoryview(mmap.mmap(-1, 100 * PAGE_BYTES))
    store.register(memory)
    keys = keys_of(100)
    pages = [[memory[at : at + 2000], memory[at + 2000 : at + PAGE_BYTES]]
             for at in range(0, len(memory), PAGE_BYTES)]  # fmt: skip
    for key, (head, tail) in zip(keys, pages):
        head[:], tail[:] = bytes_of(key)[:2000], bytes_of(key)[2000:]
    assert all(store.put(Batch.of(keys), pages))
    memory[:] = bytes(len(memory))
    assert all(store.get(Batch.of(keys), pages))
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

    def shrink_and_run(write: bool, transfers: Any) -> list[bool]:
        os.truncate(path, 1000)
        moved: list[bool] = run(write, transfers)
        return moved

    monkeypatch.setattr(store._link, "run", shrink_and_run)
    assert hits(store, keys_of(8)) == [index != 3 for index in range(8)]
    assert store.stats()["transfer_errors"] == 1
    store.close()


def test_what_was_moved_is_not_moved_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a transfer of which one page failed, only that page is moved without NIXL."""
    store = NixlBackend(file_context(tmp_path))
    run, plainly = store._link.run, []

    def fail_one(write: bool, transfers: Any) -> list[bool]:
        assert all(run(write, transfers))
        return [index != 3 for index in range(len(transfers))]

    def noted(name: str) -> None:
        call = getattr(file, name)
        monkeypatch.setattr(file, name, lambda *args: plainly.append(name) or call(*args))

    monkeypatch.setattr(store._link, "run", fail_one)
    noted("read_into")
    noted("write_from")
    assert put(store, keys_of(8)) == [True] * 8 and hits(store, keys_of(8)) == [True] * 8
    assert plainly == ["write_from", "read_into"]
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


def test_object_that_goes_while_it_is_read_costs_only_itself(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NixlBackend(object_context(s3_server, "going"))
    put(store, keys_of(8))
    run = store._link.run

    def delete_and_run(write: bool, transfers: Any) -> list[bool]:
        store._delete([store._path(key_of(3))])
        moved: list[bool] = run(write, transfers)
        assert moved == [index != 3 for index in range(8)]
        return moved

    monkeypatch.setattr(store._link, "run", delete_and_run)
    assert hits(store, keys_of(8)) == [index != 3 for index in range(8)]
    assert store.stats()["transfer_errors"] == 1
    store.close()


def test_error_of_one_object_is_a_miss_beside_those_that_came(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an error where nothing came, as in `s3`."""
    store = NixlBackend(object_context(s3_server, "half"))
    put(store, keys_of(8))
    run, failed = store._link.run, {3}

    def fail(write: bool, transfers: Any) -> list[bool]:
        return [good and index not in failed for index, good in enumerate(run(write, transfers))]

    def refuse(*_: Any) -> list[bool]:
        raise StorageError("no answer")

    monkeypatch.setattr(store._link, "run", fail)
    monkeypatch.setattr(S3Backend, "_read_all", refuse)
    assert hits(store, keys_of(8)) == [index != 3 for index in range(8)]
    failed |= set(range(8))
    with pytest.raises(StorageError, match="no answer"):
        hits(store, keys_of(8))
    store.close()


class LateServer(ThreadingHTTPServer):
    """Answers for objects named `gone` with 404 at once; others come when that was said."""

    def __init__(self) -> None:
        self.said = threading.Event()
        super().__init__(("127.0.0.1", 0), LateAnswers)


class LateAnswers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LateServer

    def do_GET(self) -> None:
        gone = "gone" in self.path
        body = b"" if gone else b"late" * 1024
        if not gone:
            assert self.server.said.wait(60)
        part = "Range" in self.headers
        self.send_response(404 if gone else 206 if part else 200)
        self.send_header("Content-Length", str(len(body)))
        if part and not gone:
            self.send_header("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        self.server.said.set()

    def log_message(self, *_: Any) -> None:
        pass


def test_nothing_is_under_way_after_a_transfer_that_failed() -> None:
    """Found: the library answered at the first failure, and what came later was written all the same."""
    server = LateServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    parameters = {
        "endpoint_override": f"http://127.0.0.1:{server.server_port}", "scheme": "http", "region": "any",
        "access_key": "a", "secret_key": "b", "use_virtual_addressing": "false", "bucket": "pages",
    }  # fmt: skip
    link = NixlLink(NixlConfig("OBJ", {}, 1 << 16, False, {}), parameters)
    memory = memoryview(mmap.mmap(-1, 2 * 4096))
    link.memory.add(memory)
    at = address_of(memory)
    names = ["gone", "there"]
    pages = [Transfer(i + 1, 4096, [(0, at + 4096 * i, 4096)], name) for i, name in enumerate(names)]
    assert link.run(False, pages) == [False, True]
    assert bytes(memory[4096:]) == b"late" * 1024
    link.close()
    server.shutdown()
    server.server_close()


class SlowAgent:
    """A library whose transfers come to their end when that is said."""

    def __init__(self) -> None:
        self.asked, self.said = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: object()

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        self.asked.set()
        return "DONE" if self.said.is_set() else "PROC"


def test_closing_waits_for_transfers_that_write_into_pages() -> None:
    link = NixlLink(NixlConfig("POSIX", {}, 1 << 16, True, {}), {})
    link._agent = agent = SlowAgent()
    moved: list[list[bool]] = []
    page = Transfer(1, 64, [(0, address_of(memoryview(bytearray(64))), 64)])
    reader = threading.Thread(target=lambda: moved.append(link.run(False, [page])))
    reader.start()
    assert agent.asked.wait(30)
    closer = threading.Thread(target=link.close)
    closer.start()
    closer.join(0.2)  # of no consequence where all is well: it waits
    assert reader.is_alive() and closer.is_alive(), "a call ended with its transfer under way"
    agent.said.set()
    reader.join(30)
    closer.join(30)
    assert moved == [[True]] and link.run(False, [page]) == [False]


@pytest.mark.parametrize("engine", POSIX_ENGINES)
def test_a_file_engine_that_answers_at_its_first_failure_has_one_page_at_a_time(
    tmp_path: Path, engine: str
) -> None:
    """Found: pages came in after `use_posix_aio` had answered for them with the failure of another, in one
    transfer with them or before. It is not asked again after its first."""
    link = NixlLink(NixlConfig("POSIX", {engine: "true"}, 1 << 16, True, {}), {})
    memory = memoryview(mmap.mmap(-1, 3 * 4096))
    link.memory.add(memory)
    pages = []
    for index, length in enumerate([4096, 100, 4096]):
        path = tmp_path / str(index)
        path.write_bytes(bytes([index + 1]) * length)
        file = os.open(path, os.O_RDONLY)
        pages.append(Transfer(file, 4096, [(0, address_of(memory) + 4096 * index, 4096)]))
    is_single = engine == "use_posix_aio"
    assert link.run(False, pages) == [is_single, False, False]
    assert not is_single or memory[:4096] == b"\x01" * 4096 and memory[8192:] == bytes(4096)
    assert link.run(False, pages[:1]) == [not is_single]
    link.close()
    assert not is_single or memory[8192:] == bytes(4096), "a page came in that was answered for"
    for page in pages:
        os.close(page.device)


def test_objects_are_those_of_the_s3_backend_and_moved_by_the_plugin(s3_server: Server) -> None:
    nixl = NixlBackend(object_context(s3_server, "both"))
    plain = S3Backend(StorageContext(FINGERPRINT, s3_keys(s3_server, "both"), PAGE_BYTES))
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
