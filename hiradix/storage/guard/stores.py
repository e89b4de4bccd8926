"""The guarded stores of a cache's components, and what is asked of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hiradix.storage.guard.breaker import BreakerState, Troubles
from hiradix.storage.kit.meters import Histogram, Op
from hiradix.storage.protocol import Page, StorageBackend

WhenJoined = Callable[[Any], None]
"""Called with the joined `Stores` before they serve; on the thread that joined them."""


class PageStore(ABC):
    """The guarded store of one component, as workers use it. It never raises: it answers a count of leading
    keys, or a flag for each page. Keys are a `Batch`, or a list of which nothing else is known."""

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> int:
        """The number of leading keys it has."""

    @abstractmethod
    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        """Fill the pages of these keys; True: that one is filled."""

    @abstractmethod
    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store pages under these keys; True: that one is stored."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> bool:
        """Forget these keys; False: some may be there still."""

    @abstractmethod
    def clear(self) -> bool:
        """Forget all pages of this fingerprint; False: some may be there still."""

    @abstractmethod
    def forget_tenant(self, tenant: str) -> int | None:
        """Forget all pages of a tenant: how many there were. None: it cannot tell whose its pages are, or
        failed."""

    @abstractmethod
    def forget_behind(self, keys: Sequence[str]) -> int | None:
        """Forget all pages that continue one of these in its chain: how many there were. None: it cannot tell
        which these are, or failed."""

    @abstractmethod
    def scrub(self) -> bool:
        """Leave no bytes and no names of what was forgotten; False where it failed."""

    @abstractmethod
    def register(self, memory: memoryview) -> bool:
        """Tell it of a host pool's memory, in which pages will lie."""

    @property
    @abstractmethod
    def wants_computed(self) -> bool:
        """Whether it is to get pages that another rank stores as well, to compare them."""

    @property
    def num_adopted(self) -> int:
        """The number of times that pages of others were found to be of these weights; 0 where nothing is
        compared."""
        return 0

    @property
    @abstractmethod
    def troubles(self) -> Troubles:
        """The faults that its breakers have counted."""

    @abstractmethod
    def stats(self) -> Mapping[str, float]:
        """Figures by name."""


class StoragePart(PageStore):
    """The guarded store of one component as its owner has it, who also closes it. Joined, or not there
    yet."""

    @property
    @abstractmethod
    def backend(self) -> StorageBackend:
        """The guarded backend; before it has been reached, one that raises StorageError."""

    @property
    @abstractmethod
    def is_joined(self) -> bool:
        """Whether it serves."""

    @abstractmethod
    def when_joined(self, call: WhenJoined) -> None:
        """`call` with the whole store: before it serves, or at once where it does."""

    @property
    @abstractmethod
    def state(self) -> BreakerState:
        """The worst state of its breakers; open where it is not there yet."""

    @property
    @abstractmethod
    def may_read(self) -> bool:
        """Whether a read would be let through now."""

    @property
    @abstractmethod
    def reads_in_part(self) -> bool:
        """Whether some of the stores within can be read now, and others cannot."""

    @property
    @abstractmethod
    def frees_deleted(self) -> bool:
        """Whether a deleted page's bytes are given back."""

    @property
    @abstractmethod
    def is_read_only(self) -> bool:
        """Whether it takes no pages."""

    @abstractmethod
    def refuse(self, num_pages: int) -> list[bool]:
        """The answer to a put of so many pages where it is read-only, without asking it."""

    @abstractmethod
    def ping(self) -> bool:
        """Whether it can be reached now."""

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> None:
        """Close it, waiting at most `timeout_s`. Idempotent."""

    @abstractmethod
    def histograms(self) -> Mapping[Op, Histogram]:
        """Durations of calls that reached the backend."""


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
        """The state of the breakers, which all parts share."""
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
