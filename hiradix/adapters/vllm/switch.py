"""A worker's storage, opened, attached and detached on a thread beside the model's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from hiradix.adapters.vllm.orders import StorageOrder
from hiradix.errors import StorageError
from hiradix.storage import Stores
from hiradix.transfer import HiCacheController

logger = logging.getLogger(__name__)

OpenStorage = Callable[[str, Mapping[str, Any], str], Stores]  # name, keys, label of `StorageOrder`
DETACH_S = 30.0  # longest an order waits for what uses the storage there is
LOOK_S = 0.01

Work = Iterator[None]  # goes on with each `next`; between two of them it waits for others


def on_a_thread(work: Work) -> None:
    def run() -> None:
        for _ in work:
            time.sleep(LOOK_S)

    threading.Thread(target=run, name="hiradix-vllm-storage", daemon=True).start()


class StorageSwitch:
    """Opens, attaches and detaches a worker's storage on a thread beside the model's.

    lock: makes its caller the controller's one. take_in: applies results."""

    def __init__(
        self,
        controller: HiCacheController,
        lock: threading.RLock,
        open_storage: OpenStorage,
        take_in: Callable[[], None],
    ) -> None:
        self.storage: Stores | None = None
        self.open_storage = open_storage
        self.spawn: Callable[[Work], None] = on_a_thread
        self._controller = controller
        self._lock: Any = lock
        self._take_in = take_in
        self._is_closed = False

    def attach(self, name: str, keys: Mapping[str, Any], label: str = "") -> None:
        """Open a backend and use it. Raises CacheError; takes as long as the backend does.

        A role that was closed meanwhile attaches nothing: nobody would close it.
        """
        storage = self.open_storage(name, keys, label)
        try:
            self._controller.introduce(storage)  # beside the model's thread, which needs the lock
            with self._lock:
                if self._is_closed:
                    raise StorageError("shut down before it was opened")
                self._controller.attach(storage)
                self.storage = storage
        except BaseException:
            storage.close()
            raise

    def follow(self, order: StorageOrder, answer: Callable[[str | None], None]) -> None:
        """Do as ordered beside the caller's thread, and `answer`: what went wrong, or None."""
        self.spawn(self._following(order, answer))

    def _following(self, order: StorageOrder, answer: Callable[[str | None], None]) -> Work:
        error = None
        try:
            if not (yield from self._letting_go()):
                error = "a storage job did not end"
            elif order.name is not None:
                self.attach(order.name, order.keys, order.label)
        except Exception as refusal:  # whoever asked waits for an answer
            error = str(refusal) or type(refusal).__name__
        if error is not None:
            logger.debug("storage: %s", error)  # the scheduler's role says so, once for all workers
        answer(error)

    def _letting_go(self) -> Generator[None, None, bool]:
        """Stop using storage; False if a job of it still runs at the deadline."""
        clock = self._controller.runtime.clock
        deadline_s = clock() + DETACH_S
        while True:
            with self._lock:
                ended = self._controller.detach(0.0)
            self._take_in()
            if ended or self._is_closed or clock() >= deadline_s:
                break
            yield
        if ended:
            self._let_go()
        return ended

    def close(self) -> None:
        """Close what is attached, and what an order under way still opens. Nothing may use it any more."""
        with self._lock:
            self._is_closed = True
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            storage, self.storage = self.storage, None
        if storage is not None:
            storage.close()
