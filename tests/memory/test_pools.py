"""Device and host pools: geometry, the gate, wrapping an engine's buffers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hiradix.errors import ConfigError
from hiradix.memory import DevicePool, HostPool, KVShape
from tests.memory.pool_cases import PAGE_SIZE, SHAPES, host_pool

KV = KVShape(3, 2, 16, 8, torch.bfloat16)


class Recorder:
    """A layer gate that only remembers who waited."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def wait_until(self, layer: int, /) -> None:
        self.layers.append(layer)


def test_device_pool_has_sglang_geometry() -> None:
    pool = DevicePool(KV, 5, PAGE_SIZE)
    assert [tuple(buffer.shape) for buffer in pool.k_buffer] == [(24, 2, 16)] * 3
    assert [tuple(buffer.shape) for buffer in pool.v_buffer] == [(24, 2, 8)] * 3
    assert (pool.size, pool.num_pages, pool.page_limit, pool.dtype) == (20, 5, 6, torch.bfloat16)
    assert not any(buffer.any() for buffer in pool.k_buffer)


def test_getters_wait_on_the_gate() -> None:
    pool, gate = DevicePool(KV, 2, PAGE_SIZE), Recorder()
    pool.get_key_buffer(1)
    pool.register_layer_transfer_counter(gate)
    keys, values = pool.get_kv_buffer(2)
    assert gate.layers == [2, 2] and keys is pool.k_buffer[2] and values is pool.v_buffer[2]
    pool.start_layer = 10
    assert pool.get_value_buffer(11) is pool.v_buffer[1]
    assert gate.layers == [2, 2, 1]
    pool.register_layer_transfer_counter(None)
    pool.get_key_buffer(10)
    assert gate.layers == [2, 2, 1]


def test_latent_pool_serves_values_from_its_rows() -> None:
    pool = DevicePool(SHAPES["mla"], 2, PAGE_SIZE)
    assert tuple(pool.kv_buffer[0].shape) == (12, 1, 72)
    assert tuple(pool.get_value_buffer(0).shape) == (12, 1, 64)
    assert pool.get_value_buffer(0).data_ptr() == pool.get_key_buffer(0).data_ptr()
    with pytest.raises(AssertionError, match="MLAShape has no v array"):
        _ = pool.v_buffer
    foreign = [torch.zeros(12, 1, 72) for _ in range(2)]
    wrapped = DevicePool.wrap_latent(foreign, PAGE_SIZE, kv_lora_rank=64)
    assert wrapped.shape.numbers() == (2, 64, 8)
    with pytest.raises(ConfigError, match="kv_lora_rank 72"):
        DevicePool.wrap_latent(foreign, PAGE_SIZE, kv_lora_rank=72)


def test_wrap_takes_an_engines_buffers_as_they_are() -> None:
    keys = [torch.zeros(20, 2, 16) for _ in range(3)]
    values = [torch.zeros(20, 2, 8) for _ in range(3)]
    pool = DevicePool.wrap(keys, values, PAGE_SIZE)
    assert pool.shape == KVShape(3, 2, 16, 8, torch.float32) and pool.num_pages == 4
    pool.get_key_buffer(1)[7] = 1
    assert keys[1][7].all() and pool.planes()[0].layers[1] == keys[1].data_ptr()


def buffers(count: int, *size: int) -> list[torch.Tensor]:
    return [torch.zeros(*size) for _ in range(count)]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ([], []),
        (buffers(2, 20, 2, 16), buffers(3, 20, 2, 16)),
        (buffers(1, 21, 2, 16), buffers(1, 21, 2, 16)),
        (buffers(1, 4, 2, 16), buffers(1, 4, 2, 16)),
        (buffers(1, 20, 2, 16), buffers(1, 24, 2, 16)),
        (buffers(1, 20, 2, 16), buffers(1, 20, 1, 16)),
        (buffers(1, 20, 32), buffers(1, 20, 32)),
        ([torch.zeros(20, 16, 2).transpose(1, 2)], buffers(1, 20, 2, 16)),
        ([torch.zeros(20, 2, 16), torch.zeros(20, 2, 8)], buffers(2, 20, 2, 16)),
        ([torch.zeros(20, 2, 16, dtype=torch.float16)], buffers(1, 20, 2, 16)),
    ],
)
def test_wrap_refuses_what_does_not_fit(keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="device pool"):
        DevicePool.wrap(keys, values, PAGE_SIZE)


@pytest.mark.parametrize(("pages", "page_size"), [(0, 4), (3, 0)])
def test_device_pool_needs_pages(pages: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match="device pool"):
        DevicePool(KV, pages, page_size)


def test_host_pool_is_exactly_as_large_as_asked() -> None:
    pool = HostPool(KV, 7, PAGE_SIZE)
    assert pool.buffer.untyped_storage().nbytes() == 7 * pool.page_bytes
    assert pool.buffer.data_ptr() % 4096 == 0 and not pool.buffer.any()
    assert pool.size == 28 and not pool.buffer.is_pinned()


def test_host_views_outlive_nothing_but_the_pool() -> None:
    """A view keeps the memory alive, so that a late storage writer never writes into freed memory."""
    pool = host_pool(KV, 3, "page_first", seed=1)
    view = pool.page_views(1)[0]
    data = bytes(view)
    del pool
    assert bytes(view) == data


def test_memory_imports_without_triton() -> None:
    program = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'triton': raise ImportError('triton is not here')\n"
        "sys.meta_path.insert(0, Block())\n"
        "import hiradix.memory as memory, hiradix.triton_kernels\n"
        "assert memory.make_transport('kernel', 'cpu').name == 'torch'\n"
        "assert 'hiradix.triton_kernels.page_copy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150)
