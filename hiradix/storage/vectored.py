"""Whole reads and writes of several buffers, straight from and into the caller's memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from os import preadv, pwritev

Buffer = memoryview | bytearray | bytes
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write for which the disk, a quota or a limit has no room."""
IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024) if "SC_IOV_MAX" in os.sysconf_names else 1024


def read_into(fd: int, buffers: Sequence[Buffer], offset: int = 0) -> int:
    """Fill `buffers` from `offset`; bytes read, fewer only at the end of the file. Raises OSError."""
    return _transfer(preadv, fd, buffers, offset)


def write_from(fd: int, buffers: Sequence[Buffer], offset: int = 0) -> int:
    """Write all of `buffers` at `offset`; their bytes. Raises OSError."""
    return _transfer(pwritev, fd, buffers, offset)


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, buffers: Sequence[Buffer], offset: int
) -> int:
    left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    done = 0
    while left:
        moved = call(fd, left[:IOV_MAX], offset + done)
        if moved == 0:
            break
        done += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]
    return done
