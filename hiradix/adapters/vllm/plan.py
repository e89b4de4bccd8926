"""What the scheduler role is made from, and the records it keeps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hiradix.adapters.vllm.events import HostEvents
from hiradix.adapters.vllm.index import HostIndex
from hiradix.policy.prefetch import PrefetchPolicy
from hiradix.policy.write import WritePolicy


@dataclass(frozen=True)
class SchedulerPlan:
    """What the role is built from. groups: the KV cache group of each of the index's components.

    load_async: loads run beside other requests' steps, and their request waits for them.
    """

    index: HostIndex
    groups: tuple[int, ...]
    num_workers: int
    load_async: bool
    writes: WritePolicy
    prefetch: PrefetchPolicy
    clock: Callable[[], float] = time.monotonic
    events: HostEvents | None = None


class StepRequest(NamedTuple):
    """A request of which this step computes `num_tokens`.

    new_blocks: those of any group that the step is the first to write to.
    """

    request_id: str
    num_tokens: int
    new_blocks: Sequence[int]


@dataclass
class Figures:
    """Tokens and pages since start, and since the last report to vLLM."""

    hit_tokens: int = 0
    saved_pages: int = 0
    save_failed_pages: int = 0
    loaded_pages: int = 0
    load_failed: int = 0
    stored_pages: int = 0
    store_failed_pages: int = 0
    fences: int = 0


class Asked(NamedTuple):
    """A backend to attach, or a detach (name None). prefetch: the policy from then on, None for the same."""

    name: str | None
    keys: Mapping[str, Any]
    prefetch: PrefetchPolicy | None = None


@dataclass
class StorageAsks:
    """What is asked of storage, taken up by the next step. Any thread asks.

    The last word counts: what was asked before it and not yet taken is forgotten.
    """

    _asked: deque[Asked] = field(default_factory=lambda: deque(maxlen=1))

    def ask(self, name: str | None, keys: Mapping[str, Any], prefetch: PrefetchPolicy | None = None) -> None:
        self._asked.append(Asked(name, dict(keys), prefetch))

    @property
    def is_asked(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._asked)

    def take(self) -> Asked | None:
        """What was asked last, once."""
        return self._asked.pop() if self._asked else None
