"""The value of keeping data (its Gittins index) from the hazard of its next use at each age, and that hazard
from the uses seen of its class.

Two forms with the same results to the last bit: `gittins_numpy`, and `_gittins.c`, which `make compiled`
builds and which takes its place where it is found.

    hazard_of(votes, parents, curves, levels)  hazard
    index_of(hazard, widths)                     index, least, falls: float64, float64, int64, [classes, 64]

votes: float64 [classes, 3, 64], per age bucket of what was used, could have been, and lived through it; the
    caller's own, which is changed. The first three classes are the families: all data, and two parts of it.
parents, curves, levels: int64 [classes]: of each class the number of its parent, which is less; of the class,
    less deep, that it borrows the curve of think times from; and how far it is below its family.

hazard: float64 [classes, 64], of what lives to see an age bucket the share that is used in it.
widths: float64 [64], the buckets' tokens. TypeError for other arrays.
index: per class and bucket, the largest hits per token that keeping from there up to some later one gives.
least: up to each bucket, the least index. falls: the next bucket with a lesser one; 64 if there is none.
Cost of the index: 64 * 64 / 2 steps a class, about 2 us; by numpy 0.3 ms at the least.
"""

from __future__ import annotations

from collections.abc import Callable

from hiradix.policy import gittins_numpy
from hiradix.policy.gittins_numpy import Floats, Ints
from hiradix.tree.native import form_in_c

form = form_in_c("hiradix.policy._gittins", gittins_numpy)
IS_BUILT: bool = form is not gittins_numpy
hazard_of: Callable[[Floats, Ints, Ints, Ints], Floats] = form.hazard_of
index_of: Callable[[Floats, Floats], tuple[Floats, Floats, Ints]] = form.index_of
