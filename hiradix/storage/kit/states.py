"""StoreStates that last, such as being full: each is said once in the log when it begins and when it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""A state has ended when it was not met for so long: a store that takes short batches and no long ones would
change with every call."""


class StoreStates:
    """StoreStates of one store by name. Thread-safe. Next to free while there is none."""

    def __init__(self, store: str, clock: Callable[[], float] = time.monotonic):
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._met_s: dict[str, float] = {}

    def enter(self, name: str, text: str) -> None:
        """The state was met; `text` says what it is."""
        with self._lock:
            is_new = name not in self._met_s
            self._met_s[name] = self._clock()
        if is_new:
            logger.warning("storage %s is %s: %s", self._store, name, text)

    def drop(self, name: str) -> None:
        """The state is over, and its end was told otherwise."""
        if name in self._met_s:
            with self._lock:
                self._met_s.pop(name, None)

    def leave(self, name: str) -> None:
        """A call went as if the state were none."""
        if name not in self._met_s:
            return
        with self._lock:
            met_s = self._met_s.get(name)
            is_over = met_s is not None and self._clock() - met_s >= QUIET_S
            if is_over:
                del self._met_s[name]
        if is_over:
            logger.warning("storage %s is no longer %s", self._store, name)
