"""A folder that is removed under a store: it is told, counted by its own reason, and made anew by a put."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import StorageContext, StoragePart, open_storage
from hiradix.storage.kit.states import QUIET_S, StoreStates
from tests.contracts.storage import FINGERPRINT, OTHER, PAGE_BYTES, hits, keys_of, put

BACKENDS: dict[str, dict[str, Any]] = {
    "file": {},
    "sglang": {"naming": "sglang"},
    "disk": {"max_size": "1MiB"},
}


def opened(name: str, folder: Path, fingerprint: Any = FINGERPRINT, **more: Any) -> StoragePart:
    backend = "disk" if name == "disk" else "file"
    keys = {f"{backend}_storage_path": str(folder), "min_free_space": 0, "deadline_s": 30.0}
    return open_storage(backend, StorageContext(fingerprint, {**keys, **BACKENDS[name], **more}, PAGE_BYTES))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_removed_folder_stores_again(name: str, whole: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "pages"
    with contextlib.closing(opened(name, folder)) as store:
        assert all(put(store, keys_of(4)))
        for times in range(3):
            if whole:
                shutil.rmtree(tmp_path / "a")
            else:
                for inside in list(folder.iterdir()):
                    shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
            if name != "disk":
                assert not any(hits(store, keys_of(4)))
            new = keys_of(4, start=4 * times + 4)
            assert all(put(store, new)), "it stores again, without a restart"
            assert folder.is_dir() and all(hits(store, new))
        with contextlib.closing(opened(name, folder)) as other:
            assert all(hits(other, keys_of(4, start=12)))
            assert all(put(other, keys_of(8))) and all(hits(store, keys_of(8)))


def test_two_stores_agree_on_the_folder_made_anew(tmp_path: Path) -> None:
    """The cap holds for both together: they have the same lock and the same count again."""
    folder, size = tmp_path / "pages", 8 * 8192
    with (
        contextlib.closing(opened("file", folder, max_size=size)) as one,
        contextlib.closing(opened("file", folder, OTHER, max_size=size)) as two,
    ):
        put(one, keys_of(3))
        shutil.rmtree(folder)
        for store in (one, two, one, two):
            assert any(put(store, keys_of(6)))
            taken = sum(path.stat().st_size for path in folder.rglob("*.page"))
            assert 0 < taken <= size
        assert len(list((folder / "writers").iterdir())) == 2


def test_lost_pages_are_told_once_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "pages"
    with caplog.at_level(logging.INFO), contextlib.closing(opened("file", folder)) as store:
        put(store, keys_of(3))
        assert not any(hits(store, keys_of(2, start=7)))
        shutil.rmtree(folder)
        for _ in range(3):
            assert not any(hits(store, keys_of(3)))
        figures = store.stats()
        assert (figures["get_missed_lost"], figures["get_missed_absent"]) == (9, 2)
        assert sum("is lost" in line.message for line in caplog.records) == 1
        assert all(put(store, keys_of(3))) and all(hits(store, keys_of(3)))
        assert sum("made anew" in line.message for line in caplog.records) == 1
        assert store.stats()["backend_made_anew"] == 1


@pytest.mark.parametrize("name", BACKENDS)
def test_full_is_told_once_and_counted(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO),
        contextlib.closing(opened(name, tmp_path / "full", min_free_space="1000000TiB")) as full,
    ):
        for _ in range(3):
            assert not any(put(full, keys_of(2)))
        assert full.stats()["put_missed_full"] == 6 and "put_missed_absent" not in full.stats()
        assert sum("is full" in line.message for line in caplog.records) == 1


def test_a_state_is_over_when_it_was_not_met_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    states = StoreStates("x", lambda: now[0])
    for _ in range(3):
        states.enter("full", "no room")
        states.leave("full")
    assert [line.message for line in caplog.records] == ["storage x is full: no room"]
    now[0] = QUIET_S
    states.leave("full")
    states.leave("full")
    assert [line.message for line in caplog.records][1:] == ["storage x is no longer full"]
    states.enter("full", "no room")
    assert len(caplog.records) == 3
