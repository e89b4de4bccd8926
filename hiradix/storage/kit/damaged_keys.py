"""Pages that were found damaged in a store: they are removed when they are put again, not before.

A store keeps what it has when a page is put again, so a damaged one would stay for ever. It is not removed
when it is read: what was damaged may have been the reading.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

MAX_KEYS = 1 << 16


class DamagedKeys:
    """Keys of such pages, at most `MAX_KEYS`, oldest out. Thread-safe."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, keys: Iterable[str]) -> None:
        """Remember keys whose pages were read and are bad."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)

    def take(self, keys: Sequence[str]) -> list[str]:
        """The keys among `keys` that must be deleted before they are put; they are forgotten here."""
        if not self._keys:
            return []
        with self._lock:
            found = [key for key in dict.fromkeys(keys) if key in self._keys]
            for key in found:
                del self._keys[key]
            return found
