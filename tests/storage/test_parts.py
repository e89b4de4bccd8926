"""Seals, fingerprints, the registry and vectored I/O, each on its own."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import random
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.errors import ConfigError, StorageError
from hiradix.settings import TEXTS
from hiradix.storage import (
    Page,
    PageFingerprint,
    StorageBackend,
    StorageContext,
    Traits,
    create_storage_backend,
    load_storage_backend,
    open_storage,
    opening,
    register_storage_backend,
    registry,
    storage_backend_names,
)
from hiradix.storage.backends.redis import resp
from hiradix.storage.backends.redis.resp import Frame, RespStream, encode_around
from hiradix.storage.kit import call_threads, vectored
from hiradix.storage.kit.call_threads import fill_head
from hiradix.storage.kit.in_place import InPlacePage
from hiradix.storage.kit.seal import CHECKSUMS, CRC32, NONE, SEAL_BYTES, XXH3_64, Sealer, Verdict
from hiradix.storage.kit.vectored import WRITE_CALL_BYTES, read_into, write_from
from hiradix.storage.opening import COMMON_SETTINGS, StoreSettings
from tests.contracts.storage import FINGERPRINT, OTHER, PAGE_BYTES, hits, key_of, keys_of, page_of, put
from tests.seeds import seeded, seeds
from tests.storage.doubles import MemoryBackend
from tests.storage.files import open_file

ROOT = Path(__file__).parents[2]
CONTEXT = StorageContext(FINGERPRINT, {"deadline_s": 30.0}, PAGE_BYTES)
DIGEST = FINGERPRINT.digest()

# -- seals --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", sorted(CHECKSUMS))
def test_every_single_bit_of_the_seal_matters(algorithm: int) -> None:
    sealer, key, page = Sealer(DIGEST, algorithm), key_of(0), page_of(key_of(0), 512)
    seal = sealer.seal(key, page)
    assert len(seal) == SEAL_BYTES and sealer.check(seal, key, page) is Verdict.GOOD
    for bit in range(8 * SEAL_BYTES):
        bad = bytearray(seal)
        bad[bit // 8] ^= 1 << bit % 8
        assert sealer.check(bad, key, page) is Verdict.DAMAGED


@pytest.mark.parametrize("algorithm", sorted(CHECKSUMS))
def test_every_single_bit_of_a_page_matters(algorithm: int) -> None:
    sealer, key, page = Sealer(DIGEST, algorithm), key_of(0), page_of(key_of(0), 512)
    seal = sealer.seal(key, page)
    for bit in range(8 * 512):
        page[0][bit // 8] ^= 1 << bit % 8
        assert sealer.check(seal, key, page) is Verdict.DAMAGED
        page[0][bit // 8] ^= 1 << bit % 8
    assert sealer.check(seal, key, page) is Verdict.GOOD


def test_seal_of_another_is_foreign() -> None:
    page = page_of("x", 512)
    seal = Sealer(DIGEST).seal("x", page)
    assert Sealer(OTHER.digest()).check(seal, "x", page) is Verdict.FOREIGN
    assert Sealer(DIGEST).check(seal, "y", page) is Verdict.FOREIGN
    assert Sealer(DIGEST).check(seal, "x", [page[0][:-1]]) is Verdict.FOREIGN
    assert Sealer(DIGEST).check(b"", "x", page) is Verdict.DAMAGED
    assert Sealer(DIGEST).check(bytes(SEAL_BYTES), "x", page) is Verdict.DAMAGED


def test_cut_into_other_buffers_it_is_the_same_page() -> None:
    page = page_of("x", 512)
    for algorithm in CHECKSUMS:
        seal = Sealer(DIGEST, algorithm).seal("x", page)
        pieces = [page[0][:100], page[0][100:100], page[0][100:]]
        assert Sealer(DIGEST).check(seal, "x", pieces) is Verdict.GOOD


def test_checksums_are_pinned() -> None:
    """What is on disks today must be readable tomorrow: these numbers never change."""
    page = [memoryview(b"hiradix page "), memoryview(b"of two buffers")]
    assert CHECKSUMS[CRC32](page) == 0x286FC1E9
    assert CHECKSUMS[XXH3_64](page) == 0xFBC5E764592F9A55
    seal = Sealer(DIGEST, CRC32).seal("k", page)
    assert seal[:16].hex() == "48525850" + "0100" + "02" + "00" + "1b00000000000000"


def test_algorithm_that_is_not_here_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = Sealer(DIGEST, XXH3_64).seal("x", page_of("x", 64))
    monkeypatch.delitem(CHECKSUMS, XXH3_64)
    assert Sealer(DIGEST, CRC32).check(seal, "x", page_of("x", 64)) is Verdict.UNKNOWN


def test_unchecked_seals_pass_the_payload() -> None:
    seal = Sealer(DIGEST, NONE, verify=False).seal("x", page_of("x", 64))
    assert Sealer(DIGEST, NONE, verify=False).check(seal, "x", page_of("y", 64)) is Verdict.GOOD


def test_storage_works_without_xxhash(tmp_path: Path) -> None:
    """The package is optional: then seals carry crc32, and the others' pages are misses, not damage."""
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from pathlib import Path\n"
        "from tests.storage.files import open_file\n"
        "from tests.contracts.storage import put, hits, keys_of\n"
        f"store = open_file(Path({str(tmp_path)!r}))\n"
        "print(hits(store, keys_of(2)), put(store, keys_of(4, start=10)))\n"
        "print(hits(store, keys_of(4, start=10)))\n"
    )
    store = open_file(tmp_path)
    put(store, keys_of(2))
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert ran.stdout == f"{[False] * 2} {[True] * 4}\n{[True] * 4}\n"
    assert all(hits(store, keys_of(2))) and all(hits(store, keys_of(4, start=10)))
    store.close()


# -- fingerprints -------------------------------------------------------------------------

names = st.text(max_size=12)
fingerprints = st.builds(
    PageFingerprint,
    model_id=st.text(min_size=1, max_size=12), revision=names, dtype=names, layout=names, codec=names,
    page_size=st.integers(1, 3), tp_rank=st.integers(0, 2), tp_size=st.integers(1, 3), pp_rank=st.integers(0,
    2), pp_size=st.integers(1, 3), shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
)  # fmt: skip


@settings(max_examples=200)
@given(fingerprints, fingerprints)
def test_digests_are_equal_exactly_when_fingerprints_are(one: PageFingerprint, two: PageFingerprint) -> None:
    assert (one.digest() == two.digest()) == (one == two)
    assert len(one.digest()) == 64 and bytes.fromhex(one.digest())


def test_fields_do_not_run_into_each_other() -> None:
    one = dataclasses.replace(FINGERPRINT, model_id='a","revision":"b', revision="")
    two = dataclasses.replace(FINGERPRINT, model_id="a", revision='b","x":"')
    assert one.digest() != two.digest()


def test_digest_is_pinned() -> None:
    assert FINGERPRINT.digest()[:16] == "b810e5e5ca2ea119"


def test_model_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_id"):
        PageFingerprint("")


# -- the registry -------------------------------------------------------------------------


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    yield


class Plugin(MemoryBackend):
    """A third party's backend."""


class Shelves:
    """Has it inside."""

    Plugin = Plugin


class Unfinished(StorageBackend):
    """It lacks most calls."""

    def __init__(self, context: StorageContext):
        pass


class Moody(MemoryBackend):
    """Its server is away."""

    def __init__(self, context: StorageContext):
        raise ConnectionRefusedError("no server at 127.0.0.1:1")


class Odd(MemoryBackend):
    """What it says of itself is not what a backend says, and it can tell whether it was closed."""

    said: Any = None
    num_open = 0

    def __init__(self, context: StorageContext):
        super().__init__(context)
        Odd.num_open += 1

    @property
    def traits(self) -> Any:  # type: ignore[override]
        return self.said() if callable(self.said) else self.said

    def close(self) -> None:
        Odd.num_open -= 1


class Nobody:
    """Makes something that is none."""

    exists = get = put = delete = clear = close = lambda *_: None

    def __new__(cls, context: StorageContext) -> Any:
        return object()


class Hanging(MemoryBackend):
    """Its server does not answer until released."""

    release = threading.Event()

    def exists(self, keys: Sequence[str]) -> int:
        assert self.release.wait(60), "never released"
        return super().exists(keys)


@pytest.mark.usefixtures("clean_registry")
class TestRegistry:
    def test_a_store_that_hangs_cannot_be_opened_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each time it was attached and detached it left its threads behind."""
        register_storage_backend("hanging", f"{__name__}:Hanging")
        keys = {"deadline_s": 0.01, "num_workers": 1, "admin_timeout_s": 0.01}
        context = StorageContext(FINGERPRINT, keys, PAGE_BYTES)
        left = call_threads.AbandonedThreads()  # other tests' threads do not count
        for module in (call_threads, opening):
            monkeypatch.setattr(module, "ABANDONED", left)
        monkeypatch.setattr(opening, "MAX_ABANDONED", 3)
        register_storage_backend("plugin", f"{__name__}:Plugin")
        idle = open_storage("plugin", CONTEXT)
        assert all(put(idle, keys_of(1)))
        idle.close()
        assert not left.num_threads

        def wait_for_left(number: int) -> None:
            """The thread that closes a store counts, too, until it has."""
            deadline = time.monotonic() + 60
            while left.num_threads != number:
                assert time.monotonic() < deadline, f"{left.num_threads} threads count, not {number}"
                time.sleep(0.001)

        for number in (1, 2, 3):
            storage = open_storage("hanging", context)
            assert storage.exists(keys_of(2)) == 0
            storage.close(0.01)
            storage.close(0.01)
            wait_for_left(number)
        with pytest.raises(ConfigError, match="--hicache-storage-backend hanging: 3 threads are in calls"):
            open_storage("hanging", context)
        Hanging.release.set()
        wait_for_left(0)
        open_storage("hanging", context).close()

    def test_plugin_by_module_and_class(self) -> None:
        register_storage_backend("plugin", f"{__name__}:Plugin")
        assert "plugin" in storage_backend_names()
        assert load_storage_backend("plugin").__name__ == "Plugin"
        storage = open_storage("plugin", CONTEXT)
        assert all(put(storage, keys_of(3))) and all(hits(storage, keys_of(3)))
        storage.close()

    def test_plugin_by_entry_point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = importlib.metadata.EntryPoint("far", f"{__name__}:Plugin", registry.ENTRY_POINT_GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == entry.group else [])
        assert "far" in storage_backend_names()
        assert load_storage_backend("far").__name__ == "Plugin"

    def test_nothing_is_imported_before_it_is_asked_for(self) -> None:
        register_storage_backend("absent", "no_such_module_at_all:Class")
        assert "absent" in storage_backend_names()

    def test_missing_module_is_named_with_what_to_install(self) -> None:
        register_storage_backend("absent", "no_such_module_at_all:Class", "pip install 'absent[all]'")
        with pytest.raises(
            ConfigError, match=r"absent: cannot import no_such_module_at_all: .*; install it with: pip"
        ):
            load_storage_backend("absent")

    @pytest.mark.parametrize(
        "text", ["raise RuntimeError('built for another version')", "import ctypes; ctypes.CDLL('no.so')",
                 "def (", "raise SystemExit(3)"],
    )  # fmt: skip
    def test_module_that_cannot_be_imported_is_named(
        self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = f"broken_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        register_storage_backend("broken", f"{name}:Class", "pip install 'broken[all]'")
        with pytest.raises(ConfigError, match=rf"broken: cannot import {name}: .*; install it with: pip"):
            load_storage_backend("broken")

    def test_entry_point_of_an_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        value = f"{__name__} : Shelves.Plugin [all]"
        entry = importlib.metadata.EntryPoint("far", value, registry.ENTRY_POINT_GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
        assert load_storage_backend("far") is Plugin

    @pytest.mark.parametrize("value", ["module_without_a_class", "a b:Class", ""])
    def test_entry_point_that_is_none_is_named(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = importlib.metadata.EntryPoint("far", value, registry.ENTRY_POINT_GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
        with pytest.raises(ConfigError, match="far: "):
            load_storage_backend("far")

    def test_missing_class_is_named(self) -> None:
        register_storage_backend("typo", f"{__name__}:Plugin2")
        with pytest.raises(ConfigError, match="no class Plugin2 in module"):
            load_storage_backend("typo")

    def test_class_that_is_no_backend_says_what_it_lacks(self) -> None:
        register_storage_backend("path", "pathlib:Path")
        with pytest.raises(ConfigError, match="no storage backend, it lacks get, put, delete, clear, close"):
            load_storage_backend("path")

    def test_unfinished_class_is_refused(self) -> None:
        register_storage_backend("unfinished", f"{__name__}:Unfinished")
        with pytest.raises(ConfigError, match="abstract"):
            create_storage_backend("unfinished", CONTEXT)

    def test_constructor_that_fails_is_named(self) -> None:
        register_storage_backend("moody", f"{__name__}:Moody")
        with pytest.raises(ConfigError, match="moody: ConnectionRefusedError: no server"):
            open_storage("moody", CONTEXT)

    @pytest.mark.parametrize(
        ("said", "message"),
        [
            ({"verifies": True}, "traits must be Traits, not dict"),
            (None, "traits must be Traits, not NoneType"),
            (Traits(direct=True), "a direct backend must verify its pages"),
            (lambda _: 1 // 0, "ZeroDivisionError"),
        ],
    )
    def test_traits_that_are_none_are_named(
        self, said: Any, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They ended the server's start, and an attach, without a word which backend it was."""
        monkeypatch.setattr(Odd, "said", said)
        register_storage_backend("odd", f"{__name__}:Odd")
        with pytest.raises(ConfigError, match=f"--hicache-storage-backend odd: .*{message}"):
            open_storage("odd", CONTEXT)
        assert not Odd.num_open

    def test_what_a_class_makes_is_looked_at(self) -> None:
        register_storage_backend("nobody", f"{__name__}:Nobody")
        with pytest.raises(ConfigError, match="--hicache-storage-backend nobody: .*lacks exists, get, put"):
            open_storage("nobody", CONTEXT)

    def test_a_module_that_finds_its_names_late_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("late_module")
        module.__getattr__ = lambda name: {}[name]  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, "late_module", module)
        register_storage_backend("late", "late_module:Store")
        with pytest.raises(ConfigError, match="--hicache-storage-backend late: .*KeyError: 'Store'"):
            open_storage("late", CONTEXT)

    @pytest.mark.parametrize("target", ["", "module", ":Class", "module:"])
    def test_malformed_target(self, target: str) -> None:
        with pytest.raises(ConfigError, match="module:Class"):
            register_storage_backend("x", target)

    def test_registering_again_warns_and_replaces(self, caplog: pytest.LogCaptureFixture) -> None:
        register_storage_backend("plugin", "nowhere:Class")
        register_storage_backend("plugin", f"{__name__}:Plugin")
        assert "registered again" in caplog.text and load_storage_backend("plugin").__name__ == "Plugin"


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"flie: unknown storage backend; available: .*\bfile\b"):
        open_storage("flie", CONTEXT)


CLIENTS = {"redis": "redis", "valkey": "redis", "s3": "obstore", "mooncake": "mooncake", "nixl": "nixl"}


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_missing_client_package_says_what_to_install(name: str) -> None:
    code = (
        f"import sys; sys.modules[{CLIENTS[name]!r}] = None\n"
        "from hiradix.errors import ConfigError\nfrom hiradix.storage import load_storage_backend\n"
        f"try: load_storage_backend({name!r})\nexcept ConfigError as error: print(error)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert f"--hicache-storage-backend {name}: cannot import" in shown.stdout
    assert "install it with: pip install 'hiradix[" in shown.stdout


@pytest.mark.parametrize("key", COMMON_SETTINGS)
def test_bad_key_of_every_backend_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        StoreSettings.read({key: 5 if COMMON_SETTINGS[key].type in TEXTS else "many"})


def test_guard_keys_do_not_reach_the_backend(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "deadline_s": 9,
        "staging_size": "1MiB",
        "breaker_failures": 7,
        "num_workers": 2,
    }
    keys = values | {"file_storage_path": str(tmp_path)}
    storage = open_storage("file", StorageContext(FINGERPRINT, types.MappingProxyType(keys), PAGE_BYTES))
    limits = storage.limits
    assert (limits.deadline_s, limits.staging_bytes, limits.breaker.failures_to_open) == (9.0, 1 << 20, 7)
    storage.close()


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_pages_have_bytes(num_bytes: int) -> None:
    with pytest.raises(ConfigError, match="page_bytes"):
        StorageContext(FINGERPRINT, {}, num_bytes)


# -- vectored I/O -------------------------------------------------------------------------


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    data = random.Random(5).randbytes(20_000)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    pieces = [data[at : at + 3] for at in range(0, len(data), 3)]
    assert write_from(fd, [b"", *pieces, b""], 100) == len(data)
    into = [bytearray(7) for _ in range(len(data) // 7 + 1)]
    assert read_into(fd, into, 100) == len(data)
    assert b"".join(into)[: len(data)] == data
    assert read_into(fd, [bytearray(10)], 100 + len(data) - 4) == 4
    assert read_into(fd, [], 0) == 0
    os.close(fd)


def test_no_write_call_is_longer_than_the_page_cache_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        lengths.append(sum(map(len, views)))
        return os.pwritev(fd, views, offset)

    monkeypatch.setattr(vectored, "pwritev", pwritev)
    data = random.Random(6).randbytes(2 * WRITE_CALL_BYTES + 4000)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    cut = WRITE_CALL_BYTES - 5
    assert write_from(fd, [data[:5], data[5:cut], data[cut:]], 64) == len(data)
    os.close(fd)
    assert lengths == [WRITE_CALL_BYTES, WRITE_CALL_BYTES, 4000]
    assert (tmp_path / "f").read_bytes()[64:] == data


def test_pages_are_sent_while_the_server_still_has_those_before() -> None:
    """Replies that come only when the pages of two batches are there are no standstill, and stay in order."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30.0)
    frames = [set_frame(number) for number in range(40)]
    received = bytearray()
    wanted = sum(len(head) + 8 + len(tail) for head, _, tail in frames)

    def serve() -> None:
        while len(received) < wanted and (more := theirs.recv(1 << 16)):
            received.extend(more)
            if received.count(b"SET") >= 32 and not replied:
                replied.append(theirs.send(b"".join(b"+%d\r\n" % number for number in range(32))))
        if len(received) == wanted:
            theirs.send(b"".join(b"-NO %d\r\n" % number for number in range(32, 40)))

    replied: list[int] = []
    server = threading.Thread(target=serve)
    server.start()
    try:
        found = RespStream(ours).set_from(frames)
    finally:
        ours.close()
        server.join(60.0)
        theirs.close()
    assert found == [b"+%d" % n for n in range(32)] + [b"-NO %d" % n for n in range(32, 40)]
    assert received == b"".join(head + page[0] + tail for head, page, tail in frames)


def set_frame(number: int) -> Frame:
    head, tail = encode_around([b"SET", b"%d" % number], 8, [])
    return head, [memoryview(b"%08d" % number)], tail


@pytest.mark.parametrize("num_unasked", [0, 3])
def test_the_first_pages_are_sent_before_the_server_says_which_are_there(num_unasked: int) -> None:
    """Of the others those that it has not; the stream ends behind the last reply."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30.0)
    frames, there = [set_frame(number) for number in range(14)], {1, 4, 13}
    sent = [n for n in range(14) if n < num_unasked or n not in there]
    received = bytearray()

    def receive(until: bytes) -> None:
        while not received.endswith(until) and (more := theirs.recv(1 << 16)):
            received.extend(more)

    def serve() -> None:
        receive(b"STRLEN\r\n$2\r\n13\r\n" if not num_unasked else b"00000002\r\n")
        theirs.send(b"".join(b":%d\r\n" % (8 * (n in there)) for n in range(14)))
        receive(b"00000012\r\n")
        theirs.send(b"".join(b"+%d\r\n" % n for n in sent))

    server = threading.Thread(target=serve)
    server.start()
    questions = [(b"STRLEN", b"%d" % number) for number in range(14)]
    stream = RespStream(ours)
    try:
        answers, replies = stream.ask_and_set(questions, frames, num_unasked, lambda at, _: at not in there)
    finally:
        ours.close()
        server.join(60.0)
        theirs.close()
    assert replies == {n: b"+%d" % n for n in sent}
    assert answers == [b":%d" % (8 * (n in there)) for n in range(14)] and stream.is_drained
    assert received.count(b"SET") == len(sent)


@pytest.mark.parametrize("length", range(9))
def test_a_short_value_goes_to_a_pages_beginning(length: int) -> None:
    """Whatever pieces the page is in: the rest of it, and of a piece that it ends in, stays what it was."""
    memory = bytearray(b"........")
    view = memoryview(memory)
    fill_head(memoryview(b"12345678"[:length]), [view[:3], view[3:3], view[3:4], view[4:]])
    assert memory == b"12345678"[:length] + b"." * (8 - length)


@seeded
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("seed", seeds(8))
def test_pages_come_out_of_a_stream_in_whatever_pieces_it_has(
    monkeypatch: pytest.MonkeyPatch, seed: int, in_place: bool
) -> None:
    """Beside pages that are not there, of another length, and refused; nothing behind the last is taken."""
    rng = random.Random(seed)
    monkeypatch.setattr(resp, "_RECEIVE_BYTES", rng.choice([100, 300, 5000]))
    length, replies, expected = 200, [], []
    for _ in range(60):
        data = rng.randbytes(rng.choice([length, length, length, 0, 199, 201]))
        kind = rng.random()
        reply = b"$-1\r\n" if kind < 0.1 else b"$%d\r\n%s\r\n" % (len(data), data)
        replies.append(b"-WRONGTYPE no string\r\n" if kind > 0.9 else reply)
        expected.append(data if len(data) == length and 0.1 <= kind <= 0.9 else None)
    stream = b"".join(replies)
    ours, theirs = socket.socketpair()
    ours.settimeout(30.0)
    theirs.settimeout(30.0)

    def serve() -> None:
        at = 0
        while at < len(stream):
            at += theirs.send(stream[at : at + rng.choice([1, 7, 64, 150, 900])])
        theirs.send(b"+NEXT\r\n")

    server = threading.Thread(target=serve)
    server.start()
    memory = [bytearray(length) for _ in replies]
    pages: list[Page] = [[memoryview(page)[:33], memoryview(page)[33:]] for page in memory]
    if in_place:
        pages = [InPlacePage(page) for page in pages]
    try:
        found = RespStream(ours)
        assert found.get_into([(b"GET", b"x")] * 60, pages) == [data is not None for data in expected]
        assert all(page == data for page, data in zip(memory, expected) if data is not None)
        assert found.lines([]) == [] and found._line(64) == b"+NEXT" and found.is_drained
    finally:
        ours.close()
        server.join(60.0)
        theirs.close()


def test_nothing_is_written_to_a_page_that_was_taken_back() -> None:
    ours, theirs = socket.socketpair()
    page = bytearray(8)
    target = InPlacePage([memoryview(page)])
    target.withdraw()
    theirs.send(b"$8\r\n12345678\r\n")
    with pytest.raises(StorageError, match="nobody waits"):
        RespStream(ours).get_into([(b"GET", b"x")], [target])
    assert page == bytes(8)
    ours.close()
    theirs.close()
