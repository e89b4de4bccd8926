"""Pools of known bytes on a device, with twins on the CPU that say what a copy must have made of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hiradix.memory import CacheShape, DevicePool, HostPool, TorchTransport, Transport
from tests.memory.pool_cases import contents, device_pool, host_pool


@dataclass(frozen=True)
class Pair:
    """A device pool and a host pool, and CPU twins of both that the torch transport copies between."""

    device: DevicePool
    host: HostPool
    twin: DevicePool
    host_twin: HostPool

    def write(self, transport: Transport, device_pages: np.ndarray, host_pages: np.ndarray) -> None:
        transport.copy_pages(self.device, self.host, device_pages, host_pages, None)
        TorchTransport().copy_pages(self.twin, self.host_twin, device_pages, host_pages, None)

    def load(
        self, transport: Transport, host_pages: np.ndarray, device_pages: np.ndarray, layers: range | None
    ) -> None:
        transport.copy_pages(self.host, self.device, host_pages, device_pages, layers)
        TorchTransport().copy_pages(self.host_twin, self.twin, host_pages, device_pages, layers)

    def assert_same(self) -> None:
        """Every byte of both pools is that of its twin, those that no copy was about too."""
        settle(self.device.device)
        assert torch.equal(self.host.buffer, self.host_twin.buffer), "the host pools differ"
        for seen, want in zip(contents(self.device), contents(self.twin), strict=True):
            assert torch.equal(seen.cpu(), want), "the device pools differ"


def make_pair(
    shape: CacheShape, num_pages: int, device: torch.device, layout: str = "page_first", page_size: int = 4
) -> Pair:
    """Pools of random bytes, `num_pages` pages each."""
    twin = device_pool(shape, num_pages, 1, page_size)
    host_twin = host_pool(shape, num_pages, layout, 9, page_size)
    pool = DevicePool(shape, num_pages, page_size, device)
    for array in range(len(shape.arrays)):
        for own, other in zip(pool.layer_views(array), twin.layer_views(array), strict=True):
            own.view(torch.uint8).copy_(other.view(torch.uint8))
    host = HostPool(shape, num_pages, page_size, layout=layout, device=device)
    host.buffer.copy_(host_twin.buffer)
    settle(device)
    return Pair(pool, host, twin, host_twin)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
