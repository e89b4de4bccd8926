"""The storage side of the planner over another executor, with a tree of a host tier and no device pools:
what an engine needs whose own block table has the device's pages and whose workers are other processes.

The executor here carries nothing out by itself: its orders lie in a list until a test answers them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from hiradix.cache.in_flight import InFlightJobs
from hiradix.cache.pages import CacheCounters, PageSupply
from hiradix.cache.prefetch import Prefetcher
from hiradix.cache.storage_backup import StorageBackup
from hiradix.errors import Misuse
from hiradix.memory import PageAllocator
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.transfer import JobKind, Result, StorageExecutor, Ticket, TransferLimits
from hiradix.transfer.jobs import QueryPayload
from hiradix.tree import HOST, RadixKey, RadixTree
from hiradix.tree.hashing import PageRows, hash_pages

PAGE_SIZE, HOST_PAGES = 2, 40


class OrderBook:
    """An executor whose orders wait, and whose storage has what `stored` names."""

    limits = TransferLimits(batch_pages=4)
    page_bytes = (64,)

    def __init__(self) -> None:
        self.storage_attached = True
        self.stored: set[bytes] = set()
        self.orders: dict[Ticket, Any] = {}
        self.cancelled: list[Ticket] = []
        self.num_read = self.num_asked = 0
        self._tickets = itertools.count()

    def _order(self, *order: Any) -> Ticket:
        ticket = Ticket(next(self._tickets))
        self.orders[ticket] = order
        return ticket

    def query(
        self, rows: PageRows, num_pages: int | None = None, windows: Sequence[Any] = (), known: int = 0
    ) -> Ticket:
        asked = QueryPayload(rows, len(rows) if num_pages is None else num_pages)
        return self._order(JobKind.QUERY, asked.rows, asked.num_pages)

    def read(
        self, hashes: Sequence[bytes], host_pages: Any, chain: Any = None, others: Iterable[Any] = (),
        extra_key: str | None = None, tenant: str = "", after: bytes = b"",
    ) -> Ticket:  # fmt: skip
        return self._order(JobKind.READ, tuple(hashes), host_pages)

    def write_storage(self, rows: PageRows, host_pages: Any, others: Iterable[Any] = ()) -> Ticket:
        return self._order(JobKind.STORE, rows, host_pages)

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)

    def answer(self) -> list[Result]:
        """One result for each order, in their order."""
        orders, self.orders = self.orders, {}
        return [self._answer(ticket, *order) for ticket, order in orders.items()]

    def _answer(self, ticket: Ticket, kind: JobKind, what: Any, pages: Any) -> Result:
        if ticket in self.cancelled:
            return Result(ticket, kind, 0, error="cancelled")
        if kind is JobKind.READ:
            self.num_read += len(pages)
            return Result(ticket, kind, sum(name in self.stored for name in what))
        names = hash_pages(what)
        if kind is JobKind.STORE:
            self.stored.update(names[-len(pages) :])
            return Result(ticket, kind, len(pages), tuple(names))
        self.num_asked += pages
        asked = names[len(names) - pages :]
        found = next((i for i, name in enumerate(asked) if name not in self.stored), len(asked))
        return Result(ticket, kind, found, tuple(names))


class Planner:
    """Tree, host pool and what orders storage's part; `step` answers what was ordered."""

    def __init__(self, policy: str = "wait_complete") -> None:
        self.tree = RadixTree(PAGE_SIZE)
        self.host = PageAllocator(HOST_PAGES)
        self.supply = PageSupply(self.tree, (), self.host, CacheCounters())
        self.in_flight = InFlightJobs(self.supply.free_all_host)
        self.book = OrderBook()
        executor: StorageExecutor = self.book
        self.gate = NoRegret(False)
        prefetch_policy = PrefetchPolicy.from_name(policy, PrefetchLimits(PAGE_SIZE, PAGE_SIZE))
        self.prefetcher = Prefetcher(
            self.supply, executor, self.in_flight, prefetch_policy, lambda: 0.0, self.gate
        )
        self.backup = StorageBackup(self.supply, executor, self.in_flight)

    def step(self) -> None:
        for result in self.book.answer():
            self.in_flight.apply(result)
        self.prefetcher.room.next_round()
        self.check()

    def run(self) -> None:
        while self.book.orders:
            self.step()

    def check(self) -> None:
        self.tree.check()
        self.supply.check_conservation(0, self.in_flight.num_owned)

    def store(self, key: RadixKey) -> None:
        """Have storage know `key`, and the host not."""
        pages = self.supply.alloc_host(key.num_pages(PAGE_SIZE))
        assert pages is not None
        done = self.tree.insert(key, HOST, [pages])
        self.backup.store(done.lock.node)
        self.tree.unlock(done.lock)
        self.run()
        self.supply.evict(HOST, HOST_PAGES)
        assert self.host.available == HOST_PAGES


def key(num_pages: int, last: int = 0) -> RadixKey:
    tokens = np.arange(num_pages * PAGE_SIZE)
    tokens[-1] += 1000 * last
    return RadixKey(tokens.tolist())


def test_equal_requests_that_arrive_together_read_once() -> None:
    planner = Planner()
    planner.store(key(8))
    for name in "abcd":
        assert planner.prefetcher.start(name, key(8), planner.tree.root)
    planner.run()
    assert [planner.prefetcher.progress(name) for name in "abcd"] == [True] * 4
    assert [planner.prefetcher.pop_loaded_pages(name) for name in "abcd"] == [8] * 4
    assert (planner.book.num_asked, planner.book.num_read) == (8, 8)
    assert planner.host.available == HOST_PAGES - 8
    assert planner.tree.match(key(8)).loadable_node.end == 8


def test_those_who_wait_for_one_prefix_take_its_room_once() -> None:
    """What is held for those who wait is half of the pool: 64 clients of one prompt take its room once."""
    planner = Planner()
    planner.store(key(16))
    other = RadixKey(list(range(5000, 5016)))
    planner.store(other)
    for client in range(64):
        assert planner.prefetcher.start(client, key(16), planner.tree.root)
    assert planner.prefetcher.start("other", other, planner.tree.root)
    planner.run()
    assert planner.prefetcher.caps == [20] and planner.prefetcher.room.reserved_pages() == [16]
    assert all(planner.prefetcher.progress(client) for client in range(64))
    assert not planner.prefetcher.progress("other") and planner.prefetcher.fetching_pages("other") == 8
    assert planner.prefetcher.room.num_short == 1 and planner.book.num_read == 16
    for client in range(64):
        assert planner.prefetcher.room.reserved_pages() == [16], "the last of them lets go"
        planner.prefetcher.abort(client)
    planner.step()
    planner.run()
    assert planner.prefetcher.progress("other") and planner.prefetcher.room.reserved_pages() == [8]
    assert planner.book.num_read == 24 and not planner.supply.counters.unfulfilled


def test_pages_that_go_missing_leave_nothing_behind() -> None:
    planner = Planner()
    planner.store(key(8))
    assert planner.prefetcher.start("a", key(8), planner.tree.root)
    planner.step()
    planner.book.stored = set(hash_pages(planner.tree.rows(key(8), planner.tree.root, 0, 8))[:3])
    planner.run()
    assert planner.prefetcher.progress("a") and planner.prefetcher.pop_loaded_pages("a") == 3
    assert planner.host.available == HOST_PAGES - 3 and not len(planner.in_flight)


def test_an_abort_cancels_what_was_ordered() -> None:
    planner = Planner()
    planner.store(key(8))
    assert planner.prefetcher.start("a", key(8), planner.tree.root)
    planner.step()
    reads = list(planner.book.orders)
    planner.prefetcher.abort("a")
    assert reads and planner.book.cancelled == reads
    planner.run()
    assert planner.host.available == HOST_PAGES and not len(planner.prefetcher)


def test_a_cleared_tree_gets_no_page_of_an_older_order() -> None:
    planner = Planner()
    planner.store(key(8))
    assert planner.prefetcher.start("a", key(8), planner.tree.root)
    planner.step()
    planner.in_flight.orphan_all()
    planner.tree.clear()
    planner.prefetcher.clear()
    assert planner.host.available == HOST_PAGES - 8, "the reads under way still write into them"
    planner.run()
    assert planner.host.available == HOST_PAGES
    assert planner.tree.match(key(8)).loadable_node is planner.tree.root


def test_a_result_of_no_order_is_refused() -> None:
    planner = Planner()
    with pytest.raises(Misuse, match="read ticket 7, which is not in flight"):
        planner.in_flight.apply(Result(Ticket(7), JobKind.READ, 1))
