"""Whole reads and writes of several buffers, straight from and into the caller's memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from os import preadv, pwritev

Buffer = memoryview | bytearray | bytes
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write for which the disk, a quota or a limit has no room."""
WRITE_CALL_BYTES = 1 << 20
"""Longer writes make the page cache ask for blocks of memory of 2 MiB and more. Where memory is fragmented,
or a virtual machine has to get it from its host, the same bytes then cost six times as much."""
IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024) if "SC_IOV_MAX" in os.sysconf_names else 1024


def read_into(fd: int, buffers: Sequence[Buffer], offset: int = 0, num_bytes: int = 0) -> int:
    """Fill `buffers` from `offset`; bytes read, fewer only at the end of the file. Raises OSError.

    num_bytes: of all buffers, where the caller knows it.
    """
    done = preadv(fd, buffers, offset) if 0 < len(buffers) <= IOV_MAX else 0
    if done and done == (num_bytes or sum([memoryview(buffer).nbytes for buffer in buffers])):
        return done
    pending = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    _advance(pending, done)
    while pending:
        moved = preadv(fd, pending[:IOV_MAX], offset + done)
        if moved == 0:
            break
        done += moved
        _advance(pending, moved)
    return done


def write_from(fd: int, buffers: Sequence[Buffer], offset: int = 0) -> int:
    """Write all of `buffers` at `offset`; their bytes. Raises OSError."""
    pending = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    done = 0
    while pending:
        moved = pwritev(fd, _leading(pending, WRITE_CALL_BYTES), offset + done)
        if moved == 0:
            break
        done += moved
        _advance(pending, moved)
    return done


def _leading(views: Sequence[memoryview], limit_bytes: int) -> list[memoryview]:
    """The first `limit_bytes` of `views`, as far as one call takes them."""
    found: list[memoryview] = []
    for view in views[:IOV_MAX]:
        found.append(view[:limit_bytes])
        limit_bytes -= len(found[-1])
        if not limit_bytes:
            break
    return found


def _advance(pending: list[memoryview], moved: int) -> None:
    """Take `moved` bytes off the front."""
    num_whole = 0
    while num_whole < len(pending) and moved >= len(pending[num_whole]):
        moved -= len(pending[num_whole])
        num_whole += 1
    del pending[:num_whole]
    if moved:
        pending[0] = pending[0][moved:]
