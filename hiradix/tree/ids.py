"""Operations on arrays of page ids and tokens that every scheduler step needs, each in one call.

Two forms with the same results: `ids_numpy`, and `_ids.c`, which `make compiled` builds and which is used where
it is found. A call of the second costs a tenth; a step makes about thirty.

Page ids are int32 [P], contiguous; arrays of other integers are copied. Results belong to the caller.
Ids that are out of range, or no ids, raise AssertionError before anything is changed, if not said otherwise.

    copied(pages, first=0, last=P)           a copy of [first, last)
    claim(marks, pages)                      mark them; False, and nothing changed, unless each is in range,
                                             unmarked and named once
    joined(parts)                            one array of a list's int32 arrays
    mark(marks, pages, value)                marks[page] = value for each page; marks: bool
    take(stack, num_free, count, marks)      the last `count` of stack[:num_free], last first; marks them
    give(stack, num_free, pages, marks)      put them back where `take` finds them, and unmark them; False,
                                             and nothing changed, unless each is marked, named once, has room
    slots_of(pages, page_size)               int64: page * page_size + offset, page after page
    pages_of(slots, page_size, start, stop)  int32: slot // page_size of each page_size-th of [start, stop)
    pages_at(address, is_narrow, length, page_size, start, stop)  the same of slots in memory that the caller
                                             keeps, int32 if narrow, else int64: to make an array of a tensor
                                             takes longer than all else
    narrow(tokens, start, stop)              bytes: [start, stop) as int32; None if one is not in [0, 2**31)
    num_equal(run, width, tokens, start, stop)  how many of [start, stop), from the first on, `run` has too

Tokens are int64 [N], for `narrow` an `array('q')` too; a run is bytes of tokens, `width` each: 4 (int32) or 8
(int64).

    untrack(*objects)  the garbage collector, which takes 0.1 ms for a hundred nodes, looks at these no more;
                       whoever has them breaks their cycles. By numpy nothing: Python cannot do that
    track(*objects)    it does again
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hiradix.tree import ids_numpy
from hiradix.tree.ids_numpy import Ids, Marks, Pages, Slots, Tokens
from hiradix.tree.native import form_in_c

_form = form_in_c("hiradix.tree._ids", ids_numpy)
IS_BUILT: Final[bool] = _form is not ids_numpy
copied: Final[Callable[..., Pages]] = _form.copied
claim: Final[Callable[[Marks, Ids], bool]] = _form.claim
joined: Final[Callable[[list[Pages]], Pages]] = _form.joined
mark: Final[Callable[[Marks, Ids, bool], None]] = _form.mark
take: Final[Callable[[Pages, int, int, Marks], Pages]] = _form.take
give: Final[Callable[[Pages, int, Ids, Marks], bool]] = _form.give
slots_of: Final[Callable[[Ids, int], Slots]] = _form.slots_of
pages_of: Final[Callable[[npt.NDArray[np.integer[Any]], int, int, int], Pages]] = _form.pages_of
pages_at: Final[Callable[[int, bool, int, int, int, int], Pages]] = _form.pages_at
narrow: Final[Callable[[Tokens | array[int], int, int], bytes | None]] = _form.narrow
num_equal: Final[Callable[[bytes, int, Tokens, int, int], int]] = _form.num_equal
track: Final[Callable[..., None]] = _form.track
untrack: Final[Callable[..., None]] = _form.untrack
