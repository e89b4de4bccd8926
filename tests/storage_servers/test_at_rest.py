"""Compression and encryption of stored pages: the suite through them, and what is in the store then."""

from __future__ import annotations

import base64
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from hiradix.errors import ConfigError
from hiradix.storage import GuardedStorage, PageFingerprint, StorageContext, open_storage
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.wrappers.compress import CompressedStorage
from hiradix.storage.wrappers.encrypt import EncryptedStorage, read_key
from hiradix.storage.wrappers.wrap import WrapConfig, wrap
from tests.contracts.storage import (
    FINGERPRINT,
    OTHER,
    PAGE_BYTES,
    NamespaceContract,
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
from tests.storage.doubles import InPlaceMemory, MemoryBackend, memory_context
from tests.storage_servers.servers import Server, prefix_of, redis_keys

MASTER = bytes(range(32))


def key_file(folder: Path, key: bytes = MASTER) -> str:
    path = folder / "page.key"
    path.write_bytes(key)
    return str(path)


class OnServer:
    """`place` becomes a key prefix."""

    raises = False
    server: Server
    keys: dict[str, Any] = {}
    encrypted = False

    @pytest.fixture(autouse=True)
    def _server(self, redis_server: Server) -> None:
        self.server = redis_server

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        prefix = prefix_of(place)
        keys: dict[str, Any] = {**redis_keys(self.server), "key_prefix": prefix, "deadline_s": 60.0}
        if self.encrypted:
            keys["encryption_key_file"] = key_file(place.parent)
        return open_storage("redis", StorageContext(fingerprint, keys | self.keys | config, PAGE_BYTES))


class TestCompressed(OnServer, StorageContract, PersistentContract, NamespaceContract, SharedContract):
    keys = {"compression": "zstd"}


class TestEncrypted(OnServer, StorageContract, PersistentContract, NamespaceContract, SharedContract):
    encrypted = True


class TestCompressedAndEncrypted(OnServer, StorageContract, SharedQuotaContract):
    keys = {"compression": "zstd", "zero_copy": False, "negative_ttl_s": 0.001}
    encrypted = True


class TestEncryptedFile(StorageContract, PersistentContract, NamespaceContract, SharedContract):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        keys = {"file_storage_path": str(place / "store"), "min_free_space": 0, "deadline_s": 30.0,
                "lock_timeout_s": 30.0, "encryption_key_file": key_file(place.parent)}  # fmt: skip
        return open_storage("file", StorageContext(fingerprint, keys | config, PAGE_BYTES))


@pytest.fixture
def client(own_redis: Server) -> Iterator[Any]:
    found = redis.Redis(port=own_redis.port)
    yield found
    found.close()


def open_redis(server: Server, fingerprint: PageFingerprint = FINGERPRINT, **keys: Any) -> GuardedStorage:
    keys = redis_keys(server) | {"deadline_s": 60.0} | keys
    return open_storage("redis", StorageContext(fingerprint, keys, PAGE_BYTES))


def test_stored_pages_do_not_show_their_content(own_redis: Server, client: Any, tmp_path: Path) -> None:
    store = open_redis(own_redis, encryption_key_file=key_file(tmp_path))
    put(store, keys_of(2))
    values = [client.get(name) for name in client.keys("*")]
    assert len(values) == 2 and all(len(value) == PAGE_BYTES + 36 for value in values)
    plain = [bytes_of(key) for key in keys_of(2)]
    assert not any(page[at : at + 16] in value for page in plain for value in values
                   for at in range(0, PAGE_BYTES, 500))  # fmt: skip
    store.close()


def test_another_key_reads_nothing(own_redis: Server, tmp_path: Path) -> None:
    store = open_redis(own_redis, encryption_key_file=key_file(tmp_path))
    put(store, keys_of(2))
    other = open_redis(own_redis, encryption_key_file=key_file(tmp_path, bytes(32)))
    assert hits(other, keys_of(2)) == [False, False] and other.stats()["backend_decrypt_refused"] == 2
    assert hits(store, keys_of(2)) == [True, True]


def test_changed_moved_and_foreign_pages_are_misses(own_redis: Server, client: Any, tmp_path: Path) -> None:
    store = open_redis(own_redis, encryption_key_file=key_file(tmp_path))
    keys = keys_of(40)
    put(store, keys)
    names = sorted(client.keys("*"), key=lambda name: keys.index(name.decode().rpartition(":")[2]))
    values = [client.get(name) for name in names]
    rng = random.Random(5)
    for name, value in zip(names[:30], values):
        at = rng.randrange(len(value))
        client.set(name, value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :])
    client.set(names[30], values[31])
    client.set(names[31], values[30])
    for name in names[32:36]:
        client.set(name, rng.randbytes(len(values[0])))
    assert hits(store, keys) == [False] * 36 + [True] * 4
    assert all(put(store, keys)) and all(hits(store, keys)), "bad pages stay"


def test_each_fingerprint_has_a_key_of_its_own(tmp_path: Path) -> None:
    pages = MemoryBackend(StorageContext(FINGERPRINT, {}, PAGE_BYTES))
    ours = EncryptedStorage(pages, MASTER, FINGERPRINT.digest())
    theirs = EncryptedStorage(pages, MASTER, OTHER.digest())
    put(ours, keys_of(1))
    assert hits(ours, keys_of(1)) == [True] and hits(theirs, keys_of(1)) == [False]
    assert ours.traits.verifies and not pages.traits.verifies


def test_pages_of_another_key_are_told_once_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Servers with different keys replaced each other's pages, and none said why it had no hits."""
    pages = MemoryBackend(StorageContext(FINGERPRINT, {}, PAGE_BYTES))
    ours, theirs = (EncryptedStorage(pages, key, FINGERPRINT.digest()) for key in (MASTER, bytes(32)))
    assert all(put(ours, keys_of(3))) and all(hits(ours, keys_of(3))) and not caplog.records
    for _ in range(2):
        assert hits(theirs, keys_of(3)) == [False] * 3
    (told,) = caplog.messages
    assert "encryption_key_file" in told and "of another key" in told and "stores of their own" in told
    assert all(put(theirs, keys_of(3))) and all(hits(theirs, keys_of(3))) and not any(hits(ours, keys_of(3)))


def test_same_page_is_never_encrypted_alike(tmp_path: Path) -> None:
    pages = MemoryBackend(StorageContext(FINGERPRINT, {}, PAGE_BYTES))
    store = EncryptedStorage(pages, MASTER, FINGERPRINT.digest())
    seen = set()
    for _ in range(50):
        put(store, keys_of(1))
        seen.add(pages.pages.pop(key_of(0)))
    assert len(seen) == 50


@pytest.mark.parametrize("encode", [bytes, lambda key: key.hex().encode() + b"\n", base64.b64encode])
def test_key_files(tmp_path: Path, encode: Any) -> None:
    assert read_key(key_file(tmp_path, encode(MASTER))) == MASTER


@pytest.mark.parametrize("data", [b"", b"short", bytes(31), bytes(33), b"zz" * 32])
def test_bad_key_files_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match="encryption_key_file: .* must hold 32 bytes") as raised:
        read_key(key_file(tmp_path, data))
    assert not data or data.decode("latin1") not in str(raised.value)
    with pytest.raises(ConfigError, match="encryption_key_file: cannot read"):
        read_key(str(tmp_path / "nothing"))


def test_pages_that_shrink_are_stored_shorter_and_others_as_they_are(own_redis: Server, client: Any) -> None:
    store = open_redis(own_redis, compression="zstd", checksum=True)
    soft = memoryview(bytes(1000) * 6)
    assert store.put(["soft", "hard"], [[soft], [memoryview(bytes_of("hard"))]]) == [True, True]
    lengths = sorted(client.strlen(name) for name in client.keys("*"))
    assert lengths[0] < 500 and lengths[1] == PAGE_BYTES + 64 + 8
    into = [[memoryview(bytearray(b"x" * PAGE_BYTES))] for _ in range(2)]
    assert store.get(["soft", "hard"], into) == [True, True]
    assert bytes(into[0][0]) == bytes(PAGE_BYTES) and bytes(into[1][0]) == bytes_of("hard")
    figures = store.stats()
    assert figures["backend_compress_bytes_in"] > figures["backend_compress_bytes_out"]


def test_garbage_is_no_compressed_page() -> None:
    rng = random.Random(3)

    class Short(MemoryBackend):
        def get(self, keys: Any, into: Any) -> list[bool]:
            for key, page in zip(keys, into):
                data = self.pages[key][: page[0].nbytes]
                page[0][: len(data)] = data
            return [True] * len(keys)

    store = CompressedStorage(Short(StorageContext(FINGERPRINT, {}, PAGE_BYTES)), 1)
    good = store._pack("k", [memoryview(bytes(PAGE_BYTES))])
    for number in range(300):
        damaged = bytearray(good)
        damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        others = [rng.randbytes(20), b"HRZ1\xff\xff\xff\x7f", b""]
        store.inner.pages = {"k": rng.choice([bytes(damaged), *others])}
        into = [memoryview(bytearray(b"x" * PAGE_BYTES))]
        if store.get(["k"], [into]) == [True]:
            assert bytes(into[0]) == bytes(PAGE_BYTES), f"damage {number} passed as another page"


@pytest.mark.parametrize("says", [PAGE_BYTES + 1, 100 * PAGE_BYTES, 0])
def test_a_frame_that_says_another_length_is_not_even_unpacked(
    says: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stored frame claims decides how much memory its unpacking takes."""
    store = CompressedStorage(MemoryBackend(StorageContext(FINGERPRINT, {}, PAGE_BYTES)), 1)
    page = [memoryview(bytearray(b"x" * PAGE_BYTES))]
    whole = memoryview(bytearray(store._pack("k", [memoryview(bytes(PAGE_BYTES))])))
    assert store._unpack("k", whole, page) is None, "the control"

    class Unpacks:
        def decompress(self, body: object) -> bytes:
            raise AssertionError("unpacked")

    stored = memoryview(bytearray(store._pack("k", [memoryview(bytes(says))])))
    monkeypatch.setattr(store, "_decompressor", Unpacks)
    assert store._unpack("k", stored, page) is MissReason.DAMAGED


def test_damaged_compressed_page_is_replaced_by_the_next_put(own_redis: Server, client: Any) -> None:
    store = open_redis(own_redis, compression="zstd")
    put(store, keys_of(3))
    name = next(name for name in client.keys("*") if name.endswith(keys_of(1)[0].encode()))
    client.setrange(name, 50, b"damaged")
    assert hits(store, keys_of(3)) == [False, True, True]
    assert all(put(store, keys_of(3))) and all(hits(store, keys_of(3)))
    store.close()


@pytest.mark.parametrize("name", ["file", "tier"])
def test_stores_of_one_length_refuse_compression(tmp_path: Path, name: str) -> None:
    keys: dict[str, Any] = {"file_storage_path": str(tmp_path)}
    if name == "tier":
        keys = {"upper": {"backend": "file", **keys}, "lower": {"backend": "file", **keys}}
    with pytest.raises(ConfigError, match="compression: this backend stores pages of one length only"):
        open_storage(name, StorageContext(FINGERPRINT, keys | {"compression": "zstd"}, PAGE_BYTES))


def test_who_writes_pages_himself_is_given_none_to_keep(tmp_path: Path) -> None:
    """Compression and encryption fill the pages they are given by their buffers."""
    for config in ({"compression": "zstd"}, {"encryption_key_file": key_file(tmp_path)}):
        inner = InPlaceMemory(memory_context(FINGERPRINT, PAGE_BYTES))
        inner.traits = dataclasses.replace(inner.traits, ragged=True)
        made = wrap(inner, memory_context(FINGERPRINT, PAGE_BYTES), WrapConfig.from_mapping(config))
        assert not made.traits.in_place
        made.close()
    plain = InPlaceMemory(memory_context(FINGERPRINT, PAGE_BYTES))
    assert wrap(
        plain, memory_context(FINGERPRINT, PAGE_BYTES), WrapConfig(negative_ttl_s=1.0)
    ).traits.in_place
