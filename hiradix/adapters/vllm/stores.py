"""The scheduler's side of attaching and detaching storage: any thread asks, and steps carry the orders to
workers.

One order at a time, as workers follow beside their steps; of several that wait the last word counts. Storage
that cannot be opened again, as after a reset, is tried every `RETRY_S`; what was asked for, once.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hiradix.adapters.vllm.orders import StorageOrder, StorageSwitched
from hiradix.adapters.vllm.scheduler_plan import Asked
from hiradix.errors import Misuse
from hiradix.policy.prefetch_policy import PrefetchPolicy
from hiradix.transfer.step_executor import StepExecutor

logger = logging.getLogger(__name__)

RETRY_S = 10.0


class StorageTracker:
    """Keeps which storage the workers have attached: as the executor says, every one, and none is switching.
    Any thread asks; orders go out with a step.

    on_switch(asked): the workers are about to follow. on_attached(): other storage is there.
    """

    def __init__(
        self,
        executor: StepExecutor,
        num_workers: int,
        clock: Callable[[], float],
        on_switch: Callable[[Asked], None],
        on_attached: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._num_workers = num_workers
        self._clock = clock
        self._on_switch = on_switch
        self._on_attached = on_attached
        self._asked: deque[Asked] = deque(maxlen=1)
        self._now: Asked | None = None  # what workers have, or follow to
        self._answers: list[StorageSwitched] = []  # to the order under way
        self._is_switching = False
        self._is_anew = False  # what they have is to be opened again, with `_label`, not before `_due_s`
        self._due_s = -math.inf
        self._is_reopening = False  # the order under way is one nobody asked for
        self._label = ""

    def opened(self, asked: Asked | None) -> None:
        """Note the storage that workers have from the start."""
        self._now = asked
        if asked is not None:
            self._executor.attach()

    def ask(self, name: str | None, keys: Mapping[str, Any], prefetch: PrefetchPolicy | None = None) -> None:
        """Have the next step attach a backend, or detach the one there is (None). Any thread."""
        self._asked.append(Asked(name, dict(keys), prefetch))

    def start_anew(self) -> None:
        """Give pages new names from here on, as those stored so far may be of other weights."""
        self._label = uuid.uuid4().hex
        self._is_anew = self._now is not None
        self._executor.detach()

    @property
    def is_asked(self) -> bool:
        """Whether `orders` may have something to give."""
        return bool(self._asked) or (self._is_anew and self._clock() >= self._due_s)

    def orders(self) -> tuple[StorageOrder, ...]:
        """The last request for a switch, once."""
        if self._is_switching or not self.is_asked:
            return ()
        self._is_reopening = not self._asked
        asked = self._now if self._is_reopening else self._asked.pop()
        self._is_anew = False
        if asked is None:
            raise Misuse("nothing is attached that could be opened again")
        self._executor.detach()
        self._is_switching = True
        self._now = None if asked.name is None else asked
        self._on_switch(asked)
        return (StorageOrder(self._executor.new_ticket(), asked.name, asked.keys, self._label),)

    def answer(self, outcome: StorageSwitched) -> None:
        """One worker has followed, or could not; with the last one's answer it is known what they have."""
        self._answers.append(outcome)
        if len(self._answers) < self._num_workers:
            return
        answers, self._answers = self._answers, []
        error = next((one.error for one in answers if one.error is not None), None)
        ok, self._is_switching = error is None and all(one.is_attached for one in answers), False
        if ok and not self._is_anew:
            self._executor.attach()
            self._on_attached()
        if not ok and self._is_reopening:
            self._await_it(error)
            return
        if error is not None:
            logger.warning("storage: %s", error)
        elif ok and self._due_s > -math.inf:
            logger.info("storage is attached again")
        self._due_s = -math.inf
        if not ok:
            self._now, self._is_anew = None, False

    def _await_it(self, error: str | None) -> None:
        """Note that storage could not be opened, and when the next try is due; the first failure is logged."""
        if self._due_s == -math.inf:
            logger.warning(
                "storage: %s; tried again every %g s, until then nothing is stored or read", error, RETRY_S
            )
        self._is_anew, self._due_s = True, self._clock() + RETRY_S
