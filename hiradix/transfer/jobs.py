"""Records that cross between the scheduler thread and the workers. Page ids and bytes, never nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from hiradix.errors import Misuse
from hiradix.tree import ids
from hiradix.tree.hashing import PageRows

Pages = npt.NDArray[np.int32]
PageIds = Sequence[int] | Pages
Ticket = NewType("Ticket", int)

NO_PAGES: Pages = np.empty(0, np.int32)
BACKBONE_PAIR = 0


class JobKind(Enum):
    """The kinds of job; each kind is one FIFO."""

    WRITE = "write"  # device to host
    LOAD = "load"  # host to device
    QUERY = "query"  # which leading pages does storage have
    READ = "read"  # storage to host
    STORE = "store"  # host to storage
    DELETE = "delete"  # have storage forget pages

    __hash__ = object.__hash__  # tables by kind are looked up many times in a step; an enum's own is slow


STORAGE_KINDS = (JobKind.QUERY, JobKind.READ, JobKind.STORE, JobKind.DELETE)


class FailReason(Enum):
    """The reason why a result has fewer pages than asked, apart from plain misses. Few enough to label a
    metric."""

    QUEUE_FULL = "queue_full"
    CANCELLED = "cancelled"
    NO_STORAGE = "no_storage"
    DETACHED = "detached"
    RESET = "reset"
    CLOSED = "closed"
    UNLISTED = "unlisted"  # the store cannot tell which pages it has of somebody, or behind a page
    BACKEND = "backend"  # the backend, or hashing for it, raised
    COPY = "copy"  # a copy raised
    BUG = "bug"  # one of our own assertions failed
    GATE_TIMEOUT = "gate_timeout"  # no producer slot of the layer gate came free in time
    ABANDONED = "abandoned"  # still running when close() gave up on it: its pages must not be reused


class Copy(NamedTuple):
    """Copy `source[i]` of one pool to `target[i]` of the other, all layers. pair: which pair of pools."""

    source: Pages
    target: Pages
    pair: int = BACKBONE_PAIR


Copies = tuple[Copy, ...]  # that succeed or fail as one


class LoadBatch:
    """All loads of one `start_loading`, copied layer by layer behind the gate's `producer` index."""

    __slots__ = ("copies", "producer")

    def __init__(self, copies: Copies, producer: int):
        self.copies = copies
        self.producer = producer


class TrailingWindow(NamedTuple):
    """The pages of a further component that a boundary needs: its last `reach` pages, or all if it has fewer."""

    pair: int
    reach: int


@dataclass(frozen=True, eq=False)
class QueryPayload:
    """Ask which of the last `num_pages` pages of `rows` storage has: leading ones that end in `windows`.

    known: so many of them are not asked for in the backbone; they count as there.
    """

    rows: PageRows
    num_pages: int
    windows: tuple[TrailingWindow, ...] = ()
    known: int = 0

    def __post_init__(self) -> None:
        if not self.known <= self.num_pages <= len(self.rows):
            raise Misuse(f"{self.known} of {self.num_pages} pages of {len(self.rows)} rows")


class TrailingPages(NamedTuple):
    """Host pages of one pair of pools: the last ones of a job's pages of tokens."""

    pages: Pages
    pair: int = BACKBONE_PAIR


AllTrailingPages = tuple[TrailingPages, ...]  # the backbone's first; may be empty

Chain = tuple[bytes, ...] | None
"""Hashes of a sequence's leading pages, those of a job among them; None where they are not known."""


@dataclass(frozen=True, eq=False)
class ReadPayload:
    """Bring the pages named by `hashes`, or the last of them, into `trailing`.

    chain: the sequence's hashes. after: the hash in front of `hashes`, also where the chain is not known; b""
    at the start of one. extra_key: of the pages' namespace. tenant: whose pages they are, as `PageRows` has it.
    """

    hashes: tuple[bytes, ...]
    trailing: AllTrailingPages
    chain: Chain = None
    extra_key: str | None = None
    tenant: str = ""
    after: bytes = b""

    def __post_init__(self) -> None:
        longest = max(len(pages_of_pair.pages) for pages_of_pair in self.trailing)
        if len(self.hashes) != longest:
            raise Misuse(f"{len(self.hashes)} hashes for {longest} pages")


@dataclass(frozen=True, eq=False)
class StorePayload:
    """Put `trailing`, the last pages of `rows`, into storage. store: another one's name; "": the attached."""

    rows: PageRows
    trailing: AllTrailingPages
    store: str = ""

    def __post_init__(self) -> None:
        if max(len(pages_of_pair.pages) for pages_of_pair in self.trailing) > len(self.rows):
            raise Misuse(f"{self.trailing} for {len(self.rows)} rows")


@dataclass(frozen=True, eq=False)
class DeletePayload:
    """Have storage forget the last `num_pages` pages of `rows`, of all components.

    continues: and all that it has behind them. tenant: all of that tenant's pages instead. is_all: all of this
    model's instead. is_last: and then leave no bytes and no names of what was forgotten.
    """

    rows: PageRows
    num_pages: int = 0
    continues: bool = False
    tenant: str | None = None
    is_all: bool = False
    is_last: bool = False

    def __post_init__(self) -> None:
        if self.num_pages > len(self.rows):
            raise Misuse(f"{self.num_pages} pages of {len(self.rows)} rows")


def pages_in_use(payload: Payload, kind: JobKind, pair: int) -> tuple[list[Pages], list[Pages]]:
    """The device pages and the host pages of one pair of pools that a job reads or fills."""
    if isinstance(payload, (QueryPayload, DeletePayload)):
        return [], []
    if isinstance(payload, (ReadPayload, StorePayload)):
        return [], [trailing.pages for trailing in payload.trailing if trailing.pair == pair]
    copies = payload.copies if isinstance(payload, LoadBatch) else payload
    source = [copy.source for copy in copies if copy.pair == pair]
    target = [copy.target for copy in copies if copy.pair == pair]
    return (source, target) if kind is JobKind.WRITE else (target, source)


Payload = Copies | LoadBatch | QueryPayload | ReadPayload | StorePayload | DeletePayload


class Result(NamedTuple):
    """Outcome of one ticket. Once it is posted no worker touches the ticket's pages again.

    num_pages: leading pages that are done; for a query, leading pages that storage has. True whether or
        not `error` is set: a cancelled read may still have brought its first pages.
    hashes: digests of the job's rows (query, store), else empty.
    error: why there is not more, in words, or None; a page that storage does not have is no error.
    reason: the same as a value for counters, or None.
    duration_s: seconds from the start of the work to its end, 0 if it never started.
    num_adopted: of a worker process that stores: its `HiCacheController.num_adopted` by then.
    damaged_end: of a query, up to which page storage has more than `num_pages`, which it serves to nobody, as
        damage was found; 0: none is known.
    """

    ticket: Ticket
    kind: JobKind
    num_pages: int
    hashes: tuple[bytes, ...] = ()
    error: str | None = None
    reason: FailReason | None = None
    duration_s: float = 0.0
    num_bytes: int = 0
    epoch: int = 0
    num_adopted: int = 0
    damaged_end: int = 0


def as_pages(pages: Sequence[int] | npt.NDArray[Any]) -> Pages:
    """A private int32 copy, so that nobody changes a job's pages under a worker."""
    return ids.copied(pages if isinstance(pages, np.ndarray) else np.asarray(pages, np.int32))


def as_trailing_pages(host_pages: PageIds, others: Iterable[TrailingPages]) -> AllTrailingPages:
    """Private copies of what a storage job moves, the backbone's first."""
    return TrailingPages(as_pages(host_pages)), *(
        TrailingPages(as_pages(pages), pair) for pages, pair in others
    )


def as_copies(source: PageIds, target: PageIds, others: Iterable[Copy]) -> Copies:
    """Private copies of all that one ticket moves; what moves nothing is left out."""
    found = _copy_of(source, target, BACKBONE_PAIR)
    for given, onto, pair in others:
        found += _copy_of(given, onto, pair)
    return found


def _copy_of(source: PageIds, target: PageIds, pair: int) -> Copies:
    if len(source) != len(target):
        raise Misuse(f"{len(source)} pages onto {len(target)}")
    return (Copy(as_pages(source), as_pages(target), pair),) if len(source) else ()


def joined(copies: Sequence[Copy]) -> Copies:
    """One copy per pair of pools."""
    if len(copies) == 1:
        return tuple(copies)
    by_pair: dict[int, list[Copy]] = {}
    for copy in copies:
        by_pair.setdefault(copy.pair, []).append(copy)
    return tuple(
        parts[0]
        if len(parts) == 1
        else Copy(ids.joined([c.source for c in parts]), ids.joined([c.target for c in parts]), pair)
        for pair, parts in by_pair.items()
    )
