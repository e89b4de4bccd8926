"""The Gittins index by numpy: `hiradix.policy.gittins` without `_gittins.c`, and its reference."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hiradix.policy.ranks import BUCKETS

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


def index_of(hazard: Floats, widths: Floats) -> tuple[Floats, Floats, Ints]:
    if not (_is_table(hazard, 2) and _is_table(widths, 1)):
        raise TypeError(f"no float64 of {BUCKETS} age buckets")
    index = gittins(hazard, widths)
    return (index, *falling(index))


def gittins(hazard: Floats, widths: Floats) -> Floats:
    q = np.ascontiguousarray(hazard.T)  # a bucket is a row: all that begin `ahead` before one are contiguous
    survival, residence, widths = 1 - q, 1 - q / 2, widths[:, None]
    best, alive, scratch = np.zeros_like(q), np.ones_like(q), np.empty_like(q)
    hits, tokens = np.zeros_like(q), np.zeros_like(q)
    for ahead in range(BUCKETS):
        last = BUCKETS - ahead
        s, h, t, b, x = alive[:last], hits[:last], tokens[:last], best[:last], scratch[:last]
        h += np.multiply(s, q[ahead:], out=x)
        np.multiply(s, residence[ahead:], out=x)
        x *= widths[ahead:]
        t += x
        s *= survival[ahead:]
        np.maximum(b, np.divide(h, t, out=x), out=b)
    return best.T


def falling(index: Floats) -> tuple[Floats, Ints]:
    least = np.minimum.accumulate(index, 1)
    falls = np.full(index.shape, BUCKETS)
    rows, buckets = (least[:, 1:] < least[:, :-1]).nonzero()
    falls[rows, buckets] = buckets + 1
    return least, np.minimum.accumulate(falls[:, ::-1], 1)[:, ::-1]


def _is_table(array: object, num_dims: int) -> bool:
    if not isinstance(array, np.ndarray) or array.ndim != num_dims:
        return False
    return bool(array.dtype == np.float64) and array.shape[-1] == BUCKETS
