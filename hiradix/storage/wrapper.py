"""A backend around a backend: passes every call on. Subclasses change what they are about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hiradix.storage.protocol import Page, StorageBackend, Traits, asked_chain, asked_tenant
from hiradix.storage.spoilt import Spoilt


class Wrapper(StorageBackend):
    """Owns `inner`; has its traits unless a subclass says otherwise.

    Pages that a subclass notes in `_spoilt` are removed before they are put again.
    """

    def __init__(self, inner: StorageBackend):
        self.inner = inner
        self.traits: Traits = getattr(inner, "traits", Traits())
        self._spoilt = Spoilt()

    def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] = ()) -> int:
        return self.inner.exists(keys, prefix_keys)

    def get(
        self, keys: Sequence[str], into: Sequence[Page], prefix_keys: Sequence[str] | None = None
    ) -> list[bool]:
        return self._get(keys, into, prefix_keys)

    def put(
        self,
        keys: Sequence[str],
        pages: Sequence[Page],
        prefix_keys: Sequence[str] | None = None,
        tenant: str = "",
    ) -> list[bool]:
        return self._put(keys, pages, prefix_keys, tenant)

    def _get(
        self, keys: Sequence[str], into: Sequence[Page], prefix_keys: Sequence[str] | None
    ) -> list[bool]:
        """The inner backend's, with the chain if it asks for that."""
        call: Callable[..., list[bool]] = self.inner.get
        return call(keys, into, **asked_chain(self.inner, prefix_keys))

    def _put(
        self, keys: Sequence[str], pages: Sequence[Page], prefix_keys: Sequence[str] | None, tenant: str
    ) -> list[bool]:
        """The inner backend's, with the chain and the tenant if it asks for those."""
        spoilt = self._spoilt.take(keys)
        if spoilt:
            self.inner.delete(spoilt)
        call: Callable[..., list[bool]] = self.inner.put
        more = asked_chain(self.inner, prefix_keys) | asked_tenant(self.inner, tenant)
        return call(keys, pages, **more)

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys)

    def clear(self) -> None:
        self.inner.clear()

    def close(self) -> None:
        self.inner.close()

    def stats(self) -> Mapping[str, float]:
        return {**getattr(self.inner, "stats", dict)(), **self.own_stats()}

    def own_stats(self) -> Mapping[str, float]:
        """Figures of the wrapper itself."""
        return {}

    def ping(self) -> None:
        getattr(self.inner, "ping", _nothing)()

    def register(self, memory: memoryview) -> None:
        getattr(self.inner, "register", _nothing)(memory)


def _nothing(*_: object) -> None:
    """Stands for an optional call that a backend does not have."""
