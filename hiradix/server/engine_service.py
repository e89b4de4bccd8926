"""The reference engine as the HTTP server's `Service`: calls go through its thread, with a deadline."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

from hiradix.engine.api import EngineStopped, Output
from hiradix.engine.async_engine import EngineThread
from hiradix.engine.engine import Engine
from hiradix.errors import CacheError
from hiradix.server.service import (
    NO_HOST_TIER,
    AttachRequest,
    CacheFigures,
    Generation,
    Outcome,
    Snapshot,
    Tokenizer,
    TransferFigures,
)
from hiradix.transfer import TransferStats

logger = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 10.0
ADMIN_TIMEOUT_S = 60.0
NOT_IDLE = "Flush cache failed.\n"
WAITED_FOR_IDLE = "Timed out waiting for idle state."


class EngineService:
    """A started `EngineThread` over `engine`. `close` ends both; it is the server's last call."""

    def __init__(self, engine: Engine, thread: EngineThread):
        self._engine = engine
        self._thread = thread
        self._open: set[str] = set()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self._engine.context_length

    @property
    def healthy(self) -> bool:
        """True while the engine thread serves."""
        return self._thread.is_alive

    async def generate(self, generation: Generation) -> AsyncIterator[Output]:
        """The request's outputs; see `Service`."""
        self._open.add(generation.rid)
        try:
            outputs = self._thread.generate(
                generation.rid, generation.prompt_ids, generation.params, generation.scope
            )
            async for output in outputs:
                yield output
        finally:
            self._open.discard(generation.rid)

    def abort(self, rid: str) -> None:
        """Stop a request; unknown ids are ignored."""
        self._thread.abort(rid)

    def abort_all(self) -> None:
        """Stop every request of this service."""
        for rid in tuple(self._open):
            self._thread.abort(rid)

    async def snapshot(self) -> Snapshot:
        """Figures between two steps; TimeoutError when a step takes longer than SNAPSHOT_TIMEOUT_S."""
        return await self._thread.acall(snapshot_of, SNAPSHOT_TIMEOUT_S)

    async def flush(self, timeout_s: float) -> Outcome:
        """Empty device and host tiers; with a timeout, waits for idle first."""
        try:
            if timeout_s > 0:
                done = await self._thread.acall(lambda engine: engine.flush(), timeout_s, when_idle=True)
            else:
                done = await self._thread.acall(lambda engine: engine.flush(), ADMIN_TIMEOUT_S)
        except TimeoutError:
            return Outcome(False, WAITED_FOR_IDLE)
        except CacheError as error:
            return Outcome(False, f"{NOT_IDLE}{error}\n")
        return Outcome(done, "" if done else NOT_IDLE)

    async def attach(self, request: AttachRequest) -> Outcome:
        """Attach storage or change policies; refused unless idle."""

        def attach(engine: Engine) -> tuple[bool, str]:
            if not engine.config.cache.enable_hierarchical_cache:
                return False, NO_HOST_TIER
            return engine.attach_storage(
                request.backend, request.extra_config_text, request.prefetch_policy, request.write_policy
            )

        return Outcome(*await self._thread.acall(attach, ADMIN_TIMEOUT_S))

    async def detach(self) -> Outcome:
        """Detach storage; refused unless idle."""

        def detach(engine: Engine) -> tuple[bool, str]:
            if not engine.config.cache.enable_hierarchical_cache:
                return False, NO_HOST_TIER
            return engine.detach_storage()

        return Outcome(*await self._thread.acall(detach, ADMIN_TIMEOUT_S))

    async def clear_storage(self) -> Outcome:
        """Delete this model's pages in storage."""
        if not self._engine.config.cache.enable_hierarchical_cache:
            return Outcome(False, NO_HOST_TIER)
        done = await self._thread.acall(lambda engine: engine.clear_storage(), ADMIN_TIMEOUT_S)
        return Outcome(done, "" if done else "No storage backend is attached, or it failed to clear.")

    def close(self, timeout_s: float) -> bool:
        """Let backups end within `timeout_s`, then stop the engine; False when something was cut off."""
        drained = True
        try:
            drained = self._thread.call(
                lambda engine: _drain(engine, timeout_s), 2 * timeout_s + ADMIN_TIMEOUT_S
            )
        except (EngineStopped, TimeoutError) as error:
            logger.warning("no drain before the stop: %s", error)
            drained = False
        try:
            self._thread.close(timeout_s + ADMIN_TIMEOUT_S)
        except TimeoutError as error:
            logger.warning("%s", error)
            drained = False
        return drained


def _drain(engine: Engine, timeout_s: float) -> bool:
    drain = getattr(engine.cache, "drain", None)
    return True if drain is None else bool(drain(timeout_s))


def _transfers(stats: TransferStats | None) -> dict[str, TransferFigures]:
    kinds = stats.kinds if stats is not None else {}
    return {
        kind.value: TransferFigures(
            count.num_results, sum(count.failures.values()), count.num_bytes, count.busy_s
        )
        for kind, count in kinds.items()
    }


def snapshot_of(engine: Engine) -> Snapshot:
    """Engine and cache figures; runs on the engine thread."""
    cache: Any = engine.cache
    stats = cache.stats()
    figures = {entry.name: getattr(stats, entry.name) for entry in fields(CacheFigures)}
    return Snapshot(
        engine=engine.info(),
        cache=CacheFigures(**figures),
        transfers=_transfers(stats.transfers),
        cache_type=type(cache).__name__,
        storage_backend=stats.storage_backend,
        storage=stats.storage,
    )
