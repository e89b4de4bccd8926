"""A storage backend that misbehaves on demand, in the process that uses it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hiradix.errors import StorageError
from hiradix.storage import Page, StorageBackend, StorageContext

HANG_S = 3600.0


class Naughty(StorageBackend):
    """mode: "" behaves; "hang" never answers; "raise" fails each call; "lie" gives back other bytes."""

    mode = ""

    def __init__(self, context: StorageContext) -> None:
        self._pages: dict[str, bytes] = {}

    def _misbehave(self) -> None:
        if self.mode == "hang":
            time.sleep(HANG_S)
        if self.mode == "raise":
            raise StorageError("as told")

    def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] = ()) -> int:
        self._misbehave()
        return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        self._misbehave()
        for key, page in zip(keys, into):
            data = self._pages[key]
            if self.mode == "lie":
                data = bytes(len(data) // 2) + data[len(data) // 2 :]
            page[0][:] = data
        return [True] * len(keys)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        self._misbehave()
        for key, page in zip(keys, pages):
            self._pages.setdefault(key, bytes(page[0]))
        return [True] * len(keys)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._pages.pop(key, None)

    def clear(self) -> None:
        self._pages.clear()

    def close(self) -> None:
        """Nothing to let go of."""
