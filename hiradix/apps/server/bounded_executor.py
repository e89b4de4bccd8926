"""Blocking work beside the event loop, on daemon threads: one that hangs does not even delay the exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from hiradix.apps.engine.api import EngineBusy
from hiradix.errors import StorageError

T = TypeVar("T")


def off_loop(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` on a daemon thread of its own, and return its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # it belongs to whoever asked
            future.set_exception(error)
        except BaseException as error:  # an exit is not a backend's to ask for
            future.set_exception(StorageError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, name="hiradix-off-loop", daemon=True).start()
    return asyncio.wrap_future(future)


class BoundedExecutor:
    """Runs work on at most `num_threads` threads, with at most `most` pieces of work that run or wait.

    Work whose caller has gone keeps its place until it has ended, and is not started any more if it waits.
    """

    def __init__(self, name: str, num_threads: int, most: int):
        self._name = name
        self._threads = asyncio.Semaphore(num_threads)
        self._left = most

    async def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """Run `work` on one of the threads, and return its result. EngineBusy when too much waits, TimeoutError
        after `timeout_s`."""
        if self._left <= 0:
            raise EngineBusy(f"{self._name}: too many wait; try again later")
        self._left -= 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._threads.acquire()
        except BaseException:
            self._left += 1
            raise
        try:
            running = off_loop(work)
        except RuntimeError as error:  # no thread can be started
            self._leave()
            raise EngineBusy(f"{self._name}: {error}") from error
        running.add_done_callback(self._ended)
        done, _ = await asyncio.wait({running}, timeout=timeout_s)
        if not done:
            raise TimeoutError(f"{self._name}: not done within {timeout_s:g} s")
        return running.result()

    def _ended(self, running: asyncio.Future[T]) -> None:
        self._leave()
        if not running.cancelled():
            running.exception()  # its caller may have gone

    def _leave(self) -> None:
        self._left += 1
        self._threads.release()
