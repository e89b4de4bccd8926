"""Pages that are filled in place: every byte where it belongs, nothing after they were taken back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiradix.errors import StorageError
from hiradix.storage import GuardedStorage, GuardLimits, Page
from hiradix.storage.kit import in_place
from hiradix.storage.kit.call_threads import CallThread
from hiradix.storage.kit.in_place import InPlacePage
from hiradix.storage.kit.seal import CRC32, DEFAULT_ALGORITHM, NONE, SEAL_BYTES, Sealer, Verdict
from tests.contracts.storage import (
    FINGERPRINT,
    OTHER,
    PAGE_BYTES,
    blank,
    bytes_of,
    content,
    hits,
    key_of,
    keys_of,
    put,
)
from tests.storage.doubles import InPlaceMemory, memory_context

HANG_LIMIT_S = 60.0
SHORT_S = 0.02  # a deadline that a hanging call is meant to miss; nothing depends on its size


def cut(data: bytes | bytearray, lengths: Sequence[int]) -> list[memoryview]:
    """The data in pieces of such lengths, and the rest."""
    pieces, at = [], 0
    for length in (*lengths, len(data)):
        pieces.append(memoryview(data)[at : at + length])
        at += length
    return pieces


LENGTHS = st.lists(st.integers(0, 40), max_size=8)


@pytest.mark.parametrize("lockless_bytes", [0, 16, in_place.LOCKLESS_BYTES])
@given(st.integers(1, 100), LENGTHS, LENGTHS, st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_pieces_go_one_behind_the_other(
    monkeypatch: pytest.MonkeyPatch,
    lockless_bytes: int,
    size: int,
    views: list[int],
    pieces: list[int],
    data: st.DataObject,
) -> None:
    """Whatever buffers the page has and whatever comes, however it is copied; begun twice."""
    monkeypatch.setattr(in_place, "LOCKLESS_BYTES", lockless_bytes)
    page, came = bytearray(size), random.Random(size).randbytes(120)
    target, num_bytes = InPlacePage(cut(page, views)), data.draw(st.integers(1, size))
    for _ in range(2):
        page[:] = bytes(size)
        target.begin(num_bytes)
        written = b""
        for piece in cut(came, pieces):
            fits = len(written) + len(piece) <= num_bytes
            assert target.write(piece) is fits
            written += bytes(piece) if fits else b""
            assert bytes(page) == written.ljust(size, b"\0")
            assert target.is_whole is (len(written) == num_bytes)
    assert target.withdraw() is (len(written) == num_bytes)


def test_nothing_is_written_once_it_was_withdrawn() -> None:
    page = bytearray(8)
    target = InPlacePage([memoryview(page)])
    assert target.write(memoryview(b"abc")) and not target.withdraw()
    for late in (
        target.check_wanted, lambda: target.begin(8), lambda: target.write(memoryview(b"d"))
    ):  # fmt: skip
        with pytest.raises(StorageError, match="nobody waits"):
            late()
    assert page == b"abc" + bytes(5)


def test_its_buffers_cannot_be_written() -> None:
    target = InPlacePage(blank())
    with pytest.raises(TypeError):
        target[0][:1] = b"x"


@pytest.mark.parametrize("algorithm", [DEFAULT_ALGORITHM, CRC32, NONE])
@pytest.mark.parametrize("cuts", [[], [10, 7], [PAGE_BYTES - 1], [PAGE_BYTES], [PAGE_BYTES + 5]])
def test_the_checksum_is_of_the_page_and_not_of_the_seal(algorithm: int, cuts: list[int]) -> None:
    key, other = keys_of(2)
    sealer, page = Sealer(FINGERPRINT.digest(), algorithm, algorithm != NONE), bytes_of(key)
    stored = page + sealer.seal(key, [memoryview(page)])

    def verdict(data: bytes, name: str = key, by: Sealer = sealer) -> Verdict:
        target = InPlacePage([*blank(), memoryview(bytearray(SEAL_BYTES))], sealed=True)
        assert target.write(memoryview(b"begun once before"))
        target.begin(len(data))
        assert all(target.write(piece) for piece in cut(data, cuts)) and target.withdraw()
        return target.check(name, by)

    assert verdict(stored) is Verdict.GOOD
    believed = verdict(stored, by=Sealer(FINGERPRINT.digest())) is Verdict.GOOD
    assert believed == (algorithm != NONE), "what has no checksum is not believed by who verifies"
    assert verdict(stored, other) is Verdict.FOREIGN
    assert verdict(stored, key, Sealer(OTHER.digest())) is Verdict.FOREIGN
    for at in (0, PAGE_BYTES - 1, PAGE_BYTES, len(stored) - 1):
        bad = bytearray(stored)
        bad[at] ^= 1
        good = algorithm == NONE and at < PAGE_BYTES
        assert verdict(bytes(bad)) is (Verdict.GOOD if good else Verdict.DAMAGED)


# -- behind the guard ---------------------------------------------------------------------


class Slow(InPlaceMemory):
    """Waits in the middle of the page of `slow_key` until released."""

    slow_key = ""

    def __init__(self, *args: object) -> None:
        super().__init__(memory_context(FINGERPRINT, PAGE_BYTES))
        self.begun, self.release, self.late = threading.Event(), threading.Event(), threading.Event()
        self.fault: Exception | None = None

    def land(self, key: str, page: Page) -> bool:
        if self.slow_key and self.slow_key in key:
            assert isinstance(page, InPlacePage)
            page.begin(PAGE_BYTES + SEAL_BYTES)
            assert page.write(memoryview(b"first"))
            self.begun.set()
            assert self.release.wait(HANG_LIMIT_S), "never released"
            try:
                page.write(memoryview(b"second"))
            except StorageError as error:
                self.fault = error
                raise
            finally:
                self.late.set()
        return super().land(key, page)


@pytest.fixture
def backend() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.release.set()


def guarded(backend: InPlaceMemory, deadline_s: float = 30.0) -> GuardedStorage:
    return GuardedStorage(backend, FINGERPRINT, GuardLimits(deadline_s=deadline_s, bytes_per_s=1e12))


def test_a_late_answer_is_not_written_to_pages_that_were_taken_back(
    backend: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had come whole before the deadline counts, which passes in the third page: not before, on no
    machine."""
    patient = guarded(backend)
    assert all(put(patient, keys_of(4)))
    storage, pages = guarded(backend, SHORT_S), [blank() for _ in range(4)]
    backend.slow_key = key_of(2)
    finish = CallThread.finish

    def late(thread: CallThread, *call: Any) -> Any:
        assert backend.begun.wait(HANG_LIMIT_S), "the third page never came"
        return finish(thread, *call)

    monkeypatch.setattr(CallThread, "finish", late)
    assert storage.get(keys_of(4), pages) == [True, True, False, False]
    assert [content(page) for page in pages[:2]] == [bytes_of(key) for key in keys_of(2)]
    for page in pages:
        page[0][:] = b"\x07" * PAGE_BYTES
    backend.release.set()
    assert backend.late.wait(HANG_LIMIT_S) and "nobody waits" in str(backend.fault)
    assert all(content(page) == b"\x07" * PAGE_BYTES for page in pages)
    assert storage.stats()["get_missed_timeout"] == 2 and storage.stats()["get_pages"] == 2
    storage.close()
    patient.close()


@pytest.mark.parametrize("what", ["flip", "cut", "swap", "longer"])
def test_a_bad_page_is_a_miss_and_is_replaced_by_the_next_put(backend: Slow, what: str) -> None:
    storage = guarded(backend)
    assert all(put(storage, keys_of(3)))
    name, other = (next(name for name in backend.pages if key_of(at) in name) for at in (1, 2))
    stored = backend.pages[name]
    backend.pages[name] = {
        "flip": stored[:99] + bytes([stored[99] ^ 1]) + stored[100:], "cut": stored[:-1],
        "swap": backend.pages[other], "longer": stored + b"x",
    }[what]  # fmt: skip
    assert hits(storage, keys_of(3)) == [True, False, True]
    reason = {"flip": "damaged", "swap": "foreign"}.get(what, "absent")
    assert storage.stats()[f"get_missed_{reason}"] == 1
    if reason != "absent":
        assert all(put(storage, keys_of(3))) and all(hits(storage, keys_of(3)))
    storage.close()


def test_pages_before_a_fault_count_and_those_that_are_not_answered_for_do_not(backend: Slow) -> None:
    storage, whole = guarded(backend), backend.get
    assert all(put(storage, keys_of(3)))

    def cut_short(keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        whole(keys[:2], into[:2])
        raise StorageError("the rest is lost")

    backend.get = cut_short  # type: ignore[method-assign]
    assert hits(storage, keys_of(3)) == [True, True, False]
    backend.get = lambda keys, into: [*whole(keys, into)[:2], False]  # type: ignore[method-assign]
    assert hits(storage, keys_of(3)) == [True, True, False]
    assert storage.stats()["get_missed_error"] == 1 and storage.stats()["get_missed_absent"] == 1
    storage.close()
