"""A folder that cannot be written serves the pages in it, says so once, and refuses others by that reason."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import Unreachable
from hiradix.storage import StorageContext, open_storage
from hiradix.storage.backends.disk.record import RECORD_BYTES, Kind, Record, header_of, pack
from hiradix.storage.generations import COMPARED_PUTS
from hiradix.storage.guard.breaker import BreakerState
from tests.contracts.storage import FINGERPRINT, OTHER, PAGE_BYTES, hits, keys_of, put
from tests.storage.read_only_folders import in_read_only_mount, looks, read_only
from tests.storage.test_generations import Deployments, page_of, witness_of
from tests.storage.test_removed import BACKENDS, opened

OLD, NEW = keys_of(8), keys_of(4, start=100)


def filled(name: str, folder: Path) -> None:
    with contextlib.closing(opened(name, folder)) as store:
        assert all(put(store, OLD))


def said(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(what in record.getMessage() for record in caplog.records)


def test_a_read_only_mount_serves(tmp_path: Path) -> None:
    for name in BACKENDS:
        filled(name, tmp_path / name)
    before = looks(tmp_path)
    found = json.loads(in_read_only_mount(tmp_path, "tests.storage.read_only_child", *BACKENDS))
    assert found == {name: [8, 0, 4, 1.0] for name in BACKENDS}
    assert looks(tmp_path) == before


@pytest.mark.parametrize("name", BACKENDS)
def test_a_folder_that_cannot_be_written_serves(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "pages"
    filled(name, folder)
    before = looks(folder)
    with (
        caplog.at_level(logging.INFO),
        read_only(folder) as tried,
        contextlib.closing(opened(name, folder, touch_interval_s=0)) as store,
    ):
        num_tried = len(tried)
        assert said(caplog, "is read_only: ") == 1
        for _ in range(20):
            assert all(hits(store, OLD)) and not any(put(store, NEW)) and all(put(store, OLD))
        assert not store.delete(OLD) and not store.clear() and all(hits(store, OLD)) and store.ping()
        figures = store.stats()
        assert (figures["read_only"], figures["put_missed_read_only"]) == (1.0, 80)
        assert figures["backend_put_read_only"] == 80 and store.state is BreakerState.CLOSED
        assert len(tried) == num_tried, "what cannot be written is not tried again and again"
        assert said(caplog, "is read_only: ") == 1 and said(caplog, "failed") == 2, "of delete and clear"
    assert looks(folder) == before
    with contextlib.closing(opened(name, folder)) as store:
        assert all(put(store, NEW)) and all(hits(store, NEW)) and store.stats()["read_only"] == 0


@pytest.mark.parametrize("name", BACKENDS)
def test_a_folder_that_becomes_read_only_serves_on(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the kernel mounts a file system with a fault: until it can be written again."""
    folder = tmp_path / "pages"
    filled(name, folder)
    with contextlib.closing(opened(name, folder, touch_interval_s=0)) as store:
        with read_only(folder):
            for _ in range(10):
                assert all(hits(store, OLD)) and not any(put(store, NEW))
            figures = store.stats()
            assert (figures["read_only"], figures["put_missed_read_only"]) == (1.0, 40)
            assert said(caplog, "is read_only: ") == 1 and store.state is BreakerState.CLOSED
        assert all(put(store, NEW)) and all(hits(store, [*OLD, *NEW]))
        assert store.stats()["read_only"] == 0


@pytest.mark.parametrize("name", BACKENDS)
def test_a_damaged_page_in_a_read_only_folder_is_read_once(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    filled(name, folder)
    files = [path for path in folder.rglob("*") if path.suffix in (".page", ".pages", ".bin")]
    largest = max(files, key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(100)
        file.write(bytes(64))
    with read_only(folder), contextlib.closing(opened(name, folder)) as store:
        for _ in range(3):
            assert hits(store, OLD).count(False) == 1
        bad = OLD[hits(store, OLD).index(False)]
        assert store.exists([bad]) == 0 and put(store, [bad]) == [False]
        assert store.stats()["backend_read_damaged"] == store.stats()["get_missed_damaged"] == 1


def test_what_others_have_in_a_read_only_folder_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's model may be in it, whose pages we have no right to list."""
    filled("file", tmp_path)
    with contextlib.closing(opened("file", tmp_path, OTHER)) as store:
        assert all(put(store, OLD))
    scandir, theirs = os.scandir, OTHER.digest()[:32]

    def allowed(path: Any) -> Any:
        if theirs in os.fspath(path):
            raise PermissionError(errno.EACCES, "not yours", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", allowed)
    with read_only(tmp_path), contextlib.closing(opened("file", tmp_path)) as store:
        assert all(hits(store, OLD)) and store.stats()["backend_files"] == len(OLD)


def moved(raw: bytes) -> bytes:
    """Its writer was about to put another log in its place."""
    (number, _), at = header_of(raw) or (0, 0), len(raw) // RECORD_BYTES
    return raw + pack([Record(Kind.MOVED)], number, at)


@pytest.mark.parametrize(
    ("left", "num_there"),
    [
        (moved, 8), (lambda raw: raw + raw[:50], 8), (lambda raw: raw + bytes(960), 8),
        (lambda raw: raw[:-500], 2),
    ],
    ids=["log announced", "half a record", "blocks never written", "end lost"],
)  # fmt: skip
def test_a_read_only_store_that_was_not_closed_serves(
    left: Callable[[bytes], bytes], num_there: int, tmp_path: Path
) -> None:
    """What its writer left when it died cannot be cut off there."""
    folder = tmp_path / "pages"
    filled("disk", folder)
    (folder / "log").write_bytes(left((folder / "log").read_bytes()))
    before = looks(folder)
    with read_only(folder), contextlib.closing(opened("disk", folder)) as store:
        for _ in range(3):
            assert sum(hits(store, OLD)) == num_there and store.exists(OLD) in (0, 8)
            assert not any(put(store, NEW))
        assert store.state is BreakerState.CLOSED
    assert looks(folder) == before


def test_a_read_only_store_without_a_page_is_opened_as_asked(tmp_path: Path) -> None:
    """What the kernel can do is tried with its log."""
    folder = tmp_path / "pages"
    filled("disk", folder)
    for path in folder.glob("segment-*"):
        path.unlink()
    with (
        read_only(folder),
        contextlib.closing(opened("disk", folder, io_engine="threads")) as threads,
        contextlib.closing(opened("disk", folder)) as auto,
    ):
        assert not any(hits(threads, OLD))
        with contextlib.closing(opened("disk", tmp_path / "other")) as other:
            same = ("backend_io_uring", "backend_direct_io")
            assert [auto.stats()[name] for name in same] == [other.stats()[name] for name in same]


def test_a_read_only_folder_without_a_store_is_one_to_wait_for(tmp_path: Path) -> None:
    """Another machine may make it there."""
    (tmp_path / "pages").mkdir()
    with read_only(tmp_path / "pages"), pytest.raises(Unreachable, match="there is no store in it"):
        opened("disk", tmp_path / "pages")


@pytest.mark.parametrize("fixed", ["upper", "lower", "both"])
def test_halves_of_a_tier(fixed: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"deadline_s": 30.0}
    for half, backend in (("upper", "disk"), ("lower", "file")):
        more = {"backend": backend, f"{backend}_storage_path": str(tmp_path / half), "min_free_space": 0}
        keys[half] = {"deadline_s": 30.0, **more}
        filled(backend, tmp_path / half)
    context = StorageContext(FINGERPRINT, keys, PAGE_BYTES)
    with contextlib.ExitStack() as stack:
        for half in ("upper", "lower"):
            if fixed in (half, "both"):
                stack.enter_context(read_only(tmp_path / half))
        store = stack.enter_context(contextlib.closing(open_storage("tier", context)))
        assert all(hits(store, OLD)) and put(store, NEW) == [fixed != "both"] * 4
        assert hits(store, NEW) == [fixed != "both"] * 4, "and nothing is promoted to what takes none"
        figures = store.stats()
        halves = [figures[f"backend_{half}_read_only"] for half in ("upper", "lower")]
        assert halves == [float(fixed in (half, "both")) for half in ("upper", "lower")]
        assert figures["read_only"] == float(fixed == "both")
        assert figures.get("put_missed_read_only", 0) == 4 * (fixed == "both")
        assert store.state is BreakerState.CLOSED


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("backend", ["file", "disk"])
def test_generations_are_read_and_none_is_made(
    backend: str, asked: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same weights' pages are served, others' are not, whether or not the engine computes a canary."""
    folder = tmp_path / "pages"
    first = Deployments(folder, backend)
    assert all(first.asked("a").put())
    first.restart()
    before = looks(folder)
    with read_only(folder) as tried:
        engines = Deployments(folder, backend)
        witness = {name: witness_of(name) if asked else None for name in "ab"}
        same, other = (engines.open(name, witness=witness[name]) for name in "ab")
        num_tried = len(tried)
        for _ in range(COMPARED_PUTS + 3):
            same.put()
            assert not any(other.put()) and other.found() == 0
        assert same.reads_own() and same.store.stats()["canary_adopted"] == 1
        figures = other.store.stats()
        assert (figures["canary_adopted"], figures["canary_own"]) == (0, 0)
        assert figures["put_missed_read_only"] == 8 * (COMPARED_PUTS + 3)
        assert len(tried) == num_tried and said(caplog, "other weights have computed") == 1
        assert said(caplog, "failed") == 0
        engines.restart()
    assert looks(folder) == before and page_of("a", OLD[0]) != page_of("b", OLD[0])
