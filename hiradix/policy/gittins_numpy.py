"""The Gittins index by numpy: `hiradix.policy.gittins` without `_gittins.c`, and its reference."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hiradix.policy.class_ranks import BUCKETS

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


_FAMILIES = 3  # the first classes
_PRIOR_REUSE = 0.3  # of what nothing is known about, spread evenly over the buckets
_FAMILY_VOTES = 10.0  # of the prior, against what a family has seen
_REUSE_VOTES = 6.0  # of the parent's share that comes back, against the class's own
_SHAPE_VOTES = 32.0  # of a family's think times, against the class's own
_NEAR_SHAPE_VOTES = 8.0  # of those of a class below
_MAX_HAZARD, _MAX_REUSE = 0.999, 0.995
_ROUNDED, _LEAST = 1e-9, 1e-300  # below, 1 less what does not come back has lost its digits; and nothing does


def hazard_of(votes: Floats, parents: Ints, curves: Ints, levels: Ints) -> Floats:
    below = [(levels == level).nonzero()[0] for level in range(1, int(levels.max()) + 1)]
    used, exposed, started = np.moveaxis(_with_descendants(votes, parents, below), 1, 0)
    exposed = np.maximum(exposed, used)
    hazard: Floats = np.empty_like(used, order="C")
    reuse = np.zeros(len(votes))
    family = np.arange(_FAMILIES)
    prior = _PRIOR_REUSE / BUCKETS / (1 - _PRIOR_REUSE / BUCKETS * np.arange(BUCKETS))
    hazard[family] = (used[family] + _FAMILY_VOTES * prior) / (exposed[family] + _FAMILY_VOTES)
    np.minimum(hazard, _MAX_HAZARD, out=hazard)
    density: Floats = np.empty_like(hazard)
    density[family], reuse[family] = _think_times(hazard[family])
    for c in below:
        f = density[curves[c]]
        shape_votes = np.where(curves[c] < _FAMILIES, _SHAPE_VOTES, _NEAR_SHAPE_VOTES)[:, None]
        seen, all_votes = used[c].sum(1), (started[c] * f).sum(1)
        share = (seen + _REUSE_VOTES * reuse[parents[c]]) / (np.maximum(all_votes, seen) + _REUSE_VOTES)
        reuse[c] = np.minimum(share, _MAX_REUSE)
        p = reuse[c][:, None]
        expected = p * f / (1 - p * (np.cumsum(f, 1) - f))
        own = (used[c] + shape_votes * expected) / (exposed[c] + shape_votes)
        hazard[c] = np.minimum(own, _MAX_HAZARD)
        density[c], _ = _think_times(hazard[c])
    return hazard


def _think_times(hazard: Floats) -> tuple[Floats, Floats]:
    """The distribution over the buckets of the data that comes back, and the share that does."""
    alive = np.ones((len(hazard), BUCKETS + 1))
    np.cumprod(1 - hazard, 1, out=alive[:, 1:])
    reuse, times = 1 - alive[:, -1], alive[:, :-1] * hazard
    few = reuse < _ROUNDED
    if few.any():
        reuse[few] = np.maximum(times[few].sum(1), _LEAST)
    return times / reuse[:, None], reuse


def _with_descendants(total: Floats, parents: Ints, below: list[Ints]) -> Floats:
    """Adds votes to those of the ancestors, in place. below: classes by depth below the families."""
    for level in reversed(below):
        for number in level:
            total[parents[number]] += total[number]
    total[0] += total[1] + total[2]
    return total


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
