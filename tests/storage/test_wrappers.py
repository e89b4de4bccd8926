"""What is wrapped once for all backends: retry, negative cache, tiers; and the suite on each of them."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from hiradix.errors import ConfigError, StorageError
from hiradix.storage import (
    Batch,
    BreakerState,
    GuardedStorage,
    MissReason,
    PageFingerprint,
    StorageBackend,
    StorageContext,
    open_storage,
    register_storage_backend,
)
from hiradix.storage.backends.tier.backend import TierBackend
from hiradix.storage.protocol import BadKey, check_keys
from hiradix.storage.wrappers.negative import MAX_KEYS, NegativeCache
from hiradix.storage.wrappers.retry import RetryingStorage
from hiradix.storage.wrappers.wrap import WrapConfig, wrap
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    NamespaceContract,
    PersistentContract,
    SharedContract,
    SharedQuotaContract,
    StorageContract,
    hits,
    key_of,
    keys_of,
    page_of,
    put,
)
from tests.storage.doubles import FakeClock, FaultyBackend, MemoryBackend, raise_error

CONTEXT = StorageContext(FINGERPRINT, {}, PAGE_BYTES)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)


class Shared:
    """One dict of places for each test."""

    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        self.places: dict[str, OrderedDict[str, bytes]] = {}

    def memory(self, place: Path, fingerprint: PageFingerprint) -> MemoryBackend:
        keys = {"place": str(place), "own_prefix": True}
        return MemoryBackend(StorageContext(fingerprint, keys, PAGE_BYTES), self.places)


class TestRetrying(Shared, StorageContract, PersistentContract, NamespaceContract, SharedContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> StorageBackend:
        return RetryingStorage(self.memory(place, fingerprint), 2, 0.0)


class TestNegative(Shared, StorageContract, PersistentContract, NamespaceContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> StorageBackend:
        return NegativeCache(self.memory(place, fingerprint), 1000.0)


def tier_context(place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> StorageContext:
    def store(name: str) -> dict[str, Any]:
        return {"backend": "file", "file_storage_path": str(place / name), "min_free_space": 0,
                "deadline_s": 30.0, "lock_timeout_s": 30.0}  # fmt: skip

    keys = {"upper": store("near"), "lower": store("far")} | config
    return StorageContext(fingerprint, keys, PAGE_BYTES)


class TestTier(StorageContract, PersistentContract, NamespaceContract, SharedContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> StorageBackend:
        return TierBackend(tier_context(place, fingerprint, **config))


class TestGuardedTier(StorageContract, PersistentContract, NamespaceContract, SharedQuotaContract):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        return open_storage("tier", tier_context(place, fingerprint, deadline_s=60.0, **config))


class Flaky:
    """Raises the first `times` calls, then does them."""

    def __init__(self, times: int):
        self.left = times

    def __call__(self, call: Any, *args: Any) -> Any:
        if self.left:
            self.left -= 1
            raise_error(call)
        return call(*args)


class TestRetry:
    def faulty(self, times: int) -> FaultyBackend:
        backend = FaultyBackend(MemoryBackend(CONTEXT))
        backend.faults = {name: Flaky(times) for name in ("get", "put", "exists", "delete")}
        return backend

    def test_calls_that_raise_are_made_again(self) -> None:
        waits: list[float] = []
        store = RetryingStorage(self.faulty(2), 3, 0.5, waits.append)
        assert put(store, keys_of(2)) == [True, True] and hits(store, keys_of(2)) == [True, True]
        assert store.exists(keys_of(2)) == 2
        store.delete(keys_of(1))
        assert hits(store, keys_of(2)) == [False, True]
        assert waits == [0.5, 1.0] * 4 and store.stats()["retried_calls"] == 8

    def test_not_more_often_than_asked(self) -> None:
        backend = self.faulty(5)
        store = RetryingStorage(backend, 2, 0.0)
        with pytest.raises(OSError):
            put(store, keys_of(1))
        assert backend.calls == ["put"] * 3

    def test_a_miss_is_an_answer(self) -> None:
        backend = FaultyBackend(MemoryBackend(CONTEXT))
        assert hits(RetryingStorage(backend, 5, 0.0), keys_of(1)) == [False]
        assert backend.calls == ["get"]

    def test_a_bad_key_is_not_tried_again(self) -> None:
        waits: list[float] = []
        backend = FaultyBackend(MemoryBackend(CONTEXT))
        store = RetryingStorage(backend, 5, 0.5, waits.append)
        names = ("exists", "get", "put", "delete")
        backend.faults = dict.fromkeys(names, lambda _, keys, *__: check_keys(keys))
        for call in (store.exists, partial(hits, store), partial(put, store), store.delete):
            with pytest.raises(BadKey):
                call(["../x"])
        assert backend.calls == list(names)
        assert waits == [] and store.stats()["retried_calls"] == 0

    def test_our_own_bugs_are_not_tried_again(self) -> None:
        backend = FaultyBackend(MemoryBackend(CONTEXT))

        def broken(*_: Any) -> None:
            raise AssertionError("3 is not 4")

        backend.faults["get"] = broken
        with pytest.raises(AssertionError):
            hits(RetryingStorage(backend, 5, 0.0), keys_of(1))
        assert backend.calls == ["get"]


class TestNegativeCache:
    def setup_method(self) -> None:
        self.clock = FakeClock()
        self.backend = FaultyBackend(MemoryBackend(CONTEXT))
        self.store = NegativeCache(self.backend, 10.0, self.clock)

    def test_absent_pages_are_not_asked_for_again(self) -> None:
        put(self.backend, keys_of(1))
        assert hits(self.store, keys_of(3)) == [True, False, False]
        self.backend.calls.clear()
        assert hits(self.store, keys_of(3)[1:]) == [False, False]
        assert self.store.exists(keys_of(3)[1:]) == 0
        assert self.backend.calls == [] and self.store.own_stats()["negative_hits"] == 4
        assert hits(self.store, keys_of(3)) == [True, False, False] and self.backend.calls == ["get"]

    def test_lookups_stop_where_a_page_is_known_to_be_absent(self) -> None:
        put(self.backend, [key_of(0), key_of(2)])
        assert self.store.exists(keys_of(3)) == 1
        seen: list[int] = []

        def note(call: Any, keys: Any) -> Any:
            seen.append(len(keys))
            return call(keys)

        self.backend.faults["exists"] = note
        assert self.store.exists(keys_of(3)) == 1 and seen == [1]

    @pytest.mark.parametrize("asked", ["exists", "get"])
    def test_an_answer_from_before_a_put_says_nothing_after_it(self, asked: str) -> None:
        """One thread asks, another stores meanwhile: the answer was right, and is not any more."""

        def overtaken(call: Any, *args: Any) -> Any:
            answer = call(*args)
            self.backend.faults.clear()
            assert put(self.store, keys_of(2)) == [True, True]
            return answer

        self.backend.faults[asked] = overtaken
        if asked == "get":
            assert hits(self.store, keys_of(2)) == [False, False]
        else:
            assert self.store.exists(keys_of(2)) == 0
        assert self.store.exists(keys_of(2)) == 2 and hits(self.store, keys_of(2)) == [True, True]

    @pytest.mark.parametrize("stored", [True, False])
    def test_a_page_that_is_asked_for_while_it_is_stored(self, stored: bool) -> None:
        def overtaking(call: Any, *args: Any) -> Any:
            self.backend.faults.clear()
            assert hits(self.store, keys_of(1)) == [False]
            return call(*args) if stored else [False]

        self.backend.faults["put"] = overtaking
        assert put(self.store, keys_of(1)) == [stored]
        assert hits(self.store, keys_of(1)) == [stored]
        self.backend.calls.clear()
        hits(self.store, keys_of(1))
        assert self.backend.calls == (["get"] if stored else []), "what is absent is not asked for again"

    def test_forgotten_after_a_while(self) -> None:
        assert hits(self.store, keys_of(1)) == [False]
        put(self.backend, keys_of(1))
        self.clock.now_s += 9.9
        assert hits(self.store, keys_of(1)) == [False]
        self.clock.now_s += 0.2
        assert hits(self.store, keys_of(1)) == [True]

    def test_what_is_put_here_is_there_at_once(self) -> None:
        assert hits(self.store, keys_of(1)) == [False]
        put(self.store, keys_of(1))
        assert hits(self.store, keys_of(1)) == [True]

    def test_an_error_is_no_absence(self) -> None:
        put(self.backend, keys_of(1))
        self.backend.faults["get"] = raise_error
        with pytest.raises(OSError):
            hits(self.store, keys_of(1))
        del self.backend.faults["get"]
        assert hits(self.store, keys_of(1)) == [True]

    def test_bounded(self) -> None:
        for start in range(0, MAX_KEYS + 1000, 1000):
            self.store.exists(Batch.of([str(start)]))
            self.store.get(Batch.of([str(n) for n in range(start + 1, start + 1000)]), [[]] * 999)
        assert self.store.own_stats()["negative_keys"] == MAX_KEYS and not self.store._asked


class TestTiers:
    def test_far_pages_come_near(self, tmp_path: Path) -> None:
        store = TierBackend(tier_context(tmp_path))
        put(store, keys_of(4))
        store.upper.delete(keys_of(3))
        assert store.exists(keys_of(4)) == 4
        assert hits(store, keys_of(4)) == [True] * 4 and store.stats()["promoted"] == 3
        assert hits(store.upper, keys_of(4)) == [True] * 4
        store.close()

    @pytest.mark.parametrize("all_of_them", [False, True])
    def test_what_is_deleted_on_its_way_near_does_not_stay_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_of_them: bool
    ) -> None:
        """It would be stored, and in nobody's quota."""
        store = TierBackend(tier_context(tmp_path))
        put(store.lower, keys_of(4))
        read = store.lower.get

        def deleted_meanwhile(*args: Any) -> list[bool]:
            ok = read(*args)
            store.clear() if all_of_them else store.delete(keys_of(2))
            return ok

        monkeypatch.setattr(store.lower, "get", deleted_meanwhile)
        assert hits(store, keys_of(4)) == [True] * 4
        monkeypatch.undo()
        assert hits(store, keys_of(4)) == ([False] * 4 if all_of_them else [False, False, True, True])
        assert not len(store._promotions)
        store.close()

    @pytest.mark.parametrize("all_of_them", [False, True])
    def test_what_begins_its_way_while_it_is_deleted_does_not_stay_near(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_of_them: bool
    ) -> None:
        """The near store has lost it already, the far one not yet."""
        store = TierBackend(tier_context(tmp_path))
        put(store.lower, keys_of(4))
        what = "clear" if all_of_them else "delete"
        leave = getattr(store.lower, what)

        def read_meanwhile(*args: Any) -> bool:
            assert hits(store, keys_of(4)) == [True] * 4
            return leave(*args)

        monkeypatch.setattr(store.lower, what, read_meanwhile)
        store.clear() if all_of_them else store.delete(keys_of(2))
        monkeypatch.undo()
        assert hits(store, keys_of(4)) == ([False] * 4 if all_of_them else [False, False, True, True])
        assert not len(store._promotions)
        store.close()

    def test_without_promotion_they_stay_far(self, tmp_path: Path) -> None:
        store = TierBackend(tier_context(tmp_path, promote=False))
        put(store.lower, keys_of(2))
        assert hits(store, keys_of(2)) == [True] * 2 and hits(store.upper, keys_of(2)) == [False] * 2
        store.close()

    def test_lookups_cross_from_one_to_the_other_and_back(self, tmp_path: Path) -> None:
        store = TierBackend(tier_context(tmp_path))
        keys = keys_of(9)
        put(store.upper, keys[:2] + keys[4:6])
        put(store.lower, keys[2:4] + keys[6:8])
        assert store.exists(keys) == 8 and hits(store, keys) == [True] * 8 + [False]
        store.close()

    @pytest.mark.parametrize("broken", ["upper", "lower"])
    def test_one_store_that_fails_leaves_the_other(self, tmp_path: Path, broken: str) -> None:
        store = TierBackend(tier_context(tmp_path))
        put(store, keys_of(3))
        faulty = FaultyBackend(getattr(store, broken).backend)
        faulty.faults = dict.fromkeys(("get", "put", "exists", "clear", "delete", "ping"), raise_error)
        getattr(store, broken).backend = faulty
        assert store.exists(keys_of(3)) == 3 and hits(store, keys_of(3)) == [True] * 3
        assert put(store, keys_of(5)) == [True] * 5 and hits(store, keys_of(5)) == [True] * 5
        store.ping()
        with pytest.raises(StorageError, match=f"tier: clear failed in {broken}"):
            store.clear()
        with pytest.raises(StorageError, match=f"tier: delete failed in {broken}"):
            store.delete(keys_of(1))
        store.close()

    def test_a_store_that_is_slow_leaves_the_other(self, tmp_path: Path) -> None:
        """What it takes is for its own breaker, not for the one of both."""
        clock = FakeClock()
        with contextlib.closing(open_storage("tier", tier_context(tmp_path, retries=0), clock)) as store:
            assert all(put(store, keys_of(3)))

            def slow(call: Callable[..., Any], *args: Any) -> Any:
                clock.now_s += 1.5
                return call(*args)

            tier = cast(TierBackend, store.backend)
            far = cast(GuardedStorage, tier.lower)
            far.backend = faulty = FaultyBackend(far.backend)
            faulty.faults = dict.fromkeys(("get", "exists"), slow)
            for _ in range(5):
                assert store.exists(keys_of(4)) == 3 and hits(store, keys_of(4)) == [True] * 3 + [False]
            assert store.state is BreakerState.CLOSED

    def test_both_gone_is_an_error(self, tmp_path: Path) -> None:
        store = TierBackend(tier_context(tmp_path))
        store.upper.close()
        store.lower.close()
        with pytest.raises(StorageError, match="neither"):
            store.ping()
        assert put(store, keys_of(1)) == [False]

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"upper": "disk"}, 'upper must be an object with "backend"'),
            ({"lower": {}}, 'lower must be an object with "backend"'),
            ({"lower": {"backend": "nosuch"}}, "lower: .*nosuch: unknown storage backend"),
            ({"lower": {"backend": "file", "max_sise": 1}}, "lower: .*max_sise is no key"),
            ({"middle": {}}, "middle is no key of storage backend tier"),
        ],
    )
    def test_bad_keys_are_named(self, tmp_path: Path, keys: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            TierBackend(tier_context(tmp_path, **keys))


class Tenanted(MemoryBackend):
    """Looks whose pages it is given."""

    told: list[tuple[str, str | None]] = []

    def put(self, keys: Any, pages: Any) -> list[bool]:
        self.told.append((keys.tenant, keys.extra_key))
        return super().put(keys, pages)


@pytest.mark.parametrize("wrapping", ["retries", "nothing", "negative", "quota", "no limit", "tier"])
def test_a_backend_sees_whose_pages_are_put(
    tmp_path: Path, wrapping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tenanted, "told", [])
    register_storage_backend("tenanted", f"{__name__}:Tenanted")
    quota, patient = {"quota_path": str(tmp_path)}, {"deadline_s": 30.0}
    keys: dict[str, Any] = {
        "retries": {}, "nothing": {"retries": 0}, "negative": {"negative_ttl_s": 9},
        "quota": quota | {"quota": "1MiB"}, "no limit": quota | {"quotas": {"salt:b": 1}}, "tier": {},
    }[wrapping]  # fmt: skip
    name = "tenanted"
    if wrapping == "tier":
        name = "tier"
        lower = {"backend": "file", "file_storage_path": str(tmp_path / "far"), "min_free_space": 0}
        keys = {"upper": {"backend": "tenanted", **patient}, "lower": lower | patient}
    store = open_storage(name, StorageContext(FINGERPRINT, keys | patient, PAGE_BYTES))
    pages = [page_of(key) for key in keys_of(2)]
    batch = Batch.of(keys_of(2), tenant="salt:a", extra_key="adapter")
    assert store.put(batch, pages) == [True, True]
    assert Tenanted.told == [("salt:a", "adapter")]
    store.close()


class TestWrapKeys:
    @pytest.mark.parametrize("key", ["retries", "retry_wait_s", "negative_ttl_s", "compression",
                                     "compression_level", "quantise", "encryption_key_file"])  # fmt: skip
    def test_bad_values_are_named(self, key: str) -> None:
        with pytest.raises(ConfigError, match=key):
            WrapConfig.from_mapping({key: -1 if "encryption" not in key else 5})

    def test_fixed_length_stores_refuse_compression(self, tmp_path: Path) -> None:
        backend = MemoryBackend(CONTEXT)
        with pytest.raises(ConfigError, match="compression"):
            wrap(backend, CONTEXT, WrapConfig(compression="zstd"))
        assert backend._closed

    def test_wrappers_figures_are_the_backends(self, tmp_path: Path) -> None:
        register_storage_backend("memory-for-wrappers", f"{__name__}:Memory")
        keys = {"negative_ttl_s": 600, "deadline_s": 30.0}
        store = open_storage("memory-for-wrappers", StorageContext(FINGERPRINT, keys, 100))
        assert hits(store, keys_of(1)) == [False] and hits(store, keys_of(1)) == [False]
        stats = store.stats()
        assert stats["backend_negative_hits"] == 1 and stats["backend_retried_calls"] == 0
        assert stats[f"get_missed_{MissReason.ABSENT.value}"] == 2
        store.close()

    def test_missing_packages_say_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, package, keys, extra in (
            ("compress", "zstandard", {"compression": "zstd"}, "zstd"),
            ("encrypt", "cryptography", {"encryption_key_file": "k"}, "encryption"),
        ):
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                monkeypatch.setitem(sys.modules, name, None)
            monkeypatch.setitem(sys.modules, package, None)
            monkeypatch.delitem(sys.modules, f"hiradix.storage.wrappers.{module}", raising=False)
            monkeypatch.delattr(f"hiradix.storage.wrappers.{module}", raising=False)
            with pytest.raises(ConfigError, match=rf"pip install 'hiradix\[{extra}\]'"):
                open_storage("file", StorageContext(FINGERPRINT, keys, PAGE_BYTES))


class Memory(MemoryBackend):
    """Made by name, like anybody's."""
