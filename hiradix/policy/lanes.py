"""Lanes: the leaves of one tier by class, oldest first, and which of them goes next.

A leaf's worth depends on its age, so it changes while nobody touches it. A lane keeps its leaves sorted by
their last use, in which order all of them grow old; it finds the age with the least index that a leaf of it
has by search, and knows until when that stands. So leaves cost nothing while they age.

Two forms that choose the same: `lanes_python`, and `_lanes.c`, which `make compiled` builds and which takes
its place where it is found.

    Lanes(tables)                       none yet. tables: `ClassTables`, or what has its `rows` and `version`
    enter(place, class_id, used, depth) adds it; its seat. Of a class those used at one time go least depth
                                        first, then as they came
    left(place, seat)                   it is void: its entry is None, or belongs to another
    settle(clock)                       brings the lanes up to `clock` and the tables' index
    first(clock)                        the same; who goes next, None if there is nobody
    rank                                the index of who that was

Of equal index goes first: the least class, of that the youngest age, of that the oldest leaf. A place whose
node was merged away may still be given. clock never falls; no place was used later than it says.
Cost: O(log n) and a move of what was used later for who enters, O(lanes) where another lane may have become
the least, 64 steps where the least has lost its first.
"""

from __future__ import annotations

from typing import Any

from hiradix.policy import lanes_python
from hiradix.tree.native import form_in_c

form = form_in_c("hiradix.policy._lanes", lanes_python)
IS_BUILT: bool = form is not lanes_python
Lanes: Any = form.Lanes
