"""What only a GPU's pools show of the SGLang adapter, with stand-ins for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.adapters.sglang import cache_factory
from hiradix.errors import ConfigError
from hiradix.prefix_cache import ModelIdentity
from hiradix.prefix_cache.allocator_ports import AllocatorPort
from hiradix.prefix_cache.slots import SlotTable

PAGES, SIZE, HEADS, KEY, VALUE, LAYERS = 5, 4, 2, 8, 6, 3


class MHATokenToKVPool:
    """SGLang's, of `PAGES` pages and the dummy's, in the order of bytes that `layout` names.

    spare: pages of the buffers that the pool's size leaves out: address space without memory.
    """

    is_quantized_kv_cache = False
    dtype = torch.float32

    def __init__(self, layout: str, spare: int = 0):
        self.size, self.page_size, self.kv_cache_layout = PAGES * SIZE, SIZE, layout
        self.head_num, self.head_dim, self.v_head_dim = HEADS, KEY, VALUE
        count = PAGES + 1 + spare
        self.k_buffer = [self._random(count, KEY) for _ in range(LAYERS)]
        self.v_buffer = [self._random(count, VALUE) for _ in range(LAYERS)]

    def _random(self, count: int, width: int) -> torch.Tensor:
        shapes = {
            "nhd": (count * SIZE, HEADS, width),
            "hnd": (count, HEADS, SIZE, width),
            "vectorized_5d": (count, HEADS, width // 2, SIZE, 2),
        }
        return torch.randn(shapes[self.kv_cache_layout])


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "vectorized_5d"])
def test_a_page_is_its_bytes_in_every_layout(layout: str, spare: int) -> None:
    own = MHATokenToKVPool(layout, spare)
    pool = cache_factory.device_pool(own, SIZE)
    assert pool.num_pages == PAGES, "pages without memory were counted"
    for array, buffers in enumerate((own.k_buffer, own.v_buffer)):
        for seen, buffer in zip(pool.layer_views(array), buffers, strict=True):
            for page in range(PAGES + 1):
                entries = buffer.reshape(PAGES + 1 + spare, -1)[page]
                assert seen[page].data_ptr() == entries.data_ptr()
                assert torch.equal(seen[page].reshape(-1), entries)


def identity(layout: str = "nhd", path: str = "m", **given: Any) -> ModelIdentity:
    """Whose pages an SGLang has that was started with these flags."""
    kvcache = MHATokenToKVPool(layout)
    allocator = SimpleNamespace(get_kvcache=lambda: kvcache)
    params = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, attn_tp_cache_group=None, tp_cache_group=None, pp_rank=0,
        pp_size=1,
    )  # fmt: skip
    flags = SimpleNamespace(served_model_name="m", model_path=path, revision="r", **given)
    return cache_factory._identity(SimpleNamespace(params=params), flags)


def test_pages_of_another_order_of_bytes_have_another_name() -> None:
    assert identity("nhd").revision == "m@r:torch.float32"
    assert identity("hnd").revision == "m@r:torch.float32:hnd"


def test_a_revision_says_nothing_of_the_weights_in_a_folder(tmp_path: Path) -> None:
    names = set()
    for weights in (b"one", b"two"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        names.add(identity(path=str(tmp_path)).revision)
    assert len(names) == 2


def test_the_same_weights_run_otherwise_have_another_name(tmp_path: Path) -> None:
    """Flags under which one and the same folder computes other KV."""
    scales = [tmp_path / name for name in ("one", "two")]
    for file in scales:
        file.write_text(file.name)
    rows: list[dict[str, Any]] = [
        {"json_model_override_args": '{"rope_scaling": {"factor": 2}}'},
        {"json_model_override_args": '{"rope_scaling": {"factor": 4}}'},
        {"quantization": "fp8"},
        {"quantization": "awq"},
        {"torchao_config": "int8dq"},
        {"modelopt_quant": "fp8"},
        {"quantization_param_path": str(scales[0])},
        {"quantization_param_path": str(scales[1])},
        {"load_format": "dummy"},
    ]
    usual = {"json_model_override_args": "{}", "quantization": None, "load_format": "auto"}
    assert identity(**usual) == identity()
    names = {identity(**usual | row).revision for row in rows}
    assert len(names | {identity().revision}) == 1 + len(rows)
    with pytest.raises(ConfigError, match="--json-model-override-args"):
        identity(json_model_override_args="[1]")


@pytest.mark.parametrize("flag", ["--pp-size", "--attn-cp-size", "--dcp-size"])
def test_ranks_that_cannot_agree_are_refused_over_a_host_tier(flag: str) -> None:
    def refuse(hierarchical: bool) -> None:
        asked = {"--pp-size": 1, "--attn-cp-size": 1, "--dcp-size": 1, flag: 2}
        context = SimpleNamespace(
            params=SimpleNamespace(pp_size=asked["--pp-size"], attn_cp_size=asked["--attn-cp-size"]),
            is_hybrid_ssm=False,
            is_hybrid_swa=False,
            enable_hierarchical_cache=hierarchical,
            tp_worker=None,
            server_args=None,
        )
        cache_factory._refuse_models(context, SimpleNamespace(dcp_size=asked["--dcp-size"]))

    refuse(False)
    with pytest.raises(ConfigError, match=f"^{flag} 2 with --enable-hierarchical-cache is not supported"):
        refuse(True)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str, bool]]:
    """Every copy to another device: (from pinned memory, where to, without waiting)."""
    pinned: set[int] = set()
    made: list[tuple[bool, str, bool]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.add(tensor.data_ptr())
        return tensor

    def to(tensor: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
        made.append((tensor.data_ptr() in pinned, str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return made


@pytest.mark.parametrize("pages", [[2, 1], list(range(1, 200))])
def test_slots_go_to_a_gpu_without_waiting_for_it(
    pages: list[int], uploads: list[tuple[bool, str, bool]]
) -> None:
    slots = SlotTable(200, 64, "cuda").of(np.array(pages, np.int32))
    assert uploads == [(True, "cuda", True)]
    assert slots[:65].tolist() == [*range(pages[0] * 64, pages[0] * 64 + 64), pages[1] * 64]


def test_freed_pages_go_to_a_gpu_without_waiting_for_it(
    uploads: list[tuple[bool, str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that follow on each other are there already."""
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda end, device: arange(end))
    freed: list[int] = []
    allocator = SimpleNamespace(
        device="cuda", size=64, free_page_ids=lambda page_ids: freed.extend(page_ids.tolist())
    )
    port = AllocatorPort(allocator, 4)
    port.free_pages(np.array([4, 5, 6], np.int32))
    assert freed == [4, 5, 6] and uploads == []
    port.free_pages(np.array([3, 1], np.int32))
    assert freed == [4, 5, 6, 3, 1] and uploads == [(True, "cuda", True)]
