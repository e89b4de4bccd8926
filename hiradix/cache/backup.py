"""Copies downwards: device to host (write-through, write-back) and host to storage (backup).

A copy is two-phase: the path is locked and host pages are allocated when it is submitted; the host pages
enter the tree when the result is applied. Nodes may be split in between: `adopt` addresses pages by
where the node ends, so a split does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hiradix.cache.flights import Flight, Flights
from hiradix.cache.pages import BACKBONE, Counters, Pages, PageSupply
from hiradix.policy.write import WritePolicy
from hiradix.transfer import JobKind, Result, Ticket, TransferController
from hiradix.tree import Lock, Node, RadixTree, Tier


class Backup:
    """Decides with the write policy what goes down a tier, and brings it there."""

    def __init__(
        self, supply: PageSupply, controller: TransferController, flights: Flights, policy: WritePolicy
    ):
        self.policy = policy
        self._tree: RadixTree = supply.tree
        self._supply = supply
        self._counters: Counters = supply.counters
        self._controller = controller
        self._flights = flights
        self._writing = np.zeros(supply.device.num_pages + 1, np.bool_)  # device pages being copied down

    def clear(self) -> None:
        """Forget what is being copied (after a reset)."""
        self._writing[:] = False

    # -- device to host -----------------------------------------------------------------

    def on_insert(self, node: Node) -> None:
        """Write-through: copy the due, not yet backed nodes that end at `node`."""
        if self.policy.writes_on_insert and (due := self._due(node)):
            self._submit_write(due)

    def _due(self, node: Node) -> list[Node]:
        """Nodes to copy, root first: up from `node` to the first that has a host copy or is being copied."""
        due: list[Node] = []
        for n in self._tree.path(node):
            if n.resident(Tier.HOST) or self._writing[self._pages(n)[0]]:
                break
            due.append(n)
        due.reverse()
        for i, n in enumerate(due):  # a child's copy without its parent's would be unreachable after eviction
            if not self.policy.is_due(n.hit_count):
                return due[:i]
        return due

    def _submit_write(self, nodes: Sequence[Node]) -> Ticket | None:
        """Start one copy for a root-first run of nodes; as many of them as the host pool can take."""
        device_pages = [self._pages(n) for n in nodes]
        lock = self._tree.lock(nodes[-1], Tier.DEVICE)
        host_pages = self._supply.alloc_host(sum(map(len, device_pages)))
        if host_pages is None:
            self._tree.unlock(lock)
            self._counters.write_dropped += len(device_pages[-1])
            return self._submit_write(nodes[:-1]) if len(nodes) > 1 else None
        source = np.concatenate(device_pages)
        self._writing[source] = True
        ticket = self._controller.write(source, host_pages)

        def done(result: Result) -> None:
            self._writing[source] = False
            if result.num_pages == len(source):
                self._counters.written += len(source)
                duplicates = self._tree.adopt(nodes[-1], BACKBONE, Tier.HOST, host_pages)
                self._supply.free_host(duplicates)
            else:
                self._counters.write_failed += len(source)
                self._supply.free_host(host_pages)
            self._tree.unlock(lock)
            if result.num_pages == len(source):
                self.store(nodes[-1])

        self._flights.add(ticket, Flight(JobKind.WRITE, done, owns=host_pages))
        return ticket

    def _pages(self, node: Node) -> Pages:
        return self._tree.pages(node, Tier.DEVICE, start=node.start)

    def write_back(self, num_pages: int, timeout_s: float) -> list[Ticket]:
        """Start copying what a device eviction of `num_pages` would drop. Returns the tickets to wait for."""
        tickets = []
        for node in self._tree.coldest(BACKBONE, Tier.DEVICE, num_pages):
            if not node.resident(Tier.HOST) and (ticket := self._submit_write([node])) is not None:
                tickets.append(ticket)
        self._controller.wait(tickets, timeout_s)
        return tickets

    # -- host to storage ----------------------------------------------------------------

    def store(self, node: Node) -> None:
        """Back `node` and its not yet stored ancestors up to storage, if one is attached."""
        if not self._controller.storage_attached:
            return
        start = node.end
        for n in self._tree.path(node):
            if n.stored or not n.resident(Tier.HOST):
                break
            start = n.start
        if start < node.end:
            self._submit_store(node, start)

    def _submit_store(self, node: Node, start: int) -> None:
        """Store the host pages of the path from page `start` to the end of `node`."""
        lock: Lock = self._tree.lock(node, Tier.HOST)
        host_pages = self._tree.pages(node, Tier.HOST, start=start)
        rows = self._tree.page_rows(node, start)
        self._mark_stored(node, start, True)  # optimistic; taken back if the backend says no

        def done(result: Result) -> None:
            if result.hashes:
                self._tree.set_hashes(node, rows.start, result.hashes)
            self._counters.backed_up += result.num_pages
            if result.num_pages < len(host_pages):
                self._counters.backup_failed += len(host_pages) - result.num_pages
                self._mark_stored(node, start, False)
            self._tree.unlock(lock)

        ticket = self._controller.store(rows, host_pages)
        self._flights.add(ticket, Flight(JobKind.STORE, done, reads=host_pages))

    def _mark_stored(self, node: Node, start: int, stored: bool) -> None:
        for n in self._tree.path(node, start):
            n.stored = stored
