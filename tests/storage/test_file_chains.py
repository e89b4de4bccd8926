"""Chains that the guard hands to the file backend in pieces: what leaves, leaves from the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import Batch, GuardedStorage, StorageContext, open_storage
from hiradix.storage.backends.file.page_dir import footprint
from hiradix.storage.kit.seal import SEAL_BYTES
from tests.contracts.storage import FINGERPRINT, PAGE_BYTES, hits, keys_of, put

ROOM = 64
NAMING = ["hiradix", "sglang"]
CUT = [4, 16, 40]
"""Pages that go to the backend at once: fewer of them the longer a page is."""


def open_files(folder: Path, pages_at_once: int, **config: Any) -> GuardedStorage:
    keys = {
        "file_storage_path": str(folder / "store"), "min_free_space": 0, "deadline_s": 60.0, "num_workers": 1,
        "max_size": ROOM * footprint(SEAL_BYTES + PAGE_BYTES), "staging_size": pages_at_once * PAGE_BYTES,
    } | config  # fmt: skip
    return open_storage("file", StorageContext(FINGERPRINT, keys, PAGE_BYTES))


def prefix(store: Any, keys: list[str]) -> int:
    """How many leading pages are there; fails where one behind the first gap is."""
    found = hits(store, keys)
    count = found.count(True)
    assert found == [True] * count + [False] * (len(keys) - count), "pages that no lookup gets to take room"
    return count


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize("naming", NAMING)
def test_a_chain_longer_than_the_room_keeps_its_head(tmp_path: Path, cut: int, naming: str) -> None:
    """Its later pieces drove out its earlier ones, and nothing of it was left to find."""
    store = open_files(tmp_path, cut, naming=naming)
    put(store, keys_of(20, 900))
    stored = put(store, keys_of(150))
    assert prefix(store, keys_of(150)) == stored.count(True) == ROOM
    store.close()


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("cut", CUT)
def test_a_chain_leaves_from_its_end(tmp_path: Path, cut: int, reopened: bool) -> None:
    store = open_files(tmp_path, cut)
    assert all(put(store, keys_of(60)))
    for number in range(4):
        if reopened:
            store.close()
            store = open_files(tmp_path, cut)
        assert all(put(store, keys_of(10, 1000 + 10 * number)))
        assert 20 <= prefix(store, keys_of(60)[: 60 - 10 * number]) <= 60 - 10 * number
    store.close()


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize("naming", NAMING)
def test_a_chain_that_is_read_leaves_from_its_end(tmp_path: Path, cut: int, naming: str) -> None:
    store = open_files(tmp_path, cut, naming=naming)
    assert all(put(store, keys_of(30))) and all(put(store, keys_of(34, 500)))
    assert all(hits(store, keys_of(30)))
    assert all(put(store, keys_of(40, 1000)))
    assert 20 <= prefix(store, keys_of(30)) <= 30 and not any(hits(store, keys_of(34, 500)))
    store.close()


@pytest.mark.parametrize("cut", CUT)
def test_a_directory_that_is_read_anew_has_the_order_of_use(tmp_path: Path, cut: int) -> None:
    """As it is when another process has written to it: files and memory together say what was used when."""
    store = open_files(tmp_path, cut)
    assert all(put(store, keys_of(60))) and all(hits(store, keys_of(60)))
    other = open_files(tmp_path, cut)
    assert all(put(other, keys_of(24, 700)))
    assert all(put(store, keys_of(10, 1000)))
    found = hits(store, keys_of(60))
    assert found == sorted(found, reverse=True)
    other.close()
    store.close()


def in_calls(call: Any, store: Any, keys: list[str], size: int) -> list[bool]:
    """As a controller does, which gives storage so many pages at once and says that they are one chain's."""
    whole, done = Batch.of(keys), []
    for at in range(0, len(keys), size):
        done += call(store, whole[at : at + size])
    return done


@pytest.mark.parametrize("naming", NAMING)
def test_a_chain_of_several_calls_leaves_from_its_end(tmp_path: Path, naming: str) -> None:
    """Each call was a chain of its own: the first left first, and nobody found the others without it."""
    store = open_files(tmp_path, 40, naming=naming)
    assert all(in_calls(put, store, keys_of(60), 20))
    for number in range(4):
        assert all(put(store, keys_of(10, 1000 + 10 * number)))
        assert 20 <= prefix(store, keys_of(60)[: 60 - 10 * number]) <= 60 - 10 * number
    store.close()


@pytest.mark.parametrize("naming", NAMING)
def test_a_chain_read_in_several_calls_leaves_from_its_end(tmp_path: Path, naming: str) -> None:
    store = open_files(tmp_path, 40, naming=naming)
    assert all(in_calls(put, store, keys_of(60), 20))
    assert all(in_calls(hits, store, keys_of(60), 20))
    assert all(put(store, keys_of(30, 1000)))
    assert 20 <= prefix(store, keys_of(60)) <= 34
    store.close()


@pytest.mark.parametrize("naming", NAMING)
def test_a_chain_of_several_calls_is_in_order_for_the_next_process(tmp_path: Path, naming: str) -> None:
    store = open_files(tmp_path, 40, naming=naming)
    assert all(in_calls(put, store, keys_of(60), 20))
    store.close()
    store = open_files(tmp_path, 40, naming=naming)
    assert all(put(store, keys_of(20, 1000)))
    assert 30 <= prefix(store, keys_of(60)) <= 44
    store.close()


@pytest.mark.parametrize("naming", NAMING)
def test_a_chain_of_calls_longer_than_the_room_keeps_its_head(tmp_path: Path, naming: str) -> None:
    store = open_files(tmp_path, 40, naming=naming)
    in_calls(put, store, keys_of(160), 16)
    assert hits(store, keys_of(160)).index(False) >= ROOM - 20
    store.close()


def extended(store: GuardedStorage, keys: list[str], turn: int, others: int) -> None:
    """A conversation that goes on: each turn's pages are put by themselves, and other pages in between."""
    for start in range(0, len(keys), turn):
        front = keys[start - 1] if start else ""
        assert all(put(store, Batch.of(keys[start : start + turn], after=front)))
        assert all(put(store, keys_of(others, 5000 + 100 * start)))


@pytest.mark.parametrize("naming", NAMING)
def test_a_conversation_that_is_only_ever_extended_leaves_from_its_end(tmp_path: Path, naming: str) -> None:
    """Its first page was the oldest of all and left first, and nobody found what had come later."""
    store = open_files(tmp_path, 40, naming=naming)
    extended(store, keys_of(30), turn=3, others=8)
    assert prefix(store, keys_of(30)) == 30
    store.close()


@pytest.mark.parametrize("naming", NAMING)
def test_a_turn_that_is_not_found_does_not_keep_the_turns_before_it(tmp_path: Path, naming: str) -> None:
    """They leave when it does, not later: what others used since stays."""
    store = open_files(tmp_path, 40, naming=naming)
    extended(store, keys_of(20), turn=5, others=0)
    assert all(put(store, keys_of(40, 5000)))
    assert all(put(store, keys_of(20, 7000)))
    assert prefix(store, keys_of(20)) <= 4 and all(hits(store, keys_of(40, 5000)))
    store.close()


@pytest.mark.parametrize("naming", NAMING)
def test_no_page_makes_room_for_what_follows_it(tmp_path: Path, naming: str) -> None:
    """A conversation as long as the room: its next turn drove out its first pages, or those before itself."""
    store = open_files(tmp_path, 40, naming=naming)
    assert all(in_calls(put, store, keys_of(60), 20))
    put(store, Batch.of(keys_of(10, 60), after=keys_of(60)[-1]))
    assert prefix(store, keys_of(70)) >= 60
    store.close()
