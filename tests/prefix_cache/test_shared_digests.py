"""Processes of one host read each file of weights once between them, and trust nothing that has changed."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import resource
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hiradix.prefix_cache import origin_of, shared_digests
from hiradix.prefix_cache import weight_files as wf
from hiradix.prefix_cache.shared_digests import digests_of

SHOWS_CHANGES = shared_digests._shows_changes
OLD_S = 1_000_000_000
"""When files here were written: a file of this moment is not shared."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of several files, and a user's cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shared_digests, "SETTLED_S", 0.0)
    monkeypatch.setattr(shared_digests, "_shows_changes", lambda stream: True)  # tests may be in memory
    monkeypatch.setattr(wf, "_SHARED_BYTES", 0)
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.safetensors").write_bytes(bytes([number]) * 5000)
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often parts of each file are read."""
    counts: Counter[str] = Counter()
    part_digest = wf._part_digest

    def counted(file: Path, begin: int, alive: Callable[[], None]) -> bytes:
        counts[file.name] += 1
        return part_digest(file, begin, alive)

    monkeypatch.setattr(wf, "_part_digest", counted)
    return counts


def notes() -> list[Path]:
    return sorted(shared_digests.folder().iterdir())


def test_each_file_is_read_once_a_host(folder: Path, read: Counter[str]) -> None:
    found = [origin_of(str(folder)) for _ in range(4)]
    assert len(set(found)) == 1
    assert set(read.values()) == {1} and len(read) == 3
    assert all(note.stat().st_mode & 0o077 == 0 for note in notes())


def test_ranks_that_start_together_read_each_file_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As processes of their own; which of them reads which file is the machine's."""
    part_digest, log = wf._part_digest, tmp_path / "read"

    def logged(file: Path, begin: int, alive: Callable[[], None]) -> bytes:
        with log.open("a") as lines:
            lines.write(f"{file.name}\n")
        return part_digest(file, begin, alive)

    monkeypatch.setattr(wf, "_part_digest", logged)
    context = multiprocessing.get_context("fork")
    told, together = context.SimpleQueue(), context.Barrier(4)

    def rank() -> None:
        together.wait(100)
        told.put(origin_of(str(folder)).revision)

    ranks = [context.Process(target=rank) for _ in range(4)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(100)
    assert [one.exitcode for one in ranks] == [0] * 4
    assert {told.get() for _ in ranks} == {origin_of(str(folder)).revision}
    assert Counter(log.read_text().split()) == {f"{number}.safetensors": 1 for number in range(3)}


def test_who_finds_a_file_being_read_waits_for_its_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, made = folder / "0.safetensors", []
    begun, waited, found = threading.Event(), threading.Event(), []

    def make(one: Path, alive: Callable[[], None]) -> bytes:
        made.append(one)
        begun.set()
        assert waited.wait(100)
        return b"digest"

    def sleep(seconds: float) -> None:
        waited.set()
        real_sleep(seconds)

    real_sleep = shared_digests.time.sleep
    monkeypatch.setattr(shared_digests.time, "sleep", sleep)
    first = threading.Thread(target=lambda: found.append(digests_of([file], make)))
    first.start()
    assert begun.wait(100)
    assert digests_of([file], make) == {file: b"digest"}
    first.join(100)
    assert found == [{file: b"digest"}] and made == [file]


def test_nobody_waits_for_one_who_shows_no_life(
    folder: Path, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    """A rank that was stopped, or whose disk hangs."""
    expected = origin_of(str(folder))
    note = notes()[0]
    with note.open("r+b") as held:
        held.truncate()
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(shared_digests, "SILENT_S", 0.0)
        assert origin_of(str(folder)) == expected
        assert sorted(read.values()) == [1, 1, 2] and note.stat().st_size == 0, "its note is the holder's"
    assert origin_of(str(folder)) == expected, "who died has let go of it"
    assert origin_of(str(folder)) == expected
    assert sorted(read.values()) == [1, 1, 3]


def rewritten(file: Path) -> None:
    """Other bytes in place, with the size and the time that were there."""
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"!")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replaced(file: Path) -> None:
    """Another file in its place, with the same size and time."""
    stat, other = file.stat(), file.with_suffix(".new")
    other.write_bytes(b"?" * stat.st_size)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)


def grown(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"!")


@pytest.mark.parametrize("change", [rewritten, replaced, grown])
def test_a_file_that_was_changed_is_read_again(
    folder: Path, read: Counter[str], change: Callable[[Path], None]
) -> None:
    before = origin_of(str(folder))
    change(folder / "1.safetensors")
    assert origin_of(str(folder)) != before
    assert read == {"0.safetensors": 1, "1.safetensors": 2, "2.safetensors": 1}


def test_times_that_say_nothing_are_not_trusted_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    """An image mounted in the place of another: sizes, times and numbers of files may be the same in both."""
    monkeypatch.setattr(shared_digests, "_stat_of", lambda stream: ("one", "and the same"))
    before = origin_of(str(folder))
    rewritten(folder / "1.safetensors")
    assert origin_of(str(folder)) != before and read["1.safetensors"] == 2


def test_a_file_that_changes_while_it_is_read_is_not_noted(folder: Path, read: Counter[str]) -> None:
    file = folder / "0.safetensors"

    def make(one: Path, alive: Callable[[], None]) -> bytes:
        grown(one)
        return b"of what was there"

    assert digests_of([file], make) == {file: b"of what was there"}
    assert digests_of([file], lambda one, alive: b"now") == {file: b"now"}


def test_a_file_of_this_moment_is_not_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second change within one tick of the file system's clock would not show."""
    monkeypatch.setattr(shared_digests, "SETTLED_S", 1e9)
    origin_of(str(folder))
    assert not shared_digests.folder().exists() or not notes()


AT = (3 << 19) + (8 << 10)
"""Of a file of 16 MiB a place between the pieces that are looked at."""


def mapped(file: Path) -> mmap.mmap:
    with file.open("r+b") as stream:
        return mmap.mmap(stream.fileno(), 0)


def test_a_change_of_a_mapped_file_is_seen_whenever_it_comes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is not written back yet can be written to again, and the file's times stay as they are."""
    monkeypatch.setattr(shared_digests, "_shows_changes", SHOWS_CHANGES)
    file = folder / "1.bin"
    file.write_bytes(bytes(1 << 24))
    with mapped(file) as memory:
        memory[AT] = 1
        before = origin_of(str(folder))
        memory[AT + 1] = 1
        assert origin_of(str(folder)) != before


def test_a_file_system_in_memory_shows_no_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is written there to a mapped file changes none of its times."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shared_digests, "SETTLED_S", 0.0)
    monkeypatch.setattr(wf, "_SHARED_BYTES", 0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        file = Path(name) / "1.bin"
        file.write_bytes(bytes(1 << 24))
        with mapped(file) as memory:
            memory[AT] = 1
            before = origin_of(name)
            memory[AT + 1] = 1
            assert origin_of(name) != before


def test_a_host_that_says_nothing_of_its_start_costs_the_sharing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    monkeypatch.setattr(shared_digests, "BOOT_ID", Path("/proc/no such file"))
    assert origin_of(str(folder)) == origin_of(str(folder)) and set(read.values()) == {2}


def test_the_lock_goes_with_the_reading_though_a_child_has_the_file_open(folder: Path) -> None:
    """What was forked meanwhile has the same open file, and lives on."""
    kept: list[int] = []

    def make(one: Path, alive: Callable[[], None]) -> bytes:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
        (note,) = (link for link in links if link.resolve() == notes()[0])
        kept.append(os.dup(int(note.name)))
        raise OSError("of the model")

    with pytest.raises(OSError, match="of the model"):
        digests_of([folder / "0.safetensors"], make)
    with notes()[0].open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(kept[0])


def test_a_folder_may_have_a_name_that_is_no_text(folder: Path, read: Counter[str]) -> None:
    other = Path(os.fsdecode(os.fsencode(folder) + b"\xff"))
    folder.rename(other)
    assert origin_of(str(other)) == origin_of(str(other)) and set(read.values()) == {1}


def test_a_link_in_place_of_the_folder_is_not_followed(
    folder: Path, tmp_path: Path, read: Counter[str]
) -> None:
    """Whoever can write beside it chooses where it leads."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    shared_digests.folder().parent.mkdir(parents=True)
    shared_digests.folder().symlink_to(elsewhere)
    origin_of(str(folder))
    assert origin_of(str(folder)) and set(read.values()) == {2} and not list(elsewhere.iterdir())


def test_only_notes_make_room_for_notes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may keep weights in a folder of this name."""
    monkeypatch.setattr(shared_digests, "MOST", 1)
    shared_digests.folder().mkdir(0o700, parents=True)
    kept = shared_digests.folder() / "model.safetensors"
    kept.write_bytes(b"of somebody")
    os.utime(kept, (0, 0))
    for number in range(3):
        assert digests_of([folder / f"{number}.safetensors"], lambda one, alive: b"digest")
    assert kept.exists() and len(notes()) == 2


@pytest.mark.parametrize("text", [b"", b"x", b"\0" * 64])
def test_a_damaged_note_is_made_again(folder: Path, read: Counter[str], text: bytes) -> None:
    before = origin_of(str(folder))
    whole = notes()[0].read_bytes()
    for damaged in (text, whole[:-1], whole[:5] + b"!" + whole[6:], text + whole):
        if damaged == whole:
            continue
        notes()[0].write_bytes(damaged)
        assert origin_of(str(folder)) == before
        assert notes()[0].read_bytes() == whole
    assert sorted(read.values())[:2] == [1, 1]


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_to_is_not_trusted(
    folder: Path, read: Counter[str], mode: int
) -> None:
    origin_of(str(folder))
    shared_digests.folder().chmod(mode)
    origin_of(str(folder))
    assert set(read.values()) == {2}


def test_a_cache_that_cannot_be_written_costs_the_sharing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    assert origin_of(str(folder)) == origin_of(str(folder)) and set(read.values()) == {2}


def test_a_note_that_cannot_be_written_costs_the_sharing(folder: Path) -> None:
    """The disk of the cache is full."""
    file, limits = folder / "0.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)

    def make(one: Path, alive: Callable[[], None]) -> bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        return b"digest"

    try:
        assert digests_of([file], make) == {file: b"digest"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [note.stat().st_size for note in notes()] == [0]


def test_a_file_that_cannot_be_read_is_said(folder: Path) -> None:
    def make(one: Path, alive: Callable[[], None]) -> bytes:
        raise OSError("of the model")

    with pytest.raises(OSError, match="of the model"):
        digests_of([folder / "0.safetensors"], make)
    assert digests_of([folder / "0.safetensors"], lambda one, alive: b"now") == {
        folder / "0.safetensors": b"now"
    }


def test_the_oldest_notes_are_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_digests, "MOST", 2)
    for number in range(5):
        file = folder / f"{number}.bin"
        file.write_bytes(bytes([number]) * 100)
        assert digests_of([file], lambda one, alive: b"digest")
        assert len(notes()) <= 2
