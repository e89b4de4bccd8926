"""The scheduler role's settings, and the records it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hiradix.adapters.vllm.events import HostEvents
from hiradix.cache.host_index import HostIndex
from hiradix.intents.limits import IntentLimits
from hiradix.policy.prefetch_policy import PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.transfer import TransferLimits


class Asked(NamedTuple):
    """A backend to attach, or a detach (name None). prefetch: the policy from then on, None for the same."""

    name: str | None
    keys: Mapping[str, Any]
    prefetch: PrefetchPolicy | None = None


@dataclass(frozen=True)
class SchedulerPlan:
    """The role's settings. groups: the KV cache group of each of the index's components.

    load_async: loads run beside other requests' steps, and their request waits for them. stored: the storage
    that workers are started with. keeps_storage: a reset says nothing of what is stored. no_regret: what is
    predicted to be slower than computing is neither loaded nor fetched. num_overlapping: steps that the
    engine has under way at a time. limits: those of the workers. saves, loads: whether this engine saves what
    it computes, and uses what is there. intents: caps on wishes, such as leases. explain_names: pages that have
    left the host and are remembered, to explain misses; 0: nothing is explained. eviction_policy: its name.
    """

    index: HostIndex
    groups: tuple[int, ...]
    num_workers: int
    load_async: bool
    writes: WritePolicy
    prefetch: PrefetchPolicy
    clock: Callable[[], float] = time.monotonic
    events: HostEvents | None = None
    stored: Asked | None = None
    keeps_storage: bool = False
    no_regret: bool = True
    num_overlapping: int = 1
    limits: TransferLimits = TransferLimits()
    saves: bool = True
    loads: bool = True
    intents: IntentLimits = IntentLimits()
    explain_names: int = 0
    eviction_policy: str = "lru"


class OfferedState(NamedTuple):
    """vLLM's word that after this step a block of a group holds the state behind a request's first tokens."""

    group: int
    block: int
    num_tokens: int


class StepRequest(NamedTuple):
    """A request of which this step computes `num_tokens`.

    new_blocks: those of any group that the step is the first to write to. states: those that are final after
    it.
    """

    request_id: str
    num_tokens: int
    new_blocks: Sequence[int]
    states: Sequence[OfferedState] = ()


@dataclass(frozen=True)
class SchedulerCounters:
    """Tokens and pages since start, as they are reported to vLLM."""

    hit_tokens: int = 0
    saved_pages: int = 0
    save_failed_pages: int = 0
    no_host_page: int = 0
    loaded_pages: int = 0
    load_failed: int = 0
    load_too_slow_pages: int = 0
    stored_pages: int = 0
    store_failed_pages: int = 0
    fences: int = 0
    not_text: int = 0


@dataclass(frozen=True)
class PrefetchCounters:
    """Pages of prompts since start. read: that the host has, or can use, by what was read. late: came when
    nobody waited for them any more. refetched: read again for a request that waits. left_out: found and not
    read, as that takes longer than computing them, or reads before brought less than they took."""

    asked: int = 0
    found: int = 0
    read: int = 0
    late: int = 0
    refetched: int = 0
    left_out: int = 0


class Changes:
    """Computes the growth of counters between two reports."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def until(self, now: Mapping[str, float]) -> dict[str, float]:
        """The differences to the last call's `now`, by name; values that are equal are left out."""
        before, self._before = self._before, dict(now)
        grown = {name: value - before.get(name, 0) for name, value in now.items()}
        return {name: value for name, value in grown.items() if value}
