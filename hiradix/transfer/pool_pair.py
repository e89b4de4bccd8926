"""A pair of pools that pages move between. The pools' classes need torch; this file does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hiradix.transfer.protocols import PageSource

if TYPE_CHECKING:
    from hiradix.memory.pools import DevicePool, HostPool
    from hiradix.memory.strided_pool import StridedPool
    from hiradix.memory.transport import Transport


@dataclass(frozen=True)
class PoolPair:
    """Two pools of one shape and the copy between them.

    layers: which of the model's layers each of the pools' layers is; None: they are the model's. device_free,
    host_free: the pools' free pages, for `HiCacheController.evict_device` and `evict_host`.
    """

    device: DevicePool | StridedPool
    host: HostPool
    transport: Transport
    layers: Sequence[int] | None = None
    device_free: PageSource | None = None
    host_free: PageSource | None = None

    @property
    def model_layers(self) -> Sequence[int]:
        return range(self.device.shape.num_layers) if self.layers is None else self.layers
