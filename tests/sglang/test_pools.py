"""Each class of SGLang's device pools: its pages go to the host, to storage and back byte for byte, or it is
refused by its name.

The rolls are read from SGLang's sources: a release with a pool class that is neither here nor refused fails.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.amx_utils import _init_amx_conv_state
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import (
    FP4MXBlock16KVCacheMethod,
    NVFP4KVCacheMethod,
)
from sglang.srt.mem_cache import memory_pool as pools
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from hiradix.adapters.sglang.cache_factory import gate_reads
from hiradix.errors import ConfigError
from hiradix.memory import DevicePool, HostPool, make_transport
from hiradix.memory.engine_pools import REFUSED, device_pool, layout_of, state_pool, window_pools
from hiradix.prefix_cache.identity import ModelIdentity, stored_pages
from hiradix.storage import Batch, open_stores
from hiradix.transfer.gate import LayerDoneCounter, LoadFailed

PAGES, LAYERS = 5, 3
ROOT = Path(pools.__file__).parent
# What is no pool of pages: interfaces, a buffer that pools share, images' embeddings.
NO_PAGES = {
    "EmbeddingPool",
    "KVCache",
    "BaseSWAKVPool",
    "PageInterleaveKVPoolMixin",
    "UnifiedKVPool",
    "DeepSeekV4UnifiedKVPool",
}
# Slots of requests, not of pages, that no cache is asked to keep.
OF_REQUESTS = {"ReqToTokenPool", "HybridReqToTokenPool", "UnifiedHybridReqToTokenPool", "ShortConvPool",
               "NGramPool", "CompressStatePool", "MambaCheckpointPool"}  # fmt: skip


def mha(
    kind: type = pools.MHATokenToKVPool, page: int = 8, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    return kind(PAGES * page, page, dtype, 2, 32, LAYERS, "cpu", False, **more)


def mla(kind: type = pools.MLATokenToKVPool, page: int = 8, dtype: torch.dtype = torch.bfloat16) -> Any:
    return kind(PAGES * page, page, dtype, 64, 16, LAYERS, "cpu", False)


def dsa(
    skip: list[bool] | None = None, dtype: torch.dtype = torch.bfloat16, dim: int = 80, **more: Any
) -> Any:
    return pools.DSATokenToKVPool(
        PAGES * 64, 64, 64, dtype, 16, LAYERS, "cpu", 128, False, dim, index_buf_size=PAGES * 64,
        skip_topk_layers=skip, **more,
    )  # fmt: skip


def sparse() -> Any:
    return pools.MiniMaxSparseKVPool(
        PAGES * 8, 8, torch.float32, 2, 16, 4, [0], [1, 2], "cpu", disable_value_sparse_layer_ids=[2],
        start_layer=0, end_layer=3,
    )  # fmt: skip


def linear() -> Any:
    return pools.HybridLinearKVPool(
        PAGES * 8, torch.float32, 8, 2, 16, [1, 3], "cpu", SimpleNamespace(), enable_memory_saver=False
    )


def windows(full: type = pools.MHATokenToKVPool) -> Any:
    return SWAKVPool(
        PAGES * 8, PAGES * 8, 8, torch.float32, 2, 16, [0, 2], [1], "cpu", token_to_kv_pool_class=full
    )


def states(conv: tuple[tuple[int, ...], ...] = ((12, 3),), temporal: tuple[int, ...] = (4, 8, 6)) -> Any:
    shape = SimpleNamespace(conv=list(conv), temporal=temporal)
    dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
    params = SimpleNamespace(shape=shape, dtype=dtype, is_kda=False, layers=[0, 2, 4])
    return pools.MambaPool(
        size=PAGES, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2, 4], device="cpu"
    )


class Described:
    """A pool that is served: how it is made, and what of it makes a page."""

    def __init__(
        self, make: Callable[[], Any], *arrays: str, wrap: Callable[[Any], DevicePool] | None = None
    ):
        self.make, self.arrays = make, arrays
        self.wrap = wrap or (lambda pool: device_pool(pool, pool.page_size))


def of_windows(which: str) -> Callable[[Any], DevicePool]:
    return lambda pool: getattr(window_pools(pool), which)


SERVED: dict[str, Described] = {
    "MHATokenToKVPool": Described(mha, "k", "v"),
    "MHATokenToKVPool of fp8": Described(lambda: mha(dtype=torch.float8_e4m3fn), "k", "v"),
    "MHATokenToKVPool in pages of one": Described(lambda: mha(page=1), "k", "v"),
    "MHATokenToKVPool with other value heads": Described(lambda: mha(v_head_dim=16), "k", "v"),
    "MHATokenToKVPoolFP4": Described(
        lambda: mha(pools.MHATokenToKVPoolFP4, dtype=torch.uint8), "k", "v", "k_scale", "v_scale"
    ),
    "MHATokenToKVPool of fp4": Described(
        lambda: mha(dtype=torch.float4_e2m1fn_x2, quant_method=FP4MXBlock16KVCacheMethod()),
        *("k", "v", "k_scale", "v_scale"),
    ),
    "MHATokenToKVPoolMXFP8": Described(
        lambda: mha(pools.MHATokenToKVPoolMXFP8, dtype=torch.float8_e4m3fn), "k", "v", "k_scale", "v_scale"
    ),
    "MHATokenToKVPoolMXFP8 with interleaved scales": Described(
        lambda: mha(pools.MHATokenToKVPoolMXFP8, 128, torch.float8_e4m3fn), "k", "v", "k_scale", "v_scale"
    ),
    "MHATokenToKOnlyPool": Described(
        lambda: pools.MHATokenToKOnlyPool(PAGES * 8, 8, torch.float32, 1, 16, LAYERS, "cpu", False), "k"
    ),
    "MLATokenToKVPool": Described(mla, "latent"),
    "MLATokenToKVPoolFP4": Described(
        lambda: mla(pools.MLATokenToKVPoolFP4, dtype=torch.uint8), "latent", "latent_scale"
    ),
    "DSATokenToKVPool": Described(dsa, "latent", "index_k"),
    "DSATokenToKVPool packed": Described(lambda: dsa(None, torch.float8_e4m3fn, 100), "latent", "index_k"),
    "DSATokenToKVPool without some layers' keys": Described(
        lambda: dsa([False, True, False]), "latent.0", "latent.1", "latent.2", "index_k.3", "index_k.4"
    ),
    "MiniMaxSparseKVPool": Described(
        sparse, *(f"k.{n}" for n in (0, 1, 2)), *(f"v.{n}" for n in (3, 4, 5)), "k.6", "v.7", "k.8"
    ),
    "HybridLinearKVPool": Described(
        linear, "k", "v", wrap=lambda pool: device_pool(pool.full_kv_pool, pool.page_size)
    ),
    "SWAKVPool, full": Described(windows, "k", "v", wrap=of_windows("full")),
    "SWAKVPool, windows": Described(windows, "k", "v", wrap=of_windows("other")),
    "MambaPool": Described(states, "conv", "ssm", wrap=state_pool),
    "MambaPool of three convolutions": Described(
        lambda: states(((4, 3), (4, 3), (8, 3))), "conv0", "conv1", "conv2", "ssm", wrap=state_pool
    ),
    "MambaPool of Mamba 1": Described(lambda: states(temporal=(12, 6)), "conv", "ssm", wrap=state_pool),
}  # fmt: skip


def bytes_of(pool: DevicePool, page: int) -> list[bytes]:
    return [
        view[page].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for array in range(len(pool.shape.arrays))
        for view in pool.layer_views(array)
    ]


def tensors(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """Every tensor that a pool of SGLang's keeps, wherever it keeps it."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors(one, seen)]
    if isinstance(value, (pools.KVCache, pools.MambaPool, pools.MambaPool.State, IndexKeyCache)):
        return tensors(list(vars(value).values()), seen)
    return []


@pytest.fixture(autouse=True)
def sizes_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pool asks of parallel groups that are not there."""
    alone = SimpleNamespace(attn_dcp_size=1, dcp_enabled=False)
    monkeypatch.setattr(pools, "get_parallel", lambda: alone)


@pytest.mark.parametrize("name", SERVED)
def test_pages_come_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """From the device to the host, to a file, and into other pages; no other page changes."""
    described = SERVED[name]
    theirs = described.make()
    pool = described.wrap(theirs)
    assert tuple(spec.name for spec in pool.shape.arrays) == described.arrays
    assert pool.num_pages == PAGES
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors(theirs, set()):
        if tensor.dtype not in (torch.uint64, torch.int64):
            raw = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8).set_(raw)
            whole.copy_(torch.randint(0, 256, whole.shape, generator=generator, dtype=torch.uint8))
    before = {page: bytes_of(pool, page) for page in range(1, PAGES + 1)}
    assert len({b"".join(page) for page in before.values()}) == PAGES
    host = HostPool(pool.shape, 4, pool.page_size)
    transport = make_transport("auto", pool.device, (pool, host))
    given, taken = np.array([2, 5], np.int32), np.array([1, 3], np.int32)
    transport.copy_pages(pool, host, given, np.array([3, 0], np.int32), None)
    keys = {"file_storage_path": str(tmp_path), "deadline_s": 60.0, "min_free_space": 0}
    stores = open_stores("file", keys, [stored_pages(ModelIdentity("m"), host, "page_first")])
    store, batch = stores.parts[0], Batch.of(["first", "second"])
    views = [host.page_views(page) for page in (3, 0)]
    assert all(store.put(batch, views))
    for view in (view for page in views for view in page):
        view[:] = bytes(len(view))
    assert all(store.get(batch, views))
    stores.close()
    for layer in range(pool.shape.num_layers):
        transport.copy_pages(host, pool, np.array([3, 0], np.int32), taken, range(layer, layer + 1))
    after = {page: bytes_of(pool, page) for page in before}
    assert after == before | {1: before[2], 3: before[5]}


def classes() -> dict[str, tuple[str, list[str]]]:
    """Every class of SGLang's caches that looks like a pool: its module, and what it inherits from."""
    found = {}
    for path in sorted(ROOT.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                found[node.name] = (path.stem, bases)
    return {
        name: given
        for name, given in found.items()
        if "Host" not in name  # its own host tier's
        and (
            name.endswith(("Pool", "PoolFP4", "PoolMXFP8", "KVCache"))
            or set(_above(name, found)) & {"KVCache", "MambaPool"}
        )
    }


def _above(name: str, found: dict[str, tuple[str, list[str]]]) -> list[str]:
    bases = found.get(name, ("", []))[1]
    return [*bases, *(above for base in bases for above in _above(base, found))]


def test_every_pool_class_is_served_or_refused_by_name() -> None:
    served = {name.partition(" ")[0].rstrip(",") for name in SERVED}
    known = served | set(REFUSED) | NO_PAGES | OF_REQUESTS
    assert sorted(set(classes()) - known) == []
    assert not served & set(REFUSED)
    assert sorted(set(REFUSED) - set(classes())) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_pool_that_cannot_be_described_is_refused_by_its_name(name: str) -> None:
    kind = getattr(importlib.import_module(f"sglang.srt.mem_cache.{classes()[name][0]}"), name)
    pool = kind.__new__(kind)
    wrap = state_pool if issubclass(kind, pools.MambaPool) else lambda one: device_pool(one, 8)
    with pytest.raises(ConfigError, match=f"device pool {name} is not supported"):
        wrap(pool)
    below = type("Nobodys", (kind,), {})
    with pytest.raises(ConfigError, match="device pool Nobodys is not supported"):
        wrap(below.__new__(below))


def test_layers_with_unlike_arrays_are_there_when_all_of_a_load_is() -> None:
    pool, gate, worker = sparse(), LayerDoneCounter(1, timeout_s=0.01), []
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator, req_to_token_pool=None)
    gate_reads(params, SimpleNamespace(register_hicache_layer_transfer_counter=worker.append), gate)
    assert worker == [gate]
    batch = gate.update_producer()
    gate.set_consumer(batch)
    with pytest.raises(LoadFailed):
        pool.get_key_buffer(2)
    gate.layer_done(batch, 0)
    assert pool.get_key_buffer(2).shape == (48, 2, 16)


def test_which_layer_an_array_is_of_is_in_the_name() -> None:
    """Two settings of which layers have keys of their own make arrays of the same sizes."""
    second, third = (
        device_pool(dsa(skip), 64).shape for skip in ([False, True, False], [False, False, True])
    )
    assert second.arrays == third.arrays and second.numbers() != third.numbers()
    assert device_pool(sparse(), 8).shape.of_layers == (0, 1, 2, 0, 1, 2, 1, 1, 2)


class Unseen(pools.MHATokenToKVPool):  # type: ignore[misc]
    """A class of pools that no release has."""


def test_a_class_that_nobody_has_seen_is_served_by_its_arrays() -> None:
    pool = mha(Unseen)
    assert device_pool(pool, 8).num_pages == PAGES
    pool.k_scale_buffer = [torch.zeros(PAGES * 8 + 8, 2) for _ in range(LAYERS)]
    pool.v_scale_buffer = [torch.zeros(PAGES + 1, 8, 2) for _ in range(LAYERS)]
    ours = device_pool(pool, 8)
    assert [spec.per_page for spec in ours.shape.arrays] == [False, False, False, True]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: setattr(p, "positions", torch.zeros(48)), "its positions is none of the arrays"),
        (lambda p: setattr(p, "extra", {"a": torch.zeros(48)}), "its extra is none of the arrays"),
        (lambda p: setattr(p, "side", SimpleNamespace(t=torch.zeros(3))), "its side.t is none"),
        (lambda p: setattr(p, "v_buffer", p.v_buffer[:2]), "unlike numbers of layers: .*'v': 2"),
        (lambda p: setattr(p, "k_buffer", [b[:16] for b in p.k_buffer]), "not 48 slots of"),
        (lambda p: setattr(p, "k_buffer", [b[:, :1] for b in p.k_buffer]), "not 48 slots of"),
        (lambda p: setattr(p, "kv_scale_buffer", [torch.zeros(7, 2)] * 3), "has 7 rows for 48 slots"),
        (lambda p: setattr(p, "requires_physical_write_loc", True), "slots are not where"),
        (lambda p: setattr(p, "host_transfer_translate", lambda x: x), "slots are not where"),
        (lambda p: [setattr(p, f"{kind}_buffer", None) for kind in "kv"], "none of the arrays"),
    ],
)  # fmt: skip
def test_what_is_not_known_of_a_pool_refuses_it_by_name(change: Callable[[Any], Any], told: str) -> None:
    pool = mha(Unseen)
    change(pool)
    with pytest.raises(ConfigError, match=f"device pool Unseen is not supported.*: .*{told}"):
        device_pool(pool, 8)


def test_layers_with_unlike_arrays_inside_another_pool_are_refused_by_its_name() -> None:
    pool = windows()
    pool.full_kv_pool, pool.page_size = dsa([False, True, False]), 64
    pool.layers_mapping = {layer: (layer, False) for layer in range(LAYERS)} | {LAYERS: (0, True)}
    with pytest.raises(ConfigError, match="pool SWAKVPool is not supported.*3 layers in its full_kv_pool"):
        window_pools(pool)


def test_nvfp4_is_refused_as_its_codes_go_with_scales_that_are_no_pages() -> None:
    pool = mha(dtype=torch.float4_e2m1fn_x2, quant_method=NVFP4KVCacheMethod(LAYERS, "cpu", 8))
    with pytest.raises(ConfigError, match="its quant_method.k_scales_gpu is none of the arrays"):
        device_pool(pool, 8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: p.register_slot_state(SimpleNamespace()), "SimpleNamespace beside them"),
        (lambda p: setattr(p, "mamba_cache", SimpleNamespace(**vars(p.mamba_cache), intermediate_ssm=1)),
         "its intermediate_ssm .* goes with running requests"),
    ],
)  # fmt: skip
def test_states_with_more_than_a_record_has_are_refused(change: Callable[[Any], Any], told: str) -> None:
    pool = states()
    change(pool)
    with pytest.raises(ConfigError, match=told):
        state_pool(pool)


def test_tensors_of_a_class_of_states_that_nobody_has_seen_are_not_left_out() -> None:
    pool = states()
    pool.scales = torch.ones(PAGES + 1)
    with pytest.raises(ConfigError, match="its scales is none of the arrays"):
        state_pool(pool)


@pytest.mark.parametrize("make", [mha, windows, linear, sparse])
def test_pages_in_another_order_of_bytes_have_another_name(make: Callable[[], Any]) -> None:
    """Whatever pool they are inside of: their sizes are the same."""
    assert layout_of(make()) == ""
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        assert layout_of(make()).endswith(":hnd")


def test_which_pool_inside_another_is_in_another_order_is_told() -> None:
    full, window = windows(), windows()
    full.full_kv_pool.kv_cache_layout = window.swa_kv_pool.kv_cache_layout = "hnd"
    assert len({layout_of(full), layout_of(window), layout_of(windows())}) == 3


@pytest.mark.parametrize("conv", [((12, 3),), ((4, 3), (8, 3))])
def test_tails_that_lie_otherwise_in_memory_have_another_name(conv: tuple[tuple[int, ...], ...]) -> None:
    """SGLang's kernels for AMX keep them the other way round, under the same shape."""
    usual, other = states(conv), states(conv)
    _init_amx_conv_state(other.mamba_cache.conv)
    assert [tail.shape for tail in usual.mamba_cache.conv] == [tail.shape for tail in other.mamba_cache.conv]
    assert state_pool(usual).shape.numbers() != state_pool(other).shape.numbers()
