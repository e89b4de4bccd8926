"""The transfer controller in slots, under upstream's names, for people who drive it without a tree.

Slots in, slots out: int64 tensors of whole pages, page after page; device slots from the engine's allocator,
host slots (page * page_size + offset) from the allocator in here. Indices that a call returns belong to the
caller, who gives them back with `evict_device` or `evict_host` once their `Ack` has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hiradix.errors import Misuse
from hiradix.memory.allocator import PageAllocator
from hiradix.memory.pools import HostPool
from hiradix.transfer.controller import TransferController
from hiradix.transfer.jobs import NO_PAGES, JobKind, Pages, Result, Ticket
from hiradix.transfer.protocols import StorageLike, TransportLike
from hiradix.transfer.runtime import Runtime
from hiradix.tree.hashing import PageRows

READ_BATCH_PAGES = 128
TokenIds = Sequence[int] | npt.NDArray[Any]


class DeviceAllocator(Protocol):
    """What is needed of the engine's token_to_kv_pool_allocator."""

    @property
    def page_size(self) -> int: ...

    @property
    def device(self) -> Any: ...

    def alloc(self, need_size: int, /) -> torch.Tensor | None: ...

    def free(self, free_index: torch.Tensor, /) -> None: ...

    def get_kvcache(self) -> Any: ...


@dataclass(frozen=True)
class Ack:
    """A write, load or write_storage has ended. num_tokens: leading tokens done. hashes: of write_storage."""

    kind: JobKind
    node_id: int
    num_tokens: int
    hashes: tuple[bytes, ...] = ()
    error: str | None = None


@dataclass(eq=False)
class PrefetchOperation:
    """A prefetch: storage is asked first, then host pages are taken for the hits and read.

    num_hit_pages: None until storage has answered. is_done: nothing more will arrive. epoch: of the transfers
    when it began; a later one has taken all it had.
    """

    request_id: str
    asked_pages: int
    epoch: int
    num_hit_pages: int | None = None
    num_pages: int = 0
    hashes: tuple[bytes, ...] = ()
    is_done: bool = False
    is_terminated: bool = False
    error: str | None = None
    host_pages: list[Pages] = field(default_factory=list, repr=False)
    tickets: set[Ticket] = field(default_factory=set, repr=False)


@dataclass(frozen=True)
class _Order:
    """What a ticket is for. `pages` of both pools may not be freed before its result."""

    node_id: int
    device_pages: Pages | None = None
    host_pages: Pages | None = None
    prefetch: PrefetchOperation | None = None
    is_orphan: bool = False  # after a reset: only its pages are given back


class HiCacheController:
    """Device, host and storage copies between slots; nothing is remembered about what they contain.

    Call `poll` regularly: it finishes prefetches and returns acks. One thread.
    """

    def __init__(
        self,
        token_to_kv_pool_allocator: DeviceAllocator,
        mem_pool_host: HostPool,
        *,
        transport: TransportLike,
        storage: StorageLike | None = None,
        runtime: Runtime | None = None,
    ):
        self.mem_pool_device_allocator = token_to_kv_pool_allocator
        self.mem_pool_host = mem_pool_host
        self.page_size = token_to_kv_pool_allocator.page_size
        self.host_allocator = PageAllocator(mem_pool_host.num_pages)
        device_pool = token_to_kv_pool_allocator.get_kvcache()
        self.transfers = TransferController(
            device_pool, mem_pool_host, transport=transport, storage=storage, runtime=runtime
        )
        self.layer_done_counter = self.transfers.layer_done_counter
        self._orders: dict[Ticket, _Order] = {}
        self._acks: list[Ack] = []

    # -- device and host ------------------------------------------------------------------

    def write(self, device_indices: torch.Tensor, node_id: int = -1) -> torch.Tensor | None:
        """Start copying device slots to the host. The host slots, or None if too few are free."""
        device_pages = self._pages(device_indices)
        host_pages = self.host_allocator.alloc(len(device_pages))
        if host_pages is None:
            return None
        ticket = self.transfers.write(device_pages, host_pages)
        self._orders[ticket] = _Order(node_id, device_pages, host_pages)
        return self._slots(host_pages)

    def load(self, host_indices: torch.Tensor, node_id: int = -1) -> torch.Tensor | None:
        """Queue host slots for the device. Device slots, or None; readable behind `start_loading`'s gate."""
        host_pages = self._pages(host_indices)
        device_indices = self.mem_pool_device_allocator.alloc(len(host_indices))
        if device_indices is None:
            return None
        device_pages = self._pages(device_indices)
        ticket = self.transfers.load(host_pages, device_pages)
        self._orders[ticket] = _Order(node_id, device_pages, host_pages)
        return device_indices

    def start_loading(self) -> int:
        """Start all queued loads, layer by layer. Index for `layer_done_counter.set_consumer`, or -1."""
        return self.transfers.start_loading()

    def evict_device(self, device_indices: torch.Tensor) -> int:
        """Free device slots; asserts that no transfer uses them. The number of tokens freed."""
        self._assert_unused(self._pages(device_indices), "device_pages")
        self.mem_pool_device_allocator.free(device_indices)
        return len(device_indices)

    def evict_host(self, host_indices: torch.Tensor) -> int:
        """Free host slots; asserts that no transfer uses them. The number of tokens freed."""
        host_pages = self._pages(host_indices)
        self._assert_unused(host_pages, "host_pages")
        self.host_allocator.free(host_pages)
        return len(host_indices)

    # -- storage --------------------------------------------------------------------------

    def write_storage(
        self,
        host_indices: torch.Tensor,
        token_ids: TokenIds,
        last_hash: bytes = b"",
        node_id: int = -1,
    ) -> Ticket:
        """Put host slots into storage under the chained hashes of their tokens.

        last_hash: digest of the page before the first; at the root the namespace's seed (b"" if plain).
        """
        host_pages = self._pages(host_indices)
        ticket = self.transfers.write_storage(self._rows(token_ids, last_hash), host_pages)
        self._orders[ticket] = _Order(node_id, host_pages=host_pages)
        return ticket

    def prefetch(self, request_id: str, token_ids: TokenIds, last_hash: bytes = b"") -> PrefetchOperation:
        """Look for these tokens' pages in storage and bring the leading hits to the host."""
        rows = self._rows(token_ids, last_hash)
        operation = PrefetchOperation(request_id, len(rows), self.transfers.epoch)
        self._order_for(operation, self.transfers.query(rows))
        return operation

    def terminate_prefetch(self, operation: PrefetchOperation) -> tuple[torch.Tensor, tuple[bytes, ...]]:
        """Stop, and take what has arrived: host slots (the caller's now) and their page hashes."""
        if operation.is_terminated:
            raise Misuse(f"prefetch of {operation.request_id} terminated twice")
        operation.is_terminated = operation.is_done = True
        if operation.epoch != self.transfers.epoch:
            self._forget(operation)
        for ticket in operation.tickets:
            self.transfers.cancel(ticket)
        arrived = np.concatenate([*operation.host_pages, NO_PAGES])
        return self._slots(arrived), operation.hashes[: operation.num_pages]

    def attach_storage_backend(self, storage: StorageLike) -> None:
        """Use `storage` from now on; StorageError if there is one."""
        self.transfers.attach(storage)

    def detach_storage_backend(self, timeout_s: float = 10.0) -> bool:
        """Stop using the backend. False: it is still busy, call again."""
        return self.transfers.detach(timeout_s)

    # -- completion -----------------------------------------------------------------------

    def poll(self) -> list[Ack]:
        """Apply finished transfers; acks of those the caller ordered, oldest first."""
        for result in self.transfers.poll():
            order = self._orders.pop(result.ticket)
            if order.is_orphan:
                self.host_allocator.free(_or_none(order.host_pages))
            elif order.prefetch is not None:
                self._advance(order.prefetch, order, result)
            else:
                num_tokens = result.num_pages * self.page_size
                self._acks.append(Ack(result.kind, order.node_id, num_tokens, result.hashes, result.error))
        acks, self._acks = self._acks, []
        return acks

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to do; False at the deadline."""
        return self.transfers.wait_any(timeout_s)

    def reset(self, timeout_s: float = 10.0) -> bool:
        """Stop everything and free the whole host pool. False: a transfer hangs, its pages stay taken.

        The device slots are the engine's to clear.
        """
        is_quiet = self.transfers.reset(timeout_s)
        for result in self.transfers.poll():
            if (operation := self._orders.pop(result.ticket).prefetch) is not None:
                self._forget(operation)
        hung = NO_PAGES
        for ticket, order in self._orders.items():
            if order.prefetch is not None:
                self._forget(order.prefetch)
            own = np.setdiff1d(_or_none(order.host_pages), hung)
            self._orders[ticket] = _Order(order.node_id, host_pages=own, is_orphan=True)
            hung = np.concatenate([hung, own])
        self._acks.clear()
        self.host_allocator.free(np.setdiff1d(self.host_allocator.out_pages(), hung))
        return is_quiet

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop everything and end the threads. False: a transfer hangs, the pools must not be reused."""
        return self.transfers.close(timeout_s)

    # -- inside ---------------------------------------------------------------------------

    def _forget(self, operation: PrefetchOperation) -> None:
        """A reset took everything the prefetch had."""
        operation.is_done = True
        operation.num_pages = 0
        operation.host_pages.clear()
        operation.tickets.clear()

    def _order_for(self, operation: PrefetchOperation, ticket: Ticket, pages: Pages | None = None) -> None:
        operation.tickets.add(ticket)
        self._orders[ticket] = _Order(-1, host_pages=pages, prefetch=operation)

    def _advance(self, operation: PrefetchOperation, order: _Order, result: Result) -> None:
        operation.tickets.discard(result.ticket)
        operation.error = operation.error or result.error
        if result.kind is JobKind.QUERY:
            operation.num_hit_pages = result.num_pages
            operation.hashes = result.hashes
            if not operation.is_terminated:
                self._read(operation, result.hashes[: result.num_pages])
        elif order.host_pages is not None:
            self._arrived(operation, order.host_pages, result.num_pages)
        operation.is_done = operation.is_done or not operation.tickets

    def _read(self, operation: PrefetchOperation, hashes: tuple[bytes, ...]) -> None:
        for start in range(0, len(hashes), READ_BATCH_PAGES):
            batch = hashes[start : start + READ_BATCH_PAGES]
            pages = self.host_allocator.alloc(len(batch))
            if pages is None:
                return
            self._order_for(operation, self.transfers.read(batch, pages), pages)

    def _arrived(self, operation: PrefetchOperation, pages: Pages, num_pages: int) -> None:
        """Keep the pages that continue what has arrived; free the others."""
        usable = 0 if operation.is_done else num_pages
        operation.host_pages.append(pages[:usable])
        operation.num_pages += usable
        self.host_allocator.free(pages[usable:])
        if usable < len(pages):
            operation.is_done = True

    def _assert_unused(self, pages: Pages, pool: str) -> None:
        used = [_or_none(getattr(order, pool)) for order in self._orders.values()]
        busy = np.intersect1d(pages, np.concatenate([*used, NO_PAGES]))
        if len(busy):
            raise Misuse(f"{pool} {busy[:16].tolist()} are in flight")

    def _pages(self, indices: torch.Tensor) -> Pages:
        slots = indices.cpu().numpy().reshape(-1, self.page_size)
        if not (slots == slots[:, :1] + np.arange(self.page_size)).all():
            raise Misuse("slots are not whole pages")
        if (slots[:, 0] % self.page_size).any():
            raise Misuse("slots do not begin at a page")
        return (slots[:, 0] // self.page_size).astype(np.int32)

    def _slots(self, pages: Pages) -> torch.Tensor:
        slots = pages.astype(np.int64)[:, None] * self.page_size + np.arange(self.page_size)
        return torch.from_numpy(slots.reshape(-1))

    def _rows(self, token_ids: TokenIds, last_hash: bytes) -> PageRows:
        """Whole pages of `token_ids`; a rest shorter than a page is left out."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        return PageRows(last_hash, tokens[: self._floor(len(tokens))].reshape(-1, self.page_size))

    def _floor(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size


def _or_none(pages: Pages | None) -> Pages:
    return NO_PAGES if pages is None else pages
