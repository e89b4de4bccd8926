"""Arrays of page ids and of tokens by numpy: `hiradix.tree.ids` without `_ids.c`, and its reference."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hiradix.errors import Misuse

Pages = npt.NDArray[np.int32]
Ids = npt.NDArray[np.integer[Any]]
Marks = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]

FEW_PAGES = 32  # up to here a loop is faster than calls of numpy
_INT32 = np.dtype(np.int32)
_HAS = (b"\0", b"\1")  # what the bytes of an array of booleans have: False, True


def copied(pages: Ids, first: int = 0, last: int | None = None) -> Pages:
    """Copy pages[first:last]."""
    end = len(pages) if last is None else last
    if not 0 <= first <= end <= len(pages):
        raise Misuse(f"[{first}, {end}) of {len(pages)} pages")
    own = pages if pages.dtype is _INT32 else _narrow(pages)
    return own[first:end].copy()  # type: ignore[return-value]


def claim(marks: Marks, pages: Ids) -> bool:
    """Mark pages; False, and nothing changed, unless each is in range, unmarked and named once."""
    return _turn(marks, pages, True)


def _turn(marks: Marks, pages: Ids, value: bool) -> bool:
    """Set the marks of `pages` to `value` if each has the other and is named once; else change nothing."""
    if len(pages) > FEW_PAGES:
        return _turn_many(marks, pages, value)
    found, end, flags = pages.tolist(), len(marks), marks.data
    for number, page in enumerate(found):
        if not 0 <= page < end or flags[page] is value:
            for turned in found[:number]:
                flags[turned] = not value
            return False
        flags[page] = value
    return True


def _turn_many(marks: Marks, pages: Ids, value: bool) -> bool:
    numbers = _unsigned(pages, len(marks))
    try:
        found = marks.take(numbers).tobytes()
    except IndexError:
        return False
    ordered = np.sort(numbers)
    if _HAS[value] in found or _HAS[True] in (ordered[1:] == ordered[:-1]).tobytes():
        return False
    marks.put(numbers, value)
    return True


def _unsigned(pages: Ids, end: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Ids as numbers that are too large where they are negative: looking them up tells all out of range."""
    if pages.dtype == np.int32:
        return pages.view(np.uint32)
    return pages.astype(np.int64, casting="same_kind").clip(-1, end).astype(np.uint32)


def joined(parts: Sequence[Pages]) -> Pages:
    """Join arrays of ids into one."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def mark(marks: Marks, pages: Ids, value: bool) -> None:
    """Set marks[page] = value for each page."""
    if len(pages) > FEW_PAGES:
        try:
            marks.take(_unsigned(pages, len(marks)))
        except IndexError:
            _refuse(marks, pages)
        marks.put(pages, value)
        return
    found, flags = pages.tolist(), marks.data
    if found and not (0 <= min(found) and max(found) < len(marks)):
        _refuse(marks, pages)
    for page in found:
        flags[page] = value


def _refuse(marks: Marks, pages: Ids) -> NoReturn:
    raise Misuse(f"pages {pages[:16]} are not all in 0..{len(marks) - 1}")


def take(stack: Pages, num_free: int, count: int, marks: Marks) -> Pages:
    """Take the last `count` of stack[:num_free], last first, and mark them."""
    if not 0 <= count <= num_free <= len(stack):
        raise Misuse(f"{count} pages of {num_free} of {len(stack)}")
    pages = stack[num_free - count : num_free][::-1].copy()
    if count > FEW_PAGES:
        marks.put(pages, True)
        return pages
    flags = marks.data
    for page in pages.tolist():
        flags[page] = True
    return pages


def give(stack: Pages, num_free: int, pages: Ids, marks: Marks) -> bool:
    """Put pages back where `take` finds them; False, and nothing changed, where one cannot be."""
    if not 0 <= num_free <= len(stack):
        raise Misuse(f"{num_free} pages of {len(stack)}")
    count = len(pages)
    if count > len(stack) - num_free or not _turn(marks, pages, False):
        return False
    stack[num_free : num_free + count] = pages[::-1]
    return True


def slots_of(pages: Ids, page_size: int) -> Slots:
    """Slots of pages, page after page: page * page_size + offset."""
    slots = pages.astype(np.int64)
    if page_size != 1:
        slots *= page_size
        slots = np.add.outer(slots, _offsets(page_size)).reshape(-1)
    return slots


@cache
def _offsets(page_size: int) -> Slots:
    return np.arange(page_size, dtype=np.int64)


def pages_of(slots: Ids, page_size: int, start: int, stop: int) -> Pages:
    """Pages of each page_size-th of slots[start:stop]."""
    if not 0 <= start <= stop <= len(slots) or page_size <= 0:
        raise Misuse(f"slots {start}..{stop} of {len(slots)}")
    first = slots[start:stop:page_size]
    if page_size == 1:
        return first.astype(np.int32)
    if len(first) > FEW_PAGES:
        return (first // page_size).astype(np.int32)
    return np.array([slot // page_size for slot in first.tolist()], np.int32)


def pages_at(address: int, is_narrow: bool, length: int, page_size: int, start: int, stop: int) -> Pages:
    """`pages_of` the slots at an address, int32 if narrow, else int64."""
    if address == 0 and length:
        raise Misuse(f"{length} slots at no address")
    run = ctypes.string_at(address, length * (4 if is_narrow else 8))
    if is_narrow:
        return pages_of(np.frombuffer(run, np.int32), page_size, start, stop)
    return pages_of(np.frombuffer(run, np.int64), page_size, start, stop)


def narrow(tokens: Tokens | array[int], start: int, stop: int) -> bytes | None:
    """tokens[start:stop] as bytes of int32; None if one is not in [0, 2**31)."""
    if not 0 <= start <= stop <= len(tokens):
        raise Misuse(f"tokens {start}..{stop} of {len(tokens)}")
    part = np.array(tokens[start:stop], np.int64) if isinstance(tokens, array) else tokens[start:stop]
    if np.bitwise_or.reduce(part) >> 31:  # a bit from there up, the sign's too, that any of them has
        return None
    return part.astype(np.int32).tobytes()


def num_equal(run: bytes, width: int, tokens: Tokens, start: int, stop: int) -> int:
    """Count how many of tokens[start:stop], from the first on, a packed run has too."""
    if not 0 <= start <= stop <= len(tokens):
        raise Misuse(f"tokens {start}..{stop} of {len(tokens)}")
    own = np.frombuffer(run, np.int32 if width == 4 else np.int64)[: stop - start]
    if not len(own):
        return 0
    differ = own != tokens[start : start + len(own)]
    first = int(differ.argmax())
    return first if differ[first] else len(own)


def track(*objects: object) -> None:
    """Do nothing: Python cannot hide objects from its collector."""


def untrack(*objects: object) -> None:
    """Do nothing: Python cannot hide objects from its collector."""


def _narrow(pages: Ids) -> Pages:
    if pages.dtype == np.int32:
        return pages  # type: ignore[return-value]
    narrow = pages.astype(np.int32)
    if not np.array_equal(narrow, pages):
        raise Misuse(f"{pages[:16]} are no page ids")
    return narrow
