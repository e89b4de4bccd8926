"""Runs an engine in a thread of its own and lets asyncio code stream answers from it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from hiradix.apps.engine.api import (
    FINISH_ERROR,
    EngineBusy,
    EngineStopped,
    Output,
    SamplingParams,
    Scope,
    Usage,
)
from hiradix.apps.engine.engine import Engine

T = TypeVar("T")
logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5  # idle: wakes for requests, commands and finished transfers, and this often anyway
BLOCKED_WAIT_S = 0.01  # requests wait for transfers: prefetch deadlines are looked at this often
MAX_COMMANDS = 4096


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Engine], Any]
    future: Future[Any]
    when_idle: bool


class EngineThread:
    """Owns the one thread that may touch `engine`. Every method here may be called from any thread.

    Start it with `start()`, end it with `close()`. If a step raises, all requests get an error Output,
    later calls raise EngineStopped, and `failure` keeps the exception.
    """

    def __init__(self, engine: Engine, name: str = "hiradix-engine"):
        self.failure: BaseException | None = None
        self._engine = engine
        self._commands: deque[_Command] = deque()
        self._deferred: list[_Command] = []
        self._sinks: dict[str, Callable[[Output], None]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Begin serving."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self._thread.is_alive() and self.failure is None and not self._closing

    # -- calls --------------------------------------------------------------------------

    def submit(self, fn: Callable[[Engine], T], *, when_idle: bool = False) -> Future[T]:
        """Have the engine thread run `fn(engine)` between two steps; `when_idle`: once nothing is in flight.

        Cancelling the future before it runs leaves it undone. Raises EngineStopped or EngineBusy.
        """
        if len(self._commands) + len(self._deferred) >= MAX_COMMANDS:
            raise EngineBusy(f"{MAX_COMMANDS} commands are waiting")
        return self._push(fn, when_idle)

    def _push(self, fn: Callable[[Engine], T], when_idle: bool) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closing or self.failure is not None:
                raise EngineStopped(f"the engine is not serving: {self.failure or 'closed'}")
            self._commands.append(_Command(fn, future, when_idle))
        self._engine.notify()
        return future

    def call(self, fn: Callable[[Engine], T], timeout_s: float = 30.0, *, when_idle: bool = False) -> T:
        """The result of `fn(engine)`, run on the engine thread.

        TimeoutError after `timeout_s`; `fn` is then not started any more, but may be under way.
        """
        future = self.submit(fn, when_idle=when_idle)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    async def acall(
        self, fn: Callable[[Engine], T], timeout_s: float = 30.0, *, when_idle: bool = False
    ) -> T:
        """`call` for asyncio code: does not block the event loop."""
        return await asyncio.wait_for(asyncio.wrap_future(self.submit(fn, when_idle=when_idle)), timeout_s)

    def abort(self, rid: str) -> None:
        """End a request, wherever it is; its stream gets an Output that says so. Unknown ids are ignored."""
        try:
            self._push(lambda engine: engine.abort(rid), when_idle=False)  # never refused: it makes room
        except EngineStopped:
            logger.debug("abort of %s after the engine stopped", rid)

    async def generate(
        self, rid: str, prompt_ids: Sequence[int], params: SamplingParams, scope: Scope | None = None
    ) -> AsyncIterator[Output]:
        """Outputs of one request as they are produced; the last one has a finish_reason.

        Raises RequestError, EngineBusy or EngineStopped before the first Output. Leaving the iteration early
        aborts the request.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Output] = asyncio.Queue()

        def sink(output: Output) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, output)
            except RuntimeError:  # the loop was closed while the request ran
                self.abort(rid)

        def add(engine: Engine) -> None:
            engine.add_request(rid, prompt_ids, params, scope)
            self._sinks[rid] = sink

        is_open = True
        try:
            await self.acall(add)
            while is_open:
                output = await queue.get()
                is_open = output.finish_reason is None
                yield output
        finally:
            if is_open and self._sinks.get(rid) is sink:
                self.abort(rid)

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop serving: open requests get an error Output, the engine is closed. Idempotent.

        Raises TimeoutError when the step under way does not end in time.
        """
        with self._lock:
            self._closing = True
        self._engine.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the engine's step did not end within {timeout_s} s")

    # -- the thread ---------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._closing:
                self._run_commands()
                self._deliver(self._engine.step())
                if self._engine.is_blocked:
                    self._engine.wait(BLOCKED_WAIT_S)
                elif self._has_nothing_to_do():
                    self._engine.wait(IDLE_WAIT_S)
        except BaseException as failure:  # whatever it is, nobody may wait for this thread any longer
            logger.exception("the engine failed")
            self.failure = failure
        finally:
            self._end()

    def _has_nothing_to_do(self) -> bool:
        if self._engine.has_work or self._commands:
            return False
        return not (self._deferred and self._engine.is_idle())

    def _run_commands(self) -> None:
        """Run what was submitted before this step, then what waited for an idle engine and still does."""
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            if command.when_idle:
                self._deferred.append(command)
            else:
                _execute(command, self._engine)
        self._deferred = [command for command in self._deferred if not command.future.cancelled()]
        while self._deferred and self._engine.is_idle():
            _execute(self._deferred.pop(0), self._engine)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish_reason is None:
                sink = self._sinks.get(output.rid)
            else:
                sink = self._sinks.pop(output.rid, None)
            if sink is not None:
                sink(output)

    def _end(self) -> None:
        """Answer everybody who waits, and close the engine."""
        with self._lock:
            self._closing = True
        why = EngineStopped(f"the engine stopped: {self.failure or 'closed'}")
        for command in [*self._commands, *self._deferred]:
            if command.future.set_running_or_notify_cancel():
                command.future.set_exception(why)
        for rid in list(self._sinks):
            self._deliver([Output(rid, (), Usage(0), finish_reason=FINISH_ERROR, error=str(why))])
        try:
            self._engine.close()
        except Exception:
            logger.exception("closing the engine failed")


def _execute(command: _Command, engine: Engine) -> None:
    if not command.future.set_running_or_notify_cancel():
        return
    try:
        result = command.run(engine)
    except Exception as error:  # it belongs to whoever asked
        command.future.set_exception(error)
    else:
        command.future.set_result(result)
