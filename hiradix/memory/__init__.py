"""Memory: page pools (device, pinned host), layouts as strides, allocators, page copies between pools."""

from __future__ import annotations

from hiradix.memory.allocator import PageAllocator, ReqToTokenPool, SlotAllocator
from hiradix.memory.choose import make_transport
from hiradix.memory.foreign import EngineShape
from hiradix.memory.hybrid import HybridPools, HybridSlotAllocator
from hiradix.memory.layout import LAYOUTS, Layout, PageRun, Plane, make_layout
from hiradix.memory.manifest import SlotManifest
from hiradix.memory.pools import DevicePool, HostPool, Pool
from hiradix.memory.shape import (
    ArraySpec,
    CacheShape,
    KVShape,
    MLAShape,
    ScaledKVShape,
    SparseMLAShape,
    StateShape,
    page_bytes,
    token_bytes,
)
from hiradix.memory.sizing import HostPlan, plan_host_pool, size_host_pool, size_host_pools
from hiradix.memory.strided_pool import StridedPool
from hiradix.memory.transport import TorchTransport, Transport

__all__ = [
    "LAYOUTS",
    "ArraySpec",
    "CacheShape",
    "DevicePool",
    "EngineShape",
    "HostPlan",
    "HostPool",
    "HybridPools",
    "HybridSlotAllocator",
    "KVShape",
    "Layout",
    "MLAShape",
    "PageAllocator",
    "PageRun",
    "Plane",
    "Pool",
    "ReqToTokenPool",
    "ScaledKVShape",
    "SlotAllocator",
    "SlotManifest",
    "SparseMLAShape",
    "StateShape",
    "StridedPool",
    "TorchTransport",
    "Transport",
    "make_layout",
    "make_transport",
    "page_bytes",
    "plan_host_pool",
    "size_host_pool",
    "size_host_pools",
    "token_bytes",
]
