"""A protocol stands at a border only: where engines, backends or policies of others meet the library.

Inside our own rooms the class is enough. A test's double there is a subclass, or any object at all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.project.repo import Module, modules

BORDERS = {
    # an engine's own objects
    "hiradix.prefix_cache.records.SlotAllocatorLike": "an engine's device allocator",
    "hiradix.prefix_cache.records.HybridAllocatorLike": "an engine's allocator of windows",
    "hiradix.prefix_cache.records.ReqToTokenPoolLike": "an engine's table of slots",
    "hiradix.prefix_cache.records.RequestLike": "an engine's request",
    "hiradix.prefix_cache.records.StatefulRequestLike": "an engine's request with a recurrent state",
    "hiradix.transfer.protocols.PageSource": "an engine's allocator, in pages",
    "hiradix.cache.pages.PairedSource": "an engine's allocator of windows, in pages",
    "hiradix.cache.foreign_device.BlockOwner": "the request whose block table an engine has",
    "hiradix.adapters.vllm.requests.EngineRequest": "vLLM's request",
    "hiradix.adapters.vllm.residency.QueuedRequest": "vLLM's request, while it waits",
    "hiradix.adapters.vllm.residency.BlockPool": "vLLM's device blocks",
    "hiradix.adapters.probe.Requirement": "what an adapter uses of its engine",
    "hiradix.transfer.executor.StorageExecutor": "who carries orders out: this process, or an engine's workers",
    "hiradix.memory.pools.LayerCounter": "an engine's layer gate",
    "hiradix.memory.shape.CacheShape": "an engine's kind of attention",
    "hiradix.tree.residency.Watch": "who hears of pages: an engine's event stream",
    # backends
    "hiradix.storage.protocol.StorageBackend": "a storage backend",
    "hiradix.storage.components.PageDifference": "an engine's arithmetic: whether rounding explains it",
    "hiradix.storage.kit.seal.Running": "a checksum library",
    "hiradix.memory.transport.Transport": "a library that copies pages",
    # policies
    "hiradix.tree.order.EvictionOrder": "an eviction policy",
    "hiradix.policy.learning.LearningPolicy": "an eviction policy that learns",
    # the wing of applications
    "hiradix.apps.engine.attention.KVBuffers": "a model's view of a pool",
    "hiradix.apps.engine.recurrent.StateBuffers": "a model's view of a pool of states",
    "hiradix.apps.server.service.Service": "an engine behind the HTTP server",
    "hiradix.apps.server.service.TokenizerLike": "a tokenizer",
}


def protocols(found: Iterable[Module]) -> Iterator[str]:
    """Dotted names of the protocols that modules define."""
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and any(_is_protocol(base) for base in node.bases):
                yield f"{module.name}.{node.name}"


def _is_protocol(base: ast.expr) -> bool:
    name = base.value if isinstance(base, ast.Subscript) else base
    return ast.unparse(name).rpartition(".")[2] == "Protocol"


def test_protocols_stand_at_borders_only() -> None:
    found = set(protocols(modules()))
    assert found - set(BORDERS) == set(), "inside our own rooms the class is enough"
    assert set(BORDERS) - found == set(), "no longer there"


def test_the_rule_sees_a_protocol_in_any_form() -> None:
    module = next(m for m in modules() if m.name == "hiradix.tree.node")
    code = "class A(Protocol): ...\nclass B(typing.Protocol[T]): ...\nclass C(A): ..."
    assert [name[-1] for name in protocols([Module("m", module.path, ast.parse(code))])] == ["A", "B"]
