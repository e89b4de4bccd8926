"""`hiradix storage ...` on directories; `tests/storage_servers` has it on servers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hiradix.apps import storage_tools
from hiradix.cli import main
from hiradix.errors import ConfigError
from hiradix.storage import PageFingerprint, StorageContext, open_storage
from hiradix.storage.backends.file.config import PATH_ENV, FileConfig
from hiradix.storage.backends.file.page_dir import footprint
from hiradix.storage.inventory import StoreAddress
from hiradix.storage.kit.seal import SEAL_BYTES
from tests.contracts.storage import FINGERPRINT, OTHER, PAGE_BYTES, bytes_of, hits, key_of, keys_of, put

OURS, THEIRS = FINGERPRINT.digest()[:32], OTHER.digest()[:32]
ROOM = ["--set", "min_free_space=0"]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)


def open_files(folder: Path, fingerprint: PageFingerprint = FINGERPRINT) -> Any:
    keys = {"file_storage_path": str(folder), "min_free_space": 0, "deadline_s": 30.0}
    return open_storage("file", StorageContext(fingerprint, keys, PAGE_BYTES))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five pages of ours, two of another model."""
    for fingerprint, count in ((FINGERPRINT, 5), (OTHER, 2)):
        store = open_files(tmp_path / "a", fingerprint)
        put(store, keys_of(count))
        store.close()
    return tmp_path / "a"


def run(capsys: Any, *arguments: str) -> tuple[int, str]:
    status = main(["storage", *arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_ls_names_every_page(folder: Path, capsys: Any) -> None:
    status, text = run(capsys, "ls", f"file://{folder}")
    lines = sorted(line.split() for line in text.splitlines())
    wanted = [[OURS, str(PAGE_BYTES), key] for key in keys_of(5)]
    wanted += [[THEIRS, str(PAGE_BYTES), key] for key in keys_of(2)]
    assert status == 0 and lines == sorted(wanted)
    assert run(capsys, "ls", f"file://{folder}", "--fingerprint", THEIRS)[1].count("\n") == 2


def test_stat_sums_up(folder: Path, capsys: Any) -> None:
    status, text = run(capsys, "stat", f"file://{folder}")
    rows = [line.split() for line in text.split("\n\n")[0].splitlines()[1:]]
    assert status == 0 and rows == [
        [OURS, "5", str(5 * PAGE_BYTES)],
        [THEIRS, "2", str(2 * PAGE_BYTES)],
        ["all", "7", str(7 * PAGE_BYTES)],
    ]


def test_verify_finds_damage(folder: Path, capsys: Any) -> None:
    assert run(capsys, "verify", f"file://{folder}", *ROOM) == (0, "7 pages are whole, 0 are not\n")
    path = next(folder.rglob(f"v1-{OURS}/*/*/{key_of(3)}.page"))
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    status, text = run(capsys, "verify", f"file://{folder}", *ROOM)
    assert status == 1 and text == f"damaged  {OURS}  {key_of(3)}\n6 pages are whole, 1 are not\n"


def test_names_that_are_no_pages_are_not_listed(folder: Path, capsys: Any) -> None:
    """One of them made pages beside it look damaged, and a folder of such a name ended the tool."""
    whole = next(folder.glob(f"v1-{OURS}/*/*/*.page"))
    for name in ("ключ.page", "a b.page", "notes.txt"):
        whole.with_name(name).write_bytes(whole.read_bytes())
    shutil.copytree(folder / f"v1-{OURS}", folder / f"v1-{OURS}.bak")
    assert run(capsys, "ls", f"file://{folder}")[1].count("\n") == 7
    assert run(capsys, "verify", f"file://{folder}") == (0, "7 pages are whole, 0 are not\n")


def test_pages_that_go_while_they_are_listed(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    """As servers evict them: one made the tool end with an error."""
    scandir, store = os.scandir, open_files(folder)

    def then_gone(path: Any) -> Any:
        found = scandir(path)
        if re.search("v1-[0-9a-f]{32}/./.$", str(path)):
            found = contextlib.nullcontext(list(found))
            store.delete(keys_of(5))
        return found

    monkeypatch.setattr(os, "scandir", then_gone)
    status, text = run(capsys, "ls", f"file://{folder}")
    store.close()
    assert status == 0 and text.count("\n") == 2


@pytest.mark.parametrize("scheme", ["file", "disk"])
def test_pages_that_go_before_they_are_read_are_not_damaged(
    scheme: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """As servers evict them while a tool looks at their store."""
    config = {f"{scheme}_storage_path": str(tmp_path / "a"), "max_size": "8MiB", "min_free_space": 0,
              "deadline_s": 30.0}  # fmt: skip
    server = open_storage(scheme, StorageContext(FINGERPRINT, config, PAGE_BYTES))
    keys = keys_of(6)
    assert all(put(server, keys))
    buffers = storage_tools._buffers

    def then_gone(batch: Any) -> Any:
        server.delete(keys[:2])
        return buffers(batch)

    monkeypatch.setattr(storage_tools, "_buffers", then_gone)
    url = f"{scheme}://{tmp_path / 'a'}"
    assert run(capsys, "verify", url) == (0, "4 pages are whole, 0 are not; 2 went meanwhile\n")
    put(server, keys)
    status, text = run(capsys, "copy", url, f"file://{tmp_path / 'b'}", "--set-to", "min_free_space=0")
    assert (status, text) == (
        0, "copied 4 pages; 0 could not be read, 0 could not be written; 2 went meanwhile\n"
    )  # fmt: skip
    server.close()


@pytest.mark.parametrize(("raised", "status"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_a_tool_that_is_ended_says_nothing_of_the_store(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, raised: BaseException, status: int
) -> None:
    """Its exit status is a shell's for these; what was done so far stays, and it can be run again."""
    copied = ["copy", f"file://{folder}", f"file://{tmp_path / 'b'}", "--set-to", "min_free_space=0"]
    with monkeypatch.context() as ended:
        batches = storage_tools._batches

        def first_only(pages: Any) -> Any:
            yield next(batches(pages))
            raise raised

        ended.setattr(storage_tools, "_batches", first_only)
        assert run(capsys, *copied) == (status, "")
    assert run(capsys, *copied) == (0, "copied 7 pages; 0 could not be read, 0 could not be written\n")


def test_a_listing_that_nobody_reads_to_its_end_ends_quietly(folder: Path) -> None:
    listing = [sys.executable, "-u", "-m", "hiradix.cli", "storage", "ls", f"file://{folder}"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(listing, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.stderr == "" and done.returncode == 141


def test_clear_takes_one_fingerprint_or_all(folder: Path, capsys: Any) -> None:
    url = f"file://{folder}"
    assert run(capsys, "clear", url, *ROOM, "--fingerprint", OURS) == (0, f"removed 5 pages of {OURS}\n")
    assert run(capsys, "clear", url, *ROOM, "--fingerprint", OURS) == (0, "there were none\n")
    assert run(capsys, "stat", url)[1].split("\n\n")[0].splitlines()[-1].split() == [
        "all",
        "2",
        str(2 * PAGE_BYTES),
    ]
    assert run(capsys, "clear", url, *ROOM, "--all") == (0, f"removed 2 pages of {THEIRS}\n")
    with pytest.raises(SystemExit):
        run(capsys, "clear", url)


def test_copied_pages_are_found_by_their_own_model(folder: Path, capsys: Any, tmp_path: Path) -> None:
    target = tmp_path / "b"
    status, text = run(
        capsys, "copy", f"file://{folder}", f"file://{target}", *ROOM, "--set-to", "min_free_space=0"
    )
    assert (status, text) == (0, "copied 7 pages; 0 could not be read, 0 could not be written\n")
    for fingerprint, count in ((FINGERPRINT, 5), (OTHER, 2)):
        store = open_files(target, fingerprint)
        assert hits(store, keys_of(6)) == [True] * count + [False] * (6 - count)
        store.close()


def test_copy_says_what_did_not_arrive(folder: Path, capsys: Any, tmp_path: Path) -> None:
    next(folder.rglob(f"{key_of(4)}.page")).write_bytes(b"x" * (64 + PAGE_BYTES))
    small = ["--set-to", "max_size=12288", "--set-to", "min_free_space=0"]
    status, text = run(capsys, "copy", f"file://{folder}", f"file://{tmp_path / 'c'}", *ROOM, *small,
                       "--fingerprint", OURS)  # fmt: skip
    assert status == 1 and re.match(r"copied 1 pages; 1 could not be read, 3 could not be written\n", text)


def test_a_store_that_is_looked_at_is_not_cut_to_a_cap(
    folder: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileConfig, "max_bytes", 2 * footprint(SEAL_BYTES + PAGE_BYTES))  # if none is given
    for path in folder.rglob("*.page"):
        os.utime(path, (1.7e9, 1.7e9))
    url, used = f"file://{folder}", mtimes(folder)
    assert run(capsys, "verify", url) == (0, "7 pages are whole, 0 are not\n")
    assert run(capsys, "copy", url, f"file://{tmp_path / 'b'}") == (
        0, "copied 7 pages; 0 could not be read, 0 could not be written\n"
    )  # fmt: skip
    assert run(capsys, "verify", f"file://{tmp_path / 'b'}") == (0, "7 pages are whole, 0 are not\n")
    assert run(capsys, "clear", url, "--fingerprint", THEIRS)[0] == 0
    assert mtimes(folder) == {path: at for path, at in used.items() if OURS in path}, "or counted as used"


def mtimes(folder: Path) -> dict[str, int]:
    """When each page counts as used."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*.page")}


def test_the_url_says_where_whatever_the_environment_does(
    folder: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tmp_path / "live"
    shutil.copytree(folder, live)
    monkeypatch.setenv(PATH_ENV, str(live))
    assert run(capsys, "copy", f"file://{folder}", f"file://{tmp_path / 'b'}")[0] == 0
    assert run(capsys, "verify", f"file://{tmp_path / 'b'}") == (0, "7 pages are whole, 0 are not\n")
    assert run(capsys, "clear", f"file://{folder}", "--all")[0] == 0
    assert not list(folder.rglob("*.page")) and len(list(live.rglob("*.page"))) == 7
    assert os.environ[PATH_ENV] == str(live)


@pytest.mark.parametrize("scheme", ["file", "disk"])
def test_bench_leaves_nothing_behind(tmp_path: Path, capsys: Any, scheme: str) -> None:
    size = [] if scheme == "file" else ["--set", "max_size=64MiB"]
    status, text = run(capsys, "bench", f"{scheme}://{tmp_path / 'd'}", *ROOM, *size, "--pages", "200",
                       "--page-bytes", "16KiB")  # fmt: skip
    assert status == 0, text
    assert [line.split()[0] for line in text.splitlines()] == ["memory", "put", "get", "exists"]
    assert not list((tmp_path / "d").rglob("*.page"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "http://x"], "is no store; expected one of"),
        (["ls", "file://"], "nothing after file://"),
        (["ls", "disk:///nowhere"], "/nowhere is no disk store"),
        (["ls", "file:///does/not/exist"], "is no folder"),
        (["ls", "file:///x", "--fingerprint", "abc"], "is no fingerprint"),
        (["ls", "file:///x", "--set", "novalue"], "expected key=value"),
        (["bench", "file:///x", "--pages", "0"], "must be at least 1"),
        (["verify", "file:///x", "--set", "compression=zstd"], "do not show their length"),
        (["copy", "file:///x", "file:///y", "--set-to", "quota=1GiB"], "--set-to quota: no store says"),
    ],
)
def test_bad_questions_are_answered(capsys: Any, arguments: list[str], message: str) -> None:
    status, text = run(capsys, *arguments)
    assert status == 2 and message in text


@pytest.mark.parametrize("url", ["reddis://u:hunter2@h:1/0", "redis:/u:hunter2@h", "hunter://u:hunter2@h"])
def test_a_password_in_an_address_that_is_none_is_not_shown(capsys: Any, url: str) -> None:
    status, text = run(capsys, "ls", url)
    assert status == 2 and f"{url.partition(':')[0]}:... is no store" in text and "hunter2" not in text


def test_settings_are_json_or_text() -> None:
    address = StoreAddress.parse("redis://h:1/0", ["ttl_s=5", "key_prefix=abc", 'x="5"'])
    assert address == StoreAddress(
        "redis", {"url": "redis://h:1/0", "ttl_s": 5, "key_prefix": "abc", "x": "5"}
    )
    with pytest.raises(ConfigError):
        StoreAddress.parse("nowhere")


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("redis", ["ls", "redis://127.0.0.1:1/0"], "redis"),
        ("obstore", ["ls", "s3://bucket/x"], "s3"),
        ("cryptography", ["ls", "file://{folder}", "--set", "encryption_key_file=k"], "encryption"),
    ],
)
def test_missing_package_says_what_to_install(
    folder: Path, package: str, arguments: list[str], extra: str
) -> None:
    words = ["storage", *(word.format(folder=folder) for word in arguments)]
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from hiradix.cli import main\nsys.exit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 2 and f"pip install 'hiradix[{extra}]'" in done.stderr, done.stderr


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    """A disk store: 40 pages of ours, two of another model and length, one whose name is not kept."""
    for fingerprint, num_bytes, keys in ((FINGERPRINT, PAGE_BYTES, keys_of(40)), (OTHER, 4096, keys_of(2))):
        store = open_slots(tmp_path / "slots", fingerprint, num_bytes)
        assert all(store.put(keys, [[memoryview(bytes_of(key, num_bytes))] for key in keys]))
        if fingerprint is FINGERPRINT:
            assert put(store, ["a-name"]) == [True]
        store.close()
    return tmp_path / "slots"


def open_slots(folder: Path, fingerprint: PageFingerprint = FINGERPRINT, num_bytes: int = PAGE_BYTES) -> Any:
    keys = {"disk_storage_path": str(folder), "min_free_space": 0, "max_size": "2MiB", "deadline_s": 30.0}
    return open_storage("disk", StorageContext(fingerprint, keys, num_bytes))


def test_disk_store_is_listed_and_verified_and_left_as_it_is(slots: Path, capsys: Any) -> None:
    url = f"disk://{slots}"
    status, text = run(capsys, "stat", url)
    rows = [line.split() for line in text.splitlines()[1:]]
    assert status == 0 and rows[:2] == [[OURS, "40", str(40 * PAGE_BYTES)], [THEIRS, "2", str(2 * 4096)]]
    assert run(capsys, "ls", url)[1].count("\n") == 42
    log = (slots / "log").read_bytes()
    assert run(capsys, "verify", url) == (0, "42 pages are whole, 0 are not\n")
    assert (slots / "log").read_bytes() == log, "looking changed the store"
    store = open_slots(slots)
    assert all(hits(store, keys_of(40)))
    store.close()


def test_damaged_slot_is_found(slots: Path, capsys: Any) -> None:
    for path in slots.glob("segment-*.pages"):
        data = path.read_bytes()
        at = data.find(bytes_of(key_of(7))[:64])
        if at >= 0:
            path.write_bytes(data[: at + 100] + bytes([data[at + 100] ^ 1]) + data[at + 101 :])
    status, text = run(capsys, "verify", f"disk://{slots}")
    assert status == 1 and text == f"damaged  {OURS}  {key_of(7)}\n41 pages are whole, 1 are not\n"


def test_disk_store_is_copied_and_cleared(slots: Path, tmp_path: Path, capsys: Any) -> None:
    target = f"file://{tmp_path / 'copy'}"
    status, text = run(capsys, "copy", f"disk://{slots}", target, "--set-to", "min_free_space=0")
    assert (status, text) == (0, "copied 42 pages; 0 could not be read, 0 could not be written\n")
    assert run(capsys, "verify", target, *ROOM) == (0, "42 pages are whole, 0 are not\n")
    run(capsys, "clear", f"disk://{slots}", "--fingerprint", OURS)
    store, other = open_slots(slots), open_slots(slots, OTHER, 4096)
    assert not any(hits(store, keys_of(40))) and other.exists(keys_of(2)) == 2
    store.close()
    other.close()


def test_a_store_of_another_kind_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = StorageContext(FINGERPRINT, {"disk_storage_path": str(tmp_path)}, PAGE_BYTES)
    store = open_storage("disk", context)
    assert put(store, keys_of(1)) == [True]
    store.close()
    assert main(["storage", "stat", f"file://{tmp_path}"]) == 2
    assert f"is a disk store, not a file store: disk://{tmp_path}" in capsys.readouterr().err


def test_stat_of_sglangs_own_files_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0123abcd_model_0_1.bin").write_bytes(b"x" * 64)
    assert main(["storage", "stat", f"file://{tmp_path}"]) == 2
    assert "is no file store: its .bin files look like those of SGLang" in capsys.readouterr().err
    (tmp_path / "writers").mkdir()  # one of ours, too, that is empty
    assert main(["storage", "stat", f"file://{tmp_path}"]) == 0
