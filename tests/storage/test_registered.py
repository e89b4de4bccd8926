"""Batches laid out over memory that a library knows: every byte once, in order, and within that memory."""

from __future__ import annotations

import ctypes
import mmap
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.errors import StorageError
from hiradix.os_memory import address_of
from hiradix.storage.kit.registered import MAX_SPANS, LaidOut, RegisteredMemory, Span
from hiradix.storage.kit.seal import SEAL_BYTES, Sealer, Verdict
from hiradix.storage.protocol import Page, page_bytes
from tests.contracts.storage import FINGERPRINT, blank, bytes_of, content, key_of, keys_of, page_of

BLOCK_BYTES = 4096
SEALER = Sealer(FINGERPRINT.digest())
sizes = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 1500), min_size=1, max_size=4)), max_size=12
)


class Library:
    """Knows memory by address, and moves bytes only within that."""

    def __init__(self) -> None:
        self.known: list[Span] = []
        self.store: dict[str, bytes] = {}

    def tell(self, address: int, num_bytes: int) -> None:
        self.known.append((address, num_bytes))

    def write(self, part: LaidOut) -> None:
        for key, spans, num_bytes in zip(part.keys, part.spans, part.num_bytes, strict=True):
            self.store[key] = b"".join(ctypes.string_at(*self.checked(span)) for span in spans)
            assert len(self.store[key]) == num_bytes

    def read(self, part: LaidOut) -> None:
        for key, spans in zip(part.keys, part.spans, strict=True):
            at = 0
            for address, length in spans:
                self.checked((address, length))
                ctypes.memmove(address, self.store[key][at : at + length], length)
                at += length

    def checked(self, span: Span) -> Span:
        start, length = span
        assert any(begin <= start and start + length <= begin + size for begin, size in self.known)
        return span


def cut(memory: memoryview, pieces: list[int]) -> Page:
    ends = [sum(pieces[: index + 1]) for index in range(len(pieces))]
    return [memory[end - size : end] for end, size in zip(ends, pieces)]


@settings(deadline=None)
@given(sizes=sizes, sealed=st.booleans())
def test_what_is_written_is_read_back(sizes: list[tuple[bool, list[int]]], sealed: bool) -> None:
    library, pool = Library(), memoryview(mmap.mmap(-1, 1 << 17))
    memory = RegisteredMemory(BLOCK_BYTES, library.tell)
    memory.add(pool)
    at, pages = 0, []
    for inside, pieces in sizes:
        where = pool[at : at + sum(pieces)] if inside else memoryview(bytearray(sum(pieces)))
        pages.append(cut(where, pieces))
        at += sum(pieces)
    wanted = [random.Random(index).randbytes(page_bytes(page)) for index, page in enumerate(pages)]
    for data, (_, pieces), page in zip(wanted, sizes, pages):
        for view, part in zip(page, cut(memoryview(data), pieces)):
            view[:] = part
    keys, seal_bytes, num_copied = keys_of(len(pages)), SEAL_BYTES if sealed else 0, 0
    for part in memory.lay_out(keys, pages, seal_bytes):
        part.gather()
        if sealed:
            part.seal(SEALER)
        library.write(part)
        num_copied += part.num_copied
    assert num_copied == sum(not inside and sum(pieces) > 0 for inside, pieces in sizes)
    assert {key: data[: len(data) - seal_bytes] for key, data in library.store.items()} == dict(
        zip(keys, wanted)
    )
    for page in pages:
        for view in page:
            view[:] = bytes(len(view))
    for part in memory.lay_out(keys, pages, seal_bytes):
        library.read(part)
        for index in range(len(part)):
            if sealed:
                assert part.check(index, SEALER) is Verdict.GOOD
            else:
                part.scatter(index)
    assert [content(page) for page in pages] == wanted


def test_a_damaged_page_does_not_reach_the_callers_buffers() -> None:
    library, page = Library(), page_of(key_of(0))
    memory = RegisteredMemory(1 << 20, library.tell)
    for part in memory.lay_out([key_of(0)], [page]):
        part.gather()
        part.seal(SEALER)
        library.write(part)
    whole = library.store[key_of(0)]
    library.store[key_of(0)] = whole[:7] + bytes([whole[7] ^ 1]) + whole[8:]
    into = blank()
    for part in memory.lay_out([key_of(0)], [into]):
        library.read(part)
        assert part.check(0, SEALER) is Verdict.DAMAGED
    assert content(into) == bytes(len(bytes_of(key_of(0))))


def test_pages_in_very_many_pieces_pass_through_a_block() -> None:
    library, pool = Library(), memoryview(mmap.mmap(-1, 4096))
    memory = RegisteredMemory(BLOCK_BYTES, library.tell)
    memory.add(pool)
    for num_pieces, copied in ((MAX_SPANS, 0), (MAX_SPANS + 1, 1)):
        (part,) = memory.lay_out(["x"], [cut(pool, [8] * num_pieces)])
        assert part.num_copied == copied


def test_a_page_that_reaches_out_of_what_the_library_knows_passes_through_a_block() -> None:
    library = Library()
    memory = RegisteredMemory(BLOCK_BYTES, library.tell)
    pool = memoryview(bytearray(4096))
    memory.add(pool[1024:3072])
    for start, num_copied in ((0, 1), (1023, 1), (1024, 0), (2048, 0), (2049, 1), (3072, 1)):
        (part,) = memory.lay_out(keys_of(1), [[pool[start : start + 1024]]], 0)
        assert part.num_copied == num_copied, start
        library.write(part)


def test_calls_side_by_side_have_blocks_of_their_own_and_leave_them_to_later_ones() -> None:
    library = Library()
    memory = RegisteredMemory(BLOCK_BYTES, library.tell)
    one, other = memory.lay_out(["a"], [blank(100)]), memory.lay_out(["b"], [blank(100)])
    (((first, _), *_),), (((second, _), *_),) = next(one).spans, next(other).spans
    assert first != second
    assert [*one, *other] == []
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: [len(part) for part in memory.lay_out(keys_of(50), [blank(100)] * 50)]).result()
    assert len(library.known) == 2


def test_memory_is_told_once_and_again_to_a_library_started_anew() -> None:
    library, pool = Library(), memoryview(mmap.mmap(-1, 8192))
    memory = RegisteredMemory(BLOCK_BYTES, library.tell)
    memory.add(pool)
    memory.add(pool[1000:2000])
    assert library.known == [(address_of(pool), 8192)]
    memory.register_again()
    assert library.known == [(address_of(pool), 8192)] * 2


def test_memory_that_the_library_refuses_is_not_taken_for_known() -> None:
    def refuse(address: int, num_bytes: int) -> None:
        raise StorageError("no")

    pool = memoryview(mmap.mmap(-1, 8192))
    memory = RegisteredMemory(BLOCK_BYTES, refuse)
    with pytest.raises(StorageError):
        memory.add(pool)
    assert not memory.holds([(address_of(pool), 1)])
    with pytest.raises(StorageError):
        next(memory.lay_out(["a"], [[pool]]))
