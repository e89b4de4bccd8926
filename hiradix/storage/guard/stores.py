"""The guarded stores of a cache's components, and what is asked of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hiradix.storage.guard.breaker import BreakerState, Troubles
from hiradix.storage.kit.meters import Histogram, Op
from hiradix.storage.protocol import Page, StorageBackend

WhenJoined = Callable[[Any], None]
"""Called with the joined `Stores` before they serve; on the thread that joined them."""


class PageStore(Protocol):
    """What workers ask of the guarded store of one component. It answers, it never raises: a count of leading
    keys, or a flag for each page. Keys are a `Batch`, or a list of which nothing else is known."""

    def exists(self, keys: Sequence[str], /) -> int: ...

    def get(self, keys: Sequence[str], into: Sequence[Page], /) -> list[bool]: ...

    def put(self, keys: Sequence[str], pages: Sequence[Page], /) -> list[bool]: ...

    def register(self, memory: memoryview, /) -> bool: ...

    @property
    def wants_computed(self) -> bool:
        """Whether it is to get pages that another rank stores as well, to compare them."""
        ...

    @property
    def troubles(self) -> Troubles: ...

    def stats(self) -> Mapping[str, float]: ...


class StoragePart(PageStore, Protocol):
    """The guarded store of one component as its owner has it: a `GuardedStorage`, or one joined later."""

    @property
    def backend(self) -> StorageBackend: ...

    @property
    def state(self) -> BreakerState: ...

    @property
    def is_joined(self) -> bool: ...

    @property
    def may_read(self) -> bool: ...

    @property
    def reads_in_part(self) -> bool: ...

    @property
    def frees_deleted(self) -> bool: ...

    @property
    def is_read_only(self) -> bool: ...

    def refuse(self, num_pages: int) -> list[bool]: ...

    def when_joined(self, call: WhenJoined) -> None: ...

    def delete(self, keys: Sequence[str]) -> bool: ...

    def clear(self) -> bool: ...

    def ping(self) -> bool: ...

    def close(self, timeout_s: float = 5.0) -> None: ...

    def histograms(self) -> Mapping[Op, Histogram]: ...


class Stores:
    """The guarded stores of one cache's components, the backbone's first. Owns them.

    Pages are asked of `parts`, one for each component; what is here is about all of them together.
    """

    def __init__(self, guards: Sequence[StoragePart], names: Sequence[str] = ("",)):
        self.parts: tuple[PageStore, ...] = tuple(guards)
        self.guards = tuple(guards)
        self._names = tuple(names)

    @property
    def is_joined(self) -> bool:
        """Whether they serve: all components are joined at once."""
        return self.guards[0].is_joined

    def when_joined(self, call: WhenJoined) -> None:
        """`call` with the stores: now, or once when they are joined. Later with each store within them that
        is joined then."""
        if not self.is_joined:
            self.guards[0].when_joined(call)
            return
        call(self)
        for guard in self.guards:
            getattr(guard.backend, "when_joined", lambda _: None)(call)

    @property
    def backend(self) -> StorageBackend:
        """The backbone's."""
        return self.guards[0].backend

    @property
    def state(self) -> BreakerState:
        """Of the breakers that all share."""
        return self.guards[0].state

    def clear(self) -> bool:
        """Forget all pages of these fingerprints; False when one of the backends failed."""
        return all([guard.clear() for guard in self.guards])

    def ping(self) -> bool:
        """Whether all of it can be reached now."""
        return all([guard.ping() for guard in self.guards])

    def close(self, timeout_s: float = 5.0) -> None:
        """Close all backends, waiting at most `timeout_s` for each. Idempotent."""
        for guard in reversed(self.guards):
            guard.close(timeout_s)

    def stats(self) -> Mapping[str, float]:
        """Figures of all calls together; those of a further backend as `backend_<component>_*`."""
        found = dict(self.guards[0].stats())
        for name, guard in zip(self._names[1:], self.guards[1:], strict=True):
            for figure, value in guard.stats().items():
                if figure.startswith("backend_"):
                    found[f"backend_{name}_{figure.removeprefix('backend_')}"] = value
        return found
