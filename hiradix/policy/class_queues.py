"""The leaves of one tier in queues, one a class and each the least recently used first, and which goes next.

A leaf's worth depends on its age, so it changes while nobody touches it. A queue keeps its leaves sorted by
their last use, in which order all of them grow old; it finds the age with the least index that a leaf of it
has by search, and knows until when that stands. So leaves cost nothing while they age.

Two forms that choose the same: `class_queues_python`, and `_class_queues.c`, which `make compiled` builds and
which takes its place where it is found.

    ClassQueues(tables)                 empty. tables: `ClassTables`, or what has its `rows` and `version`
    enter(place, class_id, used, depth) adds it; its seat. Of a class those used at one time go least depth
                                        first, then as they came
    left(place, seat)                   it is void: its entry is None, or belongs to another
    settle(clock)                       brings the queues up to `clock` and the tables' index
    first(clock)                        the same; which leaf goes next, None if there is none
    rank                                the index of that leaf

Of equal index goes first: the least class, of that the youngest age, of that the oldest leaf. A place whose
node was merged away may still be given. clock never falls; no place was used later than it says.
Cost: O(log n) and a move of what was used later for each that enters, O(queues) where another queue may have
become the least, 64 steps where the least has lost its first.
"""

from __future__ import annotations

from typing import Any

from hiradix.policy import class_queues_python
from hiradix.tree.native import form_in_c

form = form_in_c("hiradix.policy._class_queues", class_queues_python)
IS_BUILT: bool = form is not class_queues_python
ClassQueues: Any = form.ClassQueues
