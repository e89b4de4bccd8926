"""The parts that wishes are carried out with: those of one planner, over whichever executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hiradix.cache.host_index import HostIndex
from hiradix.cache.in_flight import InFlightJobs
from hiradix.cache.intents.removals import Removals
from hiradix.cache.load_back import LoadBack
from hiradix.cache.pages import BACKBONE, PageSupply
from hiradix.cache.prefetch import Prefetcher
from hiradix.cache.storage_backup import StorageBackup
from hiradix.cache.write_through import WriteThrough
from hiradix.errors import Misuse
from hiradix.intents import Amount
from hiradix.transfer import StorageExecutor
from hiradix.tree import DEVICE, HOST, Match, Node, RadixKey, RadixTree, Tier

TIERS_BY_NAME = {"device": DEVICE, "host": HOST}


class Planner:
    """A planner with a host tier over an engine's own device pages, as inside vLLM; `LocalPlanner` has both.

    executor, prefetcher, backup: None without a host tier. clock: what all ranks agree on.
    """

    has_device = False  # whether device pages are in the tree

    def __init__(
        self,
        tree: RadixTree,
        in_flight: InFlightJobs,
        removals: Removals,
        clock: Callable[[], float],
        executor: StorageExecutor | None,
    ):
        self.tree = tree
        self.in_flight = in_flight
        self.removals = removals
        self.clock = clock
        self.executor = executor

    # -- what differs between planners --------------------------------------------------

    @property
    def supply(self) -> PageSupply:
        raise Misuse("of a planner of no engine")

    @property
    def prefetcher(self) -> Prefetcher | None:
        return None

    @property
    def backup(self) -> StorageBackup | None:
        """The backup of host pages to storage; None without one."""
        return None

    def match(self, key: RadixKey) -> Match:
        """The usable part of `key`: a match without what is being forgotten. Splits the node it ends in."""
        return self.removals.usable(self.tree.match(key))

    def refusal(self, tier: str) -> str:
        """The reason why a tier of this engine is not in this planner's hands; "" if it is, or if there is no
        such tier."""
        return ""

    def is_good(self, node: Node) -> bool:
        """Whether what `node` has may be served: it is neither on its way nor what a failed copy left."""
        return True

    def is_spoilt(self, node: Node) -> bool:
        """Whether the path of `node` has what a failed copy left, which goes when nothing locks it."""
        return False

    def load(self, node: Node) -> bool:
        """Order what the device lacks of the path to `node`. False: it cannot be, or is not worth it."""
        return False

    def copy_down(self, node: Node) -> bool:
        """Order what the host lacks of the path to `node` and the device has. False: it cannot be."""
        return False

    # -- what follows from these ----------------------------------------------------------

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that are in the tree."""
        device = ("device",) if self.has_device else ()
        return (*device, "host") if self.supply.host_pools else device

    @property
    def has_storage(self) -> bool:
        return self.executor is not None and self.executor.storage_attached

    def pool_pages(self, tier: Tier) -> list[int]:
        """Pages of each component that the pools of a tier have."""
        pools = self.supply.host_pools if tier else self.supply.device_pools
        return [pool.num_pages for pool in pools]

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of a page of each component; 0 while they are not known."""
        known = tuple(self.executor.page_bytes) if self.executor is not None else ()
        return known or (0,) * len(self.tree.components)

    def amount(self, pages: list[int]) -> Amount:
        """The amount of so many pages of each component."""
        size = sum(count * each for count, each in zip(pages, self.page_bytes, strict=True))
        return Amount(pages[BACKBONE], pages[BACKBONE] * self.tree.page_size, size)

    def backbone(self, num_pages: int) -> Amount:
        """The amount of so many pages of the backbone, with the bytes of that alone."""
        return self.amount([num_pages] + [0] * (len(self.tree.components) - 1))

    def pages_of(self, node: Node, tier: Tier) -> list[int]:
        """Pages of each component that `node` has in `tier`."""
        counts = []
        for component in range(len(self.tree.components)):
            pages = node.residency(component, tier).pages
            counts.append(0 if pages is None else len(pages))
        return counts


class LocalPlanner(Planner):
    """The planner over device, host and storage: `HierarchicalCache`. The parts below the device are None where
    there is no host tier."""

    has_device = True

    def __init__(
        self,
        supply: PageSupply,
        in_flight: InFlightJobs,
        removals: Removals,
        clock: Callable[[], float],
        executor: Any = None,
        write_through: WriteThrough | None = None,
        load_back: LoadBack | None = None,
        prefetcher: Prefetcher | None = None,
    ):
        super().__init__(supply.tree, in_flight, removals, clock, executor)
        self._supply = supply
        self._write_through = write_through
        self._load_back = load_back
        self._prefetcher = prefetcher

    @property
    def supply(self) -> PageSupply:
        return self._supply

    @property
    def prefetcher(self) -> Prefetcher | None:
        return self._prefetcher

    @property
    def backup(self) -> StorageBackup | None:
        return None if self._write_through is None else self._write_through.storage_backup

    def match(self, key: RadixKey) -> Match:
        match = super().match(key)
        return match if self._load_back is None else self._load_back.usable(match)

    def is_good(self, node: Node) -> bool:
        return self._load_back is None or not self._load_back.has_failed(node)

    def is_spoilt(self, node: Node) -> bool:
        return self._load_back is not None and self._load_back.has_failed_on(node)

    def load(self, node: Node) -> bool:
        if self._load_back is None or self._load_back.load(node) is None:
            return False
        self._load_back.start_loading()
        return True

    def copy_down(self, node: Node) -> bool:
        return self._write_through is not None and self._write_through.copy_down(node)


class HostPlanner(Planner):
    """The planner over an engine's own device pages: `HostIndex`, with `ForeignDevice`.

    prefetcher, backup: given as soon as they are there.
    """

    def __init__(
        self,
        index: HostIndex,
        clock: Callable[[], float],
        executor: StorageExecutor,
        prefetcher: Callable[[], Prefetcher | None],
        backup: StorageBackup,
    ):
        super().__init__(index.tree, index.in_flight, index.removals, clock, executor)
        self._index = index
        self._find_prefetcher = prefetcher
        self._backup = backup

    @property
    def supply(self) -> PageSupply:
        return self._index.supply

    @property
    def prefetcher(self) -> Prefetcher | None:
        return self._find_prefetcher()

    @property
    def backup(self) -> StorageBackup | None:
        return self._backup

    def match(self, key: RadixKey) -> Match:
        node = super().match(key).loadable_node
        while node.parent is not None and not self._index.is_ready(node):
            node = self.tree.boundaries(node.parent).loadable_node
        return Match(self.tree.root, node)

    def refusal(self, tier: str) -> str:
        if tier == "device":
            return "device: its blocks are the engine's own, whose prefix cache holds and resets them itself"
        return ""

    def is_good(self, node: Node) -> bool:
        return self._index.has_ready(node)

    def is_spoilt(self, node: Node) -> bool:
        return self._index.has_lost_on(node)
