"""The radix tree: which pages hold which prefix, in which tier. numpy only."""

from hiradix.tree import node
from hiradix.tree.hashing import PageRows, hash_pages, namespace_seed
from hiradix.tree.key import Namespace, RadixKey
from hiradix.tree.log import TokenLog
from hiradix.tree.node import (
    AS_INSERTED,
    BACKBONE,
    DEVICE,
    FULL,
    HOST,
    UNBOUNDED,
    Component,
    DeadLeaf,
    Freed,
    Granularity,
    Insertion,
    Lock,
    Match,
    Node,
    NodePages,
    Pages,
    Tier,
)
from hiradix.tree.order import EvictionOrder, LruOrder, OrderContext, OrderFactory
from hiradix.tree.tree import RadixTree

IS_COMPILED = not node.__file__.endswith(".py")  # by mypyc: the same source, faster (see setup.py)

__all__ = [
    "AS_INSERTED", "BACKBONE", "DEVICE", "FULL", "HOST", "IS_COMPILED", "UNBOUNDED", "Component", "DeadLeaf",
    "EvictionOrder", "Freed", "Granularity", "Insertion", "Lock", "LruOrder", "Match", "Namespace", "Node",
    "OrderContext", "OrderFactory", "PageRows", "Pages", "RadixKey", "RadixTree", "NodePages", "Tier",
    "TokenLog", "hash_pages", "namespace_seed",
]  # fmt: skip
