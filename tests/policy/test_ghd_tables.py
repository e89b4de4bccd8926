"""GHD's tables: the index against a search, and what is read back from a file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from hiradix.errors import ConfigError
from hiradix.policy.class_ranks import BUCKETS
from hiradix.policy.ghd_tables import CONVERSATION, EDGES, MAX_CLASSES, SHARED, ClassTables
from hiradix.policy.segments import Segments


def taught() -> ClassTables:
    tables = ClassTables()
    segments = Segments(tables)
    often = tables.class_of((CONVERSATION, 1, 2))
    never = tables.class_of((CONVERSATION, 0, 0, 3))
    clock = 0
    for _ in range(300):
        clock += 5000
        number = segments.start(often, 4, clock)
        segments.start(never, 4, clock)
        segments.use(number, 3000, 4)
    segments.count(clock)
    tables.recompute()
    return tables


def test_what_is_used_again_is_worth_more_than_what_is_not() -> None:
    tables = taught()
    often, never = tables.class_of((CONVERSATION, 1, 2)), tables.class_of((CONVERSATION, 0, 0, 3))
    assert tables.index[often, 0] > 20 * tables.index[never, 0] > 0


def test_a_segment_is_one_vote_per_bucket_whatever_its_pages() -> None:
    tables = ClassTables()
    segments = Segments(tables)
    for pages in (1, 7, 1000):
        segments.use(segments.start(SHARED, pages, 0), 100, pages)
    segments.count(50_000)
    assert tables.used[SHARED, 0] == pytest.approx(3)
    assert tables.exposed[SHARED, 0] == pytest.approx(3)
    assert tables.exposed[SHARED, 1:].sum() == pytest.approx(0)
    assert tables.started[SHARED, 0] == 3


@pytest.mark.parametrize("counted_between", [False, True])
def test_votes_do_not_depend_on_when_they_are_counted(counted_between: bool) -> None:
    tables = ClassTables()
    segments = Segments(tables)
    number = segments.start(SHARED, 2, 0)
    for clock in range(1000, 20_000, 1000):
        if counted_between:
            segments.count(clock)
        if clock == 9000:
            segments.use(number, 9000, 1)
    segments.count(20_000)
    bucket = int(np.searchsorted(EDGES, 9000, side="right")) - 1
    passed = int(np.searchsorted(EDGES, 20_000, side="right")) - 1
    assert tables.used[SHARED].tolist() == [0.5 * (b == bucket) for b in range(BUCKETS)]
    half_after = [1.0] * bucket + [1.0] + [0.5] * (passed - bucket - 1) + [0.0] * (BUCKETS - passed)
    assert tables.exposed[SHARED].tolist() == half_after


def test_segments_are_bounded_though_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client says keep_alive as often as it likes between two requests: the older half is forgotten."""
    monkeypatch.setattr("hiradix.policy.segments.CAPACITY", 64)
    tables = ClassTables()
    segments, waiting, last = Segments(tables), [], -1
    for clock in range(1000):
        segments.forget(max(last, 0), 1)
        last = segments.start(SHARED, 1, clock)
        waiting.append(len(segments._new) // 3 + len(segments._gone) // 2)
        assert len(segments) <= 64 + 32
    assert max(waiting) <= 64
    segments.use(last, 100, 1)
    segments.count(2000)
    assert tables.used[SHARED, 0] == 1


def test_classes_are_bounded_and_fall_back_to_their_parent() -> None:
    tables = ClassTables()
    numbers = [tables.class_of((CONVERSATION, i)) for i in range(2 * MAX_CLASSES)]
    assert len(tables) == MAX_CLASSES and numbers[-1] == CONVERSATION


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_new_class_begins_with_its_parents_index(is_asked: bool) -> None:
    """Also where the index is still to be made, and of the classes that there were then."""
    tables, alone = taught(), taught()
    parent = tables.class_of((CONVERSATION, 1))
    if is_asked:
        assert tables.index[parent, 0] > 0
    child = tables.class_of((CONVERSATION, 1, 7, 2))
    between = tables.class_of((CONVERSATION, 1, 7))
    assert parent < between < child
    for number in (between, child):
        assert np.array_equal(tables.index[number], tables.index[parent])
        assert tables.ranks(number).index == tables.ranks(parent).index
        assert tables.ranks(number).falls == tables.ranks(parent).falls
    assert np.array_equal(tables.index[: len(alone)], alone.index[: len(alone)])
    tables.class_of((CONVERSATION, 1, 7, 3))
    tables.recompute()
    assert not np.array_equal(tables.index[child], tables.index[parent])


def test_tables_come_back_as_they_were_saved(tmp_path: Path) -> None:
    tables, fresh = taught(), ClassTables()
    tables.save(tmp_path / "deep" / "tables.npz")
    fresh.load(tmp_path / "deep" / "tables.npz")
    assert fresh.keys == tables.keys
    assert np.array_equal(fresh.index, tables.index) and np.array_equal(fresh.used, tables.used)


def test_two_ranks_may_save_to_one_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other, write = tmp_path / "tables.npz", ClassTables(), np.savez_compressed

    def interrupted(file: object, **held: object) -> None:
        monkeypatch.setattr(np, "savez_compressed", write)
        other.save(path)
        write(file, **held)

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    taught().save(path)
    fresh = ClassTables()
    fresh.load(path)
    assert fresh.keys == taught().keys != other.keys
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_saved_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tables.npz"
    ClassTables().save(path)
    before = path.read_bytes()

    def full(file: object, **held: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="space"):
        taught().save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def _without(name: str, held: dict) -> dict:
    return {key: value for key, value in held.items() if key != name}


DAMAGE = {
    "version": lambda h: h | {"version": np.int64(99)},
    "edges": lambda h: h | {"edges": h["edges"] + 1},
    "nan": lambda h: h | {"used": np.full_like(h["used"], np.nan)},
    "negative": lambda h: h | {"exposed": h["exposed"] - 1e9},
    "too many": lambda h: h | {"used": np.full_like(h["used"], 1e308)},
    "shape": lambda h: h | {"started": h["started"][:, 1:]},
    "orphan": lambda h: h | {"keys": np.where(h["keys"] == 1, 9, h["keys"])},
    "missing": lambda h: _without("used", h),
    "pickled": lambda h: h | {"used": np.array([object()] * 3, object)},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_and_changes_nothing(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.npz"
    taught().save(path)
    with np.load(path) as file:
        held = {name: file[name] for name in file.files}
    np.savez(path, **DAMAGE[damage](held))
    tables = ClassTables()
    with pytest.raises(ConfigError, match="tables.npz"):
        tables.load(path)
    assert len(tables) == 3


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04junk", b"not a zip at all"])
def test_what_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tables.npz"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="cannot be read"):
        ClassTables().load(path)


def test_whatever_byte_is_damaged_the_tables_are_read_or_refused(tmp_path: Path) -> None:
    """Of the archive too: its flags may say encrypted, or compressed in a way that nobody knows."""
    path = tmp_path / "tables.npz"
    ClassTables().save(path)
    whole = path.read_bytes()
    refused = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            ClassTables().load(path)
        except ConfigError:
            refused += 1
    assert refused > len(whole) // 2


def test_a_size_that_no_memory_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tables.npz"
    with zipfile.ZipFile(path, "w") as archive, archive.open("used.npy", "w") as member:
        header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 50, BUCKETS)}
        np.lib.format.write_array_header_1_0(member, header)
    with pytest.raises(ConfigError, match="cannot be read"):
        ClassTables().load(path)
