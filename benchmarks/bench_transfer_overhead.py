"""What do prompts that nobody asked before pay for the tiers, beside what their bytes cost on this machine?

Four prompts of SmolLM2-135M are computed with each configuration in turn, on one set of weights, until every
page is where it goes. `added` is the CPU time of the whole process but the forward passes: scheduler thread
and workers, less the same with the cache off. `whole` has the forwards in it too, and so what the tiers cost
them in caches and memory bandwidth, and the noise of four seconds of matrix products.

floor: the same bytes, copied once, summed up once and written once, in calls of a page each.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from common import Row

from hiradix.apps.engine.api import EngineConfig, SamplingParams
from hiradix.apps.engine.engine import Engine
from hiradix.config import HiCacheConfig, parse_extra_config

PAGE = 16
ROUNDS = 5
NUM_PROMPTS, PROMPT_TOKENS = 4, 384
TARGET = 1.0  # per cent
OFF = "cache off"
TIERS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "host": (None, {}),
    "host + file": ("file", {}),
    "host + disk": ("disk", {}),
    "host + disk, direct_writes": ("disk", {"direct_writes": True}),
}
FLOORS = dict(zip(TIERS, ("host", "file", "disk", "direct"), strict=True))


@dataclass(frozen=True)
class Spent:
    """CPU seconds of one turn: of the process, and of that outside the forward passes."""

    whole: float
    beside: float


class TimedModel:
    """A model that adds up the CPU time of its forwards; one for all engines."""

    def __init__(self, model: Any):
        self._model = model
        self.forward_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any) -> Any:
        start_s = time.thread_time()
        try:
            return self._model.forward(*args)
        finally:
            self.forward_s += time.thread_time() - start_s


def config(name: str, folder: Path) -> HiCacheConfig:
    if name == OFF:
        return HiCacheConfig(page_size=PAGE, disable_radix_cache=True)
    backend, options = TIERS[name]
    if backend is not None:
        path = str(folder / name.replace(" ", "_"))
        options = {f"{backend}_storage_path": path, "max_size": "2GiB", "prefetch_threshold": PAGE, **options}
    return HiCacheConfig(
        page_size=PAGE, enable_hierarchical_cache=True, hicache_ratio=1.0, hicache_storage_backend=backend,
        hicache_storage_backend_extra_config=parse_extra_config(json.dumps(options) if backend else None),
    )  # fmt: skip


@contextmanager
def engines(model: Path, folder: Path) -> Iterator[tuple[TimedModel, dict[str, Engine]]]:
    """An engine per configuration, all over the same weights."""
    made: dict[str, Engine] = {}
    timed: TimedModel | None = None
    for name in (OFF, *TIERS):
        engine = Engine(EngineConfig(str(model), cache=config(name, folder), max_total_tokens=2048))
        timed = timed or TimedModel(engine._model)
        engine._model = timed  # type: ignore[assignment]
        made[name] = engine
    assert timed is not None
    try:
        yield timed, made
    finally:
        for engine in made.values():
            engine.close()


def turn(engine: Engine, model: TimedModel, seed: int, shape: tuple[int, int]) -> Spent:
    """Prompts that share nothing with any before, until all their pages are where they go. shape: how many
    prompts, of how many tokens."""
    rng = np.random.default_rng(seed)
    model.forward_s, start_s = 0.0, time.process_time()
    num_prompts, num_tokens = shape
    for number in range(num_prompts):
        prompt = rng.integers(100, min(40_000, engine.info().vocab_size), num_tokens).tolist()
        engine.add_request(f"{seed}-{number}", prompt, SamplingParams(max_new_tokens=2, ignore_eos=True))
    while not engine.is_idle():
        engine.step()
        if engine.is_blocked or not engine.has_work:
            engine.wait(0.1)
    whole = time.process_time() - start_s
    return Spent(whole, whole - model.forward_s)


class Floors:
    """What the bytes of one turn cost without any cache around them."""

    def __init__(self, page_bytes: int, folder: Path, shape: tuple[int, int]):
        num_pages = shape[0] * (shape[1] // PAGE)
        self._source = np.random.default_rng(0).integers(0, 255, (num_pages, page_bytes), np.uint8)
        memory = mmap.mmap(-1, self._source.nbytes)  # begins on a page, which O_DIRECT asks for
        self._target = np.frombuffer(memory, np.uint8).reshape(self._source.shape)
        self._folder = folder
        self._num_files = 0

    @property
    def num_bytes(self) -> int:
        return self._source.nbytes

    def host(self) -> float:
        return _cpu_s(lambda: np.copyto(self._target, self._source))

    def file(self) -> float:
        """A new file per page."""

        def write() -> None:
            for page in self._target:
                self._num_files += 1
                fd = os.open(self._folder / f"{self._num_files}.floor", os.O_CREAT | os.O_WRONLY)
                os.write(fd, page)
                os.close(fd)

        return self.host() + self._checksum() + _cpu_s(write)

    def disk(self, flags: int = 0) -> float:
        """One file whose blocks are there, through the page cache."""
        self._num_files += 1
        fd = os.open(self._folder / f"{self._num_files}.floor", os.O_CREAT | os.O_WRONLY | flags)
        os.posix_fallocate(fd, 0, self.num_bytes)

        def write() -> None:
            for number, page in enumerate(self._target):
                os.pwrite(fd, page, number * page.nbytes)

        try:
            return self.host() + self._checksum() + _cpu_s(write)
        finally:
            os.close(fd)

    def direct(self) -> float:
        """The same past the page cache."""
        return self.disk(os.O_DIRECT)

    def _checksum(self) -> float:
        return _cpu_s(lambda: [xxhash.xxh3_64_intdigest(page) for page in self._target])


def _cpu_s(work: Callable[[], object]) -> float:
    start_s = time.thread_time()
    work()
    return time.thread_time() - start_s


def rows(model: Path, quick: bool = False) -> list[Row]:
    """Per cent of the CPU time with the cache off, for each set of tiers."""
    shape = (2, 64) if quick else (NUM_PROMPTS, PROMPT_TOKENS)
    num_rounds = 1 if quick else ROUNDS
    with tempfile.TemporaryDirectory() as name, engines(model, Path(name)) as (timed, made):
        page_bytes = made[OFF].info().kv_bytes_per_token * PAGE
        floors = Floors(page_bytes, Path(name), shape)
        spent: dict[str, list[Spent]] = {name: [] for name in made}
        bare: dict[str, list[float]] = {name: [] for name in TIERS}
        for engine in made.values():
            turn(engine, timed, 999, shape)
        for seed in range(num_rounds):
            for one in list(made)[:: 1 if seed % 2 else -1]:  # what drifts does not fall on one of them
                spent[one].append(turn(made[one], timed, seed, shape))
            for one, seconds in bare.items():
                seconds.append(getattr(floors, FLOORS[one])())
    return [row for name in TIERS for row in _rows(name, spent, bare, shape)]


def _rows(
    name: str, spent: dict[str, list[Spent]], bare: dict[str, list[float]], shape: tuple[int, int]
) -> list[Row]:
    off = statistics.median(s.whole for s in spent[OFF])

    def percent(seconds: list[float]) -> float:
        return 100 * statistics.median(seconds) / off

    pairs = list(zip(spent[name], spent[OFF], strict=True))
    added = percent([on.beside - base.beside for on, base in pairs])
    whole = percent([on.whole - base.whole for on, base in pairs])
    floor = percent(bare[name])
    prompts = f"{shape[0]} new prompts of {shape[1]} tokens"
    return [
        Row("no hits", f"{name}: added to {prompts}", "%", added, {"limit": TARGET, "floor": floor}),
        Row("no hits", f"{name}: whole process", "%", whole),
    ]
