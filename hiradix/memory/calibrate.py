"""`--hicache-io-backend auto`: measured at start, then for each copy the transport that was fastest.

Every candidate copies the same few pages between the two pools, in turn, for a growing number of pages. What
a copy costs in between is read off the line through the measured sizes, and past the last one it grows as it
did from half of that on. Where the winner changes, sizes in between are measured too. Writes to the host are
measured for all layers, loads for one layer, as they are used.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hiradix.memory.pools import Pool
from hiradix.memory.prove import own_stream, settle
from hiradix.memory.shape import page_bytes
from hiradix.memory.transport import PageIds, PerPair, Transport

logger = logging.getLogger(__name__)

Timer = Callable[[Callable[[], None]], float]  # runs a copy to its end; the seconds it took

MAX_PAGES = 256
MAX_BYTES = 32 << 20  # of one measured copy
REPEATS = 3
BUDGET_S = 0.25  # of timed copies per direction; when it is spent, no further size is measured
TIE = 0.01  # the first candidate, which takes no SMs, wins what is as close as that


@dataclass(frozen=True)
class Curve:
    """Seconds of a candidate's copies of `pages[i]` pages; at least one size, ascending."""

    pages: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, num_pages: float) -> float:
        """Seconds for `num_pages` pages, on the line through the two measured sizes around it."""
        if len(self.pages) == 1:
            return self.seconds[0] * num_pages / self.pages[0]
        if num_pages > self.pages[-1]:
            return self._beyond(num_pages)
        i = max(1, bisect_left(self.pages, num_pages))
        first, last = self.pages[i - 1], self.pages[i]
        slope = (self.seconds[i] - self.seconds[i - 1]) / (last - first)
        return max(0.0, self.seconds[i - 1] + slope * (num_pages - first))

    def _beyond(self, num_pages: float) -> float:
        """Further on as from half of the last size: between two that are close together is noise."""
        half = max(1, bisect_right(self.pages, self.pages[-1] / 2)) - 1
        slope = (self.seconds[-1] - self.seconds[half]) / (self.pages[-1] - self.pages[half])
        return self.seconds[-1] + max(0.0, slope) * (num_pages - self.pages[-1])


@dataclass(frozen=True)
class Choice:
    """Measurements between two pools: a curve per candidate, for copies of `num_layers` layers."""

    num_layers: int
    curves: tuple[Curve, ...]

    def best(self, num_pages: int, num_layers: int) -> int:
        """The index of the candidate that copies so many pages of so many layers fastest."""
        seconds = [curve.at(num_pages * num_layers / self.num_layers) for curve in self.curves]
        least = min(seconds)
        return next(i for i, own in enumerate(seconds) if own <= least * (1 + TIE))


class CalibratedTransport:
    """Gives each copy to the candidate that was measured to be fastest for it.

    candidates: the first one wins ties. fallback: for pools that were not calibrated.
    """

    name = "auto"

    def __init__(self, candidates: Sequence[Transport], fallback: Transport) -> None:
        self.candidates = tuple(candidates)
        self.note = "the faster of " + ", ".join(each.name for each in candidates) + ", measured at start"
        self._fallback = fallback
        self._choices: PerPair[Choice] = PerPair()

    def calibrate(self, device: Pool, host: Pool, timer: Timer | None = None) -> None:
        """Measure both directions between the pools; no further size once BUDGET_S of one is spent.

        Writes to pages of both, so call it before they hold anything. timer: `wall_timer`, if None.
        """
        timer = timer or wall_timer(device.device)
        with own_stream(device.device):
            for src, dst, layers in (
                (device, host, range(device.shape.num_layers)),
                (host, device, range(1)),
            ):
                choice = self._measure(src, dst, layers, timer)
                self._choices.set(src, dst, choice)
                logger.info("%s", self._summary(choice, "to the host" if src is device else "to the device"))

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        num_layers = src.shape.num_layers if layers is None else len(layers)
        chosen = self.chosen(src, dst, len(src_pages), num_layers)
        chosen.copy_pages(src, dst, src_pages, dst_pages, layers)

    def chosen(self, src: Pool, dst: Pool, num_pages: int, num_layers: int) -> Transport:
        """The transport to use for a copy of that many pages and layers."""
        choice = self._choices.get(src, dst)
        return self._fallback if choice is None else self.candidates[choice.best(num_pages, num_layers)]

    def _measure(self, src: Pool, dst: Pool, layers: range, timer: Timer) -> Choice:
        own = page_bytes(src.shape, src.page_size) * len(layers) // src.shape.num_layers
        most = max(1, min(MAX_PAGES, MAX_BYTES // own, src.page_limit - 1, dst.page_limit - 1))
        seconds: dict[int, list[float]] = {}  # by pages, of each candidate
        spent, num_pages = 0.0, _next_size(seconds, most)
        while num_pages is not None and (not seconds or spent < BUDGET_S):
            measured = self._round(src, dst, (num_pages, layers), timer)
            seconds[num_pages] = [min(times) for times in measured]
            spent += sum(sum(times) for times in measured)
            num_pages = _next_size(seconds, most)
        sizes = tuple(sorted(seconds))
        by_candidate = zip(*(seconds[size] for size in sizes), strict=True)
        return Choice(len(layers), tuple(Curve(sizes, tuple(times)) for times in by_candidate))

    def _round(self, src: Pool, dst: Pool, copy: tuple[int, range], timer: Timer) -> list[list[float]]:
        """Seconds of each candidate for one size, in turn, so that what disturbs one disturbs the next."""
        num_pages, layers = copy
        pages = np.arange(1, num_pages + 1, dtype=np.int64)
        pages = pages * (min(src.page_limit, dst.page_limit) - 1) // num_pages  # with gaps, as in use
        calls = [_call(each, (src, dst, pages, layers)) for each in self.candidates]
        for call in calls:  # the first compiles, makes tables, allocates
            timer(call)
        found: list[list[float]] = [[] for _ in calls]
        for _ in range(REPEATS):
            for call, own in zip(calls, found, strict=True):
                own.append(timer(call))
        return found

    def _summary(self, choice: Choice, direction: str) -> str:
        sizes = choice.curves[0].pages
        parts = []
        for size in sizes:
            name = self.candidates[choice.best(size, choice.num_layers)].name
            speeds = "/".join(f"{curve.at(size) * 1e6:.0f}" for curve in choice.curves)
            parts.append(f"{size} {name} ({speeds} us)")
        return f"--hicache-io-backend auto, {direction}, by pages: {', '.join(parts)}"


def _next_size(seconds: Mapping[int, Sequence[float]], most: int) -> int | None:
    """The pages to measure next: twice the most so far, then between sizes that different candidates win."""
    sizes = sorted(seconds)
    if not sizes:
        return 1
    if sizes[-1] * 2 <= most:
        return sizes[-1] * 2
    for size, larger in pairwise(sizes):
        winner, next_winner = (times.index(min(times)) for times in (seconds[size], seconds[larger]))
        if winner != next_winner and larger - size > max(1, size // 8):
            return (size + larger) // 2
    return None


def _call(transport: Transport, copy: tuple[Pool, Pool, Any, range]) -> Callable[[], None]:
    src, dst, pages, layers = copy
    return lambda: transport.copy_pages(src, dst, pages, pages, layers)


def wall_timer(device: torch.device) -> Timer:
    """Wall-clock seconds until a copy has ended, what the host does for it included."""

    def seconds(copy: Callable[[], None]) -> float:
        begin = time.perf_counter()
        copy()
        settle(device)
        return time.perf_counter() - begin

    return seconds
