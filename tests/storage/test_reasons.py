"""Why pages are missing passes through every wrapper, alone and in each other, up to the guard's figures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import (
    Batch,
    ComponentPages,
    GuardedStorage,
    MissReason,
    PageFingerprint,
    StorageBackend,
    StorageContext,
    Stores,
    Traits,
    Trust,
    trusted_stores,
)
from hiradix.storage.backends.tier.backend import TierBackend
from hiradix.storage.generations import renamed
from hiradix.storage.guard.calls import FlagsWithReason, as_answered, has_failed, reasons_of
from hiradix.storage.guard.guard import GuardLimits
from hiradix.storage.kit.call_threads import fill_head
from hiradix.storage.wrappers.negative import NegativeCache
from hiradix.storage.wrappers.quota import QuotaConfig, with_quota
from hiradix.storage.wrappers.wrap import WrapConfig, inner_context, wrap
from tests.contracts.storage import FINGERPRINT, PAGE_BYTES, blank, keys_of, page_of
from tests.storage.doubles import FakeClock, MemoryBackend

DAMAGED, FOREIGN, ERROR, FULL = MissReason.DAMAGED, MissReason.FOREIGN, MissReason.ERROR, MissReason.FULL
KEYS = Batch.of(keys_of(6))


class Saying(MemoryBackend):
    """Answers no for some keys, with the reasons that it is given."""

    traits = Traits(verifies=True, namespaced=True, ragged=True)

    def __init__(self, context: StorageContext) -> None:
        super().__init__(context, {})
        self.says: dict[str, MissReason] = {}

    def _said(self, keys: Sequence[str], answer: list[bool]) -> list[bool]:
        reasons = Counter(self.says[key] for key in keys if key in self.says)
        flags = [good and key not in self.says for key, good in zip(keys, answer, strict=True)]
        return FlagsWithReason(flags, reasons) if reasons else flags

    def get(self, keys: Any, into: Any) -> list[bool]:
        for key, page in zip(keys, into, strict=True):
            fill_head(memoryview(self.pages.get(key, b"")), page)
        return self._said(keys, [key in self.pages for key in keys])

    def put(self, keys: Any, pages: Any) -> list[bool]:
        return self._said(keys, super().put(keys, pages))


WRAPPERS: dict[str, dict[str, Any]] = {
    "retries": {"retries": 2, "retry_wait_s": 0.0},
    "negative": {"negative_ttl_s": 100.0},
    "compression": {"compression": "zstd"},
    "quantise": {"quantise": "fp8"},
    "encryption": {"encryption_key_file": "key"},
}
STACKS = [*itertools.combinations(WRAPPERS, 1), *itertools.combinations(WRAPPERS, 2), tuple(WRAPPERS)]


def opened(
    names: Sequence[str], place: Path, traits: Traits = Saying.traits
) -> tuple[Saying, StorageBackend]:
    """A backend in those wrappers, and itself."""
    key_file = place / "key"
    key_file.write_bytes(bytes(range(32)))
    keys: dict[str, Any] = {"retries": 0}
    for name in names:
        keys |= WRAPPERS[name]
    if "encryption_key_file" in keys:
        keys["encryption_key_file"] = str(key_file)
    codec = "fp8-e4m3-32" if "quantise" in names else ""
    fingerprint = PageFingerprint("m", dtype="float32", codec=codec) if codec else FINGERPRINT
    context = StorageContext(fingerprint, keys, PAGE_BYTES, elements="float32")
    config = WrapConfig.from_mapping(keys)
    backend = Saying(inner_context(context, config))
    backend.traits = traits
    return backend, wrap(backend, context, config)


@pytest.mark.parametrize("names", STACKS, ids="+".join)
def test_reasons_of_reads_pass_through(names: Sequence[str], tmp_path: Path) -> None:
    backend, store = opened(names, tmp_path)
    assert all(store.put(KEYS, [page_of(key) for key in KEYS]))
    backend.says = {KEYS[1]: DAMAGED, KEYS[2]: DAMAGED, KEYS[4]: FOREIGN, KEYS[5]: ERROR}
    answer = store.get(KEYS, [blank() for _ in KEYS])
    assert list(answer) == [True, False, False, True, False, False]
    assert reasons_of(answer) == {DAMAGED: 2, FOREIGN: 1, ERROR: 1} and has_failed(answer)


@pytest.mark.parametrize("names", STACKS, ids="+".join)
def test_reasons_of_writes_pass_through(names: Sequence[str], tmp_path: Path) -> None:
    backend, store = opened(names, tmp_path)
    backend.says = {KEYS[1]: FULL, KEYS[2]: FULL, KEYS[4]: ERROR}
    answer = store.put(KEYS, [page_of(key) for key in KEYS])
    assert list(answer) == [True, False, False, True, False, True]
    assert reasons_of(answer) == {FULL: 2, ERROR: 1}


@pytest.mark.parametrize("names", STACKS, ids="+".join)
def test_the_guard_counts_each_page_under_its_reason(names: Sequence[str], tmp_path: Path) -> None:
    backend, store = opened(names, tmp_path)
    guard = GuardedStorage(store, FINGERPRINT, GuardLimits(deadline_s=100.0))
    assert all(guard.put(KEYS, [page_of(key) for key in KEYS]))
    backend.says = {name: DAMAGED for name in list(backend.pages)[:2]}
    assert guard.get([*KEYS, "f" * 64], [blank() for _ in range(7)]).count(False) == 3
    figures = guard.stats()
    assert (figures["get_missed_damaged"], figures["get_missed_absent"]) == (2, 1)
    guard.close()


@pytest.mark.parametrize("name", ["compression", "quantise", "encryption"])
def test_what_a_wrapper_finds_damaged_is_said_beside_what_its_backend_says(name: str, tmp_path: Path) -> None:
    backend, store = opened(
        (name,), tmp_path, Traits(verifies=name != "quantise", namespaced=True, ragged=True)
    )
    assert all(store.put(KEYS, [page_of(key) for key in KEYS]))
    backend.says = {KEYS[0]: FOREIGN}
    backend.pages[KEYS[3]] = bytes(len(backend.pages[KEYS[3]]))
    answer = store.get(KEYS, [blank() for _ in KEYS])
    assert list(answer) == [False, True, True, False, True, True]
    assert reasons_of(answer) == {FOREIGN: 1, DAMAGED: 1}


def test_quantised_pages_of_another_key_are_said_to_be_foreign(tmp_path: Path) -> None:
    backend, store = opened(("quantise",), tmp_path, Traits(namespaced=True))
    assert all(store.put(KEYS, [page_of(key) for key in KEYS]))
    backend.pages[KEYS[3]] = backend.pages[KEYS[2]]
    assert reasons_of(store.get(KEYS, [blank() for _ in KEYS])) == {FOREIGN: 1}


def test_reasons_pass_a_quota(tmp_path: Path) -> None:
    backend, _ = opened((), tmp_path)
    store = with_quota(backend, "memory", FINGERPRINT, QuotaConfig(1 << 30, {}, str(tmp_path / "quota")))
    backend.says = {KEYS[1]: FULL}
    put = store.put(Batch.of(list(KEYS), tenant="salt:a"), [page_of(key) for key in KEYS])
    assert put.count(False) == 1 and reasons_of(put) == {FULL: 1}
    backend.says = {KEYS[1]: DAMAGED, KEYS[2]: ERROR}
    assert reasons_of(store.get(KEYS, [blank() for _ in KEYS])) == {DAMAGED: 1, ERROR: 1}
    store.close()


def file_context(place: Path, name: str) -> dict[str, Any]:
    return {
        "backend": "file",
        "file_storage_path": str(place / name),
        "min_free_space": 0,
        "deadline_s": 60.0,
    }


def test_reasons_pass_a_tier(tmp_path: Path) -> None:
    """Of a page that neither half has."""
    halves = {name: file_context(tmp_path, name) for name in ("upper", "lower")}
    store = TierBackend(StorageContext(FINGERPRINT, halves, PAGE_BYTES))
    assert all(store.put(KEYS, [page_of(key) for key in KEYS]))
    for half, key in (("upper", KEYS[0]), ("lower", KEYS[0]), ("lower", KEYS[2])):
        (file,) = (tmp_path / half).rglob(f"{key}.page")
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    answer = store.get(Batch.of([*KEYS, "f" * 64]), [blank() for _ in range(7)])
    assert list(answer) == [False, *[True] * 5, False] and reasons_of(answer) == {DAMAGED: 1}
    store.close()


def test_a_fault_above_is_not_that_of_a_page_which_neither_half_has(tmp_path: Path) -> None:
    halves = {name: file_context(tmp_path, name) for name in ("upper", "lower")}
    store = TierBackend(StorageContext(FINGERPRINT, halves, PAGE_BYTES))
    assert all(store.put(KEYS, [page_of(key) for key in KEYS]))
    (file,) = (tmp_path / "upper").rglob(f"{KEYS[0]}.page")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    answer = store.get(Batch.of([*KEYS, "f" * 64]), [blank() for _ in range(7)])
    assert list(answer) == [*[True] * 6, False] and not reasons_of(answer)
    store.close()


def test_reasons_pass_generations() -> None:
    backend = Saying(StorageContext(FINGERPRINT, {}, PAGE_BYTES))
    stores = Stores([GuardedStorage(backend, FINGERPRINT, GuardLimits(deadline_s=100.0))])
    trusted = trusted_stores(stores, [ComponentPages(FINGERPRINT, PAGE_BYTES)], Trust(identity="mine"))
    (part,) = trusted.parts
    assert all(part.put(KEYS, [page_of(key) for key in KEYS]))
    backend.says = {name: ERROR for name in list(backend.pages)[1:3]}
    answer = part.get(KEYS, [blank() for _ in KEYS])
    assert answer.count(False) == 2 and reasons_of(answer) == {ERROR: 2} and has_failed(answer)
    trusted.close()


def test_a_fault_in_one_generation_is_not_that_of_a_page_which_none_has() -> None:
    """The page that failed there came from the other one; the page that is missing is in neither."""
    backend = Saying(StorageContext(FINGERPRINT, {}, PAGE_BYTES))
    stores = Stores([GuardedStorage(backend, FINGERPRINT, GuardLimits(deadline_s=100.0))])
    trusted = trusted_stores(stores, [ComponentPages(FINGERPRINT, PAGE_BYTES)], Trust(identity="mine"))
    (part,) = trusted.parts
    (first,) = trusted.readable(trusted.scope_of(None), 0)
    second = bytes(range(32))
    trusted.scope_of(None).adopt(0, second)
    pages = {key: b"".join(bytes(view) for view in page_of(key)) for key in KEYS[:2]}
    for label in (first, second):
        backend.pages |= dict(zip(renamed(list(pages), label), pages.values(), strict=True))
    backend.says = {renamed(KEYS[:1], trusted.readable(trusted.scope_of(None), 0)[0])[0]: ERROR}
    answer = part.get(KEYS[:3], [blank() for _ in range(3)])
    assert list(answer) == [True, True, False] and not has_failed(answer)
    trusted.close()


def test_what_failed_is_not_taken_for_absent() -> None:
    """The negative cache asks for it again; what is damaged is there only when it is put again."""
    clock, backend = FakeClock(), Saying(StorageContext(FINGERPRINT, {}, PAGE_BYTES))
    store = NegativeCache(backend, 100.0, clock)
    assert all(store.put(KEYS, [page_of(key) for key in KEYS]))
    backend.says = {KEYS[1]: ERROR}
    assert store.get(KEYS, [blank() for _ in KEYS]).count(True) == 5
    backend.says = {}
    assert all(store.get(KEYS, [blank() for _ in KEYS])) and store.exists(KEYS) == 6


@pytest.mark.parametrize(
    ("flags", "reasons", "more", "expected"),
    [
        ([True, True], [{DAMAGED: 2}], {}, {}),
        ([False, True], [{DAMAGED: 2}], {}, {DAMAGED: 1}),
        ([False, False], [{DAMAGED: 1}, {ERROR: 5}], {}, {DAMAGED: 1, ERROR: 1}),
        ([False, False], [{DAMAGED: 1}, {DAMAGED: 5}], {}, {DAMAGED: 2}),
        ([False, False], [{DAMAGED: 1}, {DAMAGED: 1}], {}, {DAMAGED: 1}),
        ([False, False], [{}, {ERROR: 1}], {FOREIGN: 1}, {FOREIGN: 1, ERROR: 1}),
        ([False, False], [{DAMAGED: 2}], {FOREIGN: 1}, {FOREIGN: 1, DAMAGED: 1}),
        ([False], [{}, {}], {}, {}),
    ],
)
def test_no_page_has_two_reasons(
    flags: list[bool], reasons: list[Any], more: dict[MissReason, int], expected: dict[MissReason, int]
) -> None:
    answers = [FlagsWithReason([False] * len(flags), why) for why in reasons]
    assert reasons_of(as_answered(flags, *answers, more=more)) == expected
