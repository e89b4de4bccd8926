"""Copies downwards: device to host (write-through, write-back) and host to storage (backup).

A copy is two-phase: the path is locked and host pages are allocated when it is submitted; the host pages
enter the tree when the result is applied. Nodes may be split in between: `adopt` addresses pages by
where the node ends, so a split does not matter.

What failed, was dropped for want of room, or was forgotten by storage, is tried again with the next use
of its path: each use looks at the whole path and takes every run of nodes that a tier below lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from hiradix.cache.flights import Flight, Flights
from hiradix.cache.pages import BACKBONE, Counters, Pages, PageSupply
from hiradix.policy.eviction import learner_of
from hiradix.policy.write import WritePolicy
from hiradix.transfer import JobKind, Result, Ticket, TransferController
from hiradix.tree import Lock, Node, RadixTree, Tier

OFFER_AGAIN_USES = 64  # a node used that often is offered to storage again, which may have forgotten it


class WriteBack(NamedTuple):
    """A copy of a node that is to leave the device. locks: what it gives back when it ends."""

    ticket: Ticket
    node: Node
    locks: list[Lock]


class Backup:
    """Decides with the write policy what goes down a tier, and brings it there."""

    def __init__(
        self, supply: PageSupply, controller: TransferController, flights: Flights, policy: WritePolicy
    ):
        self.policy = policy
        self._tree: RadixTree = supply.tree
        self._learner = learner_of(supply.tree.order_factory)
        self._supply = supply
        self._counters: Counters = supply.counters
        self._controller = controller
        self._flights = flights
        self._writing = np.zeros(supply.device.num_pages + 1, np.bool_)  # device pages being copied down

    def clear(self) -> None:
        """Forget what is being copied (after a reset)."""
        self._writing[:] = False

    def on_use(self, node: Node) -> None:
        """A request runs on the path to `node`, counted already: doubt old hints that storage has it."""
        if self._controller.storage_attached:
            for n in self._tree.path(node):
                if n.hit_count % OFFER_AGAIN_USES == 0:
                    n.stored = False

    def on_insert(self, node: Node) -> None:
        """Something was given to the tree at `node`, or found there: copy down what is due on its path."""
        if self.policy.writes_on_insert:
            for run in self._due(node):
                self._submit_write(run)
        self.store(node)

    # -- device to host -----------------------------------------------------------------

    def _due(self, node: Node) -> list[list[Node]]:
        """Runs of nodes to copy, root first: those with neither a host copy nor one under way."""

        def lacks_host(n: Node) -> bool:
            assert n.device.pages is not None, f"{n} is above an inserted node but not on the device"
            return n.host.pages is None and not self._writing[n.device.pages[0]]

        path = list(self._tree.path(node))
        path.reverse()
        for i, n in enumerate(path):  # a child's copy would be unreachable without its parent's
            is_new = self._learner is not None and n.note is None  # nothing is known of it until it is used
            if n.host.pages is None and (is_new or not self.policy.is_due(n.hit_count)):
                del path[i:]
                break
        return list(_runs(path, lacks_host))

    def _submit_write(self, nodes: list[Node]) -> None:
        """Start one copy for a root-first run of nodes; as many of them as the host pool can take.

        The path is locked in both tiers first, so that making room takes no host copy above `nodes`.
        """
        locks = self._locked(nodes[-1])
        if self._learner is not None:
            nodes = self._admitted(nodes)
        wanted = sum(n.num_pages for n in nodes)
        fitting = self._fitting(nodes)
        num_pages = sum(n.num_pages for n in fitting)
        host_pages = self._supply.alloc_host(num_pages) if fitting else None
        self._counters.write_dropped += wanted - (0 if host_pages is None else num_pages)
        if host_pages is None:
            self._unlock(locks)
        else:
            self._write(fitting, host_pages, locks)

    def _fitting(self, nodes: list[Node]) -> list[Node]:
        """The front of a root-first run that the host has room for.

        A node that can never be there whole, since its path is longer than the host, is cut.
        """
        host, room = self._supply.host, self._supply.host_room()
        for i, n in enumerate(nodes):
            if n.num_pages > room:
                if room == 0 or host is None or n.end <= host.num_pages:
                    return nodes[:i]
                for _ in self._tree.path(n, n.start + room):  # cuts it there
                    pass
                assert n.parent is not None
                return [*nodes[:i], n.parent]
            room -= n.num_pages
        return nodes

    def _admitted(self, nodes: list[Node]) -> list[Node]:
        """Of a root-first run, cut if need be, what is worth more than what would have to leave for it."""
        assert self._learner is not None and self._supply.host is not None
        last, start = nodes[-1], nodes[0].start
        short = last.end - start - self._supply.host.available
        if short <= 0:
            return nodes
        refused = short - self._learner.may_evict(Tier.HOST, last, short)
        if not refused:
            return nodes
        self._counters.write_refused += refused
        end = last.end - refused
        for _ in self._tree.path(last, end):
            pass  # cuts the node that reaches over
        return [n for n in self._tree.path(last, start) if n.end <= end][::-1]

    def _write(self, nodes: list[Node], host_pages: Pages, locks: list[Lock]) -> Ticket:
        """Submit one copy, which gives `locks` back when it ends."""
        last = nodes[-1]
        source = self._tree.pages(last, Tier.DEVICE, start=nodes[0].start)
        self._writing[source] = True
        ticket = self._controller.write(source, host_pages)

        def done(result: Result) -> None:
            self._writing[source] = False
            ok = result.num_pages == len(source)
            if ok:
                self._counters.written += len(source)
                self._supply.free_host(self._tree.adopt(last, BACKBONE, Tier.HOST, host_pages))
            else:
                self._counters.write_failed += len(source)
                self._supply.free_host(host_pages)
            self._unlock(locks)
            if ok:
                self.store(last)

        self._flights.add(ticket, Flight(JobKind.WRITE, done, owns=host_pages))
        return ticket

    def _locked(self, node: Node) -> list[Lock]:
        return [self._tree.lock(node, Tier.HOST), self._tree.lock(node, Tier.DEVICE)]

    def _unlock(self, locks: Sequence[Lock]) -> None:
        for lock in reversed(locks):
            self._tree.unlock(lock)

    def write_back(self, num_pages: int) -> tuple[list[Node], list[WriteBack]]:
        """Start copying what a device eviction of `num_pages` would drop: (its victims, the copies).

        The copies hold no lock, as giving one back is a use: what is above a victim would become the last to
        go. So either they have ended when anything else happens to the tree, or they are `keep`ed.
        """
        victims = self._tree.coldest(BACKBONE, Tier.DEVICE, num_pages)
        copies = []
        for node in victims:
            if node.resident(Tier.HOST):
                continue
            wanted = node.num_pages
            fitting = self._fitting([node])
            part = fitting[0] if fitting else node
            host_pages = self._supply.alloc_host(part.num_pages)
            self._counters.write_dropped += wanted - (0 if host_pages is None else part.num_pages)
            if host_pages is not None:
                locks: list[Lock] = []
                copies.append(WriteBack(self._write([part], host_pages, locks), part, locks))
        return victims, copies

    def keep(self, copies: Iterable[WriteBack]) -> None:
        """Lock what is being copied, until it is."""
        for copy in copies:
            copy.locks.extend(self._locked(copy.node))

    # -- host to storage ----------------------------------------------------------------

    def store(self, node: Node) -> None:
        """Back up to storage, if one is attached, what it lacks of the path to `node`, root first.

        Not what is below a node that is neither there nor on the host: nobody could reach it.
        """
        if not self._controller.storage_attached:
            return
        path = list(self._tree.path(node))
        path.reverse()
        for i, n in enumerate(path):
            if not n.stored and n.host.pages is None:
                del path[i:]
                break
        for run in list(_runs(path, lambda n: not n.stored)):
            self._submit_store(run[-1], run[0].start)

    def _submit_store(self, node: Node, start: int) -> None:
        """Store the host pages of the path from page `start` to the end of `node`."""
        lock = self._tree.lock(node, Tier.HOST)
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


def _runs(path: Iterable[Node], lacks: Callable[[Node], bool]) -> Iterator[list[Node]]:
    """The longest runs of adjacent nodes of a root-first path that all lack something."""
    return (list(nodes) for missing, nodes in groupby(path, lacks) if missing)
