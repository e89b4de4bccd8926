"""What one rank's process does in the tests with real processes, and how all of them are started."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.errors import CacheError
from tests.e2e.warm import fork
from tests.engine.checkpoints import prompts

PAGE_SIZE = 16
NUM_NEW = 8
TALKS = (50, 57, 64, 71)


@dataclass(frozen=True)
class Plan:
    """One start of the ranks. phases: names of functions below, in order; each writes what it saw.

    engine: further fields of their EngineConfig.
    """

    model: Path
    folder: Path
    size: int
    phases: tuple[str, ...]
    timeout_s: float = 60.0
    device_tokens: int = 384
    engine: Mapping[str, Any] = field(default_factory=dict)


def cache_config(folder: Path) -> HiCacheConfig:
    keys = {"prefetch_threshold": PAGE_SIZE, "file_storage_path": str(folder / "pages"), "deadline_s": 60}
    return HiCacheConfig(
        page_size=PAGE_SIZE, enable_hierarchical_cache=True, hicache_no_regret=False, hicache_ratio=2.0,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=parse_extra_config(json.dumps(keys)),
        hicache_storage_prefetch_policy="wait_complete",
    )  # fmt: skip


def start(plan: Plan) -> list[BaseProcess]:
    """All ranks as child processes."""
    return [fork(run, rank, plan) for rank in range(plan.size)]


def run(rank: int, plan: Plan) -> None:
    """One rank's life; what it saw is in rank-N.json, what ended it in its "error"."""
    import torch

    from hiradix.apps.engine import Engine, EngineConfig
    from hiradix.transfer.process_group import Membership, ProcessGroup

    torch.set_num_threads(1)
    address = f"file://{plan.folder / 'meet'}"
    group = ProcessGroup(Membership(rank, plan.size, address, plan.timeout_s))
    config = EngineConfig(
        str(plan.model), max_total_tokens=plan.device_tokens, chunked_prefill_size=64,
        cache=cache_config(plan.folder), check=True, **plan.engine,
    )  # fmt: skip
    engine = Engine(config, group=group)
    seen: dict[str, Any] = {}
    begin = time.monotonic()
    try:
        for phase in plan.phases:
            begin = time.monotonic()
            seen[phase] = PHASES[phase](engine, rank)
    except CacheError as error:
        seen["error"] = {"type": type(error).__name__, "text": str(error), "s": time.monotonic() - begin}
    finally:
        (plan.folder / f"rank-{rank}.json").write_text(json.dumps(seen))
        group.close()
        engine.close()


def serve(engine: Any, talks: list[list[int]]) -> dict[str, Any]:
    """Answers and cached tokens by tier; one step at a time, as all ranks must make the same steps."""
    from hiradix.apps.engine import SamplingParams

    for number, talk in enumerate(talks):
        engine.add_request(f"r{number}", talk, SamplingParams(max_new_tokens=NUM_NEW))
    tokens: dict[str, list[int]] = {f"r{number}": [] for number in range(len(talks))}
    cached = [0, 0, 0]
    for _ in range(20_000):
        if not engine.has_work:
            break
        outputs = engine.step()
        if engine.is_blocked:
            engine.wait(0.01)
        for output in outputs:
            assert output.error is None, output
            tokens[output.rid] += output.token_ids
            if output.finish_reason is not None:
                usage = output.usage
                for at, count in enumerate((usage.cached_device, usage.cached_host, usage.cached_storage)):
                    cached[at] += count
    assert not engine.has_work, engine.info()
    return {"prompts": talks, "answers": list(tokens.values()), "cached": cached}


def settle(engine: Any) -> None:
    assert engine.drain(60.0)
    for _ in range(20_000):  # stores follow writes
        engine.step()
        if engine.is_idle():
            return
        engine.wait(0.01)
    raise AssertionError(f"never idle: {engine.info()}")


def converse(engine: Any, rank: int) -> Any:
    """Conversations that grow turn by turn, more than the device holds."""
    talks, turns = prompts(TALKS, seed=3), []
    for turn in range(3):
        turns.append(serve(engine, talks))
        more = prompts([19] * len(talks), seed=30 + turn)
        talks = [[*t, *a, *m] for t, a, m in zip(talks, turns[-1]["answers"], more, strict=True)]
    settle(engine)
    return turns


def from_storage(engine: Any, rank: int) -> Any:
    """Device and host are emptied: what is hit now comes from storage."""
    settle(engine)
    assert engine.flush()
    return [serve(engine, prompts(TALKS, seed=3))]


def one_bad_backend(engine: Any, rank: int) -> Any:
    """Rank 1's backend errs, is slow, forgets and keeps nothing for a while; nobody else's does."""
    from hiradix.storage.backends.file.backend import FileBackend

    settle(engine)
    rng = random.Random(5)
    kept = {name: getattr(FileBackend, name) for name in ("exists", "get", "put")}

    def worse(name: str) -> Callable[..., Any]:
        def call(self: Any, keys: Any, *rest: Any) -> Any:
            if rng.random() < 0.3:
                raise OSError("gone")
            if rng.random() < 0.3:
                time.sleep(0.02)
            if rng.random() < 0.3:
                return 0 if name == "exists" else [False] * len(keys)
            return kept[name](self, keys, *rest)

        return call

    turns = []
    if rank == 1:
        for name in kept:
            setattr(FileBackend, name, worse(name))
    for turn in range(4):
        assert engine.flush()
        turns.append(serve(engine, prompts(TALKS, seed=3 + turn % 2)))
        settle(engine)
    for name, call in kept.items():
        setattr(FileBackend, name, call)
    return turns


def one_bad_copy(engine: Any, rank: int) -> Any:
    """Rank 1's loads from the host fail now and then, in the middle of passes that others compute in, too."""
    from hiradix.transfer.runners import CopyRunner

    settle(engine)
    rng, load_layer = random.Random(5), CopyRunner._load_layer

    def worse(self: Any, *copy: Any) -> None:
        if rng.random() < 0.05:
            raise OSError("gone")
        load_layer(self, *copy)

    if rank == 1:
        CopyRunner._load_layer = worse  # type: ignore[method-assign]
    turns = [serve(engine, prompts(TALKS, seed=3 + turn % 2)) for turn in range(6)]
    CopyRunner._load_layer = load_layer  # type: ignore[method-assign]
    settle(engine)
    return turns


def attach_on_one_rank_only(engine: Any, rank: int) -> Any:
    """Rank 1 cannot open the backend: no rank attaches, and all say so. Then it can."""
    settle(engine)
    seen = [engine.detach_storage(), engine.cache.enable_storage]
    keys = engine.config.cache.hicache_storage_backend_extra_config.backend
    folder = Path(keys["file_storage_path"]).parent
    extra = {"file_storage_path": str(folder / "other")}
    if rank == 1:
        (folder / "blocked").write_text("a file where a directory is wanted")
        extra = {"file_storage_path": str(folder / "blocked" / "pages")}
    refused = engine.attach_storage("file", json.dumps(extra))
    seen += [refused[0], engine.cache.enable_storage]
    good = {"file_storage_path": str(folder / "other"), "prefetch_threshold": PAGE_SIZE}
    accepted = engine.attach_storage("file", json.dumps(good))
    return [*seen, accepted[0], engine.cache.enable_storage, refused[1]]


def attach_that_hangs_on_one_rank(engine: Any, rank: int) -> Any:
    """Rank 1's backend does not open: no rank attaches, none is lost, and what opens late is closed again."""
    import threading

    settle(engine)
    seen = [engine.detach_storage()[0]]
    make, may, closed = engine.cache.attached.factory, threading.Event(), threading.Event()

    def late(name: str, extra: Any) -> Any:
        assert may.wait(60.0)
        storage = make(name, extra)
        close = storage.close
        storage.close = lambda *arguments: (close(*arguments), closed.set())
        return storage

    open_timeout_s = engine._open_timeout_s
    if rank == 1:
        engine.cache.attached.factory = late
        engine._open_timeout_s = 0.5  # the ranks themselves may be as slow as they like
    extra = engine.config.cache.hicache_storage_backend_extra_config.backend
    ok, message = engine.attach_storage("file", json.dumps(dict(extra)))
    seen += [ok, engine.cache.enable_storage]
    may.set()
    engine.cache.attached.factory, engine._open_timeout_s = make, open_timeout_s
    seen += [rank == 0 or closed.wait(60.0), engine.attach_storage("file", json.dumps(dict(extra)))[0]]
    return [*seen, message]


def corrupted(engine: Any, rank: int) -> Any:
    """The control: one rank's cached keys are spoilt, and what follows must be seen to differ."""
    first = serve(engine, prompts(TALKS[:2], seed=77))
    if rank == 1:
        pool = engine._pools.device
        for layer in pool.k_buffer:
            layer.neg_()
    again = serve(engine, prompts(TALKS[:2], seed=77))
    settle(engine)
    assert engine.flush()
    engine.clear_storage()
    return [first, again]


def killed(engine: Any, rank: int) -> Any:
    """Rank 1 dies in the middle of its work."""
    if rank == 1:
        step, left = engine.step, [3]

        def dying() -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return step()

        engine.step = dying
    return serve(engine, prompts(TALKS, seed=9))


def hanging(engine: Any, rank: int) -> Any:
    """Rank 1 does not answer any more, until rank 0 has given up."""
    keys = engine.config.cache.hicache_storage_backend_extra_config.backend
    given_up = Path(keys["file_storage_path"]).parent / "rank-0.json"
    end = time.monotonic() + 100.0
    while rank == 1 and not given_up.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return serve(engine, prompts(TALKS, seed=9))


PHASES: dict[str, Callable[[Any, int], Any]] = {
    f.__name__: f
    for f in (
        converse,
        from_storage,
        one_bad_backend,
        one_bad_copy,
        attach_on_one_rank_only,
        attach_that_hangs_on_one_rank,
        corrupted,
        killed,
        hanging,
    )  # fmt: skip
}
