"""Counts uses of segments as votes in GHD's tables.

Two forms with the same results to the last bit: `counting_numpy`, and `_counting.c`, which `make compiled`
builds and which takes its place where it is found.

    count(events, columns, tables, base, clock)

events: lists of whole numbers: of the segments used again number, age and pages of one after the other; of
those that are not known any more number and pages. A number less than `base` has no row: it has no say.
columns: of the rows, by age, born and class (int64 [rows]), pages at first and pages left (float64 [rows]);
and per bucket the first number that has not left it (int64 [64]). pages left and that one are changed.
tables: used, exposed, started: float64 [classes, 64], to which is added.
TypeError for other arrays; an error for a row or class that there is not.
Cost: what happened since the last time, and 64 * classes where something did; by numpy 0.1 ms at the least.
"""

from __future__ import annotations

from collections.abc import Callable

from hiradix.policy import counting_numpy
from hiradix.policy.counting_numpy import Columns, Events, Tables
from hiradix.tree.native import form_in_c

form = form_in_c("hiradix.policy._counting", counting_numpy)
IS_BUILT: bool = form is not counting_numpy
count: Callable[[Events, Columns, Tables, int, int], None] = form.count
