"""The reference engine as the HTTP server's `Service`: calls go through its thread, with a deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from hiradix.apps.engine.api import Output, RequestError, Scope
from hiradix.apps.engine.async_engine import EngineThread
from hiradix.apps.engine.engine import Engine
from hiradix.apps.server.bounded_executor import off_loop
from hiradix.apps.server.recorder import TraceRecorder
from hiradix.apps.server.service import (
    NO_HOST_TIER,
    AdminResult,
    AttachRequest,
    CacheReport,
    Generation,
    Snapshot,
    TokenizerLike,
    TransferReport,
)
from hiradix.errors import CacheError, StorageError
from hiradix.intents.http import IntentBody, IntentReply
from hiradix.prefix_cache import AttachedStorage, OpenedStorage
from hiradix.transfer import TransferStats

logger = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 10.0
ADMIN_TIMEOUT_S = 60.0
DETACH_TIMEOUT_S = 10.0  # without ?wait
DETACH_POLL_S = 0.01
DRAIN_SHARE = 0.6  # of the time for the end
NOT_IDLE = "Flush cache failed.\n"
NOT_CLEARED = "No storage backend is attached, or it failed to clear."
WAITED_FOR_IDLE = "Timed out waiting for idle state."


class EngineService:
    """A started `EngineThread` over `engine`. `close` ends both; it is the server's last call."""

    def __init__(self, engine: Engine, thread: EngineThread, recorder: TraceRecorder | None = None):
        self._engine = engine
        self._recorder = recorder
        self._thread = thread
        self._open: set[str] = set()

    @property
    def tokenizer(self) -> TokenizerLike | None:
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
                if self._recorder is not None and output.finish_reason is not None:
                    num_done = output.usage.completion_tokens
                    self._recorder.later(generation.prompt_ids, num_done, generation.scope)
                yield output
        finally:
            self._open.discard(generation.rid)

    def check_grammar(self, grammar: str) -> None:
        """Compile the grammar of an answer; RequestError where it is none."""
        if self._engine.grammars is None:
            raise RequestError("response_format: needs a tokenizer, and the model directory has none")
        self._engine.grammars.check(grammar)

    def knows_grammar(self, grammar: str) -> bool:
        """Whether the grammar is compiled."""
        return self._engine.grammars is not None and self._engine.grammars.knows(grammar)

    def special_token(self, text: str) -> int | None:
        """The id of a special token by its text."""
        return None if self._engine.grammars is None else self._engine.grammars.special_token(text)

    def abort(self, rid: str) -> None:
        """Stop a request; unknown ids are ignored."""
        self._thread.abort(rid)

    def abort_all(self) -> None:
        """Stop every request of this service."""
        for rid in tuple(self._open):
            self._thread.abort(rid)

    async def hint(self, prompt_ids: Sequence[int], scope: Scope) -> int:
        """Tell the eviction policy what a client knows of a conversation; its cached tokens."""
        return await self._thread.acall(lambda engine: engine.hint(prompt_ids, scope), ADMIN_TIMEOUT_S)

    async def answer_intent(self, method: str, path: str, body: IntentBody, asked_by: str) -> IntentReply:
        """Answer a request to a path of `hiradix.intents.http`, on the engine's thread."""
        return await self._thread.acall(
            lambda engine: engine.answer_intent(method, path, body, asked_by), ADMIN_TIMEOUT_S
        )

    async def snapshot(self) -> Snapshot:
        """Figures between two steps; TimeoutError when a step takes longer than SNAPSHOT_TIMEOUT_S."""
        return await self._thread.acall(snapshot_of, SNAPSHOT_TIMEOUT_S)

    async def flush(self, timeout_s: float) -> AdminResult:
        """Empty device and host tiers; with a timeout, waits for idle first."""
        try:
            if timeout_s > 0:
                done = await self._thread.acall(lambda engine: engine.flush(), timeout_s, when_idle=True)
            else:
                done = await self._thread.acall(lambda engine: engine.flush(), ADMIN_TIMEOUT_S)
        except TimeoutError:
            return AdminResult(False, WAITED_FOR_IDLE)
        except CacheError as error:
            return AdminResult(False, f"{NOT_IDLE}{error}\n")
        return AdminResult(done, "" if done else NOT_IDLE)

    async def attach(self, request: AttachRequest) -> AdminResult:
        """Attach storage or change policies; see `Service`. The backend is opened on a thread of its own."""
        policies = request.prefetch_policy, request.write_policy

        def plan(engine: Engine) -> tuple[bool, str] | None:
            if not engine.config.cache.enable_hierarchical_cache:
                return False, NO_HOST_TIER
            if request.wait_s is None and (refused := engine.refusal("attach")) is not None:
                return False, refused
            answer: tuple[bool, str] | None = _storage_of(engine).plan(request.backend, *policies)
            return answer

        answer = await self._thread.acall(plan, ADMIN_TIMEOUT_S)
        if answer is not None:
            return AdminResult(*answer)
        try:
            opened = await self._opened(request)
        except CacheError as error:
            await self._thread.acall(lambda engine: _storage_of(engine).attach_opened(None), ADMIN_TIMEOUT_S)
            return AdminResult(False, str(error))
        return await self._attached(opened, request)

    async def _attached(self, opened: OpenedStorage, request: AttachRequest) -> AdminResult:
        """Hand an open backend to the engine; closed again where the engine does not take it in time."""
        policies, handed = (request.prefetch_policy, request.write_policy), None
        try:
            handed = self._thread.submit(lambda engine: _storage_of(engine).attach_opened(opened, *policies))
            return AdminResult(*await asyncio.wait_for(asyncio.wrap_future(handed), ADMIN_TIMEOUT_S))
        except BaseException:
            if handed is None or handed.cancel():
                await off_loop(opened.storage.close)
            raise

    async def _opened(self, request: AttachRequest) -> OpenedStorage:
        """A backend, opened within the deadline; one that comes later is closed again."""
        storage = _storage_of(self._engine)
        timeout_s = ADMIN_TIMEOUT_S if request.wait_s is None else request.wait_s
        opening = off_loop(lambda: storage.open(request.backend, request.extra_config_text))
        done, _ = await asyncio.wait((opening,), timeout=timeout_s)
        if done:
            return opening.result()
        opening.add_done_callback(_close_late)
        raise StorageError(
            f"Failed to attach storage backend '{request.backend}': not open within {timeout_s:g} s"
        )

    async def detach(self, wait_s: float | None = None) -> AdminResult:
        """Detach storage; see `Service`. The engine's thread never waits for it."""

        def refuse(engine: Engine) -> str | None:
            if not engine.config.cache.enable_hierarchical_cache:
                return NO_HOST_TIER
            return engine.refusal("detach") if wait_s is None else None

        if (refused := await self._thread.acall(refuse, ADMIN_TIMEOUT_S)) is not None:
            return AdminResult(False, refused)
        deadline_s = time.monotonic() + (DETACH_TIMEOUT_S if wait_s is None else wait_s)
        while True:
            try:
                storage = await self._thread.acall(
                    lambda engine: _storage_of(engine).release(), ADMIN_TIMEOUT_S
                )
                break
            except StorageError as error:
                if time.monotonic() >= deadline_s:
                    return AdminResult(False, f"Failed to detach HiCache storage backend: {error}")
            await asyncio.sleep(DETACH_POLL_S)
        if storage is not None:
            await off_loop(storage.close)
        return AdminResult(True, "Detached HiCache storage backend successfully.")

    async def clear_storage(self) -> AdminResult:
        """Delete this model's pages in storage. The engine's thread does not wait for it."""
        if not self._engine.config.cache.enable_hierarchical_cache:
            return AdminResult(False, NO_HOST_TIER)
        storage = _storage_of(self._engine).storage
        done = storage is not None and await off_loop(storage.clear)
        done = await self._thread.acall(lambda engine: _storage_of(engine).cleared(done), ADMIN_TIMEOUT_S)
        return AdminResult(done, "" if done else NOT_CLEARED)

    def close(self, timeout_s: float) -> bool:
        """Let backups end, then stop the engine, both within `timeout_s`; False when something was cut
        off."""
        deadline_s = time.monotonic() + timeout_s
        if self._recorder is not None:
            self._recorder.close()
        drained, drain_s = True, max(deadline_s - time.monotonic(), 0.0) * DRAIN_SHARE
        try:
            drained = self._thread.call(lambda engine: engine.drain(drain_s), drain_s)
        except (CacheError, TimeoutError) as error:  # stopped already, in a long step, or a rank is lost
            logger.warning("no drain before the stop: %s", error or "the engine did not answer in time")
            drained = False
        try:
            self._thread.close(max(deadline_s - time.monotonic(), 0.0))
        except TimeoutError as error:
            logger.warning("%s", error)
            drained = False
        return drained


def _storage_of(engine: Engine) -> AttachedStorage:
    """Attaches storage to the engine's cache, which must have a host tier."""
    return engine.cache.attached


def _close_late(opening: asyncio.Future[OpenedStorage]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        off_loop(opening.result().storage.close).add_done_callback(_closed_late)


def _closed_late(closing: asyncio.Future[None]) -> None:
    if not closing.cancelled() and (error := closing.exception()) is not None:
        logger.warning("storage that came too late to be attached: %s", error)


def _transfers(stats: TransferStats | None) -> dict[str, TransferReport]:
    kinds = stats.kinds if stats is not None else {}
    return {
        kind.value: TransferReport(
            count.num_results, sum(count.failures.values()), count.num_bytes, count.busy_s
        )
        for kind, count in kinds.items()
    }


def snapshot_of(engine: Engine) -> Snapshot:
    """Engine and cache figures; runs on the engine thread."""
    cache: Any = engine.cache
    stats = cache.stats()
    publisher = engine.publisher
    figures = {entry.name: getattr(stats, entry.name) for entry in fields(CacheReport)}
    return Snapshot(
        engine=engine.info(),
        cache=CacheReport(**figures),
        transfers=_transfers(stats.transfers),
        cache_type=type(cache).__name__,
        storage_backend=stats.storage_backend,
        storage=stats.storage,
        kv_events=None if publisher is None else publisher.describe(engine.config.cache.page_size),
        kv_events_figures=None if publisher is None else publisher.figures(),
        window=asdict(stats.window) if stats.window is not None else {},
        state=asdict(stats.state) if stats.state is not None else {},
        intents=stats.intents.figures(),
    )
