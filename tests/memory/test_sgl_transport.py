"""SGLang's kernels as a transport, with a stand-in for the package: every call by its documented keywords."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from hiradix.memory import LAYOUTS, KVShape, TorchTransport, choose
from hiradix.memory.sgl_transport import SglKernelTransport, find_kernels
from tests.memory import sgl_kernels
from tests.memory.pool_cases import SHAPES, contents, device_pool, host_pool

NUM_PAGES = 5
SERVED = {"mha", "mha_one_layer", "mla"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_copy_is_what_torch_copies(name: str, layout: str) -> None:
    shape = SHAPES[name]
    device, twin = (device_pool(shape, NUM_PAGES, 1) for _ in range(2))
    host, reference = (host_pool(shape, NUM_PAGES, layout, 2) for _ in range(2))
    transport, torch_copy = SglKernelTransport(sgl_kernels, TorchTransport()), TorchTransport()
    sgl_kernels.calls.clear()
    last = range(shape.num_layers - 1, shape.num_layers)
    device_pages, host_pages, into = np.array([5, 1, 2], np.int32), np.array([0, 4, 2]), np.array([3, 4, 1])
    for layers, at in ((None, host_pages), (last, np.array([3, 1, 0]))):
        transport.copy_pages(device, host, device_pages, at, layers)
        torch_copy.copy_pages(device, reference, device_pages, at, layers)
        assert host.buffer.equal(reference.buffer)
    for layers in (None, last):
        transport.copy_pages(host, device, host_pages, into, layers)
        torch_copy.copy_pages(reference, twin, host_pages, into, layers)
        assert all(seen.equal(want) for seen, want in zip(contents(device), contents(twin), strict=True))
    assert bool(sgl_kernels.calls) == (name in SERVED and layout in ("layer_first", "page_first"))


def test_which_kernels_are_called() -> None:
    for name, layout, want in (
        ("mha", "page_first", ["all_layer_lf_pf"] + ["per_layer_pf_lf"] * 3),
        ("mha", "layer_first", ["all_layer"] + ["per_layer"] * 3),
        ("mla", "page_first", ["all_layer_mla_lf_pf"] + ["per_layer_mla_pf_lf"] * 3),
        ("mla", "layer_first", ["all_layer_mla"] + ["per_layer_mla"] * 3),
    ):
        device, host = device_pool(SHAPES[name], 2, 1), host_pool(SHAPES[name], 2, layout, 2)
        transport, one = SglKernelTransport(sgl_kernels, TorchTransport()), np.array([1])
        sgl_kernels.calls.clear()
        transport.copy_pages(device, host, one, one, None)
        transport.copy_pages(host, device, one, one, None)
        assert sgl_kernels.calls == want


def test_odd_rows_and_empty_lists_never_reach_the_kernels() -> None:
    shape = KVShape(2, 1, 3, 3, torch.bfloat16)
    device, host = device_pool(shape, 2, 1), host_pool(shape, 2, "page_first", 2)
    transport, none = SglKernelTransport(sgl_kernels, TorchTransport()), np.array([], np.int64)
    sgl_kernels.calls.clear()
    transport.copy_pages(device, host, np.array([1]), np.array([1]), None)
    transport.copy_pages(device, host, none, none, None)
    assert sgl_kernels.calls == []


def test_the_package_is_found_when_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", types.ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.kvcacheio", sgl_kernels)
    assert find_kernels() is sgl_kernels
    monkeypatch.setattr(choose, "_kernel", lambda: None)
    monkeypatch.setattr(choose, "_copy_engines", lambda: None)
    assert choose.make_transport("kernel", "cuda").name == "sgl_kernel"
    assert choose.make_transport("auto", "cuda").name == "sgl_kernel"
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    monkeypatch.setitem(sys.modules, "sgl_kernel.kvcacheio", None)
    assert find_kernels() is None
