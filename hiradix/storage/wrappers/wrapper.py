"""A backend around a backend: passes every call on. Subclasses change what they are about."""

from __future__ import annotations

import dataclasses
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hiradix.storage.batch import Batch
from hiradix.storage.guard.breaker import NO_TROUBLES, Troubles
from hiradix.storage.guard.calls import as_answered
from hiradix.storage.kit.damaged_keys import DamagedKeys
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.protocol import Page, StorageBackend, Traits, page_bytes


class Wrapper(StorageBackend):
    """Owns `inner`; has its traits unless a subclass says otherwise.

    Pages that a subclass notes in `_damaged_keys` are removed before they are put again.
    """

    def __init__(self, inner: StorageBackend):
        self.inner = inner
        self.traits: Traits = getattr(inner, "traits", Traits())
        self._damaged_keys = DamagedKeys()

    def exists(self, batch: Batch) -> int:
        return self.inner.exists(batch)

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        return self.inner.get(batch, into)

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        damaged = self._damaged_keys.take(batch)
        if damaged and not self.read_only:
            self.inner.delete(damaged)
        return self.inner.put(batch, pages)

    @property
    def read_only(self) -> bool:
        """Whether the inner backend takes no pages, as its folder cannot be written."""
        return bool(getattr(self.inner, "read_only", False))

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys)

    def forget_tenant(self, tenant: str) -> int | None:
        found: int | None = getattr(self.inner, "forget_tenant", _nothing)(tenant)
        return found

    def forget_behind(self, batch: Batch) -> int | None:
        found: int | None = getattr(self.inner, "forget_behind", _nothing)(batch)
        return found

    def scrub(self) -> None:
        getattr(self.inner, "scrub", _nothing)()

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

    @property
    def troubles(self) -> Troubles:
        """The troubles of the stores within."""
        found: Troubles = getattr(self.inner, "troubles", NO_TROUBLES)
        return found

    @property
    def reads_in_part(self) -> bool:
        """Whether some of the stores within can be read now, and others cannot."""
        return bool(getattr(self.inner, "reads_in_part", False))

    def when_joined(self, call: Callable[[Any], None]) -> None:
        """`call` with each store within that is joined later."""
        getattr(self.inner, "when_joined", _nothing)(call)


class CodingWrapper(Wrapper):
    """Pages are stored as something else, in one buffer each. Subclasses say what. Thread-safe.

    What cannot be read is a miss, and is replaced when it is put again.
    """

    def __init__(self, inner: StorageBackend):
        super().__init__(inner)
        self.traits = dataclasses.replace(self.traits, in_place=False)
        self._lock = threading.Lock()
        self._num_damaged = 0

    @abstractmethod
    def _most_bytes(self, num_bytes: int) -> int:
        """The longest that a page of so many bytes is stored as."""

    @abstractmethod
    def _pack(self, key: str, page: Page) -> bytes | bytearray:
        """The bytes to store for a page."""

    @abstractmethod
    def _unpack(self, key: str, stored: memoryview, page: Page) -> MissReason | None:
        """Fill the page with what `stored`, of `_most_bytes`, begins with; why not, if it makes no such page."""

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        stored = [memoryview(bytearray(self._most_bytes(page_bytes(page)))) for page in into]
        ok = super().get(batch, [[view] for view in stored])
        flags, damaged = list(ok), Counter[MissReason]()
        for index, (good, key, view, page) in enumerate(zip(ok, batch, stored, into, strict=True)):
            why = self._unpack(key, view, page) if good else None
            if why is not None:
                flags[index] = False
                damaged[why] += 1
                self._note_damaged(key)
        return as_answered(flags, ok, more=damaged)

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        packed = [[memoryview(self._pack(key, page))] for key, page in zip(batch, pages, strict=True)]
        return super().put(batch, packed)

    def _note_damaged(self, key: str) -> None:
        self._damaged_keys.note([key])
        with self._lock:
            self._num_damaged += 1
            is_first = self._num_damaged == 1
        if is_first:
            self._warn_of_first()

    def _warn_of_first(self) -> None:
        """The first page that cannot be read was just met."""


def _nothing(*_: object) -> None:
    """Stands for an optional call that a backend does not have."""
