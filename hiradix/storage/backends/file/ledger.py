"""One lock and one number per directory: how many bytes its page files take, agreed by all processes in it."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hiradix.errors import StorageError
from hiradix.storage.kit.dir_lock import DirLock

_RECORD = struct.Struct("<4sIQ")
_MAGIC = b"HRXU"


class Ledger(DirLock):
    """The directory's lock (threads and processes) and, while one holds it, its byte count.

    Bytes are entered before they are written and taken out after they are gone, so a crash leaves the count
    too high, never too low; `recount` mends it.
    """

    read_only = False

    def read(self) -> int | None:
        """The byte count; None when there is none yet or it is damaged. Call with the lock held."""
        raw = os.pread(self._fd, _RECORD.size, 0)
        if len(raw) != _RECORD.size:
            return None
        magic, checksum, num_bytes = _RECORD.unpack(raw)
        return int(num_bytes) if magic == _MAGIC and checksum == _checksum(num_bytes) else None

    def write(self, num_bytes: int) -> None:
        """Set the byte count. Call with the lock held."""
        os.pwrite(self._fd, _RECORD.pack(_MAGIC, _checksum(num_bytes), num_bytes), 0)


class NoLedger(Ledger):
    """The ledger of a directory that can only be read: taking its lock raises StorageError."""

    read_only = True

    def __init__(self, path: Path):
        self._path = path

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        raise StorageError(f"{self._path.parent} cannot be written")
        yield

    def is_in_place(self) -> bool:
        """Whether the directory is there."""
        return self._path.parent.is_dir()

    def close(self) -> None:
        """There is nothing to let go of."""


def _checksum(num_bytes: int) -> int:
    return zlib.crc32(_MAGIC + num_bytes.to_bytes(8, "little"))
