"""What a call is about arrives with it: through guard, wrappers and stores within, from any thread."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hiradix.storage
from hiradix.storage import (
    Batch,
    ComponentPages,
    PageFingerprint,
    StorageContext,
    Trust,
    open_storage,
    open_stores,
    register_storage_backend,
    trusted_stores,
)
from hiradix.storage.backends.file.page_dir import footprint
from hiradix.storage.batch import ChainUse, LazyKeys
from hiradix.storage.generations import renamed
from hiradix.storage.kit.seal import SEAL_BYTES
from tests.contracts.storage import FINGERPRINT, PAGE_BYTES, hits, keys_of, page_of, put, run_all
from tests.disk.places import cap_of
from tests.storage.doubles import MemoryBackend

KEYS = keys_of(8)


class Noting(MemoryBackend):
    """Notes each batch it gets."""

    seen: list[tuple[str, Batch]] = []

    def exists(self, keys: Any) -> int:
        self.seen.append(("exists", keys))
        return super().exists(keys)

    def get(self, keys: Any, into: Any) -> list[bool]:
        self.seen.append(("get", keys))
        return super().get(keys, into)

    def put(self, keys: Any, pages: Any) -> list[bool]:
        self.seen.append(("put", keys))
        return super().put(keys, pages)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Batch]]:
    monkeypatch.setattr(Noting, "seen", [])
    register_storage_backend("noting", f"{__name__}:Noting")
    return Noting.seen


@given(st.integers(0, 8), st.integers(0, 9), st.lists(st.integers(0, 9), max_size=9, unique=True))
def test_a_part_is_that_of_a_list_and_knows_what_is_in_front(start: int, stop: int, which: list[int]) -> None:
    whole = Batch.of(KEYS, before=["x", "y"])
    part = whole[start:stop]
    assert list(part) == KEYS[start:stop] and len(part) == len(KEYS[start:stop])
    assert not part or part.before == ("x", "y", *KEYS[:start])
    assert part.fronts() == ["y", *KEYS][start : start + len(part)]
    picked = sorted(at for at in which if at < len(part))
    some = part.pick(picked)
    assert list(some) == [part[at] for at in picked]
    assert some.fronts() == [part.fronts()[at] for at in picked], "a gap changes nothing of the chain"
    assert some.used_ns("a", 100) == [part.used_ns("a", 100)[at] for at in picked]
    has_gap = bool(picked) and picked[-1] - picked[0] + 1 > len(picked)
    assert not picked or some.before == (None if has_gap else part[picked[0] :].before)


@pytest.mark.parametrize("step", [-1, 2, 3, -2])
def test_a_part_with_gaps_or_backwards_says_no_less_and_no_more(step: int) -> None:
    chain = ["a", "b", *"cdefgh"]
    part = Batch.of(chain[2:], before=chain[:2])[::step]
    assert list(part) == chain[2:][::step]
    assert part.fronts() == [chain[chain.index(key) - 1] for key in part]
    assert part.before is None
    rest = part[1:]
    assert rest.fronts() == [chain[chain.index(key) - 1] for key in rest]


def test_what_is_not_known_is_not_made_up() -> None:
    assert Batch.of(KEYS).before is None and Batch.of(KEYS).after == ""
    assert Batch.of(KEYS)[3:].before is None and Batch.of(KEYS)[3:].after == KEYS[2]
    assert Batch.of(KEYS, after="x").before is None and Batch.of(KEYS, after="x").after == "x"
    moved = Batch.of(KEYS, before=["x"], is_chain=False)
    assert moved.before is None and moved[1:].after == "" and moved.fronts() == [""] * 8


def test_a_caller_may_use_his_lists_again() -> None:
    keys, before = list(KEYS), ["x"]
    batch = Batch.of(keys, before)
    keys.clear(), before.clear()
    assert list(batch) == KEYS and batch.before == ("x",) and Batch.of(batch) is batch


def test_names_are_made_when_somebody_looks() -> None:
    made: list[int] = []

    def rename(keys: Sequence[str]) -> list[str]:
        made.append(len(keys))
        return [f"n-{key}" for key in keys]

    use = ChainUse(LazyKeys(KEYS, rename), before=())
    part = use.part(2, 4)
    assert list(part) == [f"n-{key}" for key in KEYS[2:4]] and made == [2]
    again = part.renamed(lambda keys: [f"m-{key}" for key in keys])
    assert again.before == tuple(f"m-n-{key}" for key in KEYS[:2]) and again.after == f"m-n-{KEYS[1]}"


def test_a_long_chain_in_front_is_named_at_once() -> None:
    made: list[int] = []

    def rename(keys: Sequence[Any]) -> list[str]:
        made.append(len(keys))
        return [f"n-{key}" for key in keys]

    chain = list(range(1000))
    batch = ChainUse(LazyKeys(chain[900:], rename), LazyKeys(chain[:900], rename)).part(50, 60)
    batch = batch.renamed(lambda keys: [f"m-{key}" for key in keys])
    made.clear()
    assert batch.before == tuple(f"m-n-{at}" for at in range(950))
    assert made == [900, 50]


@pytest.mark.parametrize("name", ["exists", "get", "put"])
def test_a_backend_may_send_its_keys_to_another_process(seen: list[tuple[str, Batch]], name: str) -> None:
    """Whatever the guard makes names of, and whose clock was asked."""
    store = open_storage("noting", StorageContext(FINGERPRINT, {"deadline_s": 30.0}, PAGE_BYTES))
    batch = Batch.of(KEYS, before=["x"], tenant="salt:a")
    pages = [] if name == "exists" else [[page_of(key) for key in KEYS]]
    batch.used_ns(threading.Lock(), 0)
    getattr(store, name)(batch, *pages)
    sent = pickle.dumps(seen[-1][1])
    assert pickle.loads(sent) == tuple(seen[-1][1])  # noqa: S301
    store.close()


def test_stores_have_clocks_of_their_own() -> None:
    whole = Batch.of(KEYS)
    assert whole[:4].used_ns("near", 1000) == [1000, 999, 998, 997]
    assert whole[:4].used_ns("far", 5) == [5, 4, 3, 2]
    assert whole[4:6].renamed(list).used_ns("near", 2000) == [996, 995], "one use, whatever it is called"


STACKS: dict[str, dict[str, Any]] = {
    "bare": {"retries": 0},
    "wrapped": {"negative_ttl_s": 9},
    "quota": {"quota": "1MiB"},
}


@pytest.mark.parametrize("stack", [*STACKS, "tier", "generations"])
def test_all_of_it_arrives_through_everything(
    tmp_path: Path, stack: str, seen: list[tuple[str, Batch]]
) -> None:
    keys = {"deadline_s": 30.0, **STACKS.get(stack, {})}
    if stack == "quota":
        keys["quota_path"] = str(tmp_path)
    if stack == "tier":
        near = {"backend": "file", "file_storage_path": str(tmp_path / "near"), "deadline_s": 30.0}
        keys |= {"upper": near | {"min_free_space": 0}, "lower": {"backend": "noting", "deadline_s": 30.0}}
    label: bytes | None = None
    if stack == "generations":
        pages = [ComponentPages(FINGERPRINT, PAGE_BYTES)]
        trusted = trusted_stores(open_stores("noting", keys, pages), pages, Trust(identity="me"))
        store: Any = trusted.parts[0]
        label = trusted.scope_of(None).put_label
    else:
        name = "tier" if stack == "tier" else "noting"
        store = open_storage(name, StorageContext(FINGERPRINT, keys, PAGE_BYTES))
    batch = Batch.of(KEYS[2:], KEYS[:2], tenant="salt:a", extra_key="lora")
    store.exists(batch)
    assert all(put(store, batch[:3])) and all(put(store, batch[3:]))
    if stack == "tier":
        store.backend.inner.upper.clear()
    assert all(hits(store, batch[3:]))
    names = KEYS if label is None else renamed(KEYS, label)
    names = [f"{FINGERPRINT.digest()[:32]}-{key}" for key in names]
    for _, one in seen:
        place = names.index(one[0])
        assert list(one) == names[place : place + len(one)] and one.before == tuple(names[:place])
        assert (one.tenant, one.extra_key, one.is_chain) == ("salt:a", "lora", True)
    assert [(call, len(one)) for call, one in seen] == [("exists", 6), ("put", 3), ("put", 3), ("get", 3)]


ROOM = 48


def limited(folder: Path, kind: str) -> Any:
    room = {"max_size": ROOM * footprint(SEAL_BYTES + PAGE_BYTES), "min_free_space": 0, "deadline_s": 60.0}
    file = {"file_storage_path": str(folder / "file"), **room}
    disk = {"disk_storage_path": str(folder / "disk"), "max_size": cap_of(ROOM), "deadline_s": 60.0}
    keys: dict[str, Any] = {"file": file, "sglang": file | {"naming": "sglang"}, "disk": disk}.get(kind, {})
    name = {"sglang": "file", "quota": "file"}.get(kind, kind)
    if kind == "quota":
        keys = file | {"quota": "1GiB", "quota_path": str(folder / "accounts")}
    if kind == "tier":
        keys = {"upper": {"backend": "file", **file}, "lower": {"backend": "disk", **disk}}
    pages = [ComponentPages(PageFingerprint("model"), PAGE_BYTES)]
    stores = open_stores(name, {"deadline_s": 60.0, **keys}, pages)
    return trusted_stores(stores, pages, Trust(identity="me"))


@pytest.mark.parametrize("kind", ["file", "sglang", "disk", "tier", "quota"])
def test_chains_whose_calls_come_between_each_other_leave_from_their_ends(tmp_path: Path, kind: str) -> None:
    """Several threads, each with a chain of several calls: in any order of these."""
    stores = limited(tmp_path, kind)
    store = stores.parts[0]
    chains = [Batch.of(keys_of(12, 100 * number), tenant=f"salt:{number}") for number in range(3)]
    turns = [threading.Barrier(3, timeout=60.0) for _ in range(4)]

    def move(number: int) -> None:
        for turn, barrier in enumerate(turns):
            barrier.wait()
            part = chains[number][3 * turn : 3 * turn + 3]
            assert all(put(store, part))

    run_all([lambda number=number: move(number) for number in range(3)])  # type: ignore[misc]
    for number in range(3):  # single threads make the calls of all, too
        assert all(hits(store, chains[number][:6])) and all(hits(store, chains[2 - number][6:]))
    for number in range(6):
        assert all(put(store, Batch.of(keys_of(8, 1000 + 8 * number))))
        for chain in chains:
            there = [store.exists([key]) == 1 for key in chain]
            assert there == sorted(there, reverse=True), (kind, number, there)
    stores.close()


def test_a_backend_that_knows_nothing_of_batches_works_as_it_did(seen: list[tuple[str, Batch]]) -> None:
    class Old(MemoryBackend):
        def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] = ()) -> int:
            assert prefix_keys == ()
            return super().exists(keys)

    register_storage_backend("old", f"{__name__}:Old")
    globals()["Old"] = Old
    store = open_storage("old", StorageContext(FINGERPRINT, {"deadline_s": 30.0}, PAGE_BYTES))
    assert store.put(KEYS, [page_of(key) for key in KEYS]) == [True] * 8
    assert store.exists(KEYS) == 8 and all(hits(store, KEYS))
    store.close()


def test_no_threads_own_memory_says_what_a_call_is_about() -> None:
    """Scratch memory is all that threads have of their own here."""
    found = {
        path.name
        for path in Path(hiradix.storage.__file__).parent.rglob("*.py")
        if "threading.local" in path.read_text(encoding="utf-8")
    }
    assert found == {"compress.py", "quantise.py"}
