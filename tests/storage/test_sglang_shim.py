"""Classes written for SGLang run unmodified, and SGLang's words come back where a configuration is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import ConfigError
from hiradix.storage import Batch, GuardedStorage, PageFingerprint, StorageContext, open_storage, open_stores
from hiradix.storage.backends.sglang.base import MODULE, base_module, make_config
from hiradix.storage.backends.sglang.host import DynamicBackend
from hiradix.storage.backends.sglang.known import KNOWN
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    NamespaceContract,
    QuotaContract,
    StorageContract,
    bytes_of,
    hits,
    keys_of,
    page_of,
    put,
)
from tests.storage import test_components as components

CLASSES = "tests.storage.sglang_classes"


@pytest.fixture(autouse=True)
def _without_sglang() -> Iterator[None]:
    """Leave no stand-in behind for tests that look for SGLang."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    yield
    if not before:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang" or name == CLASSES]:
            del sys.modules[name]


def context(
    place: Any, cls: str, fingerprint: PageFingerprint = FINGERPRINT, **config: Any
) -> StorageContext:
    keys = {"backend_name": "mine", "module_path": CLASSES, "class_name": cls, "place": str(place)}
    return StorageContext(fingerprint, keys | config, PAGE_BYTES)


class TestTensorClass(StorageContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> DynamicBackend:
        return DynamicBackend(context(place, "TensorStore", fingerprint, **config))


class TestZeroCopyClass(StorageContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> DynamicBackend:
        return DynamicBackend(context(place, "ZeroCopyStore", fingerprint, interface_v1=1, **config))


@pytest.mark.parametrize("cls, more", [("TensorStore", {}), ("ZeroCopyStore", {"interface_v1": True})])
def test_components_of_two_lengths_live_in_one_class(tmp_path: Path, cls: str, more: dict[str, Any]) -> None:
    keys = context(tmp_path, cls, **more).extra_config
    for _ in range(2):
        stores = open_stores("dynamic", {"deadline_s": 30.0, **keys}, components.BOTH)
        components.fill(stores)
        components.check(stores)
        stores.close()


class OwnClear(NamespaceContract):
    """`clear` is the class's own: it takes the other model's pages too."""

    def test_clear_is_scoped(self, make: Any) -> None:
        ours, theirs = make(), make(PageFingerprint("other/model"))
        put(ours, keys_of(2))
        put(theirs, keys_of(2))
        ours.clear()
        assert not any(hits(ours, keys_of(2))) and not any(hits(theirs, keys_of(2)))


class TestGuardedTensorClass(StorageContract, OwnClear, QuotaContract):
    deletes = False
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        return open_storage("dynamic", context(place, "TensorStore", fingerprint, deadline_s=30.0, **config))


class TestGuardedZeroCopyClass(StorageContract, OwnClear, QuotaContract):
    deletes = False
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        keys = {"deadline_s": 30.0, "interface_v1": True} | config
        return open_storage("dynamic", context(place, "ZeroCopyStore", fingerprint, **keys))


def test_a_class_that_takes_no_memory_is_closed_and_told_of(tmp_path: Path) -> None:
    """What it had opened by then (threads, connections) stayed, and once more at each attach."""
    with pytest.raises(ConfigError, match="dynamic: RuntimeError: no such device"):
        open_storage("dynamic", context(tmp_path, "Unlucky", interface_v1=True))
    assert str(tmp_path) in sys.modules[CLASSES].PLACES["closed"]


def test_config_says_who_asks(tmp_path: Path) -> None:
    fingerprint = PageFingerprint("org/model", tp_rank=1, tp_size=2, pp_rank=3, pp_size=4)
    config = DynamicBackend(context(tmp_path, "TensorStore", fingerprint, mine=7))._store.config
    assert (config.tp_rank, config.tp_size, config.pp_rank, config.pp_size) == (1, 2, 3, 4)
    assert config.model_name == "org/model" and config.is_storage_writer
    assert config.extra_config["mine"] == 7 and config.extra_config["class_name"] == "TensorStore"


def test_config_of_an_older_sglang_gets_only_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import make_dataclass

    module = base_module()
    monkeypatch.setattr(module, "HiCacheStorageConfig", make_dataclass("C", ["tp_rank", "model_name"]))
    config = make_config({"tp_rank": 1, "model_name": "m", "dcp_size": 1})
    assert (config.tp_rank, config.model_name) == (1, "m")


def test_prefix_keys_arrive(tmp_path: Path) -> None:
    store = DynamicBackend(context(tmp_path, "ZeroCopyStore", interface_v1=True))
    keys = keys_of(5)
    put(store, keys)
    store._store.seen.clear()
    pages = [[memoryview(bytearray(PAGE_BYTES))] for _ in keys[2:]]
    batch = Batch.of(keys[2:], keys[:2])
    assert store.exists(batch) == 3
    assert store.get(batch, pages) == [True] * 3
    assert store._store.seen == [keys[:2], keys[:2]]


def test_prefix_keys_arrive_through_the_guard(tmp_path: Path) -> None:
    store = open_storage("dynamic", context(tmp_path, "TensorStore", deadline_s=30.0))
    mark = FINGERPRINT.digest()[:32]
    keys = keys_of(3)
    assert store.exists(Batch.of(keys[2:], keys[:2])) == 0
    hosted = store.backend.inner._store  # type: ignore[attr-defined]
    assert hosted.seen == [[f"{mark}-{key}" for key in keys[:2]]]
    store.close()


def test_prefix_keys_reach_get_and_put_through_guard_and_wrappers(tmp_path: Path) -> None:
    """In pieces too; where the chain is not known, or a wrapper leaves a gap in the batch, none are given."""
    keys = {
        "interface_v1": True, "staging_size": 2 * (PAGE_BYTES + 64), "negative_ttl_s": 600.0,
        "deadline_s": 30.0,
    }  # fmt: skip
    store = open_storage("dynamic", context(tmp_path, "ZeroCopyStore", **keys))
    hosted = store.backend.inner.inner._store  # type: ignore[attr-defined]
    names = keys_of(7)
    chain = [f"{FINGERPRINT.digest()[:32]}-{key}" for key in names]
    pages = [[memoryview(bytearray(bytes_of(key)))] for key in names]
    assert store.put(Batch.of(names[1:5], names[:1]), pages[1:5]) == [True] * 4
    assert hosted.seen == [chain[:1], chain[:3]]
    hosted.seen.clear()
    assert store.get(Batch.of(names[1:6], names[:1]), pages[1:6]) == [True] * 4 + [False]
    assert hosted.seen == [chain[:1], chain[:3], chain[:5]]
    hosted.seen.clear()
    assert store.get(Batch.of(names[4:7], names[:4]), pages[4:7]) == [True, False, False]
    assert store.get(names[1:3], pages[1:3]) == [True] * 2
    assert hosted.seen == [chain[:4], chain[:6], None]
    store.close()


def test_longer_batches_than_the_arena_go_in_pieces_with_their_prefix(tmp_path: Path) -> None:
    store = DynamicBackend(context(tmp_path, "ZeroCopyStore", interface_v1=True))
    keys = keys_of(300)
    pages = [page_of(key) for key in keys]
    batch = Batch.of(keys, before=())
    assert store.put(batch, pages) == [True] * 300 and store.get(batch, pages) == [True] * 300
    assert [len(seen or ()) for seen in store._store.seen] == [0, 128, 256] * 2
    store._store.seen.clear()
    assert hits(store, keys) == [True] * 300 and store._store.seen == [None] * 3


@pytest.mark.parametrize("fault", ["none", "cut", "strings"])
def test_bad_answers_are_misses(tmp_path: Path, fault: str) -> None:
    store = DynamicBackend(context(tmp_path, "Faulty", fault=fault))
    put(store, keys_of(3))
    assert hits(store, keys_of(3)) == [False] * 3


@pytest.mark.parametrize("say", ["bool", "numpy", "numpy list", "tensor", "codes", "too many"])
def test_only_what_is_said_to_be_stored_is(tmp_path: Path, say: str) -> None:
    store = DynamicBackend(context(tmp_path, "Coded", interface_v1=True, say=say))
    keys = keys_of(20)
    even = [bytes_of(key)[0] % 2 == 0 for key in keys]
    assert put(store, keys) == even, "a page is said to be stored that is not"
    assert hits(store, keys) == even
    store.close()


@pytest.mark.parametrize("say", ["errors", "none"])
def test_what_is_no_yes_is_none(tmp_path: Path, say: str) -> None:
    store = DynamicBackend(context(tmp_path, "Coded", interface_v1=True, say=say))
    assert put(store, keys_of(20)) == [False] * 20 and hits(store, keys_of(20)) == [False] * 20
    store.close()


def test_answers_may_be_numpys(tmp_path: Path) -> None:
    store = DynamicBackend(context(tmp_path, "Numpy"))
    assert put(store, keys_of(5)) == [True] * 5
    assert hits(store, keys_of(7)) == [True] * 5 + [False] * 2
    store.close()


def test_short_answer_leaves_the_rest_missing(tmp_path: Path) -> None:
    store = DynamicBackend(context(tmp_path, "Faulty", fault="short"))
    put(store, keys_of(3))
    assert hits(store, keys_of(3)) == [True, False, False]


def test_tensor_of_another_type_counts_by_its_bytes(tmp_path: Path) -> None:
    store = DynamicBackend(context(tmp_path, "Faulty", fault="float"))
    put(store, keys_of(3))
    assert hits(store, keys_of(3)) == [True] * 3


def test_error_for_one_page_is_not_an_error_for_all(tmp_path: Path) -> None:
    store = DynamicBackend(context(tmp_path, "Faulty", fault="raises"))
    keys = keys_of(20)
    put(store, keys)
    assert hits(store, keys) == [bytes_of(key)[0] % 2 == 0 for key in keys]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_name": ""}, "Missing required field 'class_name' in backend config for 'dynamic' backend"),
        ({"module_path": "no.such"}, "Failed to import backend 'mine' from 'no.such': No module named 'no'"),
        ({"class_name": "Nope"}, "Class 'Nope' not found in module"),
        ({"class_name": "NotAStorage"}, "Backend class NotAStorage must inherit from HiCacheStorage"),
    ],
)
def test_wrong_configurations_get_sglangs_words(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_storage("dynamic", context(tmp_path, "TensorStore", **change))


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_names_say_what_to_install(name: str) -> None:
    message = {"infinistore": "SGLang has no class for", "tensorcast": "no host pools but SGLang.s own: use"}
    with pytest.raises(ConfigError, match=message.get(name, "pip install sglang, and")):
        open_storage(name, StorageContext(FINGERPRINT, {}, PAGE_BYTES))


def test_known_name_loads_sglangs_class_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With SGLang's module path taken by a class of ours, the name makes it as SGLang would."""
    base_module()
    import types

    import tests.storage.sglang_classes as classes

    module = types.ModuleType("eic_storage")
    module.EICStorage = classes.ZeroCopyStore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, KNOWN["eic"].module, module)
    keys = {"place": str(tmp_path), "deadline_s": 30.0}
    store = open_storage("eic", StorageContext(FINGERPRINT, keys, PAGE_BYTES))
    assert all(put(store, keys_of(3))) and all(hits(store, keys_of(3)))
    store.close()


def test_stand_in_is_only_made_where_there_is_no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(sys)("real")
    monkeypatch.setitem(sys.modules, MODULE, real)
    assert base_module() is real
