"""Messages between the two roles: orders with each step's metadata, outcomes with each step's output.

Frozen records of numbers and arrays, so that vLLM can carry them between processes. What is ordered of pages
is in `hiradix.transfer.step_executor`; every worker answers each ticket once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hiradix.transfer import Result, Ticket
from hiradix.transfer.step_executor import NO_JOBS, StepJobs


@dataclass(frozen=True)
class StorageOrder:
    """Attach the named backend with its keys; name None: detach the one there is.

    label: part of the pages' names; "" for the weights that the model was started with.
    """

    ticket: Ticket
    name: str | None
    keys: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""


class StorageSwitched(NamedTuple):
    """One worker's answer to a `StorageOrder`: whether it has storage now, and what went wrong, if
    anything."""

    ticket: Ticket
    is_attached: bool
    error: str | None = None


Outcome = Result | StorageSwitched


@dataclass(frozen=True, eq=False)
class Orders:
    """One step's orders.

    fences: saves whose blocks this step writes to, its own among them: they end first. computes: the step
    runs a forward. is_awaited: requests wait for outcomes and nothing else happens.
    """

    fences: tuple[Ticket, ...] = ()
    jobs: StepJobs = NO_JOBS
    storage: tuple[StorageOrder, ...] = ()
    computes: bool = True
    is_awaited: bool = False


@dataclass(frozen=True)
class WorkerFacts:
    """A worker's report before the first step: its host pages per component, and
    bytes of each."""

    num_pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    has_storage: bool
