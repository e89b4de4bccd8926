"""Several components' pages in one store: kept apart, within one cap, failing together, emptied together."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hiradix.cli import main
from hiradix.errors import ConfigError
from hiradix.storage import (
    BreakerState,
    ComponentPages,
    GuardedStorage,
    MissReason,
    PageFingerprint,
    Stores,
    open_storage,
    open_stores,
    register_storage_backend,
)
from hiradix.storage.protocol import StorageContext
from hiradix.storage.wrappers.quota import QuotaStorage
from tests.disk.places import cap_of
from tests.storage.doubles import MemoryBackend, raise_error
from tests.storage.files import FILE_BYTES, bytes_on_disk

FULL, WINDOW = 4096, 1024
FULL_PAGES = ComponentPages(PageFingerprint("m"), FULL, 3000)
WINDOW_PAGES = ComponentPages(PageFingerprint("m", component="window-64"), WINDOW, 1000)
BOTH = [FULL_PAGES, WINDOW_PAGES]
KEYS = [f"{number:064x}" for number in range(1, 9)]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)


class Vault(MemoryBackend):
    """Memory by the name `vault`; every one that is made is in `made`, and does what `fault` says."""

    made: list[Vault] = []
    fault: Any = None

    def __init__(self, context: StorageContext):
        super().__init__(context)
        self.context = context
        self.made.append(self)

    def get(self, keys: Sequence[str], into: Any) -> list[bool]:
        if Vault.fault is not None:
            Vault.fault(super().get, keys, into)
        return super().get(keys, into)

    @property
    def is_closed(self) -> bool:
        return self._closed


@pytest.fixture
def vaults(monkeypatch: pytest.MonkeyPatch) -> list[Vault]:
    monkeypatch.setattr(Vault, "made", [])
    monkeypatch.setattr(Vault, "fault", None)
    monkeypatch.setattr("hiradix.storage.registry._registered", {})
    register_storage_backend("vault", f"{__name__}:Vault")
    return Vault.made


def pages(num_bytes: int, mark: int, count: int = len(KEYS)) -> list[list[memoryview]]:
    return [[memoryview(bytearray([mark + number]) * num_bytes)] for number in range(count)]


def fill(stores: Stores) -> None:
    for part, num_bytes, mark in zip(stores.parts, (FULL, WINDOW), (10, 100)):
        assert all(part.put(KEYS, pages(num_bytes, mark)))


def check(stores: Stores) -> None:
    for part, num_bytes, mark in zip(stores.parts, (FULL, WINDOW), (10, 100)):
        into = pages(num_bytes, 0)
        assert part.get(KEYS, into) == [True] * len(KEYS)
        assert into == pages(num_bytes, mark)


def places(tmp_path: Path) -> dict[str, dict[str, Any]]:
    both = {"min_free_space": 0, "deadline_s": 30.0}
    disk = {"disk_storage_path": str(tmp_path / "disk"), "max_size": 16 << 20, **both}
    file = {"file_storage_path": str(tmp_path / "file"), **both}
    tier = {"upper": {"backend": "disk", **disk}, "lower": {"backend": "file", **file}, "deadline_s": 90.0}
    return {"disk": disk, "file": file, "tier": tier}


def test_a_fingerprint_without_component_keeps_its_digest() -> None:
    """Made before there were components: stores of full attention stay readable."""
    known = "798c672451f252ac6244176c7757f3210c4ffee883f9f1b625b7ce5443de5768"
    assert PageFingerprint("m").digest() == known
    mark = PageFingerprint("meta/llama", "r1", "bfloat16", "page_first", 64, 1, 2, 0, 1, (2, 8, 128))
    assert mark.digest() == "1dcbaa2d12fb7e0bae66e058f11283de3c04c6f074ef6ef28ebf938950f3af09"
    assert PageFingerprint("m", component="window-64").digest() != known


@pytest.mark.parametrize("name", ["disk", "file", "tier"])
def test_two_components_live_together_and_come_back(tmp_path: Path, name: str) -> None:
    for number in range(2):
        stores = open_stores(name, places(tmp_path)[name], BOTH)
        assert len(stores.parts) == 2 and stores.ping()
        if not number:
            fill(stores)
        check(stores)
        stores.close()


@pytest.mark.parametrize("name", ["disk", "file", "tier"])
def test_clear_takes_all_components_of_this_model_and_nobody_elses(tmp_path: Path, name: str) -> None:
    stores = open_stores(name, places(tmp_path)[name], BOTH)
    other = open_storage(name, StorageContext(PageFingerprint("other"), places(tmp_path)[name], FULL))
    fill(stores)
    assert all(other.put(KEYS, pages(FULL, 50)))
    assert stores.clear()
    assert [part.exists(KEYS) for part in stores.parts] == [0, 0]
    assert other.exists(KEYS) == len(KEYS)
    stores.close()
    other.close()


def test_a_directorys_cap_holds_for_all_components_together(tmp_path: Path) -> None:
    cap = 6 * FILE_BYTES
    keys = {"file_storage_path": str(tmp_path), "min_free_space": 0, "max_size": cap, "deadline_s": 30.0}
    stores = open_stores("file", keys, BOTH)
    for number in range(len(KEYS)):
        for part, num_bytes in zip(stores.parts, (FULL, WINDOW)):
            part.put([KEYS[number]], pages(num_bytes, 10, 1))
            assert bytes_on_disk(tmp_path) <= cap
    assert stores.parts[1].exists([KEYS[-1]]) == 1
    stores.close()


def test_a_full_disk_store_has_room_for_both_lengths(tmp_path: Path) -> None:
    """The shelf of one length gives segments to the other's, coldest first."""
    cap = cap_of(16, FULL)
    keys = {
        "disk_storage_path": str(tmp_path),
        "max_size": cap,
        "min_free_space": 0,
        "segment_size": 4 * FULL,
        "deadline_s": 30.0,
    }
    window = ComponentPages(WINDOW_PAGES.fingerprint, 2 * FULL)
    stores = open_stores("disk", keys, [FULL_PAGES, window])
    for number in range(64):
        key = [f"{number:064x}"]
        assert stores.parts[0].put(key, pages(FULL, 1, 1)) == [True]
        assert stores.parts[1].put(key, pages(2 * FULL, 2, 1)) == [True]
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert total <= cap
    stores.close()


def inner_keys(vaults: Sequence[Vault]) -> list[Mapping[str, Any]]:
    return [vault.context.extra_config for vault in vaults]


@pytest.mark.parametrize(
    ("name", "keys", "want"),
    [
        ("s3", {"max_size": "4000"}, [{"max_size": 3000}, {"max_size": 1000}]),
        ("s3", {"max_size": 0}, [{"max_size": 0}, {"max_size": 0}]),
        ("s3", {"max_size": 1}, [{"max_size": 1}, {"max_size": 1}]),
        ("s3", {}, [{}, {}]),
        ("nixl", {"plugin": "OBJ", "max_size": 4000}, [{"max_size": 3000}, {"max_size": 1000}]),
        ("nixl", {"plugin": "POSIX", "max_size": 4000}, [{"max_size": 4000}, {"max_size": 4000}]),
        ("disk", {"max_size": 4000}, [{"max_size": 4000}, {"max_size": 4000}]),
        ("mooncake", {}, [{}, {"global_segment_size": 0}]),
        ("mooncake", {"global_segment_size": 9}, [{"global_segment_size": n} for n in (9, 0)]),
    ],
)  # fmt: skip
def test_caps_of_a_fingerprint_are_split_and_those_of_a_place_are_not(
    vaults: list[Vault], name: str, keys: dict[str, Any], want: list[dict[str, Any]]
) -> None:
    register_storage_backend(name, f"{__name__}:Vault")
    stores = open_stores(name, keys, BOTH)
    assert inner_keys(vaults) == [keys | mine for mine in want]
    stores.close()


def test_the_stores_of_a_tier_get_their_shares(vaults: list[Vault]) -> None:
    register_storage_backend("s3", f"{__name__}:Vault")
    keys = {"upper": {"backend": "vault"}, "lower": {"backend": "s3", "max_size": 4000}}
    register_storage_backend("tier", "hiradix.storage.backends.tier.backend:TierBackend")
    open_stores("tier", keys, BOTH).close()
    assert [found.get("max_size") for found in inner_keys(vaults)] == [None, 3000, None, 1000]


def test_a_tenants_quota_holds_for_all_components_together(tmp_path: Path) -> None:
    keys = {"file_storage_path": str(tmp_path / "f"), "min_free_space": 0, "quota": 4 * FULL,
            "quotas": {"salt:a": "8KiB"}, "quota_path": str(tmp_path / "q")}  # fmt: skip
    stores = open_stores("file", keys, BOTH)
    limits = []
    for part in stores.parts:
        backend = part.backend
        assert isinstance(backend, QuotaStorage)
        limits.append([backend._limit("salt:b"), backend._limit("salt:a")])
    assert limits == [[3 * FULL, 6144], [FULL, 2048]]
    stores.close()


def test_what_fails_for_one_component_is_left_alone_for_all(vaults: list[Vault]) -> None:
    keys = {"breaker_failures": 2, "breaker_retry_s": 1e6, "retries": 0, "deadline_s": 30.0}
    stores = open_stores("vault", keys, BOTH)
    fill(stores)
    Vault.fault = raise_error
    for _ in range(2):
        stores.parts[1].get(KEYS[:1], pages(WINDOW, 0, 1))
    assert stores.state is BreakerState.OPEN
    Vault.fault = None
    assert stores.parts[0].get(KEYS[:1], pages(FULL, 0, 1)) == [False]
    assert stores.stats()[f"get_missed_{MissReason.BREAKER_OPEN.value}"] == 1
    assert stores.stats()["put_pages"] == 2 * len(KEYS)
    stores.close()


def test_closing_closes_all_and_ends_the_workers(vaults: list[Vault]) -> None:
    before = set(threading.enumerate())
    stores = open_stores("vault", {"deadline_s": 30.0}, BOTH)
    fill(stores)
    workers = set(threading.enumerate()) - before
    assert stores.stats()["backend_pages"] == stores.stats()["backend_window-64_pages"] == len(KEYS)
    stores.close()
    stores.close()
    assert [vault.is_closed for vault in vaults] == [True, True]
    assert workers, "no thread reads or writes"
    for thread in workers:
        thread.join(60.0)
    assert not [thread for thread in workers if thread.is_alive()]
    assert [part.get(KEYS[:1], pages(size, 0, 1)) for part, size in zip(stores.parts, (FULL, WINDOW))] == [
        [False]
    ] * 2


def test_one_that_cannot_be_opened_leaves_none_open(vaults: list[Vault]) -> None:
    bad = ComponentPages(PageFingerprint("m", component="state"), 0)
    with pytest.raises(ConfigError, match="page_bytes"):
        open_stores("vault", {}, [FULL_PAGES, bad])

    class Moody(Vault):
        def __init__(self, context: StorageContext):
            super().__init__(context)
            if context.fingerprint.component:
                raise OSError("no more")

    globals()["Moody"] = Moody
    register_storage_backend("moody", f"{__name__}:Moody")
    with pytest.raises(ConfigError, match="--hicache-storage-backend moody.*no more"):
        open_stores("moody", {}, BOTH)
    assert vaults[0].is_closed


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("file", {"naming": "sglang"}),
        ("hf3fs", {}),
        ("tier", {"upper": {"backend": "file", "naming": "sglang"}, "lower": {"backend": "disk"}}),
    ],
)
def test_what_can_hold_full_attention_only_is_refused_by_name(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(naming|--hicache-storage-backend hf3fs): .*window-64"):
        open_stores(name, keys, BOTH)


def test_one_component_is_opened_as_it_always_was(vaults: list[Vault]) -> None:
    stores = open_stores("vault", {"quota": None}, [FULL_PAGES])
    (part,) = stores.parts
    assert isinstance(part, GuardedStorage) and stores.backend is part.backend
    assert inner_keys(vaults) == [{}]
    stores.close()


def test_tools_see_each_component(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two fingerprints of pages of two lengths: listed, checked, copied and cleared one by one."""
    keys = places(tmp_path)
    stores = open_stores("file", keys["file"], BOTH)
    fill(stores)
    stores.close()
    file, disk = f"file://{tmp_path}/file", f"disk://{tmp_path}/disk"
    assert main(["storage", "verify", file, "--set", "min_free_space=0"]) == 0
    assert "16 pages are whole, 0 are not" in capsys.readouterr().out
    room = ["--set-to", "min_free_space=0", "--set-to", "max_size=16MiB"]
    assert main(["storage", "copy", file, disk, "--set", "min_free_space=0", *room]) == 0
    copied = open_stores("disk", keys["disk"], BOTH)
    check(copied)
    copied.close()
    name = WINDOW_PAGES.fingerprint.digest()[:32]
    assert main(["storage", "clear", file, "--fingerprint", name, "--set", "min_free_space=0"]) == 0
    assert "removed 8 pages" in capsys.readouterr().out
    left = open_stores("file", keys["file"], BOTH)
    assert [part.exists(KEYS) for part in left.parts] == [8, 0]
    left.close()


def test_stat_says_which_components_are_one_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a difference that makes pages of the one misses for the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    full, other = PageFingerprint("m", dtype="bfloat16"), PageFingerprint("other", component="window-64")
    half = PageFingerprint("m", dtype="float16")
    window = PageFingerprint("m", dtype="float16", component="window-64", shape=(2, 8))
    state = PageFingerprint("m", dtype="float32", component="state", shape=(3,))
    marks = [full, half, window, state, other]
    for count, mark in enumerate(reversed(marks), 1):
        store = open_storage("file", StorageContext(mark, places(tmp_path)["file"], WINDOW))
        assert all(store.put(KEYS[:count], pages(WINDOW, 1, count)))
        store.close()
    assert main(["storage", "stat", f"file://{tmp_path}/file"]) == 0
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    names = [mark.digest()[:32] for mark in marks]
    assert [line[:32] for line in lines] == names
    assert lines[2] == f"{names[2]}  window-64 of the model of {names[1]}"
    assert lines[3] == f"{names[3]}  state of the model of {names[0]}"
    assert "dtype 'float16', not 'bfloat16'" in lines[1] and "model_id 'other', not 'm'" in lines[4]


def test_pages_of_all_components_are_encrypted(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    keys = {**places(tmp_path)["file"], "encryption_key_file": str(tmp_path / "key")}
    stores = open_stores("file", keys, BOTH)
    fill(stores)
    check(stores)
    stores.close()
    assert not any(bytes(64 * [100]) in path.read_bytes() for path in tmp_path.rglob("*.page"))
