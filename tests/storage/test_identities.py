"""What fingerprints stand for, remembered for people."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from hiradix.apps.storage_tools import main
from hiradix.storage import PageFingerprint, StorageContext, open_storage
from hiradix.storage.identities import differences, recall, remember
from hiradix.storage.inventory import stored_fingerprint

MINE = PageFingerprint("tiny", "r1", "float32", "page_first", 32, shape=(2, 2, 32, 32))


def test_a_fingerprint_is_remembered_by_the_name_stores_show(tmp_path: Path) -> None:
    remember(MINE, tmp_path)
    fields = recall(MINE.digest()[:32], tmp_path)
    assert fields is not None and fields["page_size"] == 32
    other = dataclasses.replace(MINE, page_size=64, model_id="other")
    assert differences(fields, dataclasses.asdict(other) | {"shape": [2, 2, 32, 32]}) == {
        "model_id": ("tiny", "other"),
        "page_size": (32, 64),
    }


def test_stand_ins_unwritable_folders_and_foreign_names_are_left_alone(tmp_path: Path) -> None:
    remember(stored_fingerprint("0" * 32), tmp_path)
    (tmp_path / "file").write_text("")
    remember(MINE, tmp_path / "file" / "below")
    assert recall("../../etc/passwd", tmp_path) is None and recall("1" * 32, tmp_path) is None
    (tmp_path / f"{'2' * 32}.json").write_text("[]")
    assert recall("2" * 32, tmp_path) is None
    assert not list(tmp_path.glob("0*"))


def test_a_user_without_a_home_opens_his_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number nobody has a name for."""

    def nobody(*_: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    keys = {"file_storage_path": str(tmp_path), "deadline_s": 30.0}
    store = open_storage("file", StorageContext(MINE, keys, 64))
    assert store.put(["a" * 64], [[memoryview(bytearray(64))]]) == [True]
    assert recall(MINE.digest()[:32]) is None
    store.close()


def test_stat_says_why_one_store_has_pages_that_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keys = {"file_storage_path": str(tmp_path / "pages"), "deadline_s": 30.0}
    for fingerprint, count in ((MINE, 3), (dataclasses.replace(MINE, layout="page_first_direct"), 1)):
        store = open_storage("file", StorageContext(fingerprint, keys, 64))
        names = [f"{number:064x}" for number in range(count)]
        assert all(store.put(names, [[memoryview(bytearray(64))] for _ in names]))
        store.close()
    assert main(["stat", f"file://{tmp_path / 'pages'}"]) == 0
    shown = capsys.readouterr().out
    assert "model_id=tiny" in shown and "layout 'page_first_direct', not 'page_first'" in shown


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.storage.identities.MOST", 20)
    marks = [dataclasses.replace(MINE, revision=f"r{number}") for number in range(60)]
    for number, mark in enumerate(marks):
        remember(mark, tmp_path)
        os.utime(tmp_path / f"{mark.digest()[:32]}.json", (number, number))
        assert len(list(tmp_path.iterdir())) <= 20
        assert recall(mark.digest()[:32], tmp_path) is not None
    assert recall(marks[0].digest()[:32], tmp_path) is None
