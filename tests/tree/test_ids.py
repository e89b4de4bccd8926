"""Both forms of `hiradix.tree.ids` do what lists of numbers do; `make test-compiled` has the built one."""

from __future__ import annotations

import gc
from array import array
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiradix.tree import RadixTree, ids, ids_numpy

FORMS = [ids_numpy, ids._form] if ids.IS_BUILT else [ids_numpy]
POOL = 90
MANY = 2 * ids_numpy.FEW_PAGES
ID = np.zeros(1, np.int32)

over_forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
numbers = st.lists(st.integers(-2 * POOL, 2 * POOL), max_size=MANY)
in_pool = st.lists(st.integers(0, POOL - 1), max_size=MANY)
dtypes = st.sampled_from([np.int32, np.int64])
wild = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**32, 2**32 + 1, -(2**32), POOL, -1]))


def arrays(values: list[int], dtype: Any, stride: int = 1) -> np.ndarray:
    """The values as an array that lies `stride` apart in memory."""
    spaced = np.full(len(values) * stride, 7, dtype)
    spaced[::stride] = values
    return spaced[::stride]


@over_forms
@given(numbers, dtypes, st.integers(1, 3), st.data())
def test_copied(form: ModuleType, values: list[int], dtype: Any, stride: int, data: st.DataObject) -> None:
    pages = arrays(values, dtype, stride)
    last = data.draw(st.integers(0, len(values)))
    first = data.draw(st.integers(0, last))
    parts = [(form.copied(pages), values), (form.copied(pages, first, last), values[first:last])]
    for found, wanted in parts:
        assert found.dtype == np.int32 and found.tolist() == wanted
        assert found.flags.c_contiguous and found.flags.writeable and not np.shares_memory(found, pages)


@over_forms
@given(in_pool, st.integers(-3, 3), st.integers(-3, 3))
def test_copied_refuses_what_is_no_part(form: ModuleType, values: list[int], low: int, high: int) -> None:
    first, last = low, len(values) + high
    pages = arrays(values, np.int32)
    if 0 <= first <= last <= len(values):
        assert form.copied(pages, first, last).tolist() == values[first:last]
    else:
        with pytest.raises(AssertionError):
            form.copied(pages, first, last)


@over_forms
@given(wild)
def test_copied_refuses_what_is_no_id(form: ModuleType, value: int) -> None:
    pages = np.array([1, value], np.int64)
    if -(2**31) <= value < 2**31:
        assert form.copied(pages).tolist() == [1, value]
    else:
        with pytest.raises(AssertionError):
            form.copied(pages)


@over_forms
@given(st.lists(numbers, max_size=5))
def test_joined(form: ModuleType, parts: list[list[int]]) -> None:
    found = form.joined([arrays(part, np.int32) for part in parts])
    assert found.dtype == np.int32 and found.tolist() == [page for part in parts for page in part]


@over_forms
@given(st.lists(in_pool, max_size=4), st.lists(wild, max_size=2), st.booleans(), dtypes)
def test_mark(form: ModuleType, sets: list[list[int]], bad: list[int], value: bool, dtype: Any) -> None:
    marks = np.full(POOL, not value)
    for pages in sets:
        form.mark(marks, arrays(pages, dtype), value)
    wanted = np.full(POOL, not value)
    wanted[[page for pages in sets for page in pages]] = value
    assert np.array_equal(marks, wanted)
    for count in (1, MANY):
        if any(not 0 <= page < POOL for page in bad):
            with pytest.raises(AssertionError):
                form.mark(marks, np.array([*range(count), *bad], np.int64), not value)
            assert np.array_equal(marks, wanted), "changed before it was refused"


@over_forms
@given(in_pool, dtypes, st.integers(1, 70))
def test_slots_of(form: ModuleType, values: list[int], dtype: Any, size: int) -> None:
    found = form.slots_of(arrays(values, dtype), size)
    assert found.dtype == np.int64 and found.flags.writeable
    assert found.tolist() == [page * size + offset for page in values for offset in range(size)]


@over_forms
def test_slots_of_the_largest_ids(form: ModuleType) -> None:
    largest = 2**31 - 1
    assert form.slots_of(np.array([largest], np.int32), 64)[-1] == largest * 64 + 63


@over_forms
@given(numbers, dtypes, st.integers(1, 3), st.integers(1, 70), st.data())
def test_pages_of(
    form: ModuleType, values: list[int], dtype: Any, stride: int, size: int, data: st.DataObject
) -> None:
    stop = data.draw(st.integers(0, len(values)))
    start = data.draw(st.integers(0, stop))
    found = form.pages_of(arrays(values, dtype, stride), size, start, stop)
    assert found.dtype == np.int32 and found.tolist() == [slot // size for slot in values[start:stop:size]]


@over_forms
@given(numbers, st.sampled_from([np.int32, np.int64]), st.integers(1, 70), st.data())
def test_pages_at(form: ModuleType, values: list[int], dtype: Any, size: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(values)))
    start = data.draw(st.integers(0, stop))
    slots = np.array(values, dtype)
    found = form.pages_at(slots.ctypes.data, dtype is np.int32, len(slots), size, start, stop)
    assert found.dtype == np.int32 and found.tolist() == [slot // size for slot in values[start:stop:size]]


@over_forms
@pytest.mark.parametrize("start,stop,size", [(-1, 1, 1), (2, 1, 1), (0, 4, 1), (0, 3, 0), (0, 3, -1)])
def test_pages_at_refuses_what_is_no_part(form: ModuleType, start: int, stop: int, size: int) -> None:
    slots = np.arange(3)
    with pytest.raises(AssertionError):
        form.pages_at(slots.ctypes.data, False, 3, size, start, stop)


@over_forms
def test_there_are_no_slots_at_no_address(form: ModuleType) -> None:
    assert form.pages_at(0, False, 0, 64, 0, 0).tolist() == []
    with pytest.raises(AssertionError, match="3 slots at no address"):
        form.pages_at(0, False, 3, 1, 0, 3)


@over_forms
@pytest.mark.parametrize("count", [0, 1, ids_numpy.FEW_PAGES, ids_numpy.FEW_PAGES + 1])
@pytest.mark.parametrize("size", [1, 7])
def test_pages_of_few_and_of_many_slots(form: ModuleType, size: int, count: int) -> None:
    slots = np.arange(-3 * size, (count + 2) * size)
    found = form.pages_of(slots, size, size, (count + 1) * size)
    assert found.dtype == np.int32 and found.tolist() == list(range(-2, count - 2))


@over_forms
@pytest.mark.parametrize("start,stop,size", [(-1, 1, 1), (2, 1, 1), (0, 4, 1), (0, 3, 0), (0, 3, -1)])
def test_pages_of_refuses_what_is_no_part(form: ModuleType, start: int, stop: int, size: int) -> None:
    with pytest.raises(AssertionError):
        form.pages_of(np.arange(3), size, start, stop)


@over_forms
@given(st.data())
def test_take_and_give(form: ModuleType, data: st.DataObject) -> None:
    """A stack of free pages against a list, and every kind of page that may not be given back."""
    stack, marks = np.arange(POOL - 1, -1, -1, dtype=np.int32), np.zeros(POOL, np.bool_)
    free, out = list(range(POOL - 1, -1, -1)), []
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, len(free)))
            taken = form.take(stack, len(free), count, marks).tolist()
            assert taken == [free.pop() for _ in range(count)]
            out += taken
        else:
            pages = data.draw(st.permutations(out))[: data.draw(st.integers(0, len(out)))]
            bad = data.draw(st.sampled_from([[], [], pages[:1], free[:1], [POOL], [-1], [2**32], [-(2**40)]]))
            at = data.draw(st.integers(0, len(pages)))
            asked = np.array([*pages[:at], *bad, *pages[at:]], np.int64)
            stack_before = stack[: len(free)].copy()
            is_given = form.give(stack, len(free), asked if bad else arrays(pages, np.int32), marks)
            assert is_given == (not bad)
            if bad:
                assert np.array_equal(stack[: len(free)], stack_before)
            else:
                free += pages[::-1]
                out = [page for page in out if page not in pages]
        assert stack[: len(free)].tolist() == free and np.flatnonzero(marks).tolist() == sorted(out)


@over_forms
@given(numbers, in_pool, dtypes, st.integers(1, 3))
def test_claim(form: ModuleType, values: list[int], before: list[int], dtype: Any, stride: int) -> None:
    """All pages are marked, or none if one is out of range, marked or named twice."""
    marks = np.zeros(POOL, np.bool_)
    marks[before] = True
    is_free = len(set(values)) == len(values) and all(0 <= v < POOL and v not in before for v in values)
    assert form.claim(marks, arrays(values, dtype, stride)) == is_free
    assert set(np.flatnonzero(marks)) == set(before) | (set(values) if is_free else set())


@over_forms
@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("page", [2**31, 2**32, -(2**40)])
def test_claim_of_what_is_no_page_id(form: ModuleType, page: int, count: int) -> None:
    marks = np.zeros(POOL, np.bool_)
    try:
        assert not form.claim(marks, np.array([*range(count), page]))
    except AssertionError:
        pass
    assert not marks.any()


@over_forms
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("count", [2, MANY])
def test_ids_of_any_width(form: ModuleType, count: int, dtype: Any) -> None:
    marks, stack = np.zeros(2**20, np.bool_), np.zeros(2**20, np.int32)
    pages = np.arange(count).astype(dtype)
    assert form.claim(marks, pages) and not form.claim(marks, pages)
    assert form.give(stack, 0, pages, marks) and not form.give(stack, 0, pages, marks)
    assert stack[:count].tolist() == list(range(count))[::-1] and not marks.any()


@over_forms
@pytest.mark.parametrize("num_free,count", [(-1, 0), (0, 1), (3, 4), (4, 1), (3, -1)])
def test_take_refuses_what_is_not_there(form: ModuleType, num_free: int, count: int) -> None:
    marks = np.zeros(3, np.bool_)
    with pytest.raises(AssertionError):
        form.take(np.arange(3, dtype=np.int32), num_free, count, marks)
    assert not marks.any()


@pytest.mark.skipif(not ids.IS_BUILT, reason="numpy trusts the stack, which is its owner's alone")
@pytest.mark.parametrize("count", [1, MANY])
def test_take_refuses_a_stack_that_is_not_of_these_marks(count: int) -> None:
    marks = np.zeros(POOL, np.bool_)
    for foreign in (-1, POOL):
        stack = np.arange(count, dtype=np.int32)
        stack[0] = foreign
        with pytest.raises(AssertionError):
            ids.take(stack, count, count, marks)
        assert not marks.any()


@over_forms
def test_give_has_room_for_what_was_taken_alone(form: ModuleType) -> None:
    assert not form.give(np.zeros(3, np.int32), 3, np.array([0], np.int32), np.ones(3, np.bool_))


tokens_at = st.tuples(st.integers(0, 700), st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32, 2**32 + 7, -1]))


@over_forms
@given(st.integers(0, 700), st.lists(tokens_at, max_size=2), st.integers(0, 2), st.data())
def test_narrow(
    form: ModuleType, count: int, odd_ones: list[tuple[int, int]], stride: int, data: st.DataObject
) -> None:
    """Stride 0: an `array('q')`."""
    values = list(range(count))
    for place, token in odd_ones:
        values[place : place + 1] = [token]
    stop = data.draw(st.integers(0, len(values)))
    start = data.draw(st.integers(0, stop))
    tokens = arrays(values, np.int64, stride) if stride else array("q", values)
    run, wanted = form.narrow(tokens, start, stop), values[start:stop]
    if all(0 <= token < 2**31 for token in wanted):
        assert np.frombuffer(run, np.int32).tolist() == wanted
    else:
        assert run is None


@over_forms
@given(st.integers(0, 700), st.lists(tokens_at, max_size=2), st.sampled_from([4, 8]), st.data())
def test_num_equal(
    form: ModuleType, count: int, odd_ones: list[tuple[int, int]], width: int, data: st.DataObject
) -> None:
    """A run that ends earlier or later than the part it is compared with, and differs here and there."""
    values = list(range(count))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    own = values[start : data.draw(st.integers(start, count))]
    for place, token in odd_ones:
        if width == 8 or token == np.int32(token & 0x7FFFFFFF):
            own[place : place + 1] = [token]
    run = np.array(own, np.int32 if width == 4 else np.int64).tobytes()
    pairs = list(zip(own, values[start:stop], strict=False))
    wanted = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    assert form.num_equal(run, width, arrays(values, np.int64), start, stop) == wanted


@over_forms
def test_a_wide_token_equals_no_narrow_one(form: ModuleType) -> None:
    run = np.array([5, 6, 7], np.int32).tobytes()
    for at in range(3):
        tokens = np.array([5, 6, 7], np.int64)
        tokens[at] += 2**32
        assert form.num_equal(run, 4, tokens, 0, 3) == at


@over_forms
@pytest.mark.parametrize("start,stop", [(-1, 1), (2, 1), (0, 4), (4, 4)])
def test_tokens_that_are_not_there(form: ModuleType, start: int, stop: int) -> None:
    tokens = np.arange(3)
    for either in (tokens, array("q", tokens)):
        with pytest.raises(AssertionError):
            form.narrow(either, start, stop)
    with pytest.raises(AssertionError):
        form.num_equal(tokens.tobytes(), 8, tokens, start, stop)


@over_forms
def test_what_the_garbage_collector_looks_at(form: ModuleType) -> None:
    looked_at: list[Any] = [[], {"a": []}, RadixTree(1).root.device]
    nothing = [5, None, "text", np.arange(3)]
    for _ in range(2):  # again changes nothing
        form.track(*looked_at, *nothing)
        assert all(map(gc.is_tracked, looked_at)) or form is ids_numpy
    for _ in range(2):
        form.untrack(*looked_at, *nothing)
        assert not any(map(gc.is_tracked, looked_at)) or form is ids_numpy
    form.track(*looked_at)
    assert not any(map(gc.is_tracked, nothing))


@pytest.mark.skipif(not ids.IS_BUILT, reason="numpy says so itself")
@pytest.mark.parametrize(
    "call,args",
    [
        ("copied", (None,)),
        ("copied", ()),
        ("copied", (np.zeros(2),)),
        ("copied", (np.zeros((2, 2), np.int32),)),
        ("copied", (ID, "0", 1)),
        ("copied", (ID, 0, 2**80)),
        ("joined", ((),)),
        ("joined", ([np.zeros(1, np.int64)],)),
        ("joined", ([None],)),
        ("mark", (np.zeros(2, np.int32), ID, True)),
        ("mark", (b"00", [0], True)),
        ("mark", (np.broadcast_to(np.zeros(1, np.bool_), 2), ID, True)),
        ("mark", ()),
        ("take", (np.zeros(2, np.int64), 1, 1, np.zeros(2, np.bool_))),
        ("take", (np.zeros(2, np.int32), 1, 1, np.zeros(2, np.int32))),
        ("take", (1, 2, 3)),
        ("give", (np.zeros(2, np.int32), 0, np.zeros(1), np.zeros(2, np.bool_))),
        ("slots_of", (ID, 2.5)),
        ("slots_of", (None, 1)),
        ("pages_of", (np.zeros(2), 1, 0, 1)),
        ("narrow", (np.zeros(2), 0, 1)),
        ("narrow", (array("d", [0]), 0, 1)),
        ("narrow", (memoryview(bytes(16)).cast("d"), 0, 1)),
        ("narrow", (ID, 0)),
        ("num_equal", ("0", 4, ID, 0, 1)),
        ("num_equal", (b"0000", 3, ID, 0, 1)),
        ("num_equal", (b"0000", 4, None, 0, 1)),
    ],
)
def test_the_built_form_takes_arrays_alone(call: str, args: tuple[Any, ...]) -> None:
    """Nothing is read through what is no array of the right type."""
    with pytest.raises((TypeError, ValueError, OverflowError)):
        getattr(ids._form, call)(*args)
