"""Saves from an engine's own blocks: whose bytes lie in which host page, while saves and their stores run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hiradix.cache.foreign_device import ForeignDevice
from hiradix.cache.host_index import LOST, HostIndex
from hiradix.policy.no_regret import NoRegret
from hiradix.transfer import JobKind, Result, Ticket
from hiradix.transfer.step_executor import SaveOrder, StepExecutor
from hiradix.tree import FULL, Component, RadixKey, Tier

S = 4
BACKBONE, WINDOW = 0, 1


@dataclass
class Owner:
    """A request, as far as a save knows it."""

    num_saved: int = 0
    loads: set[Ticket] = field(default_factory=set)


def key(base: int, num_pages: int) -> RadixKey:
    return RadixKey(range(base, base + S * num_pages))


class Blocks:
    """One worker by hand. Block b of request `base` holds (base, page) in both groups; hosts hold what was
    copied into them, `stored` what storage was given, by (first token, component, page)."""

    def __init__(self, reach: int, host_pages: tuple[int, int], has_storage: bool):
        self.index = HostIndex(S, (FULL, Component("window", reach=reach)))
        self.index.open(host_pages)
        self.executor = StepExecutor(1)
        self.executor.open((64, 64))
        if has_storage:
            self.executor.attach()
        self.device = ForeignDevice(self.index, self.executor, NoRegret(False), True, lambda *_: None)
        self.blocks: dict[int, tuple[int, int]] = {}
        self.hosts: list[dict[int, tuple[int, int]]] = [{}, {}]
        self.stored: dict[tuple[int, int, int], tuple[int, int]] = {}

    def save(self, base: int, num_pages: int) -> SaveOrder:
        """Order the save of a request's first pages."""
        first = base * 10
        tables = [[first + g * 1000 + page for page in range(1, num_pages + 1)] for g in (BACKBONE, WINDOW)]
        for table in tables:
            self.blocks.update((block, (base, page)) for page, block in enumerate(table))
        self.device.save(Owner(), key(base, num_pages), tables)
        (order,) = self.executor.take().saves
        return order

    def write(self, order: SaveOrder, error: str | None = None) -> None:
        """The worker has copied the blocks, or could not."""
        count = 0
        for copy in order.copies if error is None else ():
            for source, target in zip(copy.source.tolist(), copy.target.tolist(), strict=True):
                self.hosts[copy.pair][target] = self.blocks[source]
            count += len(copy.target)
        self._answer(Result(order.ticket, JobKind.WRITE, count, error=error))

    def store(self, order: SaveOrder, base: int) -> None:
        """The worker has put the host pages of a save into storage."""
        assert order.store is not None
        payload: Any = order.store.payload
        for pages, component in payload.trailing:
            first = len(payload.rows) - len(pages)
            for at, page in enumerate(pages.tolist(), first):
                self.stored[base, component, payload.rows.start + at] = self.hosts[component][page]
        count = sum(len(pages) for pages, _ in payload.trailing)
        self._answer(Result(order.store.ticket, JobKind.STORE, count))

    def _answer(self, result: Result) -> None:
        self.executor.answer(result)
        for each in self.executor.poll():
            self.index.in_flight.apply(each)
        self.index.drop_lost()


def test_window_pages_that_are_being_stored_are_given_to_nobody() -> None:
    blocks = Blocks(reach=2, host_pages=(64, 6), has_storage=True)
    first = blocks.save(100, 6)
    blocks.write(first)  # its six window pages are all there are, and storage has not read them yet
    second = blocks.save(200, 4)
    blocks.write(second)
    blocks.store(first, 100)
    blocks.store(second, 200)
    assert {at for at in blocks.stored if at[:2] == (100, WINDOW)}, "windows are stored"
    assert all(content == (base, page) for (base, _, page), content in blocks.stored.items())


def test_locks_of_a_save_are_given_back_with_its_store() -> None:
    blocks = Blocks(reach=2, host_pages=(64, 6), has_storage=True)
    order = blocks.save(100, 6)
    blocks.write(order)
    assert blocks.index.tree.protected_pages(Tier.HOST, WINDOW) == 6
    blocks.store(order, 100)
    for component in (BACKBONE, WINDOW):
        assert blocks.index.tree.protected_pages(Tier.HOST, component) == 0
    blocks.index.check()


def test_a_failed_save_leaves_no_lost_window_pages_before_its_backbone() -> None:
    blocks = Blocks(reach=4, host_pages=(64, 8), has_storage=False)
    taken = blocks.index.alloc(8, WINDOW)  # by another save under way: the first one gets no window pages
    blocks.write(blocks.save(100, 6))
    blocks.index.supply.free_host(taken, WINDOW)
    blocks.write(blocks.save(100, 7), "the copy failed")
    pools = blocks.index.supply.host_pools
    assert not any((pool.state == LOST).any() for pool in pools)  # type: ignore[attr-defined]
    blocks.write(blocks.save(100, 7))
    assert blocks.index.find(key(100, 7)).num_pages == 7
    blocks.index.check()


def test_freed_pages_are_noted_for_the_component_that_is_asked_for_them() -> None:
    blocks = Blocks(reach=2, host_pages=(8, 8), has_storage=False)
    for base in range(100, 2100, 100):
        blocks.write(blocks.save(base, 4))
    window, backbone = blocks.index.supply.host_pools[WINDOW], blocks.index.supply.host_pools[BACKBONE]
    assert window.take_freed() == []  # type: ignore[attr-defined]
    assert len(backbone.take_freed()) > 0  # type: ignore[attr-defined]
