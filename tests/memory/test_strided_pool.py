"""Pools over engines' block tensors: every order of axes, copied both ways against plain indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiradix.errors import ConfigError
from hiradix.memory import HostPool, KVShape, StridedPool, TorchTransport
from hiradix.memory.copy_plan import plan_copies

L, P, S, H, D, DV = 3, 7, 4, 2, 8, 6
SHAPE = KVShape(L, H, D, DV, torch.float32)
# Memory order of the logical axes block, head, token, content: vLLM's on CPU, and NHD and page-major ones.
ORDERS = {"BHNC": (0, 1, 2, 3), "BNHC": (0, 2, 1, 3), "HBNC": (1, 0, 2, 3)}


def blocks(order: tuple[int, ...]) -> torch.Tensor:
    """A layer [P, H, S, D + DV] of distinct numbers whose memory has the axes in `order`."""
    sizes = (P, H, S, D + DV)
    memory = torch.randperm(P * H * S * (D + DV)).float().view([sizes[axis] for axis in order])
    return memory.permute([order.index(axis) for axis in range(4)])


def pool_over(layers: list[torch.Tensor]) -> StridedPool:
    tokens_first = [layer.permute(0, 2, 1, 3) for layer in layers]
    return StridedPool(SHAPE, [[t[..., :D] for t in tokens_first], [t[..., D:] for t in tokens_first]])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_blob"])
@pytest.mark.parametrize("order", ORDERS)
def test_pages_go_to_the_host_and_to_other_blocks(order: str, layout: str) -> None:
    torch.manual_seed(0)
    layers = [blocks(ORDERS[order]) for _ in range(L)]
    before = [layer.clone() for layer in layers]
    device, host = pool_over(layers), HostPool(SHAPE, 5, S, layout=layout)
    out, back = np.array([6, 1, 2]), np.array([3, 4, 0])
    TorchTransport().copy_pages(device, host, out, np.array([0, 4, 2]))
    for layer in range(L):
        TorchTransport().copy_pages(host, device, np.array([0, 4, 2]), back, range(layer, layer + 1))
    for now, was in zip(layers, before, strict=True):
        assert torch.equal(now[back], was[out])
        assert torch.equal(now[[1, 2, 5, 6]], was[[1, 2, 5, 6]])


@pytest.mark.parametrize("order", ORDERS)
def test_planes_are_addresses_of_the_views(order: str) -> None:
    """What the kernel and the copy engines work from: each head's bytes are where the tensor has them."""
    layers = [blocks(ORDERS[order]) for _ in range(L)]
    pool = pool_over(layers)
    for plane, begin in zip(pool.planes(), (0, D), strict=True):
        for page, token, head in ((0, 0, 0), (P - 1, S - 1, H - 1), (3, 1, 1)):
            at = plane.layers[2] + page * plane.page + token * plane.token + head * plane.head
            assert at == layers[2][page, head, token, begin:].data_ptr()
    assert plan_copies(pool, HostPool(SHAPE, 2, S))


@pytest.mark.parametrize("apart", [0, 16])
def test_layers_of_one_allocation_are_one_view(apart: int) -> None:
    """At one distance, and only then; a copy writes the same either way."""
    torch.manual_seed(0)
    step = P * H * S * (D + DV)
    memory = torch.randn(L * step + apart)
    begins = [*range(0, (L - 1) * step, step), (L - 1) * step + apart]
    layers = [memory[begin : begin + step].view(P, H, S, D + DV) for begin in begins]
    pool, host = pool_over(layers), HostPool(SHAPE, 5, S, layout="page_first")
    whole = pool.stacked_view(1)
    assert (whole is None) == bool(apart)
    if whole is not None:
        assert torch.equal(whole, torch.stack(layers).permute(0, 1, 3, 2, 4)[..., D:])
    TorchTransport().copy_pages(pool, host, np.array([6, 1]), np.array([0, 4]))
    for view, layer in zip(host.layer_views(1), layers, strict=True):
        assert torch.equal(view[[0, 4]], layer[[6, 1]].permute(0, 2, 1, 3)[..., D:])


def test_views_that_do_not_fit_are_refused() -> None:
    layers = [blocks(ORDERS["BHNC"]) for _ in range(L)]
    views = [[layer.permute(0, 2, 1, 3)[..., :D] for layer in layers]]
    with pytest.raises(ConfigError, match="views of"):
        StridedPool(SHAPE, views)
    other = [layer.permute(0, 2, 1, 3)[..., D:] for layer in layers]
    with pytest.raises(ConfigError, match="v of layer 1"):
        StridedPool(SHAPE, [*views, [other[0], other[1].half(), other[2]]])
    with pytest.raises(ConfigError, match="strides alike"):
        StridedPool(
            SHAPE, [*views, [other[0], blocks(ORDERS["BNHC"]).permute(0, 2, 1, 3)[..., D:], other[2]]]
        )
