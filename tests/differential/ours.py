"""Our drop-in classes as a side of the comparison, with the same pools, table and moves as the peer."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

from hiradix.cache import HostTier
from hiradix.config import ExtraConfig
from hiradix.memory import DevicePool, HostPool, KVShape, PageAllocator, SlotAllocator, make_transport
from hiradix.policy.prefetch import PrefetchPolicy
from hiradix.policy.write import WritePolicy
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    HiRadixCache,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
)
from hiradix.prefix_cache.hiradix import prefetch_limits
from hiradix.transfer import Runtime, StepDriver, TransferController
from hiradix.tree import AS_INSERTED, Tier
from tests.differential.moves import Player
from tests.differential.sides import Pages, RequestTable, Side, page_stamps
from tests.differential.streams import Stream

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

    as_inserted: nodes are never merged, and leave whole however little is wanted.
    touch_rest: a walk that ends inside a node makes the rest of that node recently used.
    """

    as_inserted: bool = False
    touch_rest: bool = False


AS_SHIPPED = Manner()


class OurSide(Side):
    """A side over `RadixCache`, or `HiRadixCache` where `host_ratio` is not 0."""

    records = RECORDS

    def __init__(self, stream: Stream, manner: Manner):
        setup = stream.setup
        self.page_size, self.manner = setup.page_size, manner
        self.pool = DevicePool(SHAPE, setup.num_pages, setup.page_size)
        self.kv = self.pool.k_buffer[0].view(-1)
        self.rows = RequestTable()
        self.allocator = SlotAllocator(setup.num_pages * setup.page_size, setup.page_size, "cpu", self.pool)
        params = CacheInitParams(False, self.rows, self.allocator, setup.page_size)
        self._host: PageAllocator | None = None
        self._taken: Any = None
        self.cache: Any = RadixCache(params)
        if setup.host_ratio:
            num_host = int(setup.num_pages * setup.host_ratio)
            self._host = PageAllocator(num_host)
            self._taken = self._host.alloc(setup.host_taken) if setup.host_taken else None
            self.cache = HiRadixCache(params, self._host_tier(num_host, setup.write_policy), _no_storage)
        if manner.as_inserted:
            self.cache.tree._store.grain = AS_INSERTED  # the class has no parameter for it

    def _host_tier(self, num_host: int, write_policy: str) -> HostTier:
        host_pool = HostPool(SHAPE, num_host, self.page_size, layout="layer_first")
        transport = make_transport("kernel", "cpu")
        driver = StepDriver()
        controller = TransferController(
            self.pool, host_pool, transport=transport, runtime=Runtime(driver=driver, clock=driver.now)
        )
        assert self._host is not None
        prefetch = PrefetchPolicy.from_name("best_effort", prefetch_limits(self.page_size, ExtraConfig()))
        return HostTier(self._host, controller, WritePolicy.from_name(write_policy), prefetch)

    def before_walk(self, namespace: str | None, tokens: list[int]) -> None:
        if not self.manner.touch_rest or len(tokens) < self.page_size:
            return
        tree = self.cache.tree
        num_nodes = sum(1 for _ in tree.nodes())
        end = tree.match(self.key(namespace, tokens).page_aligned(self.page_size)).loadable_node
        if sum(1 for _ in tree.nodes()) > num_nodes:
            (rest,) = end.children.values()
            if rest.resident(Tier.DEVICE):
                tree.unlock(tree.lock(rest, Tier.DEVICE))

    def settle(self) -> None:
        if self._host is not None:
            assert self.cache.drain(60.0)

    def host_free(self) -> int:
        return self._host.available * self.page_size if self._host is not None else 0

    def pages(self) -> Pages:
        tree, size = self.cache.tree, self.page_size
        if self._taken is None:
            self.cache.check()
        else:
            tree.check()  # the cache's own check would miss the taken pages
        found: Pages = {}
        last = {id(tree.root): 0}
        for node in tree.nodes():
            tiers = "D" * node.resident(Tier.DEVICE) + "H" * node.resident(Tier.HOST)
            key, prior = tree.path_key(node), last[id(node.parent)]
            tokens = key.tokens[node.start * size : node.end * size].tolist()
            for name, stamp in page_stamps(key.extra_key, tokens, prior, size):
                found[name], prior = tiers, stamp
            last[id(node)] = prior
        return found


def _no_storage(name: str, extra: object) -> Any:
    raise AssertionError("no storage in this comparison")


def run(stream: Stream, manner: Manner = AS_SHIPPED) -> list[dict[str, Any]]:
    """What is seen after each move."""
    player = Player(OurSide(stream, manner), stream.setup.page_size)
    return [player.play(move) for move in stream.moves]
