"""A stand-in for a backend that has not been reached, so that wrappers around it can be checked."""

from __future__ import annotations

from collections.abc import Sequence

from hiradix.errors import StorageError
from hiradix.storage.batch import Batch
from hiradix.storage.protocol import Page, StorageBackend, Traits


class NotJoined(StorageBackend):
    """A backend whose calls raise StorageError, but `close`, which does nothing. traits: the real one's."""

    def __init__(self, traits: Traits):
        self.traits = traits

    def exists(self, batch: Batch) -> int:
        raise _fault()

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        raise _fault()

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        raise _fault()

    def delete(self, keys: Sequence[str]) -> None:
        raise _fault()

    def clear(self) -> None:
        raise _fault()

    def ping(self) -> None:
        raise _fault()

    def close(self) -> None:
        return None


def _fault() -> StorageError:
    return StorageError("the store is not joined")
