"""A backend around a backend: passes every call on. Subclasses change what they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hiradix.storage.protocol import Page, StorageBackend, Traits


class Wrapper(StorageBackend):
    """Owns `inner`; has its traits unless a subclass says otherwise."""

    def __init__(self, inner: StorageBackend):
        self.inner = inner
        self.traits: Traits = getattr(inner, "traits", Traits())

    def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] = ()) -> int:
        return self.inner.exists(keys, prefix_keys)

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        return self.inner.get(keys, into)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        return self.inner.put(keys, pages)

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
