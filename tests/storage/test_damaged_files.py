"""Damage to a page's file, of our naming or SGLang's: a miss, counted and said once, never wrong bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.storage import PAGE_BYTES, blank, bytes_of, content, key_of, keys_of, put
from tests.storage.test_removed import opened

KEYS = keys_of(4)
Damage = Callable[[Path, Path, bytes], None]


def overwritten(path: Path, _: Path, __: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"\xee" * 64)


def zeroed(path: Path, _: Path, __: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(bytes(4000))


def exchanged(path: Path, other: Path, _: bytes) -> None:
    os.rename(path, path.with_suffix(".tmp"))
    os.rename(other, path)
    os.rename(path.with_suffix(".tmp"), other)


def holed(path: Path, _: Path, __: bytes) -> None:
    size = path.stat().st_size
    os.truncate(path, 100)
    os.truncate(path, size)


def older(path: Path, _: Path, before: bytes) -> None:
    """What lay under that name in a backup, put back in place."""
    path.write_bytes(before)


@pytest.mark.parametrize("name", ["file", "sglang"])
@pytest.mark.parametrize("damage", [overwritten, zeroed, exchanged, holed, older])
@pytest.mark.parametrize("again", ["running", "opened anew"])
def test_damage_is_a_miss_that_is_counted_and_said_once(
    name: str, damage: Damage, again: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for checksum in (True, False):
        folder = tmp_path / str(checksum)
        store = opened(name, folder, checksum=checksum)
        assert all(put(store, KEYS))
        paths = [next(folder.rglob(f"{key}*")) for key in KEYS[:2]]
        before = paths[0].read_bytes()[:-PAGE_BYTES] + bytes_of(key_of(77))
        damage(*paths, before)
        if again == "opened anew":
            store.close()
            store = opened(name, folder, checksum=checksum)
        with contextlib.closing(store):
            for times in range(3):
                into = [blank() for _ in KEYS]
                ok = store.get(KEYS, into)
                wrong = [at for at, key in enumerate(KEYS) if ok[at] and content(into[at]) != bytes_of(key)]
                if not checksum:
                    is_named = name == "file" and damage is exchanged
                    assert wrong or is_named, "this damage would not be seen: it proves nothing"
                    continue
                num_bad = ok.count(False)
                assert not wrong and num_bad == (2 if damage is exchanged else 1)
                if not times:
                    assert store.stats()["get_missed_damaged"] == num_bad
            if checksum:
                assert sum(" is damaged: " in record.getMessage() for record in caplog.records) == 1
                assert all(put(store, KEYS)) and store.exists(KEYS) == 4
                into = [blank() for _ in KEYS]
                assert all(store.get(KEYS, into)) and list(map(content, into)) == list(map(bytes_of, KEYS))
