"""What passes between the two roles: orders with each step's metadata, outcomes with each step's output.

Frozen records of numbers and arrays, so that vLLM can carry them between processes. The scheduler numbers
its orders; every worker answers each number once per stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hiradix.tree import PageRows, Pages

Ticket = int


@dataclass(frozen=True, eq=False)
class GroupCopy:
    """One KV cache group's part of a copy: block `device[i]` and host page `host[i]` belong together."""

    group: int
    device: Pages
    host: Pages


@dataclass(frozen=True, eq=False)
class SaveOrder:
    """Device to host, once the step's forward has been launched; `before_forward`: as soon as it can be.

    rows: with storage attached, the tokens of the pages, which then go on to storage; each copy's are the
    last ones.
    """

    ticket: Ticket
    copies: tuple[GroupCopy, ...]
    rows: PageRows | None = None
    before_forward: bool = False


@dataclass(frozen=True, eq=False)
class LoadOrder:
    """Host to device, for the forward of this step (`in_step`), or beside it for a request that waits.

    error: why nothing can be loaded; the copies have no host pages then, and the load is one that failed.
    """

    ticket: Ticket
    request_id: str
    copies: tuple[GroupCopy, ...]
    in_step: bool
    error: str | None = None


@dataclass(frozen=True, eq=False)
class QueryOrder:
    """At how many of the last `num_pages` of `rows` a prefix could end with what storage has.

    windows: groups of which a prefix must end in so many pages, or in all of the `num_pages` if it has fewer.
    """

    ticket: Ticket
    rows: PageRows
    num_pages: int
    windows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class ReadOrder:
    """The pages named `hashes` from storage to host pages.

    host: per KV cache group, pages for the last ones of `hashes`; the backbone's first, if it is among them.
    extra_key: of the pages' namespace.
    """

    ticket: Ticket
    hashes: tuple[bytes, ...]
    host: tuple[tuple[int, Pages], ...]
    extra_key: str | None = None


@dataclass(frozen=True)
class StorageOrder:
    """Attach the named backend with its keys; name None: detach the one there is.

    label: part of the pages' names; "" for the weights that the model was started with.
    """

    ticket: Ticket
    name: str | None
    keys: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""


@dataclass(frozen=True, eq=False)
class Orders:
    """One step's orders.

    fences: saves whose blocks this step writes to, its own among them: they end first. cancels: queries and
    reads nobody waits for. computes: the step runs a forward. is_awaited: requests wait for outcomes and
    nothing else happens.
    """

    fences: tuple[Ticket, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    queries: tuple[QueryOrder, ...] = ()
    reads: tuple[ReadOrder, ...] = ()
    cancels: tuple[Ticket, ...] = ()
    storage: tuple[StorageOrder, ...] = ()
    computes: bool = True
    is_awaited: bool = False

    @property
    def brings_work(self) -> bool:
        """Whether there is something to hand over when the forward has been launched."""
        return bool(self.saves or self.queries or self.reads or self.cancels)


class OrderStage(Enum):
    """What has come to its end."""

    WRITTEN = "written"  # device to host
    STORED = "stored"  # host to storage, behind WRITTEN where storage is attached
    LOADED = "loaded"  # host to device
    FOUND = "found"  # a query
    READ = "read"  # storage to host
    ATTACHED = "attached"  # storage attached or detached


@dataclass(frozen=True)
class OrderOutcome:
    """One worker's answer to one order: the leading pages that are done, and why there are not more."""

    ticket: Ticket
    stage: OrderStage
    num_pages: int
    hashes: tuple[bytes, ...] = ()
    error: str | None = None
    seconds: float = 0.0  # that it took, once it was begun


@dataclass(frozen=True)
class WorkerFacts:
    """What the scheduler must know of a worker before the first step: its host pages per component."""

    num_pages: tuple[int, ...]
    has_storage: bool
