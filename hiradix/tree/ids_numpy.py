"""Arrays of page ids and of tokens by numpy: `hiradix.tree.ids` without `_ids.c`, and its reference."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hiradix.errors import Misuse

Pages = npt.NDArray[np.int32]
Ids = npt.NDArray[np.integer[Any]]
Marks = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]

FEW_PAGES = 32  # up to here a loop is faster than calls of numpy


def copied(pages: Ids, first: int = 0, last: int | None = None) -> Pages:
    """See `hiradix.tree.ids`."""
    end = len(pages) if last is None else last
    if not 0 <= first <= end <= len(pages):
        raise Misuse(f"[{first}, {end}) of {len(pages)} pages")
    return _narrow(pages)[first:end].copy()


def claim(marks: Marks, pages: Ids) -> bool:
    """See `hiradix.tree.ids`."""
    if len(pages) > FEW_PAGES:
        ordered = np.sort(_narrow(pages))
        if ordered[0] < 0 or ordered[-1] >= len(marks) or marks.take(ordered).any():
            return False
        if (ordered[1:] == ordered[:-1]).any():
            return False
        marks.put(ordered, True)
        return True
    found, end, flags = pages.tolist(), len(marks), marks.data
    for number, page in enumerate(found):
        if not 0 <= page < end or flags[page]:
            for marked in found[:number]:
                flags[marked] = False
            return False
        flags[page] = True
    return True


def joined(parts: Sequence[Pages]) -> Pages:
    """See `hiradix.tree.ids`."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def mark(marks: Marks, pages: Ids, value: bool) -> None:
    """See `hiradix.tree.ids`."""
    if not _are_in(pages, len(marks)):
        raise Misuse(f"pages {pages[:16]} are not all in 0..{len(marks) - 1}")
    _put(marks, pages, value)


def _put(marks: Marks, pages: Ids, value: bool) -> None:
    if len(pages) > FEW_PAGES:
        marks.put(pages, value)
        return
    flags = marks.data
    for page in pages.tolist():
        flags[page] = value


def take(stack: Pages, num_free: int, count: int, marks: Marks) -> Pages:
    """See `hiradix.tree.ids`."""
    if not 0 <= count <= num_free <= len(stack):
        raise Misuse(f"{count} pages of {num_free} of {len(stack)}")
    pages = stack[num_free - count : num_free][::-1].copy()
    _put(marks, pages, True)
    return pages


def give(stack: Pages, num_free: int, pages: Ids, marks: Marks) -> bool:
    """See `hiradix.tree.ids`."""
    if not 0 <= num_free <= len(stack):
        raise Misuse(f"{num_free} pages of {len(stack)}")
    count = len(pages)
    if count > len(stack) - num_free or not _unmark(marks, pages):
        return False
    stack[num_free : num_free + count] = pages[::-1]
    return True


def _unmark(marks: Marks, pages: Ids) -> bool:
    """Unmark `pages` if each is marked and named once; else change nothing."""
    if len(pages) > FEW_PAGES:
        ordered = np.sort(pages)
        if ordered[0] < 0 or ordered[-1] >= len(marks) or not marks.take(ordered).all():
            return False
        if (ordered[1:] == ordered[:-1]).any():
            return False
        marks.put(ordered, False)
        return True
    found, end, flags = pages.tolist(), len(marks), marks.data
    for number, page in enumerate(found):
        if not 0 <= page < end or not flags[page]:
            for unmarked in found[:number]:
                flags[unmarked] = True
            return False
        flags[page] = False
    return True


def slots_of(pages: Ids, page_size: int) -> Slots:
    """See `hiradix.tree.ids`."""
    slots = pages.astype(np.int64)
    if page_size != 1:
        slots *= page_size
        slots = (slots[:, None] + _offsets(page_size)).reshape(-1)
    return slots


@cache
def _offsets(page_size: int) -> Slots:
    return np.arange(page_size, dtype=np.int64)


def pages_of(slots: Ids, page_size: int, start: int, stop: int) -> Pages:
    """See `hiradix.tree.ids`."""
    if not 0 <= start <= stop <= len(slots) or page_size <= 0:
        raise Misuse(f"slots {start}..{stop} of {len(slots)}")
    first = slots[start:stop:page_size]
    if page_size == 1:
        return first.astype(np.int32)
    if len(first) > FEW_PAGES:
        return (first // page_size).astype(np.int32)
    return np.array([slot // page_size for slot in first.tolist()], np.int32)


def narrow(tokens: Tokens | array[int], start: int, stop: int) -> bytes | None:
    """See `hiradix.tree.ids`."""
    if not 0 <= start <= stop <= len(tokens):
        raise Misuse(f"tokens {start}..{stop} of {len(tokens)}")
    part = np.array(tokens[start:stop], np.int64) if isinstance(tokens, array) else tokens[start:stop]
    if np.bitwise_or.reduce(part) >> 31:  # a bit from there up, the sign's too, that any of them has
        return None
    return part.astype(np.int32).tobytes()


def num_equal(run: bytes, width: int, tokens: Tokens, start: int, stop: int) -> int:
    """See `hiradix.tree.ids`."""
    if not 0 <= start <= stop <= len(tokens):
        raise Misuse(f"tokens {start}..{stop} of {len(tokens)}")
    own = np.frombuffer(run, np.int32 if width == 4 else np.int64)[: stop - start]
    if not len(own):
        return 0
    differ = own != tokens[start : start + len(own)]
    first = int(differ.argmax())
    return first if differ[first] else len(own)


def track(*objects: object) -> None:
    """See `hiradix.tree.ids`."""


def untrack(*objects: object) -> None:
    """See `hiradix.tree.ids`."""


def _narrow(pages: Ids) -> Pages:
    if pages.dtype == np.int32:
        return pages  # type: ignore[return-value]
    narrow = pages.astype(np.int32)
    if not np.array_equal(narrow, pages):
        raise Misuse(f"{pages[:16]} are no page ids")
    return narrow


def _are_in(pages: Ids, end: int) -> bool:
    if len(pages) > FEW_PAGES:
        return bool(0 <= pages.min() and pages.max() < end)
    found = pages.tolist()
    return not found or (0 <= min(found) and max(found) < end)
