"""Cells of an experiment: a trace, a policy and capacities each, side by side in processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty
from time import process_time
from typing import Any

import numpy as np

from hiradix.apps.replay.generate import generate
from hiradix.apps.replay.models import MODELS
from hiradix.apps.replay.play import REASONS, TIER_NAMES, Played, Player
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.traces.readers import read_trace
from hiradix.apps.traces.sessions import EVERY_SESSION, Fleet
from hiradix.apps.traces.trace import Trace
from hiradix.errors import ConfigError
from hiradix.policy.eviction import eviction_policies

SYNTHETIC = "synthetic:"
TELL_S = 0.2


@dataclass(frozen=True)
class Source:
    """The source of a trace: a file, or `synthetic:KIND`. Small enough to hand to every process.

    fleet: how a file of sessions is merged; seed is that of a synthetic trace.
    """

    name: str
    seed: int = 0
    limit: int | None = None
    time_scale: float = 1.0
    fleet: Fleet = EVERY_SESSION

    def load(self) -> Trace:
        """ConfigError if it cannot be."""
        if self.name.startswith(SYNTHETIC):
            trace = generate(self.name.removeprefix(SYNTHETIC), self.seed, self.limit)
        else:
            trace = read_trace(Path(self.name), self.limit, self.fleet)
        return trace if self.time_scale == 1 else trace.scaled(self.time_scale)


@dataclass(frozen=True)
class Cell:
    """One run. policy: an eviction policy, a pair `device,host` of them, or a model (device tier only)."""

    source: Source
    policy: str
    tiers: Tiers
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CellResult:
    """A cell's run over a trace."""

    cell: Cell
    trace: Trace
    played: Played

    @property
    def prompt_tokens(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([call.prompt_tokens for call in self.trace.calls], np.int64)

    def rate(self, span: slice = slice(None), tier: str | None = None) -> float:
        """Token hit rate in %, of a span of requests, of one tier or all."""
        return self.played.rate(self.prompt_tokens, span, tier)


def check_policy(name: str, tiers: Tiers) -> None:
    """ConfigError unless there is such a policy for these tiers."""
    if name in MODELS:
        if tiers.host:
            raise ConfigError(f"{name} is a model of one tier: it cannot be played with --host")
        return
    unknown = [part for part in name.split(",") if part not in eviction_policies()]
    if unknown:
        known = ", ".join([*eviction_policies(), *MODELS])
        raise ConfigError(f"--policies: {unknown[0]!r} is not one of {known}")


def run_cell(cell: Cell, trace: Trace, progress: Callable[[int], None] = lambda done: None) -> Played:
    """Play it here and now."""
    if cell.policy not in MODELS:
        return Player(trace, cell.policy, cell.tiers, cell.config).play(progress)
    started = process_time()
    hits = MODELS[cell.policy](trace, max(cell.tiers.device // trace.block_tokens, 1))
    none = np.zeros(len(trace.calls), np.int64)
    progress(len(trace.calls))
    return Played(
        {name: hits if name == "device" else none for name in TIER_NAMES},
        {name: none for name in REASONS},
        cpu_s=process_time() - started,
    )


# -- side by side ---------------------------------------------------------------------------

_traces: dict[Source, Trace] = {}
_progress: Any = None


def _begin(progress: Any) -> None:
    global _progress
    _progress = progress
    os.nice(5)


def _work(job: tuple[int, Cell]) -> tuple[int, Played]:
    number, cell = job
    if cell.source not in _traces:
        _traces.clear()
        _traces[cell.source] = cell.source.load()
    return number, run_cell(cell, _traces[cell.source], lambda done: _progress.put((number, done)))


def run(
    cells: Sequence[Cell], processes: int, progress: Callable[[int, int], None] = lambda cell, done: None
) -> list[CellResult]:
    """The results in the order of the cells. progress: called with a cell's number and how far it is."""
    traces = {source: source.load() for source in dict.fromkeys(cell.source for cell in cells)}
    played = dict(_played(cells, traces, processes, progress))
    return [CellResult(cell, traces[cell.source], played[number]) for number, cell in enumerate(cells)]


def _played(
    cells: Sequence[Cell],
    traces: Mapping[Source, Trace],
    processes: int,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[int, Played]]:
    """The cells' numbers and what they found, as they come."""
    if processes <= 1:
        for number, cell in enumerate(cells):
            yield number, run_cell(cell, traces[cell.source], partial(progress, number))
        return
    context = multiprocessing.get_context("spawn")
    news, others = context.Queue(), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(processes, len(cells)), context, _begin, (news,))
    try:
        left = {pool.submit(_work, job) for job in enumerate(cells)}
        while left:
            done, left = wait(left, TELL_S, FIRST_COMPLETED)
            _pass_on(news, progress)
            for number, played in (each.result() for each in done):
                progress(number, len(traces[cells[number].source].calls))
                yield number, played
    except BrokenProcessPool as error:
        raise ConfigError(f"--processes {processes}: one was killed, too little memory?") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()


def _pass_on(news: Any, progress: Callable[[int, int], None]) -> None:
    try:
        while True:
            progress(*news.get_nowait())
    except Empty:
        return
