"""What the controller needs of its neighbours. `hiradix.memory` and `hiradix.storage` have it as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hiradix.transfer.jobs import Pages
from hiradix.tree.hashing import PageRows

HashPages = Callable[[PageRows], list[bytes]]
Clock = Callable[[], float]
PrefixKeys = Sequence[str] | None  # of the pages before those of a call; None: not known, or not asked for
Views = Sequence[Sequence[memoryview]]


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


class StorageLike(Protocol):
    """The three calls workers make. Answers are checked, not trusted: hence `object`."""

    def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] = (), /) -> object: ...

    def get(self, keys: Sequence[str], into: Views, prefix_keys: PrefixKeys = None, /) -> object: ...

    def put(self, keys: Sequence[str], pages: Views, prefix_keys: PrefixKeys = None, /) -> object: ...


class TenantStorage(Protocol):
    """The put of storage that says `wants_tenant`: whose pages they are comes last."""

    def put(self, keys: Sequence[str], pages: Views, prefix_keys: PrefixKeys, tenant: str, /) -> object: ...


class PartedStorage(Protocol):
    """Storage with a store for each component of a cache, the backbone's first."""

    @property
    def parts(self) -> Sequence[StorageLike]: ...
