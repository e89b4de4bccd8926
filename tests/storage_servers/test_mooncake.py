"""The conformance suite on a real Mooncake store over TCP, and what happens when its parts fail."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hiradix.errors import ConfigError, StorageError
from hiradix.storage import BreakerState, GuardedStorage, PageFingerprint, StorageContext, open_storage
from hiradix.storage.backends.mooncake import backend as mooncake_backend
from hiradix.storage.backends.mooncake.backend import LATE_S, TRANSFER_FAILED, MooncakeBackend
from hiradix.storage.kit.seal import SEAL_BYTES
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
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
from tests.storage_servers.servers import Server, mooncake_master, mooncake_member, prefix_of, wait_for


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A master and one member that lends memory."""
    with (
        mooncake_master(tmp_path_factory.mktemp("master")) as server,
        mooncake_member(server, tmp_path_factory.mktemp("member")),
    ):
        yield server


def context(
    master: Server, prefix: str = "x", fingerprint: PageFingerprint = FINGERPRINT, **config: Any
) -> StorageContext:
    keys = {
        "master_server_address": f"127.0.0.1:{master.port}", "global_segment_size": 0, "key_prefix": prefix,
        "buffer_size": "1MiB",
    }  # fmt: skip
    return StorageContext(fingerprint, keys | config, PAGE_BYTES)


class OnMaster:
    """`place` becomes a key prefix: one store holds those of all tests."""

    keys: dict[str, Any] = {}
    server: Server

    @pytest.fixture(autouse=True)
    def _server(self, master: Server) -> None:
        self.server = master

    def context(self, place: Path, fingerprint: PageFingerprint, config: dict[str, Any]) -> StorageContext:
        return context(self.server, prefix_of(place), fingerprint, **self.keys | config)

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        return MooncakeBackend(self.context(place, fingerprint, config))


class TestMooncake(OnMaster, StorageContract, PersistentContract, NamespaceContract, SharedContract):
    """Memory of another process."""


class TestMooncakeOwnMemory(OnMaster, StorageContract):
    keys = {"global_segment_size": "64MiB"}


class TestGuardedMooncake(OnMaster, StorageContract, NamespaceContract, SharedQuotaContract):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        return open_storage("mooncake", self.context(place, fingerprint, {"deadline_s": 30.0} | config))


class TestGuardedMooncakeStaged(OnMaster, SharedContract, PersistentContract):
    """Through the guard's own memory: calls can be left behind."""

    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        keys = {"deadline_s": 30.0, "zero_copy": False}
        return open_storage("mooncake", self.context(place, fingerprint, keys | config))


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[Server]:
    """A master that the test may stall, kill and start again."""
    with mooncake_master(tmp_path / "master") as server:
        yield server


@pytest.fixture
def own_member(own_master: Server, tmp_path: Path) -> Iterator[Server]:
    """The one member that lends memory to the store of `own_master`."""
    with mooncake_member(own_master, tmp_path / "member", 64 << 20) as server:
        yield server


@pytest.fixture
def backend(master: Server, tmp_path: Path) -> Iterator[MooncakeBackend]:
    store = MooncakeBackend(context(master, prefix_of(tmp_path)))
    yield store
    store.close()


def pool_of(num_pages: int, num_bytes: int = PAGE_BYTES) -> tuple[memoryview, list[list[memoryview]]]:
    """Host memory and the pages in it."""
    memory = memoryview(mmap.mmap(-1, num_pages * num_bytes))
    return memory, [[memory[at : at + num_bytes]] for at in range(0, len(memory), num_bytes)]


def test_registered_memory_is_read_and_written_in_place(backend: MooncakeBackend) -> None:
    memory, pages = pool_of(40)
    backend.register(memory)
    backend.register(memory)
    keys = keys_of(40)
    for key, page in zip(keys, pages):
        page[0][:] = bytes_of(key)
    assert all(backend.put(keys, pages))
    memory[:] = bytes(len(memory))
    quarters = [[page[0][at : at + 1500] for at in range(0, PAGE_BYTES, 1500)] for page in pages]
    assert all(backend.get(keys, quarters))
    assert [content(page) for page in pages] == [bytes_of(key) for key in keys]
    assert backend.stats()["pages_in_place"] == 80 and not backend.stats().get("pages_copied")
    assert all(hits(backend, keys)) and backend.stats()["pages_copied"] == 40


def test_batch_larger_than_the_buffer_passes_in_pieces(master: Server) -> None:
    store = MooncakeBackend(context(master, "pieces", buffer_size=3 * PAGE_BYTES))
    assert all(put(store, keys_of(20))) and all(hits(store, keys_of(20)))
    store.close()


@pytest.mark.parametrize("damage", ["bit", "seal", "short", "long", "swapped"])
def test_damaged_page_is_a_miss_and_is_replaced(backend: MooncakeBackend, damage: str) -> None:
    put(backend, keys_of(3))
    name = backend._names(keys_of(1))[0]
    whole = bytearray(backend._store.get(name))
    assert len(whole) == PAGE_BYTES + SEAL_BYTES
    other = backend._store.get(backend._names([key_of(1)])[0])
    whole[7 if damage == "bit" else PAGE_BYTES + 40] ^= 4
    stored = {"short": whole[:-1], "long": whole + b"x", "swapped": other}.get(damage, whole)
    backend._store.remove(name, True)
    assert backend._store.put(name, bytes(stored)) == 0
    assert hits(backend, keys_of(3)) == [False, True, True]
    assert put(backend, keys_of(1)) == [True] and all(hits(backend, keys_of(3)))


class WithoutReads:
    """The library, but for its reads."""

    def __init__(self, library: Any):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        assert name != "batch_get_into_multi_buffers", "the library was asked to read"
        return getattr(self._library, name)


@pytest.fixture
def owner(own_master: Server) -> Iterator[MooncakeBackend]:
    """The only member of its store."""
    store = MooncakeBackend(context(own_master, global_segment_size="64MiB"))
    yield store
    store.close()


def test_own_memory_is_read_without_the_library(owner: MooncakeBackend) -> None:
    assert all(put(owner, keys_of(40)))
    owner._store = WithoutReads(owner._store)
    assert all(hits(owner, keys_of(40))) and owner.stats()["pages_own"] == 40
    memory, pages = pool_of(40)
    owner.register(memory)
    assert all(owner.get(keys_of(40), pages))
    assert [bytes(page[0]) for page in pages] == [bytes_of(key) for key in keys_of(40)]


def test_what_lies_in_own_memory_is_checked(owner: MooncakeBackend) -> None:
    put(owner, keys_of(3))
    names = owner._names(keys_of(3))
    places = owner._own.find(owner._store, names, [PAGE_BYTES + SEAL_BYTES] * 3)
    ctypes.memset(places[0] + 100, 255, 1)
    ctypes.memmove(places[1], places[2], PAGE_BYTES + SEAL_BYTES)
    assert hits(owner, keys_of(3)) == [False, False, True]
    assert (owner.stats()["read_damaged"], owner.stats()["read_foreign"]) == (1, 1)
    assert all(put(owner, keys_of(3))) and all(hits(owner, keys_of(3)))


def test_objects_of_another_length_in_own_memory_are_not_copied(owner: MooncakeBackend) -> None:
    put(owner, keys_of(2))
    lengths = [PAGE_BYTES + SEAL_BYTES, 64]
    assert owner._own.find(owner._store, owner._names(keys_of(2)), lengths).keys() == {0}


@pytest.mark.parametrize(("moved", "elsewhere"), [(-(1 << 40), ""), (1 << 40, ""), (0, "-other")])
def test_addresses_outside_of_the_lent_memory_are_not_read(
    owner: MooncakeBackend, moved: int, elsewhere: str
) -> None:
    """Whatever the master says: what an earlier life of this process had lent is not mapped any more, and
    another member may have its memory at the same addresses.
    """

    def replica(of: Any) -> Any:
        there = of.get_memory_descriptor().buffer_descriptor
        buffer = SimpleNamespace(
            transport_endpoint=there.transport_endpoint + elsewhere,
            size=there.size,
            buffer_address=there.buffer_address + moved,
        )
        descriptor = SimpleNamespace(buffer_descriptor=buffer)
        return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: descriptor)

    put(owner, keys_of(2))
    names, lengths = owner._names(keys_of(2)), [PAGE_BYTES + SEAL_BYTES] * 2
    found = owner._store.batch_get_replica_desc(names)
    says = {name: [replica(one) for one in replicas] for name, replicas in found.items()}
    master = SimpleNamespace(batch_get_replica_desc=lambda _: says)
    assert len(says) == 2 and owner._own.find(master, names, lengths) == {}


def test_memory_of_others_is_never_taken_for_own(master: Server, tmp_path: Path) -> None:
    """And where most pages are with others, the master is not asked about them at every call."""
    prefix = prefix_of(tmp_path)
    lends_none = MooncakeBackend(context(master, prefix))
    assert all(put(lends_none, keys_of(20)))
    lends = MooncakeBackend(context(master, prefix, global_segment_size="64MiB"))
    for _ in range(3):
        assert all(hits(lends, keys_of(20)))
    assert not lends.stats().get("pages_own") and lends._own._num_skipped == 2
    for _ in range(20):
        assert all(put(lends, keys_of(20, start=20))) and all(hits(lends, keys_of(40)))
    lends_none.close()
    lends.close()


def test_own_memory_is_found_again_after_the_store_was_joined_anew(owner: MooncakeBackend) -> None:
    owner._shut()
    with pytest.raises(StorageError):
        owner.exists(keys_of(1))
    wait_for(lambda: owner.stats().get("joined_anew", 0) == 1 and not owner._joining)
    assert all(put(owner, keys_of(5))) and all(hits(owner, keys_of(5)))
    assert owner.stats()["pages_own"] == 5


def test_full_store_refuses_pages_and_keeps_others(own_master: Server, own_member: Server) -> None:
    store = MooncakeBackend(context(own_master))
    _, pages = pool_of(96, 1 << 20)
    stored = store.put([f"big{index}" for index in range(96)], pages)
    assert 30 < sum(stored) < 96 and store.stats()["put_no_room"] == stored.count(False)
    found = store.get([f"big{index}" for index in range(96)], pages)
    assert [ok for ok, there in zip(found, stored) if not there] == [False] * stored.count(False)
    store.close()


def test_killed_member_takes_its_pages_and_another_one_serves(
    own_master: Server, own_member: Server, tmp_path: Path
) -> None:
    clock = [0.0]
    keys = {"breaker_failures": 2, "deadline_s": 60.0, "retries": 0}
    guard = open_storage("mooncake", context(own_master, **keys), clock=lambda: clock[0])
    put(guard, keys_of(4))
    own_member.kill()
    for _ in range(2):
        assert hits(guard, keys_of(4)) == [False] * 4
    assert guard.state is BreakerState.OPEN
    bare = MooncakeBackend(context(own_master))
    wait_for(lambda: bare.exists(keys_of(4)) == 0)
    bare.close()
    new = mooncake_member(own_master, tmp_path / "new", 64 << 20).start()
    clock[0] += 10.0
    assert hits(guard, keys_of(4)) == [False] * 4 and guard.state is BreakerState.CLOSED
    assert all(put(guard, keys_of(4))) and all(hits(guard, keys_of(4)))
    guard.close()
    new.kill()


def test_killed_master_is_an_error_and_comes_back_empty(own_master: Server, own_member: Server) -> None:
    store = MooncakeBackend(context(own_master))
    put(store, keys_of(4))
    own_master.kill()
    for call in (store.ping, lambda: hits(store, keys_of(4)), lambda: put(store, keys_of(4)),
                 lambda: store.exists(keys_of(4)), lambda: store.delete(keys_of(1)),
                 store.clear):  # fmt: skip
        with pytest.raises(StorageError):
            call()
    own_master.start()
    wait_for(lambda: all(_answers(lambda: put(store, keys_of(4)) + hits(store, keys_of(4)))))
    store.close()


def test_stalled_master_is_an_error_in_time_and_then_serves(
    own_master: Server, own_member: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "2000")
    store = MooncakeBackend(context(own_master))
    put(store, keys_of(4))
    own_master.stall()
    with pytest.raises(StorageError, match="code -90"):
        hits(store, keys_of(4))
    own_master.go_on()
    wait_for(lambda: all(_answers(lambda: hits(store, keys_of(4)))))
    store.close()


def test_store_that_cannot_be_joined_anew_is_an_error_until_it_can(
    own_master: Server, own_member: Server
) -> None:
    """The library crashes when it is called after it was shut down."""
    clock = itertools.count(step=2 * LATE_S)
    store = MooncakeBackend(context(own_master), clock=lambda: next(clock))
    memory, pages = pool_of(4)
    store.register(memory)
    put(store, keys_of(4))
    own_master.kill()
    for _ in range(2):
        for call in (lambda: hits(store, keys_of(4)), lambda: put(store, keys_of(4)), store.ping,
                     lambda: store.delete(keys_of(1)), store.clear):  # fmt: skip
            with pytest.raises(StorageError):
                call()
    own_master.start()
    wait_for(lambda: all(_answers(lambda: put(store, keys_of(4)) + store.get(keys_of(4), pages))))
    assert [content(page) for page in pages] == [bytes_of(key) for key in keys_of(4)]
    own_master.kill()
    with pytest.raises(StorageError):
        hits(store, keys_of(4))
    store.close()
    store.close()


def test_late_fault_beside_a_page_that_cannot_be_removed_still_ends_the_read(master: Server) -> None:
    clock = itertools.count(step=2 * LATE_S)
    store = MooncakeBackend(context(master, "both"), clock=lambda: next(clock))
    real = store._store

    class Failing:
        """One page does not arrive, the other is damaged, and the master is gone when it is to be removed."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def batch_get_into_multi_buffers(self, *_: Any) -> list[int]:
            return [TRANSFER_FAILED, PAGE_BYTES + SEAL_BYTES]

        def batch_remove(self, names: list[str], _: bool) -> list[int]:
            return [-900] * len(names)

    store._store = Failing()
    with pytest.raises(StorageError, match="removing 1 pages failed"):
        hits(store, keys_of(2))
    wait_for(lambda: store.stats().get("joined_anew") == 1)
    assert store.stats()["transfer_errors"] == 1
    store.close()


def _answers(call: Callable[[], list[bool]]) -> list[bool]:
    try:
        return call()
    except StorageError:
        return [False]


@pytest.mark.timeout(400)
def test_nothing_is_written_into_pages_after_their_read_has_failed(
    own_master: Server, own_member: Server, tmp_path: Path
) -> None:
    """The library gives up after a minute. What the member sends when it goes on must not arrive."""
    store = MooncakeBackend(context(own_master))
    memory, pages = pool_of(32, 1 << 20)
    keys = [f"big{index}" for index in range(32)]
    store.register(memory)
    assert all(store.put(keys, pages))
    own_member.stall()
    with pytest.raises(StorageError, match="transfers failed"):
        store.get(keys, pages)
    wait_for(lambda: store.stats().get("joined_anew") == 1)
    memory[:] = b"\7" * len(memory)
    own_member.go_on()
    second = mooncake_member(own_master, tmp_path / "second", 64 << 20).start()
    wait_for(lambda: all(_answers(lambda: put(store, keys_of(8)) + hits(store, keys_of(8)))))
    assert bytes(memory) == b"\7" * len(memory)
    store.close()
    second.kill()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"master_server_address": ""}, "master_server_address is required"),
        ({"master_server_address": "127.0.0.1"}, "master_server_address: cannot reach 127.0.0.1"),
        ({"protocol": "udp"}, "protocol: unknown value 'udp'"),
        ({"key_prefix": "a/b"}, "key_prefix must be"),
        ({"place": "x"}, "place is no key of storage backend mooncake"),
    ],
)
def test_bad_keys_are_named(master: Server, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MooncakeBackend(context(master, **keys))


def test_unreachable_master_is_refused_at_once(own_master: Server) -> None:
    own_master.kill()
    with pytest.raises(ConfigError, match="master_server_address: cannot reach"):
        open_storage("mooncake", context(own_master))


def test_rdma_without_a_device_is_refused(
    master: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_backend, "RDMA_DEVICES", tmp_path)
    with pytest.raises(ConfigError, match="protocol: rdma, but there is no device in"):
        MooncakeBackend(context(master, protocol="rdma"))
