"""Our drop-in classes as a side of the comparison, with the same pools, table and moves as the peer."""

from __future__ import annotations

import random
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hiradix.cache.pages import BACKBONE
from hiradix.config import ExtraConfig
from hiradix.memory import DevicePool, HybridSlotAllocator, KVShape, SlotAllocator
from hiradix.prefix_cache import (
    EvictParams,
    HiRadixCache,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
    SWARadixCache,
)
from hiradix.prefix_cache.records import WINDOW
from hiradix.transfer import Runtime, StepDriver
from hiradix.tree import AS_INSERTED, DeadLeaf, Node, Tier
from hiradix.tree.walk import walk
from tests.cache.world import SimulatedStorage
from tests.differential.door import OLDEST, init_params, server_args
from tests.differential.last_walks import LastWalks
from tests.differential.moves import Player
from tests.differential.sides import Found, Pages, Request, RequestTable, Side, page_stamps
from tests.differential.streams import Setup, Stream
from tests.differential.windows import WindowSide
from tests.transfer.doubles import guarded

SHAPE = KVShape(1, 1, 1, 1, torch.int64)
RECORDS = types.SimpleNamespace(
    RadixKey=RadixKey,
    MatchPrefixParams=MatchPrefixParams,
    InsertParams=InsertParams,
    EvictParams=EvictParams,
)


@dataclass(frozen=True)
class Manner:
    """What of the peer's manner is put on, to show that a difference is that and nothing else.

    as_inserted: nodes are never merged; they leave whole however little is wanted, and a lock covers the
        windows of whole nodes.
    touch_rest: a walk that ends inside a node makes the rest of that node recently used.
    touch_windows: a walk makes all windows of its path recently used, not only what a lock covers.
    by_last_walk: windows leave in the order of the last walk that ended less than a window and a page
        behind them; giving a lock back is no use.
    dead_leaf: what becomes of leaves where no match can end.
    with_window: a leaf leaves when its window does, whatever becomes of its parents.
    window_leaves: a new leaf is cut where its window begins, so that a lock covers no more of it.
    """

    as_inserted: bool = False
    touch_rest: bool = False
    touch_windows: bool = False
    by_last_walk: bool = False
    dead_leaf: DeadLeaf = DeadLeaf.UNUSABLE
    with_window: bool = False
    window_leaves: bool = False


AS_SHIPPED = Manner()


class OurSide(Side):
    """A side over `RadixCache`, or `HiRadixCache` where `host_ratio` is not 0."""

    records = RECORDS
    rest: Node | None = None  # what the walk under way will leave of a node

    def __init__(self, setup: Setup, manner: Manner, version: str = OLDEST):
        self.page_size, self.manner, self.version = setup.page_size, manner, version
        self.rows = RequestTable()
        self._host: Any = None
        self._taken: Any = None
        self.make_pools(setup)
        params = self.params()
        self.cache: Any = self._tiered(params, setup) if setup.host_ratio else RadixCache(params)
        if manner.as_inserted:
            self.cache.tree._residencies.use(AS_INSERTED)  # the class has no parameter for it

    def make_pools(self, setup: Setup) -> None:
        """Make `allocator` and `kv`."""
        pool = DevicePool(SHAPE, setup.num_pages, setup.page_size)
        self.kv = pool.k_buffer[0].view(-1)
        self.allocator = SlotAllocator(setup.num_pages * setup.page_size, setup.page_size, "cpu", pool)

    def params(self) -> Any:
        """SGLang's CacheInitParams."""
        return init_params(self.version)(False, self.rows, self.allocator, self.page_size)

    def _tiered(self, params: Any, setup: Setup) -> HiRadixCache:
        driver = StepDriver()
        runtime = Runtime(driver=driver, clock=driver.now)
        flags = server_args(setup, hicache_no_regret=False)  # the flag is ours
        cache = HiRadixCache(params, flags, storage_factory=_in_memory, runtime=runtime)
        self._host = cache.cache.supply.host_pools[BACKBONE]
        self._taken = self._host.alloc(setup.host_taken) if setup.host_taken else None
        if setup.storage:
            cache.attached.attach("memory", ExtraConfig())
        return cache

    def before_walk(self, namespace: str | None, tokens: list[int]) -> None:
        tree, key = self.cache.tree, RadixKey(tokens, namespace).page_aligned(self.page_size)
        _, self.rest, _ = walk(tree.root, key, len(key) // self.page_size, self.page_size)
        if self.rest is not None and self.manner.touch_rest:
            tree.match(key)  # cuts it
            if self.rest.resident(Tier.DEVICE):
                tree._pins.pin(self.rest, Tier.DEVICE)
                tree._pins.unpin(self.rest, Tier.DEVICE)

    def settle(self) -> None:
        if self._host is not None:
            assert self.cache.drain(60.0)

    def forget(self) -> None:
        self.cache.reset()

    def fetch(self, namespace: str | None, tokens: list[int], found: Found) -> int:
        rest = tokens[len(found.slots) + found.num_host :]
        request = types.SimpleNamespace(fill_ids=tokens, extra_key=namespace)
        self.cache.prefetch_from_storage("r", found.host_node, rest, req=request)
        while not self.cache.check_prefetch_progress("r"):
            self.settle()
        return int(self.cache.pop_prefetch_loaded_tokens("r"))

    def host_free(self) -> int:
        return self._host.available * self.page_size if self._host is not None else 0

    def tiers(self, node: Node) -> str:
        """Where the node's pages are."""
        return "D" * node.resident(Tier.DEVICE) + "H" * node.resident(Tier.HOST)

    def pages(self) -> Pages:
        tree, size = self.cache.tree, self.page_size
        if self._taken is None:
            self.cache.check()
        else:
            tree.check()  # the cache's own check would miss the taken pages
        found: Pages = {}
        last = {id(tree.root): 0}
        for node in tree.nodes():
            tiers = self.tiers(node)
            key, prior = tree.path_key(node), last[id(node.parent)]
            tokens = key.tokens[node.start * size : node.end * size].tolist()
            for name, stamp in page_stamps(key.extra_key, tokens, prior, size):
                found[name], prior = tiers, stamp
            last[id(node)] = prior
        return found


class OurWindowSide(WindowSide, OurSide):
    """A side over `SWARadixCache`."""

    def __init__(self, setup: Setup, manner: Manner, version: str = OLDEST):
        self.page_size, self.manner, self.version = setup.page_size, manner, version
        self.window, self.rows = setup.window, RequestTable()
        self._host = self._taken = None
        self.make_pools(setup)
        params = self.params()
        params.sliding_window_size = self.window
        self.cache = SWARadixCache(params)
        store = self.cache.tree._residencies
        if manner.as_inserted:
            store.use(AS_INSERTED)
        store.dead_leaf = manner.dead_leaf
        if manner.with_window:
            self._drop_with_window(store)
        if manner.window_leaves:
            self._cut_new_leaves(self.cache.tree)
        self.walks = LastWalks(self.cache.tree, self.window) if manner.by_last_walk else None

    def make_pools(self, setup: Setup) -> None:
        num_full, num_window = setup.num_pages * self.page_size, setup.num_window_pages * self.page_size
        self.allocator = HybridSlotAllocator(num_full, num_window, self.page_size)
        self.kv = torch.zeros(num_full + self.page_size, dtype=torch.int64)
        self.window_kv = torch.zeros(num_window + self.page_size, dtype=torch.int64)

    def _drop_with_window(self, store: Any) -> None:
        drop = store.drop

        def dropped(node: Node, component: int, tier: int, out: Any, child_went: bool = False) -> None:
            drop(node, component, tier, out, child_went)
            entries = (node.device, node.host, *node.others)
            if component == WINDOW and not node.children and not any(entry.lock_ref for entry in entries):
                store.unlink(node, out)

        store.drop = dropped

    def _cut_new_leaves(self, tree: Any) -> None:
        grow, reach = tree._grow, tree.components[WINDOW].reach

        def grown(node: Node, key: Any, num_pages: int) -> Node:
            leaf: Node = grow(node, key, num_pages)
            tree.cut(leaf, max(leaf.start, num_pages - reach))
            return leaf

        tree._grow = grown

    def tiers(self, node: Node) -> str:
        return "D" * node.resident(Tier.DEVICE) + "W" * node.resident(Tier.DEVICE, WINDOW)

    # -- the peer's manner: which windows a walk makes hot ----------------------------------

    def match(self, namespace: str | None, tokens: list[int]) -> Found:
        found = super().match(namespace, tokens)
        path = list(self.cache.tree.path(found.node))[::-1]
        cut = [] if self.rest is None else [self.rest.parent, self.rest]
        self._touch([*cut, *path])
        if self.walks is not None:
            self.walks.ended(found.node)
        return found

    def insert(self, namespace: str | None, tokens: list[int], slots: torch.Tensor) -> int:
        num_present = super().insert(namespace, tokens, slots)
        self._touch_inserted(namespace, tokens)
        return num_present

    def share(self, request: Request, chunked: bool) -> None:
        super().share(request, chunked)
        self._touch_inserted(request.extra_key, request.fill_ids)
        self._touch(list(self.cache.tree.path(request.receipt[0]))[::-1])  # 0.5.9 matches once more

    def finish(self, request: Request, is_insert: bool) -> None:
        super().finish(request, is_insert)
        if is_insert:
            self._touch_inserted(request.extra_key, request.fill_ids)

    def _touch_inserted(self, namespace: str | None, tokens: list[int]) -> None:
        key, tree = RadixKey(tokens, namespace).page_aligned(self.page_size), self.cache.tree
        path = list(tree.path(tree._walk(tree.root, key)))[::-1]
        if self.rest is not None:
            upper = next((i for i, node in enumerate(path) if node is self.rest.parent), len(path) - 1)
            path.insert(upper + 1, self.rest)
        self._touch(path)
        if self.walks is not None:
            self.walks.inserted(tree._walk(tree.root, key))

    def evict(self, num_tokens: int, num_window_tokens: int = 0) -> Any:
        if self.walks is not None:
            self.walks.apply()
        evicted = super().evict(num_tokens, num_window_tokens)
        if self.walks is not None:
            self.walks.settle()
        return evicted

    def _touch(self, nodes: Sequence[Node | None]) -> None:
        if not self.manner.touch_windows:
            return
        order = self.cache.tree._residencies.orders[WINDOW][Tier.DEVICE]
        for node in nodes:
            entry = node.residency(WINDOW, Tier.DEVICE) if node is not None else None
            if entry is not None and entry.pages is not None and not entry.lock_ref:
                order.remove((entry,))
                order.push((entry,))


def _in_memory(name: str, extra: object) -> Any:
    return guarded(SimulatedStorage(random.Random(0)))


def run(stream: Stream, manner: Manner = AS_SHIPPED, version: str = OLDEST) -> list[dict[str, Any]]:
    """What is seen after each move. version: of SGLang, whose records build the cache."""
    side = OurWindowSide if stream.setup.window else OurSide
    player = Player(side(stream.setup, manner, version), stream.setup.page_size)
    return [player.play(move) for move in stream.moves]
