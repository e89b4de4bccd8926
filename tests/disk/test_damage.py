"""Damage that a store of its own kind cannot tell from pages: each variant serves wrong bytes unverified."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hiradix.storage import StoragePart, open_storage
from tests.contracts.storage import bytes_of, keys_of
from tests.disk.places import context, segment_files

SIZE, NUM = 64 << 10, 12
KEYS = keys_of(NUM)
Damage = Callable[[Path, bytes], None]


def opened(place: Path, verify: str) -> StoragePart:
    return open_storage("disk", context(place, page_bytes=SIZE, verify=verify, deadline_s=60.0))


def store_all(store: StoragePart, salt: str = "") -> None:
    pages = [[memoryview(bytes_of(key + salt, SIZE))] for key in KEYS]
    assert all(store.put(KEYS, pages))


def served(store: StoragePart) -> dict[str, bytes]:
    into = [memoryview(bytearray(SIZE)) for _ in KEYS]
    ok = store.get(KEYS, [[view] for view in into])
    return {key: bytes(view) for key, view, good in zip(KEYS, into, ok, strict=True) if good}


def overwritten(path: Path, _: bytes) -> None:
    """64 bytes here and there."""
    with open(path, "r+b") as file:
        for at in range(0, 6 * SIZE, 24 << 10):
            file.seek(at)
            file.write(b"\xee" * 64)


def zeroed(path: Path, _: bytes) -> None:
    """A range across the border of pages, as blocks that a file system lost."""
    with open(path, "r+b") as file:
        file.seek(3 * SIZE // 2)
        file.write(bytes(2 * SIZE))


def exchanged(path: Path, _: bytes) -> None:
    """Two whole pages in each other's place."""
    with open(path, "r+b") as file:
        first = file.read(SIZE)
        file.seek(4 * SIZE)
        other = file.read(SIZE)
        file.seek(0)
        file.write(other)
        file.seek(4 * SIZE)
        file.write(first)


def truncated(path: Path, _: bytes) -> None:
    """Cut, and made as long again: the end is a hole."""
    size = path.stat().st_size
    os.truncate(path, 2 * SIZE + 100)
    os.truncate(path, size)


def older(path: Path, before: bytes) -> None:
    """The same keys' earlier pages, out of a backup, in place."""
    with open(path, "r+b") as file:
        file.write(before)


def replaced(path: Path, before: bytes) -> None:
    """Another file by that name: the one that is open is no longer in the folder."""
    path.with_suffix(".new").write_bytes(before)
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("again", ["running", "opened anew"])
@pytest.mark.parametrize("damage", [overwritten, zeroed, exchanged, truncated, older, replaced])
def test_damage_is_a_miss_that_is_counted_and_said_once(
    damage: Damage, again: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of pages that this process wrote, too, and that are in the page cache."""
    good = {key: bytes_of(key, SIZE) for key in KEYS}
    for verify in ("always", "off"):
        place = tmp_path / verify
        store = opened(place, verify)
        store_all(store, "older")
        (path,) = segment_files(place)
        before = path.read_bytes()
        assert store.delete(KEYS)
        store_all(store)
        assert served(store) == good
        damage(path, before)
        if again == "opened anew":
            store.close()
            store = opened(place, verify)
        with contextlib.closing(store):
            found = served(store)
            wrong = {key for key, page in found.items() if page != good[key]}
            if damage is replaced and again == "running":
                assert found == good, "what is open is read on"
                continue
            if verify == "off":
                assert wrong, "this damage would not be seen: it proves nothing"
                continue
            num_bad = NUM - len(found)
            assert not wrong and num_bad
            figures = store.stats()
            assert figures["backend_read_damaged"] == figures["get_missed_damaged"] == num_bad
            for _ in range(3):
                assert len(served(store)) == len(found)
            assert store.exists(KEYS) < NUM
            store_all(store)
            assert served(store) == good, "what was damaged is stored again"
            damage(path, before)
            served(store)
            assert sum(" is damaged: " in record.getMessage() for record in caplog.records) == 1


def test_a_segment_that_was_cut_short_is_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with contextlib.closing(opened(tmp_path, "always")) as store:
        store_all(store)
        (path,) = segment_files(tmp_path)
        os.truncate(path, 2 * SIZE + 100)
        found = served(store)
        assert found == {key: bytes_of(key, SIZE) for key in found} and len(found) == 2
        assert store.stats()["get_missed_damaged"] == NUM - 2


def test_pages_without_a_checksum_are_not_believed_by_who_verifies(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path, "off")) as store:
        store_all(store)
    with contextlib.closing(opened(tmp_path, "always")) as store:
        assert served(store) == {}
        store_all(store)
        assert len(served(store)) == NUM


def test_a_folder_put_back_from_a_backup_serves_what_was_stored_then(tmp_path: Path) -> None:
    """Log and segments are of one time: its pages are whole."""
    with contextlib.closing(opened(tmp_path, "always")) as store:
        store_all(store, "older")
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    with contextlib.closing(opened(tmp_path, "always")) as store:
        assert store.delete(KEYS)
        store_all(store)
    shutil.rmtree(tmp_path / "store")
    os.rename(tmp_path / "backup", tmp_path / "store")
    with contextlib.closing(opened(tmp_path, "always")) as store:
        assert served(store) == {key: bytes_of(key + "older", SIZE) for key in KEYS}
