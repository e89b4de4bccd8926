"""`hiradix storage ...` on page files that lie where no server looks for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hiradix.cli import main
from hiradix.storage import PageFingerprint, StorageContext, open_storage
from hiradix.storage.kit.seal import SEAL_BYTES
from tests.contracts.storage import FINGERPRINT, OTHER, PAGE_BYTES, hits, key_of, keys_of, put

OURS, THEIRS = FINGERPRINT.digest()[:32], OTHER.digest()[:32]
ROOM = ["--set", "min_free_space=0"]


def open_files(folder: Path, fingerprint: PageFingerprint = FINGERPRINT) -> Any:
    keys = {"file_storage_path": str(folder), "min_free_space": 0, "deadline_s": 30.0}
    return open_storage("file", StorageContext(fingerprint, keys, PAGE_BYTES))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four pages of ours, two of another model."""
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
    for fingerprint, count in ((FINGERPRINT, 4), (OTHER, 2)):
        store = open_files(tmp_path / "a", fingerprint)
        put(store, keys_of(count))
        store.close()
    return tmp_path / "a"


def run(capsys: Any, *arguments: str) -> tuple[int, list[str]]:
    status = main(["storage", *arguments])
    captured = capsys.readouterr()
    return status, (captured.out + captured.err).splitlines()


def file_of(folder: Path, key: str, fingerprint: str = OURS) -> Path:
    return next(folder.glob(f"v1-{fingerprint}/?/?/{key}.page"))


def another_fan(path: Path) -> Path:
    """The same name in a folder that is another key's."""
    fan = "0" if path.parent.name != "0" else "1"
    return path.parent.with_name(fan) / path.name


def another_name(path: Path) -> Path:
    """A page's name whose place is not this folder."""
    return next(path for path in (path.with_name(f"{at:064x}.page") for at in range(9)) if not is_place(path))


def is_place(path: Path) -> bool:
    from hiradix.storage.backends.file.page_dir import PageDir

    return PageDir(path.parents[3], OURS).path(path.stem) == str(path)


MOVES: dict[str, Callable[[Path], Path]] = {
    "another folder": another_fan,
    "another name": another_name,
    "one folder up": lambda path: path.parent.parent / path.name,
    "the model's folder": lambda path: path.parents[2] / path.name,
    "a folder deeper": lambda path: path.parent / "more" / path.name,
    "a folder of no key": lambda path: path.parents[2] / "pages" / path.name,
}


def moved(folder: Path, how: str, copy: bool) -> str:
    """Move, or copy, a page's file; where it is, as seen from the store's folder."""
    source = file_of(folder, key_of(1))
    target = MOVES[how](source)
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copy2 if copy else shutil.move)(source, target)
    return str(target.relative_to(folder))


@pytest.mark.parametrize("copy", [False, True], ids=["moved", "copied"])
@pytest.mark.parametrize("how", MOVES)
def test_a_misplaced_page_is_named_and_not_counted(folder: Path, capsys: Any, how: str, copy: bool) -> None:
    place = moved(folder, how, copy)
    url, num_left = f"file://{folder}", 4 if copy else 3
    store = open_files(folder)
    assert hits(store, keys_of(4)) == [True, copy, True, True], "the store itself does not read it"
    store.close()

    status, lines = run(capsys, "ls", url)
    marked = [line for line in lines if "misplaced" in line]
    assert status == 0 and len(lines) == num_left + 2 + 1
    wanted = [str(PAGE_BYTES), Path(place).stem, "misplaced:", place]
    assert len(marked) == 1 and marked[0].split()[1:] == wanted

    status, lines = run(capsys, "stat", url)
    counts = {line.split()[0]: line.split()[1] for line in lines[1:4]}
    assert status == 0 and counts == {OURS: str(num_left), THEIRS: "2", "all": str(num_left + 2)}
    assert f"1 page files of {PAGE_BYTES} bytes are misplaced: nobody reads them" in "\n".join(lines)

    status, lines = run(capsys, "verify", url, *ROOM)
    assert status == 1 and len(lines) == 2 and lines[0].startswith("misplaced  ") and place in lines[0]
    assert lines[1] == f"{num_left + 2} pages are whole, 0 are not; 1 are misplaced"

    status, lines = run(capsys, "copy", url, f"file://{folder.parent}/b", "--set-to", "min_free_space=0")
    assert status == 1 and len(lines) == 2 and place in lines[0]
    assert lines[1] == (
        f"copied {num_left + 2} pages; 0 could not be read, 0 could not be written; 1 are misplaced"
    )


@pytest.mark.parametrize("how", MOVES)
def test_clear_says_what_it_removes_and_what_it_leaves(folder: Path, capsys: Any, how: str) -> None:
    place = moved(folder, how, copy=False)
    status, lines = run(capsys, "clear", f"file://{folder}", *ROOM, "--all")
    if (folder / place).exists():
        assert f"left {place}: it is misplaced" in lines and status == 1
    else:
        assert status == 0
    assert {line for line in lines if line.startswith("removed")} == {
        f"removed {3 if (folder / place).exists() else 4} pages of {OURS}", f"removed 2 pages of {THEIRS}"
    }  # fmt: skip


def test_a_model_of_which_only_misplaced_pages_are_left(folder: Path, capsys: Any) -> None:
    for key in keys_of(2):
        path = file_of(folder, key, THEIRS)
        path.rename(path.parents[1] / path.name)
    status, lines = run(capsys, "stat", f"file://{folder}", "--fingerprint", THEIRS)
    assert lines[1].split() == ["all", "0", "0"]
    assert f"2 page files of {2 * PAGE_BYTES} bytes are misplaced" in lines[2]
    status, lines = run(capsys, "clear", f"file://{folder}", *ROOM, "--fingerprint", THEIRS)
    assert status == 1 and len(lines) == 3 and sum("is misplaced" in line for line in lines) == 2
    assert run(capsys, "verify", f"file://{folder}", *ROOM, "--fingerprint", OURS)[0] == 0


def test_a_page_under_another_models_name_is_damaged(folder: Path, capsys: Any) -> None:
    """It lies where a page of that name belongs: only its seal says that it is none."""
    source = file_of(folder, key_of(3))
    target = folder / str(source.relative_to(folder)).replace(OURS, THEIRS)
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    status, lines = run(capsys, "verify", f"file://{folder}", *ROOM)
    assert status == 1 and lines == [f"damaged  {THEIRS}  {key_of(3)}", "5 pages are whole, 1 are not"]


def test_files_that_only_look_alike_are_left_alone(folder: Path, capsys: Any) -> None:
    """Short files, links and names of no page are nobody's pages."""
    (folder / f"v1-{OURS}" / "notes.page").mkdir()
    (folder / f"v1-{OURS}" / "a b.page").write_bytes(b"x" * (SEAL_BYTES + PAGE_BYTES))
    (folder / f"v1-{OURS}" / f"{key_of(9)}.page").symlink_to(file_of(folder, key_of(0)))
    (folder / "elsewhere").mkdir()
    shutil.copy(file_of(folder, key_of(0)), folder / "elsewhere")
    assert run(capsys, "verify", f"file://{folder}", *ROOM) == (0, ["6 pages are whole, 0 are not"])
