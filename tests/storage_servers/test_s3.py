"""The conformance suite on SeaweedFS and rclone's S3 server, and what happens when a server fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError

from hiradix.errors import ConfigError, StorageError
from hiradix.storage import (
    Batch,
    BreakerState,
    GuardedStorage,
    PageFingerprint,
    StorageContext,
    open_storage,
)  # fmt: skip
from hiradix.storage.backends.s3 import backend as s3_backend
from hiradix.storage.backends.s3.backend import STREAM_BYTES, S3Backend, key_in
from hiradix.storage.kit.seal import SEAL_BYTES
from hiradix.storage.wrappers.retry import RetryingStorage
from tests.contracts.storage import (
    FINGERPRINT,
    OTHER,
    PAGE_BYTES,
    BoundedContract,
    Make,
    NamespaceContract,
    PersistentContract,
    SharedQuotaContract,
    StorageContract,
    blank,
    bytes_of,
    content,
    hits,
    key_of,
    keys_of,
    page_of,
    put,
)
from tests.storage_servers.objects import OnServer, SharedOnServer
from tests.storage_servers.servers import ACCESS, BUCKET, Server, free_port, opened, s3_keys, wait_for

FOLDER = FINGERPRINT.digest()[:32]


def context(
    server: Server, prefix: str = "x", fingerprint: PageFingerprint = FINGERPRINT, **config: Any
) -> StorageContext:
    return StorageContext(fingerprint, s3_keys(server, prefix) | config, PAGE_BYTES)


class OnS3(OnServer):
    def context(self, place: Path, fingerprint: PageFingerprint, config: dict[str, Any]) -> StorageContext:
        return context(self.server, self.prefix(place, fingerprint), fingerprint, **config)

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        """With the retry every backend has: rclone cuts a body short when its object is deleted meanwhile."""
        return RetryingStorage(S3Backend(self.context(place, fingerprint, config)), 3, 0.01)


class TestS3(OnS3, SharedOnServer, StorageContract, PersistentContract, NamespaceContract):
    """No cap."""


class TestS3WithCap(OnS3, StorageContract, PersistentContract, BoundedContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        return super().open(place, fingerprint, **{"max_size": "1GiB"} | config)

    def bounded(self, make: Make, pages: int) -> Any:
        return make(max_size=pages * PAGE_BYTES)

    def used_pages(self, place: Path) -> int:
        return len(S3Backend(self.context(place, FINGERPRINT, {}))._list())


class TestGuardedS3(OnS3, StorageContract, PersistentContract, NamespaceContract, SharedQuotaContract):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        keys = {"deadline_s": 30.0, "retries": 5, "retry_wait_s": 0.01}  # rclone refuses writers that meet
        return open_storage("s3", self.context(place, fingerprint, keys | config))


@pytest.fixture
def backend(own_s3: Server) -> Iterator[S3Backend]:
    store = S3Backend(context(own_s3))
    yield store
    store.close()


def file_of(server: Server, key: str) -> Path:
    return server.folder / "data" / BUCKET / "x" / FOLDER / key


def test_objects_are_pages_under_prefix_and_fingerprint(own_s3: Server, backend: S3Backend) -> None:
    put(backend, keys_of(1))
    assert file_of(own_s3, key_of(0)).read_bytes() == bytes_of(key_of(0))


def test_the_first_object_of_a_folder_is_written_before_others_are_begun(
    backend: S3Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers that made the folder at once lost one another's objects on rclone, which said yes to all."""
    log: list[str] = []
    write = backend._write

    def logged(key: str, page: Any) -> bool:
        log.append(f"begin {key}")
        write(key, page)
        log.append(f"end {key}")
        return True

    monkeypatch.setattr(backend, "_write", logged)
    for forget in (lambda: None, backend.clear, lambda: backend.delete(keys_of(20))):
        forget()
        log.clear()
        assert all(put(backend, keys_of(20))) and all(hits(backend, keys_of(20)))
        assert log[:2] == [f"begin {key_of(0)}", f"end {key_of(0)}"] and len(log) == 40
    log.clear()
    put(backend, keys_of(40))
    assert len(log) == 40, "a folder that is there needs no such care"


def test_what_is_evicted_does_not_make_the_next_pages_wait_for_their_first(
    own_s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is there as long as anything is left in it."""
    store = S3Backend(context(own_s3, max_size=30 * PAGE_BYTES))
    calls: list[int] = []
    write_all = store._write_all

    def logged(items: Any) -> list[bool]:
        calls.append(len(items))
        return write_all(items)

    monkeypatch.setattr(store, "_write_all", logged)
    assert all(put(store, keys_of(20))) and all(put(store, keys_of(20, start=20)))
    assert store.stats()["evicted"] >= 10 and [count for count in calls if count] == [1, 19, 20]
    assert all(put(store, keys_of(30, start=100))) and calls[-2:] == [1, 29], "all the others had to leave"
    store.close()


def test_large_pages_go_in_one_request(own_s3: Server, backend: S3Backend) -> None:
    data = bytes_of("big", 20_000_000)
    assert backend.put(Batch.of(["big"]), [[memoryview(data)]]) == [True]
    into = [memoryview(bytearray(len(data)))]
    assert backend.get(Batch.of(["big"]), [into]) == [True] and bytes(into[0]) == data
    assert file_of(own_s3, "big").stat().st_size == len(data)


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES + 1])
def test_object_of_another_length_is_a_miss_and_is_replaced(
    own_s3: Server, backend: S3Backend, size: int
) -> None:
    put(backend, keys_of(2))
    file_of(own_s3, key_of(0)).write_bytes(bytes(size))
    own_s3.restart()
    assert hits(backend, keys_of(2)) == [False, True]
    assert put(backend, keys_of(1)) == [True] and hits(backend, keys_of(1)) == [True]


def test_flipped_and_swapped_objects_are_misses_behind_the_guard(own_s3: Server) -> None:
    guard = open_storage("s3", context(own_s3, deadline_s=60.0))
    put(guard, keys_of(4))
    a, b, c = (file_of(own_s3, key_of(number)) for number in range(3))
    a.write_bytes(bytes([a.read_bytes()[0] ^ 1]) + a.read_bytes()[1:])
    one, two = b.read_bytes(), c.read_bytes()
    b.write_bytes(two)
    c.write_bytes(one)
    own_s3.restart()
    assert hits(guard, keys_of(4)) == [False, False, False, True]
    stats = guard.stats()
    assert (stats["get_missed_damaged"], stats["get_missed_foreign"]) == (1, 2)
    assert all(put(guard, keys_of(4))) and all(hits(guard, keys_of(4))), "bad objects stay"
    guard.close()


def test_killed_server_is_an_error_and_keeps_its_pages(own_s3: Server) -> None:
    store = S3Backend(context(own_s3, request_retries=0))
    put(store, keys_of(6))
    own_s3.kill()
    for call in (lambda: hits(store, keys_of(6)), lambda: put(store, keys_of(6)),
                 lambda: store.exists(keys_of(6)), lambda: store.delete(keys_of(1)), store.ping):  # fmt: skip
        with pytest.raises(StorageError):
            call()
    own_s3.start()
    assert all(hits(store, keys_of(6))) and store.exists(keys_of(6)) == 6
    store.close()


def test_stalled_server_times_out(own_s3: Server) -> None:
    patient = S3Backend(context(own_s3))
    impatient = context(own_s3, request_retries=0, timeout_s=0.2, retry_timeout_s=0.2)
    store = opened(lambda: S3Backend(impatient))
    put(patient, keys_of(2))
    own_s3.stall()
    with pytest.raises(StorageError):
        hits(store, keys_of(2))
    own_s3.go_on()
    assert all(hits(patient, keys_of(2)))
    wait_for(lambda: all(_hits_or_late(store, keys_of(2))))
    store.close()
    patient.close()


def _hits_or_late(store: S3Backend, keys: list[str]) -> list[bool]:
    """Hits; none where a busy machine takes longer than the store waits."""
    try:
        return hits(store, keys)
    except StorageError:
        return [False]


def test_guard_opens_while_the_server_is_gone_and_closes_when_it_is_back(own_s3: Server) -> None:
    clock = [0.0]
    keys = {"breaker_failures": 2, "deadline_s": 30.0, "breaker_retry_s": 5.0, "request_retries": 0}
    guard = open_storage("s3", context(own_s3, **keys), clock=lambda: clock[0])
    put(guard, keys_of(2))
    own_s3.kill()
    for _ in range(3):
        assert hits(guard, keys_of(2)) == [False, False]
    assert guard.state is BreakerState.OPEN
    own_s3.start()
    clock[0] += 6.0
    assert all(hits(guard, keys_of(2))) and guard.state is BreakerState.CLOSED
    guard.close()


def test_cap_counts_what_is_there_at_start(own_s3: Server) -> None:
    first = S3Backend(context(own_s3))
    put(first, keys_of(10))
    other = S3Backend(context(own_s3, fingerprint=OTHER))
    put(other, keys_of(3))
    capped = S3Backend(context(own_s3, max_size=4 * PAGE_BYTES))
    assert len(capped._list()) == 4 and capped.stats()["used_bytes"] == 4 * PAGE_BYTES
    assert all(hits(other, keys_of(3)))


def test_compressed_pages_that_are_read_count_as_what_they_are(own_s3: Server) -> None:
    """They counted as the buffers they may fill, and the next put evicted what there was room for."""
    keys, short = (
        keys_of(4),
        StorageContext(
            FINGERPRINT, {**s3_keys(own_s3, "x"), "max_size": 2 * PAGE_BYTES}, PAGE_BYTES, ragged=True
        ),
    )
    store = S3Backend(short)
    assert all(store.put(Batch.of(keys), [[memoryview(bytes(100))] for _ in keys]))
    assert all(store.get(Batch.of(keys), [blank() for _ in keys]))
    assert store.stats()["used_bytes"] == 400
    assert all(store.put(Batch.of(keys_of(4, start=4)), [[memoryview(bytes(100))] for _ in keys]))
    assert store.stats()["used_bytes"] == 800 and store.exists(keys_of(8)) == 8
    store.close()


def test_what_could_not_be_evicted_still_counts(own_s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was busy for a moment kept the objects, and nobody counted them any more."""
    store = S3Backend(context(own_s3, max_size=4 * PAGE_BYTES))
    delete_one = store._delete_one

    def refused(path: str) -> None:
        raise GenericError("503 Slow Down")

    def counted() -> int:
        found = [key_in(entry) for entry in store._list()]
        assert all(key in store._index for key in found), "an object that nobody counts"
        assert store.stats()["used_bytes"] == len(found) * PAGE_BYTES
        return len(found)

    assert all(put(store, keys_of(4)))
    for start in (4, 8):
        monkeypatch.setattr(store, "_delete_one", refused)
        with pytest.raises(StorageError, match="Slow Down"):
            put(store, keys_of(2, start=start))
        assert counted() == 4
        monkeypatch.setattr(store, "_delete_one", delete_one)
        assert all(put(store, keys_of(2, start=start + 2))) and counted() == 4
    assert store.stats()["evicted"] == 4
    store.close()


def test_request_that_fails_alone_is_one_miss(own_s3: Server, backend: S3Backend) -> None:
    put(backend, keys_of(3))
    path = file_of(own_s3, key_of(1))
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"x")
    own_s3.restart()
    assert hits(backend, keys_of(3)) == [True, False, True]


@pytest.mark.parametrize("error", [None, OSError("no memory"), ValueError("odd")])
def test_nothing_is_read_into_pages_after_the_call_has_ended(
    own_s3: Server, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Whether the backend is closed meanwhile (no error) or another request ends in a way not foreseen."""
    store = S3Backend(context(own_s3, num_connections=2))
    put(store, keys_of(4))
    entered, go_on, read = threading.Semaphore(0), threading.Event(), store._read

    def slow(key: str, page: Any) -> bool:
        if error is not None and key == key_of(0):
            raise error
        if not go_on.is_set():
            entered.release()
            assert go_on.wait(30)
        return read(key, page)

    monkeypatch.setattr(store, "_read", slow)
    pages = [blank() for _ in range(4)]
    ended: list[tuple[Exception | None, list[bytes]]] = []

    def call() -> None:
        try:
            store.get(Batch.of(keys_of(4)), pages)
        except Exception as raised:
            ended.append((raised, [content(page) for page in pages]))
        else:
            ended.append((None, [content(page) for page in pages]))

    caller = threading.Thread(target=call)
    caller.start()
    for _ in range(2 if error is None else 1):
        assert entered.acquire(timeout=30)
    if error is None:
        store.close()
    caller.join(0.3)  # of no consequence where all is well: the call waits
    go_on.set()
    caller.join(30)
    store._threads.shutdown(wait=True)
    ((raised, then),) = ended
    assert [content(page) for page in pages] == then, "a page was written after its call had ended"
    if error is None:
        assert raised is None or isinstance(raised, StorageError)
    store.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"url": "http://x"}, "url must begin"),
        ({"url": ""}, "url must begin"),
        ({"bucket": "x"}, "bucket is no key of storage backend s3"),
        ({"store_options": 5}, "store_options must be an object"),
        ({"store_options": {"nonsense": "1"}}, "url: .*nonsense"),
        ({"secret_access_key": "wrong"}, "url: cannot use s3://pages/x"),
        ({"url": "s3://other-bucket/x"}, "url: cannot use s3://other-bucket/x"),
        ({"max_size": 100}, "max_size 100 is less than a page"),
    ],
)
def test_bad_keys_are_named(own_s3: Server, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        S3Backend(context(own_s3, **keys))
    assert ACCESS["secret_access_key"] not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("url", "s3://me:s3cr3t@pages/x"),
        ("endpoint", "http://me:s3cr3t@127.0.0.1:1"),
        ("endpoint", "http://me:s3cr3t/x@127.0.0.1:1"),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_shown(own_s3: Server, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must not have a password") as raised:
        S3Backend(context(own_s3, **{key: value}))
    assert "s3cr3t" not in str(raised.value) and raised.value.__cause__ is None


def test_unreachable_server_is_refused_at_start_within_its_timeouts(own_s3: Server) -> None:
    with pytest.raises(ConfigError, match="url: cannot use .* error sending request$") as raised:
        S3Backend(context(own_s3, endpoint=f"http://127.0.0.1:{free_port()}", retry_timeout_s=0.1))
    assert "\n" not in str(raised.value), "the library's insides are in it"


def test_read_only_page_of_pieces(backend: S3Backend) -> None:
    page = page_of(key_of(0))
    pieces = [page[0][:1000].toreadonly(), page[0][1000:].toreadonly()]
    assert backend.put(Batch.of(keys_of(1)), [pieces]) == [True] and hits(backend, keys_of(1)) == [True]


@pytest.mark.parametrize("stream_bytes", [1 << 20, STREAM_BYTES])
def test_long_pages_arrive_whole_in_pieces(
    own_s3: Server, monkeypatch: pytest.MonkeyPatch, stream_bytes: int
) -> None:
    """Also where an object is of another length than its page, or was cut on its way."""
    monkeypatch.setattr(s3_backend, "STREAM_BYTES", stream_bytes)
    length = (3 << 20) + 12345
    fingerprint = PageFingerprint("long")
    keys = s3_keys(own_s3, "long")
    store = S3Backend(StorageContext(fingerprint, keys, length))
    pages = [random.Random(number).randbytes(length) for number in range(3)]
    assert store.put(Batch.of(keys_of(3)), [[memoryview(page)] for page in pages]) == [True] * 3
    short = S3Backend(StorageContext(fingerprint, keys, length - 1))
    into = [bytearray(length - 1) for _ in range(3)]
    assert short.get(Batch.of(keys_of(3)), [[memoryview(page)] for page in into]) == [False] * 3
    into = [bytearray(length) for _ in range(4)]
    assert store.get(Batch.of(keys_of(4)), [[memoryview(page)] for page in into]) == [True, True, True, False]
    assert into == [*pages, bytes(length)]
    for close in (store.close, short.close):
        close()


def test_a_chain_in_pieces_leaves_from_its_end(own_s3: Server) -> None:
    """The guard hands a long batch on in pieces: later ones drove out earlier ones, and no head was left."""
    page = PAGE_BYTES + SEAL_BYTES
    few = {"max_size": 20 * page, "num_connections": 4, "staging_size": 4 * page, "num_workers": 1}
    store = open_storage("s3", context(own_s3, deadline_s=60.0, **few))
    assert all(put(store, keys_of(4, 900)))
    assert put(store, keys_of(30)) == [True] * 20 + [False] * 10
    assert hits(store, keys_of(30)) == [True] * 20 + [False] * 10
    assert all(put(store, keys_of(6, 1000)))
    assert hits(store, keys_of(20)) == [True] * 14 + [False] * 6
    store.close()


def test_a_chain_of_several_calls_leaves_from_its_end(own_s3: Server) -> None:
    """Each call was a chain of its own: the first left first, and nobody found the others without it."""
    few = {"max_size": 48 * (PAGE_BYTES + SEAL_BYTES), "num_connections": 4, "num_workers": 1}
    store = open_storage("s3", context(own_s3, deadline_s=60.0, **few))
    chain = Batch.of(keys_of(32))
    assert all(put(store, chain[:16])) and all(put(store, chain[16:]))
    assert all(put(store, keys_of(16, 900))) and all(put(store, keys_of(6, 1000)))
    assert hits(store, keys_of(32)) == [True] * 26 + [False] * 6
    store.close()


def test_a_conversation_that_is_only_ever_extended_leaves_from_its_end(own_s3: Server) -> None:
    """Its first page was the oldest of all and left first, and nobody found what had come later."""
    few = {"max_size": 32 * (PAGE_BYTES + SEAL_BYTES), "num_connections": 4, "num_workers": 1}
    store = open_storage("s3", context(own_s3, deadline_s=60.0, **few))
    keys = keys_of(12)
    for start in range(0, 12, 3):
        assert all(put(store, Batch.of(keys[start : start + 3], after=keys[start - 1] if start else "")))
        assert all(put(store, keys_of(8, 900 + 100 * start)))
    assert hits(store, keys) == [True] * 12
    store.close()
