"""Pages that lie in memory which this process lends to the store itself: read without the library.

The library copies a whole batch before it answers, so that its pages are out of the processor's caches again
when they are checked. Read here, each is checked right after its copy: 1.2 to 1.4 times as fast, altogether.
The memory stays ours until the library is shut down; that its object may leave meanwhile, the seal tells.
Addresses are the master's word, so only those in that memory's mapping are read.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake.store import ReplicateConfig

from hiradix.storage.kit.registered import Span

_PROBE_BYTES = 64
_MANY_CALLS = 16


class OwnMemory:
    """Addresses of the objects that lie in this process. For one thread at a time, but `find`."""

    def __init__(self) -> None:
        self._endpoint = ""
        self._mapped = range(0)  # addresses around the lent memory that are this process's
        self._num_skipped = _MANY_CALLS

    def learn(self, store: Any, name: str) -> None:
        """Find out how the store calls this process's memory, by an object of random bytes under `name`.

        Where that fails nothing is found later, which costs speed.
        """
        self._endpoint = ""
        how, probe = ReplicateConfig(), secrets.token_bytes(_PROBE_BYTES)
        how.preferred_segment = store.get_hostname()
        if store.put(name, probe, how) == 0:
            for buffer in _buffers(store.batch_get_replica_desc([name]).get(name, ())):
                if _bytes_at(buffer.buffer_address) == probe:
                    self._mapped = _mapping_of(buffer.buffer_address)
                    self._endpoint = buffer.transport_endpoint
        store.remove(name, True)

    def find(self, store: Any, names: Sequence[str], num_bytes: Sequence[int]) -> dict[int, int]:
        """Addresses of the objects that are here and of that length, by their places in `names`.

        One question to the master; left out for some calls where most objects were elsewhere.
        """
        if not self._endpoint or not names:
            return {}
        if self._num_skipped < _MANY_CALLS:
            self._num_skipped += 1
            return {}
        found = store.batch_get_replica_desc(names)
        own: dict[int, int] = {}
        for index, (name, length) in enumerate(zip(names, num_bytes, strict=True)):
            for replica in found.get(name, ()):
                address = self._own_address(replica, length)
                if address is not None:
                    own[index] = address
        if 2 * len(own) < len(names):
            self._num_skipped = 0
        return own

    def _own_address(self, replica: Any, num_bytes: int) -> int | None:
        """The address of a copy of that length, if it is in memory of ours."""
        if not replica.is_memory_replica():
            return None
        buffer = replica.get_memory_descriptor().buffer_descriptor
        begin: int = buffer.buffer_address
        inside = self._mapped.start <= begin and begin + num_bytes <= self._mapped.stop
        own = inside and buffer.size == num_bytes and buffer.transport_endpoint == self._endpoint
        return begin if own else None


def copy_out(address: int, spans: Sequence[Span]) -> None:
    """Copy what lies at `address` to `spans`, one after the other."""
    for start, length in spans:
        ctypes.memmove(start, address, length)
        address += length


def _buffers(replicas: Sequence[Any]) -> list[Any]:
    """Addresses of copies in memory."""
    return [
        replica.get_memory_descriptor().buffer_descriptor
        for replica in replicas
        if replica.is_memory_replica()
    ]


def _mapping_of(address: int) -> range:
    """The addresses that this process has in one piece with `address`; none where it cannot be asked."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return range(0)
    for line in lines:
        first, _, last = line.split(" ", 1)[0].partition("-")
        found = range(int(first, 16), int(last, 16))
        if address in found:
            return found
    return range(0)


def _bytes_at(address: int) -> bytes:
    """Bytes of this process's memory at an address; none where that is not its own, or cannot be read."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return os.pread(memory.fileno(), _PROBE_BYTES, address)
    except OSError:
        return b""
