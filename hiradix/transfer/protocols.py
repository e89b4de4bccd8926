"""What the controller needs of pools and of what copies between them. `hiradix.memory` has it as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hiradix.transfer.jobs import Pages
from hiradix.tree.hashing import PageRows

HashPages = Callable[[PageRows], list[bytes]]
Clock = Callable[[], float]


class PoolShape(Protocol):
    @property
    def num_layers(self) -> int: ...


class DevicePoolLike(Protocol):
    @property
    def shape(self) -> PoolShape: ...

    @property
    def device(self) -> Any: ...

    def register_layer_transfer_counter(self, counter: Any, /) -> None: ...


class HostPoolLike(Protocol):
    @property
    def page_bytes(self) -> int: ...

    def page_views(self, page: int, /) -> list[memoryview]: ...


class TransportLike(Protocol):
    """Copies pages between pools on the current stream; `layers` None means all."""

    def copy_pages(
        self, src: Any, dst: Any, src_pages: Pages, dst_pages: Pages, layers: range | None = None, /
    ) -> None: ...
